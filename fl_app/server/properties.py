"""A client's properties: its answer when it connects, checked before use."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from fl_app import software
from fl_app.checksums import HASHES, told_hashes
from fl_app.config import RunConfig
from fl_app.data.encoding import Encoding, of_features
from fl_app.data.moments import PIXEL, MomentSums
from fl_app.errors import MALFORMED, UserError, counted, plain
from fl_app.keys import Scalar
from fl_app.known_names import CLIENT_NAME, SCALING
from fl_app.privacy.transcript import config_hash
from fl_app.transport.wire import DETAILS, ERROR, FEATURE_TAGS, FEATURES, PRIVATE, WIRE_VERSION, WireError

if TYPE_CHECKING:
    from fl_app.privacy.keyring import KeyList, Statements

Properties = dict[str, Scalar]

MOST_CLIENTS = 10**6
SAMPLES = ("train-samples", "test-samples")
_COUNTS = (("in-channels", 1), ("image-size", 1), ("num-classes", 1), *((name, 0) for name in SAMPLES))
LIST, KEYS = f"{PRIVATE}-list", f"{PRIVATE}-keys"  # of private runs
NORMALIZATION = "normalization"
"""How a client's numbers are normalized, shifted and scaled, as JSON."""
SUMS = "sums"
"""Exact sums over a site's training samples (fl_app/data/moments.py).

All sites' sums give common mean and deviation.
"""
CONTENT = "content-sha256"
"""A hash of a site's training samples, in any order, if the site sends no sums. Two sites with the same have the same data."""
MODEL_NAMES = "initial-names"
"""The features and classes of the model that a run starts from, as JSON. A private run's server sends them, to compare."""
INPUT = "input"
"""How samples are stored, and how a table's columns become features, as JSON. An exported model reads raw rows by it.
"""
COLUMNS = "run-columns"
"""The columns of the run in their order, as JSON: the server sends them to a site whose own have another order, or are more."""
SOFTWARE = "software"
"""What a client computes with (fl_app/software.py), as JSON."""
_TEXTS = (
    *("class-counts", "class-names", CLIENT_NAME, FEATURES, FEATURE_TAGS),
    *(*HASHES, NORMALIZATION, SUMS, CONTENT, INPUT, SOFTWARE, LIST, KEYS, ERROR, DETAILS),
)
_SAMPLE = "input-shape"
# Most names in an error.
_MOST_SHOWN = 20


class Shape(NamedTuple):
    """The arguments that a model is built with (fl_app/models.py).

    input_shape: shape of a sample that is no square image, else empty.
    """

    in_channels: int
    num_classes: int
    image_size: int
    input_shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return the shape in words."""
        words = f"{self.in_channels} channels, {self.num_classes} classes, {self.image_size} pixels"
        return words + (f", shape {list(self.input_shape)}" if self.input_shape else "")


def known(answer: Mapping[str, Scalar]) -> Properties:
    """Return a client's known properties; drop the rest of its answer."""
    names = ("client-id", "num-clients", *(name for name, _ in _COUNTS), _SAMPLE, *_TEXTS)
    found = {name: answer[name] for name in names if name in answer}
    if isinstance(text := found.get(LIST), str):
        # all clients send the same, and it is long
        found[LIST] = sys.intern(text)
    return found


def check(answer: Mapping[str, Scalar], num_clients: int) -> int:
    """Return a client's id.

    Raises WireError unless its properties have the form that CorollaClient.get_properties gives them in this run.
    """
    client_id, partitions = answer.get("client-id"), answer.get("num-clients")
    if type(partitions) is not int or partitions != num_clients:
        raise WireError(f"num-partitions must be the run's {counted(num_clients, 'client')}, got {_short(partitions)}")
    if type(client_id) is not int or not 0 <= client_id < num_clients:
        raise WireError(f"partition-id must be in [0, {num_clients}), got {_short(client_id)}")
    for name, low in _COUNTS:
        value = answer.get(name)
        if type(value) is not int or not low <= value < 2**31:
            raise WireError(f"property {name} must be an integer >= {low}, got {_short(value)}")
    counts = answer.get("class-counts")
    if counts is not None and not re.fullmatch(r"\d{1,9}(,\d{1,9})*", str(counts), re.ASCII):
        raise WireError(f"property class-counts must be counts with commas, got {_short(counts)}")
    return client_id


