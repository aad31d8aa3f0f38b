"""`python -m corolla`: the `corolla` command, for where it is not on the PATH."""

from corolla.cli import command

if __name__ == "__main__":
    command()
