"""What is shown while a run goes on: a live panel on a terminal and in a notebook, one plain line per round elsewhere.

Both are fed by the run's own log lines (fl_app/server/progress_protocol.py). The lines come from this process, from a
simulation's, or from a SuperLink on another machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from corolla.api import notebook
from corolla.api.waiting import Plain, is_terminal
from fl_app.errors import plain
from fl_app.server import progress_protocol
from fl_app.server.progress_protocol import LOG_MARK, Failure, Folder, LeftOut, Progress, Resumed, Round, Stopped
from fl_app.server.run_folder import ask_to_stop

ROWS = 8  # of the last rounds
# Lines of the panel besides the rounds' rows and the notes.
OTHER_LINES = 7
WIDTH = 100
# columns of the panel's border
FRAME = 4
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # of Flower's own lines
# columns left free: a ^C that the terminal echoes must not start a line
ECHO = 3
REFRESHES = 5  # per second
# kept for when the run fails
LOG_LINES = 40
# Steps of the start, by words in Flower's log line.
STEPS = {
    "Successfully started run": "starting the run's process",
    "Starting Flower Simulation": "unpacking the app, starting Ray",
}


class RunPanel:
    """The panel: bars for the rounds and for the replies of the current one, a table of the last rounds, failures."""

    def __init__(self, title: str, rounds: int) -> None:
        self.rounds: deque[Round] = deque(maxlen=ROWS)
        self._title = title
        self._step, self._done, self._of = "starting", 0, 0
        self._completed, self._total = 0, rounds
        self._failed = 0
        self._left_out: dict[str, str] = {}  # who takes no part, and why
        self._note = ""
        self._started = time.monotonic()
        # when the first round shown began, and the rounds before it
        self._first: tuple[float, int] | None = None

    def progress(self, what: str, done: int, total: int) -> None:
        """Take in that `done` of `total` replies of a step have arrived."""
        self._step, self._done, self._of = what, done, total

    def note(self, text: str) -> None:
        """Take in what a reader must know now, whatever happens meanwhile."""
        self._note = text

    def begin(self, completed: int) -> None:
        """Take in that the first round begins, after `completed` ones of an interrupted run."""
        self._completed = completed
        self._first = time.monotonic(), completed

    def add(self, finished: Round) -> None:
        """Take in a finished round."""
        self.rounds.append(finished)
        self._completed, self._total = finished.number, finished.total
        self._failed += finished.failed
        if finished.number < finished.total:
            self._step, self._done, self._of = f"round {finished.number + 1}/{finished.total}", 0, self._of
        else:
            self._step, self._of = "done", 0

    def leave_out(self, who: str, why: str) -> None:
        """Take in that a client takes no part."""
        self._left_out[who] = why

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it, with as many rounds as the terminal has room for."""
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
            if phases := progress_protocol.phases_of(last):
                lines[f"seconds of round {last.number}: " + ", ".join(f"{k} {v:.1f}" for k, v in phases.items())] = (
                    "dim"
                )
        for who, why in self._left_out.items():
            lines[f"{who} takes no part: {why}"] = "bold red"
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
    """Return the last rounds as a table of at most this width: what there is no room for is left out, no number is cut."""
    cells = {"round": [str(r.number) for r in rounds]}
    write = percent if all(r.ratio for r in rounds) else four_digits
    cells["before"] = [write(r.before, r.before_deviation) for r in rounds]
    cells["after"] = [write(r.after, r.after_deviation) for r in rounds]
    if any(r.evaluated for r in rounds):
        cells["all"] = [write(r.everyone) if r.evaluated else "" for r in rounds]
    cells["loss"] = [progress_protocol.number(r.loss) for r in rounds]
    unit, _ = byte_unit(rounds)
    cells["up"] = [f"{r.upload_bytes / unit:.1f}" for r in rounds]
    cells["down"] = [f"{r.download_bytes / unit:.1f}" for r in rounds]
    cells["seconds"] = [f"{r.seconds['round']:.1f}" for r in rounds]
    if any(r.failed for r in rounds):
        cells["failed"] = [str(r.failed) for r in rounds]

    def needed() -> int:
        return sum(1 + max(map(len, [name, *column])) for name, column in cells.items())

    if needed() > width:
        cells |= {"before": [write(r.before) for r in rounds], "after": [write(r.after) for r in rounds]}
    for name in ("seconds", "down", "up", "loss", "all", "failed"):
        if needed() > width:
            cells.pop(name, None)
    out = Table(*cells, box=None, padding=(0, 0, 0, 1), expand=True, header_style="bold")
    for column in out.columns:
        column.justify, column.no_wrap = "right", True
    for row in zip(*cells.values(), strict=True):
        out.add_row(*(Text(cell, style=failed_style(name, cell)) for name, cell in zip(cells, row, strict=True)))
    return out


