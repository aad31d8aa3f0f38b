"""Clients that lie within the format, in whole runs in one process (benchmarks/attacks.py): who is named, and who is not."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import client_app.client
from benchmarks import attacks, honest, poisoning
from benchmarks.attacks import ATTACKS, Scene
from benchmarks.poisoning import Outcome, Trial
from corolla.report.arrays import read_run
from corolla.report.csv_files import round_lines
from corolla.report.tables import warnings as results_warnings
from fl_app.config import parse
from fl_app.errors import UserError
from fl_app.layout import Model
from fl_app.server.run_folder import RunFolder, read_metrics, read_summary
from fl_app.transport import wire
from fl_app.transport.wire import Upload
from strategies import METHOD_PARAMS, METHODS
from strategies.base import Uploads
from strategies.baselines.fedas import INFORMATION
from strategies.kernels import masks
from strategies.kernels.averages import RULES
from tests.conftest import IN_TWO_ROUNDS, Run, flat, flat_layout
from tests.facts import each_mentions, mentions
from tests.methods.federation import Federation

Attacked = Callable[..., RunFolder]

CLIENTS = 5
LIAR = CLIENTS - 1


@pytest.fixture
def attacked(run: Run, raw_config: dict[str, Any]) -> Attacked:
    """Run with five clients of which the last one lies, and with the bound unless another is given."""

    def start(attack: str, **changes: Any) -> RunFolder:
        changes = {"max_update_norm": 3.0, **changes}
        config = parse({**raw_config, "num-clients": CLIENTS, **flat(changes)}, METHOD_PARAMS)
        return run(app=attacks.client_app(ATTACKS[attack], 1, config), num_clients=CLIENTS, **changes)

    return start


def failures(folder: RunFolder) -> list[tuple[int, int, str]]:
    return [(r["round"], f["client"], f["cause"]) for r in read_metrics(folder.path) for f in r["failures"]]


# who is named


@pytest.mark.parametrize(("method", "attack"), [("fedavg", "x 1e6"), ("fedcac", "w -> -w"), ("feddac", "noise")])
def test_the_liar_is_dropped_by_name_and_nobody_else(attacked: Attacked, method: str, attack: str) -> None:
    folder = attacked(attack, method=method)
    assert [(r, client) for r, client, _ in failures(folder)] == [(1, LIAR), (2, LIAR)]
    assert all(
        "parameters lie" in cause and mentions(cause, "allowed are 3 times", "max-update-norm")
        for *_, cause in failures(folder)
    )
    last = list(read_metrics(folder.path))[-1]
    assert list(last["clients"]) == ["0", "1", "2", "3"]
    assert last["evaluation"]["absent"] == [] and read_summary(folder.path)["digest"]


def test_a_dropped_liar_leaves_no_trace_in_the_others(
    run: Run, attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hashes(folder: RunFolder) -> list[str]:
        clients = list(read_metrics(folder.path))[-1]["evaluation"]["clients"]
        return [clients[str(i)]["sha256"] for i in range(LIAR)]

    dropped = hashes(attacked("x 1e6", method="fedcac", run_name="dropped"))
    original = client_app.client.CorollaClient._train

    def train(self: Any, download: Any) -> wire.Upload:
        if self.client_id == LIAR:
            raise RuntimeError("absent")
        return original(self, download)

    monkeypatch.setattr(client_app.client.CorollaClient, "_train", train)
    assert dropped == hashes(run(method="fedcac", num_clients=CLIENTS, run_name="absent"))


def test_without_the_bound_the_error_names_the_liar_and_not_its_victims_alone(attacked: Attacked) -> None:
    with pytest.raises(UserError) as info:
        attacked("x 1e6", max_update_norm=0.0, local_epochs=5)
    text = str(info.value)
    assert mentions(text, "round 2", "2 attempts") and mentions(text, "model it", "sent", "loss")
    assert mentions(text, "models came", "round 1", f"where client {LIAR}", "parameters lie")
    assert mentions(text, "likely cause", "max-update-norm = 3 drops such", "uploads")


def test_by_default_it_is_used_counted_and_named(
    run: Run,
    attacked: Attacked,
    raw_config: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert parse(raw_config, METHOD_PARAMS).max_update_norm == 0
    monkeypatch.setattr(logging.getLogger("corolla"), "propagate", True)
    caplog.set_level(logging.INFO, "corolla")
    folder = attacked("-5 x update", max_update_norm=0.0)
    summary, rounds = read_summary(folder.path), list(read_metrics(folder.path))
    assert summary["failures"] == 0 and summary["far-uploads"] == sum(len(record["far"]) for record in rounds) == 2
    for record in rounds:
        assert list(record["clients"]) == [str(i) for i in range(CLIENTS)]
        ((client, cause),) = [(far["client"], far["cause"]) for far in record["far"]]
        assert client == LIAR and cause.startswith("its parameters lie ") and cause.endswith("as is usual")
    assert mentions(caplog.text, "round 1", f"client {LIAR}", "(max-update-norm is 0)", "parameters lie")
    assert mentions(caplog.text, "1 far", "others")
    table = results_warnings([read_run(folder.path)])
    assert mentions(table, "far uploads", "(max-update-norm = 0)", f"2 uploads of client {LIAR}")
    assert round_lines(read_run(folder.path))[0]["far-uploads"] == 1
    honest = run(num_clients=CLIENTS, run_name="honest")
    assert read_summary(honest.path)["far-uploads"] == 0 and "far" not in next(iter(read_metrics(honest.path)))


@pytest.mark.parametrize(("method", "rule"), [*(("fedavg", rule) for rule in sorted(RULES)), ("fedcac", "median")])
def test_a_robust_mean_alone_bears_with_a_liar(attacked: Attacked, method: str, rule: str) -> None:
    folder = attacked("x 1e6", method=method, robust=rule, max_update_norm=0.0, fedcac={"beta": 1})
    clients = list(read_metrics(folder.path))[-1]["evaluation"]["clients"]
    assert all(clients[str(i)]["loss"] < 50 for i in range(LIAR))
    # FedCAC leaves it with its own model
    assert {client for _, client, _ in failures(folder)} <= {LIAR}


# who is not


@pytest.mark.parametrize("method", ["fedavg", "fedcac", "fedselect", "pfedme"])
def test_nobody_lying_nothing_changes(run: Run, method: str) -> None:
    folders = [
        run(method=method, num_clients=CLIENTS, run_name=f"{k}", **own)
        for k, own in enumerate(({}, {"max_update_norm": 3.0}, {"max_size_weight": 3.0}))
    ]
    assert not any(failures(folder) for folder in folders)
    assert len({read_summary(folder.path)["digest"] for folder in folders}) == 1


def test_a_resumed_run_drops_the_same(attacked: Attacked, tmp_path: Path) -> None:
    """What was seen of distances is in checkpoints."""
    whole = attacked("-5 x update", num_server_rounds=3, run_name="whole")
    attacked("-5 x update", num_server_rounds=1, run_name="part")
    again = attacked("-5 x update", num_server_rounds=3, resume=str(tmp_path / "runs" / "part"), run_name="part")
    assert failures(again) == failures(whole)
    assert read_summary(again.path)["digest"] == read_summary(whole.path)["digest"]


# what is refused


@pytest.mark.parametrize(
    ("method", "rule", "says"),
    [
        ("feddac", "median", "method feddac has no mean over clients that it could replace, got 'median'"),
        ("local", "krum", "method local has no mean over clients that it could replace, got 'krum'"),
        ("fedpake", "median", "method fedpake has no mean over clients"),
        ("fedamp", "median", "method fedamp has no mean over clients"),
        ("pfedfda", "median", "method pfedfda can do none, geometric-median, krum, got 'median'"),
    ],
)
def test_rules_that_make_no_sense_are_refused_before_anything_starts(
    run: Run, method: str, rule: str, says: str
) -> None:
    with pytest.raises(UserError, match=f"robust: {says}"):
        run(method=method, robust=rule)


def test_every_method_says_what_it_can_do() -> None:
    able = {name for name, method in METHODS.items() if method.strategy.means.rules}
    assert set(METHODS) - able == {
        "local",
        "feddac",
        "fedpake",
        "fedamp",
        "fedselect",
        "feddwa",
        "fedfomo",
        "cfl",
        "perfedmask",
        "feddyn",
        "scaffold",
        "fedproto",
        "apple",
        "fedpac",
        "heterofl",
        "pfedhn",
        "pfedla",
        "pfedsim",
        "fedma",
    }
    assert all(method.strategy.means.rules <= RULES for method in METHODS.values())


# one of each place where a mean is taken; the others by night
DAILY = ("fedavg", "fedcac", "fedper", "ifca", "ditto", "perfedavg", "fedgen", "pfedfda", "fedobp")


@pytest.mark.parametrize(
    "method",
    [
        name if name in DAILY else pytest.param(name, marks=pytest.mark.nightly)
        for name, method in METHODS.items()
        if method.strategy.means.rules
    ],
)
def test_every_method_does_what_it_says(run: Run, method: str) -> None:
    setting: dict[str, Any] = {"method": method, "num_clients": 5, "train_samples": 10, **IN_TWO_ROUNDS.get(method, {})}
    # clusters of one or two are averaged plainly
    if method in ("ifca", "fedconcat"):
        setting[method] = {"clusters": 1}
    digests = {read_summary(run(robust=rule, run_name=rule, **setting).path)["digest"] for rule in ("none", "krum")}
    assert None not in digests and len(digests) == 2


# the pieces


def test_attacks_by_hand() -> None:
    layout = flat_layout([4])
    sent, trained = np.zeros(layout.d, np.float32), np.array([1, 2, 0, -1], np.float32)
    nothing = np.zeros(0, np.float32)

    def upload(*ones: int) -> wire.Upload:
        return wire.Upload(Model(trained, nothing), mask=masks.pack(np.isin(np.arange(4), ones)), num_examples=1)

    others = [upload(2, 3), upload(1, 3)]
    own = dataclasses.replace(upload(0, 1), extras={"counts": np.arange(10), "other": np.arange(4)})
    scene = attacks.Scene(Model(sent, nothing), own, others, 1, np.random.default_rng(0), [sent, sent])
    lies = {name: attack(scene) for name, attack in ATTACKS.items()}
    assert lies["x 1e6"].model.params.tolist() == [1e6, 2e6, 0, -1e6]
    assert lies["w -> -w"].model.params.tolist() == [-1, -2, 0, 1]
    assert lies["-5 x update"].model.params.tolist() == lies["crafted mask"].model.params.tolist() == [-5, -10, 0, 5]
    ones = {
        name: np.flatnonzero(masks.unpack(lie.mask, 4)).tolist() for name, lie in lies.items() if lie.mask is not None
    }
    assert (ones["crafted mask"], ones["copied mask"], ones["changing mask"]) == ([1, 3], [2, 3], [1, 3])
    assert ones["sybils"] == [2, 3] and np.abs(lies["sybils"].model.params - trained).max() < 0.5
    shifted = lies["shifted classes"].extras
    assert (shifted["counts"][:3].tolist(), shifted["other"].tolist()) == ([9, 0, 1], [0, 1, 2, 3])
    assert all(lie.model.params.dtype == np.float32 for lie in lies.values())


def test_the_adaptive_liar_is_not_caught() -> None:
    trial = Trial("fedavg", "adaptive", 1, "bound")
    assert poisoning.outcome(trial, clients=5, rounds=1).byzantine_dropped == 0


def test_the_table_by_hand() -> None:
    trials = [Trial("feddac", "x 1e6", 1, name) for name in poisoning.defences("feddac")]
    outcomes = dict(zip(trials, (Outcome(None), Outcome(0.8754, 2, 15, 0.5)), strict=True))
    assert each_mentions(
        poisoning.outcomes_table("feddac", outcomes).splitlines(),
        ("| `feddac`", "bound |"),
        ("|---|---|---|---|",),
        ("| x 1e6 | 1", "875", "dropped: 2"),
    )
    assert ".875, lowest .500 (" in poisoning.outcomes_table("feddac", outcomes, lowest=True)


def test_attacks_on_arrays_need_them() -> None:
    found = {method: {trial.attack for trial in poisoning.trials(method)} for method in ("fedavg", "fedcac", "fedgen")}
    assert found["fedcac"] - found["fedavg"] == attacks.WITH_MASKS and found["fedgen"] - found["fedavg"] == (
        attacks.WITH_CLASSES
    )


def test_honest_uploads_are_counted_over_settings() -> None:
    names = [name for name, _ in honest.settings(1)]
    assert len(names) == len(set(names)) == 12 and names[0] == "iid, all, sgd"
    plain = {"num-server-rounds": 2, "evaluate-every": 0, "fraction-train": 0.5}
    found = honest.measure("fedavg", {**plain, "train-samples": 24, "test-samples": 8})
    assert found == honest.Measured(uploads=10)
    refused = honest.measure("scaffold", {**plain, "optimizer": "adamw"})
    assert refused.uploads == 0 and mentions(refused.refused, "optimizer", "sgd for scaffold")


def test_what_lies_far_is_printed_with_its_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    far = honest.Measured(40, ("round 1, client 3: its parameters lie 4 times as far from the others' as is usual",))
    monkeypatch.setattr(
        honest, "measure", lambda method, own: far if own["optimizer"] == "adamw" else honest.Measured(40)
    )
    honest.main(["fedavg"])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "fedavg: 6 of 480" and said[-1] == "all: 6 of 480" and len(said) == 8
    assert mentions(said[1], "adamw", "round 1", "client 3", "parameters lie 4 times")


# Clients whose model is honest and whose other arrays and numbers are not: who lies is dropped by name, in every round


def array(name: str, lie: Callable[[np.ndarray], np.ndarray]) -> Callable[[Scene], Upload]:
    def attack(scene: Scene) -> Upload:
        told = scene.honest.extras[name]
        return dataclasses.replace(scene.honest, extras={**scene.honest.extras, name: lie(told).astype(told.dtype)})

    return attack


def number(name: str, value: object) -> Callable[[Scene], Upload]:
    return lambda scene: dataclasses.replace(scene.honest, metrics={**scene.honest.metrics, name: value})


LIES: dict[str, tuple[dict[str, Any], Callable[[Scene], Upload], str]] = {
    "feddac guidance": (
        {"feddac": {"guidance": "one-step"}},
        array("guidance", lambda g: g * 100),
        "its guidance models lie",
    ),
    "feddwa guidance": ({}, array("guidance", lambda g: -g), "its guidance models lie"),
    "pfedfda means": ({}, array("means", lambda m: m * 1000), "its class means lie"),
    "pfedfda covariance": ({}, array("covariance", lambda c: c * 1000), "its covariances lie"),
    "fedproto prototypes": ({}, array("prototypes", lambda p: p * 1000), "its prototypes lie"),
    "fedpac prototypes": ({}, array("prototypes", lambda p: -100 * p), "its prototypes lie"),
    "fedgen counts": ({}, array("class-counts", lambda c: c * 1000), "must be >= 0 and sum to num_examples 24"),
    "fedobp counts": ({}, array("personal-parameters", lambda c: c + 10**9), "a tensor of"),
    "ifca cluster": ({}, array("cluster", lambda c: c + 100), "must be in 0..3, got 10"),
    "scaffold few steps": ({}, number("steps", 1), "steps must be an integer in 3..3 for 24 samples, got 1"),
    "scaffold many steps": ({}, number("steps", 10**6), "got 1000000"),
    "fedas negative": ({}, number(INFORMATION, -1.0), "must be a number"),
}


@pytest.mark.parametrize("lie", list(LIES))
def test_a_liar_is_dropped_by_name_and_nobody_else(run: Run, raw_config: dict[str, Any], lie: str) -> None:
    changes, attack, says = LIES[lie]
    own = {"method": lie.split()[0], "num_clients": CLIENTS, "max_update_norm": 3.0, **changes}
    app = attacks.client_app(attack, 1, parse(raw_config | flat(own), METHOD_PARAMS))
    folder = run(app=app, **own)
    dropped = [failure for record in read_metrics(folder.path) for failure in record["failures"]]
    assert [failure["client"] for failure in dropped] == [LIAR, LIAR]
    assert all(says in failure["cause"] for failure in dropped), dropped


def test_every_model_beside_the_model_is_compared() -> None:
    """Or does not meet a mean over clients: FedFomo's scores choose only what their own client is sent.

    Only a class's prototypes that the client has are compared.
    """
    compared = {name for name, method in METHODS.items() if method.strategy.outliers.extras}
    assert compared == {"feddac", "feddwa", "fedconcat", "fedpac", "fedproto", "pfedfda"}


def test_information_counts_as_far_as_samples_may(tmp_path: Path) -> None:
    """The weight of FedAS is a client's own word: `max-size-weight` bounds it."""
    means = []
    for bound in (0.0, 3.0):
        f = Federation(tmp_path / f"{bound}", "fedas", max_size_weight=bound)
        d, b = f.server.layout.d, f.server.layout.b
        W = np.repeat(np.array([[0], [0], [1]], np.float32), d, axis=1)
        metrics = [{INFORMATION: value} for value in (1.0, 1.0, 1e30)]
        f.server.personalize(1, Uploads([0, 1, 2], W, np.zeros((3, b), np.float32), np.ones(3), None, {}, metrics))
        model: Model = f.server.global_model
        means.append(float(model.params[0]))
    assert means == pytest.approx([1, 3 / 5])
