"""Methods' records as arrays, by kind of figure (fl_app/figures.py). Records of another form are left out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corolla.report.arrays import Floats, ReportedRun
from corolla.report.pictures import MOST_ROWS, shortened
from fl_app.figures import Layers
from fl_app.metrics import Record
from fl_app.server import matrices as between

# most clients whose numbers between each other are read round by round
MOST_IN_ROUNDS = 100

Rows = dict[int, dict[str, float]]  # by round and name


def number(value: object) -> float:
    """Return a finite number unchanged, anything else as NaN."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if plain else math.nan  # type: ignore[arg-type]


def matrix(run: ReportedRun, record: str) -> tuple[list[int], Floats] | None:
    """Return client ids and the last recorded number of each pair of clients, [N, N], NaN if there is none.

    None without any.
    """
    found = matrices(run, record)
    return (found[0], found[1][max(found[1])]) if found else None


def matrices(run: ReportedRun, record: str) -> tuple[list[int], dict[int, Floats]] | None:
    """Return client ids, and by round the number of each pair that was recorded last until then, [N, N]; NaN if none was.

    None without any. Of more than MOST_IN_ROUNDS clients there is the last round alone.
    """
    found = {t: one for t, e in run.rounds.items() if (one := between.matrix_of(run.path, e, record)) is not None}
    ids = sorted({int(i) for one in found.values() for i in (*one.rows, *one.columns)})
    place = {i: k for k, i in enumerate(ids)}
    values = np.full((len(ids), len(ids)), np.nan)
    by_round = {}
    for t, one in found.items():
        at = np.ix_([place[int(i)] for i in one.rows], [place[int(i)] for i in one.columns])
        values[at] = np.where(np.isnan(one.values), values[at], one.values)
        if len(ids) <= MOST_IN_ROUNDS or t == max(found):
            by_round[t] = values.copy()
    off = ~np.eye(len(ids), dtype=bool)
    return (ids, by_round) if len(ids) > 1 and not np.isnan(values[off]).all() else None


def links(run: ReportedRun, record: str) -> tuple[list[int], Floats] | None:
    """Return client ids and numbers of linked clients, [clients, rounds 1 .. last], NaN if a client took no part.

    None without any.
    """
    return _by_client({t: {i: number(value) for i, value in _noted(entry, record)} for t, entry in run.rounds.items()})


def scalars(run: ReportedRun, record: str) -> tuple[list[int], Floats] | None:
    """Return client ids and one number per client, [clients, rounds 1 .. last].

    For one number per round there are no ids and one row. Returns None if there is no number.
    """
    if found := links(run, record):
        return found
    whole = {t: {"": number(entry.get(record))} for t, entry in run.rounds.items()}
    names, grid = over_rounds({t: row for t, row in whole.items() if not math.isnan(row[""])})
    return ([], grid) if names else None


def groups(run: ReportedRun, record: str) -> tuple[list[int], Floats, list[str]] | None:
    """Return client ids, the index of each client's group, [clients, rounds 1 .. last], and the groups' names.

    None without any. The index is NaN if a client has no group in a round.
    """
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
    """Return the layers' names and the records by layer, [layers, rounds 1 .. last]; None without any.

    Clients' records are averaged. For shares, the values are each layer's share of the round's sum, weight and bias
    together; rounds with sum 0 are left out.
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
    """Return (client, record) for the round's clients that have a record of this name."""
    return [(i, row[record]) for i, row in entry.get("clients", {}).items() if record in row]


def _by_client(rows: Rows) -> tuple[list[int], Floats] | None:
    known = {t: {i: value for i, value in row.items() if not math.isnan(value)} for t, row in rows.items()}
    names, grid = over_rounds({t: row for t, row in known.items() if row})
    order = np.argsort([int(name) for name in names])
    return ([int(names[k]) for k in order], grid[order]) if names else None


def over_rounds(rows: Rows) -> tuple[list[str], Floats]:
    """Return names, and values by round and name as a matrix [names, rounds 1 .. last], NaN if there is none."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    place = {name: k for k, name in enumerate(names)}
    grid = np.full((len(names), max(rows, default=0)), np.nan)
    for t, row in rows.items():
        for name, value in row.items():
            grid[place[name], t - 1] = value
    return names, grid


def class_counts(run: ReportedRun) -> tuple[list[int], NDArray[np.int64]] | None:
    """Return the ids of clients that sent their class counts, and these, [clients, classes]; None without any."""
    rows = {int(i): facts["class-counts"] for i, facts in run.clients.items() if facts.get("class-counts")}
    if not rows or len({len(row) for row in rows.values()}) != 1:
        return None
    ids = sorted(rows)
    return ids, np.array([rows[i] for i in ids], np.int64)


def class_names(run: ReportedRun, num_classes: int) -> tuple[str, ...]:
    """Return class names in label order; empty if the run does not have one for each class."""
    return run.classes if len(run.classes) == num_classes else ()


def class_labels(run: ReportedRun, num_classes: int) -> list[str]:
    """Return the classes' labels on an axis: names, shortened if they are long, or indices."""
    return shortened(dict(enumerate(class_names(run, num_classes))), 16) or [str(k) for k in range(num_classes)]


def client_labels(run: ReportedRun, ids: Iterable[int]) -> list[str]:
    """Return the clients' labels on an axis: names, shortened if they are long, or ids."""
    return shortened({i: run.client_name(i) for i in ids})


def cosine(counts: NDArray[np.int64]) -> Floats:
    """Return the cosine similarity of the clients' class counts, [N, N]."""
    unit = counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-12)
    return np.asarray(unit @ unit.T)


def by_likeness(similarity: Floats) -> list[int]:
    """Return an order that puts similar clients side by side, by average linkage on 1 - similarity [N, N].

    NaN counts as the lowest similarity.
    """
    from scipy.cluster.hierarchy import leaves_list

    # the optimal order of the leaves takes cubic time
    return [int(i) for i in leaves_list(_tree(similarity, ordered=len(similarity) <= MOST_ROWS))]


def clusters(similarity: Floats) -> tuple[float, int]:
    """Return how clearly similar clients form clusters, in [0, 1], and the number of clusters.

    It is the largest gap between two merges of average linkage on 1 - similarity [N, N], as part of the last merge's height.
    """
    heights = _tree(similarity)[:, 2]
    gaps = np.diff(heights)
    if not gaps.any():
        return 0.0, 1
    widest = int(gaps.argmax())
    return float(gaps[widest] / heights[-1]), len(heights) - widest


def _tree(similarity: Floats, ordered: bool = False) -> Floats:
    """Return scipy's tree of average linkage on 1 - similarity. ordered: with similar leaves side by side."""
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    off = ~np.eye(len(similarity), dtype=bool)
    filled = np.where(np.isnan(similarity), np.nanmin(similarity[off]), similarity)
    largest = float(filled[off].max())
    distance = np.maximum((largest if largest > 1 + 1e-9 else 1.0) - (filled + filled.T) / 2, 0)
    np.fill_diagonal(distance, 0)
    return np.asarray(linkage(squareform(distance, checks=False), "average", optimal_ordering=ordered))
