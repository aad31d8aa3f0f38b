"""Pictures of matrices between clients, beside the similarity of the clients' data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas
from numpy.typing import NDArray

from corolla.report import charts, frames
from corolla.report.arrays import MANY, Floats, ReportedRun
from corolla.report.charts import WIDTH, Axis, Chart
from corolla.report.pictures import MOST_ROWS, Panel, averaged
from corolla.report.recorded import (
    by_likeness,
    class_counts,
    class_labels,
    class_names,
    client_labels,
    clusters,
    cosine,
    groups,
    matrices,
)
from fl_app.figures import Groups, Matrix

# two class distributions count as equal from this cosine similarity on
ALIKE = 0.99
# Sorting this many clients takes a second. For more clients, this many are drawn, at equal distances.
MOST_CLIENTS = 1000
# clusters are named from this part of the last merge's height on
CLEAR = 0.25
# cells of all rounds that a reader can go through
MOST_CELLS = 20_000


@dataclass(frozen=True)
class _Likeness:
    """Similarity of clients' data. counts: [N, classes]. similarity: [N, N].

    same: pairs that count as equal, bool [N, N]. classes: their names, if known. labels: of the classes.
    """

    counts: NDArray[np.int64]
    similarity: Floats
    same: NDArray[np.bool_]
    classes: tuple[str, ...]
    labels: list[str]

    @property
    def few(self) -> bool:
        """Whether equal pairs are few enough to be told apart."""
        return bool(self.same.sum() <= (self.same.size - len(self.same)) / 3)

    @property
    def outlined(self) -> bool:
        """Whether equal pairs are outlined."""
        return self.few and len(self.same) <= MANY


def matrix_panel(name: str, run: ReportedRun, figure: Matrix) -> Panel | None:
    """Return the picture of a matrix, with the similarity of the clients' data beside it if class counts are known."""
    found = matrices(run, figure.record)
    if found is None:
        return None
    ids, by_round = found
    everybody = len(ids)
    if everybody > MOST_CLIENTS:
        kept = np.linspace(0, everybody - 1, MOST_CLIENTS).astype(int)
        ids, by_round = [ids[k] for k in kept], {t: values[np.ix_(kept, kept)] for t, values in by_round.items()}
    values = by_round[max(by_round)]
    alike = _likeness(run, ids)
    text = (
        f"{figure.caption} {_rows(everybody)}; neighbours have similar {'values' if alike is None else 'data'}. "
        f"{'Colour' if alike is None else 'Left'}: the last recorded value of each pair; grey: a client with itself, and "
        "pairs that never shared a round. "
    )
    title = figure.title
    if alike is not None:
        text += _agreement(figure.value, values, alike)
        title = f"{figure.title}, and similarity of the clients' data"
    labels = client_labels(run, ids)
    orders = {"values": by_likeness(values)} if alike is None else {"data": by_likeness(alike.similarity)}
    (order,) = orders.values()
    switch, clearest = None, max(by_round)
    if len(ids) <= MANY:
        orders[figure.value] = orders.pop("values", []) or by_likeness(values)
        clearest = max(by_round, key=lambda t: (clusters(by_round[t])[0], t))
        clear, count = clusters(by_round[clearest])
        if clear >= CLEAR:
            text += f" In round {clearest} the clients fall into {count} clusters most clearly."
            if clearest < max(by_round):
                orders[f"clusters of round {clearest}"] = by_likeness(by_round[clearest])
        if group := _groups(run, ids):
            orders["groups"] = sorted(order, key=group.__getitem__)
    if len(orders) > 1:
        switch = {f"order by {word}": _sorted_by([labels[k] for k in one]) for word, one in orders.items()}
    draw = partial(_matrices, figure, labels, by_round, order, alike, clearest)
    return Panel(name, title, " ".join(text.split()), draw, switch=switch)


def _groups(run: ReportedRun, ids: Sequence[int]) -> list[float] | None:
    """Return the last group of each client that the run's method recorded; None if it recorded none for one of them."""
    for figure in run.figures:
        if isinstance(figure, Groups) and (found := groups(run, figure.record)):
            last = {i: float(row[~np.isnan(row)][-1]) for i, row in zip(found[0], found[1], strict=True)}
            if set(ids) <= set(last):
                return [last[i] for i in ids]
    return None


