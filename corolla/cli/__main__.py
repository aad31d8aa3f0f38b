"""`python -m corolla.cli`: the `corolla` command, for systems without it on the PATH."""

from corolla.cli import command

command()
