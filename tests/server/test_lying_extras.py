"""Clients whose model is honest and whose other arrays and numbers are not: who lies is dropped by name, in every round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import attacks
from benchmarks.attacks import Scene
from fl_app.config import parse
from fl_app.layout import Model
from fl_app.server.run_folder import read_metrics
from fl_app.transport.wire import Upload
from strategies import METHOD_PARAMS, METHODS
from strategies.base import Uploads
from strategies.baselines.fedas import INFORMATION
from tests.conftest import Run, flat
from tests.methods.federation import Federation

CLIENTS = 5
LIAR = CLIENTS - 1


def array(name: str, lie: Callable[[np.ndarray], np.ndarray]) -> Callable[[Scene], Upload]:
    def attack(scene: Scene) -> Upload:
        told = scene.honest.extras[name]
        return dataclasses.replace(scene.honest, extras={**scene.honest.extras, name: lie(told).astype(told.dtype)})

    return attack


def number(name: str, value: object) -> Callable[[Scene], Upload]:
    return lambda scene: dataclasses.replace(scene.honest, metrics={**scene.honest.metrics, name: value})


LIES: dict[str, tuple[dict[str, Any], Callable[[Scene], Upload], str]] = {
    "feddac guidance": (
        {"feddac": {"guidance": "one-step"}},
        array("guidance", lambda g: g * 100),
        "its guidance models lie",
    ),
    "feddwa guidance": ({}, array("guidance", lambda g: -g), "its guidance models lie"),
    "pfedfda means": ({}, array("means", lambda m: m * 1000), "its class means lie"),
    "pfedfda covariance": ({}, array("covariance", lambda c: c * 1000), "its covariances lie"),
    "fedproto prototypes": ({}, array("prototypes", lambda p: p * 1000), "its prototypes lie"),
    "fedpac prototypes": ({}, array("prototypes", lambda p: -100 * p), "its prototypes lie"),
    "fedgen counts": ({}, array("class-counts", lambda c: c * 1000), "must be >= 0 and sum to num_examples 24"),
    "fedobp counts": ({}, array("personal-parameters", lambda c: c + 10**9), "a tensor of"),
    "ifca cluster": ({}, array("cluster", lambda c: c + 100), "must be in 0..3, got 10"),
    "scaffold few steps": ({}, number("steps", 1), "steps must be an integer in 3..3 for 24 samples, got 1"),
    "scaffold many steps": ({}, number("steps", 10**6), "got 1000000"),
    "fedas negative": ({}, number(INFORMATION, -1.0), "must be a number"),
}


@pytest.mark.parametrize("lie", list(LIES))
def test_a_liar_is_dropped_by_name_and_nobody_else(run: Run, raw_config: dict[str, Any], lie: str) -> None:
    changes, attack, says = LIES[lie]
    own = {"method": lie.split()[0], "num_clients": CLIENTS, "max_update_norm": 3.0, **changes}
    app = attacks.client_app(attack, 1, parse(raw_config | flat(own), METHOD_PARAMS))
    folder = run(app=app, **own)
    dropped = [failure for record in read_metrics(folder.path) for failure in record["failures"]]
    assert [failure["client"] for failure in dropped] == [LIAR, LIAR]
    assert all(says in failure["cause"] for failure in dropped), dropped


def test_every_model_beside_the_model_is_compared() -> None:
    """Or does not meet a mean over clients: FedFomo's scores choose only what their own client is sent.

    Only a class's prototypes that the client has are compared.
    """
    compared = {name for name, method in METHODS.items() if method.strategy.outliers.extras}
    assert compared == {"feddac", "feddwa", "fedconcat", "fedpac", "fedproto", "pfedfda"}


def test_information_counts_as_far_as_samples_may(tmp_path: Path) -> None:
    """The weight of FedAS is a client's own word: `max-size-weight` bounds it."""
    means = []
    for bound in (0.0, 3.0):
        f = Federation(tmp_path / f"{bound}", "fedas", max_size_weight=bound)
        d, b = f.server.layout.d, f.server.layout.b
        W = np.repeat(np.array([[0], [0], [1]], np.float32), d, axis=1)
        metrics = [{INFORMATION: value} for value in (1.0, 1.0, 1e30)]
        f.server.personalize(1, Uploads([0, 1, 2], W, np.zeros((3, b), np.float32), np.ones(3), None, {}, metrics))
        model: Model = f.server.global_model
        means.append(float(model.params[0]))
    assert means == pytest.approx([1, 3 / 5])
