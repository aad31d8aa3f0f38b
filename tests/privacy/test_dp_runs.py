"""Whole runs with differential privacy of records."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from client_app.client_app import app
from fl_app import server_app
from fl_app.config import parse
from fl_app.errors import UserError
from fl_app.server import checkpoint
from fl_app.server.run_folder import read_metrics, read_summary
from fl_app.transport.inprocess import InProcessGrid
from fl_app.transport.wire import PRIVATE_KEYS
from strategies import METHOD_PARAMS
from tests.conftest import Run, flat
from tests.facts import rejected
from tests.privacy.keys import make
from tests.privacy.test_dp import ABLE

ROUNDS = {"num_server_rounds": 2, "dp_epsilon": 8.0}
# keys without which a method's steps are not plain
PLAIN: dict[str, dict[str, Any]] = {"partialfed": {"partialfed": {"strategy": "fix"}}}


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=() if m in ("fedcac", "fedrep") else pytest.mark.long) for m in ABLE]
)
def test_every_method_of_plain_steps_stays_within_its_budget(run: Run, method: str) -> None:
    keys = {**ROUNDS, **PLAIN.get(method, {})}
    folder = run(method=method, **keys)
    again = run(method=method, run_name="again", **keys)
    assert read_summary(folder.path)["digest"] == read_summary(again.path)["digest"]
    records = list(read_metrics(folder.path))
    for before, after in zip(records, records[1:], strict=False):
        assert before["dp-epsilon"] < after["dp-epsilon"] <= 8.0 * (1 + 1e-6)
        for i, row in after["clients"].items():
            assert before["clients"][i]["dp-epsilon"] < row["dp-epsilon"] <= 8.0 * (1 + 1e-6)
            assert row["loss"] is None and row["dp-noise"] > 0.5
            assert 2 * row["dp-epsilon"] < row["dp-epsilon-replace"] <= after["dp-epsilon-replace"]
    # the plan is of these rounds, and counts every epoch
    assert records[-1]["dp-epsilon"] == pytest.approx(8.0, rel=0.01)
    told = json.loads((folder.path / "clients.json").read_text())
    assert "class-counts" not in json.dumps(told)


def test_feddacs_guidance_model_is_within_the_budget(run: Run) -> None:
    """Its masks and its guidance model follow from noisy steps: the plan counts both trainings, and leaves nothing."""
    folder = run(method="feddac", feddac={"guidance": "one-step"}, **ROUNDS)
    plain = run(method="feddac", run_name="plain", **ROUNDS)
    noise = [list(read_metrics(f.path))[-1]["clients"]["0"]["dp-noise"] for f in (folder, plain)]
    assert noise[0] > noise[1]
    assert list(read_metrics(folder.path))[-1]["dp-epsilon"] == pytest.approx(8.0, rel=0.01)


def again(
    folder: Path,
    round: int,
    raw_config: dict[str, Any],
    changes: dict[str, Any],
    node_configs: dict[int, dict[str, Any]] | None = None,
) -> None:
    """Run a run's last round again, as after a crash of the server's before its checkpoint."""
    (folder / "summary.json").unlink()
    for file in (folder / checkpoint.DIRECTORY).glob(f"round-{round:06d}.*"):
        file.unlink()
    raw = {**raw_config, **flat(changes), "resume": str(folder)}
    parsed = parse(raw, METHOD_PARAMS)
    server_app.run(InProcessGrid(app, raw, 3, node_configs), parsed, lambda *_: None)


def test_a_resumed_run_ends_with_the_same_digest_and_budget(run: Run, raw_config: dict[str, Any]) -> None:
    whole = {"method": "fedcac", "num_server_rounds": 3, "dp_epsilon": 8.0, "checkpoint_every": 1, "keep_state": True}
    folder = run(**whole)
    digest, last = read_summary(folder.path)["digest"], list(read_metrics(folder.path))[-1]["dp-epsilon"]
    again(folder.path, 3, raw_config, whole)
    assert read_summary(folder.path)["digest"] == digest
    assert list(read_metrics(folder.path))[-1]["dp-epsilon"] == last


def test_private_and_dp_go_together(run: Run) -> None:
    folder = run(method="fedcac", private=True, num_clients=5, **ROUNDS)
    assert [r["dp-epsilon"] <= 8.0 * (1 + 1e-6) for r in read_metrics(folder.path)] == [True, True]


def test_a_site_whose_budget_is_spent_says_so_and_stays_away(run: Run, raw_config: dict[str, Any]) -> None:
    """Client 1's noise is secret, as in a deployment: a round that is repeated costs it again, for which the plan has no room."""
    secret: dict[int, dict[str, Any]] = {1: {PRIVATE_KEYS: "secret"}}
    whole = {"method": "local", "dp_epsilon": 8.0, "checkpoint_every": 1, "keep_state": True, "min_results": 0.3}
    folder = run(**whole, node_configs=secret)
    assert [len(r["clients"]) for r in read_metrics(folder.path)] == [3, 3]
    again(folder.path, 2, raw_config, whole, secret)
    _, record = read_metrics(folder.path)
    assert sorted(record["clients"]) == ["0", "2"]
    assert [(f["client"], "8 of 8 is spent" in f["cause"]) for f in record["failures"]] == [(1, True)]


