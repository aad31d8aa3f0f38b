"""What a run's server says in its log, and how: the contract between the run's process and `corolla run`, which may be far away.

Lines of ours start with LOG_MARK, which tells them from Flower's and Ray's. Those that feed a display are written and read here
and nowhere else: a word for the kind and one value, or, for the end of a round, a sentence for people and the same as data. Imports
nothing heavy: both sides use it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_app.errors import plain
from fl_app.metrics import moments

log = logging.getLogger("corolla")

LOG_MARK = "corolla: "
# between two lines of progress
PROGRESS_SECONDS = 0.25
_FOLDER, _RESUMED, _STOPPED = "run folder: ", "resumed after round ", "stopped after round "
_ERROR, _PROGRESS, _DATA, _LEFT_OUT = "error: ", "progress: ", " | data: ", " cannot take part: "


@dataclass(frozen=True)
class Folder:
    """The run's folder is made, and its first round begins."""

    path: Path


@dataclass(frozen=True)
class Resumed:
    """The run goes on after a round it had before."""

    round: int


@dataclass(frozen=True)
class Stopped:
    """The run ended after a round because somebody asked for it; it can be resumed."""

    round: int


@dataclass(frozen=True)
class LeftOut:
    """A client takes no part, and why: its site refuses, say."""

    who: str
    why: str


@dataclass(frozen=True)
class Failure:
    """A line of the error that ended the run."""

    text: str


@dataclass(frozen=True)
class Progress:
    """`done` of `total` replies of a step have arrived."""

    what: str
    done: int
    total: int


@dataclass(frozen=True)
class Round:
    """A finished round. The headline metric's means over clients, with the deviation where there is one; None: there are none.

    everyone: of all clients, where they were evaluated; seconds: by phase, `round` is their sum. metric: the headline's name;
    ratio: whether it is shown in per cent. far: uploads that were used though they lie far from the others'.
    """

    number: int
    total: int
    before: float | None
    before_deviation: float | None
    after: float | None
    after_deviation: float | None
    loss: float | None
    clients: int
    upload_bytes: int
    download_bytes: int
    seconds: dict[str, float]
    evaluated: bool
    everyone: float | None
    failed: int
    metric: str = "accuracy"
    ratio: bool = True
    far: int = 0


Line = Folder | Resumed | Stopped | LeftOut | Failure | Progress | Round


# Writing --------------------------------------------------------------------------------------------------------------


def folder_line(path: Path) -> str:
    """Name the run's folder."""
    return f"{_FOLDER}{path}"


def resumed_line(round: int) -> str:
    """Name the last round of a run that goes on."""
    return f"{_RESUMED}{round}"


def left_out_line(who: str, why: str) -> str:
    """Name a client that takes no part, and why."""
    return f"{who}{_LEFT_OUT}{why}"


def stopped_line(round: int) -> str:
    """Name the last round of a run that was asked to stop."""
    return f"{_STOPPED}{round}"


def error_lines(error: Exception) -> Iterator[str]:
    """Tell why a run ended, one line for each of the message's."""
    for line in str(error).splitlines():
        yield f"{_ERROR}{line}"


def round_line(record: Mapping[str, Any], total: int, metric: str = "accuracy", ratio: bool = True) -> str:
    """Return the line that ends a round: a sentence for people, then the same as data. record: as in metrics.jsonl."""
    name_before, name_after = moments(metric)
    before, after, loss = (_short(record[name]) for name in (name_before, name_after, "loss"))
    seconds = {phase: round(seconds, 3) for phase, seconds in record["seconds"].items()}
    everyone = _short(record.get("evaluation", {}).get(metric))
    return _write(
        Round(
            record["round"],
            total,
            before,
            _deviation(record, name_before),
            after,
            _deviation(record, name_after),
            loss,
            len(record["clients"]),
            record["upload-bytes"],
            record["download-bytes"],
            seconds,
            "evaluation" in record,
            everyone,
            len(record["failures"]),
            metric,
            ratio,
            len(record.get("far", [])),
        )
    )


