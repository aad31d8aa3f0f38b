"""Words for what a command waits for before a run has anything to show, and after it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from fl_app import progress
from fl_app.keys import Scalar

if TYPE_CHECKING:
    from corolla.experiments.launch import RayCluster

Submit = Callable[[Mapping[str, Scalar], Callable[[str], None]], str]

# seconds after which plain output says again what is going on: never ten without a word, on a busy machine too
SILENCE = 5.0
_TICK = 0.5


class Plain:
    """Output where nothing can move: lines, and after every few silent seconds one that says what goes on, and how far it is."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._doing, self._since = "", 0.0
        self._said = time.monotonic()
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to break silences."""
        threading.Thread(target=self._watch, daemon=True).start()

    def end(self) -> None:
        """Leave silences alone."""
        self._ended.set()

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        """Take in what is going on; "": nothing that is worth a word."""
        if what.partition(":")[0] != self._doing.partition(":")[0]:
            self._since = time.monotonic()
        self._doing = f"{what}: {done}/{total}" if total else what

    def print(self, text: str) -> None:
        """Print a line."""
        self._said = time.monotonic()
        self._console.print(escape(text), soft_wrap=True)

    def remind(self) -> None:
        """Say what is going on if nothing was said for a while."""
        now = time.monotonic()
        if self._doing and now - self._said > SILENCE:
            self.print(f"  {self._doing} ({now - self._since:.0f} s)")

    def _watch(self) -> None:
        while not self._ended.wait(_TICK):
            self.remind()


class Waiting:
    """Says what is waited for: on a terminal a line that counts the seconds, with a bar where it is known how much there is to
    do; elsewhere a line per step, and one every few seconds of a long one.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._plain = None if is_terminal(console) else Plain(console)
        if self._plain:
            self._plain.start()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._what = ""

    def step(self, what: str, done: int = 0, total: int = 0, brief: bool = False) -> None:
        """Say what is waited for now; "": for nothing at the moment. brief: plain output needs a word only if it takes long."""
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
            self._bar.start()
        if what != self._what or self._task is None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._task = self._bar.add_task(escape(what), total=total or None, count="")
        self._bar.update(self._task, total=total or None, completed=done, count=f"{done}/{total}" if total else "")

    def end(self) -> None:
        """Leave nothing of it on a terminal."""
        self._clear()
        if self._plain:
            self._plain.end()

    def _clear(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None


def is_terminal(console: Console) -> bool:
    """Tell whether something can move there; FORCE_COLOR makes no terminal of a file."""
    return console.file.isatty() and not console.is_dumb_terminal


@contextlib.contextmanager
def waiting(console: Console, interrupted: str = "stopping") -> Iterator[Waiting]:
    """Say what is waited for within it, the conversion of data included; after Ctrl-C `interrupted`, if anything."""
    shown = Waiting(console)
    try:
        with progress.listening(shown.step):
            yield shown
    except KeyboardInterrupt:
        shown.step(interrupted)
        raise
    finally:
        shown.end()


@contextlib.contextmanager
def simulated(
    console: Console, num_clients: int, cpus_per_client: float, gpus_per_client: float, ray: RayCluster | None = None
) -> Iterator[Submit]:
    """Yield what submits runs to a SuperLink of their own, with words for its start and its end. ray: a cluster to use."""
    from corolla.experiments.launch import simulation

    # the simulation says itself that it ends
    display = waiting(console, interrupted="")
    with display as shown, simulation(num_clients, cpus_per_client, gpus_per_client, shown.step, ray) as submit:
        yield submit
