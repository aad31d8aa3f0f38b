"""Values that `--json` prints: one value, and nothing else on standard output. docs/experiments.md describes its contents."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from corolla.experiments.runs import RecordedRun
from fl_app.errors import UserError
from fl_app.keys import specs
from fl_app.metrics import moments

if TYPE_CHECKING:
    from corolla.presets import Preset
    from fl_app.config import RunConfig
    from fl_app.data import DatasetInfo


def show_json(value: Any) -> None:
    """Print a value as JSON. Floats that JSON lacks, such as NaN, become null."""
    typer.echo(json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(inner) for inner in value]
    if hasattr(value, "item"):
        # a NumPy number
        return _plain(value.item())
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)


def of_runs(found: Iterable[RecordedRun]) -> list[dict[str, Any]]:
    """Return the listing of `corolla runs`: folder, state, rounds, main settings and last figure of each run."""
    return [_of_run(run) for run in found]


def _of_run(run: RecordedRun) -> dict[str, Any]:
    try:
        settings = run.settings
    except UserError as error:
        return {"run": str(run.path), "name": run.path.name, "state": "unreadable", "error": str(error)}
    last = list(run.rounds.values())[-1] if run.rounds else {}
    metric = run.headline.name
    evaluation = last.get("evaluation") or {}
    return {
        "run": str(run.path),
        "name": run.path.name,
        "state": run.state,
        "stopped-early": run.stopped_early,
        "rounds": last.get("round", 0),
        "planned-rounds": settings.get("num-server-rounds"),
        "method": run.method,
        "dataset": settings.get("dataset"),
        "seed": settings.get("seed"),
        "metric": metric,
        "value": evaluation.get(metric) if run.finished else last.get(moments(metric)[0]),
        "of-clients": run.covered_note(run.headline) or "all",
    }


def of_summary(run: RecordedRun) -> dict[str, Any]:
    """Return the content of summary.json, with the run's folder and the clients that metrics leave out."""
    return {"run": str(run.path), **run.summary, "undefined": run.undefined}


def of_presets(found: Iterable[Preset], seconds: Mapping[str, float | None] | None = None) -> list[dict[str, Any]]:
    """Return a row per preset: name, the published figure in per cent as text or null, paper, and its place in the paper.

    seconds: of a run of each preset on this machine, by name, None if unknown; then rows have them too.
    """
    return [
        {
            "preset": preset.name,
            "published": str(preset.published) if preset.published else None,
            "paper": preset.paper,
            "source": preset.source,
            "table": preset.table,
            "column": preset.column,
            **({} if seconds is None else {"seconds": seconds[preset.name]}),
        }
        for preset in found
    ]


def of_methods(names: Iterable[str]) -> list[dict[str, Any]]:
    """Return a row per method: name, summary, and its parameters with default, range and meaning."""
    from strategies import METHODS

    rows = []
    for name in names:
        method = METHODS[name]
        parameters = [
            {"key": spec.name, "default": spec.default, "range": spec.range.replace("`", ""), "meaning": spec.doc}
            for spec in specs(method.params, method.name)
        ]
        rows.append({"method": name, "summary": METHODS.summary(name), "parameters": parameters})
    return rows


def of_data(config: RunConfig, info: DatasetInfo) -> dict[str, Any]:
    """Return the content of `corolla data show`: the data set, and each client's samples, by class if there are classes."""
    from fl_app import data, tasks

    of_classes = tasks.of(config).has_classes
    clients = []
    for client_id in range(config.num_clients):
        part = data.open_client(config, client_id)
        row: dict[str, Any] = {"client": client_id, "train": len(part.y_train), "test": len(part.y_test)}
        if client_id < len(info.groups):
            row["name"] = info.groups[client_id]
        if of_classes:
            sides = {"train-classes": part.y_train, "test-classes": part.y_test}
            for name, labels in sides.items():
                row[name] = {info.classes[k]: int((labels == k).sum()) for k in range(info.num_classes)}
        else:
            shift = info.facts.target_shift or [0.0] * len(info.classes)
            means = part.y_train.mean(0) if len(part.y_train) else [None] * len(info.classes)
            row["target-means"] = {
                name: None if mean is None else float(mean) + off
                for name, mean, off in zip(info.classes, means, shift, strict=True)
            }
        clients.append(row)
    return {
        "dataset": config.dataset,
        "samples": info.samples,
        "train": info.num_train,
        "test": info.num_test,
        "shape": list(info.input_shape),
        "classes" if of_classes else "targets": list(info.classes),
        "columns": [list(column) for column in info.facts.columns],
        "clients": clients,
        "remarks": [*info.remarks, *data.partition_remarks(config)],
    }
