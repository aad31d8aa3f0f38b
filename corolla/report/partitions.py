"""The report's picture of the data: who has which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from corolla.report.arrays import ReportedRun
from corolla.report.figures import WIDTH, Panel, clipped, listed, new_figure, thinned
from corolla.report.recorded import class_counts, class_names
from corolla.report.style import BLUE, shown, tone


def partitions(runs: Sequence[ReportedRun]) -> Iterator[Panel]:
    """Yield one picture per split of the data, told by the runs' class counts (FedCAC Fig. 8); of a kind's, one is open."""
    splits: dict[bytes, list[ReportedRun]] = {}
    for run in runs:
        if found := class_counts(run):
            key = np.concatenate([found[0], found[1].ravel(), found[1].shape]).astype(np.int64).tobytes()
            splits.setdefault(key, []).append(run)
    seen: set[str] = set()
    for k, same in enumerate(splits.values(), 1):
        kind = ", ".join(dict.fromkeys(f"{run.setting('dataset')}, {run.setting('partition')}" for run in same))
        which = "" if len(splits) == 1 else f", {listed([run.number for run in same])}"
        yield Panel(
            f"partition-{k}" if len(splits) > 1 else "partition",
            f"Who has which data{which}",
            f"Training samples per client and class ({kind}); the area of a dot is their number. Columns with the same "
            "dots are clients with the same data distribution, whom personalization should bring together.",
            partial(_partition, same[0]),
            folded=kind in seen,
        )
        seen.add(kind)


def _partition(run: ReportedRun) -> Figure:
    ids, counts = class_counts(run) or ([], np.zeros((0, 0), np.int64))
    num_clients, num_classes = counts.shape
    names = class_names(run, num_classes)
    height = min(9.5, 1.3 + max(0.3 * num_classes, 0.8))
    figure = new_figure(height)
    axes = figure.add_subplot()
    cell = min(0.82 * WIDTH / num_clients, (height - 0.9) / num_classes) * 72  # points
    largest = (0.92 * min(cell, 26)) ** 2
    dots: dict[str, Any] = {"color": shown(BLUE), "edgecolors": tone(0.0), "linewidths": 0.4}
    x, y = np.nonzero(counts)
    axes.scatter(x, y, s=np.maximum(largest * counts[x, y] / counts.max(), 1), zorder=2, **dots)
    axes.set(xlim=(-0.6, num_clients - 0.4), ylim=(-0.6, num_classes - 0.4), xlabel="client")
    axes.set_ylabel("class" if names else "class (label index)")
    positions = thinned(num_clients, 0.82 * WIDTH, 0.28)
    axes.set_xticks(positions, [str(ids[p]) for p in positions])
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


def _round_number(value: float) -> int:
    """Round to one leading digit, or to a whole number below 10."""
    if value < 10:
        return round(value)
    power: int = 10 ** (len(str(int(value))) - 1)
    return int(value // power * power)
