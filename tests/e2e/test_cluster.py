"""`corolla cluster` with real processes on loopback: TLS and authentication, refusals, ssh (a stand-in), clean ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from deploy.node import free_ports
from fl_app.launch import end_processes, flower_environment, processes_with
from tests.e2e.conftest import corolla, settings, summary

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SUPERNODE = str(Path(sys.executable).parent / "flower-supernode")


@dataclass
class Lab:
    """A directory with an inventory, its own Flower config and state; everything is ended at the end."""

    directory: Path
    environment: dict[str, str]
    inventory: Path = field(init=False)

    def __post_init__(self) -> None:
        self.inventory = self.directory / "lab.yaml"

    def write(self, **content: Any) -> tuple[int, int]:
        """Write lab.yaml with free ports; return (fleet port, control port)."""
        fleet, control = free_ports(2)
        content["superlink"] = {"fleet-port": fleet, "control-port": control, **content.get("superlink", {})}
        self.inventory.write_text(yaml.safe_dump(content))
        return fleet, control

    def cluster(self, command: str, *arguments: str, target: str = "") -> subprocess.CompletedProcess[str]:
        return corolla("cluster", command, target or str(self.inventory), *arguments, environment=self.environment)

    @property
    def connections(self) -> set[str]:
        path = self.directory / "flwr" / "config.toml"
        return set(tomllib.loads(path.read_text())["superlink"]) if path.exists() else set()

    @property
    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "state" / "clusters" / "lab" / "cluster.json").read_text())
        return found

    def started(self) -> list[psutil.Process]:
        """Every process that belongs to this lab, by its environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get("LAB") == str(self.directory):
                    found.append(process)
        return found


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    environment = flower_environment(tmp_path / "flwr")
    environment |= {"COROLLA_STATE_HOME": str(tmp_path / "state"), "LAB": str(tmp_path)}
    lab = Lab(tmp_path, environment)
    yield lab
    left = lab.started()
    end_processes(left)
    assert left == []


