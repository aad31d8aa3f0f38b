"""`corolla cluster` with real processes on loopback: from keys to down with TLS, ssh (a stand-in, and a real sshd), clean ends."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy import certificates
from deploy.inventory import is_loopback
from fl_app.processes import end_processes, free_ports
from tests.e2e.conftest import Lab, corolla, settings, summary, wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

# sshd insists on an absolute path
SSHD = "/usr/sbin/sshd"


@pytest.mark.nightly
def test_tls_cluster_from_keys_to_down(lab: Lab) -> None:
    lab.write(tls=True, hosts=[{"host": "local", "supernodes": 2, "gpus": [], "warm": True}])
    missing = lab.cluster("up")
    assert missing.returncode == 2 and "`corolla cluster keys CLUSTER.yaml`" in missing.stderr.replace("\n", " ")
    assert lab.cluster("keys").returncode == 0
    up = lab.cluster("up")
    assert up.returncode == 0, up.stdout + up.stderr
    again = lab.cluster("up")
    assert again.returncode == 2 and "already up" in again.stderr

    config = {"method": "fedcac", "num-server-rounds": 2, "train-samples": 40, "run-name": "r"}
    config["state-dir"] = str(lab.directory / "client-state")
    run = corolla(
        "run",
        "--superlink",
        "lab",
        "--clients",
        "2",
        "--output-dir",
        str(lab.directory),
        *settings(config),
        environment=lab.environment,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert summary(lab.directory / "r")["digest"] is not None

    status = lab.cluster("status")
    assert status.returncode == 0, status.stdout + status.stderr
    rows = [line.split() for line in status.stdout.splitlines() if "supernode-" in line]
    assert [[w for w in row if w not in "│"][:4] for row in rows] == [
        ["supernode-0", "0", "local", "none"],
        ["supernode-1", "1", "local", "none"],
    ]
    assert all("alive" in row and "serving" in row and "online" in row for row in rows)
    assert "SuperNode ID" in lab.cluster("logs", "supernode-1", "--lines", "200").stdout
    unknown = lab.cluster("logs", "supernode-7")
    assert unknown.returncode == 2 and "superlink, supernode-0, supernode-1" in unknown.stderr.replace("\n", " ")

    down = lab.cluster("down")
    assert down.returncode == 0, down.stdout + down.stderr
    assert lab.started() == [] and "lab" not in lab.connections
    left = sorted(path.name for path in (lab.directory / "state" / "clusters" / "lab").iterdir())
    assert left == [".lock", "superlink.log", "supernode-0.log", "supernode-1.log"]
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


@pytest.mark.nightly
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
    assert "lab@gone can reach" in lab.cluster("up").stderr.replace("\n", " ")

    lab.write(tls=True, superlink=remote, hosts=[remote, remote | {"data-path": "/no such site"}])
    assert lab.cluster("keys").returncode == 0
    failed = lab.cluster("up")
    assert failed.returncode == 2 and "lab@node1: /no such site: " in failed.stderr.replace("\n", " ")

    site = lab.directory / "a site"
    site.mkdir()
    fleet, control = lab.write(tls=True, superlink=remote, hosts=[remote, remote | {"data-path": str(site)}])
    up = lab.cluster("up")
    assert up.returncode == 0, up.stdout + up.stderr
    there = home / ".local" / "state" / "corolla" / "clusters" / "lab"
    copied = {path.name: path.stat().st_mode & 0o777 for path in (there / "keys").iterdir()}
    own = [f"supernode-{i}.{end}" for i in (0, 1) for end in ("key", "x25519")]
    assert copied == dict.fromkeys(["ca.crt", "server.crt", "server.key", "peers.txt", *own], 0o600)
    node = psutil.Process(json.loads((there / "supernode-1.json").read_text())["pid"])
    assert f'data-path="{site}"' in node.cmdline()[-1] and "LAB_PATH_PROBE" not in node.environ()
    assert node.environ()["OMP_NUM_THREADS"] == "1"

    status = lab.cluster("status")
    assert status.returncode == 0, status.stdout + status.stderr
    assert "tunnel" in status.stdout and "lab@node1" in status.stdout
    assert "Starting Flower SuperLink" in lab.cluster("logs", "superlink", "--lines", "500").stdout
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


SSHD_CONFIG = """
Port {port}
ListenAddress 127.0.0.1
HostKey {home}/host_key
AuthorizedKeysFile {home}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
SetEnv COROLLA_STATE_HOME={home}/state LAB={lab}
"""
SSH_CONFIG = """
Host second
  HostName 127.0.0.1
  Port {port}
  User {user}
  IdentityFile {home}/user_key
  UserKnownHostsFile {home}/known_hosts
