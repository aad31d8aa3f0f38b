"""Tests whether one group of runs is better than another: paired differences over clients (`corolla compare`).

A pair is one client in two runs of the same seed, one run of each group. It holds the same samples in both if the runs'
keys about data are equal. Differences are first averaged over the seeds of each client: repetitions of one client are
not independent, so a client is one pair, however many seeds there are. Two statistics use these pairs: Student's 95 %
interval and Wilcoxon's signed-rank test.

A second interval is over the seeds' mean differences. It shows how much another seed would change, and is wide with few
seeds. A verdict needs both intervals on one side of 0, and at least SEEDS_NEEDED seeds. Equal differences give no
verdict: they carry no information about the spread of further ones.

With many comparisons some intervals exclude 0 by chance. So a table with several corrects them together (Holm 1979): p of
Wilcoxon's test, and the p of Student's tests that verdicts use. For one comparison nothing changes.

Groups with other data are compared with a group of their own data (`references`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from corolla.experiments.compare import data_settings, references, varying_as_text
from corolla.experiments.result_table import Row, setting, show
from corolla.experiments.runs import RecordedRun, that_train
from corolla.experiments.sweep import Point
from fl_app.errors import UserError, listed
from fl_app.metrics import Metric

LEVEL = 0.95
# largest number of seeds that a verdict names
MOST_SEEDS = 100
# fewest seeds for an interval over seeds: with two, Student's interval is a dozen deviations wide
SEEDS_NEEDED = 3
CAPTION = """\
difference: a client's final {metrics} minus the same client's in the first row of the same data, with the same seed
pairs: clients that both rows have, each averaged over its seeds
over clients: Student's 95 % interval of the clients' averages
Wilcoxon: two-sided p of the signed-rank test of these averages; five pairs give at least 0.062, six 0.031
{holm}over seeds: Student's 95 % interval of the seeds' means
better, worse: both intervals on one side of 0{also}, with three or more seeds{n}"""
SEEDS_TOLD = "\nn: number of seeds that would decide, if further seeds differed like these"
# of a table with several comparisons
HOLM = {
    "holm": "Holm: the same p, corrected for all comparisons of the table\n",
    "also": ", also after Holm's correction of their p",
}
BY_CLIENT = "difference of each client, averaged over its seeds"
# most clients listed on a terminal
MOST_LISTED = 40

# verdicts for rows without a comparison
FIRST, NOTHING_SHARED = "(first)", "other data, clients or seeds"
NOT_THE_SAME = "not the same samples"
# a verdict as the other group has it
OPPOSITE = {"better": "worse", "worse": "better"}

Differences = NDArray[np.float64]
Interval = tuple[float, float]
# decimal digits to which two differences of ratios count as equal
ROUNDING_DIGITS = 12
ROUNDING = 10.0**-ROUNDING_DIGITS


@dataclass(frozen=True)
class Comparison:
    """Paired differences of two groups over clients, and the intervals of their mean; None with too few pairs or seeds.

    metric: the compared metric. by_client: each client's difference, averaged over the seeds for which both groups have
    it. wilcoxon: p of the signed-rank test over clients. seeds_needed: number of seeds at which the interval over seeds
    would exclude 0 if further seeds differed like these; None if unknown or more than MOST_SEEDS. clients_p, seeds_p: p of
    Student's tests of which the intervals are made. In a table with several comparisons, these and holm, which is made of
    wilcoxon, are corrected for all of them.
    """

    metric: Metric
    by_client: Mapping[str, float]
    seeds: int
    over_clients: Interval | None
    over_seeds: Interval | None
    wilcoxon: float | None = None
    seeds_needed: int | None = None
    clients_p: float | None = None
    seeds_p: float | None = None
    holm: float | None = None

    @property
    def values(self) -> Differences:
        """The clients' differences, float64 [pairs]."""
        return np.array(list(self.by_client.values()), np.float64)

    @property
    def pairs(self) -> int:
        """Number of paired clients."""
        return len(self.by_client)

    @property
    def mean(self) -> float:
        """Mean difference over clients."""
        return float(self.values.mean())

    @property
    def share_better(self) -> float:
        """Share of clients that do better than in the other group, in [0, 1]."""
        return float(np.mean(self.values > 0 if self.metric.higher_is_better else self.values < 0))

    @property
    def verdict(self) -> str:
        """`better` or `worse` if both intervals are on one side of 0; else `undecided` or `not told apart`.

        `undecided` names the fewest seeds. `not told apart` names the number of seeds that would decide, if only seeds
        are missing.
        """
        if self.seeds < SEEDS_NEEDED:
            return f"undecided: needs {SEEDS_NEEDED} seeds"
        over_clients, over_seeds = _side(self.over_clients, self.clients_p), _side(self.over_seeds, self.seeds_p)
        if over_clients and over_clients == over_seeds:
            return "better" if (over_clients > 0) == self.metric.higher_is_better else "worse"
        more = f" (n = {self.seeds_needed})" if over_clients and self.seeds_needed else ""
        return f"not told apart{more}"


