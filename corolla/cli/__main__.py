"""`python -m fl_app.cli`, for where the installed command is not on the PATH."""

from fl_app.cli import command

command()
