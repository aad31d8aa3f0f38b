"""What a site has noted of its budgets stays, whatever a run's config says."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_app.client import CorollaClient
from client_app.notes import Notes, Training
from client_app.session import Session
from fl_app.config import RunConfig, parse
from fl_app.data.prepared import HASH_KEY
from fl_app.errors import UserError
from fl_app.keys import KeySpec, Scalar, specs
from fl_app.layout import NOTHING
from fl_app.run_secret import experiment_of
from fl_app.server.run_folder import read_metrics
from fl_app.site_directory import site_directory
from fl_app.transport.wire import PRIVATE_KEYS, SEED_KEYS, Download
from strategies import METHOD_PARAMS, METHODS
from strategies.fedcac import FedCACParams
from tests.conftest import Run
from tests.facts import rejected
from tests.privacy.test_dp_runs import again

KEYS = [*specs(RunConfig), *specs(FedCACParams, "fedcac")]


def write(path: Path, clients: int = 1) -> Path:
    """Write a data set of two classes, with 30 training samples for each client."""
    n = 40 * clients
    x, y = np.random.default_rng(0).normal(size=(n, 4)).astype(np.float32), np.arange(n) % 2
    train = 30 * clients
    np.savez(path, x_train=x[:train], y_train=y[:train], x_test=x[train:], y_test=y[train:])
    return path


# every key of the config


def other(spec: KeySpec, directory: Path) -> Scalar:
    """Return another value of a key than its default."""
    known: dict[str, Scalar] = {
        "method": "fedavg",
        "model": "cnn",
        "dataset": f"npz:{directory / 'own.npz'}",
        "partition": "by-column",
        "device": "cpu",
        "track": "tensorboard",
        "callbacks": "tests.tracking.watching:Watch",
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


def notes(
    raw: dict[str, Scalar], own: Path | str, keys: str = "secret", experiment: str = "abc", client_id: int = 0
) -> Notes:
    """Return what the site notes of a client when it is sent a message of such a run. own: the node's data."""
    classes = {"classes": "no,yes"} if raw["dataset"] == "node" else {}
    config = parse({"num-clients": 3, **classes, **raw}, METHOD_PARAMS)
    client = CorollaClient(Session(config, METHODS[config.method]), client_id, str(own), keys, 7)
    client._download = Download("train", 1, 0, experiment, NOTHING)
    return client._notes


@pytest.mark.parametrize("keys", ["secret", SEED_KEYS])
@pytest.mark.parametrize("dataset", ["node", "digits", "npz"])
def test_no_key_of_a_run_resets_what_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: str, keys: str
) -> None:
    """One key after the other is another one: the budget lies where it was."""
    monkeypatch.chdir(tmp_path)
    own = write(tmp_path / "own.npz")
    base: dict[str, Scalar] = {"dataset": f"npz:{own}" if dataset == "npz" else dataset, "method": "fedcac"}
    base |= {"dp-epsilon": 2.0, "partition": "iid", "train-samples": 5, "test-samples": 2}
    data_path = own if dataset == "node" else ""
    first = notes(base, data_path, keys)
    with first.alone():
        first.note(training := Training("abc", "1", 3.0, 0.1, 10, 2.0, 1e-5))
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
        # without a budget nothing of it is asked
        if found.own or dataset == "digits" or keys == SEED_KEYS:
            assert [t.steps for t in found.trainings()] == [training.steps], spec.name
        else:
            assert spec.name == "dp-epsilon"
    assert len(tried) > 0.75 * len(KEYS)
    named = {"state-dir", "data-dir", "output-dir", "run-name", "resume", "seed", "dp-epsilon", "dp-delta", "dp-clip"}
    assert named | {"num-server-rounds", "keep-state", "private", "num-clients"} <= tried


def archive(directory: Path) -> Path:
    """Write the file of a benchmark, medmnist-a, with a site's own records in it."""
    generator = np.random.default_rng(0)
    arrays = {}
    for part in ("train", "val", "test"):
        arrays[f"{part}_images"] = generator.integers(0, 255, (40, 28, 28), dtype=np.uint8)
        arrays[f"{part}_labels"] = (np.arange(40) % 11)[:, None]
    np.savez(directory / "organamnist.npz", **arrays)
    return directory


def table(path: Path, own: Path, order: slice = slice(None)) -> Path:
    """Write a data set as a table."""
    with np.load(own) as data:
        x, y = (np.concatenate([data[f"{name}_{part}"] for part in ("train", "test")]) for name in "xy")
    rows = [",".join([*map(str, row), str(label)]) for row, label in zip(x, y, strict=True)][order]
    path.write_text("\n".join(["a,b,c,d,label", *rows]) + "\n")
    return path


