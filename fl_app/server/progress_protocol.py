"""The run's log lines: the contract between the run's process and `corolla run`, possibly on another machine.

Corolla's lines start with LOG_MARK, which separates them from Flower's and Ray's. Lines that feed a display are written
and read only in this module. Each is a word for its kind and one value. The line that ends a round is a sentence for
people, followed by the same as data. Both sides import this module, so it imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_app.debugging import is_aside
from fl_app.errors import MALFORMED, plain, plain_lines
from fl_app.log_format import JsonFormatter
from fl_app.metrics import moments

log = logging.getLogger("corolla")

LOG_MARK = "corolla: "
# The line of a round with more clients also has the spread over clients.
MANY = 60
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
BINS = 20
# Seconds between two lines of progress.
PROGRESS_SECONDS = 0.25
_FOLDER, _RESUMED, _STOPPED = "run folder: ", "resumed after round ", "stopped after round "
_ERROR, _PROGRESS, _DATA, _LEFT_OUT = "error: ", "progress: ", " | data: ", " cannot take part: "
_CRASH = "crashed: "
# the ServerApp's, in JSON lines
COMPONENT = "serverapp"
# how a JSON line begins
_JSON = '{"time":'


@dataclass(frozen=True)
class Folder:
    """The run folder has been made, and the first round begins."""

    path: Path


@dataclass(frozen=True)
class Resumed:
    """The run continues after a round of an earlier start."""

    round: int


@dataclass(frozen=True)
class Stopped:
    """The run ended after a round at a user's request. It can be resumed."""

    round: int


@dataclass(frozen=True)
class LeftOut:
    """A client takes no part, with the reason, such as its site's refusal."""

    who: str
    why: str


@dataclass(frozen=True)
class Failure:
    """A line of the error that ended the run."""

    text: str


@dataclass(frozen=True)
class Crash:
    """The exception of the user's own code that ended the run, and the place where it was raised."""

    text: str


@dataclass(frozen=True)
class Progress:
    """`done` of `total` replies of a step have arrived."""

    what: str
    done: int
    total: int


@dataclass(frozen=True)
class Round:
    """A finished round: the headline metric's means over clients. None: no client has it.

    before, after: means before and after training, with their standard deviation over clients (None for fewer than
    two). everyone: mean over all clients, if they were evaluated. seconds: by phase; `round` is their sum. metric: the
    headline's name. ratio: whether it is shown in per cent. far: number of far uploads that were used. partial: the
    clients that the means leave out, and the reason. simulated: seconds of simulated time. working: number of clients
    that the round did not wait for.

    quantiles: of the clients' metric before training, at QUANTILES. histogram: number of clients in each of BINS equal
    bins, from 0 to 1 for a ratio, else from the smallest to the largest value. Both are empty for up to MANY clients.
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
    partial: str = ""
    quantiles: tuple[float, ...] = ()
    histogram: tuple[int, ...] = ()
    simulated: float | None = None
    working: int = 0


Line = Folder | Resumed | Stopped | LeftOut | Failure | Crash | Progress | Round


# Writing --------------------------------------------------------------------------------------------------------------


def folder_line(path: Path) -> str:
    """Return the line that names the run's folder."""
    return f"{_FOLDER}{path}"


def resumed_line(round: int) -> str:
    """Return the line of a resumed run that names the last round before its start."""
    return f"{_RESUMED}{round}"


def left_out_line(who: str, why: str) -> str:
    """Return the line for a client that takes no part, with the reason."""
    return f"{who}{_LEFT_OUT}{why}"


def stopped_line(round: int) -> str:
    """Return the line that names the last round of a run that stopped at a user's request."""
    return f"{_STOPPED}{round}"


def error_lines(error: Exception) -> Iterator[str]:
    """Yield a line for each line of the error that ended a run."""
    for line in str(error).splitlines():
        yield f"{_ERROR}{line}"