def _side(interval: Interval | None, p: float | None) -> int:
    """Return the side of 0 on which an interval lies, 1 or -1; 0 if it contains 0, if there is none, or by its corrected p."""
    if interval is None or (p is not None and p >= 1 - LEVEL):
        return 0
    low, high = interval
    return int(low > 0) - int(high < 0)


def signed_rank_p(values: Differences) -> float | None:
    """Return the two-sided p of Wilcoxon's signed-rank test of values [n], ignoring zeros; None if all are 0 or n < 2."""
    # rounding errors must not break ties
    rounded = values.round(ROUNDING_DIGITS)
    if len(values) < 2 or not rounded.any():
        return None
    from scipy.stats import wilcoxon

    return float(wilcoxon(rounded).pvalue)


def interval(values: Differences) -> Interval | None:
    """Return Student's confidence interval of the mean of values [n]; None for fewer than two."""
    if len(values) < 2:
        return None
    half = half_width(len(values)) * float(values.std(ddof=1))
    return float(values.mean()) - half, float(values.mean()) + half


def student_p(values: Differences) -> float | None:
    """Return the two-sided p of Student's test that the mean of values [n] is 0; None for fewer than two, and for equal ones."""
    from scipy.special import stdtr

    if len(values) < 2 or np.ptp(values) <= ROUNDING:
        return None
    t = abs(float(values.mean())) * math.sqrt(len(values)) / float(values.std(ddof=1))
    return 2 * float(stdtr(len(values) - 1, -t))


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Return p of several tests, each corrected by Holm's method for all that are not None."""
    order = sorted((p, k) for k, p in enumerate(ps) if p is not None)
    corrected, least = list(ps), 0.0
    for place, (p, k) in enumerate(order):
        least = max(least, min(1.0, (len(order) - place) * p))
        corrected[k] = least
    return corrected


def half_width(n: int, tests: int = 1) -> float:
    """Return half the width of Student's interval of a mean of n values, in units of their standard deviation.

    tests: the number of intervals that are to hold together.
    """
    from scipy.special import stdtrit

    return float(stdtrit(n - 1, 1 - (1 - LEVEL) / 2 / tests)) / math.sqrt(n)


def interval_of_unequal(values: Differences) -> Interval | None:
    """Return `interval`, but None for equal values: their interval has no width and would decide everything."""
    return interval(values) if np.ptp(values) > ROUNDING else None


def seeds_needed(means: Differences, tests: int = 1) -> int | None:
    """Return the number of seeds that would decide if further seeds differed like means [n]; None beyond MOST_SEEDS.

    tests: the number of comparisons in the table.
    """
    if interval_of_unequal(means) is None:
        return None
    deviations = abs(float(means.mean())) / float(means.std(ddof=1))
    return next((n for n in range(SEEDS_NEEDED, MOST_SEEDS + 1) if half_width(n, tests) < deviations), None)


def same_data(ours: RecordedRun, theirs: RecordedRun) -> bool:
    """Return whether clients of the same id hold the same samples in two runs with equal seeds."""
    if None in ours.hashes and None in theirs.hashes and ours.hashes[None] != theirs.hashes[None]:
        return False
    return data_settings(ours) == data_settings(theirs)


