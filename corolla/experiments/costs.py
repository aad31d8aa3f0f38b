"""What runs cost: seconds and bytes beside the final figure (`corolla compare --costs`), and until a target (`--to`)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from corolla.experiments.compare import result_rows, varying_as_text
from corolla.experiments.grouping import mean_std
from corolla.experiments.result_table import setting, show, summary_name
from corolla.experiments.runs import RecordedRun
from fl_app.errors import UserError, size
from fl_app.metrics import Metric
from fl_app.server import client_rows
from fl_app.server.record import VIRTUAL

SECONDS: Mapping[str, str] = {
    "seconds-per-round": "s/round",
    "seconds": "s in all",
    "client-train-seconds": "s/client train",
    "client-score-seconds": "s/client score",
}
"""Costs in seconds: name with `--json` -> heading."""
BYTES: Mapping[str, str] = {
    "upload-bytes-per-client": "up/client",
    "download-bytes-per-client": "down/client",
    "upload-bytes": "up in all",
    "download-bytes": "down in all",
}
"""Costs in bytes: name with `--json` -> heading."""
CAPTION = (
    "s/round: the median round on the server, without evaluations; s/client: one client and round, mean, to train and to make "
    "its upload (score); up, down: bytes of one client and round, mean, and of all; in all: seconds with, and bytes without "
    "evaluations; means over the seeds, seconds ± standard deviation"
)


def costs(run: RecordedRun) -> dict[str, float | None]:
    """Return what a run cost, by the names of SECONDS and BYTES; None where it is not recorded.

    Per client: mean over the entries of all clients and rounds. A private run, and a collected one, may record none.
    """
    records = [record for record in run.rounds.values() if record.get("seconds", {}).get("round") is not None]
    rounds = [record["seconds"]["round"] - (record["seconds"].get("evaluate") or 0.0) for record in records]
    return {
        "seconds-per-round": statistics.median(rounds) if rounds else None,
        "seconds": run.summary.get("seconds"),
        "client-train-seconds": _per_client(run, "seconds-train"),
        "client-score-seconds": _per_client(run, "seconds-score"),
        "upload-bytes-per-client": _per_client(run, "upload-bytes"),
        "download-bytes-per-client": _per_client(run, "download-bytes"),
        "upload-bytes": run.summary.get("upload-bytes"),
        "download-bytes": run.summary.get("download-bytes"),
    }


def _per_client(run: RecordedRun, name: str) -> float | None:
    """Return the mean of a number over the clients' entries of all rounds; None without any."""
    found = [client_rows.numbers(record.get("clients", {}), name) for record in run.rounds.values()]
    values = np.concatenate([*found, np.zeros(0)])
    mean = float(values[~np.isnan(values)].mean()) if np.isfinite(values).any() else math.nan
    return None if math.isnan(mean) else mean


def accuracy_and_costs_table(groups: Sequence[Sequence[RecordedRun]]) -> list[list[str]]:
    """Return the final figure and the costs per group of runs that differ only in the seed, header first."""
    rows = result_rows(groups)
    keys = list(rows[0].varying)
    finals = list(dict.fromkeys(summary_name("final", row.headline) for row in rows))
    lines = [[*keys, "n", *finals, *SECONDS.values(), *BYTES.values()]]
    for row, runs in zip(rows, groups, strict=True):
        every = [costs(run) for run in runs]
        figures = [show(row.by_name.get(name), row.headline) if name in row.names else "–" for name in finals]
        cells = [_cell([cost[name] for cost in every], _seconds) for name in SECONDS]
        cells += [_cell([cost[name] for cost in every], _bytes) for name in BYTES]
        lines.append([*(setting(row.varying[key]) for key in keys), str(len(runs)), *figures, *cells])
    return lines


def _cell(values: Sequence[float | None], text: Callable[[float, float | None], str]) -> str:
    known = [value for value in values if value is not None]
    return text(*mean_std(known)) if known and len(known) == len(values) else "–"


def _seconds(mean: float, std: float | None) -> str:
    def text(value: float) -> str:
        return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"

    return text(mean) + ("" if std is None else f" ± {text(std)}")


def _bytes(mean: float, std: float | None) -> str:
    return size(mean)


# Costs of reaching a target -------------------------------------------------------------------------------------------


TO_CAPTION = (
    "rounds: the first round that reaches it, as the mean over its clients before they train, or over all clients after it; MB "
    "(up and down) and seconds: until then; mean ± standard deviation over the runs that reached it"
)


@dataclass(frozen=True)
class Reached:
    """The first time a run reached its target: round, bytes exchanged and seconds until then.

    virtual_seconds: of simulated time; None without it.
    """

    round: int
    nbytes: float
    seconds: float
    virtual_seconds: float | None = None