def check_wire(found: Mapping[str, str]) -> None:
    """Raise WireError unless a client's messages are of this version. found: its software."""
    if (version := found.get(software.WIRE, "1")) != WIRE_VERSION:
        raise WireError(
            f"it writes messages of version {version}, the server of version {WIRE_VERSION}: install the same Corolla on both "
            f"(it has {found.get('corolla', 'an unknown version')})"
        )


def check_keys(told: ClientReport, client_id: int, agreed: str | None, signed: Statements | None) -> None:
    """Raise WireError unless a private run's client has most clients' key list, and has signed its keys for the run.

    agreed: the hash of that list. signed: the `statements` by it, None if no client sends a list.
    """
    if signed is None or told.key_list != agreed:
        raise WireError(
            f"private: its list of all sites' keys is {_short(told.key_list)}, the others' is {_short(agreed)}"
        )
    try:
        signed.verified(client_id, str(told.answer.get(KEYS, "")))
    except UserError as error:
        raise WireError(f"property {KEYS}: {error}") from None


def statements(reports: Iterable[ClientReport], agreed: str | None, run: int, config: RunConfig) -> Statements | None:
    """Return what tells whether clients of a private run have signed something, by most clients' list of keys.

    agreed: the hash of that list. run: Flower's number of the run. None if no client has sent a list.
    """
    from fl_app.privacy.keyring import Statements

    keys = next((told.keys for told in reports if told.keys and told.key_list == agreed), None)
    return Statements(keys, run, config_hash(config)) if keys else None


@functools.lru_cache(maxsize=2)
def _key_list(text: str) -> KeyList:
    """Return a list of all sites' keys. It is read once, because all clients send the same. Raises ValueError."""
    from fl_app.privacy.keyring import KeyList

    return KeyList.read(text)


class Names(NamedTuple):
    """A site's names of its features and classes. None: it does not send them. (): its data have no names."""

    features: tuple[str, ...] | None
    classes: tuple[str, ...] | None


class ClientReport:
    """A client's answer, and its parts that are compared with other clients' answers. None: malformed, or not sent.

    num_clients: the number of clients that it was configured with (1 to MOST_CLIENTS). shape: of its data. hashes: of its data.
    shared_hashes: the same, if its data are a part of a shared data set. software: what it computes with. keys, key_list: in a
    private run, its list of all sites' keys, and the list's hash. names: of its features and classes. tags: of these, in a
    private run. sums_kind: number of features in its sums, and their unit; (0, 0) if it sends none.
    """

    def __init__(self, answer: Properties) -> None:
        self.answer = answer
        count = answer.get("num-clients")
        self.num_clients = count if type(count) is int and 1 <= count <= MOST_CLIENTS else None
        self.shape = shape(answer)
        self.hashes = told_hashes(answer)
        self.shared_hashes = self.hashes if self.hashes is not None and self.hashes.partition else None
        self.software = software.told(answer.get(SOFTWARE))
        self.names = Names(_names(answer.get(FEATURES)), _names(answer.get("class-names")))
        self.tags = Tags(answer.get("client-id"), str(answer.get(FEATURE_TAGS, "")).split(","))
        self.keys: KeyList | None = None
        with contextlib.suppress(KeyError, ValueError):
            self.keys = _key_list(str(answer[LIST]))
        self.key_list = self.keys.fingerprint if self.keys else None
        self._sums: MomentSums | WireError | None = None
        if (text := answer.get(SUMS)) is not None:
            try:
                self._sums = MomentSums.from_json(text)
            except ValueError as error:
                self._sums = WireError(f"property {SUMS}: {error}")
        self.sums_kind = None if isinstance(self._sums, WireError) else self._sums.kind if self._sums else (0, 0)

    @property
    def sums(self) -> MomentSums | None:
        """Its sums, None if it sends none. Raises WireError if they are malformed."""
        if isinstance(self._sums, WireError):
            raise self._sums
        return self._sums


