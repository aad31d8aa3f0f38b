"""What a client says about itself when it connects: checked before anything is made of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from fl_app.checksums import HASHES
from fl_app.errors import plain
from fl_app.keys import Scalar
from fl_app.known_names import SCALING
from fl_app.wire import ERROR, FEATURE_TAGS, FEATURES, PRIVATE, WireError

Properties = dict[str, Scalar]

MOST_CLIENTS = 10**6
SAMPLES = ("train-samples", "test-samples")
_COUNTS = (("in-channels", 1), ("image-size", 1), ("num-classes", 1), *((name, 0) for name in SAMPLES))
LIST, SEALED = f"{PRIVATE}-list", f"{PRIVATE}-sealed"  # of private runs
NORMALIZATION = "normalization"
"""What numbers are shifted, scaled and normalised by, as JSON."""
_TEXTS = ("class-counts", "class-names", FEATURES, FEATURE_TAGS, *HASHES, NORMALIZATION, LIST, SEALED, ERROR)
_SAMPLE = "input-shape"
# names of an error's list
_MOST_SHOWN = 20


class Shape(NamedTuple):
    """What a model is built with (fl_app/models.py). input_shape: of a sample that is no square image, else empty."""

    in_channels: int
    num_classes: int
    image_size: int
    input_shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return the shape in words."""
        words = f"{self.in_channels} channels, {self.num_classes} classes, {self.image_size} pixels"
        return words + (f", shape {list(self.input_shape)}" if self.input_shape else "")


def known(answer: Mapping[str, Scalar]) -> Properties:
    """Return what a client answered, without anything that nobody asked for."""
    names = ("client-id", "num-clients", *(name for name, _ in _COUNTS), _SAMPLE, *_TEXTS)
    return {name: answer[name] for name in names if name in answer}


def check(answer: Mapping[str, Scalar], num_clients: int) -> int:
    """Return a client's id. Raises WireError unless its properties are what CorollaClient.get_properties gives in this run."""
    client_id, partitions = answer.get("client-id"), answer.get("num-clients")
    if type(partitions) is not int or partitions != num_clients:
        raise WireError(f"num-partitions must be the run's {num_clients} clients, got {_short(partitions)}")
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


def check_keys(answer: Mapping[str, Scalar], agreed: str | None, num_clients: int) -> None:
    """Raise WireError unless a client of a private run holds the list of keys that most do, and has sealed one for each client."""
    if not (named := key_list(answer)) or named != agreed:
        raise WireError(
            f"private: its list of all sites' keys is {_short(answer.get(LIST))}, the others' is {_short(agreed)}"
        )
    if not re.fullmatch(r"[A-Za-z0-9+/=]+(,[A-Za-z0-9+/=]+)*", sealed := str(answer.get(SEALED, "")), re.ASCII) or (
        sealed.count(",") + 1 != num_clients
    ):
        raise WireError(f"property {SEALED} must be a key for each of {num_clients} clients, got {_short(sealed)}")


def key_list(answer: Mapping[str, Scalar]) -> str | None:
    """Return which list of keys a client holds, None if it is no such name."""
    return str(answer[LIST]) if re.fullmatch("[0-9a-f]{64}", str(answer.get(LIST))) else None


class Names(NamedTuple):
    """What a site's features and classes are called; None where it does not say, () where its data name none."""

    features: tuple[str, ...] | None
    classes: tuple[str, ...] | None


def names(answer: Mapping[str, Scalar]) -> Names:
    """Return what a site calls its features and classes."""
    return Names(_names(answer.get(FEATURES)), _names(answer.get("class-names")))


