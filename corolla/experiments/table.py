"""The table a sweep ends with: mean ± std over seeds, as text, CSV and Markdown."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from corolla.experiments.grouping import by_settings, mean_std, settings
from corolla.experiments.runs import Run
from corolla.experiments.sweep import Point, identity
from fl_app import tasks
from fl_app.keys import Scalar
from fl_app.keys import show as written
from fl_app.tasks import ACCURACY, Metric

CAPTION = (
    "{} mean ± standard deviation over the seeds; n: finished runs. final: all clients after the last round; "
    "pooled: over all samples; best: best round of the mean over its clients, before they train, so it can be below final"
)
COSTS = ("upload-bytes", "download-bytes", "seconds")


@dataclass(frozen=True)
class Row:
    """One line of the table: the runs that differ in nothing but the seed. means: by name in a summary (mean, std or None);
    metrics: those of them that are the task's.
    """

    varying: Mapping[str, Scalar]
    runs: int
    means: Mapping[str, tuple[float, float | None]]
    metrics: Mapping[str, Metric] = dataclasses.field(default_factory=dict)


def tabulate(points: Sequence[Point], finished: Mapping[str, Run]) -> list[Row]:
    """Average the finished runs over seeds; std is the sample standard deviation (n - 1), None for one run."""
    rows = []
    for same in by_settings(points, lambda point: settings(point.parsed.resolved)):
        runs = [run for point in same if (run := finished.get(identity(point.parsed))) is not None]
        varying = {key: value for key, value in same[0].varying.items() if key != "seed"}
        means, metrics = {}, figures(tasks.of(same[0].parsed).headline, same[0].parsed.holdout_clients > 0)
        for name in (*metrics, *COSTS):
            values = [run.summary[name] for run in runs if run.summary.get(name) is not None]
            if values:
                means[name] = mean_std(values)
        rows.append(Row(varying, len(runs), means, metrics))
    return rows


def figures(headline: Metric, unseen: bool = False) -> dict[str, Metric]:
    """Names of what a summary tells of a headline metric. unseen: some clients never trained."""
    name = headline.name
    apart = (f"unseen-{name}", f"unseen-{name}-finetuned") if unseen else ()
    return dict.fromkeys(
        (f"final-{name}", f"final-{name}-pooled", f"final-{name}-finetuned", f"best-{name}", *apart), headline
    )


def show(pair: tuple[float, float | None] | None, metric: Metric = ACCURACY) -> str:
    """Format mean and std of a metric, of a ratio in per cent."""
    if pair is None:
        return "n/a"
    mean, std = pair
    return metric.text(mean) + (f" ± {metric.text(std)}" if std is not None else "")


def caption(rows: Sequence[Row]) -> str:
    """Say what a table's figures are."""
    known = dict.fromkeys(metric for row in rows for metric in row.metrics.values())
    names = [f"{'accuracies' if m == ACCURACY else m.name}{' in per cent' if m.ratio else ''}," for m in known]
    return CAPTION.format(" ".join(names))


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Return the table as text, header first: what varies, n, metrics, ratios in per cent."""
    keys = list(dict.fromkeys(key for row in rows for key in row.varying))
    known = {name: metric for row in rows for name, metric in row.metrics.items()}
    metrics = {name: metric for name, metric in known.items() if any(name in row.means for row in rows)}
    header = [*keys, "n", *metrics]
    body = [
        [
            *(written(r.varying.get(k, "–")) for k in keys),
            str(r.runs),
            *(show(r.means.get(m), of) for m, of in metrics.items()),
        ]
        for r in rows
    ]
    return [header, *body]


def write_results(directory: Path, rows: Sequence[Row], title: str, remarks: Sequence[str]) -> None:
    """Write results.csv (ratios, full precision) and results.md (per cent) into a sweep's directory."""
    keys = list(dict.fromkeys(key for row in rows for key in row.varying))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    known = list(dict.fromkeys(name for row in rows for name in row.metrics))
    writer.writerow([*keys, "n", *(f"{m}-{s}" for m in known for s in ("mean", "std")), *COSTS])
    for row in rows:
        numbers = [value for m in known for value in row.means.get(m, (None, None))]
        costs = [row.means.get(m, (None,))[0] for m in COSTS]
        writer.writerow([*(row.varying.get(k) for k in keys), row.runs, *numbers, *costs])
    header, *body = table(rows)
    lines = [f"# {title}", "", *(f"{remark}\n" for remark in remarks)]
    lines += [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *body)]
    lines += ["", f"{caption(rows).partition(' final:')[0].replace('standard', 'sample standard')}", ""]
    for name, content in (("results.csv", text.getvalue()), ("results.md", "\n".join(lines))):
        (directory / name).write_text(content, encoding="utf-8")


def size(nbytes: float) -> str:
    """Format bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            break
        nbytes /= 1000
    return f"{nbytes:.3g} {unit}"


def cell(metric: Metric, value: float | None) -> str:
    """Format a headline metric with its unit."""
    if value is None:
        return "n/a"
    return f"{metric.text(value)} %" if metric.ratio else metric.text(value)


def single_runs(runs: Sequence[Run]) -> list[list[str]]:
    """Return finished runs as text, a row each, header first: headline metric, bytes, seconds."""
    lines = [["method", "final", "pooled", "best", "upload", "download", "seconds"]]
    for run in runs:
        s, metric = run.summary, run.headline
        keys = (f"final-{metric.name}", f"final-{metric.name}-pooled", f"best-{metric.name}")
        traffic = (size(s["upload-bytes"]), size(s["download-bytes"]))
        lines.append([s["method"], *(cell(metric, s[key]) for key in keys), *traffic, f"{s['seconds']:.1f}"])
    return lines
