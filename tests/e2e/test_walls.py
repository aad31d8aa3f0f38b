"""Ways out of a confined application, each tried by a client of a live node: behind bubblewrap, and by Landlock alone.

The application is an ordinary run with a model of the user's, whose code tries every way when a client builds it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy import bubblewrap, confine
from tests.e2e.conftest import Cluster, corolla, settings

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

CONFIG = {
    "method": "fedavg",
    "model": "attacks:mlp",
    "num-server-rounds": 1,
    "train-samples": 40,
    "test-samples": 20,
    "local-epochs": 1,
    "available-timeout": 300.0,
}
MODEL = """
import ctypes, fcntl, glob, json, os, socket
from pathlib import Path

from torch import nn

GIVEN = json.loads('''@GIVEN@''')
# a confined client alone has it
HOME = os.environ.get("TMPDIR", "")


def mlp(in_channels, num_classes, image_size):
    if "/sites/" in HOME and not os.path.exists(f"{HOME}/found.json"):
        found = {name: tried(work) for name, work in WAYS.items()}
        Path(f"{HOME}/found.new").write_text(json.dumps(found))
        os.rename(f"{HOME}/found.new", f"{HOME}/found.json")
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))


def tried(work):
    try:
        return work() is not False
    except Exception:
        return False


def connect(address):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)


def datagram(address):
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.sendto(b"x", address)


def type_keys():
    terminal = os.open(GIVEN["terminal"], os.O_RDWR | os.O_NOCTTY)
    for key in b"id":
        fcntl.ioctl(terminal, 0x5412, bytes([key]))


def elsewhere(name):
    # in a process that is not of this node
    return any(GIVEN["mark"] in Path(path).read_bytes().decode(errors="replace") for path in readable(name))


def readable(name):
    for path in glob.glob(f"/proc/[0-9]*/{name}"):
        try:
            open(path, "rb").close()
        except OSError:
            continue
        yield path


def keyring():
    libc = ctypes.CDLL(None)
    user = ctypes.c_long(-4)
    key = libc.syscall(250, ctypes.c_long(10), user, b"user", GIVEN["mark"].encode(), ctypes.c_long(0))
    return key > 0


def own_output():
    with open("/proc/self/fd/2", "rb", buffering=0) as log:
        return bool(log.seekable() and os.fstat(log.fileno()).st_size)