def byte_unit(rounds: Iterable[Round]) -> tuple[float, str]:
    """Return the unit in which the bytes of rounds are told, and its name."""
    return progress_protocol.byte_unit(max(max(r.upload_bytes, r.download_bytes) for r in rounds))


def failed_style(name: str, cell: str) -> str:
    """Return how a cell of the table looks."""
    return "bold red" if name == "failed" and cell != "0" else ""


def percent(value: float | None, deviation: float | None = None) -> str:
    """Format a ratio in per cent."""
    if value is None:
        return "n/a"
    return f"{100 * value:.1f}" + ("" if deviation is None else f" ± {100 * deviation:.1f}")


def four_digits(value: float | None, deviation: float | None = None) -> str:
    """Format a metric that is no ratio."""
    if value is None:
        return "n/a"
    return f"{value:.4g}" + ("" if deviation is None else f" ± {deviation:.2g}")


def clock(seconds: float) -> str:
    """Format a duration as h:mm:ss."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


class Display:
    """Shows a run's log lines on a console, and keeps what they tell: the run's folder, its errors, the end of its log.

    until: a round after which it asks the run to end; 0: none.
    """

    def __init__(self, title: str, console: Console, rounds: int, verbose: bool = False, until: int = 0) -> None:
        self.folder: Path | None = None
        self.errors: list[str] = []
        # The round after which the run ended because it was asked to.
        self.stopped: int | None = None
        self.interrupted = False  # it was Ctrl-C that asked
        self.lines: deque[str] = deque(maxlen=LOG_LINES)
        self._console, self._verbose, self._until = console, verbose, until
        self._panel = RunPanel(title, rounds)
        self._live: Live | notebook.Cell | None = None
        self._plain = Plain(console)
        if console.quiet:
            pass
        elif notebook.is_here():
            self._live = notebook.Cell(self._panel)
        elif is_terminal(console):
            self._live = Live(self._panel, console=console, refresh_per_second=REFRESHES)

    @property
    def stopped_as_planned(self) -> bool:
        """Whether the run ended after the round that was wanted, and nobody pressed Ctrl-C."""
        return self.stopped is not None and 0 < self._until <= self.stopped and not self.interrupted

    def __enter__(self) -> Display:
        """Show the panel, on a terminal."""
        if self._live:
            self._live.start()
        else:
            self._plain.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the panel as it is, or remove it if no round was finished; the terminal is as before."""
        self._panel.note("")
        self._plain.end()
        if self._live:
            self._live.transient = not self._panel.rounds
            self._live.stop()

    def raw(self, line: str) -> None:
        """Take a line of Flower's stream; only ours, marked ones are shown unless verbose."""
        line = plain(_COLOUR.sub("", line).replace("\t", " "))
        self.lines.append(line)
        if line.startswith(LOG_MARK):
            self.line(line.removeprefix(LOG_MARK))
            return
        if self._verbose:
            self._print(line)
        if step := next((step for words, step in STEPS.items() if words in line), ""):
            self.step(step)

    def line(self, text: str) -> None:
        """Take one of our log lines."""
        text = plain(text.replace("\t", " "))
        match progress_protocol.read_line(text):
            case Folder(path):
                self.folder = path
                self._panel.begin(0)
            case Resumed(round):
                self._panel.begin(round)
                self._print(text)
            case Stopped(round):
                self.stopped = round
                self.progress("ending the run", 0, 0)
            case LeftOut(who, why):
                self._panel.leave_out(who, why)
                self._print(text)
            case Failure(line):
                self.errors.append(line)
            case Progress(what, done, total):
                self.progress(what, done, total)
            case Round() as finished:
                self._panel.add(finished)
                if self.folder and self._until and finished.number >= self._until - 1:
                    # the run looks after its next round
                    ask_to_stop(self.folder)
                if finished.number == finished.total:
                    self._plain.doing("ending the run")
                if not self._live:
                    self._print(progress_protocol.sentence(finished))
            case None:
                self._print(text)

    def step(self, what: str) -> None:
        """Say what the start has come to."""
        self.progress(what, 0, 0)
        if not self._live:
            self._print(what)

    def progress(self, what: str, done: int, total: int) -> None:
        """Move the bars; without them, what is told when nothing was said for a while."""
        self._panel.progress(what, done, total)
        self._plain.doing(what, done, total)

    def note(self, text: str) -> None:
        """Say something at once, from a signal's handler too, which may have interrupted any other word."""
        self._panel.note(text)
        if not self._live:
            with contextlib.suppress(OSError):  # a notebook's has no number
                os.write(sys.stderr.fileno(), f"{text}\n".encode())

    def _print(self, text: str) -> None:
        self._plain.print(text)


@contextlib.contextmanager
def log_to(display: Display) -> Iterator[None]:
    """Send our log lines to a display instead of standard error (in-process mode)."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            display.line(record.getMessage())

    log = logging.getLogger("corolla")
    before, log.handlers, propagate = log.handlers, [Handler()], log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.handlers, log.propagate = before, propagate
