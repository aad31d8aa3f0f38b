"""What a picture draws, read from its specification."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pandas

from corolla.report.arrays import Floats, ReportedRun, matrices
from corolla.report.charts import Panel


def frames_of(panel: Panel) -> list[pandas.DataFrame]:
    """The picture's data, in the order in which its specification has them."""
    names = dict.fromkeys(part["data"]["name"] for part in parts(panel.spec) if "name" in part.get("data", {}))
    return [pandas.read_csv(io.StringIO(panel.spec["datasets"][name])) for name in names]


def frame_with(panel: Panel, *columns: str) -> pandas.DataFrame:
    """The first of the picture's data with these columns."""
    return next(frame for frame in frames_of(panel) if {*columns} <= {*frame.columns})


def parts(node: Any) -> Iterator[dict[str, Any]]:
    """Every object of a specification, from the outermost on."""
    if isinstance(node, dict):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from parts(child)


def encoding(panel: Panel, channel: str) -> dict[str, Any]:
    """The first encoding of a channel in a picture."""
    return next(part["encoding"][channel] for part in parts(panel.spec) if channel in part.get("encoding", {}))


def marks(panel: Panel, kind: str) -> list[dict[str, Any]]:
    """The encodings of a picture's marks of a kind."""
    return [
        part["encoding"]
        for part in parts(panel.spec)
        if isinstance(part.get("mark"), dict) and part["mark"].get("type") == kind
    ]


def last_matrix(run: ReportedRun, record: str) -> tuple[list[int], Floats] | None:
    """The clients, and the last recorded number of each pair."""
    found = matrices(run, record)
    return (found[0], found[1][max(found[1])]) if found else None


def words(panel: Panel) -> str:
    """The picture as SVG: it has every text that is drawn."""
    return panel.svg