def splits_column(features: Iterable[str], kept: Iterable[str]) -> bool:
    """Return whether some words of a column are kept and others are not: a row with one of those would have no word at all.

    A column of words has a feature `column=word` for each.
    """
    known = set(kept)
    columns = {(feature.partition("=")[0], feature in known) for feature in features if "=" in feature}
    return any((column, not is_kept) in columns for column, is_kept in columns)


def by_name(told: ClientReport, agreed: Names | None) -> ClientReport | None:
    """Return a client's report as if its columns were the run's, in their order; None if it lacks one.

    agreed: the run's. Other columns are left out, single words of a column are not. A report that needs no change, or of data
    without names, is None too.
    """
    mine, wanted = told.names.features, agreed.features if agreed else None
    if not mine or not wanted or mine == wanted or not set(wanted) <= set(mine) or len(set(mine)) < len(mine):
        return None
    if told.shape is None or splits_column(mine, wanted):
        return None
    places = [mine.index(name) for name in wanted]
    answer = {name: value for name, value in told.answer.items() if name not in (INPUT, NORMALIZATION)}
    answer |= {FEATURES: json.dumps(wanted)}
    if (facts := input_facts(told.answer.get(INPUT))) is not None:
        encodings = [Encoding.from_json(fields) for fields in facts["encodings"]]
        kept = of_features(encodings, wanted)
        gone = {each.column for each in encodings} - {each.column for each in kept}
        # what a site has besides the run's columns is told to no user of a model
        others = [*facts["others"], *sorted(gone)] if facts["others"] else []
        told_by = [dataclasses.asdict(each) for each in kept]
        answer[INPUT] = json.dumps({"dtype": facts["dtype"], "encodings": told_by, "others": others})
    if told.shape.in_channels == len(mine):
        answer["in-channels"] = len(wanted)
    if told.shape.input_shape == (len(mine),):
        answer[_SAMPLE] = str(len(wanted))
    if (sums := told.sums) is not None and len(sums.totals) == len(mine):
        totals, squares = ([of[k] for k in places] for of in (sums.totals, sums.squares))
        answer[SUMS] = dataclasses.replace(sums, totals=tuple(totals), squares=tuple(squares)).to_json()
    if (scaling := normalization(told.answer.get(NORMALIZATION))) is not None and len(scaling["mean"]) == len(mine):
        lists = {
            name: [values[k] for k in places] if len(values) == len(mine) else values
            for name, values in scaling.items()
        }
        answer[NORMALIZATION] = json.dumps(lists)
    return ClientReport(answer)


def check_names(told: ClientReport, agreed: Names | None) -> None:
    """Raise WireError, with both lists, unless a site names its features and classes as most do, in the same order."""
    for what, mine, theirs in zip(Names._fields, told.names, agreed or (), strict=False):
        if mine == theirs:
            continue
        if mine is None or theirs is None:
            # with report-class-counts = false a site may not send class names
            if what == "classes":
                continue
            raise WireError(
                f"property {FEATURES} must be a list of names, as most sites give it, got {_short(told.answer.get(FEATURES))}"
            )
        place = next((k for k, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), None)
        first = f" (number {place + 1}: {mine[place]!r}, not {theirs[place]!r})" if place is not None else ""
        raise WireError(f"its {what} are {_shown(mine)}; the others' are {_shown(theirs)}{first}")


class Tags(NamedTuple):
    """A private run's tags of a client's feature and class names, one for each client."""

    client_id: object
    values: list[str]

    def alike(self, other: Tags) -> bool:
        """Return whether two clients have the same names."""
        mine = self._for(other.client_id)
        return mine is not None and mine == other._for(self.client_id)

    def _for(self, client_id: object) -> str | None:
        if type(client_id) is not int or not 0 <= client_id < len(self.values):
            return None
        return self.values[client_id] if len(self.values[client_id]) == 64 else None


