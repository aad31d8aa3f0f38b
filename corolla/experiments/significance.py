"""Whether one group of runs is better than another: paired differences over clients and seeds (`corolla compare`).

A client of a run is compared with the client of the same id in the run of the same seed in the other group, which holds the same
samples where the runs' keys about data are equal. The intervals are Student's, at 95 %: over all pairs, as if clients' differences
were independent (clients of one run share what they learn from each other: too narrow where the seed matters), and over the seeds'
mean differences, which makes no such assumption and is wide with few seeds. A verdict needs both. Fewer than SEEDS_NEEDED
seeds decide nothing. Neither do equal differences, which say nothing of how far further ones may lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from corolla.experiments.compare import varying_as_text
from corolla.experiments.runs import RecordedRun, that_train
from fl_app.metrics import Metric, Record

LEVEL = 0.95
# more seeds than anybody runs: a verdict names no larger number
MOST_SEEDS = 100
# for an interval over seeds: with two, Student's is a dozen deviations wide
SEEDS_NEEDED = 3
CAPTION = (
    "difference: a client's final {} minus that of the same client with the same seed in the first row's runs, mean over all pairs "
    "with 95 % confidence intervals; better, worse: from three seeds on, both intervals are on one side of 0; n: seeds that would "
    "decide if further ones differed as these do"
)

# verdicts where there is nothing to compare
FIRST, NOTHING_SHARED = "(first)", "other data, clients or seeds"
NOT_THE_SAME = "not the same samples"

Differences = NDArray[np.float64]
Interval = tuple[float, float]
# of a difference of two ratios
ROUNDING = 1e-12


@dataclass(frozen=True)
class Comparison:
    """Paired differences of two groups: pairs, seeds, their mean, and its intervals; None where there are too few.

    metric: what is compared; share_better: of the pairs. seeds_needed: seeds after which the interval over seeds would leave out 0
    if further seeds differed as these do; None if that cannot be said, or if more than MOST_SEEDS.
    """

    metric: Metric
    pairs: int
    seeds: int
    mean: float
    over_pairs: Interval | None
    over_seeds: Interval | None
    share_better: float
    seeds_needed: int | None = None

    @property
    def verdict(self) -> str:
        """`better` or `worse` if both intervals say so; else how many seeds would do, as far as it can be said."""
        if self.seeds < SEEDS_NEEDED:
            return f"undecided: needs {SEEDS_NEEDED} seeds"
        if self.over_pairs is not None and self.over_seeds is not None:
            both = self.over_pairs, self.over_seeds
            if all(low > 0 for low, _ in both):
                return "better" if self.metric.higher_is_better else "worse"
            if all(high < 0 for _, high in both):
                return "worse" if self.metric.higher_is_better else "better"
        return "not told apart" + (f" (n = {self.seeds_needed})" if self.seeds_needed else "")


def interval(values: Differences) -> Interval | None:
    """Return Student's confidence interval of the mean of values [n]; None for fewer than two."""
    if len(values) < 2:
        return None
    half = half_width(len(values)) * float(values.std(ddof=1))
    return float(values.mean()) - half, float(values.mean()) + half


def half_width(n: int) -> float:
    """Return half of Student's interval of a mean of n values, in their standard deviations."""
    from scipy.special import stdtrit

    quantile = float(stdtrit(n - 1, 0.5 + LEVEL / 2))
    return quantile / math.sqrt(n)


def interval_of_unequal(values: Differences) -> Interval | None:
    """Return `interval`; None also for equal values, whose interval has no width and would decide everything."""
    return interval(values) if np.ptp(values) > ROUNDING else None


def seeds_needed(means: Differences) -> int | None:
    """Return how many seeds would have an interval without 0 if further ones differed as these, [n], do; None beyond MOST_SEEDS."""
    if interval_of_unequal(means) is None:
        return None
    deviations = abs(float(means.mean())) / float(means.std(ddof=1))
    return next((n for n in range(SEEDS_NEEDED, MOST_SEEDS + 1) if half_width(n) < deviations), None)


def same_data(ours: RecordedRun, theirs: RecordedRun) -> bool:
    """Tell whether clients of the same id hold the same samples, given the same seed."""
    if None in ours.hashes and None in theirs.hashes and ours.hashes[None] != theirs.hashes[None]:
        return False

    def data(run: RecordedRun) -> dict[str, object]:
        kinds = run.config.partition, run.config.dataset
        return {key.name: value for key, value in run.config.own_keys() if key.about == "data" and key.divides(*kinds)}

    return data(ours) == data(theirs)


