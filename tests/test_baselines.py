"""FedProx, FedPer, FedRep, FedBN, LG-FedAvg, Ditto and pFedMe: by hand, at their limits, on the wire and in whole runs."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from torch import nn

import client_app.client
from client_app.client_app import app
from client_app.state import State, StateStore
from client_app.trainer import LocalTrainer
from fl_app import models, server_app, weights
from fl_app.config import RunConfig, parse
from fl_app.data import ClientData, DatasetInfo
from fl_app.errors import UserError
from fl_app.layout import Layout, Model
from fl_app.server import exchange
from fl_app.server.inprocess import InProcessGrid
from fl_app.server.run_folder import RunFolder, read_metrics
from strategies import METHOD_PARAMS, METHODS, pfedme
from strategies.base import RoundContext, Uploads
from tests.conftest import flat

BASELINES = ("fedprox", "fedper", "fedrep", "fedbn", "lg-fedavg", "ditto", "pfedme")
SETTING: dict[str, Any] = {
    "num-clients": 4, "num-server-rounds": 2, "local-epochs": 1, "train-samples": 30, "test-samples": 10, "device": "cpu",
    "batch-size": 10, "momentum": 0.5, "checkpoint-every": 9, "pfedme.inner-steps": 2, "model": "mlp",
}
RESNET = {"model": "resnet8", "num-clients": 3, "train-samples": 21}  # 21: the last sample joins the second batch


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
class Run:
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
    monkeypatch.setattr(exchange, "POLL_SECONDS", 0)  # nothing to wait for in one process
    counter = iter(range(100))

    def start(method: str, **changes: Any) -> Run:
        raw = {**SETTING, **flat(changes), "method": method}
        raw |= {"data-dir": str(data_dir), "state-dir": str(tmp_path / "state")}
        raw |= {"output-dir": str(tmp_path / f"run{next(counter)}")}
        config, recorded = parse(raw, METHOD_PARAMS), Recorder()
        folder = server_app.run(recorded.grid(raw), config, lambda *_: None)
        rounds = list(read_metrics(folder.path))
        assert not any(r["failures"] for r in rounds) and not rounds[-1]["evaluation"]["failures"]
        assert rounds[-1]["evaluation"]["absent"] == []
        return Run(folder.path, rounds, config, recorded)

    return start


class MemoryStore:
    """StateStore that keeps generations in memory, as they were left: nothing is written or read."""

    generations: dict[tuple[str, int, str], dict[str, np.ndarray]] = {}

    def __init__(self, root: Path, experiment: str, client_id: int) -> None:
        self.key = experiment, client_id

    def load(self, version: str) -> State:
        return State(dict(self.generations[(*self.key, version)]) if version else {}, version)

    def save(self, state: State, round: int, attempt: int) -> str:
        if not state.arrays:
            return ""
        version = f"{round:06d}-{attempt:02d}"
        self.generations[(*self.key, version)] = dict(state.arrays)
        return version

    def delete_before(self, version: str) -> None:
        pass


@pytest.fixture
def warnings_logged() -> Iterator[list[str]]:
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler, log = Collect(logging.WARNING), logging.getLogger("corolla")
    log.addHandler(handler)
    yield messages
    log.removeHandler(handler)


def layout_of(config: RunConfig) -> tuple[Layout, Model]:
    module = models.build(config.model, in_channels=1, num_classes=10, image_size=8, norm=config.norm, seed=config.seed)
    return Layout.of(module), weights.read(module)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("model", [{}, RESNET], ids=["mlp", "resnet8"])
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


@pytest.mark.parametrize("method", BASELINES)
def test_a_rerun_gives_the_same_numbers(run: Any, method: str) -> None:
    assert run(method).numbers() == run(method).numbers()


# What stays local is not on the wire -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("fedper", {}), ("fedrep", {}), ("lg-fedavg", {}), ("fedrep", RESNET), ("lg-fedavg", RESNET), ("fedbn", RESNET),
    ],
    ids=lambda value: value if isinstance(value, str) else value.get("model", "mlp"),
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
    assert len(down) == 3 * n and len(up) == 2 * n  # two rounds of training; evaluation returns no arrays
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
    sent = travelling.tensors(layout.take(initial, shared))  # the search finds what does travel
    assert all(value.tobytes() in everything for value in sent.values())


def test_a_model_that_cannot_be_split_is_refused() -> None:
    for module, words in [
        (nn.Sequential(nn.Flatten(), nn.Conv1d(1, 2, 1)), "no Linear layer"),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), "nothing below its only Linear layer"),
    ]:
        for method in ("fedper", "fedrep", "lg-fedavg"):
            with pytest.raises(UserError, match=words):
                METHODS[method].shared(Layout.of(module), METHODS[method].params())


# Limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [{}, RESNET], ids=["mlp", "resnet8"])
def test_fedprox_without_its_term_is_fedavg_bit_for_bit(run: Any, model: dict[str, Any]) -> None:
    plain, zero, some = run("fedavg", **model), run("fedprox", fedprox={"mu": 0}, **model), run("fedprox", **model)
    assert zero.numbers() == plain.numbers()
    assert zero.global_model == plain.global_model != some.global_model


@pytest.mark.parametrize("model", [{}, RESNET], ids=["mlp", "resnet8"])
def test_dittos_global_half_is_fedavg_bit_for_bit(run: Any, model: dict[str, Any]) -> None:
    setting = {**model, "num_server_rounds": 3, "fraction_train": 0.7}
    plain, ditto = run("fedavg", **setting), run("ditto", ditto={"personal_epochs": 2}, **setting)
    assert ditto.global_model == plain.global_model  # parameters and BatchNorm statistics
    assert [list(r["clients"]) for r in ditto.rounds] == [list(r["clients"]) for r in plain.rounds]
    assert ditto.rounds[0]["accuracy-before"] == plain.rounds[0]["accuracy-before"]  # no personal model yet
    for client_id, digest in ditto.hashes.items():
        took_part = any(client_id in r["clients"] for r in ditto.rounds)
        assert (digest != plain.hashes[client_id]) == took_part


@pytest.mark.parametrize("model", [{}, {**RESNET, "norm": "group"}], ids=["mlp", "group"])
def test_fedbn_without_batchnorm_warns_and_is_fedavg(
    run: Any, warnings_logged: list[str], model: dict[str, Any]
) -> None:
    plain, result = run("fedavg", **model), run("fedbn", **model)
    assert result.numbers() == plain.numbers() and result.global_model == plain.global_model
    assert warnings_logged == [f"fedbn: model {result.config.model} has no BatchNorm layer, so this run is FedAvg"]


def test_fedbn_with_batchnorm_does_not_warn_and_keeps_it_personal(run: Any, warnings_logged: list[str]) -> None:
    result = run("fedbn", **RESNET)
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


# By hand --------------------------------------------------------------------------------------------------------------
#
# The model: one pixel x = 1, two classes, no bias; W = (w_0, w_1). Label 0. Softmax cross-entropy
# f(W) = log(1 + exp(w_1 - w_0)), gradient (-s, s) with s = 1 / (1 + exp(w_0 - w_1)). From W = (a, -a) every step stays of
# that form, so one number describes the model: gradient (-s(a), s(a)), s(a) = 1 / (1 + exp(2a)); s(0) = 1/2, and
# s(ln(3)/2) = 1 / (1 + 3) = 1/4. A penalty weight/2 ||W - C||^2 with C = (c, -c) adds weight (a - c) to the gradient's first
# component. With step size ln 3 a plain step from a = 0 leads to a = ln(3)/2.

LN3 = math.log(3)


def s(a: float) -> float:
    return 1 / (1 + math.exp(2 * a))


def tiny(a: float) -> Model:
    return Model(np.array([a, -a], np.float32), np.zeros(0, np.float32))


def tiny_client(
    method: str, num_samples: int, module: nn.Module | None = None, pixels: np.ndarray | None = None, **changes: Any
) -> RoundContext[Any]:
    """Context of a client whose samples are all the pixel 1 with label 0, batch size 1, one epoch."""
    raw = {"method": method, "batch-size": 1, "local-epochs": 1, "device": "cpu", "learning-rate": LN3}
    config = parse(raw | flat(changes), METHOD_PARAMS)
    if module is None:
        module = nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False))
    if pixels is None:
        pixels = np.full((num_samples, 1, 1, 1), 255, np.uint8)
    labels = np.zeros(num_samples, np.int64)
    info = DatasetInfo(1, 1, ("0", "1"), num_samples, num_samples, (0.0,), (1.0,))
    layout, initial = Layout.of(module), weights.read(module)
    trainer = LocalTrainer(module, config, ClientData(pixels, labels, pixels, labels, info), 1, 0)
    shared = METHODS[method].shared(layout, config.params) if method not in ("fedper", "lg-fedavg") else layout.names
    return RoundContext(config, config.params, 1, 0, layout, shared, lambda: initial, trainer, num_samples, {})


def close(model: Model, a: float) -> bool:
    return np.allclose(model.params, [a, -a], rtol=0, atol=2e-7)


def test_fedprox_two_steps_by_hand() -> None:
    # mu = 1/2, received a = 0. Step 1: the penalty is zero at its centre; a = 0 + ln3 * 1/2 = ln(3)/2 = 0.5493061.
    # Step 2: a = ln(3)/2 + ln3 * (1/4 - 1/2 * ln(3)/2) = 0.5493061 + 1.0986123 * (0.25 - 0.2746531) = 0.5222220.
    ctx = tiny_client("fedprox", 2, fedprox={"mu": 0.5})
    update, state = METHODS["fedprox"].local_update(), State()
    after = update.train(tiny(0), state, ctx)
    assert close(after, LN3 / 2 + LN3 * (1 / 4 - LN3 / 4))
    assert abs(float(after.params[0]) - 0.5222220) < 1e-6
    assert not state.arrays
    # the penalty does not touch its centre: one step equals FedAvg's
    assert close(update.train(tiny(0), state, tiny_client("fedprox", 1, fedprox={"mu": 0.5})), LN3 / 2)


def test_ditto_two_rounds_by_hand() -> None:
    # Round 1 receives a = 0 and has no personal model: both start at 0, one step each, the penalty is zero there:
    # a = v = ln(3)/2. Round 2 receives a = 0 again (as if the others had voted it back): the copy again steps to ln(3)/2;
    # lambda = 1/2: v = ln(3)/2 + ln3 * (s(ln(3)/2) - 1/2 * (ln(3)/2 - 0)) = 0.5222220, the centre being the RECEIVED model.
    ctx = tiny_client("ditto", 1, ditto={"proximal_weight": 0.5})
    update, state = METHODS["ditto"].local_update(), State()
    assert close(update.personal(tiny(0.25), state, ctx), 0.25)
    first = update.train(tiny(0), state, ctx)
    assert close(first, LN3 / 2) and close(update.personal(first, state, ctx), LN3 / 2)
    second = update.train(tiny(0), state, ctx)
    assert close(second, LN3 / 2)
    assert close(update.personal(second, state, ctx), LN3 / 2 + LN3 * (1 / 4 - LN3 / 4))
    assert close(update.upload(tiny(0), second, state, ctx).model, LN3 / 2)  # the copy travels, not v
    # personal-epochs = 2: a second step from there
    more = tiny_client("ditto", 1, ditto={"proximal_weight": 0.5, "personal_epochs": 2})
    kept = State({"personal.params": tiny(LN3 / 2).params, "personal.buffers": tiny(0).buffers})
    update.train(tiny(0), kept, more)
    v = LN3 / 2 + LN3 * (1 / 4 - LN3 / 4)
    assert close(Model(kept.arrays["personal.params"], tiny(0).buffers), v + LN3 * (s(v) - v / 2))


def test_pfedme_one_batch_by_hand() -> None:
    # K = 2, alpha = ln 3, lambda = 1/2, eta = 1/4; received w = 0.
    # theta_1 = 0 + ln3 * (1/2 - 1/2 * 0) = ln(3)/2; theta_2 = ln(3)/2 + ln3 * (1/4 - 1/2 * (ln(3)/2 - 0)) = 0.5222220.
    # w = 0 - eta lambda (0 - theta_2) = 1/8 * 0.5222220 = 0.0652778. The personal model is theta_2.
    ctx = tiny_client(
        "pfedme", 1, pfedme={"outer_learning_rate": 0.25, "inner_steps": 2, "inner_learning_rate": LN3, "proximal_weight": 0.5}
    )
    update, state = METHODS["pfedme"].local_update(), State()
    w = update.train(tiny(0), state, ctx)
    theta = LN3 / 2 + LN3 * (1 / 4 - LN3 / 4)
    assert close(w, theta / 8) and abs(float(w.params[0]) - 0.0652778) < 1e-6
    assert close(update.personal(w, state, ctx), theta)
    assert math.isclose(ctx.trainer.last_loss, math.log(2), rel_tol=1e-6)  # f at the received model


def test_pfedme_second_batch_goes_on_from_theta_and_the_new_w() -> None:
    # As above with two batches: theta goes on from theta_2, its centre is now w_1; then w_2 = w_1 + 1/8 * (theta_4 - w_1).
    ctx = tiny_client(
        "pfedme", 2, pfedme={"outer_learning_rate": 0.25, "inner_steps": 2, "inner_learning_rate": LN3, "proximal_weight": 0.5}
    )
    w, theta = 0.0, 0.0
    for _ in range(2):
        for _ in range(2):
            theta += LN3 * (s(theta) - 0.5 * (theta - w))
        w += 0.125 * (theta - w)
    update, state = METHODS["pfedme"].local_update(), State()
    sent = update.train(tiny(0), state, ctx)
    assert close(sent, w) and close(update.personal(sent, state, ctx), theta)
    # in the next round theta starts from what is received then, not from the one kept
    kept = {name: array.copy() for name, array in state.arrays.items()}
    update.train(tiny(0), state, ctx)
    assert all(np.array_equal(kept[name], state.arrays[name]) for name in kept)


def test_pfedme_server_steps_towards_the_unweighted_mean(tmp_path: Path) -> None:
    # w_g = (1, 2); mean of (3, 2) and (5, 6) is (4, 4), whatever the sample counts.
    # beta 1/2: (1/2 * 1 + 1/2 * 4, 1/2 * 2 + 1/2 * 4) = (2.5, 3); beta 1: (4, 4); beta 2: (-1 + 8, -2 + 8) = (7, 6).
    W = np.array([[3, 2], [5, 6]], np.float32)
    for beta, want in [(0.5, [2.5, 3]), (1.0, [4, 4]), (2.0, [7, 6])]:
        mixed = pfedme.mix(np.array([1, 2], np.float32), W, beta)
        assert mixed.dtype == np.float32 and mixed.tolist() == want
    config = parse({"method": "pfedme", "pfedme.beta": 0.5}, METHOD_PARAMS)
    layout = Layout.of(nn.Linear(1, 2, bias=False))
    received = Model(np.array([1, 2], np.float32), np.zeros(0, np.float32))
    server = pfedme.PFedMe(config, config.params, layout, received, layout.names, RunFolder(tmp_path, "x"))
    server.personalize(1, Uploads([0, 1], W, np.zeros((2, 0), np.float32), np.array([1.0, 9.0]), None, {}, [{}, {}]))
    assert server.global_model.params.tolist() == [2.5, 3]


def test_pfedme_refuses_outer_steps_that_carry_w_past_theta() -> None:
    with pytest.raises(UserError, match=r"pfedme.outer-learning-rate: times pfedme.proximal-weight \(15\) must be below 1"):
        small_client("pfedme", pfedme={"outer_learning_rate": 0.1})


def test_pfedme_warns_once_of_steps_that_overshoot(run: Any, warnings_logged: list[str]) -> None:
    run("pfedme", momentum=0.0)
    assert not warnings_logged
    run("pfedme", momentum=0.5, pfedme={"inner_learning_rate": 0.15})
    assert [m.split(" = ")[0] for m in warnings_logged] == [
        "pfedme: inner-learning-rate * proximal-weight",
        "pfedme: momentum 0.5 is not used, inner steps are plain gradient steps",
    ]


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedpake"])
def test_statistics_may_stay_on_the_client(run: Any, method: str) -> None:
    done = run(method, **RESNET, **{method: {"batchnorm_statistics": "local"}})
    layout = Layout.of(models.build("resnet8", in_channels=1, num_classes=10, image_size=8))
    assert {row["upload-bytes"] for r in done.rounds for row in r["clients"].values()} == {4 * layout.d}
    kept = [done.state(i, 2)["local.buffers"] for i in range(3)]
    assert all(k.size == layout.b for k in kept) and not np.array_equal(kept[0], kept[1])


# Phases, frozen parts ---------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """One pixel -> 3 features -> BatchNorm -> classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.feature, self.bn, self.classifier = nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.relu(self.bn(self.feature(x.flatten(1)))))


