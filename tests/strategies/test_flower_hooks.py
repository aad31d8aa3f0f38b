"""PersonalizedStrategy is a Flower Strategy: rounds that are run by its hooks end with the same model as `start`'s."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import Strategy

from client_app.client_app import app
from fl_app import weights
from fl_app.config import parse
from fl_app.layout import Layout
from fl_app.server.run_folder import RunFolder
from fl_app.transport import flower_patches
from fl_app.transport.exchange import Exchange
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS, METHODS
from strategies.base import PersonalizedStrategy
from strategies.engine.attempt import TooFewResults
from tests.conftest import Run, flat


@pytest.mark.parametrize("private", [False, True])
def test_a_round_by_flower_s_hooks(run: Run, raw_config: dict[str, Any], private: bool) -> None:
    changes = {"method": "fedavg", "num_clients": 3, "num_server_rounds": 1, "private": private}
    folder = run(run_name="start", **changes)
    strategy, exchange = by_hand(raw_config | flat({**changes, "run_name": "hooks"}))
    assert isinstance(strategy, Strategy) and isinstance(strategy, PersonalizedStrategy)

    messages = list(strategy.configure_train(1, ArrayRecord(), ConfigRecord(), exchange))
    assert len(messages) == 3
    assert strategy.aggregate_train(1, exchange.ask("round 1", messages, 60, 3)) == (None, None)
    model = weights.load_safetensors(folder.path / "models" / "global.safetensors", strategy.layout)
    assert strategy.global_model.params.tobytes() == model.params.tobytes() and strategy.round == 1

    messages = list(strategy.configure_evaluate(1, ArrayRecord(), ConfigRecord(), exchange))
    strategy.aggregate_evaluate(1, exchange.ask("evaluation", messages, 60, 3))
    assert sorted(strategy.rounds(exchange).attempt.clients) == [0, 1, 2]


def test_a_run_goes_through_flower_s_hooks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, int]] = []

    def noting(name: str) -> Any:
        hook = getattr(PersonalizedStrategy, name)

        def noted(self: Any, server_round: int, *rest: Any) -> Any:
            called.append((name, server_round))
            if called.count(("aggregate_train", 2)) == 1 and name == "aggregate_train":
                raise TooFewResults("the first attempt at round 2 does not count")
            return hook(self, server_round, *rest)

        return noted

    for name in ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate"):
        monkeypatch.setattr(PersonalizedStrategy, name, noting(name))
    run(method="fedavg", num_clients=3, num_server_rounds=2, evaluate_every=2)
    train = ["configure_train", "aggregate_train"]
    rounds = [(name, round) for round in (1, 2, 2) for name in train]
    assert called == [*rounds, ("configure_evaluate", 2), ("aggregate_evaluate", 2)]


def test_a_round_without_replies_changes_nothing(raw_config: dict[str, Any]) -> None:
    strategy, exchange = by_hand(raw_config | flat({"method": "fedavg", "num_clients": 3}))
    before = strategy.global_model
    strategy.configure_train(1, ArrayRecord(), ConfigRecord(), exchange)
    with pytest.raises(TooFewResults, match="0 of 3 uploads usable"):
        strategy.aggregate_train(1, iter(()))
    assert strategy.global_model is before and strategy.round == 0


def by_hand(raw: dict[str, Any]) -> tuple[Any, Any]:
    """A run's server half and its exchange, without a round yet."""
    config = parse(raw, METHOD_PARAMS)
    method = METHODS[config.method]
    flower_patches.install()
    exchange = Exchange(InProcessGrid(app, raw, config.num_clients), config, lambda what, done, total: None)
    exchange.registry.wait()
    assert exchange.registry.agreed.shape is not None
    module = method.network(config, **exchange.registry.agreed.shape._asdict())
    layout = Layout.of(module)
    folder = RunFolder.create(config, uuid.uuid4().hex[:12])
    shared = method.travelling(config, layout)
    return method.server(config, layout, weights.read(module), shared, folder), exchange
