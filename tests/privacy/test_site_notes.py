"""What a site has noted for good stays, whatever a run's config says: budgets, and answers to private rounds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_app.client import CorollaClient
from client_app.notes import Notes
from client_app.session import Session
from fl_app.config import RunConfig, parse
from fl_app.data.prepared import HASH_KEY
from fl_app.errors import UserError
from fl_app.keys import KeySpec, Scalar, specs
from fl_app.layout import NOTHING
from fl_app.server.run_folder import read_metrics
from fl_app.site import site_directory
from fl_app.wire import PRIVATE_KEYS, SEED_KEYS, Download
from strategies import METHOD_PARAMS, METHODS
from strategies.fedcac import FedCACParams
from tests.conftest import Run
from tests.privacy.test_dp_runs import again

KEYS = [*specs(RunConfig), *specs(FedCACParams, "fedcac")]


def write(path: Path, seed: int = 0) -> Path:
    """Write a data set of two classes."""
    x, y = np.random.default_rng(seed).normal(size=(40, 4)).astype(np.float32), np.arange(40) % 2
    np.savez(path, x_train=x[:30], y_train=y[:30], x_test=x[30:], y_test=y[30:])
    return path


# every key of the config


def other(spec: KeySpec, directory: Path) -> Scalar:
    """Return another value of a key than its default."""
    known: dict[str, Scalar] = {
        "method": "fedavg",
        "model": "cnn",
        "dataset": f"npz:{directory / 'own.npz'}",
        "partition": "iid",
        "device": "cpu",
        "track": "tensorboard",
        "image-size": 32,
        "run-name": "elsewhere",
        "classes": "0,1",
    }
    if spec.name in known:
        return known[spec.name]
    if spec.choices:
        return next(choice for choice in spec.choices if choice != spec.default)
    if isinstance(spec.default, bool):
        return not spec.default
    if isinstance(spec.default, str):
        return str(directory / "elsewhere") if spec.about == "place" else "other"
    candidates = (spec.default + 1, spec.default * 2, spec.default / 2, 0.5, 0.25)
    return next(v for v in candidates if v != spec.default and (spec.rule is None or spec.rule.admits(v)))


def notes(raw: dict[str, Scalar], own: Path | str, keys: str = "secret", experiment: str = "abc") -> Notes:
    """Return what the site notes of client 0 when it is sent a message of such a run. own: the node's data."""
    classes = {"classes": "no,yes"} if raw["dataset"] == "node" else {}
    config = parse({"num-clients": 3, **classes, **raw}, METHOD_PARAMS)
    client = CorollaClient(Session(config, METHODS[config.method]), 0, str(own), keys, 7)
    client._open_store(Download("train", 1, 0, experiment, NOTHING))
    return client._notes


@pytest.mark.parametrize("keys", ["secret", SEED_KEYS])
@pytest.mark.parametrize("dataset", ["node", "digits", "npz"])
def test_no_key_of_a_run_resets_what_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: str, keys: str
) -> None:
    """One key after the other is another one: the attempt is not answered again, and the budget lies where it was."""
    monkeypatch.chdir(tmp_path)
    own = write(tmp_path / "own.npz")
    base: dict[str, Scalar] = {"dataset": f"npz:{own}" if dataset == "npz" else dataset, "method": "fedcac"}
    data_path = own if dataset == "node" else ""
    first = notes(base, data_path, keys)
    first.claim("000001-000000")
    tried = set()
    for spec in KEYS:
        if spec.name == "dataset" and dataset != "node":
            # other data are other records
            continue
        try:
            found = notes({**base, spec.name: other(spec, tmp_path)}, data_path, keys)
        except UserError:
            # the value does not go with the others: there is no such run
            continue
        tried.add(spec.name)
        assert found.budget == first.budget, spec.name
        with pytest.raises(UserError, match="attempt 000001-000000 was answered before"):
            found.claim("000001-000000")
    assert len(tried) > 0.8 * len(KEYS)
    named = {"state-dir", "data-dir", "output-dir", "run-name", "resume", "seed", "dp-epsilon", "dp-delta", "dp-clip"}
    assert named | {"num-server-rounds", "keep-state", "private", "num-clients"} <= tried


