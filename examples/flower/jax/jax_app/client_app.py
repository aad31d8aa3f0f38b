"""The client: Flower's quickstart, with the mod `personalize` in its first line."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from jax import numpy as jnp

from corolla.flower import personalize
from jax_app.task import Params, load_data, test, train

app = ClientApp(mods=[personalize])


@app.train()
def train_model(message: Message, context: Context) -> Message:
    """Train the model of the message on this client's data."""
    x, y, _, _ = load_data(*place(context))
    config = context.run_config
    params, loss = train(
        received(message), x, y, int(config["local-epochs"]), int(config["batch-size"]), float(config["learning-rate"])
    )
    arrays = ArrayRecord({name: Array(np.asarray(array)) for name, array in params.items()})
    metrics = MetricRecord({"train-loss": loss, "num-examples": len(y)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate_model(message: Message, context: Context) -> Message:
    """Evaluate the model of the message on this client's data."""
    _, _, x, y = load_data(*place(context))
    metrics = MetricRecord({"accuracy": test(received(message), x, y), "num-examples": len(y)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def received(message: Message) -> Params:
    """Return the model of a message."""
    return {name: jnp.asarray(array.numpy()) for name, array in message.content["arrays"].items()}


def place(context: Context) -> tuple[int, int]:
    """Return this client's number, and the number of clients."""
    return int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
