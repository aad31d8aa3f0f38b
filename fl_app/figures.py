"""Kinds of figures: what a method records, declared as data. The report knows these kinds, not the methods.

A method lists them in `Method(..., figures=(...))`; the run folder keeps them in run.json, so that a report needs no code of the
method. `record` is the name under which the strategy noted the numbers, with `note_round(record, value)` or, per client,
`note(client_id, record, value)`; see each kind for what `value` may be. Numbers that are missing or not finite are left out.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("corolla")


@dataclass(frozen=True)
class Figure:
    """What all kinds have. unit: what the colours or the axis mean; caption: a sentence or two; name: of the file, `record`
    if empty.
    """

    record: str
    title: str
    unit: str = ""
    caption: str = ""
    name: str = dataclasses.field(default="", kw_only=True)

    @property
    def file_name(self) -> str:
        """Name of the picture's file, without what a path could be made of."""
        return re.sub(r"[^\w-]+", "-", self.name or self.record)


@dataclass(frozen=True)
class Matrix(Figure):
    """Numbers between clients, drawn beside the similarity of their class distributions where that is known.

    Recorded per round as rows in the order of the round's clients, or per client as such a row or as {client id: number}, the
    round's other clients being 0.
    heading: above the matrix; value: what one number is called in a sentence.
    """

    heading: str = dataclasses.field(default="", kw_only=True)
    value: str = dataclasses.field(default="value", kw_only=True)


@dataclass(frozen=True)
class Links(Figure):
    """Lists of other clients, recorded per client; drawn is their length over the rounds."""


@dataclass(frozen=True)
class Layers(Figure):
    """Numbers by layer, {name: number}, recorded per round, or per client (their mean is drawn).

    percent: a ratio, drawn from 0 to 100 %; whole: numbers are whole, e.g. counts; shares: counts of which each layer's share of
    all is drawn, a layer's weight and bias together; beside: another one in the same picture; heading: above its part.
    """

    heading: str = dataclasses.field(default="", kw_only=True)
    percent: bool = dataclasses.field(default=False, kw_only=True)
    whole: bool = dataclasses.field(default=False, kw_only=True)
    shares: bool = dataclasses.field(default=False, kw_only=True)
    beside: Layers | None = dataclasses.field(default=None, kw_only=True)


@dataclass(frozen=True)
class Scalars(Figure):
    """One number per client and round, or per round. percent: a ratio, drawn in per cent."""

    percent: bool = dataclasses.field(default=False, kw_only=True)


@dataclass(frozen=True)
class Groups(Figure):
    """Which group a client is in, a number or a word, recorded per client or per round as {client id: group}."""


KINDS: dict[str, type[Figure]] = {kind.__name__.lower(): kind for kind in (Matrix, Links, Layers, Scalars, Groups)}


def to_json(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """Return declarations as run.json keeps them: kind and the fields that are not at their default."""
    out = []
    for figure in figures:
        values = {f.name: value for f in dataclasses.fields(figure) if (value := getattr(figure, f.name)) != f.default}
        values |= {name: to_json([value])[0] for name, value in values.items() if isinstance(value, Figure)}
        out.append({"kind": type(figure).__name__.lower(), **values})
    return out


def from_json(declared: object) -> tuple[Figure, ...]:
    """Read declarations; what is none, such as a kind of a later version, is left out and logged."""
    found = [(item, _read(item)) for item in (declared if isinstance(declared, list) else [])]
    for item, figure in found:
        if figure is None:
            log.warning("not a figure that can be drawn: %.200r", item)
    return tuple(figure for _, figure in found if figure is not None)


def _read(item: object) -> Figure | None:
    kind = KINDS.get(str(item.get("kind"))) if isinstance(item, dict) else None
    if kind is None or not isinstance(item, dict):
        return None
    values: dict[str, Any] = {f.name: item[f.name] for f in dataclasses.fields(kind) if f.name in item}
    if "beside" in values:
        values["beside"] = _read(values["beside"])
    flags = {f.name for f in dataclasses.fields(kind) if f.type == "bool"}
    for name, value in values.items():
        fits = (
            isinstance(value, bool)
            if name in flags
            else isinstance(value, kind)
            if name == "beside"
            else isinstance(value, str)
        )
        if not fits:
            return None
    return kind(**values) if values.get("record") and "title" in values else None
