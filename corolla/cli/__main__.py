"""`python -m corolla.cli`, for where the installed command is not on the PATH."""

from corolla.cli import command

command()