def crash_line(what: str) -> str:
    """Return the line for the exception of the user's own code that ended the run."""
    return f"{_CRASH}{what}"


def round_line(
    record: Mapping[str, Any], total: int, metric: str = "accuracy", ratio: bool = True, partial: str = ""
) -> str:
    """Return the line that ends a round: a sentence for people, then the same as data.

    record: as in metrics.jsonl. metric, ratio, partial: as in Round.
    """
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
            partial,
            *_spread(record, name_before, ratio),
            _short(record.get("virtual-seconds")),
            len(record.get("working", [])),
        )
    )


def sentence(r: Round) -> str:
    """Return a finished round as one line for people."""
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases_of(r).items())
    line = (
        f"round {r.number}/{r.total}: {r.metric} {_value(r, r.before, r.before_deviation)} before, "
        f"{_value(r, r.after, r.after_deviation)} after training, loss {number(r.loss)}, {r.clients} clients, "
        f"{_bytes(r.upload_bytes)} up, {_bytes(r.download_bytes)} down, {r.seconds['round']:.1f} s"
    )
    line += f" ({phases})" if phases else ""
    line += "" if r.simulated is None else f"; {r.simulated:.4g} s of simulated time"
    line += f"; {r.working} still working" if r.working else ""
    line += f"; all clients {_value(r, r.everyone)}" if r.evaluated else ""
    line += f"; {r.failed} failed" if r.failed else ""
    line += f"; {r.far} far from the others" if r.far else ""
    return line + (f"; {r.partial}" if r.partial else "")


def phases_of(r: Round) -> dict[str, float]:
    """Return the seconds of a round's phases. Phases that are too short to show (below 0.05 s) are left out."""
    return {name: seconds for name, seconds in r.seconds.items() if name != "round" and seconds >= 0.05}


def byte_unit(nbytes: float) -> tuple[float, str]:
    """Return a unit for this number of bytes, in bytes, and its name: kB below 100 kB, else MB."""
    return (1e3, "kB") if 0 < nbytes < 1e5 else (1e6, "MB")


def _bytes(nbytes: float) -> str:
    unit, name = byte_unit(nbytes)
    return f"{nbytes / unit:.1f} {name}"


def number(value: float | None) -> str:
    """Return a loss as text."""
    return "n/a" if value is None else f"{value:.3f}"


def _value(r: Round, value: float | None, deviation: float | None = None) -> str:
    if not r.ratio:
        return "n/a" if value is None else f"{value:.4g}" + ("" if deviation is None else f" ± {deviation:.2g}")
    shown = "  n/a" if value is None else f"{100 * value:5.1f}%"
    return shown + ("" if deviation is None else f" ± {100 * deviation:.1f}")


def _deviation(record: Mapping[str, Any], name: str) -> float | None:
    values = [float(row[name]) for row in record["clients"].values() if row.get(name) is not None]
    return _short(statistics.stdev(values)) if len(values) > 1 else None


def _spread(record: Mapping[str, Any], name: str, ratio: bool) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return quantiles and histogram of a metric over the round's clients; both empty unless more than MANY have it."""
    values = sorted(float(row[name]) for row in record["clients"].values() if row.get(name) is not None)
    if len(values) <= MANY:
        return (), ()
    low, high = (0.0, 1.0) if ratio else (values[0], values[-1])
    bins = [0] * BINS
    for value in values:
        place = (value - low) / (high - low) * BINS if high > low else 0
        bins[min(int(place), BINS - 1)] += 1
    # the value with at most that share of all values below it
    return tuple(round(values[int(share * (len(values) - 1))], 6) for share in QUANTILES), tuple(bins)


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _write(r: Round) -> str:
    # what a run does not have is left out
    unset = {"simulated": None, "working": 0, "quantiles": (), "histogram": ()}
    data = {name: value for name, value in vars(r).items() if name not in unset or value != unset[name]}
    return f"{sentence(r)}{_DATA}{json.dumps(data, separators=(',', ':'))}"


