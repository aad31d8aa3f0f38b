"""What runs cost beside their final figure: seconds and bytes (`corolla compare --costs`)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from corolla.experiments.compare import result_rows
from corolla.experiments.grouping import mean_std
from corolla.experiments.result_table import setting, show, summary_name
from corolla.experiments.runs import RecordedRun
from fl_app.errors import size
from fl_app.server import client_rows

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
