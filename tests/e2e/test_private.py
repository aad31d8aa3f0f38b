"""Private runs with a key per site, and runs whose records have a budget: a client is killed in a round, or signs falsely."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from flwr.app import Error, Message

from fl_app.privacy.keyring import text_of
from fl_app.server.properties import KEYS
from fl_app.transport.wire import AGREED
from tests.e2e.conftest import BackgroundRun, Cluster, replay, rounds, summary, wait_for
from tests.hostile.supernode import Reply, SuperNode
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
        "private-left-out": "client",
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
@pytest.mark.nightly
def test_a_site_that_is_killed_after_its_upload_is_in_the_sum(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start_superlink()
    for client_id, key in enumerate(make(tmp_path / "keys", 4)):
        cluster.start_supernode(client_id, 4, private_keys=str(key))
    cluster.hold(3, training=1)
    config = {"method": "fedavg", "private": True, "private-left-out": "client", "model": "gated:mlp"}
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
def test_a_group_is_split_where_a_client_is_absent(cluster: Cluster, tmp_path: Path) -> None:
    """Of nine clients one is killed in a round: two go with it into an aggregation group of their own, and six are summed up."""
    cluster.start_superlink()
    for client_id, key in enumerate(make(tmp_path / "keys", 9)):
        cluster.start_supernode(client_id, 9, private_keys=str(key))
    cluster.hold(4, training=2)
    config = {
        "method": "fedavg",
        "private": True,
        "private-left-out": "group",
        "model": "gated:mlp",
        "num-server-rounds": 3,
        "min-results": 0.5,
    }
    run = BackgroundRun(cluster, tmp_path / "killed", 9, config)
    cluster.training(4, 2).kill()
    run.finish()
    records, everybody = rounds(run.folder), [str(i) for i in range(9)]
    rest = [i for i in everybody if i not in "014"]
    assert [sorted(r["clients"]) for r in records] == [everybody, rest, everybody]
    assert [(f["client"], f.get("attempt")) for record in records for f in record["failures"]] == [(4, None)]
    ((parts, signatures),) = json.loads((run.folder / "aggregation-groups.json").read_text())["splits"]
    assert parts == [[0, 1, 4], [2, 3, 5, 6, 7, 8]] and len(signatures) == 8
    digest = summary(run.folder)["digest"]
    assert digest is not None and digest == replay(run, tmp_path)


def test_a_site_that_signs_falsely_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """One site has signed its keys of the run falsely, another one the members that are left when a third drops out."""

    def signing_keys(reply: Reply, message: Message) -> Reply:
        for entries in reply.content.config_records.values():
            if KEYS in entries:
                entries[KEYS] = f"{str(entries[KEYS])[:-88]}{text_of(bytes(64))}"
        return reply

    def signing_survivors(reply: Reply, message: Message) -> Reply:
        for entries in reply.content.config_records.values():
            if AGREED in entries:
                entries[AGREED] = text_of(bytes(64))
        return reply

    def dropping_out(reply: Reply, message: Message) -> Reply:
        return Reply(Message(Error(0, "gone"), reply_to=message)) if message.metadata.message_type == "train" else reply

    cluster.start_superlink()
    lies = {1: dropping_out, 3: signing_survivors, 5: signing_keys}
    nodes = []
    try:
        for client_id, key in enumerate(make(tmp_path / "keys", 7)):
            partition = {"partition-id": client_id, "num-partitions": 7, "private-keys": str(key)}
            nodes.append(SuperNode(cluster.fleet, partition, lies.get(client_id)))
        config = {"method": "fedavg", "private": True, "private-left-out": "client", "num-server-rounds": 1}
        config |= {"min-available-clients": 6, "min-results": 0.5}
        run = BackgroundRun(cluster, tmp_path / "lies", 7, config)
        run.finish()
    finally:
        for node in nodes:
            node.stop()
    (record,) = rounds(run.folder)
    assert sorted(record["clients"]) == ["0", "2", "3", "4", "6"]
    assert [f["client"] for f in record["failures"]] == [1, 3] and "is false" in record["failures"][1]["cause"]
    (left_out,) = record["left-out"]
    assert left_out["who"] == "client 5" and "has not signed" in left_out["cause"]


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
