"""The events of a run: what displays, logs, trackers and programs learn of it, each once.

An event is a record of the logger `corolla`. People read its sentence, also in the run's `log.txt`. Programs read it as a
JSON object in one line: in the run's `events.jsonl`, on the output of `corolla run --events`, and in the log stream of a
process that `corolla run` started, possibly on another machine. docs/runs.md lists the events. Both ends import this module,
so it imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, cast

from fl_app import debugging, log_format
from fl_app.debugging import is_aside, trace_to_show
from fl_app.errors import MALFORMED, UserError, plain, plain_lines
from fl_app.files import opener
from fl_app.log_format import JsonFormatter, TextFormatter, utc
from fl_app.metrics import moments

log = logging.getLogger("corolla")

# how a line of Corolla's begins in a log stream
LOG_MARK = "corolla: "
# The event of a round with more clients also has the spread over clients.
MANY = 60
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
BINS = 20
# Seconds between two events of progress.
PROGRESS_SECONDS = 0.25
# the ServerApp's, in JSON log lines
COMPONENT = "serverapp"
# how a JSON log line begins
_JSON = '{"time":'
# attribute of log records
_EVENT = "corolla_event"
OTHER_CAUSE = "other"
# Kinds of failures: a few words for the many causes in `failures` of metrics.jsonl. The first pattern that is found decides.
_CAUSES = {
    "refused": r"refused by its site",
    "late": r"^no reply within ",
    "unavailable": r"^error \d+: .*(Node Unavailable|unavailable)|could not be delivered",
    "ended": r"^error \d+: ",
    "malformed": r"^malformed ",
    "diverged": r"non-finite|diverged",
    "state": r"\bstate\b",
    "memory": r"memory",
    "array": r"^array |^mask |^expected the arrays ",
}
CAUSES = (*_CAUSES, OTHER_CAUSE)
"""All kinds of failures, in the order in which they are tried."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """What all events have. Texts lose their control characters: clients wrote some of them.

    level: of its line in logs. words: its sentence, with its fields in braces. time: when it happened, UTC.
    """

    level: ClassVar[int] = logging.INFO
    words: ClassVar[str]
    time: str = field(default_factory=lambda: utc(time.time()), compare=False)

    def __post_init__(self) -> None:
        """Clean the texts. A message may have several lines."""
        for name, value in vars(self).items():
            object.__setattr__(self, name, plain_lines(value) if name == "message" else _clean(value))

    @property
    def sentence(self) -> str:
        """The event for people."""
        return self.words.format(**vars(self))


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """The run folder exists, and the rounds begin.

    folder: the run folder. round: the last round of an earlier start, 0 for a new run. rounds: of the run in all.
    """

    words: ClassVar[str] = "run folder: {folder}"
    folder: str
    method: str = ""
    round: int = 0
    rounds: int = 0


@dataclass(frozen=True, kw_only=True)
class Progress(Event):
    """`done` of `total` pieces of a step are done, such as replies of a round. total: 0 if the number is unknown."""

    words: ClassVar[str] = "{what}: {done:d}/{total:d}"
    what: str
    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class LeftOut(Event):
    """A client takes no part, with the reason, such as its site's refusal. who: `client 3`, or `a node`."""

    level: ClassVar[int] = logging.WARNING
    words: ClassVar[str] = "{who} cannot take part: {why}"
    who: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Note(Event):
    """A line for people."""

    words: ClassVar[str] = "{message}"
    message: str


@dataclass(frozen=True, kw_only=True)
class Warned(Note):
    """A warning, or an error after which the run continues."""

    level: ClassVar[int] = logging.WARNING