def check_names(answer: Mapping[str, Scalar], agreed: Names | None) -> None:
    """Raise WireError, with both lists, unless a site calls its features and classes as most do, in the same order."""
    for what, mine, theirs in zip(Names._fields, names(answer), agreed or (), strict=False):
        if mine == theirs:
            continue
        if mine is None or theirs is None:
            # class names are told where the key report-class-counts lets them be
            if what == "classes":
                continue
            raise WireError(
                f"property {FEATURES} must be a list of names, as most sites give it, got {_short(answer.get(FEATURES))}"
            )
        place = next((k for k, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), None)
        first = f" (number {place + 1}: {mine[place]!r}, not {theirs[place]!r})" if place is not None else ""
        raise WireError(f"its {what} are {_shown(mine)}; the others' are {_shown(theirs)}{first}")


class Tags(NamedTuple):
    """A private run's tags of a client's names of features and classes, one for each client."""

    client_id: object
    values: list[str]

    def alike(self, other: Tags) -> bool:
        """Tell whether two clients have the same names."""
        mine = self._for(other.client_id)
        return mine is not None and mine == other._for(self.client_id)

    def _for(self, client_id: object) -> str | None:
        if type(client_id) is not int or not 0 <= client_id < len(self.values):
            return None
        return self.values[client_id] if len(self.values[client_id]) == 64 else None


def tags(answer: Mapping[str, Scalar]) -> Tags:
    """Read a client's tags."""
    return Tags(answer.get("client-id"), str(answer.get(FEATURE_TAGS, "")).split(","))


def _names(text: object) -> tuple[str, ...] | None:
    try:
        found = json.loads(str(text))
    except (ValueError, RecursionError):
        return None
    told = isinstance(found, list) and all(isinstance(name, str) for name in found)
    return tuple(found) if told else None


def _shown(names: Sequence[str]) -> str:
    more = f" ... ({len(names)})" if len(names) > _MOST_SHOWN else ""
    return plain(", ".join(name[:40] for name in names[:_MOST_SHOWN])) + more if names else "without names"


def num_clients(answer: Mapping[str, Scalar]) -> int | None:
    """Return of how many clients a node says it is one; None if it is no such number."""
    value = answer.get("num-clients")
    return value if type(value) is int and 1 <= value <= MOST_CLIENTS else None


def shape(answer: Mapping[str, Scalar]) -> Shape | None:
    """Return the shape of a client's data, None if it is none."""
    values = [answer.get(name) for name in ("in-channels", "num-classes", "image-size")]
    channels, classes, side = (value if type(value) is int and 1 <= value < 2**31 else 0 for value in values)
    sample = answer.get(_SAMPLE, "")
    if not isinstance(sample, str) or not re.fullmatch(r"([1-9]\d{0,8}(,[1-9]\d{0,8}){0,7})?", sample, re.ASCII):
        return None
    inputs = tuple(int(word) for word in sample.split(",") if word)
    return Shape(channels, classes, side, inputs) if channels and classes and side else None


def normalization(text: Scalar | None) -> dict[str, list[float]] | None:
    """Read what a client tells of its numbers (`DatasetInfo.scaling`); None if it tells nothing, or what is no such thing."""
    try:
        told = json.loads(str(text))
        found = {name: [float(value) for value in told[name]] for name in SCALING}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    fits = found["mean"] and len(found["mean"]) == len(found["std"]) and len(found["shift"]) == len(found["scale"])
    return found if fits and all(map(math.isfinite, chain(*found.values()))) else None


def describe(shape: Shape | None) -> str:
    """Say a shape."""
    return "no known shape" if shape is None else str(shape)


def differing_shapes(clients: Iterable[Mapping[str, Scalar]]) -> str:
    """Say which clients' data have which shape, one line for each; empty if all have the same."""
    shapes: dict[Shape, list[int]] = {}
    for answer in clients:
        found, client_id = shape(answer), answer.get("client-id")
        if found is not None and type(client_id) is int:
            shapes.setdefault(found, []).append(client_id)
    lines = [
        f"  clients {sorted(ids)}: {describe(s)}" for s, ids in sorted(shapes.items(), key=lambda item: min(item[1]))
    ]
    return "\n".join(lines) if len(lines) > 1 else ""


def _short(value: object) -> str:
    return repr(value)[:80] if not isinstance(value, str) else repr(value[:80])
