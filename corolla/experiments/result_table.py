"""Tables of results: one row per group of runs that differ only in the seed, as text, CSV and Markdown.

`corolla sweep`, `corolla compare`, `corolla.compare`, the end of `corolla run` and the report build their tables from
these rows.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from corolla.experiments.grouping import by_settings, mean_std, settings
from corolla.experiments.runs import RecordedRun, part_of_clients
from corolla.experiments.sweep import Point, identity
from fl_app import tasks
from fl_app.errors import listed, size
from fl_app.files import publish_text
from fl_app.keys import Scalar
from fl_app.keys import show as written
from fl_app.metrics import Metric, Record
from fl_app.tasks import ACCURACY

FIGURES: Mapping[str, str] = {
    "final": "final-{}",
    "validation": "final-validation-{}",
    "pooled": "final-{}-pooled",
    "fine-tuned": "final-{}-finetuned",
    "global": "final-{}-global",
    "global, pooled": "final-{}-global-pooled",
    "best": "best-{}",
    "best, pooled": "best-{}-pooled",
    "unseen": "unseen-{}",
    "unseen, fine-tuned": "unseen-{}-finetuned",
}
"""Figures of the headline metric: heading -> name in summary.json, where {} is the metric's name."""
COSTS: Mapping[str, str] = {"upload": "upload-bytes", "download": "download-bytes", "seconds": "seconds"}
# headings in every table of several rows
IN_TEXT = ("final", "validation", "pooled", "fine-tuned", "global", "global, pooled", "best")
# headings for metrics other than the headline
OF_OTHERS = ("final", "validation", "fine-tuned", "global")
# headings for which runs have a figure only with the key `evaluate-global`
OF_GLOBAL = ("global", "global, pooled")
# additional headings if some clients never train
UNSEEN = ("unseen", "unseen, fine-tuned")
CAPTION = """\
{} mean ± standard deviation over the seeds; n: finished runs
final: all clients after the last round{}
best: best mean over a round's clients, before they train, so it can be below final, {}"""
BY_TEST, BY_VALIDATION = "chosen on test data", "chosen by validation data"

# mean over runs, and sample standard deviation (None for one run)
Mean = tuple[float, float | None]


def summary_name(heading: str, headline: Metric) -> str:
    """Return the name in summary.json of a cost, or of a figure of the headline metric."""
    return COSTS[heading] if heading in COSTS else FIGURES[heading].format(headline.name)


@dataclass(frozen=True)
class Row:
    """Runs that differ only in the seed.

    varying: keys that differ between rows. means: by heading, as far as they exist. headings: those of the headline
    metric that apply to the runs. others: metrics other than the headline. of_others: their means, by name in
    summary.json.
    """

    varying: Mapping[str, Scalar | None]
    runs: Sequence[RecordedRun]
    headline: Metric
    means: Mapping[str, Mean]
    headings: Sequence[str] = (*IN_TEXT, *UNSEEN)
    others: Sequence[Metric] = ()
    of_others: Mapping[str, Mean] = field(default_factory=dict)

    @property
    def coverage_note(self) -> str:
        """`4 of 6 clients` for the run with the smallest share of clients in its final figures; empty if none is missing."""
        return self.covered_note(self.headline)

    def covered(self, metric: Metric) -> tuple[int, int]:
        """Return (clients in a metric's final figure, clients expected there) of the run with the smallest share."""
        return min((run.covered(metric) for run in self.runs), key=lambda of: of[0] / max(of[1], 1), default=(0, 0))

    def covered_note(self, metric: Metric) -> str:
        """Return `5 of 6 clients` if clients are missing from a metric's final figure, else ""."""
        return part_of_clients(*self.covered(metric))

    @property
    def by_name(self) -> dict[str, Mean]:
        """Means by their names in summary.json."""
        own = {summary_name(heading, self.headline): mean for heading, mean in self.means.items()}
        return {**own, **self.of_others}

    @property
    def names(self) -> dict[str, Metric]:
        """Metric of each figure that applies to the runs, by name in summary.json, the headline's figures first."""
        found = {summary_name(heading, self.headline): self.headline for heading in self.headings}
        headings = [heading for heading in OF_OTHERS if heading in self.headings or heading not in OF_GLOBAL]
        return found | {summary_name(heading, metric): metric for metric in self.others for heading in headings}


