"""Display of a running run: a live panel on a terminal and in a notebook, one plain line per round elsewhere.

Both read the run's events (fl_app/server/events.py). They come from this process, from a simulation's processes, or from
a SuperLink on another machine. `corolla run --events` writes them to standard output instead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from corolla.api import console as consoles
from corolla.api.waiting import (
    AtOnce,
    OutputCell,
    Plain,
    debugger_alone,
    debugger_waits,
    in_notebook,
    is_terminal,
)
from fl_app.debugging import is_aside, unlabelled
from fl_app.errors import plain, plain_lines
from fl_app.server import events
from fl_app.server.events import Event, Failed, Finished, LeftOut, Note, Progress, Round, Started, Stopped
from fl_app.server.run_folder import ask_to_stop

# most rounds in the table
ROWS = 8
# most clients named that take no part
LEFT_OUT = 3
# steps of a histogram; the first means zero
BARS = "·▁▂▃▄▅▆▇█"
# lines of the panel other than the rounds' rows and the notes
OTHER_LINES = 7
WIDTH = 100
# columns of the panel's border
FRAME = 4
# Flower's lines are coloured
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# columns left free, so that an echoed ^C does not start a new line
ECHO = 3
REFRESHES = 5  # per second
# lines of the log to print if the run fails
LOG_LINES = 40
# steps of the start, by words in Flower's log lines
STEPS = {
    "Successfully started run": "starting the run's process",
    "Starting Flower Simulation": "unpacking the app, starting Ray",
}


class RunPanel:
    """The panel: bars for rounds and for replies of the current round, a table of the last rounds, failures."""

    def __init__(self, title: str, rounds: int) -> None:
        self.rounds: deque[Round] = deque(maxlen=ROWS)
        self._title = title
        self._step, self._done, self._of = "starting", 0, 0
        self._completed, self._total = 0, rounds
        self._failed = 0
        # reason why a client takes no part
        self._left_out: dict[str, str] = {}
        self._note = ""
        self._started = time.monotonic()
        # start time of the first round shown, and number of rounds before it
        self._first: tuple[float, int] | None = None

    def progress(self, what: str, done: int, total: int) -> None:
        """Set the current step: `done` of `total` replies have arrived."""
        self._step, self._done, self._of = what, done, total

    def note(self, text: str) -> None:
        """Show a notice until the end."""
        self._note = text

    def begin(self, completed: int) -> None:
        """Start the clock at the first round. completed: rounds done before the run was interrupted."""
        self._completed = completed
        self._first = time.monotonic(), completed

    def add(self, finished: Round) -> None:
        """Add a finished round."""
        self.rounds.append(finished)
        self._completed, self._total = finished.round, finished.rounds
        self._failed += len(finished.failures)
        if finished.round < finished.rounds:
            self._step, self._done, self._of = f"round {finished.round + 1}/{finished.rounds}", 0, self._of
        else:
            self._step, self._of = "done", 0

    def leave_out(self, who: str, why: str) -> None:
        """Add a client that takes no part."""
        self._left_out[who] = why

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it, with as many rounds as fit on the terminal."""
        width = min(options.max_width - ECHO, WIDTH)
        notes = [line for note in self._notes() for line in note.wrap(console, width - FRAME)]
        rows = list(self.rounds)[-max(1, min(ROWS, console.height - OTHER_LINES - len(notes))) :]
        parts: list[RenderableType] = [self._bars()]
        if rows:
            parts += [Text(), rounds_table(rows, width - FRAME)]
        parts += notes
        yield Panel(
            Group(*parts),
            title=escape(self._title),
            title_align="left",
            subtitle=self._times(),
            subtitle_align="right",
            width=width,
        )

    def _bars(self) -> Table:
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        if self._total:
            grid.add_row("rounds", ProgressBar(self._total, self._completed), f"{self._completed}/{self._total} done")
        if self._step != "done":
            unknown = not self._of
            count = "" if unknown else f"{self._done}/{self._of}" + " replies" * bool(self._first)
            grid.add_row(escape(self._step), ProgressBar(self._of or None, self._done, pulse=unknown), count)
        return grid

    def _notes(self) -> list[Text]:
        lines: dict[str, str] = {}
        if self.rounds:
            last = self.rounds[-1]
            unit = "%, " if last.ratio else ""
            lines[f"{last.metric} ({unit}mean ± std) before, after training; {byte_unit(self.rounds)[1]} up, down"] = (
                "dim"
            )
            if phases := last.phases:
                lines[f"seconds of round {last.round}: " + ", ".join(f"{k} {v:.1f}" for k, v in phases.items())] = "dim"
            if last.partial:
                lines[last.partial] = "dim"
            if last.quantiles:
                lines[spread(last)] = "dim"
        for who, why in list(self._left_out.items())[:LEFT_OUT]:
            lines[f"{who} takes no part: {why}"] = "bold red"
        if (more := len(self._left_out) - LEFT_OUT) > 0:
            lines[f"{more} more take no part"] = "bold red"
        if self._failed:
            lines[f"failures so far: {self._failed}"] = "bold red"
        if self._note:
            lines[self._note] = "bold yellow"
        return [Text(line, style) for line, style in lines.items()]

    def _times(self) -> str:
        now = time.monotonic()
        text = clock(now - self._started)
        if self._first and self._first[1] < self._completed < self._total:
            began, before = self._first
            left = (now - began) / (self._completed - before) * (self._total - self._completed)
            text += f", about {clock(left)} left"
        return text