"""


@contextlib.contextmanager
def second_host(lab: Lab) -> Iterator[Path]:
    """A real sshd on a free port of loopback, which ssh knows as `second`; yields the directory with its state."""
    home, port = lab.directory / "second", free_ports(1)[0]
    home.mkdir()
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name)], check=True)
    (home / "known_hosts").write_text(f"[127.0.0.1]:{port} {(home / 'host_key.pub').read_text()}")
    fields = {"port": port, "home": home, "lab": lab.directory, "user": pwd.getpwuid(os.getuid()).pw_name}
    (home / "sshd_config").write_text(SSHD_CONFIG.format(**fields))
    (home / "ssh_config").write_text(SSH_CONFIG.format(**fields))
    # ssh reads ~/.ssh/config of the account, whatever HOME says
    bin_ = lab.directory / "ssh-bin"
    bin_.mkdir()
    (bin_ / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {home}/ssh_config "$@"\n')
    (bin_ / "ssh").chmod(0o755)
    lab.environment["PATH"] = f"{bin_}{os.pathsep}{lab.environment['PATH']}"
    with (home / "sshd.log").open("wb") as log:
        sshd = psutil.Popen(
            [SSHD, "-D", "-e", "-f", str(home / "sshd_config")], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        wait_for(lambda: "Server listening" in (home / "sshd.log").read_text())
        yield home
    finally:
        end_processes([*sshd.children(recursive=True), sshd])


def address_of_this_machine() -> str:
    """An IPv4 address that is not loopback, or ""."""
    addresses = (a.address for found in psutil.net_if_addrs().values() for a in found if a.family == socket.AF_INET)
    return next((a for a in addresses if not is_loopback(a)), "")


@pytest.mark.skipif(not os.path.exists(SSHD), reason=f"no {SSHD}: the ssh of this test is real")
@pytest.mark.skipif(os.getuid() != 0, reason="sshd with a login of its own needs root")
@pytest.mark.skipif(not address_of_this_machine(), reason="no address but loopback")
def test_a_second_host_behind_a_real_sshd(lab: Lab) -> None:
    Path("/run/sshd").mkdir(exist_ok=True)  # Debian's sshd wants it
    entries = [{"host": "local", "gpus": []}, {"host": "second", "python": sys.executable, "gpus": [0], "threads": 2}]
    fleet, _ = lab.write(superlink={"fleet-address": address_of_this_machine()}, hosts=entries)
    with second_host(lab) as home:
        # TLS is not asked for: an address that others reach has it
        refused = lab.cluster("up")
        assert refused.returncode == 2 and "keys" in refused.stderr and lab.started() == [], refused.stderr
        assert lab.cluster("keys").returncode == 0
        up = lab.cluster("up", "--timeout", "300")
        assert up.returncode == 0, up.stdout + up.stderr
        there = home / "state" / "clusters" / "lab"
        copied = {path.name: path.stat().st_mode & 0o777 for path in (there / "keys").iterdir()}
        assert copied == dict.fromkeys(["ca.crt", "peers.txt", "supernode-1.key", "supernode-1.x25519"], 0o600)
        node = psutil.Process(json.loads((there / "supernode-1.json").read_text())["pid"])
        said = {name: node.environ()[name] for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        assert said == {"CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
        words = node.cmdline()
        assert words[words.index("--node-config") + 1].startswith("partition-id=1 num-partitions=2 ")
        assert f"{address_of_this_machine()}:{fleet}" in words

        status = lab.cluster("status")
        assert status.returncode == 0, status.stdout + status.stderr
        rows = [
            [word for word in line.split() if word not in "│┃"]
            for line in status.stdout.splitlines()
            if "supernode-" in line
        ]
        assert [row[:4] for row in rows] == [["supernode-0", "0", "local", "none"], ["supernode-1", "1", "second", "0"]]
        keys = [certificates.fingerprint((lab.directory / "lab-keys" / f"{row[0]}.pub").read_bytes()) for row in rows]
        short = [key.removeprefix("SHA256:")[:8] for key in keys]
        assert [row[5:] for row in rows] == [["alive", "serving", "online", key] for key in short], rows
        assert "SuperNode ID" in lab.cluster("logs", "supernode-1", "--lines", "200").stdout

        config = {"method": "fedcac", "num-server-rounds": 1, "train-samples": 40, "run-name": "r", "device": "cpu"}
        config["state-dir"] = str(lab.directory / "client-state")
        arguments = ["--superlink", "lab", "--clients", "2", "--output-dir", str(lab.directory), *settings(config)]
        run = corolla("run", *arguments, environment=lab.environment)
        assert run.returncode == 0, run.stdout + run.stderr
        assert summary(lab.directory / "r")["digest"] is not None

        down = lab.cluster("down")
        assert down.returncode == 0, down.stdout + down.stderr
        assert lab.started() == [] and not node.is_running() and not (there / "keys").exists()


def test_a_failed_up_shows_why_and_leaves_nothing(lab: Lab) -> None:
    (lab.directory / "a-directory.db").mkdir()
    lab.write(superlink={"database": str(lab.directory / "a-directory.db")}, hosts=[{"host": "local"}])
    failed = lab.cluster("up")
    assert failed.returncode == 2
    assert "superlink: ended" in failed.stderr and "unable to open database file" in failed.stderr, failed.stderr
    assert lab.started() == [] and "lab" not in lab.connections
    assert "is not up" in lab.cluster("status").stderr.replace("\n", " ")

    fleet, _ = lab.write(hosts=[{"host": "local"}])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", fleet))
        taken.listen()
        refused = lab.cluster("up")
    assert f"port {fleet}: cannot listen on 127.0.0.1: Address already in use" in refused.stderr.replace("\n", " ")
    assert lab.started() == []
