"""`python -m corolla`: the `corolla` command, for where it is not on the PATH."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # The current directory, which -m has put first: a module named deploy there is not Corolla's.
        del sys.path[0]

    from corolla.cli import command

    command()
