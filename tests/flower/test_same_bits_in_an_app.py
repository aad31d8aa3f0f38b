"""A user's app whose loop trains as Corolla's does ends with the bits of Corolla's own run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import corolla.flower
from client_app.session import Session
from client_app.trainer import LocalTrainer
from corolla.flower.method_strategy import name_of
from fl_app import weights
from fl_app.errors import UserError
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
    [
        *((method, "mlp") for method in EQUAL),
        *((m, "tests.small_models:batchnorm") for m in ("fedcac", "fedobp", "fedbn")),
    ],
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
        data = session.opened("").client(client)
        module = session.network(data.info, "").module
        layout = Layout.of(module)
        trained = LocalTrainer(module, session.config, data, round, client).train(layout.model(arrays))
        return {**arrays, **layout.tensors(trained)}

    module = session.network(session.opened("").client(0).info, "").module
    start = {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}
    strategy = getattr(corolla.flower, name_of(method))(**EQUAL[method])
    app = app_of(train, samples=lambda client: session.opened("").client(client).num_train)
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


@pytest.mark.parametrize("method", ["ifca", "fedfomo"])
def test_what_judges_models_by_the_losses_of_the_app(run: Run, raw_config: dict[str, Any], method: str) -> None:
    """An evaluate function that reports the mean training loss gives the numbers of Corolla's own run."""
    table: dict[str, Any] = {"clusters": 3} if method == "ifca" else {"validation_ratio": 0.0, "models": 2}
    keys = {"method": method, "num_clients": CLIENTS, "num_server_rounds": ROUNDS, "model": "mlp", method: table}
    folder = run(**keys)
    own = Session.of(raw_config | flat(keys), CLIENTS, run=10**6 + 2)
    one = Session.of(
        raw_config | flat({**keys, "method": "fedavg", method: {}}), CLIENTS, run=10**6 + 3
    )  # the app's model is a single one

    def trainer(client: int, round: int) -> LocalTrainer:
        data = one.opened("").client(client)
        return LocalTrainer(one.network(data.info, "").module, one.config, data, round, client)

    def train(arrays: Arrays, client: int, round: int) -> Arrays:
        mine = trainer(client, round)
        layout = Layout.of(mine.module)
        return {**arrays, **layout.tensors(mine.train(layout.model(arrays)))}

    def loss(arrays: Arrays, client: int) -> float:
        mine = trainer(client, 0)
        return float(mine.sample_losses(Layout.of(mine.module).model(arrays)).mean(dtype=np.float64))

    module = own.network(own.opened("").client(0).info, "").module
    parts = getattr(module, "components", [module])
    start, *more = (record_of({k: v.numpy().copy() for k, v in part.state_dict().items()}) for part in parts)
    strategy = getattr(corolla.flower, name_of(method))(**table, **({"other_arrays": more} if more else {}))
    app = app_of(train, samples=lambda client: one.opened("").client(client).num_train, loss=loss)
    strategy.start(grid_of(app, CLIENTS), start, ROUNDS)

    saved, state = checkpoint.load_latest(folder.path).arrays, strategy.state_dict()
    assert state["model"]["params"].tobytes() == saved["global.params"].tobytes()
    for client, arrays in state["clients"].items():
        for name, array in arrays.items():
            assert array.tobytes() == saved[f"client.{client}.{name}"].tobytes(), (client, name)
    assert len(state["clients"]) == (CLIENTS if method == "fedfomo" else 0)
    if more:
        own_layout = strategy.server.layout
        sizes = [sum(array.numpy().size for array in model.values()) for model in strategy.models()]
        assert len(sizes) == 3 and sum(sizes) == own_layout.d + own_layout.b


def test_scaffold_counts_the_steps_of_the_app_s_loop(run: Run, raw_config: dict[str, Any]) -> None:
    """Its correction comes through `objective`: the numbers of Corolla's own run, up to rounding."""
    keys = {"method": "scaffold", "num_clients": CLIENTS, "num_server_rounds": 3, "model": "mlp"}
    folder = run(**keys)
    session = Session.of(raw_config | flat(keys), CLIENTS, run=10**6 + 1)

    def train(arrays: Arrays, client: int, round: int) -> Arrays:
        data = session.opened("").client(client)
        module = session.network(data.info, "").module
        layout = Layout.of(module)
        trainer = LocalTrainer(module, session.config, data, round, client)

        def loss(net: Any, x: Any, y: Any) -> Any:
            return corolla.flower.objective(trainer.loss(net(x), y), net)

        return {**arrays, **layout.tensors(trainer.train(layout.model(arrays), objective=loss))}

    module = session.network(session.opened("").client(0).info, "").module
    start = {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}
    config = session.config
    said = {name: getattr(config, name) for name in ("learning_rate", "momentum", "batch_size", "local_epochs")}
    strategy = corolla.flower.SCAFFOLD(**said)
    app = app_of(train, samples=lambda client: session.opened("").client(client).num_train)
    strategy.start(grid_of(app, CLIENTS), record_of(start), 3)
    saved, state = checkpoint.load_latest(folder.path).arrays, strategy.state_dict()
    np.testing.assert_allclose(state["model"]["params"], saved["global.params"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(state["memory"]["control"], saved["memory.control"], rtol=1e-4, atol=1e-6)
    assert np.abs(state["memory"]["control"]).max() > 1e-3


@pytest.mark.parametrize("left_out", ["learning_rate", "batch_size", "local_epochs"])
def test_scaffold_asks_for_what_the_loop_has(left_out: str) -> None:
    said = {"learning_rate": 0.1, "batch_size": 10, "local_epochs": 1}
    with pytest.raises(UserError) as error:
        corolla.flower.SCAFFOLD(**{name: value for name, value in said.items() if name != left_out})
    assert error.value.key == left_out
    with pytest.raises(UserError, match="learning_rate"):
        corolla.flower.FedCAC(learning_rate=0.1)
    with pytest.raises(UserError, match=r"corolla.flower.objective\("):
        corolla.flower.SCAFFOLD(**said).start(grid_of(app_of()), record_of(initial()), 1)


def test_what_an_app_evaluates_is_the_model_of_its_client() -> None:
    app = app_of()
    strategy = corolla.flower.FedCAC(beta=1)
    strategy.start(grid_of(app), record_of(initial()), 2)
    for client in range(4):
        for name, array in app.seen[client].items():
            mine = strategy.personal_arrays(client + 1)[name].numpy()
            assert array.tobytes() == mine.tobytes() and array.dtype == initial()[name].dtype
    assert not np.array_equal(app.seen[0]["head.weight"], app.seen[1]["head.weight"])