def other_samples(ours: Sequence[RecordedRun], theirs: Sequence[RecordedRun]) -> bool:
    """Return whether two groups of runs are known to have different samples."""
    pairs = [(run, other) for run in ours for other in theirs if run.seed == other.seed]
    return any(
        whose in other.hashes and run.hashes[whose] != other.hashes[whose]
        for run, other in pairs
        for whose in run.hashes
    )


def final(run: RecordedRun) -> dict[str, float]:
    """Return the headline metric of each client that trains, from the last evaluation of all clients."""
    name = run.headline.name
    _, last = run.last_evaluation or (0, {})
    return {i: float(row[name]) for i, row in that_train(last).items() if row.get(name) is not None}


def compared(groups: Sequence[Sequence[RecordedRun]]) -> list[Comparison | None]:
    """Compare each group of runs with its reference, and correct the comparisons together.

    None: a group that is its own reference, or that shares no client and seed with it.
    """
    of = references(groups)
    tests = sum(k != first for k, first in enumerate(of))
    found = [None if k == first else paired(groups[k], groups[first], tests) for k, first in enumerate(of)]
    known = [one for one in found if one is not None]
    corrected = [holm(ps) for ps in zip(*((one.clients_p, one.seeds_p, one.wilcoxon) for one in known), strict=True)]
    by_id = {
        id(one): replace(one, clients_p=clients, seeds_p=seeds, holm=ranks)
        for one, clients, seeds, ranks in zip(known, *corrected, strict=True)
    }
    return [one and by_id[id(one)] for one in found]


def paired(ours: Sequence[RecordedRun], theirs: Sequence[RecordedRun], tests: int = 1) -> Comparison | None:
    """Compare two groups of runs that differ only in the seed.

    Return None if they share no client and seed with the same data. tests: see `seeds_needed`.
    """
    other = {run.seed: run for run in theirs}
    by_client: dict[str, list[float]] = {}
    means: list[float] = []
    for seed, run in {run.seed: run for run in ours}.items():
        if seed not in other or not same_data(run, other[seed]) or run.headline != other[seed].headline:
            continue
        mine, its = final(run), final(other[seed])
        # clients whose own data are known to differ are no pairs
        hashes = other[seed].hashes
        moved = {str(i) for i, own in run.hashes.items() if hashes.get(i, own) != own}
        found = {i: mine[i] - its[i] for i in mine if i in its and i not in moved}
        for i, difference in found.items():
            by_client.setdefault(i, []).append(difference)
        if found:
            means.append(float(np.mean(list(found.values()))))
    if not means:
        return None
    averaged = {i: float(np.mean(by_client[i])) for i in sorted(by_client, key=int)}
    values, of_seeds = np.array(list(averaged.values())), np.array(means)
    over_seeds = interval_of_unequal(of_seeds) if len(means) >= SEEDS_NEEDED else None
    return Comparison(
        ours[0].headline,
        averaged,
        len(means),
        interval_of_unequal(values),
        over_seeds,
        signed_rank_p(values),
        seeds_needed(of_seeds, tests) if over_seeds else None,
        student_p(values),
        student_p(of_seeds),
    )


def differences_table(
    groups: Sequence[Sequence[RecordedRun]], named: Sequence[Sequence[str]] | None = None
) -> list[list[str]]:
    """Return the comparison of each group with its reference, header first; empty if there is nothing to compare.

    named: names of the groups, header first; None: as `varying_as_text` names them.
    """
    names, *rows = named or varying_as_text(groups)
    found, of = compared(groups), references(groups)
    if not any(found) and not any(other_samples(runs, groups[0]) for runs in groups[1:]):
        return []
    several = sum(one is not None for one in found) > 1
    header = [
        *names,
        "pairs",
        "seeds",
        "difference",
        "over clients",
        "Wilcoxon",
        *["Holm"] * several,
        "over seeds",
        "clients better",
        "verdict",
    ]
    lines = [header]
    for k, (row, one) in enumerate(zip(rows, found, strict=True)):
        if one is None:
            counts = ["–", "–"] if is_first(k, of) else ["0", "0"]
            lines.append([*row, *counts, *["–"] * (5 + several), verdict_without(k, of, groups)])
            continue
        ps = ["–" if p is None else f"{p:.2g}" for p in (one.wilcoxon, one.holm)]
        intervals = [_show(one.over_clients, one.metric), *ps[: 1 + several], _show(one.over_seeds, one.metric)]
        cells = [_signed(one.mean, one.metric), *intervals, f"{100 * one.share_better:.0f} %"]
        lines.append([*row, str(one.pairs), str(one.seeds), *cells, one.verdict])
    return lines


