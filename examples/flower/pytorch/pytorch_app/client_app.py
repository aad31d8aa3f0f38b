"""The client: Flower's quickstart, with the mod `personalize` in its first line."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from corolla.flower import personalize
from pytorch_app.task import Net, load_data, test, train

app = ClientApp(mods=[personalize])


@app.train()
def train_model(message: Message, context: Context) -> Message:
    """Train the model of the message on this client's data."""
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data, _ = load_data(*place(context))
    loss = train(net, data, int(context.run_config["local-epochs"]), message.content["config"]["lr"])
    metrics = MetricRecord({"train-loss": loss, "num-examples": len(data.dataset)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate_model(message: Message, context: Context) -> Message:
    """Evaluate the model of the message on this client's data."""
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    _, data = load_data(*place(context))
    loss, accuracy = test(net, data)
    metrics = MetricRecord({"accuracy": accuracy, "eval_loss": loss, "num-examples": len(data.dataset)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def place(context: Context) -> tuple[int, int, int]:
    """Return this client's number, the number of clients, and the batch size."""
    node = context.node_config
    return int(node["partition-id"]), int(node["num-partitions"]), int(context.run_config["batch-size"])