@pytest.mark.parametrize("keep_state", [False, True])
def test_a_finished_run_that_goes_on_has_nothing_left_to_spend(run: Run, keep_state: bool) -> None:
    whole = {"method": "fedavg", "private": True, "keep_state": keep_state, **ROUNDS}
    folder = run(**whole)
    with rejected(UserError, "resume", "run is finished", "dp-epsilon was planned", "no more rounds"):
        run(**{**whole, "num_server_rounds": 3, "resume": str(folder.path)})
    assert read_summary(folder.path)["digest"]


@pytest.mark.parametrize("method", ["fedavg", "fedcac"])
@pytest.mark.parametrize("private", [False, True])
def test_a_simulation_takes_its_budgets_along_and_a_deployment_keeps_them(
    run: Run, tmp_path: Path, site_dir: Path, method: str, private: bool
) -> None:
    whole = {"method": method, "private": private, **ROUNDS}
    run(run_name="simulated", **whole)
    assert not list((site_dir / "runs").iterdir()) and not list((tmp_path / "state").glob("*"))
    run(run_name="kept", keep_state=True, **whole)
    assert len(list(site_dir.glob("runs/*/*/budget.json"))) == 3
    shutil.rmtree(site_dir)
    keys = {i: {PRIVATE_KEYS: str(key)} for i, key in enumerate(make(tmp_path / "keys", 3))}
    run(run_name="deployed", node_configs=keys, **whole)
    left = {path.name for path in site_dir.glob("runs/*/client-*/*")}
    assert left == {"budget.json", ".lock"}
    assert {path.suffix for path in (tmp_path / "state").glob("*/*/*")} <= {".state"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "fedobp"}, "dp-epsilon: method fedobp cannot run with differential privacy"),
        ({"method": "pfedme"}, "dp-epsilon: method pfedme cannot run"),
        ({"model": "resnet8"}, "dp-epsilon: model resnet8 has statistics of whole batches .* take norm = group"),
        ({"finetune_epochs": 1}, "dp-epsilon: finetune-epochs would use records outside the budget"),
        ({"dp_epsilon": 0.01}, "dp-epsilon: no noise keeps 24 samples within 0.01"),
        ({"dp_delta": 0.05}, "dp-delta: must be below 1 / 24"),
    ],
)
def test_what_cannot_be_is_refused_before_training(
    run: Run, raw_config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run(**{**ROUNDS, **changes})
    assert not list(Path(str(raw_config["output-dir"])).glob("*"))


def test_resnets_with_group_norm_train(run: Run) -> None:
    folder = run(
        model="tests.small_models:group", train_samples=10, num_clients=2, **{**ROUNDS, "num_server_rounds": 1}
    )
    assert read_summary(folder.path)["digest"]


def test_a_run_with_a_budget_goes_on_from_no_state_without_one(run: Run) -> None:
    """What a client keeps at home goes into its uploads: a server could name the state of a run that promised nothing."""
    keys: dict[str, Any] = {"method": "fedrep", "keep_state": True, "num_server_rounds": 1}
    plain = run(run_name="plain", **keys)
    with pytest.raises(UserError, match="without a budget"):
        run(run_name="refused", from_run=str(plain.path), dp_epsilon=8.0, **keys)
    first = run(run_name="first", dp_epsilon=4.0, **keys)
    next_one = run(run_name="next", from_run=str(first.path), dp_epsilon=8.0, **keys)
    assert read_summary(next_one.path)["digest"]