def clients_table(
    groups: Sequence[Sequence[RecordedRun]], most: int = 0, named: Sequence[Sequence[str]] | None = None
) -> list[list[str]]:
    """Return each client's difference from its group's reference, header first; empty without pairs.

    most: number of clients shown; 0: all. named: see `differences_table`.
    """
    _, *rows = named or varying_as_text(groups)
    shown = [(", ".join(row), one) for row, one in zip(rows, compared(groups), strict=True) if one is not None]
    ids = sorted({i for _, one in shown for i in one.by_client}, key=int)
    if not ids:
        return []
    lines = [["client", *(label for label, _ in shown)]]
    names = client_names(groups)
    for i in ids[: most or None]:
        cells = [_signed(one.by_client[i], one.metric) if i in one.by_client else "–" for _, one in shown]
        lines.append([names.get(i, i), *cells])
    if most and len(ids) > most:
        lines.append([f"… {len(ids) - most} more", *["…"] * len(shown)])
    return lines


def tables(
    groups: Sequence[Sequence[RecordedRun]], most: int = 0, named: Sequence[Sequence[str]] | None = None
) -> list[tuple[list[list[str]], str]]:
    """Return both tables, each with its caption; none if no runs can be paired. most, named: as in `clients_table`."""
    found = []
    if differences := differences_table(groups, named):
        found.append((differences, caption(groups)))
    if by_client := clients_table(groups, most, named):
        found.append((by_client, BY_CLIENT))
    return found


def client_names(groups: Sequence[Sequence[RecordedRun]]) -> dict[str, str]:
    """Return the names of clients by id, for clients that have the same name in all runs."""
    everyone = [run for runs in groups for run in runs]
    first = {i: everyone[0].client_name(i) for i in everyone[0].clients}
    return {i: name for i, name in first.items() if name != i and all(run.client_name(i) == name for run in everyone)}


def is_first(k: int, of: Sequence[int]) -> bool:
    """Return whether group k is the reference of the first group, or of others. of: as `references` returns it."""
    return of[k] == k and (k == 0 or of.count(k) > 1)


def verdict_without(k: int, of: Sequence[int], groups: Sequence[Sequence[RecordedRun]]) -> str:
    """Return the verdict of group k, which is compared with no other."""
    return FIRST if is_first(k, of) else why_unpaired(groups[k], groups[0 if of[k] == k else of[k]])


def why_unpaired(ours: Sequence[RecordedRun], theirs: Sequence[RecordedRun]) -> str:
    """Return the reason why no client of one group of runs has a counterpart in another."""
    return NOT_THE_SAME if other_samples(ours, theirs) else NOTHING_SHARED


def why_no_table(groups: Sequence[Sequence[RecordedRun]]) -> str:
    """Return the reason why `differences_table` has nothing to compare."""
    if len(groups) < 2:
        return "there is only one row; add runs of another method or setting"
    return "no other row shares data, clients and seeds with the first one"


def caption(groups: Sequence[Sequence[RecordedRun]]) -> str:
    """Return the caption of the comparison, several lines: its metrics, if lower values are better, and its columns."""
    metrics = dict.fromkeys(run.headline for runs in groups for run in runs)
    notes = {
        m: (["in per cent"] if m.ratio else []) + ([] if m.higher_is_better else ["lower is better"]) for m in metrics
    }
    found = [one for one in compared(groups) if one is not None]
    holm = HOLM if len(found) > 1 else dict.fromkeys(HOLM, "")
    n = SEEDS_TOLD * any("(n = " in one.verdict for one in found)
    named = " or ".join(f"{m.name} ({', '.join(said)})" if said else m.name for m, said in notes.items())
    return CAPTION.format(metrics=named, n=n, **holm)


def _show(interval: Interval | None, metric: Metric) -> str:
    return "–" if interval is None else " .. ".join(_signed(end, metric) for end in interval)


