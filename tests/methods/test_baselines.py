"""FedProx, FedPer, FedRep, FedBN, LG-FedAvg, Ditto and pFedMe: by hand, at their limits, on the wire and in whole runs."""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

import client_app.client
from client_app.client_app import app
from client_app.stored_state import StateStore, StoredState
from fl_app import models, server_app, weights
from fl_app.config import RunConfig, parse
from fl_app.layout import Layout, Model
from fl_app.server.run_folder import read_metrics
from fl_app.transport import exchange, wire
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS, METHODS
from tests.conftest import flat
from tests.facts import each_mentions
from tests.small_models import BATCHNORM, GROUP

BASELINES = ("fedprox", "fedper", "fedrep", "fedbn", "lg-fedavg", "ditto", "pfedme")
SETTING: dict[str, Any] = {
    "num-clients": 4,
    "num-server-rounds": 2,
    "local-epochs": 1,
    "train-samples": 30,
    "test-samples": 10,
    "device": "cpu",
    "batch-size": 10,
    "momentum": 0.5,
    "checkpoint-every": 9,
    "pfedme.inner-steps": 2,
    "model": "mlp",
}
# 21: the last sample joins the second batch
RESNET = {"model": "resnet8", "num-clients": 3, "train-samples": 21}
SMALL = {**RESNET, **BATCHNORM}


# Whole runs in one process ---------------------------------------------------------------------------------------------


@dataclass
class Recorder:
    """Builds InProcessGrids that keep, of every message and reply, all bytes of its arrays and scalars, and its arrays."""

    sent: list[tuple[bytes, list[bytes]]] = field(default_factory=list)
    returned: list[tuple[bytes, list[bytes]]] = field(default_factory=list)

    def grid(self, raw: dict[str, Any]) -> InProcessGrid:
        recorder = self

        class Grid(InProcessGrid):
            def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
                messages = list(messages)
                recorder.sent += map(recorder.read, messages)
                return super().push_messages(messages)

            def _handle(self, message: Message) -> Message:
                reply = super()._handle(message)
                recorder.returned.append(recorder.read(reply))
                return reply

        return Grid(app, raw, raw["num-clients"])

    @staticmethod
    def read(message: Message) -> tuple[bytes, list[bytes]]:
        content = message.content
        arrays = [array.data for record in content.array_records.values() for array in record.values() if array.data]
        scalars = [*content.config_records.items(), *content.metric_records.items()]
        return b"".join(arrays) + repr(scalars).encode(), arrays


@dataclass
class FinishedRun:
    path: Path
    rounds: list[dict[str, Any]]
    config: RunConfig
    recorded: Recorder

    @property
    def evaluation(self) -> dict[str, Any]:
        return self.rounds[-1]["evaluation"]

    @property
    def hashes(self) -> dict[str, str]:
        return {client: row["sha256"] for client, row in self.evaluation["clients"].items()}

    @property
    def global_model(self) -> bytes:
        return (self.path / "models" / "global.safetensors").read_bytes()

    @property
    def experiment(self) -> str:
        return json.loads((self.path / "summary.json").read_text())["experiment"]

    def state(self, client_id: int, round: int) -> dict[str, np.ndarray]:
        store = StateStore(Path(self.config.state_dir), self.experiment, client_id)
        (generation,) = store.directory.glob(f"{round:06d}-*")  # one attempt
        return dict(store.load(generation.stem).arrays)

    def numbers(self) -> list[dict[str, Any]]:
        """Everything recorded but the time it took."""

        def timeless(value: Any) -> Any:
            if isinstance(value, dict):
                return {k: timeless(v) for k, v in value.items() if k != "seconds"}
            return value

        return [timeless(r) for r in self.rounds]


