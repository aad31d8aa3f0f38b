"""Consoles of runs and commands, their warnings, and the form in which the `corolla` command was called."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.markup import escape

from corolla.api.log_file import LoggedConsole
from corolla.experiments.runs import RecordedRun

# force_jupyter=False: lines stay text in a notebook
console = LoggedConsole(highlight=False, emoji=False, force_jupyter=False)
# whether a command also prints tracebacks of errors
verbose = False
# whether it writes the events of a run, and nothing else, to standard output
events = False
# whether it opens the page of a run in a browser
opens = False
errors = LoggedConsole(stderr=True, highlight=False, emoji=False, force_jupyter=False)


def show_tracebacks(wanted: bool) -> None:
    """Set whether the command prints tracebacks of the errors that end it."""
    global verbose
    verbose = wanted


def write_events(wanted: bool) -> bool:
    """Set whether the command writes a run's events, and nothing else, to standard output."""
    global events
    events, console.quiet = wanted, wanted or console.quiet
    return wanted


def open_page(wanted: bool) -> bool:
    """Set whether the command opens the page of a run in a browser."""
    global opens
    opens = wanted
    return wanted


# warnings that the command has printed
_warned: set[str] = set()


def begin_warnings() -> None:
    """Forget the printed warnings, at the start of a command."""
    _warned.clear()


def warn(text: str) -> None:
    """Print a warning in one line, once per command: the runs of a sweep share most warnings."""
    if text in _warned:
        return
    _warned.add(text)
    errors.print(f"[bold yellow]warning:[/] {escape(text)}", soft_wrap=True)


def say_unfinished(folders: Iterable[Path]) -> None:
    """List on standard error the runs that a comparison skips."""
    for folder in folders:
        errors.print(f"skipped, not finished: {escape(str(folder))}", soft_wrap=True)


def say_partial(runs: Iterable[RecordedRun]) -> None:
    """Warn of runs with clients missing from their final figures."""
    for run in runs:
        if run.coverage_note:
            warn(
                f"{run.path}: its final figures cover {run.coverage_note}; do not compare them with figures of all clients"
            )


def command() -> str:
    """Return the command as its user would type it."""
    called = Path(sys.argv[0])
    found = shutil.which("corolla")
    if called.name == "corolla" and called.is_file() and not (found and Path(found).samefile(called)):
        return shlex.quote(nearby(called))
    return "corolla"


def same_without(option: str) -> str:
    """Return the command line that runs now, as its user would type it, without this option."""
    return " ".join([command(), *(shlex.quote(word) for word in sys.argv[1:] if word != option)])


def nearby(path: Path) -> str:
    """Return a path as a user would type it: relative if it lies under the current directory."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
