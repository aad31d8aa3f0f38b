"""The table a sweep ends with: mean ± std over seeds, as text, CSV and Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fl_app.experiments.grouping import by_settings, mean_std
from fl_app.experiments.runs import Run
from fl_app.experiments.sweep import Point, identity
from fl_app.keys import Scalar

CAPTION = (
    "accuracies in per cent, mean ± standard deviation over the seeds; n: finished runs. final: all clients after the last round; "
    "pooled: over all samples; best: highest round of the mean over its clients, before they train, so it can be below final"
)
ACCURACIES = ("final-accuracy", "final-accuracy-pooled", "final-accuracy-finetuned", "best-accuracy")
COSTS = ("upload-bytes", "download-bytes", "seconds")


@dataclass(frozen=True)
class Row:
    """One line of the table: the runs that differ in nothing but the seed. means: by metric (mean, std or None)."""

    varying: Mapping[str, Scalar]
    runs: int
    means: Mapping[str, tuple[float, float | None]]


def tabulate(points: Sequence[Point], finished: Mapping[str, Run]) -> list[Row]:
    """Average the finished runs over seeds; std is the sample standard deviation (n - 1), None for one run."""
    rows = []
    for same in by_settings(points, lambda point: point.varying):
        runs = [run for point in same if (run := finished.get(identity(point.parsed))) is not None]
        varying = {key: value for key, value in same[0].varying.items() if key != "seed"}
        means = {}
        for metric in (*ACCURACIES, *COSTS):
            values = [run.summary[metric] for run in runs if run.summary.get(metric) is not None]
            if values:
                means[metric] = mean_std(values)
        rows.append(Row(varying, len(runs), means))
    return rows


def show(pair: tuple[float, float | None] | None) -> str:
    """Format mean and std of a ratio in per cent."""
    if pair is None:
        return "n/a"
    mean, std = pair
    return f"{100 * mean:.2f}" + (f" ± {100 * std:.2f}" if std is not None else "")


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Return the table as text, header first: what varies, n, accuracies in per cent."""
    keys = list(dict.fromkeys(key for row in rows for key in row.varying))
    metrics = [m for m in ACCURACIES if any(m in row.means for row in rows)]
    header = [*keys, "n", *metrics]
    body = [[str(r.varying.get(k, "–")) for k in keys] + [str(r.runs)] + [show(r.means.get(m)) for m in metrics] for r in rows]
    return [header, *body]


def write_results(directory: Path, rows: Sequence[Row], title: str, remarks: Sequence[str]) -> None:
    """Write results.csv (ratios, full precision) and results.md (per cent) into a sweep's directory."""
    keys = list(dict.fromkeys(key for row in rows for key in row.varying))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*keys, "n", *(f"{m}-{s}" for m in ACCURACIES for s in ("mean", "std")), *COSTS])
    for row in rows:
        numbers = [value for m in ACCURACIES for value in row.means.get(m, (None, None))]
        costs = [row.means.get(m, (None,))[0] for m in COSTS]
        writer.writerow([*(row.varying.get(k) for k in keys), row.runs, *numbers, *costs])
    header, *body = table(rows)
    lines = [f"# {title}", "", *(f"{remark}\n" for remark in remarks)]
    lines += [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *body)]
    lines += ["", "Accuracies in per cent, mean ± sample standard deviation over the seeds; n: finished runs.", ""]
    for name, content in (("results.csv", text.getvalue()), ("results.md", "\n".join(lines))):
        (directory / name).write_text(content, encoding="utf-8")
