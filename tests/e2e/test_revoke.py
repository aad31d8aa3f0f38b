"""One node of a running cluster is locked out, with a copy of its key too, and the run goes on with the others."""

from __future__ import annotations

import shutil

import psutil
import pytest

from deploy import node
from tests.e2e.conftest import BackgroundRun, Lab, corolla, rounds, summary, wait_for
from tests.e2e.test_security import Intruders

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def up(lab: Lab, supernodes: int) -> int:
    """Start a TLS cluster and return its fleet port."""
    fleet, _ = lab.write(tls=True, hosts=[{"host": "local", "supernodes": supernodes, "gpus": []}])
    assert lab.cluster("keys").returncode == 0
    started = lab.cluster("up", "--timeout", "300")
    assert started.returncode == 0, started.stdout + started.stderr
    return fleet


def test_a_revoked_node_is_out_whoever_has_its_key(lab: Lab) -> None:
    fleet = up(lab, 2)
    keys, stolen = lab.directory / "lab-keys", lab.directory / "stolen.key"
    shutil.copy(keys / "supernode-1.key", stolen)
    pids = {name: lab.process(name)["pid"] for name in ("superlink", "supernode-0")}
    revoked = lab.cluster("revoke", "1")
    assert revoked.returncode == 0, revoked.stdout + revoked.stderr
    assert sorted(path.name for path in keys.glob("supernode-*")) == [
        "supernode-0.key",
        "supernode-0.pub",
        "supernode-0.x25519",
    ]

    told = lab.cluster("logs", "supernode-1").stdout
    assert "was revoked" in " ".join(told.split()), told
    thief = Intruders(lab, fleet)
    thief.start("thief", "--root-certificates", str(keys / "ca.crt"), "--auth-supernode-private-key", str(stolen))
    again = lab.cluster("revoke", "1")
    assert again.returncode == 2 and "revoked before" in " ".join(again.stderr.split()), again.stderr
    back = lab.cluster("restart", "supernode-1")
    assert back.returncode == 2 and "has no supernode-1.key" in " ".join(back.stderr.split()), back.stderr
    status = lab.cluster("status")
    assert status.returncode == 1 and status.stdout.count("online") == 1, status.stdout
    assert pids == {name: lab.process(name)["pid"] for name in pids} and all(
        psutil.pid_exists(pid) for pid in pids.values()
    )
    wait_for(lambda: "[code: 2004]" in thief.log("thief"), 300, every=0.5)
    assert "not registered" in node.explain_refusals("supernode-1", thief.log("thief"))[0]
    thief.end()

    renewed = lab.cluster("keys", "--renew")
    assert renewed.returncode == 0 and "5 files written" in renewed.stdout, renewed.stdout + renewed.stderr
    assert lab.cluster("down").returncode == 0


@pytest.mark.nightly
def test_a_run_goes_on_with_the_others(lab: Lab) -> None:
    up(lab, 3)
    config = {"method": "fedcac", "num-server-rounds": 6, "train-samples": 40, "min-available-clients": 2}
    config["state-dir"] = str(lab.directory / "client-state")
    run = BackgroundRun(lab, lab.directory / "run", 3, config, superlink="lab")
    run.wait_for_round(1)
    revoked = lab.cluster("revoke", "1")
    assert revoked.returncode == 0, revoked.stdout + revoked.stderr
    run.finish()
    assert sorted(rounds(run.folder)[0]["clients"]) == ["0", "1", "2"]
    assert sorted(rounds(run.folder)[-1]["clients"]) == ["0", "2"] and rounds(run.folder)[-1]["evaluation"][
        "absent"
    ] == [1]
    assert summary(run.folder)["final-accuracy"] is not None
    assert lab.cluster("down").returncode == 0


@pytest.mark.nightly
def test_a_rotated_and_then_revoked_site_has_one_key_and_then_none(lab: Lab) -> None:
    """A SuperLink with TLS and a database: the node of an old key cannot join, the new one's trains until it is revoked."""
    database = lab.directory / "kept" / "flower.db"
    database.parent.mkdir()
    fleet, _ = lab.write(tls=True, superlink={"database": str(database)}, hosts=[{"host": "local"}, {"host": "joins"}])
    site = lab.environment | {"COROLLA_STATE_HOME": str(lab.directory / "clinic")}
    public = lab.directory / "clinic" / "sites" / "bern" / "node.pub"
    keys, old, new = lab.directory / "lab-keys", lab.directory / "old.key", lab.directory / "new.key"
    assert corolla("node", "join", "bern", environment=site).returncode == 0
    assert lab.cluster("keys").returncode == 0
    started = lab.cluster("up", "--timeout", "300")
    assert started.returncode == 0, started.stdout + started.stderr
    assert lab.cluster("admit", "1", str(public)).returncode == 0
    shutil.copy(public.with_suffix(".key"), old)
    assert corolla("node", "rotate", "bern", environment=site).returncode == 0
    rotated = lab.cluster("rotate", "1", str(public))
    assert rotated.returncode == 0, rotated.stdout + rotated.stderr
    shutil.copy(public.with_suffix(".key"), new)

    certificate, intruders = ("--root-certificates", str(keys / "ca.crt")), Intruders(lab, fleet)
    key = "--auth-supernode-private-key"
    for name, private in (("old", old), ("new", new)):
        intruders.start(name, *certificate, key, str(private), client=1)
    wait_for(lambda: "[code: 2004]" in intruders.log("old"), 300, every=0.5)
    wait_for(lambda: "SuperNode ID" in intruders.log("new"), 300, every=0.5)
    config = {"method": "fedavg", "num-server-rounds": 2, "train-samples": 40}
    config["state-dir"] = str(lab.directory / "client-state")
    run = BackgroundRun(lab, lab.directory / "run", 2, config, superlink="lab")
    run.finish()
    assert summary(run.folder)["absent"] == []
    status = lab.cluster("status")
    assert status.returncode == 0, status.stdout + status.stderr

    revoked = lab.cluster("revoke", "1")
    assert revoked.returncode == 0, revoked.stdout + revoked.stderr
    intruders.end()
    for name, private in (("old again", old), ("new again", new)):
        intruders.start(name, *certificate, key, str(private), client=1)
        wait_for(lambda name=name: "[code: 2004]" in intruders.log(name), 300, every=0.5)  # type: ignore[misc]
    intruders.end()
    back = lab.cluster("admit", "1", str(public))
    assert back.returncode == 2 and "revoked" in back.stderr, back.stdout + back.stderr
    assert lab.cluster("down").returncode == 0
