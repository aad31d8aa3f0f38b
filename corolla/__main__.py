"""`python -m corolla`: the `corolla` command, for where it is not on the PATH."""

from fl_app.cli import command

if __name__ == "__main__":
    command()
