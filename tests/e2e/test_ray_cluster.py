"""A simulation on a Ray cluster of two nodes that is there already: the same bits; nodes that do not share what they must."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fl_app.processes import end_processes, free_ports, processes_with, script
from tests.e2e.conftest import COROLLA, corolla, settings, summary, wait_for

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

MARK = "RAY_TEST_CLUSTER"
CONFIG = {"method": "fedcac", "num-server-rounds": 3, "train-samples": 40, "device": "cpu"}


class Nodes:
    """Ray nodes on loopback, one CPU each; Ray makes its sockets in a short directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.address = directory, f"127.0.0.1:{free_ports(1)[0]}"
        self.environment = {**os.environ, MARK: str(directory), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
        self._started = 0

    def start(self, *before: str) -> None:
        """Start the head, or one more node. before: words before the command."""
        head = not self._started
        where = ["--head", f"--port={self.address.rpartition(':')[2]}"] if head else [f"--address={self.address}"]
        options = [
            "--node-ip-address=127.0.0.1",
            "--num-cpus=1",
            "--min-worker-port=0",
            "--max-worker-port=0",
            "--block",
        ]
        options += [f"--temp-dir={self.directory / 'ray'}", "--include-dashboard=false"] if head else []
        self._started += 1
        with (self.directory / f"node-{self._started}.log").open("wb") as log:
            subprocess.Popen(
                [*before, script("ray"), "start", *where, *options, "--disable-usage-stats"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_for(lambda: len(self.raylets()) == self._started and "started" in self.log(self._started), every=0.2)

    def log(self, number: int) -> str:
        return (self.directory / f"node-{number}.log").read_text(errors="replace")

    def raylets(self) -> list[psutil.Process]:
        return [process for process in self.processes() if name(process) == "raylet"]

    def processes(self) -> list[psutil.Process]:
        return processes_with(f"{MARK}={self.directory}")


def name(process: psutil.Process) -> str:
    """A process's name, a worker's what it is; "" once it has ended."""
    try:
        return " ".join(process.cmdline()) if process.name().startswith("ray::") else process.name()
    except psutil.NoSuchProcess:
        return ""


@pytest.fixture
def nodes() -> Iterator[Nodes]:

    directory = Path(tempfile.mkdtemp(prefix="ray-"))
    running = Nodes(directory)
    yield running
    for _ in range(3):
        end_processes(running.processes())
    shutil.rmtree(directory, ignore_errors=True)
    assert running.processes() == []


def words(directory: Path, name: str) -> list[str]:
    own = {"run-name": name, "state-dir": str(directory / f"state-{name}")}
    return ["--clients", "4", "--output-dir", str(directory), *settings(CONFIG | own)]


def test_the_same_bits_on_two_nodes(nodes: Nodes, tmp_path: Path) -> None:
    nodes.start()
    nodes.start()
    with (tmp_path / "log").open("wb") as log:
        run = subprocess.Popen(
            [COROLLA, "run", "--ray-address", nodes.address, *words(tmp_path, "cluster")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    both, used = nodes.raylets(), set[int]()
    while run.poll() is None:
        used |= {raylet.pid for raylet in both for child in raylet.children() if "ClientAppActor" in name(child)}
        time.sleep(0.05)
    assert run.returncode == 0, (tmp_path / "log").read_text(errors="replace")
    assert used == {raylet.pid for raylet in nodes.raylets()} and len(used) == 2  # and both are still there
    assert not (tmp_path / ".corolla").exists() and list(tmp_path.rglob(".shared-*")) == []
    plain = corolla("run", *words(tmp_path, "plain"))
    assert plain.returncode == 0, plain.stderr
    assert summary(tmp_path / "cluster")["digest"] == summary(tmp_path / "plain")["digest"]
    assert summary(tmp_path / "cluster")["failures"] == 0

    too_much = corolla("run", "--ray-address", nodes.address, "--cpus-per-client", "2", *words(tmp_path, "large"))
    told = " ".join(too_much.stderr.split())
    assert too_much.returncode == 2 and "2 CPUs and 0 GPUs" in told, told


def test_what_follows_from_the_seed_does_so_on_a_cluster(nodes: Nodes, tmp_path: Path) -> None:
    """Keys of private runs and the noise of differential privacy: a Ray cluster's processes are not this command's children."""
    nodes.start()
    own = settings({"private": True, "dp-epsilon": 8.0})
    for where in (["--ray-address", nodes.address], ["--in-process"]):
        done = corolla("run", *where, *words(tmp_path, where[0].strip("-")), *own)
        assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "ray-address")["digest"] == summary(tmp_path / "in-process")["digest"]
    # nor what only secret noise leaves there
    assert list(tmp_path.glob("state-*/*")) == []


@pytest.mark.skipif(os.getuid() != 0, reason="a node with a file system of its own needs root")
def test_a_directory_that_is_not_shared(nodes: Nodes, tmp_path: Path) -> None:
    nodes.start()
    (tmp_path / "out").mkdir()
    nodes.start("unshare", "-m", "sh", "-c", f'mount -t tmpfs none {tmp_path / "out"} && exec "$@"', "sh")
    done = corolla("run", "--ray-address", nodes.address, *words(tmp_path / "out", "never"))
    told = " ".join(done.stderr.split())
    assert done.returncode == 2 and f"output-dir: {tmp_path / 'out'} is not shared: " in told, told
    assert "state-dir: " in told and "(No such file or" in told
    assert not (tmp_path / "out" / "never").exists()


def test_no_cluster() -> None:
    for address, why in (("ray://localhost:10001", "must be HOST:PORT"), ("127.0.0.1:1", "Connection refused")):
        done = corolla("run", "--ray-address", address)
        assert done.returncode == 2 and why in " ".join(done.stderr.split()) and "--ray-address" in done.stderr, (
            done.stderr
        )
    done = corolla("run", "--ray-address", "127.0.0.1:1", "--in-process")
    assert done.returncode == 2 and "--in-process and --ray-address" in " ".join(done.stderr.split())