def reached(run: RecordedRun, target: float) -> Reached | None:
    """Return when the clients' mean headline metric first reached `target`; None if it never did.

    target: as recorded, so an accuracy is in [0, 1]. The figure before training belongs to the models of the previous
    round, so the current round's downloads count, but not its uploads and seconds. An evaluation of all clients comes
    after its round.
    """
    metric = run.headline

    def is_reached(value: float | None) -> bool:
        return value is not None and (value >= target if metric.higher_is_better else value <= target)

    nbytes = seconds = virtual = 0.0
    timed = is_timed(run)
    for t, record in run.rounds.items():
        nbytes += record.get("download-bytes") or 0
        if is_reached(record.get(f"{metric.name}-before")):
            return Reached(t, nbytes, seconds, virtual if timed else None)
        nbytes += record.get("upload-bytes") or 0
        seconds += record.get("seconds", {}).get("round") or 0.0
        virtual += record.get(VIRTUAL) or 0.0
        if is_reached(record.get("evaluation", {}).get(metric.name)):
            return Reached(t, nbytes, seconds, virtual if timed else None)
    return None


def is_timed(run: RecordedRun) -> bool:
    """Return whether a run has simulated time (key `speeds`)."""
    return any(VIRTUAL in record for record in run.rounds.values())


def recorded_target(metric: Metric, given: float) -> float:
    """Return a target on the scale of the recorded metric.

    For a ratio, values above 1 are per cent: 80 is 0.8, and 1 is 1. Raises UserError for a target outside the metric's
    range.
    """
    low, high = metric.range
    target = given / 100 if metric.ratio and high == 1 < given <= 100 else given
    if not low <= target <= high:
        per_cent = ", or up to 100 in per cent" if metric.ratio and high == 1 else ""
        raise UserError(key="--to", rule=f"{metric.name} is in [{low:g}, {high:g}]{per_cent}, got {given:g}")
    return target


def reached_as_told(run: RecordedRun, given: float) -> dict[str, float] | None:
    """Return rounds, bytes and seconds until a run reached a target; None if it never did. given: as in `recorded_target`."""
    found = reached(run, recorded_target(run.headline, given))
    if found is None:
        return None
    told = {"round": found.round, "bytes": found.nbytes, "seconds": found.seconds}
    return told if found.virtual_seconds is None else told | {VIRTUAL: found.virtual_seconds}


def order(groups: Sequence[Sequence[RecordedRun]], given: float, by: str) -> list[int]:
    """Return the positions of groups of runs, ordered by their mean cost of reaching a target, the least first.

    given: as in `recorded_target`. by: "rounds", "bytes" or "seconds"; these are of simulated time if the runs have it.
    Groups that never reach it come last. Raises UserError if some have it and others do not.
    """
    timed = {is_timed(run) for runs in groups for run in runs}
    if by == "seconds" and len(timed) > 1:
        raise UserError(
            key="--by seconds",
            rule="some of these runs have simulated time (speeds) and others do not; compare them apart",
        )

    field = {"rounds": "round", "seconds": VIRTUAL if True in timed else "seconds"}.get(by, by)

    def cost(runs: Sequence[RecordedRun]) -> float:
        found = [told[field] for run in runs if (told := reached_as_told(run, given)) is not None]
        return mean_std(found)[0] if found else math.inf

    costs = [cost(runs) for runs in groups]
    return sorted(range(len(groups)), key=costs.__getitem__)


def costs_table(groups: Sequence[Sequence[RecordedRun]], target: float, by: str = "") -> list[list[str]]:
    """Return the cost of reaching `target` per group of runs that differ only in the seed, header first.

    by: as in `order`; "" keeps the groups' order.

    Raises UserError if the target is outside the range of the runs' headline metric.
    """
    metrics = dict.fromkeys(run.headline for runs in groups for run in runs)
    targets = {metric: recorded_target(metric, target) for metric in metrics}
    names, *rows = varying_as_text(groups)
    bounds = []
    for metric, value in targets.items():
        sign = "≥" if metric.higher_is_better else "≤"
        bounds.append(f"{metric.name} {sign} " + (f"{100 * value:g} %" if metric.ratio else f"{value:g}"))
    timed = any(is_timed(run) for runs in groups for run in runs)
    lines = [[*names, f"reached {', '.join(bounds)}", "rounds", "MB", "seconds", *["virtual seconds"] * timed]]
    for row, runs in zip(rows, groups, strict=True):
        found = [at for run in runs if (at := reached(run, targets[run.headline])) is not None]
        cells = [
            _show([at.round for at in found]),
            _show([at.nbytes / 1e6 for at in found]),
            _show([at.seconds for at in found]),
        ]
        if timed:
            cells.append(_show([at.virtual_seconds for at in found if at.virtual_seconds is not None]))
        lines.append([*row, f"{len(found)} of {len(runs)}", *cells])
    return [lines[0], *(lines[1 + place] for place in order(groups, target, by))] if by else lines


def _show(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean, std = mean_std(values)
    return f"{mean:.4g}" + ("" if std is None else f" ± {std:.2g}")
