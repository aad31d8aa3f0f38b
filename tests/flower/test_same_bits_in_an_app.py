"""A user's app whose loop trains as Corolla's does ends with the bits of Corolla's own run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import corolla.flower
from client_app.session import Session
from client_app.trainer import LocalTrainer
from corolla.flower.strategy_classes import name_of
from fl_app import weights
from fl_app.keys import Scalar
from fl_app.layout import Layout
from fl_app.server import checkpoint
from tests.conftest import Run, flat
from tests.flower.apps import Arrays, app_of, grid_of, initial, record_of

CLIENTS, ROUNDS = 4, 5
EQUAL: dict[str, Mapping[str, Scalar]] = {
    "fedcac": {"beta": 3},
    "feddac": {"alpha": 4, "neighbours": 2},
    "fedpake": {"deviations": "scaled"},
    "fedobp": {"quantile": 0.9},
    "fedavg": {},
    "fedper": {},
    "fedbn": {},
}


@pytest.mark.parametrize(
    ("method", "model"),
    [*((method, "mlp") for method in EQUAL), *((m, "resnet8") for m in ("fedcac", "fedobp", "fedbn"))],
)
def test_five_rounds(run: Run, raw_config: dict[str, Any], method: str, model: str) -> None:
    keys = {
        "method": method,
        "num_clients": CLIENTS,
        "num_server_rounds": ROUNDS,
        "model": model,
        method: EQUAL[method],
    }
    folder = run(**keys)
    session = Session.of(raw_config | flat(keys), CLIENTS, run=10**6)

    def train(arrays: Arrays, client: int, round: int) -> Arrays:
        data = session.data(client, "")
        module = session.network(data.info, "").module
        layout = Layout.of(module)
        trained = LocalTrainer(module, session.config, data, round, client).train(layout.model(arrays))
        return {**arrays, **layout.tensors(trained)}

    module = session.network(session.data(0, "").info, "").module
    start = {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}
    strategy = getattr(corolla.flower, name_of(method))(**EQUAL[method])
    app = app_of(train, samples=lambda client: session.data(client, "").num_train)
    result = strategy.start(grid_of(app, CLIENTS), record_of(start), ROUNDS)

    saved = checkpoint.load_latest(folder.path).arrays
    state = strategy.state_dict()
    assert state["model"]["params"].tobytes() == saved["global.params"].tobytes()
    assert state["model"]["buffers"].tobytes() == saved["global.buffers"].tobytes()
    own = {
        f"client.{client}.{name}": array
        for client, arrays in state["clients"].items()
        for name, array in arrays.items()
    }
    assert {name: array.tobytes() for name, array in own.items()} == {
        name: array.tobytes() for name, array in saved.items() if not name.startswith(("global.", "memory."))
    }
    if result.arrays:
        shared = strategy.server.layout
        sent = weights.load_safetensors(folder.path / "models" / "global.safetensors", shared)
        for name, tensor in shared.tensors(sent).items():
            assert result.arrays[name].numpy().tobytes() == tensor.tobytes()


def test_what_an_app_evaluates_is_the_model_of_its_client() -> None:
    app = app_of()
    strategy = corolla.flower.FedCAC(beta=1)
    strategy.start(grid_of(app), record_of(initial()), 2)
    for client in range(4):
        for name, array in app.seen[client].items():
            mine = strategy.personal_arrays(client + 1)[name].numpy()
            assert array.tobytes() == mine.tobytes() and array.dtype == initial()[name].dtype
    assert not np.array_equal(app.seen[0]["head.weight"], app.seen[1]["head.weight"])
