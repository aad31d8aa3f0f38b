"""A Flower app in Flower's own simulation ends with the bits of Corolla's own runs, if its loop trains as theirs does."""

from __future__ import annotations

import json
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure import write_app
from corolla.experiments.launch import SimulationSuperLink
from fl_app.processes import script
from fl_app.server import checkpoint
from tests.conftest import Run, flat

CLIENTS, ROUNDS = 4, 5
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedcac": ("FedCAC", {"beta": 3}),
    "feddac": ("FedDAC", {"alpha": 4, "neighbours": 2}),
    "fedpake": ("FedPake", {"deviations": "scaled"}),
    "fedobp": ("FedOBP", {"quantile": 0.9}),
}
CONFIG = 'place = ""'
APP = """
import json
import pickle
from pathlib import Path

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

import corolla.flower
from client_app.session import Session
from client_app.trainer import LocalTrainer
from fl_app.layout import Layout

server = ServerApp()
client = ClientApp(mods=[corolla.flower.personalize])


def asked(context):
    return json.loads((Path(context.run_config["place"]) / "asked.json").read_text())


def session_of(context, method):
    said = asked(context)
    return Session.of(said["runs"][method], said["clients"], run=10**6 + list(said["runs"]).index(method))


def record(tensors):
    return ArrayRecord({name: Array(array) for name, array in tensors.items()})


@server.main()
def main(grid, context):
    said, place = asked(context), Path(context.run_config["place"])
    questions = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
    numbers = {r.metadata.src_node_id: r.content["place"]["id"] for r in grid.send_and_receive(questions)}
    for method, (name, keys) in said["methods"].items():
        session = session_of(context, method)
        module = session.network(session.opened("").client(0).info, "").module
        strategy = getattr(corolla.flower, name)(**keys)
        # clients in the order of their data, as in Corolla's own runs
        strategy.numbers = dict(numbers)
        start = record({name: tensor.numpy() for name, tensor in module.state_dict().items()})
        told = ConfigRecord({"method": method})
        strategy.start(grid, start, said["rounds"], train_config=told, evaluate_config=told)
        (place / method).write_bytes(pickle.dumps(strategy.state_dict()))
    print("NODES", [numbers[node] for node in sorted(numbers)], flush=True)


@client.query()
def which(message, context):
    place = ConfigRecord({"id": int(context.node_config["partition-id"])})
    return Message(RecordDict({"place": place}), reply_to=message)


@client.train()
def train(message, context):
    config = message.content["config"]
    number, session = int(context.node_config["partition-id"]), session_of(context, str(config["method"]))
    data = session.opened("").client(number)
    module = session.network(data.info, "").module
    layout = Layout.of(module)
    arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
    trainer = LocalTrainer(module, session.config, data, int(config["server-round"]), number)
    trained = {**arrays, **layout.tensors(trainer.train(layout.model(arrays)))}
    metrics = MetricRecord({"num-examples": data.num_train})
    return Message(RecordDict({"arrays": record(trained), "metrics": metrics}), reply_to=message)


@client.evaluate()
def evaluate(message, context):
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=message)
"""


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_four_methods_in_flower_s_simulation(run: Run, raw_config: dict[str, Any], tmp_path: Path) -> None:
    """One ServerApp runs the four strategies, one after the other, over the same nodes."""
    changes = {
        method: {
            "method": method,
            "num_clients": CLIENTS,
            "num_server_rounds": ROUNDS,
            "model": "mlp",
            "run_name": method,
        }
        | {method: keys}
        for method, (_, keys) in METHODS.items()
    }
    saved = {method: checkpoint.load_latest(run(**of).path).arrays for method, of in changes.items()}
    runs = {method: raw_config | flat(of) for method, of in changes.items()}
    asked = {"runs": runs, "clients": CLIENTS, "rounds": ROUNDS, "methods": METHODS}
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    app = tmp_path / "app"
    write_app(app, "same_bits", APP, CONFIG)
    with SimulationSuperLink() as link:
        done = subprocess.run(
            [*link.inside, script("flwr"), "run", str(app), link.name, "--stream"]
            + ["--run-config", f"place='{tmp_path}'", "--federation-config"]
            + [f"num-supernodes={CLIENTS} client-resources-num-cpus=1 client-resources-num-gpus=0.0"],
            env=link.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    assert "NODES" in done.stdout and "dropped" not in done.stdout, done.stdout + done.stderr
    for method, arrays in saved.items():
        state = pickle.loads((tmp_path / method).read_bytes())
        assert state["round"] == ROUNDS
        found = {f"global.{part}": array for part, array in state["model"].items()}
        for client_id, own in state["clients"].items():
            found |= {f"client.{client_id}.{name}": array for name, array in own.items()}
        kept = {name: array.tobytes() for name, array in arrays.items() if not name.startswith("memory.")}
        assert {name: array.tobytes() for name, array in found.items()} == kept, method
