"""The client, with the mod `personalize` in its first line."""

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.linear_model import SGDClassifier

from corolla.flower import personalize
from sklearn_app.task import load_data, model

app = ClientApp(mods=[personalize])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the model of the message on this client's data."""
    classifier = received(message)
    x, y, _, _ = load_data(*place(context))
    for _ in range(int(context.run_config["local-epochs"])):
        classifier.partial_fit(x, y)
    arrays = ArrayRecord({"coef": Array(classifier.coef_), "intercept": Array(classifier.intercept_)})
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": len(y)})}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the model of the message on this client's data."""
    _, _, x, y = load_data(*place(context))
    metrics = MetricRecord({"accuracy": float(received(message).score(x, y)), "num-examples": len(y)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def received(message: Message) -> SGDClassifier:
    """Return the model of a message."""
    classifier = model()
    classifier.coef_ = message.content["arrays"]["coef"].numpy()
    classifier.intercept_ = message.content["arrays"]["intercept"].numpy()
    return classifier


def place(context: Context) -> tuple[int, int]:
    """Return this client's number, and the number of clients."""
    return int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
