"""Table of all our figures beside the published one, to find the one that a paper prints (`corolla compare --paper`).

A paper's "accuracy" may be that of the last or of the best test. It may be the mean over clients or over all test
samples, before or after clients fine-tune, or of the global model. Tests are evaluations of all clients
(`evaluate-every`). Figures after training exist only for the clients of a round, so they are means over the last rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from corolla.experiments.compare import LAST_ROUNDS, PaperLine
from corolla.experiments.grouping import mean_std
from corolla.experiments.result_table import show
from corolla.experiments.runs import RecordedRun

# mean and standard deviation over seeds, as ratios
Figure = tuple[float, float | None]

MEANINGS = {"": "mean over clients", "-pooled": "over all test samples"}
STAGES = {"": "before", "-finetuned": "fine-tuned", "-global": "global"}
CAPTION = (
    "tests: evaluations of all clients, before and after a client fine-tunes, and of the global model; last / best of a run's "
    "tests. mean: over clients; "
    f"pooled: over all test samples. trained: a round's clients after training, last {LAST_ROUNDS} rounds. distance: median of "
    "the absolute differences from the published figures, without rows that the paper's authors ran with another method"
)


def figures(run: RecordedRun) -> dict[str, float]:
    """Return a run's figures by name, for example `before, mean, last`. Missing figures are left out."""
    rounds, metric = run.rounds, run.headline
    found: dict[str, float] = {}
    for stage, when in STAGES.items():
        for end in MEANINGS:
            name = f"{metric.name}{stage}{end}"
            tests = run.evaluations.values()
            values = [float(test[name]) for test in tests if test.get(name) is not None]
            if values and len(values) == len(tests):
                how = f"{when}, {end.removeprefix('-') or 'mean'}"
                found |= {f"{how}, last": values[-1], f"{how}, best": metric.best(values)}
    for end in MEANINGS:
        after = [record.get(f"{metric.name}-after{end}") for record in list(rounds.values())[-LAST_ROUNDS:]]
        if known := [value for value in after if value is not None]:
            found[f"trained, {end.removeprefix('-') or 'mean'}"] = statistics.fmean(known)
    return found


def over_seeds(runs: Sequence[RecordedRun]) -> dict[str, Figure]:
    """Return mean and standard deviation over runs of every figure that all of them have."""
    every = [figures(run) for run in runs]
    return {name: mean_std([one[name] for one in every]) for name in every[0] if all(name in one for one in every)}


def distances(lines: Sequence[PaperLine], found: Sequence[Mapping[str, Figure]]) -> dict[str, float]:
    """Return the median over lines of each figure's distance from the published one, in per cent points.

    Only figures that all lines have are included. Presets with `ran`, the figures of another method than the row names,
    are left out: they would hide which figure a paper prints. Empty if fewer than two lines remain.
    """
    names = [name for name in found[0] if all(name in one for one in found)]
    # runs beside several presets, of tables that repeat a figure, count once
    own = {id(line.runs): (line, one) for line, one in zip(lines, found, strict=True) if not line.preset.ran}
    pairs = [(line.preset.published, one) for line, one in own.values()]
    away = {name: [abs(100 * one[name][0] - published.mean) for published, one in pairs if published] for name in names}
    return {name: statistics.median(values) for name, values in away.items() if len(values) > 1}


def figures_table(lines: Sequence[PaperLine]) -> list[list[str]]:
    """Return every figure of groups of runs beside the published one, header first, in per cent.

    A cell has the figures of the last and the best test: last / best. The last line has the distances, if there are
    any. Empty if no run has any figure.
    """
    found = [over_seeds(line.runs) for line in lines]
    names = list(dict.fromkeys(name for one in found for name in one))
    columns = list(dict.fromkeys(name.removesuffix(", last").removesuffix(", best") for name in names))
    if not columns:
        return []
    several = any(len(run.evaluations) > 1 for line in lines for run in line.runs)

    def cell(values: Mapping[str, str], column: str) -> str:
        if column in values or f"{column}, last" not in values:
            return values.get(column, "n/a")
        last, best = values[f"{column}, last"], values[f"{column}, best"]
        return f"{last} / {best}" if several else last

    out = [["preset", "published", *columns]]
    for line, one in zip(lines, found, strict=True):
        shown = {name: show(value) for name, value in one.items()}
        out.append([line.preset.name, str(line.preset.published), *(cell(shown, column) for column in columns)])
    if away := {name: f"{value:.2f}" for name, value in distances(lines, found).items()}:
        out.append(["distance", "", *(cell(away, column) for column in columns)])
    return out
