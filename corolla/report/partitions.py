"""The report's picture of the data: samples per client and class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pandas
from numpy.typing import NDArray

from corolla.report import charts, frames
from corolla.report.arrays import MANY, ReportedRun
from corolla.report.charts import WIDTH, Axis, Chart
from corolla.report.pictures import MOST_ROWS, Panel, averaged, listed
from corolla.report.recorded import class_counts, class_labels, class_names, client_labels

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


def partitions(runs: Sequence[ReportedRun]) -> Iterator[Panel]:
    """Yield one picture per division of the data, from the runs' class counts (FedCAC Fig. 8).

    Only the first picture of each data set and partition is open.
    """
    splits: dict[bytes, list[ReportedRun]] = {}
    for run in runs:
        if found := class_counts(run):
            key = np.concatenate([found[0], found[1].ravel(), found[1].shape]).astype(np.int64).tobytes()
            splits.setdefault(key, []).append(run)
    seen: set[str] = set()
    for k, same in enumerate(splits.values(), 1):
        kind = ", ".join(dict.fromkeys(f"{run.setting('dataset')}, {run.setting('partition')}" for run in same))
        which = "" if len(splits) == 1 else f", {listed([run.number for run in same])}"
        ids, counts = class_counts(same[0]) or ([], np.zeros((0, 0), np.int64))
        caption, draw = DOTS, partial(_partition, same[0], ids, counts)
        if len(ids) > MANY:
            caption, draw = GROUPED, partial(_grouped, same[0], counts)
        yield Panel(
            f"partition-{k}" if len(splits) > 1 else "partition",
            f"Data of each client{which}",
            caption.format(kind=kind, clients=f"{len(ids):,}", samples=f"{counts.sum():,}", below=_sizes(counts)),
            draw,
            folded=kind in seen,
        )
        seen.add(kind)


def _classes(run: ReportedRun, count: int) -> tuple[list[str], str]:
    """Return the classes' labels and the title of their axis."""
    return class_labels(run, count), "class" if class_names(run, count) else "class (label index)"


def _partition(run: ReportedRun, ids: list[int], counts: NDArray[np.int64]) -> Chart:
    (names, title), clients = _classes(run, counts.shape[1]), client_labels(run, ids)
    shown = np.where(counts, counts, np.nan)
    frame = frames.grid(clients, names, shown, "client", "class").rename(columns={"value": "samples"})
    return charts.dots(frame, clients, names, title)


def _sizes(counts: NDArray[np.int64]) -> str:
    """Return a sentence about the clients' total numbers of samples."""
    samples = np.unique(counts.sum(axis=1))
    return f"All clients have {samples[0]:,}." if samples.size == 1 else "Below: total number of samples per client."


def _grouped(run: ReportedRun, counts: NDArray[np.int64]) -> Chart:
    """Return the classes of many clients: their shares, with similar clients side by side, and quantiles per class."""
    num_clients, num_classes = counts.shape
    names, title = _classes(run, num_classes)
    height, samples = max(150, min(26 * num_classes, 800)), counts.sum(axis=1)
    rows = averaged((counts / np.maximum(samples, 1)[:, None])[by_classes(counts)], 2 * MOST_ROWS)
    places = [f"{100 * k / len(rows):.3g} %" for k in range(len(rows))]
    x = charts.names("x", "clients", f"{num_clients:,} clients, similar ones side by side", places, shown=False)
    y = charts.names("y", "class", title, names[::-1])
    colour = charts.coloured(Axis("share of samples", "~%"), (0.0, 1.0), share=True, across=300)
    width = (WIDTH * 11) // 18
    mix = charts.cells(
        frames.grid(places, names, rows, "clients", "class"), x, y, colour, Axis("", "~%"), width, height
    )
    bounds = dict(
        zip(
            ("lowest", "low", "median", "high", "highest"),
            np.percentile(counts, (5, 25, 50, 75, 95), axis=0),
            strict=True,
        )
    )
    spread = charts.quantiles(
        pandas.DataFrame({"class": names, **bounds}),
        "training samples of the class",
        names[::-1],
        WIDTH - width - 120,
        height,
    )
    both = charts.beside(mix, spread)
    if not np.ptp(samples):
        return both
    edges = np.linspace(samples.min() - 0.5, samples.max() + 0.5, min(40, int(np.ptp(samples)) + 1) + 1)
    return charts.below(both, charts.counts(frames.bins(samples, edges), "training samples of a client", "clients"))


def by_classes(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return an order of clients with class counts [N, classes] that puts similar ones side by side.

    They are sorted by their first, second and third most frequent class, then by the share of the first.
    """
    ranked = np.argsort(-counts, axis=1, kind="stable")[:, :3]
    has = np.take_along_axis(counts, ranked, axis=1) > 0
    share = counts.max(axis=1) / np.maximum(counts.sum(axis=1), 1)
    keys = [-share, *np.where(has, ranked, -1).T[::-1]]
    return np.lexsort(keys)