WAYS = {
    "Unix sockets": lambda: connect(GIVEN["socket"]),
    "Unix sockets, abstract": lambda: connect("\\0" + GIVEN["mark"]),
    "Unix sockets in a named path": lambda: connect(GIVEN["data"] + "/socket"),
    "Unix sockets, datagrams": lambda: datagram(GIVEN["data"] + "/datagrams"),
    "terminals": type_keys,
    "/dev/shm": lambda: open("/dev/shm/" + GIVEN["mark"]).read(),
    "chmod": lambda: os.chmod(GIVEN["forbidden"], 0o666),
    "chmod of a named path": lambda: os.chmod(GIVEN["data"] + "/file", 0o666),
    "/etc": lambda: open(GIVEN["etc"]).read(),
    "processes, environment": lambda: elsewhere("environ"),
    "processes, arguments": lambda: elsewhere("cmdline"),
    "keyrings, names": lambda: bool(open("/proc/keys").read()),
    "the SuperNode's Flower": lambda: open(GIVEN["flower"] + "/config.toml", "a").close(),
    "processes, signals": lambda: os.kill(GIVEN["pid"], 0),
    "forbidden": lambda: open(GIVEN["forbidden"]).read(),
    "home": lambda: open(GIVEN["home"]).read(),
    "secret": lambda: os.listdir(GIVEN["warm"]),
    "the site's own": lambda: open(os.path.dirname(HOME) + "/audit.jsonl").read(),
    "/run": lambda: os.listdir("/run"),
    "variables": lambda: "SITE_PASSWORD" in os.environ or "SSH_AUTH_SOCK" in os.environ,
    "the kernel's settings": lambda: open("/proc/sys/kernel/domainname", "w").close(),
    "network, TCP": lambda: socket.create_connection(("127.0.0.1", GIVEN["port"]), 5).close(),
    "network, UDP": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", GIVEN["udp"])),
    "network, the hypervisor": lambda: socket.socket(40, socket.SOCK_STREAM).close(),
    "keyrings": keyring,
    "the node's log": own_output,
    # not forbidden: they show that the test can see something
    "data": lambda: open(GIVEN["data"] + "/file").read(),
    "own files": lambda: open(f"{HOME}/own", "w").close(),
}
"""
ALLOWED = {"data", "own files"}
# what Landlock alone does not stop, by the first word of its line in the log
SIX = ("Unix sockets", "terminals", "/dev/shm", "chmod", "/etc", "processes")


@contextlib.contextmanager
def outside(directory: Path) -> Iterator[dict[str, Any]]:
    """Make what an application must not reach, and yield what the attacks need to know of it."""
    mark = f"walls-{os.getpid()}"
    data, shared = directory / "data", Path("/dev/shm") / mark
    data.mkdir()
    (data / "file").write_text("data")
    (directory / "forbidden").write_text("secret")
    (directory / "forbidden").chmod(0o600)
    shared.write_text("memory")
    master, terminal = pty.openpty()
    listening = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ports = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)]
    ports[1].bind(("127.0.0.1", 0))
    ports[1].setblocking(False)
    other = subprocess.Popen([sys.executable, "-c", "input()", mark], stdin=subprocess.PIPE, env={"OTHER": mark})
    # a home may lie in /tmp, and applications have a /tmp of their own
    home = tempfile.NamedTemporaryFile(dir=Path.home(), prefix=".walls-")
    try:
        for sock, address in zip(listening, (str(directory / "s"), f"\0{mark}", str(data / "socket")), strict=True):
            sock.bind(address)
            sock.listen()
        datagrams.bind(str(data / "datagrams"))
        yield {
            "mark": mark,
            "data": str(data),
            "forbidden": str(directory / "forbidden"),
            "socket": str(directory / "s"),
            "terminal": os.ttyname(terminal),
            "etc": next(
                str(path) for path in map(Path, ("/etc/shells", "/etc/fstab", "/etc/hostname")) if path.exists()
            ),
            "pid": other.pid,
            "home": home.name,
            "warm": str(directory / "nodes" / "warm"),
            "port": ports[0].getsockname()[1],
            "udp": ports[1].getsockname()[1],
            "datagrams": ports[1],
        }
    finally:
        other.kill()
        other.wait()
        shared.unlink()
        for each in (*listening, datagrams, *ports):
            each.close()
        home.close()
        os.close(master)
        os.close(terminal)


def found_by(cluster: Cluster, directory: Path, rule: str) -> dict[str, bool]:
    """Run the attacks at a live node with this rule; return whether each one succeeded."""
    cluster.start_superlink()
    cluster.environment |= {"SITE_PASSWORD": "secret", "SSH_AUTH_SOCK": "/run/agent"}
    (directory / "nodes" / "warm").mkdir(parents=True)
    with outside(directory) as given:
        given["flower"] = str(cluster.home)
        cluster.start_site(0, 1, f'confine = {rule}\nmin-samples = 40\nreadable-paths = ["{given["data"]}"]\n')
        (directory / "attacks.py").write_text(MODEL.replace("@GIVEN@", json.dumps(given, default=str)))
        options = ["--clients", "1", "--output-dir", str(directory), *settings(CONFIG)]
        done = corolla("run", "--superlink", "test", *options, environment=cluster.environment, directory=directory)
        path = directory / "nodes" / "sites" / "site-0" / "tmp" / "found.json"
        assert done.returncode == 0 and path.exists(), done.stdout + done.stderr + cluster.log("site-0")
        found: dict[str, bool] = json.loads(path.read_text())
        # a packet may go to a network in which nobody listens
        found["network, UDP"] = arrived(given["datagrams"])
        return found


def arrived(sock: socket.socket) -> bool:
    """Return whether a packet has arrived."""
    with contextlib.suppress(BlockingIOError):
        return bool(sock.recv(1))
    return False


@pytest.mark.skipif(bubblewrap.find() is None, reason=bubblewrap.why_not() or "bubblewrap makes its walls here")
@pytest.mark.parametrize("rule", ["true", '"strict"'])
@pytest.mark.usefixtures("warm_cluster")
def test_nothing_is_reached_behind_walls(cluster: Cluster, tmp_path: Path, rule: str) -> None:
    found = found_by(cluster, tmp_path, rule)
    assert {name for name, reached in found.items() if reached} == ALLOWED
    assert "not stopped" not in cluster.log("site-0")


@pytest.mark.skipif(not confine.landlock_version(), reason=confine.NONE)
@pytest.mark.usefixtures("warm_cluster")
def test_landlock_alone_names_what_it_does_not_stop(cluster: Cluster, tmp_path: Path) -> None:
    without_bubblewrap(cluster)
    found = found_by(cluster, tmp_path, "true")
    log = cluster.log("site-0")
    lines = [line.partition("not stopped: ")[2] for line in log.splitlines() if "not stopped: " in line]
    assert set(lines) == set(confine.OPEN) and "bubblewrap" in log
    for way in SIX:
        assert any(line.startswith(f"{way}:") for line in lines), way
    reached = {name for name, reached in found.items() if reached} - ALLOWED
    named = {line.partition(":")[0] for line in lines}
    # "chmod of a named path" is a way of the line "chmod: ..."
    assert {name for name in reached if re.split(r",| in | of ", name)[0] not in named} == set(), log


def test_strict_does_not_start_without_bubblewrap(cluster: Cluster) -> None:
    without_bubblewrap(cluster)
    cluster.fleet = "127.0.0.1:1"
    cluster.start_site(0, 1, 'confine = "strict"\n')
    assert cluster.processes["site-0"].wait(60) == 2
    assert "confine: strict: bubblewrap" in cluster.log("site-0")


def without_bubblewrap(cluster: Cluster) -> None:
    """Start nodes with a PATH on which there is no bubblewrap."""
    cluster.environment["PATH"] = str(Path(sys.executable).parent)
