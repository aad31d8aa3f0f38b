"""The table of studies/privacy.md on the cost of differential privacy, from the folders of sweeps/dp.toml.

python -m benchmarks.dp_accuracy runs/dp
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from corolla.experiments import compare
from corolla.experiments.grouping import mean_std
from fl_app.config import RunConfig
from fl_app.data import open_client
from strategies import METHOD_PARAMS

EPSILONS = (0.0, 8.0, 2.0)


def cell(values: Sequence[float]) -> str:
    """Return mean and sample standard deviation, in percent."""
    mean, std = mean_std(values)
    return f"{mean:.1f}" + ("" if std is None else f" ± {std:.1f}")


def majority(config: RunConfig) -> float:
    """Return the mean accuracy, in percent, of clients that always answer their most frequent training class."""
    clients = [open_client(config, i) for i in range(config.num_clients)]
    return 100 * float(np.mean([np.mean(np.asarray(c.y_test) == np.bincount(c.y_train).argmax()) for c in clients]))


def lines(paths: Sequence[Path]) -> list[str]:
    """Return the table: a row per data set, number of records and method, at the best of several learning rates."""
    found: dict[tuple[str, int, int, str], dict[float, list[list[float]]]] = {}
    alone: dict[tuple[str, int, int, str], list[float]] = {}
    for runs in compare.group(compare.load(paths, METHOD_PARAMS)[0]):
        config = runs[0].config
        row = config.dataset, config.train_samples, config.batch_size, config.method
        finals = [100 * run.summary["final-accuracy"] for run in runs]
        found.setdefault(row, {}).setdefault(config.dp_epsilon, []).append(finals)
        alone[row] = [majority(run.config) for run in runs]
    names = ("no noise" if not epsilon else f"epsilon {epsilon:g}" for epsilon in EPSILONS)
    table = [
        f"| data | records of a site | batch | majority | method | {' | '.join(names)} |",
        "|---" * (5 + len(EPSILONS)) + "|",
    ]
    for row, by_epsilon in sorted(found.items(), key=lambda item: item[0][1:]):
        best = [cell(max(by_epsilon[epsilon], key=lambda finals: mean_std(finals)[0])) for epsilon in EPSILONS]
        dataset, records, batch, method = row
        table.append(f"| {dataset} | {records:,} | {batch} | {cell(alone[row])} | {method} | {' | '.join(best)} |")
    return table


if __name__ == "__main__":
    print("\n".join(lines([Path(word) for word in sys.argv[1:]])))
