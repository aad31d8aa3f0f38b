"""All that leaves a site and is no array: one table, and the function that lets its entries pass.

A client's reply is a Flower message: arrays, and records of numbers and texts. Every reply of a client passes `leaving`,
in every kind of run. An entry that TABLE does not declare, or not in the declared form, stays at the site. entries.md
has the table. A simulation's clients are on the server's machine: there, replies stay as they are.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import Any, Literal, get_args

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fl_app import reasons
from fl_app.checksums import HASHES
from fl_app.errors import MALFORMED
from fl_app.keys import Scalar
from fl_app.known_names import CLIENT_NAME
from fl_app.metrics import METRIC_ERRORS, OF_EVERY_METHOD, admits
from fl_app.server.properties import CONTENT, INPUT, KEYS, LIST, NORMALIZATION, SOFTWARE, SUMS
from fl_app.transport.flower_patches import fill
from fl_app.transport.wire import (
    AGREED,
    ARRAYS,
    BETWEEN,
    BUFFERS_SHA256,
    CLIPPED,
    COMMITTED,
    DETAILS,
    ERROR,
    FEATURE_TAGS,
    FEATURES,
    OPENED,
    PRIVATE,
    SEALED,
    SHA256,
    SHARES,
    SIGNED,
    STATE_USED,
    STATE_VERSION,
)

log = logging.getLogger("corolla")

Kind = Literal["properties", "fit", "evaluate"]

TELL = "COROLLA_SITE_TELL"
"""Environment variable of applications, with a key of site.toml."""
DETAILED = "details"


class Mode(Enum):
    """A promise of a run. A run with neither is plain; it may have both."""

    PLAIN = "plain"
    PRIVATE = "private"
    DP = "dp"


ALL = frozenset(Mode)
OPEN = frozenset({Mode.PLAIN})
_NOT_PRIVATE = frozenset({Mode.PLAIN, Mode.DP})


def modes_of(config: Mapping[str, Scalar]) -> frozenset[Mode]:
    """Return the promises of a run with this flat config. A malformed value counts as a promise."""
    budget = config.get("dp-epsilon", 0)
    found = {Mode.PRIVATE} if config.get("private", False) is not False else set()
    if isinstance(budget, bool) or budget != 0:
        found.add(Mode.DP)
    return frozenset(found) or OPEN


# The table -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ValueForm:
    """A form of values. admits: returns whether a value has it."""

    words: str
    admits: Callable[[Any], bool]


def _matching(words: str, pattern: str) -> ValueForm:
    compiled = re.compile(pattern, re.ASCII)
    return ValueForm(words, lambda value: isinstance(value, str) and compiled.fullmatch(value) is not None)


def _is_json(value: Any) -> bool:
    try:
        return isinstance(value, str) and isinstance(json.loads(value), dict | list)
    except MALFORMED:
        return False


COUNT = ValueForm("count", lambda value: type(value) is int and 0 <= value < 2**53)
NUMBER = ValueForm("number", lambda value: admits(value, float("-inf"), float("inf")))
HASH = _matching("SHA-256", "([0-9a-f]{64})?")
HASHED = _matching("hexadecimal", "[0-9a-f]{64}(,[0-9a-f]{64})*|")
VERSION = _matching("round and attempt", r"(\d{6}-\d{6})?")
COUNTS = _matching("integers", r"(\d+(,\d+)*)?")
SEALS = _matching("base64", "[A-Za-z0-9+/=]+(,[A-Za-z0-9+/=]+)*")
NAMES = _matching("names", r"([\w.-]{1,80}(,[\w.-]{1,80})*)?")
METRICS = _matching("names", r"[\w.-]{1,80}: not computed(; [\w.-]{1,80}: not computed)*")
TRUTH = ValueForm("true or false", lambda value: isinstance(value, bool))
JSON = ValueForm("JSON", _is_json)
TEXT = ValueForm("text", lambda value: isinstance(value, str))
KNOWN = ValueForm("as configured", lambda value: True)
REASON = ValueForm("reason", lambda value: isinstance(value, str) and reasons.read(value) is not None)
WORD = ValueForm("`Success`", lambda value: value == "Success")


@dataclass(frozen=True)
class Entry:
    """An entry that may leave a site.

    name: as it travels; METRIC and OWN stand for numbers whose names the run's task and method declare. of: the kinds of
    replies that have it. modes: the runs in which it leaves; a run with two promises needs both. of_data: whether it
    depends on values in the data. why: its use.
    """

    name: str
    of: tuple[Kind, ...]
    form: ValueForm
    modes: frozenset[Mode]
    of_data: bool
    why: str


METRIC, OWN = "METRIC", "METHOD'S NUMBER"
_ASKED: tuple[Kind, ...] = ("properties",)
_TRAINED: tuple[Kind, ...] = ("fit",)
_EVALUATED: tuple[Kind, ...] = ("evaluate",)
_MEASURED: tuple[Kind, ...] = ("fit", "evaluate")
_EVERY: tuple[Kind, ...] = get_args(Kind)

TABLE: tuple[Entry, ...] = (
    Entry(ERROR, _EVERY, REASON, ALL, True, "the reason for a refusal or a failure"),
    Entry(DETAILS, _EVERY, TEXT, OPEN, True, "the error's text, if site.toml allows it"),
    Entry("client-id", _ASKED, COUNT, ALL, False, "the client's number"),
    Entry("num-clients", _ASKED, COUNT, ALL, False, "its node's number of clients"),
    Entry(
        "train-samples",
        _ASKED,
        COUNT,
        ALL,
        True,
        "weights; 1 with `dp-epsilon`, and where a private run needs none",
    ),
    Entry("test-samples", (*_ASKED, *_TRAINED), COUNT, ALL, True, "weights; 1 as above"),
    Entry("in-channels", _ASKED, COUNT, ALL, True, "the model's inputs"),
    Entry("image-size", _ASKED, COUNT, ALL, True, "the model's inputs"),
    Entry("input-shape", _ASKED, COUNTS, ALL, True, "the same; a table's number of features"),
    Entry("num-classes", _ASKED, COUNT, ALL, True, "the model's outputs; of `classes` in private and dp runs"),
    Entry("class-names", _ASKED, JSON, OPEN, True, "the model's outputs, unless `report-class-counts = false`"),
    Entry("class-names", _ASKED, KNOWN, ALL, False, "the same, if `classes` declares them"),
    Entry("class-counts", _ASKED, COUNTS, OPEN, True, "the report, unless `report-class-counts = false`"),
    Entry(CLIENT_NAME, _ASKED, TEXT, OPEN, True, "the client's or its site's name"),
    Entry(FEATURES, _ASKED, JSON, _NOT_PRIVATE, True, "features, which all sites must share"),
    Entry(FEATURE_TAGS, _ASKED, HASHED, ALL, True, "the same, keyed for each other site"),
    Entry(INPUT, _ASKED, JSON, OPEN, True, "how an exported model reads raw rows"),
    Entry(SUMS, _ASKED, JSON, OPEN, True, "one scaling of all sites"),
    Entry(CONTENT, _ASKED, HASH, OPEN, True, "notices sites with the same data, where sums stay"),
    Entry(NORMALIZATION, _ASKED, JSON, OPEN, True, "the scaling of shared data"),
    *(Entry(name, _ASKED, HASH, ALL, True, "notices changed data; keyed for a site's own data") for name in HASHES),
    Entry(SOFTWARE, _ASKED, JSON, ALL, False, "versions of the site's software"),
    Entry(LIST, _ASKED, SEALS, ALL, False, "the site's list of public keys"),
    Entry(KEYS, _ASKED, SEALS, ALL, False, "the site's keys of this run, signed"),
    Entry(SEALED, _ASKED, SEALS, ALL, False, "the sketches' key, sealed"),
    Entry(SHARES, _TRAINED, SEALS, ALL, False, "shares of the upload's own mask, sealed"),
    Entry(COMMITTED, _TRAINED, HASHED, ALL, False, "hashes of these shares and the mask's seed"),
    Entry(SIGNED, _ASKED, SEALS, ALL, False, "a signature of a split of its aggregation group"),
    Entry(AGREED, _ASKED, SEALS, ALL, False, "a signature of the survivors"),
    Entry(OPENED, _ASKED, HASHED, ALL, False, "shares of the survivors' masks"),
    Entry(BETWEEN, _ASKED, HASHED, ALL, False, "the masks' keys with members that dropped out"),
    Entry(ARRAYS, _TRAINED, NAMES, ALL, False, "the reply's arrays"),
    Entry("num_examples", _MEASURED, COUNT, ALL, True, "weights; 1 as above"),
    Entry("loss", _MEASURED, NUMBER, ALL, True, "the loss; NaN with `report-accuracy = false`"),
    Entry(METRIC, _MEASURED, NUMBER, ALL, True, "the task's metrics; NaN as above"),
    Entry(OWN, _TRAINED, NUMBER, _NOT_PRIVATE, True, "declared by the method (`reports`)"),
    Entry(METRIC_ERRORS, _MEASURED, METRICS, ALL, True, "metrics that could not be computed"),
    Entry(SHA256, _EVALUATED, HASH, OPEN, True, "the run's digest"),
    Entry(BUFFERS_SHA256, _EVALUATED, HASH, OPEN, True, "the run's digest"),
    Entry(STATE_VERSION, _TRAINED, VERSION, ALL, False, "the state that this message made"),
    Entry(STATE_USED, _MEASURED, VERSION, ALL, False, "an older state that it used, if the last is damaged"),
    Entry(PRIVATE, _TRAINED, VERSION, ALL, False, "the attempt of the masks in the upload"),
    Entry(CLIPPED, _TRAINED, TRUTH, ALL, True, "whether values were clipped, once at the run's end"),
    *(
        Entry(
            one.name, _TRAINED, NUMBER, ALL if one.promised else OPEN, True, one.promised or "a number of every method"
        )
        for one in OF_EVERY_METHOD
        if one.name not in ("loss", "test-samples")
    ),
    Entry("code", _EVERY, COUNT, ALL, False, "Flower's status"),
    Entry("message", _EVERY, WORD, ALL, False, "Flower's status"),
)
"""What may leave a site beside arrays."""

_RECORDS: Mapping[Kind, tuple[str, ...]] = {
    "properties": ("getpropertiesres.properties", "getpropertiesres.status"),
    "fit": ("fitres.parameters", "fitres.num_examples", "fitres.metrics", "fitres.status"),
    "evaluate": ("evaluateres.loss", "evaluateres.num_examples", "evaluateres.metrics", "evaluateres.status"),
}


# The function --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """Limits of a run's replies. modes: the run's. details: whether the site allows them. known: entries that the server
    has sent itself. metrics, own: names of the numbers that the run's task and method declare.
    """

    modes: frozenset[Mode]
    details: bool = False
    known: Mapping[str, Scalar] = field(default_factory=dict)
    metrics: frozenset[str] = frozenset()
    own: frozenset[str] = frozenset()

    def admits(self, kind: Kind, name: str, value: object) -> bool:
        """Return whether an entry of a reply may leave the site."""
        for entry in TABLE:
            names = {METRIC: self.metrics, OWN: self.own}.get(entry.name) or (entry.name,)
            if kind not in entry.of or name not in names or not self.modes <= entry.modes:
                continue
            if entry.form is KNOWN:
                fits = name in self.known and value == self.known[name]
            else:
                fits = entry.form.admits(value)
            if fits:
                return name != DETAILS or self.details
        return False


def outgoing(kind: Kind, entries: Mapping[str, Any], way: Way) -> dict[str, Any]:
    """Return the entries of a reply that may leave. The site's log names the others."""
    kept = {name: value for name, value in entries.items() if way.admits(kind, name, value)}
    if stay := sorted(entries.keys() - kept.keys() - {DETAILS}):
        log.warning("%s: these entries stay at the site: %s", kind, ", ".join(stay))
    return kept


