"""The table of docs/results.md from the folders of sweeps/fashion-mnist-methods.toml.

python -m benchmarks.fashion_mnist_table runs/fashion-mnist-methods
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from fl_app.experiments.grouping import mean_std
from fl_app.experiments.runs import Run, find

LAST = 10  # rounds that before and after are averaged over


def name(run: Run) -> str:
    """Method, and FedPake's reading."""
    config = run.settings
    method = str(config["method"])
    if method == "fedpake":
        method += f" ({config['fedpake.delta-meaning']}, {config['fedpake.divisor']})"
    return method


def figures(run: Run) -> list[float]:
    """Final, final pooled, fine-tuned, and before and after over the last rounds' clients, in percent."""
    summary, rounds = run.summary, list(run.rounds.values())[-LAST:]
    last = [[100 * r[f"accuracy-{when}"] for r in rounds if r[f"accuracy-{when}"] is not None] for when in ("before", "after")]
    final = [summary[f"final-accuracy{kind}"] for kind in ("", "-pooled", "-finetuned")]
    return [*(100 * value for value in final), *(statistics.mean(values) for values in last)]


def main() -> None:
    """Print the table, best final accuracy first."""
    found: dict[str, list[list[float]]] = {}
    for run in find([Path(sys.argv[1])]):
        if run.finished:
            found.setdefault(name(run), []).append(figures(run))
    print("| method | final, all clients | pooled | fine-tuned | before, last 10 rounds | after, last 10 rounds | seeds |")
    print("|---|---|---|---|---|---|---|")
    for method, runs in sorted(found.items(), key=lambda item: -statistics.mean(run[0] for run in item[1])):
        pairs = [mean_std(column) for column in zip(*runs, strict=True)]
        cells = [f"{mean:.1f}" + ("" if std is None else f" ± {std:.1f}") for mean, std in pairs]
        print(f"| {method} | {' | '.join(cells)} | {len(runs)} |")


if __name__ == "__main__":
    main()
