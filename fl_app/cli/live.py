"""What `corolla run` shows while a run goes on: a live panel on a terminal, one plain line per round elsewhere.

Both are fed by the run's own log lines (fl_app/server/log_lines.py, PersonalizedStrategy.describe), whether they come from this
process, from a simulation's or from a SuperLink on another machine.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fl_app.server.log_lines import ERROR_MARK, FOLDER_MARK, LOG_MARK, read_progress

ROWS = 8  # of the last rounds
OTHER_LINES = 10  # of the panel, besides these
WIDTH = 100
ECHO = 3  # columns left free: a ^C that the terminal echoes must not start a line
REFRESHES = 5  # per second
LOG_LINES = 40  # kept for when the run fails

ROUND = re.compile(
    r"round (?P<round>\d+)/(?P<total>\d+): accuracy +(?P<before>.+) before, +(?P<after>.+) after training, "
    r"loss (?P<loss>\S+), \d+ clients, (?P<up>\S+) MB up, (?P<down>\S+) MB down, (?P<seconds>\S+) s(?: \((?P<phases>.*)\))?"
    r"(?:; all clients +(?P<everyone>[^;]+))?(?:; (?P<failed>\d+) failed)?"
)


@dataclass(frozen=True)
class Round:
    """A finished round as its log line tells it. before, after, everyone: accuracies in per cent, "46.0 ± 33.5"."""

    number: int
    total: int
    before: str
    after: str
    everyone: str
    loss: str
    up: str
    down: str
    seconds: str
    phases: str
    failed: int


def read_round(text: str) -> Round | None:
    """Read the line that ends a round (PersonalizedStrategy.describe); None for any other."""
    found = ROUND.fullmatch(text)
    if found is None:
        return None
    word = {name: (value or "").replace("%", "").strip() for name, value in found.groupdict().items()}
    return Round(
        int(word["round"]), int(word["total"]), word["before"], word["after"], word["everyone"], word["loss"], word["up"],
        word["down"], word["seconds"], word["phases"], int(word["failed"] or 0),
    )  # fmt: skip


class RunPanel:
    """The panel: bars for the rounds and for the replies of the current one, a table of the last rounds, failures."""

    def __init__(self, title: str) -> None:
        self.rounds: deque[Round] = deque(maxlen=ROWS)
        self._title = title
        self._step, self._done, self._of = "starting", 0, 0
        self._completed, self._total = 0, 0
        self._failed = 0
        self._started = time.monotonic()
        self._first: tuple[float, int] | None = None  # when the first round shown began, and the rounds before it

    def progress(self, what: str, done: int, total: int) -> None:
        """Take in that `done` of `total` replies of a step have arrived."""
        self._step, self._done, self._of = what, done, total
        if found := re.match(r"round (\d+)/(\d+)", what):
            self._completed, self._total = int(found[1]) - 1, int(found[2])
            self._first = self._first or (time.monotonic(), self._completed)

    def add(self, finished: Round) -> None:
        """Take in a finished round."""
        self.rounds.append(finished)
        self._completed, self._total = finished.number, finished.total
        self._failed += finished.failed
        if finished.number < finished.total:
            self._step, self._done, self._of = f"round {finished.number + 1}/{finished.total}", 0, self._of
        else:
            self._step, self._of = "done", 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it, with as many rounds as the terminal has room for."""
        rows = list(self.rounds)[-max(1, min(ROWS, console.height - OTHER_LINES)) :]
        parts: list[RenderableType] = [self._bars()]
        if rows:
            parts += [Text(), table(rows), *self._notes(rows[-1])]
        width = min(options.max_width - ECHO, WIDTH)
        yield Panel(
            Group(*parts), title=escape(self._title), title_align="left", subtitle=self._times(), subtitle_align="right",
            width=width,
        )  # fmt: skip

    def _bars(self) -> Table:
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        if self._total:
            grid.add_row("rounds", ProgressBar(self._total, self._completed), f"{self._completed}/{self._total} done")
        if self._step != "done":
            unknown = not self._of
            count = "" if unknown else f"{self._done}/{self._of}" + " replies" * self._step.startswith("round ")
            grid.add_row(escape(self._step), ProgressBar(self._of or None, self._done, pulse=unknown), count)
        return grid

    def _notes(self, last: Round) -> list[Text]:
        lines = {"accuracy (%, mean ± std) before, after training; MB up, down": "dim"}
        if last.phases:
            lines[f"seconds of round {last.number}: {last.phases}"] = "dim"
        if self._failed:
            lines[f"failures so far: {self._failed}"] = "bold red"
        return [Text(line, style, no_wrap=True, overflow="ellipsis") for line, style in lines.items()]

    def _times(self) -> str:
        now = time.monotonic()
        text = clock(now - self._started)
        if self._first and self._first[1] < self._completed < self._total:
            began, before = self._first
            left = (now - began) / (self._completed - before) * (self._total - self._completed)
            text += f", about {clock(left)} left"
        return text


def table(rounds: list[Round]) -> Table:
    """Return the last rounds as a table."""
    everyone = any(r.everyone for r in rounds)
    failed = any(r.failed for r in rounds)
    names = ["round", "before", "after", *["all"] * everyone, "loss", "up", "down", "seconds", *["failed"] * failed]
    out = Table(*names, box=None, padding=(0, 0, 0, 1), expand=True, header_style="bold")
    for column in out.columns:
        column.justify, column.no_wrap = "right", True
    for r in rounds:
        cells = [str(r.number), r.before, r.after, *[r.everyone] * everyone, r.loss, r.up, r.down, r.seconds]
        out.add_row(*cells, *[Text(str(r.failed), style="bold red" if r.failed else "")] * failed)
    return out


def clock(seconds: float) -> str:
    """Format a duration as h:mm:ss."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


class Display:
    """Shows a run's log lines on a console, and keeps what they tell: the run's folder, its errors, the end of its log."""

    def __init__(self, title: str, console: Console, verbose: bool = False) -> None:
        self.folder: Path | None = None
        self.errors: list[str] = []
        self.lines: deque[str] = deque(maxlen=LOG_LINES)
        self._console, self._verbose = console, verbose
        self._panel = RunPanel(title)
        self._live: Live | None = None
        if console.file.isatty() and not console.is_dumb_terminal:  # FORCE_COLOR makes no terminal of a file
            self._live = Live(self._panel, console=console, refresh_per_second=REFRESHES)

    def __enter__(self) -> Display:
        """Show the panel, on a terminal."""
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the panel as it is, or remove it if no round was finished; the terminal is as before."""
        if self._live:
            self._live.transient = not self._panel.rounds
            self._live.stop()

    def raw(self, line: str) -> None:
        """Take a line of Flower's stream; only ours, marked ones are shown unless verbose."""
        self.lines.append(line)
        if line.startswith(LOG_MARK):
            self.line(line.removeprefix(LOG_MARK))
        elif self._verbose:
            self._print(line)

    def line(self, text: str) -> None:
        """Take one of our log lines."""
        if text.startswith(FOLDER_MARK):
            self.folder = Path(text.removeprefix(FOLDER_MARK))
        elif text.startswith(ERROR_MARK):
            self.errors.append(text.removeprefix(ERROR_MARK))
        elif step := read_progress(text):
            self.progress(*step)
        elif finished := read_round(text):
            self._panel.add(finished)
            if not self._live:
                self._print(text)
        else:
            self._print(text)

    def progress(self, what: str, done: int, total: int) -> None:
        """Move the bars."""
        self._panel.progress(what, done, total)

    def _print(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True)


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