def rogue(lab: Lab, name: str, fleet: int, *arguments: str) -> Path:
    """Start a SuperNode that must not get in; return its log."""
    config = ["--superlink", f"127.0.0.1:{fleet}", "--port", str(free_ports(1)[0])]
    config += ["--node-config", "partition-id=0 num-partitions=2"]
    log = lab.directory / f"{name}.log"
    with log.open("wb") as file:
        subprocess.Popen(
            [SUPERNODE, *arguments, *config], env=lab.environment | {"ROGUE": str(lab.directory)}, stdin=subprocess.DEVNULL,
            stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    return log


def says(log: Path, text: str, seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while text not in log.read_text(errors="replace"):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def test_tls_cluster_from_keys_to_down(lab: Lab) -> None:
    fleet, _ = lab.write(tls=True, hosts=[{"host": "local", "supernodes": 2, "gpus": []}])
    missing = lab.cluster("up")
    assert missing.returncode == 2 and "`corolla cluster keys CLUSTER.yaml` makes them" in missing.stderr.replace("\n", " ")
    assert lab.cluster("keys").returncode == 0
    up = lab.cluster("up")
    assert up.returncode == 0, up.stdout + up.stderr
    again = lab.cluster("up")
    assert again.returncode == 2 and "cluster lab is already up" in again.stderr

    # who must not get in: told so while others work
    keys, other = lab.directory / "lab-keys", lab.directory / "other.yaml"
    other.write_text(yaml.safe_dump({"tls": True, "hosts": [{"host": "local", "supernodes": 1}]}))
    assert lab.cluster("keys", target=str(other)).returncode == 0
    theirs = lab.directory / "other-keys"
    ca, foreign_ca = ["--root-certificates", str(keys / "ca.crt")], ["--root-certificates", str(theirs / "ca.crt")]
    key, foreign_key = (["--auth-supernode-private-key", str(d / "supernode-0.key")] for d in (keys, theirs))
    refused = {
        "unregistered": (rogue(lab, "unregistered", fleet, *ca, *foreign_key), "[code: 2004] Failed to activate SuperNode"),
        "no-key": (rogue(lab, "no-key", fleet, *ca), "[code: 2001] SuperNode authentication is enabled"),
        "wrong-ca": (rogue(lab, "wrong-ca", fleet, *foreign_ca, *key), "CERTIFICATE_VERIFY_FAILED"),
        "plaintext": (rogue(lab, "plaintext", fleet, "--insecure"), "Connection attempt failed"),
    }  # fmt: skip
    config = {"method": "fedcac", "num-server-rounds": 2, "train-samples": 40, "run-name": "r"}
    config["state-dir"] = str(lab.directory / "client-state")
    run = corolla(
        "run", "--superlink", "lab", "--clients", "2", "--output-dir", str(lab.directory), *settings(config),
        environment=lab.environment,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert summary(lab.directory / "r")["digest"] is not None

    for who, (log, reason) in refused.items():
        assert says(log, reason), f"{who}:\n{log.read_text()}"
        assert "SuperNode ID" not in log.read_text(), who
    superlink = lab.directory / "state" / "clusters" / "lab" / "superlink.log"
    assert says(superlink, "No SuperNode found with the given public key"), superlink.read_text()
    assert says(superlink, "WRONG_VERSION_NUMBER"), superlink.read_text()  # plaintext
    end_processes(processes_with(f"ROGUE={lab.directory}"))

    status = lab.cluster("status")
    assert status.returncode == 0, status.stdout + status.stderr
    rows = [line.split() for line in status.stdout.splitlines() if "supernode-" in line]
    assert [[w for w in row if w not in "│"][:4] for row in rows] == [
        ["supernode-0", "0", "local", "none"], ["supernode-1", "1", "local", "none"]
    ]  # fmt: skip
    assert all("alive" in row and "serving" in row and "online" in row for row in rows)
    assert "SuperNode ID" in lab.cluster("logs", "supernode-1", "--lines", "200").stdout
    unknown = lab.cluster("logs", "supernode-7")
    assert unknown.returncode == 2 and "superlink, supernode-0, supernode-1" in unknown.stderr.replace("\n", " ")

    down = lab.cluster("down")
    assert down.returncode == 0, down.stdout + down.stderr
    assert lab.started() == [] and "lab" not in lab.connections
    assert sorted(p.name for p in superlink.parent.iterdir()) == ["superlink.log", "supernode-0.log", "supernode-1.log"]
    assert "is not up" in lab.cluster("down").stderr.replace("\n", " ")


FAKE_SSH = """#!/bin/sh
# what sshd would do: a new environment, the command run by a shell; -N only forwards (the port is the same one here)
forward=
while [ "$1" != -- ]; do [ "$1" = -N ] && forward=1; shift; done
echo "$2" >> "{log}"
[ "$2" = lab@gone ] && {{ echo 'ssh: connect to host gone port 22: No route to host' >&2; exit 255; }}
[ -n "$forward" ] && exec sleep 1000
exec env -i HOME="{home}" PATH=/usr/bin:/bin LAB="{lab}" sh -c 'echo "Welcome to $HOME"; exec sh -c "$1"' sh "$3"
"""


def test_remote_hosts_over_ssh(lab: Lab) -> None:
    home, log, bin_ = lab.directory / "remote home", lab.directory / "ssh.log", lab.directory / "bin"
    home.mkdir()
    bin_.mkdir()
    (bin_ / "ssh").write_text(FAKE_SSH.format(log=log, home=home, lab=lab.directory))
    (bin_ / "ssh").chmod(0o755)
    lab.environment["PATH"] = f"{bin_}{os.pathsep}{lab.environment['PATH']}"
    lab.environment["LAB_PATH_PROBE"] = "must not reach the other side"
    remote = {"host": "lab@node1", "python": sys.executable}
    # the launcher puts this Python's directory first in PATH; ssh must still be ours
    assert shutil.which("ssh", path=lab.environment["PATH"]) == str(bin_ / "ssh")

    lab.write(tls=True, superlink=remote, hosts=[remote, {"host": "lab@gone", "python": "/p"}])
    assert "must be an address that lab@gone can reach" in lab.cluster("up").stderr.replace("\n", " ")

    lab.write(tls=True, superlink=remote, hosts=[remote, remote | {"data-path": "/no such site"}])
    assert lab.cluster("keys").returncode == 0
    failed = lab.cluster("up")
    assert failed.returncode == 2 and "lab@node1: /no such site: there is no such file" in failed.stderr.replace("\n", " ")

    site = lab.directory / "a site"
    site.mkdir()
    fleet, control = lab.write(tls=True, superlink=remote, hosts=[remote, remote | {"data-path": str(site)}])
    up = lab.cluster("up")
    assert up.returncode == 0, up.stdout + up.stderr
    there = home / ".local" / "state" / "corolla" / "clusters" / "lab"
    copied = {path.name: path.stat().st_mode & 0o777 for path in (there / "keys").iterdir()}
    assert copied == dict.fromkeys(["ca.crt", "server.crt", "server.key", "supernode-0.key", "supernode-1.key"], 0o600)
    node = psutil.Process(json.loads((there / "supernode-1.json").read_text())["pid"])
    assert f'data-path="{site}"' in node.cmdline()[-1] and "LAB_PATH_PROBE" not in node.environ()
    assert node.environ()["OMP_NUM_THREADS"] == "1"

    status = lab.cluster("status")
    assert status.returncode == 0, status.stdout + status.stderr
    assert "tunnel" in status.stdout and "lab@node1" in status.stdout
    assert "Fleet API" in lab.cluster("logs", "superlink", "--lines", "500").stdout
    node.kill()
    ended = lab.cluster("status")
    assert ended.returncode == 1 and "ended" in ended.stdout
    restarted = lab.cluster("restart", "supernode-1")
    assert restarted.returncode == 0, restarted.stdout + restarted.stderr
    psutil.Process(json.loads((there / "supernode-1.json").read_text())["pid"]).kill()

    # another process has its pid by now, for all the record knows
    bystander = subprocess.Popen(["sleep", "1000"], env={**os.environ, "BYSTANDER": "1"})
    record = json.loads((there / "supernode-1.json").read_text())
    (there / "supernode-1.json").write_text(json.dumps(record | {"pid": bystander.pid}))
    down = lab.cluster("down", target="lab")
    assert down.returncode == 0, down.stdout + down.stderr
    assert lab.started() == [] and bystander.poll() is None
    assert not (there / "keys").exists() and not (there / "supernode-0.json").exists()
    bystander.kill()
    bystander.wait()
    assert set(log.read_text().split()) == {"lab@node1"}


def test_a_failed_up_shows_why_and_leaves_nothing(lab: Lab) -> None:
    (lab.directory / "a-directory.db").mkdir()
    lab.write(superlink={"database": str(lab.directory / "a-directory.db")}, hosts=[{"host": "local"}])
    failed = lab.cluster("up")
    assert failed.returncode == 2
    assert "superlink: ended" in failed.stderr and "unable to open database file" in failed.stderr, failed.stderr
    assert lab.started() == [] and "lab" not in lab.connections
    assert "is not up" in lab.cluster("status").stderr.replace("\n", " ")

    import socket

    fleet, _ = lab.write(hosts=[{"host": "local"}])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", fleet))
        taken.listen()
        refused = lab.cluster("up")
    assert f"port {fleet}: cannot listen on 127.0.0.1: Address already in use" in refused.stderr.replace("\n", " ")
    assert lab.started() == []
