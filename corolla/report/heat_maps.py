"""Pictures of the clients' data: samples per class, and matrices between clients beside their data's similarity."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas
from numpy.typing import NDArray

from corolla.report import charts
from corolla.report.all_runs import listed
from corolla.report.arrays import (
    MANY,
    MOST_ROWS,
    Floats,
    Frame,
    ReportedRun,
    averaged,
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
from corolla.report.charts import WIDTH, Axis, Chart, Panel, sentences
from corolla.report.groups import as_cells, bins, spaced
from fl_app.figures import Groups, Matrix

# two class distributions count as equal from this cosine similarity on
ALIKE = 0.99
# Sorting this many clients takes a second. For more clients, this many are drawn, at equal distances.
MOST_CLIENTS = 1000
# clusters are named from this part of the last merge's height on
CLEAR = 0.25
# cells of all rounds that a reader can go through
MOST_CELLS = 20_000
SHARE = Axis("share of samples", "~%")
QUANTILES = {"lowest": 0.05, "low": 0.25, "median": 0.5, "high": 0.75, "highest": 0.95}
DOTS = (
    "Training samples per client and class ({kind}): the area of a dot is their number. Columns with equal dots are "
    "clients with the same data distribution. Personalization should bring these together."
)
GROUPED = (
    "{samples} training samples of {clients} clients ({kind}). Left: the share of each class in a client's samples. Columns are "
    "clients, ordered by their most frequent class, then by the next. Blocks are clients with similar data, which "
    "personalization should bring together. Right: a client's number of samples per class. Dot: median over the clients; bar: "
    "middle half of them; line: from the 5 % to the 95 % quantile. {below}"
)


def matrix(run: ReportedRun, figure: Matrix) -> tuple[Any, ...] | None:
    """Return the picture of a matrix, with the similarity of the clients' data beside it if class counts are known.

    It is what a `Panel` takes after its name; None without any matrix.
    """
    found = matrices(run, figure.record)
    if found is None:
        return None
    ids, by_round = found
    everybody = len(ids)
    kept = spaced(everybody, MOST_CLIENTS)
    ids, by_round = np.array(ids)[kept].tolist(), {t: one[np.ix_(kept, kept)] for t, one in by_round.items()}
    last = clearest = max(by_round)
    known, counts = class_counts(run), None
    beside, near, likeness, title = "Colour", "values", by_round[last], figure.title
    if known is not None and set(ids) <= set(known[0]):
        counts = known[1][np.searchsorted(known[0], ids)]
        beside, near, likeness = "Left", "data", cosine(counts)
        title = f"{title}, and similarity of the clients' data"
    labels, order, fallen = client_labels(run, ids), by_likeness(likeness), ""
    orders = {near: order}
    if len(ids) <= MANY:
        orders = {"data": order} if counts is not None else {}
        orders[figure.value] = by_likeness(by_round[last])
        clearest = max(by_round, key=lambda t: (clusters(by_round[t])[0], t))
        clear, count = clusters(by_round[clearest])
        if clear >= CLEAR:
            fallen = f"In round {clearest} the clients fall into {count} clusters most clearly."
            if clearest < last:
                orders[f"clusters of round {clearest}"] = by_likeness(by_round[clearest])
        if group := _groups(run, ids):
            orders["groups"] = sorted(order, key=group.__getitem__)
    switch = {}
    for word, one in orders.items() if len(orders) > 1 else ():
        sort = {"sort": [labels[k] for k in one]}
        switch[f"order by {word}"] = {"client": sort, "other": sort}
    rows = "Each client is a row and a column"
    if len(ids) > MOST_ROWS:
        of = f"{len(ids):,} of " * (everybody > len(ids)) + f"the {everybody:,}"
        rows = f"Each row and column is the mean of about {len(ids) / MOST_ROWS:.0f} neighbours among {of} clients"
    text = sentences(
        f"{figure.caption} {rows}; neighbours have similar {near}. {beside}: the last recorded value of each pair;",
        "grey: a client with itself, and pairs that never shared a round.",
        _agreement(figure.value, by_round[last], likeness) if counts is not None else "",
        fallen,
    )
    draw = partial(_matrices, run, figure, labels, by_round, order, counts, clearest)
    return title, text, draw, False, switch or None


def _groups(run: ReportedRun, ids: Sequence[int]) -> list[float] | None:
    """Return the last group of each client that the run's method recorded; None if it recorded none for one of them."""
    for figure in run.figures:
        if isinstance(figure, Groups) and (found := groups(run, figure.record)):
            last = {i: float(row[~np.isnan(row)][-1]) for i, row in zip(found[0], found[1], strict=True)}
            if set(ids) <= set(last):
                return [last[i] for i in ids]
    return None


