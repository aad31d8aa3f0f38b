"""Sites that decide: each refuses, asks or lets in by its own site.toml, the others go on, and every audit tells what happened."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import save_file

from deploy import audit, confine
from fl_app import models
from fl_app.processes import script
from fl_app.transport.app_bundle import application_hash
from tests.e2e.conftest import BackgroundRun, Cluster, Lab, corolla, rounds, summary, wait_for
from tests.fl_app.test_weight_files import INDEX, SHARDS, in_shards

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

CONFIG = {
    "method": "fedcac",
    "num-server-rounds": 2,
    "train-samples": 40,
    "local-epochs": 1,
    "available-timeout": 120.0,
}


def node(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `corolla node` at a site."""
    return corolla(
        "node", *words, environment=cluster.environment | {"COROLLA_STATE_HOME": str(cluster.home.parent / "nodes")}
    )


def kinds(directory: Path) -> list[str]:
    return [str(entry["kind"]) for entry in audit.entries(directory)]


def uploads(directory: Path) -> list[int]:
    return [int(entry["bytes"]) for entry in audit.entries(directory) if entry["kind"] == "upload"]


@pytest.mark.usefixtures("warm_cluster")
def test_sites_refuse_by_name_and_the_run_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    """Clients 0 and 1 let the run in, 2 to 6 each break one of their site's rules, 7 asks a person."""
    rules = [
        f'applications = ["{application_hash({})}"]\nmethods = ["fedcac"]\nmin-samples = 40\nmax-upload = 10_000_000\n'
        f'readable-paths = ["{tmp_path}"]\n[bounds]\nlocal-epochs = {{max = 1}}\n',
        "",
        'methods = ["fedobp"]\n',
        "[bounds]\nlearning-rate = {max = 0.01}\n",
        "min-samples = 41\n",
        f'applications = ["{"ab" * 32}"]\n',
        'readable-paths = ["/nowhere"]\n',
        'approval = "ask"\n',
    ]
    expected = {
        2: ("(method: methods)", "methods: fedcac is not among fedobp"),
        3: ("(learning-rate: bounds)", "bounds: learning-rate must be at most 0.01, got 0.1"),
        4: ("(min-samples)", "min-samples: a client must have 41 training samples, this one has 40"),
        5: ("(applications)", "applications: "),
        6: ("(state-dir: readable-paths)", "readable-paths: state-dir names"),
    }
    cluster.start_superlink()
    for client_id, text in enumerate(rules):
        cluster.start_site(client_id, len(rules), text)
    cluster.wait_for_nodes()
    config = CONFIG | {
        "min-available-clients": 3,
        "state-dir": str(tmp_path / "client-state"),
        "available-timeout": 300.0,
    }
    run = BackgroundRun(cluster, tmp_path / "r", len(rules), config)
    asked = cluster.home.parent / "nodes" / "sites" / "site-7" / "waiting"
    wait_for(lambda: list(asked.glob("*.json")) or run.process.poll() is not None)
    assert run.process.poll() is None and run.recorded() == 0, run.log
    listed = node(cluster, "approve").stdout
    (run_id,) = re.findall(r"run (\d+) at site-7", listed)
    assert "local-epochs = 1" in listed and application_hash({}) in listed
    wrong = node(cluster, "approve", "1")
    assert wrong.returncode == 2 and run_id in wrong.stderr.replace("\n", " ")
    assert node(cluster, "approve", run_id).returncode == 0
    run.finish()

    for record in rounds(run.folder):
        assert sorted(record["clients"]) == ["0", "1", "7"] and record["failures"] == []
        for entry, (client_id, (why, _)) in zip(record["left-out"], expected.items(), strict=True):
            assert entry["who"] == f"client {client_id}" and f"refused by its site {why}; " in entry["cause"]
    assert rounds(run.folder)[-1]["evaluation"]["absent"] == [2, 3, 4, 5, 6]
    log = " ".join(run.log.split())
    for client_id, (why, text) in expected.items():
        assert f"client {client_id} cannot take part: refused by its site {why}; " in log, run.log
        directory = cluster.home.parent / "nodes" / "sites" / f"site-{client_id}"
        assert audit.entries(directory)[-1]["why"].startswith(text)
        assert f"refused by its site: {text}" in " ".join(cluster.log(f"site-{client_id}").split())
        assert set(kinds(directory)) == {"start", "run", "refusal"}
        assert not (cluster.home / "code").exists() or "flwr-clientapp" not in cluster.log(f"site-{client_id}")
    first = cluster.home.parent / "nodes" / "sites" / "site-0"
    # properties, two rounds, evaluation
    assert kinds(first).count("upload") == kinds(first).count("download") == 4
    assert all(entry["run"] == run_id for entry in audit.entries(first)[1:])
    assert "approval" in kinds(cluster.home.parent / "nodes" / "sites" / "site-7")

    intact = node(cluster, "audit")
    assert intact.returncode == 0 and intact.stdout.count("intact") == len(rules)
    path = first / audit.FILE
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    found = node(cluster, "audit")
    assert found.returncode == 1 and "was changed" in found.stderr and found.stdout.count("intact") == 7
    again = node(
        cluster, "audit", "site-1", "--expect", audit.verify(cluster.home.parent / "nodes" / "sites" / "site-1").last
    )
    assert again.returncode == 0


