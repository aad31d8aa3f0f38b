"""Distances between methods over all test samples, with intervals: the second table of a column of studies/results.md.

A row's figure is the best of its tests of all clients over all test samples, before fine-tuning or after it.
Differences compare the same clients, which have the same samples in all runs of a column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from corolla.experiments.compare import PaperLine
from corolla.experiments.runs import RecordedRun
from corolla.experiments.significance import interval

# by client: number of right answers, number of test samples
Counts = Mapping[str, tuple[float, int]]
STAGES = {"before": "accuracy", "fine-tuned": "accuracy-finetuned"}


def best_test(run: RecordedRun, stage: str) -> Counts | None:
    """Return the clients' right answers in a run's best test, `before` or `fine-tuned`, or None if none is known."""
    tests = list(run.evaluations.values())
    pooled = f"{STAGES[stage]}-pooled"
    if not tests or any(test.get(pooled) is None for test in tests):
        return None
    best = max(tests, key=lambda test: float(test[pooled]))
    return counts(best, stage) or None


def counts(test: Mapping[str, Any], stage: str) -> Counts:
    """Return the clients' right answers in a test, `before` or `fine-tuned`."""
    found = {}
    for i, row in test["clients"].items():
        samples = row["test-samples"]
        found[i] = (row[STAGES[stage]] * samples, samples)
    return found


def difference(pairs: Sequence[tuple[Counts, Counts]]) -> tuple[float, float]:
    """Return the difference of the shares of right answers, and half its 95 % interval.

    Shares are over all samples of all pairs of tests. The interval is that of a ratio estimated from clients
    (linearized), because another draw of clients would give another difference. A client's samples count together, in
    all pairs (seeds) that include it. Raises ValueError if tests have different samples.
    """
    gains: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for ours, theirs in pairs:
        if {i: size for i, (_, size) in ours.items()} != {i: size for i, (_, size) in theirs.items()}:
            raise ValueError("the tests are not of the same samples")
        for i, (right, size) in ours.items():
            gains[i] = gains.get(i, 0.0) + right - theirs[i][0]
            sizes[i] = sizes.get(i, 0) + size
    gained, held = np.array(list(gains.values())), np.array(list(sizes.values()))
    mean = float(gained.sum() / held.sum())
    found = interval((gained - mean * held) / held.mean())
    half = found[1] if found else float("nan")
    return mean, half


def beside(line: PaperLine, first: PaperLine, stage: str) -> tuple[float, float] | None:
    """Return a row's distance from the first row before fine-tuning, and half its interval.

    The distance is over the seeds that both have. Return None if they have no common seed, or if a run of a common seed
    was not tested.
    """
    theirs = {run.config.seed: best_test(run, "before") for run in first.runs}
    pairs = []
    for run in line.runs:
        if run.config.seed in theirs:
            ours, other = best_test(run, stage), theirs[run.config.seed]
            if ours is None or other is None:
                return None
            pairs.append((ours, other))
    return difference(pairs) if pairs else None


def differences_table(lines: Sequence[PaperLine]) -> Iterator[str]:
    """Yield the table's lines, best first: all rows against the first of `lines`. Nothing if that was not tested."""
    first = lines[0]
    tested = best_test(first.runs[0], "before")
    if tested is None:
        return
    stages = [stage for stage in STAGES if any(beside(line, first, stage) for line in lines)]
    name = first.runs[0].config.method
    yield from (
        f"| method | {' | '.join(f'{stage}: from {name} before' for stage in stages)} |",
        "|---" * (len(stages) + 1) + "|",
    )
    rows = []
    for line in lines:
        found = [beside(line, first, stage) for stage in stages]
        cells = [f"{100 * one[0]:+.2f} ± {100 * one[1]:.2f}" if one else "n/a" for one in found]
        if line is first:
            cells[0] = "–"
        ahead = found[0][0] if found[0] else 0.0
        rows.append((ahead, f"| {line.runs[0].config.method} | {' | '.join(cells)} |"))
    rows.sort(key=lambda row: -row[0])
    yield from (text for _, text in rows)
    samples = sum(size for _, size in tested.values())
    yield from (
        "",
        f"Differences of best tests in points, over all {samples:,} test samples and the seeds that both methods have. ±: 95 % "
        f"interval over the {len(tested)} clients; it does not cover other seeds or splits.",
        "",
    )