def sentence(r: Round) -> str:
    """Tell a finished round in one line, for people."""
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases_of(r).items())
    line = (
        f"round {r.number}/{r.total}: {r.metric} {_value(r, r.before, r.before_deviation)} before, "
        f"{_value(r, r.after, r.after_deviation)} after training, loss {number(r.loss)}, {r.clients} clients, "
        f"{_bytes(r.upload_bytes)} up, {_bytes(r.download_bytes)} down, {r.seconds['round']:.1f} s"
    )
    line += f" ({phases})" if phases else ""
    line += f"; all clients {_value(r, r.everyone)}" if r.evaluated else ""
    line += f"; {r.failed} failed" if r.failed else ""
    return line + (f"; {r.far} far from the others" if r.far else "")


def phases_of(r: Round) -> dict[str, float]:
    """Return the phases of a round that took long enough to be shown, in seconds."""
    return {name: seconds for name, seconds in r.seconds.items() if name != "round" and seconds >= 0.05}


def byte_unit(nbytes: float) -> tuple[float, str]:
    """Return the unit in which so many bytes are told, and its name: a small model's are no megabytes."""
    return (1e3, "kB") if 0 < nbytes < 1e5 else (1e6, "MB")


def _bytes(nbytes: float) -> str:
    unit, name = byte_unit(nbytes)
    return f"{nbytes / unit:.1f} {name}"


def number(value: float | None) -> str:
    """Write a loss."""
    return "n/a" if value is None else f"{value:.3f}"


def _value(r: Round, value: float | None, deviation: float | None = None) -> str:
    if not r.ratio:
        return "n/a" if value is None else f"{value:.4g}" + ("" if deviation is None else f" ± {deviation:.2g}")
    shown = "  n/a" if value is None else f"{100 * value:5.1f}%"
    return shown + ("" if deviation is None else f" ± {100 * deviation:.1f}")


def _deviation(record: Mapping[str, Any], name: str) -> float | None:
    values = [float(row[name]) for row in record["clients"].values() if row.get(name) is not None]
    return _short(statistics.stdev(values)) if len(values) > 1 else None


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _write(r: Round) -> str:
    return f"{sentence(r)}{_DATA}{json.dumps(dataclasses.asdict(r), separators=(',', ':'))}"


class LineProgress:
    """Progress as log lines, at most four a second but for the last; a display turns them into bars.

    Who waits tells where it stands again: what came too soon after the line before it is written then.
    """

    def __init__(self) -> None:
        self._last = 0.0
        self._last_line: tuple[str, int, int] | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Log one line, unless it says what the last one did."""
        now = time.monotonic()
        if (what, done, total) != self._last_line and (done >= total or now - self._last >= PROGRESS_SECONDS):
            self._last, self._last_line = now, (what, done, total)
            log.info("%s%s", _PROGRESS, json.dumps(self._last_line))


class PlainFormatter(logging.Formatter):
    """Writes a record's lines without control characters: some of what is logged was written by clients."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record, keeping its lines."""
        return "\n".join(plain(line.replace("\t", " ")) for line in super().format(record).split("\n"))


# Reading --------------------------------------------------------------------------------------------------------------


def read_line(text: str) -> Line | None:
    """Read a line of ours back; None for one that is meant for people alone."""
    if text.startswith(_FOLDER):
        return Folder(Path(text.removeprefix(_FOLDER)))
    if text.startswith(_ERROR):
        return Failure(text.removeprefix(_ERROR))
    try:
        if text.startswith(_RESUMED):
            return Resumed(int(text.removeprefix(_RESUMED)))
        if text.startswith(_STOPPED):
            return Stopped(int(text.removeprefix(_STOPPED)))
        if text.startswith(_PROGRESS):
            what, done, total = json.loads(text.removeprefix(_PROGRESS))
            # JSON can hold what a line cannot
            return Progress(plain(str(what)), int(done), int(total))
    except (ValueError, TypeError):
        return None
    if (found := re.fullmatch(rf"(client -?\d+|a node){_LEFT_OUT}(.*)", text)) is not None:
        return LeftOut(found[1], found[2])
    return read_round(text)


def read_round(text: str) -> Round | None:
    """Read the line that ends a round; None for any other, also for one that quotes such data behind another sentence."""
    _, mark, data = text.partition(_DATA)
    if not mark:
        return None
    try:
        found = Round(**json.loads(data))
        return found if _write(found) == text else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