def test_what_is_the_site_s_own_has_one_budget_whoever_asks(tmp_path: Path) -> None:
    own = write(tmp_path / "own.npz")
    (tmp_path / "link.npz").symlink_to(own)
    node = notes({"dataset": "node"}, own)
    assert node.budget.parent.name == "data"
    # whatever the server calls it, and however it is reached
    assert notes({"dataset": "node"}, tmp_path / "link.npz", experiment="another").budget == node.budget
    for name in ("own.npz", "link.npz", "x/../own.npz"):
        assert notes({"dataset": f"npz:{tmp_path / name}"}, own, experiment="another").budget == node.budget
    # a part of what the run names is a client's
    part = notes({"dataset": f"npz:{own}"}, "")
    assert part.budget not in (node.budget, notes({"dataset": "digits"}, "").budget)
    assert part.own is not None and node.own is not None and part.own.shares(node.own)
    # what anybody has, and a simulation, spend by run
    for raw, path, keys in (({"dataset": "digits"}, "", "secret"), ({"dataset": "node"}, own, SEED_KEYS)):
        one, two = (notes(raw, path, keys, experiment).budget for experiment in ("first", "second"))
        assert one != two and one.is_relative_to(tmp_path / "site" / "runs" / "first" / "client-0000")


# whole runs


@pytest.fixture
def nodes(tmp_path: Path) -> dict[int, dict[str, Any]]:
    """Three nodes of a deployment, each with data of its own."""
    paths = [write(tmp_path / f"own-{i}.npz", i) for i in range(3)]
    return {i: {PRIVATE_KEYS: "secret", "data-path": str(path)} for i, path in enumerate(paths)}


WHOLE: dict[str, Any] = {
    "method": "fedavg",
    "dataset": "node",
    "classes": "0,1",
    "num_server_rounds": 3,
    "dp_epsilon": 4.0,
    "checkpoint_every": 1,
    "keep_state": True,
    "round_retries": 0,
}


@pytest.mark.parametrize("change", ["state_dir", "data_dir"])
def test_a_resumed_run_with_other_places_does_not_spend_again(
    run: Run, raw_config: dict[str, Any], nodes: dict[int, dict[str, Any]], tmp_path: Path, change: str
) -> None:
    folder = run(**WHOLE, node_configs=nodes)
    assert list(read_metrics(folder.path))[-1]["dp-epsilon"] == pytest.approx(4.0, rel=0.01)
    with pytest.raises(UserError, match=r"client 0: dp-epsilon: (3\.99\d|4) of 4 is spent"):
        again(folder.path, 3, raw_config, {**WHOLE, change: str(tmp_path / "elsewhere")}, nodes)


def test_the_next_run_on_a_site_s_own_data_has_what_is_left(
    run: Run, nodes: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    run(**WHOLE, node_configs=nodes)
    elsewhere = {**WHOLE, "run_name": "next", "state_dir": str(tmp_path / "elsewhere"), "seed": 5}
    with pytest.raises(UserError, match=r"dp-epsilon: no noise keeps 30 samples within 3.5 .*; other runs have spent"):
        run(**{**elsewhere, "dp_epsilon": 3.5}, node_configs=nodes)
    more = run(**{**elsewhere, "run_name": "more", "dp_epsilon": 6.0}, node_configs=nodes)
    spent = [record["dp-epsilon"] for record in read_metrics(more.path)]
    assert 4.0 < spent[0] < spent[1] < spent[2] <= 6.0 and spent[2] == pytest.approx(6.0, rel=0.01)


def test_an_experiment_is_repeated_in_simulation(run: Run) -> None:
    """Repeated runs of the same data are a researcher's daily work, and their noise follows from the seed."""
    simulated = {**WHOLE, "dataset": "digits", "classes": ""}
    first, second = (run(**simulated, run_name=name) for name in ("first", "second"))
    assert [r["dp-epsilon"] for r in read_metrics(first.path)] == [r["dp-epsilon"] for r in read_metrics(second.path)]


def test_the_server_refuses_an_epsilon_that_falls(
    run: Run,
    raw_config: dict[str, Any],
    nodes: dict[int, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """As from a site whose notes are lost."""
    folder = run(**WHOLE, node_configs=nodes)
    (tmp_path / "empty").mkdir()
    shutil.copy(site_directory() / HASH_KEY, tmp_path / "empty")
    monkeypatch.setenv("COROLLA_SITE_DIR", str(tmp_path / "empty"))
    with pytest.raises(
        UserError, match=r"dp-epsilon: its records have spent [23]\.\d+, and 3\.\d+ before: .* are lost"
    ):
        again(folder.path, 3, raw_config, WHOLE, nodes)


def test_a_resumed_run_has_the_epsilon_that_it_began_with(
    run: Run, raw_config: dict[str, Any], nodes: dict[int, dict[str, Any]]
) -> None:
    folder = run(**WHOLE, node_configs=nodes)
    for epsilon in (3.0, 5.0, 0.0):
        with pytest.raises(UserError, match="dp-epsilon"):
            again(folder.path, 3, raw_config, {**WHOLE, "dp_epsilon": epsilon}, nodes)
        (folder.path / "summary.json").touch()