def same_samples(ours: RecordedRun, theirs: RecordedRun, client_id: int) -> bool:
    """Tell whether a client that holds data of its own held the same in two runs, as far as it is recorded."""
    mine, its = ours.hashes.get(client_id), theirs.hashes.get(client_id)
    return mine is None or its is None or mine == its


def other_samples(ours: Sequence[RecordedRun], theirs: Sequence[RecordedRun]) -> bool:
    """Tell whether two groups of runs are known to be made of other samples."""
    pairs = [(run, other) for run in ours for other in theirs if run.config.seed == other.config.seed]
    return any(
        whose in other.hashes and run.hashes[whose] != other.hashes[whose]
        for run, other in pairs
        for whose in run.hashes
    )


def final(run: RecordedRun) -> dict[str, float]:
    """Return the headline metric of each client that trains in the last evaluation of all clients."""
    name = run.headline.name
    last: Record = next(reversed(run.evaluations.values()), {})
    return {i: float(row[name]) for i, row in that_train(last).items() if row.get(name) is not None}


def paired(ours: Sequence[RecordedRun], theirs: Sequence[RecordedRun]) -> Comparison | None:
    """Compare two groups of runs that differ in the seed alone; None if no client and seed is in both with the same data."""
    other = {run.config.seed: run for run in theirs}
    by_seed: list[Differences] = []
    for seed, run in {run.config.seed: run for run in ours}.items():
        if seed in other and same_data(run, other[seed]) and run.headline == other[seed].headline:
            mine, its = final(run), final(other[seed])
            same = [i for i in mine if i in its and same_samples(run, other[seed], int(i))]
            differences = np.array([mine[i] - its[i] for i in same], np.float64)
            by_seed += [differences] * bool(differences.size)
    if not by_seed:
        return None
    every = np.concatenate(by_seed)
    means = np.array([differences.mean() for differences in by_seed])
    over_seeds = interval_of_unequal(means) if len(means) >= SEEDS_NEEDED else None
    metric = ours[0].headline
    better = np.mean(every > 0 if metric.higher_is_better else every < 0)
    return Comparison(
        metric,
        len(every),
        len(by_seed),
        float(every.mean()),
        interval_of_unequal(every),
        over_seeds,
        float(better),
        seeds_needed(means) if over_seeds else None,
    )


def differences_table(groups: Sequence[Sequence[RecordedRun]]) -> list[list[str]]:
    """Return, header first, the comparison of each group with the first; empty if there is nothing to compare."""
    names, first, *rows = varying_as_text(groups)
    found = [paired(runs, groups[0]) for runs in groups[1:]]
    if not any(found) and not any(other_samples(runs, groups[0]) for runs in groups[1:]):
        return []
    header = [
        *names,
        "pairs",
        "seeds",
        "difference",
        "over clients and seeds",
        "over seeds",
        "clients better",
        "verdict",
    ]
    lines = [header, [*first, *["–"] * 6, FIRST]]
    for row, runs, one in zip(rows, groups[1:], found, strict=True):
        if one is None:
            lines.append([*row, "0", "0", *["–"] * 4, why_unpaired(runs, groups[0])])
            continue
        intervals = [_show(interval, one.metric) for interval in (one.over_pairs, one.over_seeds)]
        cells = [_signed(one.mean, one.metric), *intervals, f"{100 * one.share_better:.0f} %"]
        lines.append([*row, str(one.pairs), str(one.seeds), *cells, one.verdict])
    return lines


def why_unpaired(ours: Sequence[RecordedRun], theirs: Sequence[RecordedRun]) -> str:
    """Say why no client of one group of runs has a counterpart in another."""
    return NOT_THE_SAME if other_samples(ours, theirs) else NOTHING_SHARED


def caption(groups: Sequence[Sequence[RecordedRun]]) -> str:
    """Say what the comparison's figures are: of which metrics, and which values of them are good."""
    metrics = dict.fromkeys(run.headline for runs in groups for run in runs)
    notes = {
        m: (["in per cent"] if m.ratio else []) + ([] if m.higher_is_better else ["lower is better"]) for m in metrics
    }
    return CAPTION.format(" or ".join(f"{m.name} ({', '.join(said)})" if said else m.name for m, said in notes.items()))


def _show(interval: Interval | None, metric: Metric) -> str:
    return "–" if interval is None else " .. ".join(_signed(end, metric) for end in interval)


def _signed(value: float, metric: Metric) -> str:
    return ("+" if value >= 0 else "") + metric.text(value)