class LineProgress:
    """Progress as log lines, at most four a second except the last. A display turns them into bars.

    A waiting caller reports its progress repeatedly. So a report that came too soon after the line before it is written
    later.
    """

    def __init__(self) -> None:
        self._last = 0.0
        self._last_line: tuple[str, int, int] | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Log one line, unless it equals the line before it or comes too soon after it."""
        now = time.monotonic()
        # `done` may exceed `total`: only an equal one is the last
        if (what, done, total) != self._last_line and (done == total or now - self._last >= PROGRESS_SECONDS):
            self._last, self._last_line = now, (what, done, total)
            log.info("%s%s", _PROGRESS, json.dumps(self._last_line))


class PlainFormatter(logging.Formatter):
    """Prefixes a record's lines with LOG_MARK and removes control characters: clients wrote some of the text."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's lines. A traceback has no mark: displays show it among the lines of other programs."""
        mark = "" if is_aside(record) else LOG_MARK
        return mark + plain_lines(super().format(record))


class JsonLines(JsonFormatter):
    """Writes the ServerApp's records as JSON lines.

    displayed: whether a display reads the lines: `line` then has the text for it. always: fields of every line.
    """

    def __init__(self, displayed: bool = True, **always: Any) -> None:
        super().__init__(COMPONENT, **always)
        self.displayed = displayed

    def described(self, message: str, fields: dict[str, Any]) -> str:
        """Return the message for people, and add the fields that the line has: run, round, client."""
        found = read_line(message)
        if found is None:
            return message
        if self.displayed:
            fields["line"] = message
        match found:
            case Folder(path):
                self.always["run"] = fields["run"] = path.name
            case Resumed(number) | Stopped(number) | Round(number=number):
                fields["round"] = number
            case LeftOut(who) if who.startswith("client "):
                fields["client"] = int(who.removeprefix("client "))
        return sentence(found) if isinstance(found, Round) else message


# Reading --------------------------------------------------------------------------------------------------------------


def own_text(line: str) -> str | None:
    """Return the text of one of Corolla's lines in a stream, marked or JSON. Return None for another program's line."""
    if line.startswith(LOG_MARK):
        return line.removeprefix(LOG_MARK)
    if line.startswith(_JSON):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            fields = json.loads(line)
            if fields["component"] == COMPONENT and "trace" not in fields:
                return str(fields.get("line", fields["message"]))
    return None


def read_line(text: str) -> Line | None:
    """Parse a line of Corolla's. Return None for a line that is for people only."""
    if text.startswith(_FOLDER):
        return Folder(Path(text.removeprefix(_FOLDER)))
    if text.startswith(_ERROR):
        return Failure(text.removeprefix(_ERROR))
    if text.startswith(_CRASH):
        return Crash(text.removeprefix(_CRASH))
    try:
        if text.startswith(_RESUMED):
            return Resumed(int(text.removeprefix(_RESUMED)))
        if text.startswith(_STOPPED):
            return Stopped(int(text.removeprefix(_STOPPED)))
        if text.startswith(_PROGRESS):
            what, done, total = json.loads(text.removeprefix(_PROGRESS))
            # JSON can hold control characters
            return Progress(plain(str(what)), int(done), int(total))
    except (ValueError, TypeError):
        return None
    if (found := re.fullmatch(rf"(client -?\d+|a node){_LEFT_OUT}(.*)", text)) is not None:
        return LeftOut(found[1], found[2])
    return read_round(text)


def read_round(text: str) -> Round | None:
    """Parse the line that ends a round. Return None for any other line, even if it quotes a round's data."""
    _, mark, data = text.partition(_DATA)
    if not mark:
        return None
    try:
        fields: dict[str, Any] = json.loads(data)
        for name, value in fields.items():
            fields[name] = tuple(value) if isinstance(value, list) else value
        found = Round(**fields)
        return found if _write(found) == text else None
    except MALFORMED:
        return None