def test_a_clients_records_have_one_budget_however_a_run_names_them(tmp_path: Path) -> None:
    """Another format, order or subset, another partition, split or size: what was spent before counts every time."""
    own = write(tmp_path / "own.npz")
    base: dict[str, Scalar] = {"partition": "iid", "train-samples": 5, "test-samples": 2, "dp-epsilon": 2.0}
    benchmark: dict[str, Scalar] = {"dataset": "medmnist-a", "data-dir": str(archive(tmp_path))}
    csv, reverse = table(tmp_path / "t.csv", own), table(tmp_path / "r.csv", own, slice(None, None, -1))
    half: dict[str, Scalar] = {"dataset": f"table:{table(tmp_path / 'h.csv', own, slice(32))}", "target": "label"}
    write(tmp_path / "again.npz")
    ways: list[tuple[dict[str, Scalar], Path | str]] = [
        ({"dataset": "node"}, own),
        (benchmark, own),
        (benchmark, ""),
        ({**benchmark, "partition-seed": 3}, own),
        ({"dataset": "node"}, csv),
        ({"dataset": f"npz:{own}"}, own),
        ({"dataset": f"npz:{tmp_path / 'again.npz'}"}, own),
        ({"dataset": f"npz:{own}"}, ""),
        ({"dataset": f"npz:{own}", "seed": 3}, ""),
        ({"dataset": f"npz:{own}", "num-clients": 2}, ""),
        ({"dataset": f"npz:{own}", "validation-ratio": 0.5}, ""),
        ({"dataset": f"table:{csv}", "target": "label"}, own),
        ({"dataset": f"table:{csv}", "target": "label", "exclude": "a"}, own),
        ({"dataset": f"table:{reverse}", "target": "label", "test-ratio": 0.5}, own),
        (half, own),
    ]
    steps = 0
    for number, (raw, data_path) in enumerate(ways):
        columns = {"target": "label", "classes": "0,1,2,3,4,5,6,7,8,9"}
        target = columns if str(data_path).endswith(".csv") or "target" in raw else {}
        found = notes({**base, **target, **raw}, data_path, experiment=f"run {number}")
        assert sum(t.steps for t in found.trainings()) == steps, raw
        with found.alone():
            found.note(Training(found.experiment, "1", 3.0, 0.1, 10, 2.0, 1e-5))
        steps += 10


def test_a_copy_of_a_sites_rows_is_no_other_budget(tmp_path: Path) -> None:
    """A second client of the site reads them, in another order and with one row more, and leaves a column out."""
    own = write(tmp_path / "own.npz")
    first, copy = table(tmp_path / "first.csv", own), table(tmp_path / "copy.csv", own, slice(None, None, -1))
    copy.write_text(f"{copy.read_text()}0.5,0.5,0.5,0.5,1\n")
    base: dict[str, Scalar] = {"dataset": "node", "target": "label", "classes": "0,1", "dp-epsilon": 2.0}
    one = notes(base, first)
    with one.alone():
        one.note(Training("abc", "1", 3.0, 0.1, 10, 2.0, 1e-5))
    for more in ({}, {"exclude": "a"}, {"normalize": "mean-std"}, {"test-ratio": 0.5}, {"seed": 7}):
        assert [t.steps for t in notes({**base, **more}, copy, client_id=1).trainings()] == [10], more


def test_data_of_a_package_and_a_simulation_spend_by_run(tmp_path: Path) -> None:
    own = write(tmp_path / "own.npz")
    iid: dict[str, Scalar] = {"partition": "iid", "train-samples": 5, "test-samples": 2, "dp-epsilon": 2.0}
    for raw, path, keys in (({"dataset": "digits"}, "", "secret"), ({"dataset": "node"}, own, SEED_KEYS)):
        one, two = (notes({**raw, **iid}, path, keys, experiment).budget for experiment in ("first", "second"))
        assert one != two and one.is_relative_to(tmp_path / "site" / "runs" / experiment_of("first") / "client-0000")


# whole runs


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, Any]]:
    """Three nodes of a deployment at one site, each with a third of a data set, so that they have no record in common."""
    write(tmp_path / "own.npz", 3)
    monkeypatch.chdir(tmp_path)
    return {i: {PRIVATE_KEYS: "secret"} for i in range(3)}


WHOLE: dict[str, Any] = {
    "method": "fedavg",
    "dataset": "npz:own.npz",
    "partition": "iid",
    "train_samples": 30,
    "test_samples": 10,
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
    with rejected(UserError, None, "client 0", "dp-epsilon", "of 4 is spent"):
        again(folder.path, 3, raw_config, {**WHOLE, change: str(tmp_path / "elsewhere")}, nodes)


def test_the_next_run_on_a_site_s_own_data_has_what_is_left(
    run: Run, nodes: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    """A site whose budget is spent is refused at the start, by name, whatever the next run promises."""
    # a third of the clients a round, each of which has room for all rounds
    first = run(**{**WHOLE, "fraction_train": 0.3}, node_configs=nodes)
    spent = max(record["dp-epsilon"] for record in read_metrics(first.path))
    elsewhere = {**WHOLE, "state_dir": str(tmp_path / "elsewhere"), "seed": 5}
    more = run(**{**elsewhere, "run_name": "more", "dp_epsilon": 6.0, "dp_delta": 1e-3}, node_configs=nodes)
    last = list(read_metrics(more.path))[-1]["dp-epsilon"]
    assert spent < last <= 4.0 and last == pytest.approx(4.0, rel=0.01)
    with rejected(UserError, "", "dp-epsilon", "no noise keeps 30", "within 3.5", "other runs", "spent"):
        run(**{**elsewhere, "run_name": "next", "dp_epsilon": 3.5}, node_configs=nodes)


def test_an_experiment_is_repeated_in_simulation(run: Run) -> None:
    """Repeated runs of the same data are a researcher's daily work, and their noise follows from the seed."""
    simulated = {**WHOLE, "dataset": "digits"}
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
        UserError, match=r"dp-epsilon: its records have spent [23]\.\d+, but 3\.\d+ before: its site has lost its notes"
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
