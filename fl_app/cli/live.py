"""What `corolla run` shows while a run goes on: a live panel on a terminal, one plain line per round elsewhere.

Both are fed by the run's own log lines (fl_app/server/log_lines.py), whether they come from this process, from a simulation's or
from a SuperLink on another machine.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fl_app.server import log_lines
from fl_app.server.log_lines import LOG_MARK, Failure, Folder, Progress, Resumed, Round

ROWS = 8  # of the last rounds
OTHER_LINES = 10  # of the panel, besides these
WIDTH = 100
ECHO = 3  # columns left free: a ^C that the terminal echoes must not start a line
REFRESHES = 5  # per second
LOG_LINES = 40  # kept for when the run fails

class RunPanel:
    """The panel: bars for the rounds and for the replies of the current one, a table of the last rounds, failures."""

    def __init__(self, title: str, rounds: int) -> None:
        self.rounds: deque[Round] = deque(maxlen=ROWS)
        self._title = title
        self._step, self._done, self._of = "starting", 0, 0
        self._completed, self._total = 0, rounds
        self._failed = 0
        self._started = time.monotonic()
        self._first: tuple[float, int] | None = None  # when the first round shown began, and the rounds before it

    def progress(self, what: str, done: int, total: int) -> None:
        """Take in that `done` of `total` replies of a step have arrived."""
        self._step, self._done, self._of = what, done, total

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
            count = "" if unknown else f"{self._done}/{self._of}" + " replies" * bool(self._first)
            grid.add_row(escape(self._step), ProgressBar(self._of or None, self._done, pulse=unknown), count)
        return grid

    def _notes(self, last: Round) -> list[Text]:
        lines = {"accuracy (%, mean ± std) before, after training; MB up, down": "dim"}
        if phases := log_lines.phases_of(last):
            lines[f"seconds of round {last.number}: " + ", ".join(f"{k} {v:.1f}" for k, v in phases.items())] = "dim"
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
    everyone = any(r.evaluated for r in rounds)
    failed = any(r.failed for r in rounds)
    names = ["round", "before", "after", *["all"] * everyone, "loss", "up", "down", "seconds", *["failed"] * failed]
    out = Table(*names, box=None, padding=(0, 0, 0, 1), expand=True, header_style="bold")
    for column in out.columns:
        column.justify, column.no_wrap = "right", True
    for r in rounds:
        before, after = percent(r.before, r.before_deviation), percent(r.after, r.after_deviation)
        cells = [str(r.number), before, after, *[percent(r.everyone) if r.evaluated else ""] * everyone, log_lines.number(r.loss)]
        cells += [f"{r.upload_bytes / 1e6:.1f}", f"{r.download_bytes / 1e6:.1f}", f"{r.seconds['round']:.1f}"]
        out.add_row(*cells, *[Text(str(r.failed), style="bold red" if r.failed else "")] * failed)
    return out


def percent(value: float | None, deviation: float | None = None) -> str:
    """Format an accuracy in per cent."""
    if value is None:
        return "n/a"
    return f"{100 * value:.1f}" + ("" if deviation is None else f" ± {100 * deviation:.1f}")


def clock(seconds: float) -> str:
    """Format a duration as h:mm:ss."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


class Display:
    """Shows a run's log lines on a console, and keeps what they tell: the run's folder, its errors, the end of its log."""

    def __init__(self, title: str, console: Console, rounds: int, verbose: bool = False) -> None:
        self.folder: Path | None = None
        self.errors: list[str] = []
        self.lines: deque[str] = deque(maxlen=LOG_LINES)
        self._console, self._verbose = console, verbose
        self._panel = RunPanel(title, rounds)
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
        match log_lines.read(text):
            case Folder(path):
                self.folder = path
                self._panel.begin(0)
            case Resumed(round):
                self._panel.begin(round)
                self._print(text)
            case Failure(line):
                self.errors.append(line)
            case Progress(what, done, total):
                self.progress(what, done, total)
            case Round() as finished:
                self._panel.add(finished)
                if not self._live:
                    self._print(log_lines.sentence(finished))
            case None:
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