@dataclass(frozen=True, kw_only=True)
class Round(Event):
    """A finished round: the headline metric's means over clients. None: no client has it.

    before, after: means before and after training, with their standard deviation over clients (None for fewer than
    two). all_clients: mean over all clients, if they were `evaluated`. metric: the headline's name. ratio: whether it is
    shown in per cent. clients: number of clients with results. seconds: by phase; `round` is their sum. failures: client
    and kind of cause of each dropped reply. far: number of far uploads that were used. left_out: number of nodes that
    take no part. partial: the clients that the means leave out, and the reason. virtual_seconds: of simulated time.
    working: number of clients that the round did not wait for. of_clients: clients that a round should have results of; 0 if
    none is missing. all_of: (clients in the mean over all clients, their number), empty if none is missing.

    quantiles: of the clients' metric before training, at QUANTILES. histogram: number of clients in each of BINS equal
    bins, from 0 to 1 for a ratio, else from the smallest to the largest value. Both are empty for up to MANY clients.
    """

    round: int
    rounds: int
    metric: str
    ratio: bool
    before: float | None
    before_deviation: float | None
    after: float | None
    after_deviation: float | None
    loss: float | None
    evaluated: bool
    all_clients: float | None
    clients: int
    upload_bytes: int
    download_bytes: int
    seconds: Mapping[str, float]
    failures: Sequence[Mapping[str, Any]] = ()
    far: int = 0
    left_out: int = 0
    partial: str = ""
    quantiles: Sequence[float] = ()
    histogram: Sequence[int] = ()
    virtual_seconds: float | None = None
    working: int = 0
    of_clients: int = 0
    all_of: Sequence[int] = ()

    @classmethod
    def of(
        cls,
        record: Mapping[str, Any],
        rounds: int,
        metric: str = "accuracy",
        ratio: bool = True,
        partial: str = "",
        expected: int = 0,
    ) -> Round:
        """Return the event of a round from its record in metrics.jsonl.

        metric, ratio, partial: as in Round. expected: number of clients that the round should have results of.
        """
        evaluation = record.get("evaluation", {})
        among = (int(evaluation.get("evaluated", 0)), int(evaluation.get("expected", 0)))
        name_before, name_after = moments(metric)
        quantiles, histogram = _spread(record, name_before, ratio)
        return cls(
            round=record["round"],
            rounds=rounds,
            metric=metric,
            ratio=ratio,
            before=_short(record[name_before]),
            before_deviation=_deviation(record, name_before),
            after=_short(record[name_after]),
            after_deviation=_deviation(record, name_after),
            loss=_short(record["loss"]),
            evaluated="evaluation" in record,
            all_clients=_short(record.get("evaluation", {}).get(metric)),
            clients=len(record["clients"]),
            upload_bytes=record["upload-bytes"],
            download_bytes=record["download-bytes"],
            seconds={phase: round(seconds, 3) for phase, seconds in record["seconds"].items()},
            failures=[{"client": f["client"], "cause": cause_kind(f["cause"])} for f in record["failures"]],
            far=len(record.get("far", ())),
            left_out=len(record.get("left-out", ())),
            partial=partial,
            quantiles=quantiles,
            histogram=histogram,
            virtual_seconds=_short(record.get("virtual-seconds")),
            working=len(record.get("working", ())),
            of_clients=expected if expected > len(record["clients"]) else 0,
            all_of=among if among[0] < among[1] else (),
        )

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase. Phases that are too short to show (below 0.05 s) are left out."""
        return {name: seconds for name, seconds in self.seconds.items() if name != "round" and seconds >= 0.05}

    @property
    def of_all(self) -> str:
        """The number of clients in the means: `6 clients`, or `4 of 6 clients`."""
        return f"{self.clients}{f' of {self.of_clients}' if self.of_clients else ''} clients"

    @property
    def sentence(self) -> str:
        """The round in one line."""
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.phases.items())
        line = (
            f"round {self.round}/{self.rounds}: {self.metric} {self._shown(self.before, self.before_deviation)} before, "
            f"{self._shown(self.after, self.after_deviation)} after training, loss {number(self.loss)}, "
            f"{self.of_all}, {_bytes(self.upload_bytes)} up, {_bytes(self.download_bytes)} down, "
            f"{self.seconds['round']:.1f} s"
        )
        line += f" ({phases})" if phases else ""
        line += "" if self.virtual_seconds is None else f"; {self.virtual_seconds:.4g} s of simulated time"
        line += f"; {self.working} still working" if self.working else ""
        whose = "{} of {}".format(*self.all_of) if self.all_of else "all"
        line += f"; {whose} clients {self._shown(self.all_clients)}" if self.evaluated else ""
        line += f"; {len(self.failures)} failed" if self.failures else ""
        line += f"; {self.far} far from the others" if self.far else ""
        return line + (f"; {self.partial}" if self.partial else "")

    def _shown(self, value: float | None, deviation: float | None = None) -> str:
        return shown(value, deviation, self.ratio, "%")


@dataclass(frozen=True, kw_only=True)
class Stopped(Event):
    """The run ended after a round at a user's request. It can be resumed."""

    words: ClassVar[str] = "stopped after round {round:d}"
    round: int


