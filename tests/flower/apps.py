"""Flower apps as a user writes them, whose client app has the mod, and a grid of them in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from corolla.flower import personalize
from fl_app.keys import Scalar
from fl_app.transport.inprocess import InProcessGrid

Arrays = dict[str, NDArray[Any]]
Train = Callable[[Arrays, int, int], Arrays]
"""(the model's arrays, client from 0, round) -> the trained ones."""


def initial() -> Arrays:
    """A model of two layers with BatchNorm between them, of several dtypes."""
    draw = np.random.default_rng(0)
    return {
        "body.weight": draw.normal(size=(3, 4)).astype(np.float32),
        "bn.weight": np.ones(3, np.float32),
        "bn.running_var": np.ones(3, np.float32),
        "bn.num_batches_tracked": np.array(0),
        "head.weight": draw.normal(size=(2, 3)),
        "head.bias": np.zeros(2, np.float32),
    }


def drift(arrays: Arrays, client: int, round: int) -> Arrays:
    """Training of a kind: a step towards numbers of the client's own."""
    draw = np.random.default_rng([client, round])
    moved = {name: array for name, array in arrays.items() if array.dtype.kind != "f"}
    for name, array in arrays.items():
        if name not in moved:
            moved[name] = (0.7 * array + 0.3 * abs(draw.normal(size=array.shape))).astype(array.dtype)
    return {name: moved[name] for name in arrays}


def read(record: Any) -> Arrays:
    """The arrays of a record."""
    return {name: array.numpy() for name, array in record.items()}


def record_of(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """The record of arrays, as Flower makes it."""
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def app_of(
    train: Train = drift,
    mods: Any = (personalize,),
    samples: Callable[[int], int] = lambda client: 10 + client,
    train_mods: Any = None,
    loss: Callable[[Arrays, int], float] | None = None,
) -> Any:
    """A client app with the train function around it that Flower's quickstart has. `seen`: the arrays it evaluated, by client.

    loss: (arrays, client) -> the loss that its evaluate function reports.
    """
    app = ClientApp(mods=list(mods))
    seen: dict[int, Arrays] = {}

    @app.train(mods=train_mods)
    def _train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])  # type: ignore[arg-type]
        arrays = train(read(message.content["arrays"]), client, int(message.content["config"]["server-round"]))  # type: ignore
        content = RecordDict(
            {"arrays": record_of(arrays), "metrics": MetricRecord({"num-examples": samples(client), "loss": 1.0})}
        )
        return Message(content, reply_to=message)

    @app.evaluate()
    def _evaluate(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])  # type: ignore[arg-type]
        seen[client] = read(message.content["arrays"])
        metrics = MetricRecord({"num-examples": 5, "accuracy": 0.5})
        if loss is not None:
            metrics["eval_loss"] = loss(seen[client], client)
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    app.seen = seen  # type: ignore[attr-defined]
    return app


def grid_of(
    app: Any, clients: int = 4, node_configs: Mapping[int, Mapping[str, Scalar]] | None = None
) -> InProcessGrid:
    """A grid whose nodes, numbered from 1, run the app in this process."""
    return InProcessGrid(app, {}, clients, node_configs)
