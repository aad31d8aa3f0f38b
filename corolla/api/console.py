"""Where runs and commands print, and how the `corolla` command was called."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from corolla.experiments.runs import RecordedRun

# in a notebook lines are text too
console = Console(highlight=False, emoji=False, force_jupyter=False)
errors = Console(stderr=True, highlight=False, emoji=False, force_jupyter=False)


def warn(text: str) -> None:
    """Print a warning in one line."""
    errors.print(f"[bold yellow]warning:[/] {escape(text)}", soft_wrap=True)


def say_unfinished(folders: Iterable[Path]) -> None:
    """Name on standard error the runs that a comparison leaves out."""
    for folder in folders:
        errors.print(f"skipped, not finished: {escape(str(folder))}", soft_wrap=True)


def say_partial(runs: Iterable[RecordedRun]) -> None:
    """Name on standard error the runs whose final figures are not of all clients."""
    for run in runs:
        if run.coverage_note:
            warn(f"{run.path}: its final figures are of {run.coverage_note}, and do not compare with those of all")


def command() -> str:
    """Return how this command was called, as its user would type it."""
    called = Path(sys.argv[0])
    found = shutil.which("corolla")
    if called.name == "corolla" and called.is_file() and not (found and Path(found).samefile(called)):
        return shlex.quote(nearby(called))
    return "corolla"


def nearby(path: Path) -> str:
    """Return a path as one types it: relative if it lies under the current directory."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