@pytest.fixture
def run(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    # nothing to wait for in one process
    monkeypatch.setattr(exchange, "POLL_SECONDS", 0)
    counter = iter(range(100))

    def start(method: str, **changes: Any) -> FinishedRun:
        raw = {**SETTING, **flat(changes), "method": method}
        raw |= {"data-dir": str(data_dir), "state-dir": str(tmp_path / "state"), "keep-state": True}
        raw |= {"output-dir": str(tmp_path / f"run{next(counter)}")}
        config, recorded = parse(raw, METHOD_PARAMS), Recorder()
        folder = server_app.run(recorded.grid(raw), config, lambda *_: None)
        rounds = list(read_metrics(folder.path))
        assert not any(r["failures"] for r in rounds) and not rounds[-1]["evaluation"]["failures"]
        assert rounds[-1]["evaluation"]["absent"] == []
        return FinishedRun(folder.path, rounds, config, recorded)

    return start


class MemoryStore:
    """StateStore that keeps generations in memory, as they were left: nothing is written or read."""

    generations: dict[tuple[str, int, str], dict[str, np.ndarray]] = {}

    def __init__(self, root: Path, experiment: str, client_id: int, noisy: bool) -> None:
        self.key, self.directory = (experiment, client_id), root

    def load(self, version: str) -> StoredState:
        return StoredState(dict(self.generations[(*self.key, version)]) if version else {}, version)

    def save(self, state: StoredState, round: int, attempt: int) -> str:
        if not state.arrays:
            return ""
        version = wire.state_version(round, attempt)
        self.generations[(*self.key, version)] = dict(state.arrays)
        return version

    def delete_before(self, version: str, keep: Collection[str]) -> None:
        pass


@pytest.fixture
def warnings_logged() -> Iterator[list[str]]:
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # models of so little training may well answer one class
            if "predicts the same class" not in record.getMessage():
                messages.append(record.getMessage())

    handler, log = Collect(logging.WARNING), logging.getLogger("corolla")
    log.addHandler(handler)
    yield messages
    log.removeHandler(handler)


def layout_of(config: RunConfig) -> tuple[Layout, Model]:
    module = models.build(config.model, in_channels=1, num_classes=10, image_size=8, norm=config.norm, seed=config.seed)
    return Layout.of(module), weights.read(module)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(
    "model", [pytest.param({}, id="mlp"), pytest.param(RESNET, id="resnet8", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("method", BASELINES)
def test_a_run_does_not_depend_on_whether_state_was_reloaded_and_can_be_repeated(
    run: Any, monkeypatch: pytest.MonkeyPatch, method: str, model: dict[str, Any], fraction: float
) -> None:
    first = run(method, fraction_train=fraction, **model)
    layout, _ = layout_of(first.config)
    travelling = layout.subset(METHODS[method].shared(layout, first.config.params))
    taking_part = round(first.config.num_clients * fraction + 0.01)
    for record in first.rounds:
        assert len(record["clients"]) == taking_part
        assert record["upload-bytes"] == record["download-bytes"] == 4 * (travelling.d + travelling.b) * taking_part
    personal = method != "fedprox" and (method, first.config.model) != ("fedbn", "mlp")
    assert (len(set(first.hashes.values())) > 1) == personal

    monkeypatch.setattr(client_app.client, "StateStore", MemoryStore)
    again = run(method, fraction_train=fraction, **model)
    assert again.hashes == first.hashes
    assert again.numbers() == first.numbers()


# What stays local is not on the wire -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("fedper", {}),
        ("fedrep", {}),
        ("lg-fedavg", {}),
        ("fedrep", SMALL),
        ("lg-fedavg", SMALL),
        ("fedbn", SMALL),
    ],
    ids=lambda value: value if isinstance(value, str) else "batchnorm" if value else "mlp",
)
def test_what_stays_local_is_absent_from_the_messages(run: Any, method: str, model: dict[str, Any]) -> None:
    result = run(method, **model)
    layout, initial = layout_of(result.config)
    shared = METHODS[method].shared(layout, result.config.params)
    local = layout.names - shared
    body = layout.names - layout.classifier
    assert local == {"fedbn": layout.batchnorm & layout.names, "lg-fedavg": body}.get(method, layout.classifier)
    travelling, kept = layout.subset(shared), layout.subset(local)

    n = result.config.num_clients
    down = [arrays for _, arrays in result.recorded.sent if arrays]
    up = [arrays for _, arrays in result.recorded.returned if arrays]
    # two rounds of training; evaluation returns no arrays
    assert len(down) == 3 * n and len(up) == 2 * n
    sizes = [(size,) for size in (travelling.d, travelling.b) if size]
    for arrays in down + up:
        decoded = [np.load(io.BytesIO(a)) for a in arrays]
        assert [(a.shape, a.dtype) for a in decoded] == [(s, np.dtype("float32")) for s in sizes]

    everything = b"".join(contents for contents, _ in result.recorded.sent + result.recorded.returned)
    secrets = {f"initial {k}": v for k, v in kept.tensors(layout.take(initial, local)).items() if np.ptp(v) > 0}
    for client_id in range(n):
        for round in (1, 2):
            state = result.state(client_id, round)
            tensors = kept.tensors(Model(state["local.params"], state["local.buffers"]))
            secrets |= {f"client {client_id} round {round} {name}": value for name, value in tensors.items()}
    assert len(secrets) >= 2 * n * len(local)
    for name, value in secrets.items():
        assert value.tobytes() not in everything, name
    # the search finds what does travel
    sent = travelling.tensors(layout.take(initial, shared))
    assert all(value.tobytes() in everything for value in sent.values())


# Limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [{}, SMALL], ids=["mlp", "batchnorm"])
def test_fedprox_without_its_term_is_fedavg_bit_for_bit(run: Any, model: dict[str, Any]) -> None:
    plain, zero, some = run("fedavg", **model), run("fedprox", fedprox={"mu": 0}, **model), run("fedprox", **model)
    assert zero.numbers() == plain.numbers()
    assert zero.global_model == plain.global_model != some.global_model


@pytest.mark.parametrize("model", [{}, SMALL], ids=["mlp", "batchnorm"])
def test_dittos_global_half_is_fedavg_bit_for_bit(run: Any, model: dict[str, Any]) -> None:
    setting = {**model, "num_server_rounds": 3, "fraction_train": 0.7}
    plain, ditto = run("fedavg", **setting), run("ditto", ditto={"personal_epochs": 2}, **setting)
    # parameters and BatchNorm statistics
    assert ditto.global_model == plain.global_model
    assert [list(r["clients"]) for r in ditto.rounds] == [list(r["clients"]) for r in plain.rounds]
    assert ditto.rounds[0]["accuracy-before"] == plain.rounds[0]["accuracy-before"]  # no personal model yet
    for client_id, digest in ditto.hashes.items():
        took_part = any(client_id in r["clients"] for r in ditto.rounds)
        assert (digest != plain.hashes[client_id]) == took_part


@pytest.mark.parametrize("model", [{}, {**SMALL, **GROUP}], ids=["mlp", "group"])
def test_fedbn_without_batchnorm_warns_and_is_fedavg(
    run: Any, warnings_logged: list[str], model: dict[str, Any]
) -> None:
    plain, result = run("fedavg", **model), run("fedbn", **model)
    assert result.numbers() == plain.numbers() and result.global_model == plain.global_model
    assert each_mentions(
        warnings_logged, ("fedbn", f"model {result.config.model} has no", "BatchNorm layer", "run is FedAvg")
    )


def test_fedbn_with_batchnorm_does_not_warn_and_keeps_it_personal(run: Any, warnings_logged: list[str]) -> None:
    result = run("fedbn", **SMALL)
    assert not warnings_logged and len(set(result.hashes.values())) == result.config.num_clients


@pytest.mark.parametrize("method", ["ditto", "pfedme"])
def test_the_second_model_is_evaluated_once_there_is_one(run: Any, method: str) -> None:
    result = run(method, num_server_rounds=1, fraction_train=0.5)
    took_part = set(result.rounds[0]["clients"])
    absent = set(result.hashes) - took_part
    assert len(took_part) == len(absent) == 2
    assert len({result.hashes[i] for i in absent}) == 1  # the global model
    for i in took_part:
        own = result.state(int(i), 1)["personal.params"]
        assert result.hashes[i] == hashlib.sha256(own.tobytes()).hexdigest()
        assert result.rounds[0]["clients"][i]["accuracy-after"] == result.evaluation["clients"][i]["accuracy"]


def test_pfedme_warns_once_of_steps_that_overshoot(run: Any, warnings_logged: list[str]) -> None:
    run("pfedme", momentum=0.0)
    assert not warnings_logged
    run("pfedme", momentum=0.5, pfedme={"inner_learning_rate": 0.15})
    assert each_mentions(
        [m.split(" = ")[0] for m in warnings_logged],
        ("pfedme: inner-learning-rate * proximal-weight",),
        ("momentum 0.5 is not", "inner steps", "gradient steps"),
    )


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedpake"])
def test_statistics_may_stay_on_the_client(run: Any, method: str) -> None:
    done = run(method, **SMALL, **{method: {"batchnorm_statistics": "local"}})
    layout = Layout.of(models.build(BATCHNORM["model"], in_channels=1, num_classes=10, image_size=8))
    assert {row["upload-bytes"] for r in done.rounds for row in r["clients"].values()} == {4 * layout.d}
    kept = [done.state(i, 2)["local.buffers"] for i in range(3)]
    assert all(k.size == layout.b for k in kept) and not np.array_equal(kept[0], kept[1])
