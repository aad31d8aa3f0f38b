"""Progress messages for waits before and after a run's own display."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from corolla.api import debugger
from fl_app import progress
from fl_app.keys import Scalar

Submit = Callable[[Mapping[str, Scalar], Callable[[str], None]], str]

# Seconds without output after which plain output repeats the current step. A busy machine is then never silent for ten
# seconds.
SILENCE = 5.0
_TICK = 0.5
_still = False


class Plain:
    """Output as plain lines. During a long silence it repeats the current step and its progress every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._doing, self._since = "", 0.0
        self._said = time.monotonic()
        self._ended = threading.Event()

    def start(self) -> None:
        """Start the reminders."""
        threading.Thread(target=self._watch, daemon=True).start()

    def end(self) -> None:
        """End the reminders."""
        self._ended.set()

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        """Set the current step; "": none."""
        if what.partition(":")[0] != self._doing.partition(":")[0]:
            self._since = time.monotonic()
        self._doing = f"{what}: {done}/{total}" if total else what

    def print(self, text: str) -> None:
        """Print a line."""
        self._said = time.monotonic()
        self._console.print(escape(text), soft_wrap=True)

    def remind(self) -> None:
        """Print the current step if nothing was printed for SILENCE seconds."""
        now = time.monotonic()
        if self._doing and now - self._said > SILENCE and not debugger.is_waiting():
            self.print(f"  {self._doing} ({now - self._since:.0f} s)")

    def _watch(self) -> None:
        while not self._ended.wait(_TICK):
            self.remind()


class Waiting:
    """Shows the current step of a wait.

    On a terminal it is a line that counts the seconds, with a bar if the amount of work is known. Elsewhere it is one
    line per step, and further lines during a long one.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._plain = None if is_terminal(console) else Plain(console)
        if self._plain:
            self._plain.start()
        self._bar: Progress | None = None
        self._what = ""

    def step(self, what: str, done: int = 0, total: int = 0, brief: bool = False) -> None:
        """Show a step; "": none. brief: plain output prints it only if it takes long."""
        if self._plain:
            if what and what != self._what and not brief:
                self._plain.print(f"{what}: {done}/{total}" if total else what)
            self._plain.doing(what, done, total)
        elif what:
            self._draw(what, done, total)
        else:
            self._clear()
        self._what = what

    def _draw(self, what: str, done: int, total: int) -> None:
        if self._bar is None:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[count]}"),
            )
            self._bar = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._bar.add_task("", count="")
            self._bar.start()
        task, count = self._bar.task_ids[0], f"{done}/{total}" if total else ""
        if what != self._what:
            self._bar.reset(task)
        self._bar.update(task, description=escape(what), total=total or None, completed=done, count=count)

    def end(self) -> None:
        """Clear the terminal, and end the reminders."""
        self._clear()
        if self._plain:
            self._plain.end()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which the terminal is free for other output."""
        moving = self._bar is not None
        self._clear()
        try:
            yield
        finally:
            if moving:
                self._draw(self._what, 0, 0)

    def _clear(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = None


def is_terminal(console: Console) -> bool:
    """Return whether the console can redraw lines. FORCE_COLOR does not turn a file into a terminal."""
    return console.file.isatty() and not console.is_dumb_terminal and not _still


def stand_still(wanted: bool) -> None:
    """Disable animations on terminals: lines are printed as elsewhere."""
    global _still
    _still = wanted


@contextlib.contextmanager
def waiting(console: Console, interrupted: str = "stopping") -> Iterator[Waiting]:
    """Context that shows the steps of a wait, including the conversion of data.

    interrupted: text shown after Ctrl-C, if any.
    """
    shown = Waiting(console)
    try:
        with progress.listening(shown.step), debugger.alone(shown.paused):
            yield shown
    except KeyboardInterrupt:
        shown.step(interrupted)
        raise
    finally:
        shown.end()
