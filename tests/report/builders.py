"""Run folders written by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from corolla.report import page as report
from fl_app.config import parse
from fl_app.figures import Figure, Groups, Layers, Links, Matrix, Scalars, to_json
from fl_app.server import matrices
from fl_app.server.run_folder import read_about
from fl_app.toml import to_toml
from strategies import METHOD_PARAMS, METHODS
from tests.conftest import flat

NOTED = (Matrix("overlap", ""), Matrix("weights", ""), Matrix("near", ""), Links("collaborators", "", ""))


def record(round: int, clients: dict[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    rows = {i: {"accuracy-after": 0.5, "seconds": {"train": 1.0, "evaluate": 0.5}, **row} for i, row in clients.items()}
    before = [row["accuracy-before"] for row in rows.values()]
    return {
        "round": round,
        "accuracy-before": float(np.mean(before)),
        "accuracy-before-pooled": float(np.mean(before)),
        "upload-bytes": 100,
        "download-bytes": 40,
        "failures": [],
        "seconds": {"round": 3.0, "wait": 2.0, "evaluate": 1.0},
        "clients": rows,
        **more,
    }


def folder(
    path: Path,
    records: list[dict[str, Any]],
    finished: bool = True,
    figures: Sequence[Figure] | None = None,
    **config: Any,
) -> Path:
    """Write a run folder; figures: what it declares, by default what its method does."""
    path.mkdir(parents=True)
    raw = flat({"method": "fedavg", "num_server_rounds": len(records), **config})
    declared = METHODS[raw["method"]].figures if figures is None else figures  # type: ignore[index]
    (path / "config.toml").write_text(to_toml(parse(raw, METHOD_PARAMS).resolved))
    (path / "run.json").write_text(json.dumps({"experiment": path.name, "starts": 0, "figures": to_json(declared)}))
    lines = [_without_matrices(path, record) for record in records]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        (path / "summary.json").write_text(json.dumps({"rounds": len(records)}))
    return path


def _without_matrices(run: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Return a round's line. Its numbers between clients are in the round's file, as a run writes them."""
    ids = [int(i) for i in record["clients"]]
    notes = matrices.divided(record, {int(i): row for i, row in record["clients"].items()}, ids, NOTED)
    matrices.save(run, record["round"], ids, notes.between)
    return notes.round | {"clients": {str(i): row for i, row in notes.clients.items()}}


def write(output: Path, *paths: Path) -> tuple[str, set[str]]:
    page, pictures = report.write_report(paths, output)
    return page.read_text(encoding="utf-8"), {p.stem for p in pictures.iterdir()}


EVERYTHING = (
    *METHODS["fedcac"].figures,
    *METHODS["fedobp"].figures,
    *METHODS["fedpake"].figures,
    Layers(
        "high-dispersion",
        "Density of the masks, layer by layer",
        "share of the layer (%)",
        percent=True,
        name="density",
    ),
    Scalars("alpha", "Share of the own model", "alpha"),
    Groups("cluster", "Clusters"),
)


def many_runs(path: Path, num_runs: int, num_clients: int, seeds: int = 1) -> list[Path]:
    """Runs with long names, many clients and everything methods record, each with so many seeds."""
    rng = np.random.default_rng(0)
    out = []
    for k in range(num_runs * seeds):
        setting, rounds = k // seeds, []
        for t in range(1, 5):
            rows = {
                str(i): {
                    "accuracy-before": rng.random(),
                    "collaborators": [0] * int(rng.integers(9)),
                    "personal-parameters": {f"layer{j}.0.downsample.conv{j}.weight": j for j in range(30)},
                    "alpha": rng.random(),
                    "cluster": int(rng.integers(4)),
                }
                for i in range(num_clients)
            }
            layers = {f"layer{j}.0.downsample.conv{j}.weight": float(rng.random()) for j in range(30)}
            more = {"high-dispersion": layers, "macro-classes": {name: 1 + t % 4 for name in layers}}
            evaluation = {"accuracy": 0.5 + 0.1 * (2 * k % 5), "clients": {i: {"accuracy": rng.random()} for i in rows}}
            overlap = rng.random((num_clients, num_clients)).tolist()
            rounds.append(record(t, rows, overlap=overlap, evaluation=evaluation, **more))
        run = folder(
            path / f"run-{k:02}",
            rounds,
            figures=EVERYTHING,
            method=("fedcac", "fedavg", "local")[setting % 3],
            seed=k,
            model=f"a_long_module_name_{setting}:factory",
            learning_rate=0.01 * (setting + 1),
        )
        facts = {str(i): {"class-counts": rng.integers(0, 50, 10).tolist()} for i in range(num_clients)}
        (run / "clients.json").write_text(json.dumps(facts))
        if setting % 2 == 0:
            classes = [f"a class with a long name {c}" for c in range(10)]
            (run / "run.json").write_text(json.dumps({**read_about(run), "classes": classes}))
        out.append(run)
    return out