def row_of(
    varying: Mapping[str, Scalar | None],
    runs: Sequence[RecordedRun],
    measured: Sequence[Metric],
    headings: Sequence[str] = (*IN_TEXT, *UNSEEN),
    figures: Callable[[RecordedRun], Record] = lambda run: run.summary,
) -> Row:
    """Return a row with the mean of every figure that all runs have.

    measured: the runs' metrics, the headline first. figures: returns a run's figures, with the names of summary.json.
    """
    headline, *others = measured
    every = [figures(run) for run in runs]

    def mean(name: str) -> Mean | None:
        values = [value for found in every if (value := found.get(name)) is not None]
        return mean_std(values) if values and len(values) == len(runs) else None

    own = {heading: mean(summary_name(heading, headline)) for heading in (*FIGURES, *COSTS)}
    means = {heading: found for heading, found in own.items() if found is not None}
    names = [summary_name(heading, metric) for metric in others for heading in OF_OTHERS]
    of_others = {name: found for name in names if (found := mean(name)) is not None}
    return Row(varying, runs, headline, means, headings, others, of_others)


def sweep_rows(points: Sequence[Point], finished: Mapping[str, RecordedRun]) -> list[Row]:
    """Return a sweep's rows. finished: its finished runs, by identity."""
    rows = []
    for same in by_settings(points, lambda point: settings(point.parsed.resolved)):
        runs = [run for point in same if (run := finished.get(identity(point.parsed))) is not None]
        varying = {key: value for key, value in same[0].varying.items() if key != "seed"}
        config = same[0].parsed
        headings: tuple[str, ...] = (*IN_TEXT, *UNSEEN) if config.holdout_clients > 0 else IN_TEXT
        if not config.validation_ratio:
            headings = tuple(heading for heading in headings if heading != "validation")
        if not config.evaluate_global:
            headings = tuple(heading for heading in headings if heading not in OF_GLOBAL)
        rows.append(row_of(varying, runs, tasks.measured(config), headings))
    return rows


def columns(rows: Iterable[Row], every: bool = False) -> dict[str, Metric]:
    """Return a table's columns by name in summary.json: figures that any row has, or all figures with `every`."""
    several = list(rows)
    named = {name: metric for row in several for name, metric in row.names.items()}
    if every:
        return named
    known = {name for row in several for name in row.by_name}
    return {name: metric for name, metric in named.items() if name in known}


# As text --------------------------------------------------------------------------------------------------------------


def show(mean: Mean | None, metric: Metric = ACCURACY) -> str:
    """Format a metric's mean and std; ratios are in per cent."""
    if mean is None:
        return "n/a"
    value, std = mean
    return metric.text(value) + (f" ± {metric.text(std)}" if std is not None else "")


def setting(value: Scalar | None) -> str:
    """Return a setting as text for a table or a sentence; a dash if it does not apply to the run."""
    return "–" if value is None else written(value)


def caption(rows: Sequence[Row]) -> str:
    """Return a caption that explains the table's figures."""
    names = []
    for metric in dict.fromkeys(row.headline for row in rows):
        name = "accuracies" if metric == ACCURACY else metric.name
        unit = " in per cent" if metric.ratio else ""
        names.append(f"{name}{unit},")
    pooled = "; pooled: over all samples" if any("pooled" in row.means for row in rows) else ""
    told = CAPTION.format(" ".join(names), pooled, chosen([run for row in rows for run in row.runs]))
    if any("global" in row.means for row in rows):
        told += "; global: the global model in place of the clients' personal ones"
    if any("unseen" in row.means for row in rows):
        told += "\nunseen: clients that never train; the other figures leave them out"
    return told


def chosen(runs: Iterable[RecordedRun]) -> str:
    """Return which data chose the best rounds of runs, as text."""
    several = list(runs)
    kinds = {run.is_validated for run in several}
    told = BY_VALIDATION if kinds == {True} else BY_TEST
    if len(kinds) > 1:
        told = f"{BY_VALIDATION} where a run has some, else {BY_TEST}"
    if any(run.stops_on_test_data for run in several):
        told += "; stop-when watched test data, so final figures are chosen on test data, too"
    return told


def undefined_notes(runs: Iterable[RecordedRun]) -> list[str]:
    """Return notes on metrics that some clients' data do not define. A note that not all runs share names its run folders."""
    several = list(runs)
    notes: dict[str, list[str]] = {}
    for run in several:
        for note in run.undefined_notes:
            notes.setdefault(note, []).append(run.path.name)
    return [note if len(names) == len(several) else f"{note}, in {listed(names)}" for note, names in notes.items()]


