"""The table of results: what groups of runs that differ in the seed alone come to, as text, CSV and Markdown.

`corolla sweep`, `corolla compare`, `corolla.compare`, the end of `corolla run` and the report make their tables of these rows.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from corolla.experiments.grouping import by_settings, mean_std, settings
from corolla.experiments.runs import RecordedRun
from corolla.experiments.sweep import Point, identity
from fl_app import tasks
from fl_app.keys import Scalar
from fl_app.keys import show as written
from fl_app.metrics import Metric, Record
from fl_app.tasks import ACCURACY

FIGURES: Mapping[str, str] = {
    "final": "final-{}",
    "pooled": "final-{}-pooled",
    "fine-tuned": "final-{}-finetuned",
    "best": "best-{}",
    "best, pooled": "best-{}-pooled",
    "unseen": "unseen-{}",
    "unseen, fine-tuned": "unseen-{}-finetuned",
}
"""What there is of the headline metric: a short heading, and its name in summary.json, {} being the metric's."""
COSTS: Mapping[str, str] = {"upload": "upload-bytes", "download": "download-bytes", "seconds": "seconds"}
# Headings of every table of several rows.
IN_TEXT = ("final", "pooled", "fine-tuned", "best")
# Further headings where some clients never train.
UNSEEN = ("unseen", "unseen, fine-tuned")
CAPTION = (
    "{} mean ± standard deviation over the seeds; n: finished runs. final: all clients after the last round; "
    "pooled: over all samples; best: best round of the mean over its clients, before they train, so it can be below final"
)

# A mean over runs, and its sample standard deviation; None for one run.
Mean = tuple[float, float | None]


def summary_name(heading: str, headline: Metric) -> str:
    """Return what summary.json calls a figure of a headline metric, or a cost."""
    return COSTS[heading] if heading in COSTS else FIGURES[heading].format(headline.name)


@dataclass(frozen=True)
class Row:
    """Runs that differ in the seed alone. varying: what tells them from other rows; means: by heading, of those there are;
    headings: those of the headline metric that concern the runs.
    """

    varying: Mapping[str, Scalar | None]
    runs: Sequence[RecordedRun]
    headline: Metric
    means: Mapping[str, Mean]
    headings: Sequence[str] = (*IN_TEXT, *UNSEEN)

    @property
    def coverage_note(self) -> str:
        """`4 of 6 clients`, of the run whose final figures are of the smallest part of its clients; empty if all are of all."""
        lacking = [run for run in self.runs if run.coverage_note]
        return min(lacking, key=lambda run: run.coverage[0] / run.coverage[1]).coverage_note if lacking else ""

    @property
    def by_name(self) -> dict[str, Mean]:
        """The means by their names in summary.json."""
        return {summary_name(heading, self.headline): mean for heading, mean in self.means.items()}


def row_of(
    varying: Mapping[str, Scalar | None],
    runs: Sequence[RecordedRun],
    headline: Metric,
    headings: Sequence[str] = (*IN_TEXT, *UNSEEN),
    figures: Callable[[RecordedRun], Record] = lambda run: run.summary,
) -> Row:
    """Average what runs come to, the figures that all of them have.

    figures: what a run comes to, by the names of summary.json.
    """
    means = {}
    for heading in (*FIGURES, *COSTS):
        name = summary_name(heading, headline)
        values = [value for run in runs if (value := figures(run).get(name)) is not None]
        if values and len(values) == len(runs):
            means[heading] = mean_std(values)
    return Row(varying, runs, headline, means, headings)


def sweep_rows(points: Sequence[Point], finished: Mapping[str, RecordedRun]) -> list[Row]:
    """Return a sweep's rows: its finished runs by identity, put together."""
    rows = []
    for same in by_settings(points, lambda point: settings(point.parsed.resolved)):
        runs = [run for point in same if (run := finished.get(identity(point.parsed))) is not None]
        varying = {key: value for key, value in same[0].varying.items() if key != "seed"}
        config = same[0].parsed
        headings = (*IN_TEXT, *UNSEEN) if config.holdout_clients > 0 else IN_TEXT
        rows.append(row_of(varying, runs, tasks.of(config).headline, headings))
    return rows


def columns(rows: Iterable[Row], every: bool = False) -> dict[str, Metric]:
    """Return the figures that a table of several rows has, by their names in summary.json: those of any row, or every one."""
    several = list(rows)
    named = {summary_name(heading, row.headline): row.headline for row in several for heading in row.headings}
    if every:
        return named
    known = {name for row in several for name in row.by_name}
    return {name: metric for name, metric in named.items() if name in known}


