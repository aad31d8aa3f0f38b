"""The early stage's table of docs/results.md, from the folders of sweeps/fashion-mnist-methods.toml.

python -m benchmarks.fashion_mnist_table runs/fashion-mnist-methods
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from corolla.experiments import compare
from corolla.experiments.grouping import mean_std, settings
from corolla.experiments.runs import RecordedRun
from fl_app.keys import show
from strategies import METHOD_PARAMS

LAST = 10  # rounds that before and after are averaged over


def names(groups: Sequence[Sequence[RecordedRun]]) -> list[str]:
    """Method, and where it has several groups the values of the settings in which they differ."""
    every = [settings(runs[0].config.resolved) for runs in groups]
    out = []
    for own in every:
        same = [other for other in every if other["method"] == own["method"]]
        differ = [key for key in own if key != "seed" and len({other.get(key) for other in same}) > 1]
        out.append(str(own["method"]) + (f" ({', '.join(show(own[key]) for key in differ)})" if differ else ""))
    return out


def figures(run: RecordedRun) -> list[float]:
    """Final, final pooled, fine-tuned, and before and after over the last rounds' clients, in percent."""
    summary, rounds = run.summary, list(run.rounds.values())[-LAST:]
    last = [
        [100 * r[f"accuracy-{when}"] for r in rounds if r[f"accuracy-{when}"] is not None]
        for when in ("before", "after")
    ]
    final = [summary[f"final-accuracy{kind}"] for kind in ("", "-pooled", "-finetuned")]
    return [*(100 * value for value in final), *(statistics.mean(values) for values in last)]


def lines(paths: Sequence[Path]) -> list[str]:
    """Return the table, best final accuracy first; runs that differ in the seed alone are one row, as everywhere."""
    groups = compare.group(compare.load(paths, METHOD_PARAMS)[0])
    rows = []
    for name, runs in zip(names(groups), groups, strict=True):
        pairs = [mean_std(column) for column in zip(*map(figures, runs), strict=True)]
        cells = [f"{mean:.1f}" + ("" if std is None else f" ± {std:.1f}") for mean, std in pairs]
        rows.append((pairs[0][0], f"| {name} | {' | '.join(cells)} | {len(runs)} |"))
    head = (
        "| method | final, all clients | pooled | fine-tuned | before, last 10 rounds | after, last 10 rounds | seeds |"
    )
    return [head, "|---|---|---|---|---|---|---|", *(line for _, line in sorted(rows, key=lambda row: -row[0]))]


if __name__ == "__main__":
    print("\n".join(lines([Path(word) for word in sys.argv[1:]])))