def rounds_table(rounds: Sequence[Round], width: int) -> Table:
    """Return the last rounds as a table of at most this width.

    Columns that do not fit are left out; numbers are never cut.
    """
    cells = {"round": [str(r.round) for r in rounds]}
    is_ratio = all(r.ratio for r in rounds)

    def write(value: float | None, deviation: float | None = None) -> str:
        return events.shown(value, deviation, is_ratio).strip()

    cells["before"] = [write(r.before, r.before_deviation) for r in rounds]
    cells["after"] = [write(r.after, r.after_deviation) for r in rounds]
    if any(r.evaluated for r in rounds):
        cells["all"] = [write(r.all_clients) if r.evaluated else "" for r in rounds]
    cells["loss"] = [events.number(r.loss) for r in rounds]
    unit, _ = byte_unit(rounds)
    cells["up"] = [f"{r.upload_bytes / unit:.1f}" for r in rounds]
    cells["down"] = [f"{r.download_bytes / unit:.1f}" for r in rounds]
    cells["seconds"] = [f"{r.seconds['round']:.1f}" for r in rounds]
    if any(r.of_clients for r in rounds):
        cells["clients"] = [f"{r.clients}/{r.of_clients}" if r.of_clients else str(r.clients) for r in rounds]
    if any(r.failures for r in rounds):
        cells["failed"] = [str(len(r.failures)) for r in rounds]

    def needed() -> int:
        return sum(1 + max(map(len, [name, *column])) for name, column in cells.items())

    if needed() > width:
        cells |= {"before": [write(r.before) for r in rounds], "after": [write(r.after) for r in rounds]}
    for name in ("seconds", "down", "up", "loss", "all", "failed", "clients"):
        if needed() > width:
            cells.pop(name, None)
    out = Table(*cells, box=None, padding=(0, 0, 0, 1), expand=True, header_style="bold")
    for column in out.columns:
        column.justify, column.no_wrap = "right", True
    for row in zip(*cells.values(), strict=True):
        out.add_row(
            *(
                Text(cell, style="bold red" if name == "failed" and cell != "0" else "")
                for name, cell in zip(cells, row, strict=True)
            )
        )
    return out