def _alike(similarity: Floats) -> NDArray[np.bool_] | None:
    """Return which pairs of clients have equal data, [N, N]; None if these pairs are too many to be told apart."""
    same = (similarity >= ALIKE) & ~np.eye(len(similarity), dtype=bool)
    return same if same.sum() <= (same.size - len(same)) / 3 else None


def _classes(run: ReportedRun, count: int) -> tuple[list[str], str]:
    """Return the classes' labels and the title of their axis."""
    return class_labels(run, count), "class" if class_names(run, count) else "class (label index)"


def _matrices(
    run: ReportedRun,
    figure: Matrix,
    labels: Sequence[str],
    by_round: dict[int, Floats],
    order: list[int],
    counts: NDArray[np.int64] | None,
    clearest: int,
) -> Chart:
    """Return the matrix, the similarity and the classes. A slider goes through the rounds, through some if their cells are many.

    counts: the clients' class counts. clearest: a round that is among those of the slider.
    """
    many, rounds = len(labels) > MANY, sorted(by_round)
    most = max(1, MOST_CELLS // len(labels) ** 2)
    kept = sorted({*rounds[::-1][:: math.ceil(len(rounds) / most)], clearest})
    side = 420
    if counts is not None:
        side = 360 - (20 if many else int(0.8 * charts.LETTER * max(map(len, labels))))
    rows = [labels[k] for k in order]
    if many:
        rows = [f"{100 * k / min(len(labels), MOST_ROWS):.3g} %" for k in range(min(len(labels), MOST_ROWS))]
    x = charts.names("x", "other", f"{len(labels):,} clients" if many else "client", rows, not many, room=side)
    y = charts.names("y", "client", None, rows, not many)

    def square(values: Floats) -> Frame:
        """Return a matrix as lines: client (its row), other (its column), value. Many rows are averaged."""
        ordered = np.where(np.eye(len(labels), dtype=bool), np.nan, values)[np.ix_(order, order)]
        if many:
            ordered = averaged(averaged(ordered, MOST_ROWS), MOST_ROWS, axis=1)
        return as_cells(rows, rows, ordered, "client", "other")

    def drawn(frame: Frame, axis: Axis, limits: tuple[float, float], title: str) -> Chart:
        return charts.cells(frame, x, y, charts.coloured(axis, limits, across=side), axis, side, side).properties(
            title=title
        )

    shown = pandas.concat([square(by_round[t]).assign(round=t) for t in kept], ignore_index=True)
    ends = float(shown["value"].min()), float(shown["value"].max())
    chart = drawn(shown, Axis(figure.unit), ends, figure.heading or figure.title)
    if len(kept) > 1:
        chart = charts.slider(chart, kept)
    if counts is None:
        return chart
    similarity = cosine(counts)
    similar = drawn(square(similarity), Axis("cosine similarity"), (0.0, 1.0), "Similarity of class distributions")
    same = _alike(similarity)
    if same is not None and not many:
        pairs = square(np.where(same, 1.0, np.nan))
        chart, similar = charts.outlined(chart, pairs), charts.outlined(similar, pairs)
    width, (classes, title) = WIDTH - 2 * side - 60, _classes(run, counts.shape[1])
    mix = charts.cells(
        as_cells(rows, classes, averaged(_shares(counts[order]), MOST_ROWS), "client", "class"),
        charts.names("x", "class", title, classes, room=width),
        charts.names("y", "client", None, rows, shown=False),
        charts.coloured(SHARE, (0.0, 1.0), share=True, across=width),
        SHARE,
        width,
        side,
    )
    return charts.beside(chart, similar, mix.properties(title="Classes"))


def _shares(counts: NDArray[np.int64]) -> Floats:
    """Return each client's share of samples per class, [N, classes]."""
    return np.asarray(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))