def _sorted_by(labels: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Return what changes if the clients have another order."""
    return {field: {"sort": list(labels)} for field in ("client", "other")}


def _rows(clients: int) -> str:
    """Return a sentence about the meaning of rows and columns."""
    if clients <= MOST_ROWS:
        return "Each client is a row and a column"
    of = f"{MOST_CLIENTS:,} of the {clients:,}" if clients > MOST_CLIENTS else f"the {clients:,}"
    return f"Each row and column is the mean of about {min(clients, MOST_CLIENTS) / MOST_ROWS:.0f} neighbours among {of} clients"


def _likeness(run: ReportedRun, ids: list[int]) -> _Likeness | None:
    known = class_counts(run)
    if known is None or not set(ids) <= set(known[0]):
        return None
    counts = known[1][[known[0].index(i) for i in ids]]
    similarity = cosine(counts)
    same = (similarity >= ALIKE) & ~np.eye(len(ids), dtype=bool)
    return _Likeness(counts, similarity, same, class_names(run, counts.shape[1]), class_labels(run, counts.shape[1]))


def _matrices(
    figure: Matrix,
    labels: Sequence[str],
    by_round: dict[int, Floats],
    order: list[int],
    alike: _Likeness | None,
    clearest: int,
) -> Chart:
    """Return the matrix, the similarity and the classes. A slider goes through the rounds, through some if their cells are many.

    clearest: a round that is among them.
    """
    n = len(labels)
    rounds = sorted(by_round)
    most = max(1, MOST_CELLS // n**2)
    kept = sorted({*rounds[::-1][:: math.ceil(len(rounds) / most)], clearest})
    side = 420 if alike is None else 360 - int(0.8 * charts.LETTER * max(map(len, labels)) if n <= MANY else 20)
    parts = [_square(labels, np.where(np.eye(n, dtype=bool), np.nan, by_round[t]), order).assign(round=t) for t in kept]
    shown = pandas.concat(parts, ignore_index=True)
    values = Axis(figure.unit)
    ends = (float(shown["value"].min()), float(shown["value"].max()))
    chart = _cells(shown, labels, order, values, ends, side, figure.heading or figure.title)
    if len(kept) > 1:
        chart = charts.slider(chart, kept)
    if alike is None:
        return chart
    both = _square(labels, np.where(np.eye(n, dtype=bool), np.nan, alike.similarity), order)
    similar = _cells(
        both, labels, order, Axis("cosine similarity"), (0.0, 1.0), side, "Similarity of class distributions"
    )
    if alike.outlined:
        pairs = _square(labels, np.where(alike.same, 1.0, np.nan), order)
        chart, similar = (charts.outlined(each, pairs) for each in (chart, similar))
    return charts.beside(chart, similar, _class_mix(labels, alike, order, side))


def _square(labels: Sequence[str], values: Floats, order: Sequence[int]) -> charts.Frame:
    """Return a matrix in an order as lines: client (its row), other (its column), value. Many rows are averaged."""
    cells = values[np.ix_(order, order)]
    if len(labels) <= MANY:
        names = [labels[k] for k in order]
        return frames.grid(names, names, cells, "client", "other")
    cells = averaged(averaged(cells, MOST_ROWS), MOST_ROWS, axis=1)
    places = [f"{100 * k / len(cells):.3g} %" for k in range(len(cells))]
    return frames.grid(places, places, cells, "client", "other")


def _names(labels: Sequence[str], order: Sequence[int]) -> list[str]:
    """Return the labels of rows in their order."""
    rows = min(len(labels), MOST_ROWS) if len(labels) > MANY else 0
    return [f"{100 * k / rows:.3g} %" for k in range(rows)] or [labels[k] for k in order]


def _cells(
    frame: charts.Frame,
    labels: Sequence[str],
    order: Sequence[int],
    axis: Axis,
    limits: tuple[float, float],
    side: int,
    title: str,
) -> Chart:
    many, rows = len(labels) > MANY, _names(labels, order)
    said = f"{len(labels):,} clients" if many else "client"
    x = charts.names("x", "other", said, rows, not many, room=side)
    y = charts.names("y", "client", None, rows, not many)
    colour = charts.coloured(axis, limits, across=side)
    return charts.cells(frame, x, y, colour, axis, side, side).properties(title=title)


def _class_mix(labels: Sequence[str], alike: _Likeness, order: Sequence[int], side: int) -> Chart:
    """Return each client's share of samples per class, in the rows of the matrices beside it."""
    counts = alike.counts[order]
    shares = averaged(
        counts / np.maximum(counts.sum(axis=1, keepdims=True), 1), MOST_ROWS if len(labels) > MANY else len(labels)
    )
    classes = alike.labels
    rows = _names(labels, order)
    frame = frames.grid(rows, classes, shares, "client", "class")
    width = WIDTH - 2 * side - 60
    title = "class" if alike.classes else "class (label index)"
    x = charts.names("x", "class", title, classes, room=width)
    y = charts.names("y", "client", None, rows, shown=False)
    colour = charts.coloured(Axis("share of samples", "~%"), (0.0, 1.0), share=True, across=width)
    return charts.cells(frame, x, y, colour, Axis("", "~%"), width, side).properties(title="Classes")


def _agreement(name: str, values: Floats, alike: _Likeness) -> str:
    """Return sentences that compare the values with the similarity of the clients' data."""
    off = ~np.eye(len(values), dtype=bool)
    known, same, similarity = off & ~np.isnan(values), alike.same, alike.similarity
    text = "Middle: cosine similarity of the two clients' class counts. Right: each row's classes. "
    if alike.few and (known & same).any() and (known & ~same).any():
        pairs = f"pairs with the same class distribution (cosine at least {ALIKE}{', outlined' * alike.outlined})"
        text += (
            f"Mean {name}: {values[known & same].mean():.3f} for {pairs}, "
            f"{values[known & ~same].mean():.3f} for all other pairs. "
        )
    if np.unique(similarity[known]).size > 1 and np.unique(values[known]).size > 1:
        pairs = pandas.DataFrame({"value": values[known], "similarity": similarity[known]})
        rank = pairs.corr(method="spearman").loc["value", "similarity"]
        text += f"Rank correlation of the two matrices: {rank:.2f} (1: the {name} orders all pairs as their data does)."
    return text
