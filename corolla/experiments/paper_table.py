"""The papers' columns beside our figures: method, print, ours, difference, and whether print is of the same method.

`corolla compare --paper` ends with these tables, and studies/results.md begins with them. A footnote gives the reason why a row
is not the run that the paper describes: another method under its name, fewer rounds or seeds, other settings, and the preset's
notes. What is true of all rows stands once below the table.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from corolla.experiments.compare import LAST_ROUNDS, METRICS, PaperLine
from corolla.experiments.grouping import mean_std
from corolla.experiments.result_table import setting, show
from corolla.experiments.runs import RecordedRun
from fl_app.errors import counted

HEADER = ("method", "print", "ours", "difference", "same method")
ROUNDS = "num-server-rounds"


@dataclass(frozen=True)
class PaperColumn:
    """One column of a paper's table, with its title: paper, table, column.

    table: as text, header first, in per cent. notes: what is true of all rows, then the footnotes that rows name: [1].
    """

    title: str
    table: list[list[str]]
    notes: list[str]


def is_same_method(line: PaperLine) -> bool:
    """Return whether the paper's authors ran the method that the row names."""
    return not line.preset.ran


def is_cut(line: PaperLine) -> bool:
    """Return whether our runs are shorter than the paper's, or cut by `--scale small`."""
    return line.runs[0].config.scale != "full" or any(
        key == ROUNDS and mine is not None and theirs is not None and float(mine) < float(theirs)
        for key, mine, theirs in line.differences
    )


def reasons(line: PaperLine) -> list[str]:
    """Return why a row cannot be print's: another method, a cut run, other numbers of rounds and seeds."""
    preset, config = line.preset, line.runs[0].config
    found = [f"the authors ran another method under this name: {preset.ran}"] if preset.ran else []
    if config.scale != "full":
        found.append("ours was cut by --scale small: not comparable with print")
    found += [f"{mine} rounds, in print {theirs}" for key, mine, theirs in line.differences if key == ROUNDS]
    if preset.repeats and preset.repeats != len(line.runs):
        in_print = "one run" if preset.repeats == 1 else f"the mean of {preset.repeats} runs"
        found.append(f"{counted(len(line.runs), 'seed')}, in print {in_print}")
    return found


def details(line: PaperLine) -> list[str]:
    """Return the figure that is ours, the settings that differ from the paper's, and the preset's notes.

    Settings and notes without a meaning in our runs are left out.
    """
    reading = METRICS[line.preset.metric]
    tests = sorted({str(len(run.evaluations)) for run in line.runs}) if reading.of_tests else []
    name = f"{line.preset.metric}, " * bool(line.preset.metric)
    found = [f"ours: {name}{reading.words}" + f"; tests: {', '.join(tests)}" * bool(tests)]
    for key, mine, theirs in line.differences:
        if mine is not None and key != ROUNDS:
            where = "the key has no effect in the paper's setting" if theirs is None else f"paper: {setting(theirs)}"
            found.append(f"{key} {setting(mine)} ({where})")
    notes = line.preset.notes_on(line.runs[0].config)
    return found + [note for note in notes if not line.preset.ran or not note.endswith(line.preset.ran)]


def in_full(line: PaperLine) -> list[str]:
    """Return all footnotes of a row."""
    return reasons(line) + details(line)


def columns(lines: Sequence[PaperLine], texts: Callable[[PaperLine], list[str]] = in_full) -> list[PaperColumn]:
    """Return lines as columns of the papers' tables, highest print first. texts: returns a row's footnotes."""
    found: dict[str, list[PaperLine]] = {}
    for line in lines:
        preset = line.preset
        found.setdefault(f"{preset.paper}, {preset.table}: {preset.label}", []).append(line)
    return [_column(title, own, texts) for title, own in found.items()]


def _column(title: str, lines: Sequence[PaperLine], texts: Callable[[PaperLine], list[str]]) -> PaperColumn:
    ordered = sorted(lines, key=lambda line: -_print(line))
    told = [texts(line) for line in ordered]
    shared = [text for text in told[0] if all(text in other for other in told)]
    footnotes = dict.fromkeys(text for own in told for text in own if text not in shared)
    marks = {text: k for k, text in enumerate(footnotes, 1)}
    table = [list(HEADER)]
    for line, own in zip(ordered, told, strict=True):
        mark = sorted(marks[text] for text in own if text in marks)
        same = ("yes" if is_same_method(line) else "no") + ", cut" * is_cut(line)
        gap = "n/a" if line.ours is None else f"{100 * line.ours[0] - _print(line):+.2f}"
        cells = [line.preset.row, str(line.preset.published), show(line.ours), gap]
        table.append([*cells, same + (f" [{', '.join(map(str, mark))}]" if mark else "")])
    return PaperColumn(
        title, table, [f"all rows: {text}" for text in shared] + [f"[{marks[text]}] {text}" for text in marks]
    )


def _print(line: PaperLine) -> float:
    assert line.preset.published is not None
    return line.preset.published.mean


def as_told(line: PaperLine) -> dict[str, object]:
    """Return a row as data: figures in per cent, each with its deviation; None where unknown. notes: as its footnotes."""
    published = line.preset.published
    assert published is not None
    return {
        "preset": line.preset.name,
        "paper": line.preset.paper,
        "table": line.preset.table,
        "column": line.preset.column,
        "method": line.runs[0].config.method,
        "scale": line.runs[0].config.scale,
        "n": len(line.runs),
        **_both("ours", line.ours),
        "published": published.mean,
        "published-std": published.std,
        "difference": 100 * line.ours[0] - published.mean if line.ours else None,
        **_both("ours, fine-tuned", line.finetuned),
        "same-method": is_same_method(line),
        "notes": in_full(line),
    }


def _both(name: str, found: tuple[float, float | None] | None) -> Mapping[str, object]:
    mean, std = found or (None, None)
    return {name: None if mean is None else 100 * mean, f"{name}-std": None if std is None else 100 * std}


# All our figures ------------------------------------------------------------------------------------------------------


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
