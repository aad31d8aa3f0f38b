"""Methods whose clients judge models by the losses of an app's evaluate function: what is asked, and errors by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Error, Message, MetricRecord
from flwr.clientapp.typing import ClientAppCallable

from corolla.flower import IFCA, FedFomo, personalize
from corolla.flower.messages import AppForm
from corolla.flower.training_loop import BEYOND_APP, LACKS_LOSS
from fl_app.errors import UserError
from strategies import METHODS
from strategies.base import Layout
from strategies.baselines import components
from tests.facts import mentions
from tests.flower.apps import Arrays, app_of, grid_of, initial, read, record_of

CENTRES = {0: -4.0, 1: 4.0, 2: -4.0, 3: 4.0}


def model_at(value: float) -> Arrays:
    """The model whose parameters all have one value."""
    return {name: array if "running" in name else np.full_like(array, value) for name, array in initial().items()}


def towards_own(arrays: Arrays, client: int, round: int) -> Arrays:
    """Training of a kind: halfway to the client's centre."""
    moved = {name: ((array + CENTRES[client]) / 2).astype(array.dtype) for name, array in arrays.items()}
    return {**moved, "bn.running_var": arrays["bn.running_var"]}


def distance(arrays: Arrays, client: int) -> float:
    """A loss that is least at the client's centre."""
    return float(np.mean([abs(arrays[name] - CENTRES[client]).mean() for name in ("body.weight", "head.bias")]))


def test_clients_train_and_evaluate_the_model_that_fits_them() -> None:
    calls: list[tuple[str, int, float]] = []

    def noting(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        client = int(context.node_config["partition-id"])  # type: ignore[arg-type]
        arrays: Any = message.content["arrays"]
        assert set(arrays) == set(initial()) and "server-round" in message.content["config"]  # type: ignore[operator]
        calls.append((message.metadata.message_type, client, float(arrays["head.bias"].numpy()[0])))
        return call_next(message, context)

    app = app_of(towards_own, mods=[personalize, noting], loss=distance)
    strategy = IFCA(clusters=2, other_arrays=[record_of(model_at(1.0))])
    strategy.start(grid_of(app), record_of(model_at(-1.0)), 2)
    first, second = (float(read(model)["head.bias"][0]) for model in strategy.models())
    assert (first, second) == (-3.25, 3.25)
    assert [(client, float(app.seen[client]["head.bias"][0])) for client in range(4)] == [
        (client, first if client % 2 == 0 else second) for client in range(4)
    ]
    # a round's messages: two models to judge, one to train, then two to judge and the better one to evaluate
    of_client = [(kind, value) for kind, client, value in calls if client == 1]
    one_round = [("evaluate", -1.0), ("evaluate", 1.0), ("train", 1.0), *[("evaluate", v) for v in (-2.5, 2.5, 2.5)]]
    assert of_client[:6] == one_round and len(of_client) == 12


def test_one_model_is_fedavg_and_asks_for_no_loss() -> None:
    strategy = IFCA(clusters=1)
    strategy.start(grid_of(app_of(towards_own)), record_of(model_at(1.0)), 1)
    (only,) = strategy.models()
    weights = np.array([10, 11, 12, 13]) / 46
    assert float(read(only)["head.bias"][0]) == pytest.approx(0.5 + weights @ np.array([*CENTRES.values()]) / 2)


@pytest.mark.parametrize("cls", [IFCA, FedFomo])
def test_an_evaluate_function_without_the_loss_ends_the_run(cls: Any) -> None:
    keys: Any = (
        {"other_arrays": [record_of(model_at(k)) for k in (1, 2, 3)]} if cls is IFCA else {"validation_ratio": 0}
    )
    with pytest.raises(UserError) as error:
        cls(loss_key="my-loss", **keys).start(grid_of(app_of()), record_of(initial()), 3)
    assert mentions(str(error.value), "my-loss", "loss_key")


def test_the_loss_may_have_another_name() -> None:
    def renamed(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, context)
        for record in reply.content.values():
            if isinstance(record, MetricRecord) and "eval_loss" in record:
                record["my-loss"] = record.pop("eval_loss")
        return reply

    app = app_of(towards_own, mods=[personalize, renamed], loss=distance)
    strategy = IFCA(clusters=2, loss_key="my-loss", other_arrays=[record_of(model_at(1.0))])
    strategy.start(grid_of(app), record_of(model_at(-1.0)), 1)
    assert [float(read(model)["head.bias"][0]) for model in strategy.models()] == [-2.5, 2.5]


def test_a_node_that_cannot_judge_is_left_out_by_name(caplog: pytest.LogCaptureFixture) -> None:
    def failing(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if context.node_id == 2 and message.metadata.message_type == "evaluate":
            return Message(Error(1, "no data to evaluate"), reply_to=message)
        return call_next(message, context)

    app = app_of(towards_own, mods=[failing, personalize], loss=distance)
    strategy = IFCA(clusters=2, other_arrays=[record_of(model_at(1.0))])
    strategy.start(grid_of(app), record_of(model_at(-1.0)), 1)
    assert mentions(caplog.text, "client 1 (node 2)", "dropped", "no data to evaluate")
    assert strategy.server.state.round == 1 and 1 not in app.seen
    assert [float(read(model)["head.bias"][0]) for model in strategy.models()] == [-2.5, 2.5]


@pytest.mark.parametrize(
    ("keys", "others"),
    [({}, 0), ({"clusters": 2}, 2), ({"clusters": 1}, 1)],
)
def test_the_number_of_models_must_fit(keys: dict[str, int], others: int) -> None:
    with pytest.raises(UserError) as error:
        IFCA(**keys, other_arrays=[record_of(initial())] * others)
    assert error.value.key == "other_arrays"


def test_models_must_differ_and_have_the_same_arrays() -> None:
    for other in (initial(), {"head.weight": initial()["head.weight"]}):
        strategy = IFCA(clusters=2, other_arrays=[record_of(other)])
        with pytest.raises(UserError) as error:
            strategy.start(grid_of(app_of(loss=distance)), record_of(initial()), 1)
        assert error.value.key == "other_arrays"


def test_what_an_app_cannot_give_is_refused_at_once() -> None:
    with pytest.raises(UserError) as error:
        IFCA(share_body=True)
    assert error.value.rule == BEYOND_APP
    with pytest.raises(UserError) as error:
        FedFomo()
    assert error.value.key == "validation_ratio"
    assert LACKS_LOSS not in (BEYOND_APP, error.value.rule)


def test_models_side_by_side_have_the_layout_of_their_network() -> None:
    from torch import nn

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))

    found = components.side_by_side(Layout.of(network()), 3)
    expected = Layout.of(components.chosen_of([network() for _ in range(3)]))
    assert (found.params, found.buffers, found.batchnorm) == (expected.params, expected.buffers, expected.batchnorm)
    assert components.alone(found, 1).params == Layout.of(network()).params
    assert (
        AppForm.of(record_of(initial())).layout.params
        == components.alone(components.side_by_side(AppForm.of(record_of(initial())).layout, 2), 1).params
    )
    assert METHODS["ifca"].side_by_side is not None