@dataclass(frozen=True, kw_only=True)
class Finished(Event):
    """The run is complete. summary: the content of summary.json."""

    words: ClassVar[str] = "finished after {summary[rounds]} rounds"
    summary: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """An error ended the run.

    kind: `input` for input that a user can correct, `own-code` for an exception in the user's own files, else
    `internal`.
    """

    level: ClassVar[int] = logging.ERROR
    words: ClassVar[str] = "error: {message}"
    kind: Literal["input", "own-code", "internal"]
    message: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """Return the event of an exception."""
        if isinstance(error, UserError):
            return cls(kind="input", message=str(error))
        return cls(kind="own-code" if debugging.place_of(error) else "internal", message=debugging.reason(error))


KINDS: dict[str, type[Event]] = {
    "started": Started,
    "progress": Progress,
    "round": Round,
    "left-out": LeftOut,
    "note": Note,
    "warning": Warned,
    "stopped": Stopped,
    "finished": Finished,
    "failed": Failed,
}
"""Events by the word that JSON has for them."""
_WORDS = {kind: word for word, kind in KINDS.items()}


# In the log -----------------------------------------------------------------------------------------------------------


def tell(event: Event) -> None:
    """Log an event."""
    log.log(event.level, "%s", event.sentence, extra={_EVENT: event})


def record_of(event: Event) -> logging.LogRecord:
    """Return a log record with an event."""
    about = {"name": log.name, "levelno": event.level, "levelname": logging.getLevelName(event.level)}
    return logging.makeLogRecord({**about, "msg": "%s", "args": (event.sentence,), _EVENT: event})


def event_of(record: logging.LogRecord) -> Event:
    """Return a log record's event. A record of any other line is a note or a warning."""
    found: Event | None = getattr(record, _EVENT, None)
    if found is not None:
        return found
    kind = Warned if record.levelno >= logging.WARNING else Note
    return kind(message=record.getMessage(), time=utc(record.created))


def is_no_progress(record: logging.LogRecord) -> bool:
    """Return whether a log record is something else than progress. A filter of log handlers."""
    return not isinstance(event_of(record), Progress)


class ProgressEvents:
    """Progress as events, at most four a second except the last. take: gets them.

    A waiting caller reports its progress repeatedly. So a report that came too soon after the event before it is repeated
    later.
    """

    def __init__(self, take: Callable[[Event], None] = tell) -> None:
        self._take = take
        self._last = 0.0
        self._last_event: Progress | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Pass on one event, unless it equals the one before it or comes too soon after it."""
        now, event = time.monotonic(), Progress(what=what, done=done, total=total)
        # `done` may exceed `total`: only an equal one is the last
        if event != self._last_event and (done == total or now - self._last >= PROGRESS_SECONDS):
            self._last, self._last_event = now, event
            self._take(event)


class StreamFormatter(TextFormatter):
    """Writes log records for people, or as events.

    as_events: for `corolla run`, which reads them. Tracebacks have no mark: displays show them among the lines of other
    programs.
    """

    def __init__(self, as_events: bool = False) -> None:
        super().__init__()
        self.as_events = as_events

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's lines."""
        if is_aside(record):
            return plain_lines(record.getMessage())
        return LOG_MARK + encode(event_of(record)) if self.as_events else super().format(record)


class JsonLines(JsonFormatter):
    """Writes the ServerApp's records as JSON log lines, with their events. always: fields of every line."""

    def __init__(self, **always: Any) -> None:
        super().__init__(COMPONENT, **always)

    def more(self, record: logging.LogRecord) -> dict[str, Any]:
        """Return the event, and the run, round and client that it is about."""
        event = getattr(record, _EVENT, None)
        if event is None:
            return {}
        found: dict[str, Any] = {"event": _table(event)}
        match event:
            case Started(folder=folder):
                self.always["run"] = found["run"] = folder.rpartition("/")[2]
            case Stopped(round=number) | Round(round=number):
                found["round"] = number
            case LeftOut(who=who) if who.startswith("client "):
                found["client"] = int(who.removeprefix("client "))
        return found


# As JSON --------------------------------------------------------------------------------------------------------------


def encode(event: Event) -> str:
    """Return an event as one JSON line, in ASCII. Fields that a run does not have are left out."""
    return json.dumps(_table(event), separators=(",", ":"))


def decode(text: str) -> Event:
    """Return the event of a JSON line. Raises an error of MALFORMED for any other text."""
    return _read(json.loads(text))


def read(line: str) -> Event | None:
    """Return the event in a line of a run's log stream, marked or JSON. Return None for another program's line."""
    try:
        if line.startswith(LOG_MARK + "{"):
            return decode(line.removeprefix(LOG_MARK))
        if line.startswith(_JSON):
            told = json.loads(line)
            if told["component"] != COMPONENT or "trace" in told:
                return None
            kind = Note if told["level"] == "info" else Warned
            return _read(told["event"]) if "event" in told else kind(message=str(told["message"]))
    except MALFORMED:
        return None
    return Note(message=line.removeprefix(LOG_MARK)) if line.startswith(LOG_MARK) else None


