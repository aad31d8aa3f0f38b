"""`python -m corolla`: the `corolla` command, for where it is not on the PATH."""

from fl_app.cli import main

if __name__ == "__main__":
    main()