def _names(text: object) -> tuple[str, ...] | None:
    try:
        found = json.loads(str(text))
    except MALFORMED:
        return None
    told = isinstance(found, list) and all(isinstance(name, str) for name in found)
    return tuple(found) if told else None


def _shown(names: Sequence[str]) -> str:
    more = f" ... ({len(names)})" if len(names) > _MOST_SHOWN else ""
    return plain(", ".join(name[:40] for name in names[:_MOST_SHOWN])) + more if names else "without names"


def shape(answer: Mapping[str, Scalar]) -> Shape | None:
    """Return the shape of a client's data, None if it is malformed."""
    values = [answer.get(name) for name in ("in-channels", "num-classes", "image-size")]
    channels, classes, side = (value if type(value) is int and 1 <= value < 2**31 else 0 for value in values)
    sample = answer.get(_SAMPLE, "")
    if not isinstance(sample, str) or not re.fullmatch(r"([1-9]\d{0,8}(,[1-9]\d{0,8}){0,7})?", sample, re.ASCII):
        return None
    inputs = tuple(int(word) for word in sample.split(",") if word)
    return Shape(channels, classes, side, inputs) if channels and classes and side else None


def normalization(text: Scalar | None) -> dict[str, list[float]] | None:
    """Return a client's normalization (`DatasetInfo.scaling`); None if it is missing or malformed."""
    try:
        told = json.loads(str(text))
        found = {name: [float(value) for value in told[name]] for name in SCALING}
    except MALFORMED:
        return None
    fits = found["mean"] and len(found["mean"]) == len(found["std"]) and len(found["shift"]) == len(found["scale"])
    return found if fits and all(map(math.isfinite, chain(*found.values()))) else None


def input_facts(text: Scalar | None) -> dict[str, Any] | None:
    """Return the facts about a client's samples (INPUT); None if they are missing or malformed."""
    try:
        told = json.loads(str(text))
        encodings = [dataclasses.asdict(Encoding.from_json(fields)) for fields in told["encodings"]]
        return {"dtype": str(told["dtype"]), "encodings": encodings, "others": [str(name) for name in told["others"]]}
    except MALFORMED:
        return None


def check_sums(told: ClientReport, agreed: tuple[int, int] | None, validation: bool = False) -> None:
    """Raise WireError unless a site's sums can be added to those of most sites.

    validation: whether sites keep samples for validation. The sums include these; `train-samples` does not.
    """
    found = told.sums
    if agreed is not None and told.sums_kind != agreed:
        mine, theirs = _scaled_how(told.sums_kind or (0, 0)), _scaled_how(agreed)
        raise WireError(
            f"normalize: it has {mine}, the others {theirs}; set normalize to what suits all sites, or normalize-over = site"
        )
    train = told.answer.get("train-samples")
    if found is None or type(train) is not int:
        return
    if found.count <= train if validation else found.count % max(train, 1):
        raise WireError(f"property {SUMS} must be over its {train} training samples, got a count of {found.count}")


def _scaled_how(kind: tuple[int, int]) -> str:
    if not kind[0]:
        return "samples that are not scaled by mean and std"
    return f"{kind[0]} {'channels of images of 8 bits' if kind[1] == PIXEL else 'features or channels of numbers'}"


def differing_shapes(clients: Iterable[ClientReport]) -> str:
    """Return a line for each shape with its clients, "" if all clients have the same shape."""
    shapes: dict[Shape, list[int]] = {}
    for told in clients:
        client_id = told.answer.get("client-id")
        if told.shape is not None and type(client_id) is int:
            shapes.setdefault(told.shape, []).append(client_id)
    lines = [f"  clients {sorted(ids)}: {s}" for s, ids in sorted(shapes.items(), key=lambda item: min(item[1]))]
    return "\n".join(lines) if len(lines) > 1 else ""


def _short(value: object) -> str:
    return repr(value)[:80] if not isinstance(value, str) else repr(value[:80])
