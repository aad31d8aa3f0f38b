"""The early stage's table of studies/results.md, from the folders of studies/sweeps/fashion-mnist-methods.toml.

python -m studies.fashion_mnist_table runs/fashion-mnist-methods
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from corolla.experiments import compare
from corolla.experiments.grouping import differing_settings, mean_std, settings
from corolla.experiments.runs import RecordedRun
from fl_app.keys import show
from strategies import METHOD_PARAMS

# last rounds, over which before and after are averaged
LAST = 10


def names(groups: Sequence[Sequence[RecordedRun]]) -> list[str]:
    """Return the groups' methods, each with the values of the settings in which groups of the same method differ."""
    every = [settings(runs[0].config.resolved) for runs in groups]
    found = []
    for own in every:
        same = [other for other in every if other["method"] == own["method"]]
        differing = [key for key in differing_settings(same) if key != "seed" and key in own]
        name = str(own["method"])
        if differing:
            name += f" ({', '.join(show(own[key]) for key in differing)})"
        found.append(name)
    return found


def figures(run: RecordedRun) -> list[float]:
    """Return a run's figures in percent: its final accuracies, then its last rounds' before and after training."""
    found = [100 * run.summary[f"final-accuracy{kind}"] for kind in ("", "-pooled", "-finetuned")]
    for name in ("accuracy-before", "accuracy-after"):
        last = [record[name] for record in list(run.rounds.values())[-LAST:]]
        found.append(statistics.mean(100 * value for value in last if value is not None))
    return found


def lines(paths: Sequence[Path]) -> list[str]:
    """Return the table, best final accuracy first. Runs that differ only in the seed are one row.

    paths: run folders, or folders of them.
    """
    runs, _ = compare.load(paths, METHOD_PARAMS)
    groups = compare.group(runs)
    rows = []
    for name, same in zip(names(groups), groups, strict=True):
        pairs = [mean_std(column) for column in zip(*map(figures, same), strict=True)]
        cells = [f"{mean:.1f}" if std is None else f"{mean:.1f} ± {std:.1f}" for mean, std in pairs]
        rows.append((pairs[0][0], f"| {name} | {' | '.join(cells)} | {len(same)} |"))
    rows.sort(key=lambda row: -row[0])
    head = (
        "| method | final, all clients | pooled | fine-tuned | before, last 10 rounds | after, last 10 rounds | seeds |"
    )
    return [head, "|---|---|---|---|---|---|---|", *(line for _, line in rows)]


if __name__ == "__main__":
    print("\n".join(lines([Path(word) for word in sys.argv[1:]])))