# As text --------------------------------------------------------------------------------------------------------------


def show(mean: Mean | None, metric: Metric = ACCURACY) -> str:
    """Format mean and std of a metric, of a ratio in per cent."""
    if mean is None:
        return "n/a"
    value, std = mean
    return metric.text(value) + (f" ± {metric.text(std)}" if std is not None else "")


def setting(value: Scalar | None) -> str:
    """Return a setting as a table or a sentence has it; a dash for one that does not concern the run."""
    return "–" if value is None else written(value)


def caption(rows: Sequence[Row]) -> str:
    """Say what a table's figures are."""
    names = []
    for metric in dict.fromkeys(row.headline for row in rows):
        name = "accuracies" if metric == ACCURACY else metric.name
        unit = " in per cent" if metric.ratio else ""
        names.append(f"{name}{unit},")
    told = CAPTION.format(" ".join(names))
    if any("unseen" in row.means for row in rows):
        told += "; unseen: clients that never train, of whom no other figure is"
    return told


def text_table(rows: Sequence[Row]) -> list[list[str]]:
    """Return rows as text, header first: what varies, n, the headline metric's figures, ratios in per cent."""
    keys, shown = list(dict.fromkeys(key for row in rows for key in row.varying)), columns(rows)
    lines = [[*keys, "n", *shown]]
    for row in rows:
        means, note = row.by_name, row.coverage_note
        varying = [setting(row.varying.get(key)) for key in keys]
        cells = []
        for name, metric in shown.items():
            partial = note and name.startswith("final-") and name in means
            cells.append(show(means.get(name), metric) + (f" ({note})" if partial else ""))
        lines.append([*varying, str(len(row.runs)), *cells])
    return lines


def size(nbytes: float) -> str:
    """Format bytes in decimal units."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"


def cell(metric: Metric, value: float | None) -> str:
    """Format a headline metric with its unit."""
    if value is None:
        return "n/a"
    return f"{metric.text(value)} %" if metric.ratio else metric.text(value)


def single_runs(runs: Sequence[RecordedRun]) -> list[list[str]]:
    """Return finished runs as text, a row each, header first: headline metric, bytes, seconds."""
    headings = ("final", "pooled", "best")
    lines = [["method", *headings, *COSTS]]
    for run in runs:
        found, metric = run.summary, run.headline
        note = f" ({run.coverage_note})" if run.coverage_note else ""
        figures = [
            cell(metric, found[summary_name(heading, metric)]) + (note if heading in ("final", "pooled") else "")
            for heading in headings
        ]
        traffic = [size(found[COSTS[heading]]) for heading in ("upload", "download")]
        lines.append([found["method"], *figures, *traffic, f"{found['seconds']:.1f}"])
    return lines


# As files -------------------------------------------------------------------------------------------------------------


def write_results(directory: Path, rows: Sequence[Row], title: str, remarks: Sequence[str]) -> None:
    """Write results.csv (ratios, full precision) and results.md (per cent) into a sweep's directory."""
    keys, named = list(dict.fromkeys(key for row in rows for key in row.varying)), columns(rows, every=True)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    parts = [f"{name}-{part}" for name in named for part in ("mean", "std")]
    # of the run whose final figures are of the smallest part of its clients
    coverage = ["final-clients", "final-clients-expected"]
    writer.writerow([*keys, "n", *parts, *COSTS.values(), *coverage])
    for row in rows:
        means = row.by_name
        numbers = [value for name in named for value in means.get(name, (None, None))]
        costs = [means.get(name, (None,))[0] for name in COSTS.values()]
        least = min((run.coverage for run in row.runs), key=lambda of: of[0] / max(of[1], 1), default=(None, None))
        writer.writerow([*(row.varying.get(key) for key in keys), len(row.runs), *numbers, *costs, *least])
    header, *body = text_table(rows)
    lines = [f"# {title}", "", *(f"{remark}\n" for remark in remarks)]
    lines += [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *body)]
    lines += ["", f"{caption(rows).partition(' final:')[0].replace('standard', 'sample standard')}", ""]
    for name, content in (("results.csv", text.getvalue()), ("results.md", "\n".join(lines))):
        (directory / name).write_text(content, encoding="utf-8")
