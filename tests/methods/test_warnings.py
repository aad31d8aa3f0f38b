"""What a method warns of when a run starts, and that it is silent where there is no reason."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.facts import mentions
from tests.methods.federation import Federation
from tests.methods.one_client import small

NORM = {"network": lambda: small(batchnorm=True)}


@pytest.mark.parametrize(
    ("method", "keys", "silent", "words"),
    [
        ("fedbabu", {}, {"finetune_epochs": 1}, ("fedbabu: finetune-epochs is 0",)),
        ("fedbn", {}, NORM, ("fedbn", "has no", "BatchNorm layer", "run is FedAvg")),
        ("fedfomo", {"fedfomo": {"models": 5}}, {"fedfomo": {"models": 0}}, ("sent other clients'", "models")),
        ("fedma", {**NORM, "num_server_rounds": 3}, {**NORM, "num_server_rounds": 4}, ("multiple of 2", "got 3")),
        (
            "fedma",
            {**NORM, "num_server_rounds": 3},
            {**NORM, "num_server_rounds": 3, "fedma": {"one_shot": True}},
            ("multiple of 2", "got 3"),
        ),
        ("perfedmask", {}, {"finetune_epochs": 5}, ("perfedmask: finetune-epochs is 0",)),
        ("pfedme", {"momentum": 0.5}, {"momentum": 0.0}, ("momentum 0.5 is not", "inner steps", "gradient steps")),
        (
            "pfedme",
            {"pfedme": {"inner_learning_rate": 0.15}},
            {"momentum": 0.0},
            ("pfedme: inner-learning-rate * proximal-weight",),
        ),
        ("scaffold", {"momentum": 0.9}, {"momentum": 0.0}, ("paper has none",)),
    ],
)
def test_it_is_warned_of(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    method: str,
    keys: dict[str, Any],
    silent: dict[str, Any],
    words: tuple[str, ...],
) -> None:
    for changes, warned in ((keys, True), (silent, False)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "corolla"):
            Federation(tmp_path, method, **changes).server.summary()
        assert mentions(caplog.text, *words) == warned