def _table(event: Event) -> dict[str, Any]:
    """Return an event's fields as JSON has them, without those that have their default."""
    told = {each.name: getattr(event, each.name) for each in fields(event)}
    optional = {each.name: _clean(each.default) for each in fields(event) if each.default is not MISSING}
    kept = {name: value for name, value in told.items() if name not in optional or value != optional[name]}
    return {"event": _WORDS[type(event)], **{name.replace("_", "-"): value for name, value in kept.items()}}


def _read(told: dict[str, Any]) -> Event:
    kind = KINDS[told["event"]]
    event = kind(**{name.replace("-", "_"): value for name, value in told.items() if name != "event"})
    # fails for fields of wrong types
    _ = event.sentence
    return event


# Parts ----------------------------------------------------------------------------------------------------------------


def cause_kind(cause: str) -> str:
    """Return the kind of a failure's cause, one of CAUSES.

    Clients write parts of causes. So their text cannot name a metric's label, of which there must be few.
    """
    return next((name for name, pattern in _CAUSES.items() if re.search(pattern, cause)), OTHER_CAUSE)


def byte_unit(nbytes: float) -> tuple[float, str]:
    """Return a unit for this number of bytes, in bytes, and its name: kB below 100 kB, else MB."""
    return (1e3, "kB") if 0 < nbytes < 1e5 else (1e6, "MB")


def shown(value: float | None, deviation: float | None, ratio: bool, unit: str = "") -> str:
    """Return a metric as text, with its standard deviation if that is known. ratio: whether it is shown in per cent."""
    if ratio:
        text = f"{'n/a':>5}" if value is None else f"{100 * value:5.1f}{unit}"
        return text if deviation is None else f"{text} ± {100 * deviation:.1f}"
    text = "n/a" if value is None else f"{value:.4g}"
    return text if deviation is None else f"{text} ± {deviation:.2g}"


def number(value: float | None) -> str:
    """Return a loss as text."""
    return "n/a" if value is None else f"{value:.3f}"


def _bytes(nbytes: float) -> str:
    unit, name = byte_unit(nbytes)
    return f"{nbytes / unit:.1f} {name}"


def _clean(value: Any) -> Any:
    """Return a value of JSON without control characters."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, Mapping):
        return {plain(str(name)): _clean(inner) for name, inner in value.items()}
    return list(map(_clean, value)) if isinstance(value, list | tuple) else value


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


NAME, JSON_NAME, EVENTS = "log.txt", "log.jsonl", "events.jsonl"


class RunLog(logging.FileHandler):
    """Appends this process's log to a file in the run's folder, after the lines of earlier starts, until it is closed.

    lines: returns a record's lines. Progress is left out. A full disk loses log lines without an error: the writers of essential
    files raise their own.
    """

    def __init__(self, path: Path, lines: Callable[[logging.LogRecord], str]) -> None:
        # an earlier start may have been killed within a line
        with contextlib.suppress(OSError):
            if path.read_bytes()[-1:] not in (b"", b"\n"):
                path.open("a").write("\n")
        super().__init__(path, encoding="utf-8")
        self._lines = lines
        self.addFilter(is_no_progress)
        log.addHandler(self)

    def close(self) -> None:
        """Stop logging."""
        log.removeHandler(self)
        super().close()

    def ended_by(self, error: Exception) -> None:
        """Write the error that ended the run, and its traceback."""
        trace = trace_to_show(error)
        for event in (Failed.of(error), *([Note(message=trace)] if trace else [])):
            self.handle(record_of(event))

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's lines."""
        return self._lines(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Continue without the line."""

    def _open(self) -> IO[Any]:  # type: ignore[override]
        return cast(IO[Any], open(self.baseFilename, "a", encoding="utf-8", opener=opener))


def _text(record: logging.LogRecord) -> str:
    """Return a record's lines as plain text. The first one begins with the time."""
    when = time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(record.created))
    return when + plain_lines(record.getMessage())


def begin_logs(folder: Path) -> list[RunLog]:
    """Begin the logs of a run's folder: text, events, and also JSON lines if the deployment's log lines are JSON."""
    logs = [RunLog(folder / NAME, _text), RunLog(folder / EVENTS, lambda record: encode(event_of(record)))]
    if log_format.is_json():
        logs.append(RunLog(folder / JSON_NAME, JsonLines(run=folder.name).format))
    return logs