@pytest.mark.nightly
def test_a_reply_that_is_too_large_stays_at_the_site(cluster: Cluster, tmp_path: Path) -> None:
    """Client 2 may not send it; client 0 trains with the kernel's leave to reach little else than its own directories."""
    cluster.start_superlink()
    confined = "confine = true\nreadable-paths = []\n" * bool(confine.landlock_version())
    for client_id, text in enumerate([confined, "", "max-upload = 3000\n"]):
        cluster.start_site(client_id, 3, text)
    run = BackgroundRun(cluster, tmp_path / "r", 3, CONFIG)
    run.finish()
    for record in rounds(run.folder):
        assert sorted(record["clients"]) == ["0", "1"]
        (failure,) = record["failures"]
        assert failure["client"] == 2
        assert failure["cause"].startswith("refused by its site (max-upload); ")
    small, large = (uploads(cluster.home.parent / "nodes" / "sites" / f"site-{client_id}") for client_id in (2, 1))
    assert max(small) <= 3000 < max(large)


def test_a_site_joins_without_a_login(lab: Lab) -> None:
    """One SuperNode is the launcher's, the other its site's own: only the key's public half and the invitation travel.

    Both have the frozen tensors, each at a place of its own; the site's node is confined, and has them in shards.
    """
    network = models.build("mlp", in_channels=1, num_classes=10, image_size=8, seed=1)
    servers, own = lab.directory / "servers.safetensors", in_shards(network, lab.directory / "own")
    save_file(network.state_dict(), servers)
    blob = (own / SHARDS[0]).rename(lab.directory / "blob")
    (own / SHARDS[0]).symlink_to(blob)
    rules = lab.directory / "corolla" / "site.toml"
    rules.parent.mkdir()
    confined = "confine = true\nreadable-paths = []\n" * bool(confine.landlock_version())
    rules.write_text(f'{confined}initial-weights = "{own}"\n')
    lab.write(tls=True, hosts=[{"host": "local", "warm": True}, {"host": "joins"}])
    site = lab.environment | {
        "COROLLA_STATE_HOME": str(lab.directory / "clinic"),
        "XDG_CONFIG_HOME": str(lab.directory),
    }
    joined = corolla("node", "join", "clinic-a", environment=site)
    private = lab.directory / "clinic" / "sites" / "clinic-a" / "node.key"
    assert joined.returncode == 0 and private.stat().st_mode & 0o777 == 0o600 and "PRIVATE" not in joined.stdout
    assert lab.cluster("keys").returncode == 0
    assert not (lab.directory / "lab-keys" / "supernode-1.key").exists()
    up = lab.cluster("up", "--timeout", "300")
    assert up.returncode == 0, up.stdout + up.stderr
    admitted = lab.cluster("admit", "1", str(private.with_name("node.pub")))
    assert admitted.returncode == 0 and "registered with the running cluster" in admitted.stdout, (
        admitted.stdout + admitted.stderr
    )

    log = lab.directory / "clinic.log"
    invitation = str(lab.directory / "lab-keys" / "supernode-1.toml")
    with log.open("wb") as file:
        supernode = subprocess.Popen(
            [script("corolla"), "node", "start", "clinic-a", "--invitation", invitation, "--warm"],
            env=site,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        wait_for(lambda: "SuperNode ID" in log.read_text(errors="replace") or supernode.poll() is not None)
        frozen = {"model": "mlp", "train": "classifier.*", "initial-weights": str(servers), "available-timeout": 30.0}
        run = BackgroundRun(lab, lab.directory / "r", 2, CONFIG | frozen, superlink="lab")
        run.finish()
        assert summary(run.folder)["absent"] == []
        (own / SHARDS[1]).unlink()
        lacking = BackgroundRun(lab, lab.directory / "lacking", 2, CONFIG | frozen, superlink="lab")
        assert lacking.process.wait(timeout=300) != 0 and not lacking.folder.exists()
        refusal, told = (" ".join(text.split()) for text in (lacking.log, log.read_text(errors="replace")))
        assert re.search(r"clinic-a\): its machine .* \(initial-weights: must be available\)", refusal), refusal
        assert f"initial-weights {own / INDEX}: lacks 1 of 3 shards" in told and SHARDS[1] in told
    finally:
        supernode.terminate()
        supernode.wait(30)
    checked = corolla("node", "audit", environment=site)
    assert checked.returncode == 0 and "clinic-a: " in checked.stdout, checked.stderr
    entry = audit.entries(private.parent)[1]
    assert entry["kind"] == "run" and entry["application"] == application_hash({}) and json.dumps(entry["config"])
    status = lab.cluster("status")
    (row,) = (line for line in status.stdout.splitlines() if "supernode-1" in line)
    assert "joins" in row and "admitted" in row and "offline" in row, status.stdout
    assert lab.cluster("down").returncode == 0
    kept = os.listdir(lab.directory / "state" / "sites" / "lab" / "supernode-0")
    assert audit.FILE in kept and audit.HEAD in kept
