"""What it takes to reach an accuracy, or what else rounds are judged by: rounds, bytes and seconds (`corolla compare --to`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from corolla.experiments.compare import varying_as_text
from corolla.experiments.grouping import mean_std
from corolla.experiments.runs import RecordedRun
from fl_app.errors import UserError

CAPTION = (
    "rounds: the first whose clients reach it on average before they train, or after which all clients do; MB (up and down) and "
    "seconds: until then; mean ± standard deviation over the runs that reached it"
)


@dataclass(frozen=True)
class Reached:
    """When a run first was as good as asked: round, bytes exchanged and seconds until then."""

    round: int
    nbytes: float
    seconds: float


def reached(run: RecordedRun, target: float) -> Reached | None:
    """Return when a run's headline metric, its clients' mean, first was `target` or better; None if it never was.

    target: as recorded, an accuracy in [0, 1]. Before training, clients have what the round before left: the round's downloads
    count, its uploads and seconds do not. An evaluation of all clients comes after its round.
    """
    metric = run.headline

    def is_reached(value: float | None) -> bool:
        return value is not None and (value >= target if metric.higher_is_better else value <= target)

    nbytes = seconds = 0.0
    for t, record in run.rounds.items():
        nbytes += record.get("download-bytes") or 0
        if is_reached(record.get(f"{metric.name}-before")):
            return Reached(t, nbytes, seconds)
        nbytes += record.get("upload-bytes") or 0
        seconds += record.get("seconds", {}).get("round") or 0.0
        if is_reached(record.get("evaluation", {}).get(metric.name)):
            return Reached(t, nbytes, seconds)
    return None


def costs_table(groups: Sequence[Sequence[RecordedRun]], target: float) -> list[list[str]]:
    """Return, header first, what each group of runs that differ in the seed alone needs to be as good as `target`.

    Raises UserError for a target that the runs' headline metric cannot be.
    """
    metrics = dict.fromkeys(run.headline for runs in groups for run in runs)
    for metric in metrics:
        if not metric.range[0] <= target <= metric.range[1]:
            low, high = metric.range
            raise UserError(f"--to: {metric.name} is in [{low:g}, {high:g}], got {target:g}")
    names, *rows = varying_as_text(groups)
    bounds = [f"{m.name} {'≥' if m.higher_is_better else '≤'} {target:g}" for m in metrics]
    lines = [[*names, f"reached {', '.join(bounds)}", "rounds", "MB", "seconds"]]
    for row, runs in zip(rows, groups, strict=True):
        found = [at for run in runs if (at := reached(run, target)) is not None]
        cells = [
            _show([at.round for at in found]),
            _show([at.nbytes / 1e6 for at in found]),
            _show([at.seconds for at in found]),
        ]
        lines.append([*row, f"{len(found)} of {len(runs)}", *cells])
    return lines


def _show(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean, std = mean_std(values)
    return f"{mean:.4g}" + ("" if std is None else f" ± {std:.2g}")