def _agreement(name: str, values: Floats, similarity: Floats) -> str:
    """Return sentences that compare the values with the similarity of the clients' data."""
    known, same = (~np.eye(len(values), dtype=bool)) & ~np.isnan(values), _alike(similarity)
    text = "Middle: cosine similarity of the two clients' class counts. Right: each row's classes. "
    if same is not None and (known & same).any() and (known & ~same).any():
        pairs = f"pairs with the same class distribution (cosine at least {ALIKE}{', outlined' * (len(same) <= MANY)})"
        text += (
            f"Mean {name}: {values[known & same].mean():.3f} for {pairs}, "
            f"{values[known & ~same].mean():.3f} for all other pairs. "
        )
    if np.unique(similarity[known]).size > 1 and np.unique(values[known]).size > 1:
        pairs = pandas.DataFrame({"value": values[known], "similarity": similarity[known]})
        rank = pairs.corr(method="spearman").loc["value", "similarity"]
        text += f"Rank correlation of the two matrices: {rank:.2f} (1: the {name} orders all pairs as their data does)."
    return text


# Samples per class ----------------------------------------------------------------------------------------------------


def partitions(runs: Sequence[ReportedRun]) -> Iterator[Panel]:
    """Yield one picture per division of the data, from the runs' class counts (FedCAC Fig. 8).

    Only the first picture of each data set and partition is open.
    """
    splits: dict[str, list[ReportedRun]] = {}
    for run in runs:
        if found := class_counts(run):
            splits.setdefault(str((found[0], found[1].tolist())), []).append(run)
    seen: set[str] = set()
    for k, same in enumerate(splits.values(), 1):
        kind = ", ".join(dict.fromkeys(f"{run.setting('dataset')}, {run.setting('partition')}" for run in same))
        name, title = "partition", "Data of each client"
        if len(splits) > 1:
            name, title = f"{name}-{k}", f"{title}, {listed([run.number for run in same])}"
        ids, counts = class_counts(same[0]) or ([], np.zeros((0, 0), np.int64))
        caption, draw = DOTS, _dots
        if len(ids) > MANY:
            caption, draw = GROUPED, _grouped
        samples = counts.sum(axis=1)
        below = "Below: total number of samples per client."
        if not np.ptp(samples):
            below = f"All clients have {samples[0]:,}."
        text = caption.format(kind=kind, clients=f"{len(ids):,}", samples=f"{samples.sum():,}", below=below)
        yield Panel(name, title, text, partial(draw, same[0], ids, counts), folded=kind in seen)
        seen.add(kind)


def _dots(run: ReportedRun, ids: list[int], counts: NDArray[np.int64]) -> Chart:
    (names, title), clients = _classes(run, counts.shape[1]), client_labels(run, ids)
    frame = as_cells(clients, names, np.where(counts, counts, np.nan), "client", "class")
    return charts.dots(frame.rename(columns={"value": "samples"}), clients, names, title)


def _grouped(run: ReportedRun, ids: list[int], counts: NDArray[np.int64]) -> Chart:
    """Return the classes of many clients: their shares, with similar clients side by side, and quantiles per class."""
    names, title = _classes(run, counts.shape[1])
    height, width, samples = max(150, min(26 * len(names), 800)), (WIDTH * 11) // 18, counts.sum(axis=1)
    rows = averaged(_shares(counts)[by_classes(counts)], 2 * MOST_ROWS)
    places = [f"{100 * k / len(rows):.3g} %" for k in range(len(rows))]
    mix = charts.cells(
        as_cells(places, names, rows, "clients", "class"),
        charts.names("x", "clients", f"{len(ids):,} clients, similar ones side by side", places, shown=False),
        charts.names("y", "class", title, names[::-1]),
        charts.coloured(SHARE, (0.0, 1.0), share=True, across=300),
        SHARE,
        width,
        height,
    )
    bounds = pandas.DataFrame(counts, columns=names).quantile([*QUANTILES.values()]).T.set_axis([*QUANTILES], axis=1)
    spread = charts.quantiles(
        bounds.rename_axis("class").reset_index(),
        "training samples of the class",
        names[::-1],
        WIDTH - width - 120,
        height,
    )
    both = charts.beside(mix, spread)
    if not np.ptp(samples):
        return both
    edges = np.linspace(samples.min() - 0.5, samples.max() + 0.5, min(40, int(np.ptp(samples)) + 1) + 1)
    return charts.below(both, charts.counts(bins(samples, edges), "training samples of a client", "clients"))


def by_classes(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return an order of clients with class counts [N, classes] that puts similar ones side by side.

    They are sorted by their first, second and third most frequent class, then by the share of the first.
    """
    ranked = np.argsort(-counts, axis=1, kind="stable")[:, :3]
    return np.lexsort(
        [
            -(counts.max(axis=1) / np.maximum(counts.sum(axis=1), 1)),
            *np.where(np.take_along_axis(counts, ranked, axis=1) > 0, ranked, -1).T[::-1],
        ]
    )
