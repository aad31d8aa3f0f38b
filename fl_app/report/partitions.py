"""The report's picture of the data: who has which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fl_app.report.arrays import Run
from fl_app.report.figures import BLACK, BLUE, STYLE, WIDTH, Panel, listed, new_figure, png, thinned
from fl_app.report.recorded import class_counts


def partitions(runs: Sequence[Run]) -> Iterator[Panel]:
    """Yield one picture per split of the data, told by the runs' class counts (FedCAC Fig. 8)."""
    groups: dict[bytes, list[Run]] = {}
    for run in runs:
        if found := class_counts(run):
            key = np.concatenate([found[0], found[1].ravel(), found[1].shape]).astype(np.int64).tobytes()
            groups.setdefault(key, []).append(run)
    for k, group in enumerate(groups.values(), 1):
        ids, counts = class_counts(group[0]) or ([], np.zeros((0, 0), np.int64))
        splits = ", ".join(dict.fromkeys(f"{run.value('dataset')}, {run.value('partition')}" for run in group))
        which = "" if len(groups) == 1 else f", {listed(group)}"
        with rc_context(STYLE):
            image = png(_partition(ids, counts))
        yield Panel(
            f"partition-{k}" if len(groups) > 1 else "partition", f"Who has which data{which}",
            f"Training samples per client and class ({splits}); the area of a dot is their number. Columns with the same "
            "dots are clients with the same data distribution, whom personalization should bring together.", image,
        )  # fmt: skip


def _partition(ids: list[int], counts: NDArray[np.int64]) -> Figure:
    num_clients, num_classes = counts.shape
    height = min(9.5, 1.3 + max(0.3 * num_classes, 0.8))
    figure = new_figure(height)
    axes = figure.add_subplot()
    cell = min(0.82 * WIDTH / num_clients, (height - 0.9) / num_classes) * 72  # points
    largest = (0.92 * min(cell, 26)) ** 2
    x, y = np.nonzero(counts)
    area = np.maximum(largest * counts[x, y] / counts.max(), 1)
    axes.scatter(x, y, s=area, color=BLUE, edgecolors=BLACK, linewidths=0.4, zorder=2)
    axes.set(xlim=(-0.6, num_clients - 0.4), ylim=(-0.6, num_classes - 0.4), xlabel="client", ylabel="class (label index)")
    positions = thinned(num_clients, 0.82 * WIDTH, 0.28)
    axes.set_xticks(positions, [str(ids[p]) for p in positions])
    axes.set_yticks(thinned(num_classes, height - 0.9, 0.17))
    sizes = sorted({_round_number(counts.max() * part) for part in (1.0, 0.5, 0.1)} - {0}, reverse=True)
    handles = [
        axes.scatter([], [], s=max(largest * n / counts.max(), 1), color=BLUE, edgecolors=BLACK, linewidths=0.4)
        for n in sizes
    ]
    figure.legend(
        handles, [str(n) for n in sizes], title="training\nsamples", loc="outside right upper", labelspacing=1.2,
        borderpad=0.8,
    )  # fmt: skip
    return figure


def _round_number(value: float) -> int:
    """Round to one leading digit, or to a whole number below 10."""
    if value < 10:
        return round(value)
    power: int = 10 ** (len(str(int(value))) - 1)
    return int(value // power * power)
