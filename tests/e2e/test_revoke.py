"""One node of a running cluster is locked out, with a copy of its key too, and the run goes on with the others."""

from __future__ import annotations

import shutil

import psutil
import pytest

from deploy import node
from tests.e2e.conftest import BackgroundRun, Lab, rounds, summary, wait_for
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
    assert "its key was revoked" in " ".join(told.split()), told
    thief = Intruders(lab, fleet)
    thief.start("thief", "--root-certificates", str(keys / "ca.crt"), "--auth-supernode-private-key", str(stolen))
    again = lab.cluster("revoke", "1")
    assert again.returncode == 2 and "it was revoked before" in " ".join(again.stderr.split()), again.stderr
    back = lab.cluster("restart", "supernode-1")
    assert back.returncode == 2 and "has no supernode-1.key" in " ".join(back.stderr.split()), back.stderr
    status = lab.cluster("status")
    assert status.returncode == 1 and status.stdout.count("online") == 1, status.stdout
    assert pids == {name: lab.process(name)["pid"] for name in pids} and all(
        psutil.pid_exists(pid) for pid in pids.values()
    )
    wait_for(lambda: "[code: 2004]" in thief.log("thief"), 300, every=0.5)
    assert "its key is not registered" in node.explain_refusals("supernode-1", thief.log("thief"))[0]
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