def _signed(value: float, metric: Metric) -> str:
    return ("+" if value >= 0 else "") + metric.text(value)


# The best row of a sweep ----------------------------------------------------------------------------------------------


# heading of the figure, by kind of data
_FIGURES = {"validation": "validation", "test": "final"}
ON_TEST = "chosen on test data, so this figure is too good; set validation-ratio to choose on validation data"


def check_choice(points: Sequence[Point], by: str) -> None:
    """Raise UserError if a sweep should choose by validation data and some of its runs have none."""
    lacking = [point.name for point in points if not point.parsed.validation_ratio]
    if by == "validation" and lacking:
        raise UserError(
            key="--best-by validation", rule=f"needs validation-ratio above 0, which is 0 in {listed(lacking)}"
        )


def best_lines(rows: Sequence[Row], by: str = "") -> list[str]:
    """Return lines that name the best row of each method with several rows, and of all rows, by mean over seeds.

    Rows with other data have their own best: figures on easier data are higher. A line says if the best of all is better
    than the next row, over clients (`corolla compare`).
    by: `validation` or `test`; empty: validation data if all rows have that figure, else test data. Rows without the
    figure, or with another headline than the first row, are not compared.
    """
    known = [row for row in rows if row.runs and row.headline == rows[0].headline]
    by = by or ("validation" if all("validation" in row.means for row in known) else "test")
    measured = [row for row in known if _FIGURES[by] in row.means]
    of = references([row.runs for row in measured])
    parts = {first: [row for row, its in zip(measured, of, strict=True) if its == first] for first in dict.fromkeys(of)}
    lines = []
    for part in parts.values():
        lines += _best_of_part(part, by, f"{_data_of(part[0])}: " if len(parts) > 1 else "")
    return [*lines, ON_TEST] if lines and by == "test" else lines


def _best_of_part(rows: Sequence[Row], by: str, start: str) -> list[str]:
    """Return the lines of rows with the same data, each with this start; none for a single row."""
    if len(rows) < 2:
        return []
    methods: dict[str, list[Row]] = {}
    for row in rows:
        methods.setdefault(row.runs[0].method, []).append(row)
    several = {method: own for method, own in methods.items() if len(own) > 1}
    lines = [_line(f"best of {method}", own, by) for method, own in several.items() if len(methods) > 1]
    lines += [_line("best of all", rows, by), *_verdicts(rows, by)]
    return [start + line for line in lines]


def _data_of(row: Row) -> str:
    """Return the settings of a row's data in which rows differ."""
    keys = data_settings(row.runs[0])
    return ", ".join(f"{key} {setting(value)}" for key, value in row.varying.items() if key in keys) or "other data"


def _ranked(rows: Sequence[Row], by: str) -> list[Row]:
    """Return rows by the figure that chooses them, the best first."""
    return sorted(rows, key=lambda row: row.means[_FIGURES[by]][0], reverse=rows[0].headline.higher_is_better)


def _verdicts(rows: Sequence[Row], by: str) -> list[str]:
    """Return the paired comparisons of the best row with the next one and with the first one of the table.

    They are corrected as if the best row had been compared with all others, because it was chosen among them.
    """
    best, after, *rest = _ranked(rows, by)
    others = {"next": after} if rows[0] in (best, after) else {"next": after, "first": rows[0]}
    ranked = [best, after, *rest]
    against = dict(zip(map(id, ranked), compared([row.runs for row in ranked]), strict=True))
    lines = []
    for place, other in others.items():
        found = against[id(other)]
        verdict = OPPOSITE.get(found.verdict, found.verdict) if found else why_unpaired(best.runs, other.runs)
        lines.append(f"compared with the {place} row, {_named(other)}: {verdict}")
    return lines


def _named(row: Row) -> str:
    named = ", ".join(f"{key} {setting(value)}" for key, value in row.varying.items() if value is not None)
    return named or row.runs[0].path.name


def _line(what: str, rows: Sequence[Row], by: str) -> str:
    headline, best = rows[0].headline, _ranked(rows, by)[0]
    told = f"{what} by {by} {headline.title}: {_named(best)} ({show(best.means[_FIGURES[by]], headline)}"
    return told + (f"; on test data {show(best.means.get('final'), headline)})" if by == "validation" else ")")