def leaving(kind: Kind, content: RecordDict, way: Way) -> RecordDict:
    """Return a reply's content as it may leave: its arrays, and those entries of its records that may."""
    left = RecordDict()
    for name, record in content.items():
        if name not in _RECORDS[kind]:
            continue
        if isinstance(record, ArrayRecord):
            left[name] = record
        elif isinstance(record, ConfigRecord):
            left[name] = fill(ConfigRecord(), outgoing(kind, dict(record), way))
        elif isinstance(record, MetricRecord):
            left[name] = fill(MetricRecord(), outgoing(kind, dict(record), way))
    return left


def table() -> list[str]:
    """Return the table in Markdown, for entries.md. Entries of one kind that follow each other share a row."""
    lines = ["| entries | type | leaves in runs | of the data | use |", "|---|---|---|---|---|"]
    for cells, entries in groupby(TABLE, _cells):
        names = (entry.name.lower() if entry.name in (METRIC, OWN) else f"`{entry.name}`" for entry in entries)
        lines.append(f"| {', '.join(names)} | {' | '.join(cells)} |")
    return lines


def _cells(entry: Entry) -> tuple[str, ...]:
    """Return an entry's cells behind its name."""
    modes = "all" if entry.modes == ALL else ", ".join(mode.value for mode in Mode if mode in entry.modes)
    return entry.form.words, modes, "yes" if entry.of_data else "no", entry.why
