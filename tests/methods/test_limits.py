"""What a method is with some of its parts off: another method, bit for bit. At its defaults it is not (test_missing_classes.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fl_app.server.record import digest
from fl_app.server.run_folder import RunFolder, read_metrics
from tests.conftest import Made, Run
from tests.small_models import BATCHNORM, GROUP

SETTING: dict[str, Any] = {
    **BATCHNORM,
    "train_samples": 17,
    "num_server_rounds": 3,
    "momentum": 0.5,
    "weight_decay": 0.01,
    "fraction_train": 0.7,
    "evaluate_every": 1,
}
PLAIN = {"model": "mlp"}
ALONE = {"num_clients": 1}
FIRST = {"num_server_rounds": 1}
TUNED = {"finetune_epochs": 1}
ALL = {"fraction_train": 1.0}
LONGER = {**PLAIN, **ALL, "local_epochs": 3, "fedrep": {"head_epochs": 1, "body_epochs": 3}}
NO_WEIGHTS = {"collapse_weight": 0.0, "head_weight": 0.0, "feature_weight": 0.0, "head_learning_rate": 0.0}
FIX = {"strategy": "fix"}

# method, its own keys, the other method, the run's keys
EQUAL: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("adabest", {"mu": 0.0, "beta": 0.0}, "fedavg", {}),
    ("apple", {"relation_rate": 0.0}, "local", ALONE),
    ("cfl", {"eps1": 0.0, "start": 0}, "fedavg", {}),
    ("favor", {}, "fedavg", ALL),
    ("fedala", {"weight_learning_rate": 0, "layers": 1}, "fedavg", {}),
    ("fedala", {"weight_learning_rate": 0, "layers": 0}, "fedavg", {}),
    ("fedbn", {}, "fedavg", PLAIN),
    ("fedbn", {}, "fedavg", GROUP),
    ("fedcac", {"tau": 0.0}, "fedavg", {}),
    ("feddac", {"tau": 0.0, "weighting": "none"}, "fedavg", ALL),
    ("feddpa", {"threshold": 1, "threshold_meaning": "value", "shared_weight": 0}, "fedavg", {}),
    ("feddpa", {"threshold": 1, "threshold_meaning": "quantile", "constraint": "none"}, "fedavg", {}),
    ("fedem", {"components": 1}, "fedavg", {}),
    ("fedgen", {"alpha": 0, "beta": 0}, "fedavg", {}),
    ("fedgen", {"generator_steps": 3}, "fedavg", FIRST),
    ("fedma", {"one_shot": True}, "fedavg", {**ALONE, **PLAIN}),
    ("fedntd", {"beta": 0}, "fedavg", {}),
    ("fedobp", {"quantile": 1.0}, "fedavg", {}),
    ("fedpac", {"weight": 0.0, "combine": False}, "fedrep", LONGER),
    ("fedpake", {"threshold": 1.0}, "fedavg", {}),
    ("fedprox", {"mu": 0}, "fedavg", {}),
    ("fedproto", {"weight": 0.0, "predict": "classifier"}, "local", {}),
    ("fedselect", {"limit": 0}, "fedavg", {}),
    ("fedselect", {"rate": 0}, "fedavg", {}),
    ("fedselect", {"limit": 1.0}, "fedavg", FIRST),
    ("flute", {**NO_WEIGHTS, "body_epochs": 2}, "fedper", {"local_epochs": 2}),
    ("heterofl", {"rates": "1"}, "fedavg", {}),
    ("ifca", {"clusters": 1}, "fedavg", {}),
    ("ifca", {"clusters": 1, "share_body": True}, "fedavg", {}),
    ("moon", {"mu": 0}, "fedavg", {}),
    ("moon", {"mu": 50}, "fedavg", FIRST),
    ("partialfed", FIX, "fedavg", {}),
    ("partialfed", {"choice_learning_rate": 0}, "fedavg", {}),
    ("partialfed", {**FIX, "load": "bottom:0"}, "local", {}),
    ("partialfed", {"load": "bottom:0"}, "local", {}),
    ("partialfed", {**FIX, "batchnorm": "local"}, "fedbn", {}),
    ("partialfed", {**FIX, "load": "bottom:4"}, "fedper", {}),
    ("partialfed", {**FIX, "load": "top:1"}, "lg-fedavg", {}),
    ("perfedavg", {"alpha": 0.0}, "fedavg", {}),
    ("perfedmask", {}, "fedbabu", TUNED),
    ("pfedla", {"hidden": 4, "embedding": 3, "keep_layers": 9}, "local", {}),
    ("pfedsim", {"warmup": 1.0}, "fedavg", {}),
]
# of these the global model alone
SHARED: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("apfl", {}, "fedavg", {}),
    ("apfl", {"alpha": 1.0, "alpha_updates": "batch"}, "fedavg", {}),
    ("ditto", {"personal_epochs": 2}, "fedavg", {}),
    ("fedrod", {"balanced": False}, "fedavg", {}),
]


def trained(folder: RunFolder) -> list[tuple[Any, ...]]:
    """Return what a run trained, per round: losses, and the models that its clients are tested with."""
    records = [*read_metrics(folder.path)]
    assert not any(record["failures"] for record in records)
    rows = [record["evaluation"]["clients"].values() for record in records]
    return [
        (record["loss"], digest(own, 1), *(row["accuracy-finetuned"] for row in own if "accuracy-finetuned" in row))
        for record, own in zip(records, rows, strict=True)
    ]


@pytest.mark.parametrize(
    ("method", "own", "other", "changes", "whole"),
    [(*case, case in EQUAL) for case in EQUAL + SHARED],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_it_is_the_other_method_bit_for_bit(
    run: Run,
    made_once: Made,
    tmp_path: Path,
    method: str,
    own: dict[str, Any],
    other: str,
    changes: dict[str, Any],
    whole: bool,
) -> None:
    keys = {**SETTING, **changes}
    ours, theirs = run(method=method, **keys, **{method: own}), made_once(tmp_path / "other", method=other, **keys)
    if whole:
        assert trained(ours) == trained(theirs)
    else:
        file = "models/global.safetensors"
        assert (ours.path / file).read_bytes() == (theirs.path / file).read_bytes()