def text_table(rows: Sequence[Row]) -> list[list[str]]:
    """Return rows as text, header first: keys that vary, n, the figures of all metrics; ratios in per cent."""
    keys, shown = list(dict.fromkeys(key for row in rows for key in row.varying)), columns(rows)
    lines = [[*keys, "n", *shown]]
    for row in rows:
        means = row.by_name
        varying = [setting(row.varying.get(key)) for key in keys]
        cells = []
        for name, metric in shown.items():
            note = row.covered_note(metric) if name.startswith("final-") and name in means else ""
            cells.append(show(means.get(name), metric) + (f" ({note})" if note else ""))
        lines.append([*varying, str(len(row.runs)), *cells])
    return lines


def cell(metric: Metric, value: float | None, note: str = "") -> str:
    """Format a metric's value with its unit, and a note in brackets."""
    if value is None:
        return "n/a"
    text = f"{metric.text(value)} %" if metric.ratio else metric.text(value)
    return f"{text} ({note})" if note else text


def single_runs(runs: Sequence[RecordedRun]) -> list[list[str]]:
    """Return finished runs as text, one row each, header first: the headline metric, other metrics, bytes, seconds."""
    headings = ["final", *(["pooled"] if is_pooled(runs) else []), "best"]
    if any(run.is_validated for run in runs):
        headings.insert(1, "validation")
    if any(run.summary.get(summary_name("global", run.headline)) is not None for run in runs):
        headings.insert(-1, "global")
    others = list(dict.fromkeys(metric for run in runs for metric in run.others))
    lines = [["method", *headings, *(metric.name for metric in others), *COSTS]]
    for run in runs:
        found, metric = run.summary, run.headline
        note = run.covered_note(metric)
        figures = [
            cell(metric, found.get(summary_name(heading, metric)), note if heading in ("final", "pooled") else "")
            for heading in headings
        ]
        more = [cell(other, found.get(f"final-{other.name}"), run.covered_note(other)) for other in others]
        traffic = [size(found[COSTS[heading]]) for heading in ("upload", "download")]
        lines.append([found["method"], *figures, *more, *traffic, f"{found['seconds']:.1f}"])
    return lines


# As files -------------------------------------------------------------------------------------------------------------


def is_pooled(runs: Iterable[RecordedRun]) -> bool:
    """Return whether any run has its headline pooled over all samples. AUC, F1 and similar metrics are never pooled."""
    return any(run.summary.get(summary_name("pooled", run.headline)) is not None for run in runs)


def write_results(directory: Path, rows: Sequence[Row], title: str, remarks: Sequence[str]) -> None:
    """Write results.csv (ratios, full precision) and results.md (per cent) into a sweep's directory."""
    keys, named = list(dict.fromkeys(key for row in rows for key in row.varying)), columns(rows, every=True)
    parts = [f"{name}-{part}" for name in named for part in ("mean", "std")]
    # counts of the run whose final figures cover the smallest share of its clients
    metrics = list(dict.fromkeys(metric for row in rows for metric in row.others))
    coverage = ["final-clients", "final-clients-expected", *(f"final-{metric.name}-clients" for metric in metrics)]
    table: list[list[object]] = [[*keys, "n", *parts, *COSTS.values(), *coverage]]
    for row in rows:
        means = row.by_name
        numbers = [value for name in named for value in means.get(name, (None, None))]
        costs = [means.get(name, (None,))[0] for name in COSTS.values()]
        least: list[int | None] = [*row.covered(row.headline)] if row.runs else [None, None]
        least += [row.covered(metric)[0] if row.runs and metric in row.others else None for metric in metrics]
        table.append([*(row.varying.get(key) for key in keys), len(row.runs), *numbers, *costs, *least])
    header, *body = text_table(rows)
    lines = [f"# {title}", "", *(f"{remark}\n" for remark in remarks)]
    lines += [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *body)]
    notes = [line for note in undefined_notes(run for row in rows for run in row.runs) for line in ("", note)]
    lines += [*notes, "", f"{caption(rows).splitlines()[0].replace('standard', 'sample standard')}.", ""]
    for name, content in (("results.csv", csv_text(table)), ("results.md", "\n".join(lines))):
        publish_text(directory / name, content)


# CSV ------------------------------------------------------------------------------------------------------------------


# with these a spreadsheet's formula begins
_FORMULA = ("=", "+", "-", "@", "\t")


def csv_text(lines: Iterable[Sequence[object]]) -> str:
    """Return lines of cells as CSV. A text that would be a formula gets an apostrophe before it: clients wrote some."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_csv_cell(value) for value in line] for line in lines)
    return text.getvalue()


def _csv_cell(value: object) -> object:
    if isinstance(value, str):
        # csv leaves it without quotes, and readers end a row there
        value = value.replace("\r", "")
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value
