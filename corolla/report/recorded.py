"""What methods recorded, as arrays, by kind of figure (fl_app/figures.py). What does not fit is left out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corolla.report.arrays import Floats, ReportedRun
from fl_app.figures import Layers
from fl_app.metrics import Record

Rows = dict[int, dict[str, float]]  # by round and name


def number(value: object) -> float:
    """Return a finite number as it is, anything else as NaN."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if plain else math.nan  # type: ignore[arg-type]


def matrix(run: ReportedRun, record: str) -> tuple[list[int], Floats] | None:
    """Last recorded number of each pair of clients, [N, N], NaN where there is none; and the ids."""
    pairs: dict[tuple[int, int], float] = {}
    for entry in run.rounds.values():
        clients: dict[str, Record] = entry.get("clients", {})
        rows = entry.get(record)
        if not (isinstance(rows, list) and len(rows) == len(clients)):
            rows = [row.get(record) for row in clients.values()]
        for i, row in zip(clients, rows, strict=True):
            if isinstance(row, list) and len(row) == len(clients):
                row = dict(zip(clients, row, strict=True))
            if isinstance(row, dict):
                named = dict.fromkeys(clients, 0.0) | row
                pairs |= {(int(i), int(j)): number(value) for j, value in named.items() if j.isdecimal()}
    ids = sorted({i for pair in pairs for i in pair})
    values = np.array([[pairs.get((i, j), math.nan) for j in ids] for i in ids], np.float64)
    off = ~np.eye(len(ids), dtype=bool)
    return (ids, values) if len(ids) > 1 and not np.isnan(values[off]).all() else None


def links(run: ReportedRun, record: str) -> tuple[list[int], Floats] | None:
    """Number of linked clients, [clients, rounds 1 .. last], NaN where a client took no part; and the ids."""
    return _by_client(
        {
            t: {i: float(len(value)) for i, value in _noted(entry, record) if isinstance(value, list)}
            for t, entry in run.rounds.items()
        }
    )


def scalars(run: ReportedRun, record: str) -> tuple[list[int], Floats] | None:
    """One number per client, [clients, rounds 1 .. last], and the ids; of a number per round one row, and no ids."""
    rows = {t: {i: number(value) for i, value in _noted(entry, record)} for t, entry in run.rounds.items()}
    if found := _by_client(rows):
        return found
    whole = {t: {"": number(entry.get(record))} for t, entry in run.rounds.items()}
    names, grid = over_rounds({t: row for t, row in whole.items() if not math.isnan(row[""])})
    return ([], grid) if names else None


def groups(run: ReportedRun, record: str) -> tuple[list[int], Floats, list[str]] | None:
    """Index of each client's group, [clients, rounds 1 .. last], NaN where there is none; the ids; the groups' names."""
    noted: dict[int, dict[str, str]] = {}
    for t, entry in run.rounds.items():
        whole = entry.get(record)
        pairs = whole.items() if isinstance(whole, dict) else _noted(entry, record)
        noted[t] = {i: str(group) for i, group in pairs if isinstance(group, (int, str)) and i.isdecimal()}
    names = sorted(
        {name for row in noted.values() for name in row.values()}, key=lambda n: (not n.isdecimal(), len(n), n)
    )
    found = _by_client({t: {i: float(names.index(group)) for i, group in row.items()} for t, row in noted.items()})
    return (*found, names) if found else None


def layers(run: ReportedRun, figure: Layers) -> tuple[list[str], Floats] | None:
    """Return what was recorded by layer, [layers, rounds 1 .. last], and the layers' names.

    Of clients' records the mean; of shares the share each layer has of the sum, a layer's weight and bias together, rounds
    whose sum is 0 left out.
    """
    rows: Rows = {}
    for t, entry in run.rounds.items():
        whole = entry.get(figure.record)
        tables = (
            [whole] if isinstance(whole, dict) else [v for _, v in _noted(entry, figure.record) if isinstance(v, dict)]
        )
        values = [{str(name): number(value) for name, value in table.items()} for table in tables]
        row = _shares(values) if figure.shares else _means(values)
        if row:
            rows[t] = row
    names, grid = over_rounds(rows)
    return (names, grid) if names else None


def _means(tables: list[dict[str, float]]) -> dict[str, float]:
    columns: dict[str, list[float]] = {}
    for name, value in _known(tables):
        columns.setdefault(name, []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in columns.items()}


def _shares(tables: list[dict[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, value in _known(tables):
        layer = name.rpartition(".")[0] or name
        sums[layer] = sums.get(layer, 0.0) + value
    total = sum(sums.values())
    return {layer: value / total for layer, value in sums.items()} if total else {}


def _known(tables: list[dict[str, float]]) -> Iterable[tuple[str, float]]:
    return ((name, value) for table in tables for name, value in table.items() if not math.isnan(value))


def _noted(entry: Record, record: str) -> list[tuple[str, Any]]:
    """Return the round's clients that have a note of this name, and the note."""
    return [(i, row[record]) for i, row in entry.get("clients", {}).items() if record in row]


def _by_client(rows: Rows) -> tuple[list[int], Floats] | None:
    known = {t: {i: value for i, value in row.items() if not math.isnan(value)} for t, row in rows.items()}
    names, grid = over_rounds({t: row for t, row in known.items() if row})
    order = np.argsort([int(name) for name in names])
    return ([int(names[k]) for k in order], grid[order]) if names else None


def over_rounds(rows: Rows) -> tuple[list[str], Floats]:
    """Values by round and name as a matrix [names, rounds 1 .. last], NaN where there is none; and the names."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    place = {name: k for k, name in enumerate(names)}
    grid = np.full((len(names), max(rows, default=0)), np.nan)
    for t, row in rows.items():
        for name, value in row.items():
            grid[place[name], t - 1] = value
    return names, grid


def class_counts(run: ReportedRun) -> tuple[list[int], NDArray[np.int64]] | None:
    """Return the clients that told their class counts, and these, [clients, classes]."""
    rows = {int(i): facts["class-counts"] for i, facts in run.clients.items() if facts.get("class-counts")}
    if not rows or len({len(row) for row in rows.values()}) != 1:
        return None
    ids = sorted(rows)
    return ids, np.array([rows[i] for i in ids], np.int64)


def class_names(run: ReportedRun, num_classes: int) -> tuple[str, ...]:
    """Return the classes' names in label order; empty if the run does not have one for each."""
    return run.classes if len(run.classes) == num_classes else ()


def cosine(counts: NDArray[np.int64]) -> Floats:
    """Cosine similarity of the clients' class counts, [N, N]."""
    unit = counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-12)
    return np.asarray(unit @ unit.T)


def by_likeness(similarity: Floats) -> list[int]:
    """Order that puts similar ones side by side: average linkage on 1 - similarity, [N, N], NaN read as least alike."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    off = ~np.eye(len(similarity), dtype=bool)
    filled = np.where(np.isnan(similarity), np.nanmin(similarity[off]), similarity)
    largest = float(filled[off].max())
    distance = np.maximum((largest if largest > 1 + 1e-9 else 1.0) - (filled + filled.T) / 2, 0)
    np.fill_diagonal(distance, 0)
    return [int(i) for i in leaves_list(linkage(squareform(distance, checks=False), "average", optimal_ordering=True))]
