"""A client is killed in the middle of a round: of a private run with a key per site, and of one whose records have a budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import BackgroundRun, Cluster, replay, rounds, summary
from tests.privacy.keys import make

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


@pytest.mark.usefixtures("warm_cluster")
def test_a_killed_client_costs_one_repeat_among_the_others(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start_superlink()
    for client_id, key in enumerate(make(tmp_path / "keys", 4)):
        cluster.start_supernode(client_id, 4, private_keys=str(key))
    cluster.hold(1, training=2)
    config = {
        "method": "fedcac",
        "private": True,
        "private-absent": "alone",
        "model": "gated:mlp",
        "num-server-rounds": 3,
        "min-results": 0.5,
    }
    run = BackgroundRun(cluster, tmp_path / "killed", 4, config)
    cluster.training(1, 2).kill()
    run.finish()
    records = rounds(run.folder)
    assert [sorted(r["clients"]) for r in records] == [["0", "1", "2", "3"], ["0", "2", "3"], ["0", "1", "2", "3"]]
    assert [(f["client"], f["attempt"]) for f in records[1]["failures"]] == [(1, 1)]
    assert "clients [1] dropped out" in run.log
    digest = summary(run.folder)["digest"]
    assert digest is not None and digest == replay(run, tmp_path)


@pytest.mark.nightly
@pytest.mark.usefixtures("warm_cluster")
def test_a_killed_training_has_spent_its_budget(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start(2)
    # before its first, a client tries its model's gradients record by record, in a process of its own
    cluster.hold(1, training=3)
    config = {
        "method": "fedavg",
        "dp-epsilon": 8.0,
        "dp-delta": 1e-5,
        "model": "gated:mlp",
        "num-server-rounds": 3,
        "min-results": 0.5,
        "keep-state": True,
        "state-dir": str(tmp_path / "state"),
    }
    run = BackgroundRun(cluster, tmp_path / "killed", 2, config)
    cluster.training(1, 3).kill()
    run.finish()
    records = rounds(run.folder)
    assert [sorted(r["clients"]) for r in records] == [["0", "1"], ["0"], ["0", "1"]]
    site = Path(cluster.environment["COROLLA_SITE_DIR"])
    noted = [next(site.glob(f"runs/*/client-{i:04d}/budget.json")).read_text().splitlines()[1] for i in (0, 1)]
    steps = [sum(steps for *_, steps, epsilon, delta in json.loads(line)) for line in noted]
    # the killed training counts as one, and all trainings have as many steps
    assert steps[0] == steps[1] > 0 and steps[0] % 3 == 0
    last = records[-1]["clients"]
    assert (
        last["1"]["dp-epsilon"] == last["0"]["dp-epsilon"] == records[-1]["dp-epsilon"] == pytest.approx(8.0, rel=0.01)
    )
    # where noise follows from the seed
    assert summary(run.folder)["digest"] != replay(run, tmp_path)
