"""The report's picture of the data: samples per client and class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from corolla.report.arrays import MANY, ReportedRun
from corolla.report.figures import MOST_ROWS, WIDTH, Panel, averaged, clipped, inches, listed, new_figure, thinned
from corolla.report.recorded import class_counts, class_names, client_labels
from corolla.report.style import BLUE, shares, shown, tone

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
        caption, draw = DOTS, partial(_partition, same[0])
        if len(ids) > MANY:
            caption, draw = GROUPED, partial(_grouped, same[0])
        yield Panel(
            f"partition-{k}" if len(splits) > 1 else "partition",
            f"Data of each client{which}",
            caption.format(kind=kind, clients=f"{len(ids):,}", samples=f"{counts.sum():,}", below=_sizes(counts)),
            draw,
            folded=kind in seen,
        )
        seen.add(kind)


def _partition(run: ReportedRun) -> Figure:
    ids, counts = class_counts(run) or ([], np.zeros((0, 0), np.int64))
    num_clients, num_classes = counts.shape
    names = class_names(run, num_classes)
    clients = client_labels(run, ids)
    crowded = sum(map(len, clients)) > 60
    # height of the axes with title and labels
    height = min(9.5, 1.3 + max(0.3 * num_classes, 0.8))
    figure = new_figure(height + (inches(clients, 10) if crowded else 0))
    axes = figure.add_subplot()
    cell = min(0.82 * WIDTH / num_clients, (height - 0.9) / num_classes) * 72  # points
    largest = (0.92 * min(cell, 26)) ** 2
    dots: dict[str, Any] = {"color": shown(BLUE), "edgecolors": tone(0.0), "linewidths": 0.4}
    x, y = np.nonzero(counts)
    axes.scatter(x, y, s=np.maximum(largest * counts[x, y] / counts.max(), 1), zorder=2, **dots)
    axes.set(xlim=(-0.6, num_clients - 0.4), ylim=(-0.6, num_classes - 0.4), xlabel="client")
    axes.set_ylabel("class" if names else "class (label index)")
    positions = thinned(num_clients, 0.82 * WIDTH, 0.28)
    axes.set_xticks(positions, [clients[p] for p in positions], rotation=90 if crowded else 0)
    positions = thinned(num_classes, height - 0.9, 0.17)
    axes.set_yticks(positions, [clipped(names[p]) if names else str(p) for p in positions])
    sizes = sorted({_round_number(counts.max() * part) for part in (1.0, 0.5, 0.1)} - {0}, reverse=True)
    handles = [axes.scatter([], [], s=max(largest * n / counts.max(), 1), **dots) for n in sizes]
    figure.legend(
        handles,
        [str(n) for n in sizes],
        title="training\nsamples",
        loc="outside right upper",
        labelspacing=1.2,
        borderpad=0.8,
    )
    return figure


def _sizes(counts: NDArray[np.int64]) -> str:
    """Return a sentence about the clients' total numbers of samples."""
    samples = np.unique(counts.sum(axis=1))
    return f"All clients have {samples[0]:,}." if samples.size == 1 else "Below: total number of samples per client."


def _grouped(run: ReportedRun) -> Figure:
    """Draw many clients: class shares, with similar clients side by side, and quantiles per class."""
    _, counts = class_counts(run) or ([], np.zeros((0, 0), np.int64))
    num_clients, num_classes = counts.shape
    names = class_names(run, num_classes)
    height = min(9.5, max(0.26 * num_classes, 1.6))
    samples = counts.sum(axis=1)
    differ = np.ptp(samples) > 0
    figure = new_figure(height + (2.6 if differ else 1.0))
    grid = figure.add_gridspec(1 + differ, 2, height_ratios=[height, 1.1][: 1 + differ], width_ratios=[2.2, 1])
    mix, spread = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])

    rows = averaged((counts / np.maximum(samples, 1)[:, None])[by_classes(counts)], 2 * MOST_ROWS)
    extent = (0, num_clients, -0.5, num_classes - 0.5)
    image = mix.imshow(
        rows.T, cmap=shares(), vmin=0, vmax=1, interpolation="nearest", aspect="auto", extent=extent, origin="lower"
    )
    mix.grid(visible=False)
    mix.set_xlabel(f"{num_clients:,} clients, similar ones side by side")
    figure.colorbar(image, ax=mix, label="share of samples", fraction=0.04, pad=0.01, ticks=[0, 0.5, 1])

    lowest, low, middle, high, highest = np.percentile(counts, (5, 25, 50, 75, 95), axis=0)
    at = np.arange(num_classes)
    spread.hlines(at, lowest, highest, color=shown(BLUE), linewidth=1)
    spread.hlines(at, low, high, color=shown(BLUE), linewidth=6, alpha=0.5)
    spread.plot(middle, at, "o", color=shown(BLUE), markersize=5, markeredgecolor=tone(1.0), clip_on=False)
    spread.set(xlabel="training samples of the class", ylim=(-0.5, num_classes - 0.5))
    spread.set_xlim(left=0)

    positions = thinned(num_classes, height, 0.17)
    labels = [clipped(names[p]) if names else str(p) for p in positions]
    mix.set_yticks(positions, labels)
    mix.set_ylabel("class" if names else "class (label index)")
    spread.set_yticks(positions, [""] * len(positions))

    if not differ:
        return figure
    sizes = figure.add_subplot(grid[1, :])
    spans = min(40, int(np.ptp(samples)) + 1)
    edges = np.linspace(samples.min() - 0.5, samples.max() + 0.5, spans + 1)
    sizes.stairs(np.histogram(samples, edges)[0], edges, fill=True, color=shown(BLUE), alpha=0.5)
    sizes.set(xlabel="training samples of a client", ylabel="clients")
    sizes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    return figure


def by_classes(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return an order of clients with class counts [N, classes] that puts similar ones side by side.

    They are sorted by their first, second and third most frequent class, then by the share of the first.
    """
    ranked = np.argsort(-counts, axis=1, kind="stable")[:, :3]
    has = np.take_along_axis(counts, ranked, axis=1) > 0
    share = counts.max(axis=1) / np.maximum(counts.sum(axis=1), 1)
    keys = [-share, *np.where(has, ranked, -1).T[::-1]]
    return np.lexsort(keys)


def _round_number(value: float) -> int:
    """Round to one leading digit, or to a whole number below 10."""
    if value < 10:
        return round(value)
    power: int = 10 ** (len(str(int(value))) - 1)
    return int(value // power * power)
