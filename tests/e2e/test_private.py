"""A client is killed in the middle of a round: of a private run with a key per site, and of one whose records have a budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import BackgroundRun, Cluster, replay, rounds, summary, wait_for
from tests.privacy.keys import make

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


@pytest.mark.usefixtures("warm_cluster")
def test_a_killed_client_costs_no_repeat(cluster: Cluster, tmp_path: Path) -> None:
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
    # its upload never came: the others' sum is opened without a second training
    assert [(f["client"], f.get("attempt")) for f in records[1]["failures"]] == [(1, None)]
    digest = summary(run.folder)["digest"]
    assert digest is not None and digest == replay(run, tmp_path)


@pytest.mark.usefixtures("warm_cluster")
def test_a_site_that_is_killed_after_its_upload_is_in_the_sum(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start_superlink()
    for client_id, key in enumerate(make(tmp_path / "keys", 4)):
        cluster.start_supernode(client_id, 4, private_keys=str(key))
    cluster.hold(3, training=1)
    config = {"method": "fedavg", "private": True, "private-absent": "alone", "model": "gated:mlp"}
    run = BackgroundRun(cluster, tmp_path / "killed", 4, {**config, "num-server-rounds": 1})
    # of the round's uploads; the same numbers occur while clients connect
    wait_for(lambda: "round 1/1: 3/4" in run.log)
    cluster.kill("supernode-1")
    cluster.release(3, training=1)
    wait_for(lambda: run.recorded() == 1 or run.process.poll() is not None)
    (record,) = rounds(run.folder)
    assert list(record["clients"]) == ["0", "1", "2", "3"] and not record["failures"]
    run.process.kill()
    run.process.wait()


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