def spread(r: Round) -> str:
    """Return a sentence with a round's quantiles over its clients, and their histogram."""
    low, lower, middle, upper, high = (events.shown(value, None, r.ratio).strip() for value in r.quantiles)
    most = max(r.histogram)
    bars = "".join(BARS[-(-count * (len(BARS) - 1) // most)] for count in r.histogram)
    ends = ("0", "100 %") if r.ratio else ("least", "largest")
    return (
        f"{r.clients} clients before training: median {middle}, half {lower} to {upper}, nine tenths {low} to {high}; "
        f"{ends[0]} {bars} {ends[1]}"
    )


def byte_unit(rounds: Iterable[Round]) -> tuple[float, str]:
    """Return the unit for the bytes of rounds, as (bytes per unit, name)."""
    return events.byte_unit(max(max(r.upload_bytes, r.download_bytes) for r in rounds))


def clock(seconds: float) -> str:
    """Format a duration as h:mm:ss."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


class Display:
    """Shows a run's events on a console, and keeps their facts: the run's folder, its error, the end of its log.

    until: a round after which it asks the run to end; 0: none.
    """

    def __init__(self, title: str, console: Console, rounds: int, verbose: bool = False, until: int = 0) -> None:
        self.folder: Path | None = None
        # the error that ended the run
        self.failed: Failed | None = None
        # round after which the run ended on request
        self.stopped: int | None = None
        # whether the request was Ctrl-C
        self.interrupted = False
        self.lines: deque[str] = deque(maxlen=LOG_LINES)
        self._console, self._verbose, self._until = console, verbose, until
        self._panel = RunPanel(title, rounds)
        self._live: Live | OutputCell | None = None
        self._plain = Plain(console)
        self._around = contextlib.ExitStack()
        if console.quiet:
            pass
        elif in_notebook():
            self._live = OutputCell(self._panel)
        elif is_terminal(console):
            self._live = self._new_live()

    @property
    def stopped_as_planned(self) -> bool:
        """Whether the run ended after round `until`, without Ctrl-C."""
        return self.stopped is not None and 0 < self._until <= self.stopped and not self.interrupted

    def __enter__(self) -> Display:
        """Start the panel, or the plain lines' reminders."""
        self._around.enter_context(debugger_alone(self._paused))
        if self._live:
            self._live.start()
        else:
            self._plain.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the panel as it is, or remove it if no round was finished, and restore the terminal."""
        self._around.close()
        self._panel.note("")
        self._plain.end()
        if self._live:
            self._live.transient = not self._panel.rounds
            self._live.stop()

    def raw(self, line: str) -> None:
        """Process a line of Flower's stream. Only marked lines, Corolla's own, are shown unless verbose."""
        line = plain(_COLOUR.sub("", line).replace("\t", " "))
        if (own := events.read(line)) is not None:
            if not isinstance(own, Progress):
                self.lines.append(own.sentence)
            self.take(own)
            return
        self.lines.append(line)
        if self._verbose:
            self._plain.print(line)
        else:
            consoles.write_log(line)
        if step := next((step for words, step in STEPS.items() if words in line), ""):
            self.step(step)

    def take(self, event: Event) -> None:
        """Process an event."""
        if consoles.events:
            out = unlabelled(sys.stdout)
            out.write(events.encode(event) + "\n")
            out.flush()
        match event:
            case Started(folder=folder, round=before):
                self.folder = Path(folder)
                self._panel.begin(before)
                if consoles.opens:
                    self._around.callback(open_page(self.folder, self._plain.print))
            case Stopped(round=last):
                self.stopped = last
                self._doing("ending the run", 0, 0)
            case LeftOut(who=who, why=why):
                self._panel.leave_out(who, why)
                self._plain.print(event.sentence)
            case Failed():
                self.failed = event
                self._doing("ending the run", 0, 0)
            case Finished():
                # trackers and callbacks may still work
                self._doing("ending the run", 0, 0)
            case Progress(what=what, done=done, total=total):
                self._doing(what, done, total)
            case Round():
                self._panel.add(event)
                if self.folder and self._until and event.round >= self._until - 1:
                    # the run reads the request after its next round
                    ask_to_stop(self.folder)
                if event.round == event.rounds:
                    self._plain.doing("ending the run")
                if not self._live:
                    self._plain.print(event.sentence)
                else:
                    consoles.write_log(event.sentence)
            case Note(message=message):
                self._plain.print(message)

    def lines_of(self, text: str) -> None:
        """Show a text of several lines, such as a traceback."""
        for line in plain_lines(text).split("\n"):
            self._plain.print(line)

    def step(self, what: str) -> None:
        """Show a step of the start."""
        self.take(Progress(what=what, done=0, total=0))
        if not self._live:
            self._plain.print(what)

    def _doing(self, what: str, done: int, total: int) -> None:
        """Move the bars; on plain output, set the text of the reminders."""
        self._panel.progress(what, done, total)
        self._plain.doing(what, done, total)

    def note(self, text: str) -> None:
        """Show a notice immediately, also from a signal handler, which may have interrupted other output."""
        self._panel.note(text)
        if not self._live or debugger_waits():
            # a notebook's stderr has no file descriptor
            with contextlib.suppress(OSError):
                os.write(sys.stderr.fileno(), f"{text}\n".encode())

    def _new_live(self) -> Live:
        return Live(self._panel, console=self._console, refresh_per_second=REFRESHES)

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Context in which the panel is off the terminal, for other output."""
        if not isinstance(self._live, Live):
            yield
            return
        self._live.transient = True
        self._live.stop()
        try:
            yield
        finally:
            # a new panel: the old one would overwrite output printed since
            self._live = self._new_live()
            self._live.start()


@contextlib.contextmanager
def log_to(display: Display, traces: bool = True) -> Iterator[None]:
    """Send the events of this process to a display instead of standard error. traces: include tracebacks."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not is_aside(record):
                display.take(events.event_of(record))
            elif traces:
                display.lines_of(record.getMessage())

    log = logging.getLogger("corolla")
    before, log.handlers, propagate = log.handlers, [Handler()], log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    except Exception as error:
        display.take(Failed.of(error))
        raise
    finally:
        log.handlers, log.propagate = before, propagate


AFTER_ROUND = "stopping after this round; press Ctrl-C again to stop at once"
AT_ONCE = "stopping at once"


@contextlib.contextmanager
def answered(display: Display) -> Iterator[None]:
    """Context in which the first Ctrl-C asks the run to end after its round, and the second raises KeyboardInterrupt.

    The first one already raises if no round has started, or if the run's folder is on another machine. An ignored
    SIGINT stays ignored. Threads other than the main one never receive it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    asked = False

    def answer(number: int, frame: object) -> None:
        nonlocal asked
        if not asked and display.folder is not None and ask_to_stop(display.folder):
            asked = display.interrupted = True
            display.note(AFTER_ROUND)
        else:
            display.note(AT_ONCE)
            raise AtOnce if debugger_waits() else KeyboardInterrupt

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# seconds for the pages' last answers
_PAGE_SECONDS = 15.0


def open_page(folder: Path, say: Callable[[str], None]) -> Callable[[], None]:
    """Open the page of a run, and return the function that ends its server. say: prints a line, from another thread."""
    if not folder.is_dir():
        say(f"--open: the run folder is on the SuperLink's machine; there: corolla watch {folder}")
        return lambda: None
    command = [sys.executable, "-m", "corolla", "watch", str(folder), "--open", "--until-input-ends"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin and process.stdout
    asking, output = process.stdin, process.stdout

    def tell() -> None:
        if address := output.readline().strip():
            say(f"this run's page: {address}")

    telling = threading.Thread(target=tell, daemon=True)
    telling.start()

    def end() -> None:
        asking.close()
        try:
            process.wait(_PAGE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        telling.join()
        output.close()

    return end
