"""Displays of waits before and after a run's own display, a display in a notebook, and debugger sessions during one.

A debugger has the terminal to itself, and leaving it ends the run. `breakpoint()`, `pdb.set_trace()` and debuggers derived
from `pdb.Pdb` call `Pdb.interaction` whenever they wait for input.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fl_app import progress
from fl_app.debugging import unlabelled
from fl_app.keys import Scalar

AGAIN = "press Ctrl-C again to end the run"
_sessions = 0


class AtOnce(BaseException):
    """Raised by the Ctrl-C that ends a run from a debugger's prompt, where KeyboardInterrupt only clears the line."""


def debugger_waits() -> bool:
    """Return whether a debugger of this process waits for input."""
    return _sessions > 0


@contextlib.contextmanager
def debugger_alone(paused: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Context in which a debugger waits for input inside `paused()`, and raises KeyboardInterrupt when it is left.

    Contexts nest: a debugger pauses the displays of all of them.
    """
    # imported here because it loads slowly
    import pdb

    before = pdb.Pdb.interaction

    @functools.wraps(before)
    def interaction(self: Any, *arguments: Any, **keywords: Any) -> None:
        shown = sys.stdout
        try:
            with paused():
                _interact(self, functools.partial(before, self, *arguments, **keywords))
        finally:
            sys.stdout = shown

    pdb.Pdb.interaction = interaction  # type: ignore[method-assign]
    try:
        yield
    finally:
        pdb.Pdb.interaction = before  # type: ignore[method-assign]


def _interact(debugger: Any, interact: Callable[[], object]) -> None:
    """Let a debugger wait for input, on the terminal itself. Raises KeyboardInterrupt when it is left."""
    global _sessions
    # the debugger's original stream may print lines above a panel
    sys.stdout = unlabelled(sys.stdout)
    if debugger.use_rawinput:
        debugger.stdout = sys.stdout
    # after `continue`, Ctrl-C must reach the run, not the debugger
    debugger.nosigint = True
    _sessions += 1
    try:
        with _second_ctrl_c():
            interact()
    except (AtOnce, SystemExit):
        raise KeyboardInterrupt from None
    finally:
        _sessions -= 1
    if debugger.quitting:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _second_ctrl_c() -> Iterator[None]:
    """Context in which the second Ctrl-C raises AtOnce. A SIGINT handler that is set already stays."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed = False

    def answer(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise AtOnce
        pressed = True
        print(f"\n{AGAIN}", flush=True)

    signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
        if self._doing and now - self._said > SILENCE and not debugger_waits():
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
        with progress.listening(shown.step), debugger_alone(shown.paused):
            yield shown
    except KeyboardInterrupt:
        shown.step(interrupted)
        raise
    finally:
        shown.end()


_WIDTH = 100
_SECONDS = 0.5  # between two drawings
_PAGE = (
    "<pre style=\"white-space: pre; overflow-x: auto; line-height: normal; font-family: 'DejaVu Sans Mono', Menlo, Consolas, "
    'monospace">{code}</pre>'
)


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel."""
    if "IPython" not in sys.modules:
        return False
    return hasattr(sys.modules["IPython"].get_ipython(), "kernel")


class Drawing:
    """A rich renderable as notebook output: HTML, with plain text as a fallback."""

    def __init__(self, what: RenderableType) -> None:
        self._console = Console(file=io.StringIO(), record=True, width=_WIDTH, force_jupyter=False, force_terminal=True)
        self._console.print(what)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        text = self._console.export_text(clear=False)
        html = self._console.export_html(clear=False, inline_styles=True, code_format=_PAGE)
        return {"text/html": html, "text/plain": text}


class OutputCell:
    """Redraws a renderable in one output cell while it changes, as rich's Live does on a terminal.

    transient: whether it is removed at the end.
    """

    def __init__(self, what: RenderableType) -> None:
        self.transient = False
        self._what = what
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Show it."""
        ipython: Any = importlib.import_module("IPython.display")
        self._shown = ipython.display(Drawing(self._what), display_id=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave the last drawing, or nothing if transient."""
        self._ended.set()
        self._thread.join()
        self._shown.update(Drawing("") if self.transient else Drawing(self._what))

    def _watch(self) -> None:
        while not self._ended.wait(_SECONDS):
            # the renderable may change while it is drawn
            with contextlib.suppress(RuntimeError):
                self._shown.update(Drawing(self._what))
