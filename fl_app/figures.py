"""Kinds of figures that a method declares for the numbers it records.

The report draws these kinds and knows no methods. A method lists its figures in `Method(..., figures=(...))`. run.json
keeps them, so that a report needs no code of the method. `record` is the name under which the strategy recorded the
numbers: with `note_round(record, value)`, or per client with `note(client_id, record, value)`. Each kind defines its
`value`. Missing and non-finite numbers are left out.
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
    """Fields of all kinds.

    unit: label of the colours or the axis; caption: a sentence or two; name: of the picture's file; empty: `record`.
    """

    record: str
    title: str
    unit: str = ""
    caption: str = ""
    name: str = dataclasses.field(default="", kw_only=True)

    @property
    def file_name(self) -> str:
        """Name of the picture's file, without characters that could form a path."""
        return re.sub(r"[^\w-]+", "-", self.name or self.record)


@dataclass(frozen=True)
class Matrix(Figure):
    """Numbers between clients, drawn beside the similarity of their class distributions if that is known.

    Per round: rows in the order of the round's clients. Per client: one row, or {client id: number}, with 0 for the
    round's other clients. heading: title above the matrix; value: the word for one number in a sentence.
    """

    heading: str = dataclasses.field(default="", kw_only=True)
    value: str = dataclasses.field(default="value", kw_only=True)


@dataclass(frozen=True)
class Links(Figure):
    """Lists of other clients, recorded per client. The picture shows their length over the rounds."""


@dataclass(frozen=True)
class Layers(Figure):
    """Numbers by layer, {name: number}, recorded per round, or per client (the picture shows their mean).

    percent: a ratio, drawn from 0 to 100 %; whole: whole numbers such as counts; shares: counts, drawn as each layer's
    share of all, with a layer's weight and bias together; beside: another figure in the same picture; heading: title
    above this part.
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
    """A client's group, a number or a word, recorded per client, or per round as {client id: group}."""


KINDS: dict[str, type[Figure]] = {kind.__name__.lower(): kind for kind in (Matrix, Links, Layers, Scalars, Groups)}


def to_json(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """Return declarations in the form of run.json: the kind and the fields that differ from their default."""
    out = []
    for figure in figures:
        values = {f.name: value for f in dataclasses.fields(figure) if (value := getattr(figure, f.name)) != f.default}
        values |= {name: to_json([value])[0] for name, value in values.items() if isinstance(value, Figure)}
        out.append({"kind": type(figure).__name__.lower(), **values})
    return out


def from_json(declared: object) -> tuple[Figure, ...]:
    """Return the figures of declarations. An unknown one, such as a kind of a later version, is left out and logged."""
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
    types = {f.name: {"bool": bool, "str": str}.get(str(f.type), kind) for f in dataclasses.fields(kind)}
    if not all(isinstance(value, types[name]) for name, value in values.items()):
        return None
    return kind(**values) if values.get("record") and "title" in values else None
