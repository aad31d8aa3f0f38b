"""`python -m corolla`: the `corolla` command, for systems without it on the PATH."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # -m puts the current directory first, where a module named deploy would hide Corolla's
        del sys.path[0]

    from corolla.cli import command

    command()