def small_client(method: str, module: nn.Module | None = None, **changes: Any) -> RoundContext[Any]:
    pixels = np.arange(0, 240, 20, dtype=np.uint8).reshape(12, 1, 1, 1)
    torch.manual_seed(0)
    changes = {"batch_size": 4, "learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.01, **changes}
    return tiny_client(method, 12, module or Small(), pixels, **changes)


def test_fedrep_trains_the_head_then_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = small_client("fedrep", local_epochs=3)
    calls: list[tuple[dict[str, Any], Model, Model]] = []
    train = ctx.trainer.train

    def record(start: Model, **how: Any) -> Model:
        after = train(start, **how)
        calls.append((how, start, after))
        return after

    monkeypatch.setattr(ctx.trainer, "train", record)
    start, state = ctx.initial(), State()
    update = METHODS["fedrep"].local_update()
    final = update.train(start, state, ctx)
    update.keep_local(final, state, ctx)
    head = frozenset({"classifier.weight", "classifier.bias"})
    body = ctx.layout.names - head
    assert ctx.local == head and {"bn.running_mean", "bn.running_var"} <= body
    assert [c[0] for c in calls] == [
        {"epochs": 2, "purpose": "train-head", "frozen": body}, {"epochs": 1, "purpose": "train-body", "frozen": head},
    ]
    with_head = ctx.layout.tensors(calls[0][2])
    before, after = ctx.layout.tensors(start), ctx.layout.tensors(final)
    for name in ctx.layout.names:  # statistics are the body's: they move in the second phase only
        assert np.array_equal(with_head[name], before[name]) == (name in body), name
        assert np.array_equal(after[name], with_head[name]) == (name in head), name
    assert np.array_equal(state.arrays["local.params"], ctx.layout.take(final, head).params)
    assert state.arrays["local.buffers"].size == 0


def test_fedrep_epochs_are_configurable() -> None:
    ctx = small_client("fedrep", local_epochs=3)
    update = METHODS["fedrep"].local_update()
    default = update.train(ctx.initial(), State(), ctx)
    same = small_client("fedrep", local_epochs=1, fedrep={"head_epochs": 2})
    other = small_client("fedrep", local_epochs=3, fedrep={"body_epochs": 2})
    assert np.array_equal(default.params, update.train(same.initial(), State(), same).params)
    assert not np.array_equal(default.params, update.train(other.initial(), State(), other).params)


def test_parameters_a_users_model_holds_fixed_stay_fixed() -> None:
    module = Small()
    module.feature.requires_grad_(False)
    for method in ("fedrep", "ditto", "pfedme"):
        ctx = small_client(method, module)
        update, state, start = METHODS[method].local_update(), State(), ctx.initial()
        for _ in range(2):
            after = update.train(start, state, ctx)
        for model in (after, update.personal(after, state, ctx)):
            tensors = ctx.layout.tensors(model)
            assert np.array_equal(tensors["feature.weight"], ctx.layout.tensors(start)["feature.weight"]), method
            assert not np.array_equal(tensors["classifier.weight"], ctx.layout.tensors(start)["classifier.weight"])


def test_a_fixed_body_under_a_frozen_head_trains_nothing() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 2))
    module[1].requires_grad_(False)
    ctx = small_client("fedrep", module)
    after = METHODS["fedrep"].local_update().train(ctx.initial(), State(), ctx)
    unchanged, start = ctx.layout.tensors(after), ctx.layout.tensors(ctx.initial())
    assert [n for n in unchanged if not np.array_equal(unchanged[n], start[n])] == ["3.weight", "3.bias"]


def test_dittos_second_model_has_its_own_batches_and_statistics_pfedmes_has_not() -> None:
    ditto = small_client("ditto", ditto={"proximal_weight": 0})  # same start, same loss: only the batches differ
    update, state = METHODS["ditto"].local_update(), State()
    sent = update.train(ditto.initial(), state, ditto)
    assert not np.array_equal(sent.params, state.arrays["personal.params"])
    assert not np.array_equal(sent.buffers, state.arrays["personal.buffers"])
    envelope = small_client("pfedme")
    update, state = METHODS["pfedme"].local_update(), State()
    sent = update.train(envelope.initial(), state, envelope)
    assert np.array_equal(sent.buffers, state.arrays["personal.buffers"])
    assert not np.array_equal(sent.params, state.arrays["personal.params"])
