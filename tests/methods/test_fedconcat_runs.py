"""FedConcat in whole runs: what they leave, resume and refuse."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from corolla.experiments.exported.export import export
from fl_app import models, weights
from fl_app.errors import ConfigurationError
from fl_app.layout import Layout
from fl_app.server.run_folder import read_metrics
from strategies import METHODS
from strategies.baselines import components
from tests.conftest import Run
from tests.conftest import config as configured
from tests.methods.one_client import same
from tests.methods.runs import small_clients
from tests.methods.test_fedconcat import MODELS, SHAPE


@MODELS
def test_models_leave_a_run_as_concatenations(run: Run, tmp_path: Path, model: dict[str, Any]) -> None:
    setting = {**small_clients(tmp_path), "collect_personal_models": True, "finetune_epochs": 1, **model}
    folder = run(method="fedconcat", fedconcat={"encoder_rounds": 1}, **setting)
    records = list(read_metrics(folder.path))
    assert not any(record["failures"] or record.get("evaluation", {}).get("failures") for record in records)
    clients = records[-1]["evaluation"]["clients"]
    parts = [models.build(model["model"], **SHAPE) for _ in range(3)]
    # three clients, three clusters
    layout = components.concatenated(Layout.of(parts[0]), 3)
    files = [folder.path / "models" / f"{name}.safetensors" for name in ("global", "client-0", "client-1", "client-2")]
    for file in files:
        one = weights.load_safetensors(file, layout)
        assert {hashlib.sha256(one.params.tobytes()).hexdigest()} == {client["sha256"] for client in clients.values()}
        assert file.read_bytes() == files[0].read_bytes()
    network = components.concatenation(parts)
    network.load_state_dict(torch.load(export(folder.path, METHODS, None, tmp_path / "whole.pt")[0]), strict=True)
    assert same(weights.read(network), weights.load_safetensors(files[0], layout))


def test_unseen_clients_get_the_model_of_the_nearest_cluster(run: Run) -> None:
    folder = run(method="fedconcat", fedconcat={"encoder_rounds": 1}, holdout_clients=0.34, evaluate_every=1)
    first, last = read_metrics(folder.path)
    hashes = [[client["sha256"] for client in record["evaluation"]["clients"].values()] for record in (first, last)]
    assert len(first["clients"]) == 2 and [len(h) for h in hashes] == [3, 3]
    assert [len(set(h)) for h in hashes] == [2, 1]


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"num_server_rounds": 20}, "fedconcat.encoder-rounds", 20),
        ({"num_server_rounds": 30, "report_class_counts": False}, "report-class-counts", False),
        (
            {"num_server_rounds": 30, "num_clients": 11, "fedconcat": {"clusters": 5, "size_cap": 2}},
            "fedconcat.size-cap",
            2,
        ),
    ],
)
def test_what_leaves_no_room_is_refused(changes: dict[str, Any], key: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as refused:
        configured(method="fedconcat", **changes)
    assert (refused.value.key, refused.value.value) == (key, value)


def test_one_file_of_initial_weights_starts_all_clusters(tmp_path: Path) -> None:
    build = METHODS["fedconcat"].network
    parsed = configured(method="fedconcat", fedconcat={"encoder_rounds": 1})
    file = tmp_path / "start.safetensors"
    start = models.build("mlp", **{**SHAPE, "seed": 5})  # type: ignore[arg-type]
    weights.save_safetensors(file, Layout.of(start), weights.read(start))
    whole = build(parsed, **SHAPE, initial_weights=str(file))
    assert same(weights.read(whole.model), weights.read(start))  # type: ignore[arg-type]
