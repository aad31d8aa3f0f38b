"""Real Flower processes for end-to-end tests: own FLWR_HOME, free ports, own directories; ended by pid."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from flwr.app import Error, Message

from client_app.client_app import app as client_app
from fl_app import server_app
from fl_app.config import parse
from fl_app.processes import end_processes, flower_environment, free_ports, processes_with, script
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS
from tests.conftest import wait_for as wait_for
from tests.e2e.browser import find as find_browser
from tests.e2e.network import network as network

COROLLA = script("corolla")
MODELS = Path(__file__).parent
"""Where gated.py lies. Its models travel with a run of a command in this directory; a site takes them from nowhere else."""


@pytest.fixture(scope="session")
def browser() -> str:
    """Return the path of a browser; skip the test without one."""
    return find_browser()


def runs(process: psutil.Process, word: str) -> bool:
    """Return whether a process has `word` in its command line; False once it has ended."""
    with contextlib.suppress(psutil.Error):
        return any(word in part for part in process.cmdline())
    return False


@dataclass
class Cluster:
    """One flower-superlink and its flower-supernodes, on loopback unless a test puts them elsewhere.

    inside: words before every command that say where it runs (`ip netns exec ...`). python, node_python: of the SuperLink and of
    the SuperNodes, with the Flower beside it. grpc: a newer SuperLink serves SuperNodes of Flower 1.39.
    """

    home: Path
    environment: dict[str, str]
    # of the SuperLink, for SuperNodes
    address: str = "127.0.0.1"
    inside: Sequence[str] = ()
    # the file in which the SuperLink keeps its nodes: without one they end when it is restarted
    database: Path | None = None
    # whose process SuperNodes fork their applications from: "own" or "shared" (deploy.supernode --warm), or none
    warm: str = ""
    python: str = sys.executable
    node_python: str = sys.executable
    grpc: bool = False
    fleet: str = ""
    port: int = 0
    processes: dict[str, psutil.Popen] = field(default_factory=dict)

    def start(self, clients: int) -> None:
        """Start all of a run's SuperNodes, too."""
        self.start_superlink()
        for client_id in range(clients):
            self.start_supernode(client_id, clients)

    def start_superlink(self) -> None:
        self.port, self.fleet = free_ports(1)[0], f"{self.address}:{free_ports(1)[0]}"
        self.restart_superlink()

    def restart_superlink(self) -> None:
        """Start it on the addresses chosen first."""
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "test"\n[superlink.test]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        options = ["--insecure", "--host", "127.0.0.1", "--port", str(self.port)]
        options += ["--database", str(self.database)] if self.database else []
        guard = ["--fleet", self.fleet, *(["--grpc"] if self.grpc else [])]
        self._start(
            "superlink",
            [*self.inside, self.python, "-P", "-m", "deploy.superlink", *guard, "--", *options],
            PATH=self._path(self.python),
        )
        wait_for(lambda: self.processes["superlink"].poll() is not None or self._answers(), every=0.2)
        assert self.processes["superlink"].poll() is None, self.log("superlink")

    def _answers(self) -> bool:
        url = f"http://127.0.0.1:{self.port}/health"
        if self.inside:
            code = f"import urllib.request; urllib.request.urlopen({url!r}, timeout=1)"
            return subprocess.run([*self.inside, sys.executable, "-c", code], capture_output=True).returncode == 0
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(url, timeout=1).status == 200)
        return False

    def start_supernode(
        self, client_id: int, num_clients: int, inside: Sequence[str] | None = None, **config: str
    ) -> None:
        node = f"partition-id={client_id} num-partitions={num_clients}"
        node += "".join(f' {name.replace("_", "-")}="{value}"' for name, value in config.items())
        address = ["--superlink", self.fleet, "--port", str(free_ports(1)[0]), "--node-config", node]
        where = self.inside if inside is None else inside
        name, command = f"supernode-{client_id}", [str(Path(self.node_python).parent / "flower-supernode")]
        environment = {"COROLLA_GATE": str(self.gate(client_id)), "PATH": self._path(self.node_python)}
        if self.warm:
            environment["COROLLA_STATE_HOME"] = str(self.home.parent / "nodes")
            command = [self.node_python, "-P", "-m", "deploy.supernode", "--name", name, "--warm", self.warm, "--"]
        self._start(name, [*where, *command, "--insecure", *address], **environment)

    def start_site(self, client_id: int, num_clients: int, rules: str, **node_config: str) -> None:
        """Start a SuperNode behind a site's gate, with a site.toml of this text. node_config: texts, by name."""
        path = self.home.parent / f"site-{client_id}.toml"
        path.write_text(rules)
        path.chmod(0o644)
        name = f"site-{client_id}"
        command = [
            sys.executable,
            "-P",
            "-m",
            "deploy.supernode",
            "--name",
            name,
            "--site",
            str(path),
            *(["--warm", self.warm] if self.warm else []),
            "--",
            "--insecure",
        ]
        command += ["--superlink", self.fleet, "--port", str(free_ports(1)[0])]
        more = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in node_config.items())
        command += ["--node-config", f"partition-id={client_id} num-partitions={num_clients}{more}"]
        self._start(name, [*self.inside, *command], COROLLA_STATE_HOME=str(self.home.parent / "nodes"))

    def _path(self, python: str) -> str:
        """PATH on which the commands beside a Python come first."""
        return f"{Path(python).parent}{os.pathsep}{self.environment['PATH']}"

    def _start(self, name: str, command: list[str], **environment: str) -> None:
        with (self.home / f"{name}.log").open("ab") as log:
            self.processes[name] = psutil.Popen(
                command,
                env=self.environment | environment,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self, name: str) -> str:
        return (self.home / f"{name}.log").read_text(errors="replace")

    def wait_for_nodes(self) -> None:
        """Return when every SuperNode that was started is connected."""
        nodes = self.processes.keys() - {"superlink"}
        wait_for(lambda: all("SuperNode ID" in self.log(name) for name in nodes), every=0.2)

    def kill(self, name: str) -> None:
        """Kill -9 a process and all it started."""
        process = self.processes[name]
        for victim in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        process.wait()

    # Clients in the middle of training, where the run's model is gated:mlp

    def gate(self, client_id: int) -> Path:
        directory = self.home / f"gate-{client_id}"
        directory.mkdir(exist_ok=True)
        return directory

    def hold(self, client_id: int, training: int) -> None:
        """Let a client's n-th training (from 1) stop in its middle, until `release`."""
        (self.gate(client_id) / f"hold-{training}").touch()

    def release(self, client_id: int, training: int) -> None:
        (self.gate(client_id) / f"hold-{training}").unlink()

    def training(self, client_id: int, training: int) -> psutil.Process:
        """Wait until a client's n-th training has begun, and return its process."""

        def pids() -> list[str]:
            path = self.gate(client_id) / "trainings"
            return path.read_text().splitlines()[training - 1 :] if path.exists() else []

        return psutil.Process(int(wait_for(pids)[0]))

    def stop(self) -> None:
        end_processes([p for p in self.processes.values() if p.poll() is None])
        end_processes(processes_with(f"COROLLA_LAUNCH={self.home}"))


@contextlib.contextmanager
def own_cluster(directory: Path, **environment: str) -> Iterator[Cluster]:
    """A cluster whose files lie in a directory, to be started; nothing of it is left at the end. environment: more variables."""
    home = directory / "flwr"
    home.mkdir()
    environment = flower_environment(home) | environment
    environment |= {"COROLLA_LAUNCH": str(home), "COROLLA_STATE_DIR": str(directory / "client-state")}
    environment["COROLLA_SITE_DIR"] = str(directory / "site")
    environment |= with_test_models(environment)
    running = Cluster(home, environment)
    try:
        yield running
    finally:
        running.stop()
    assert processes_with(f"COROLLA_LAUNCH={home}") == []


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with own_cluster(tmp_path) as running:
        yield running


@pytest.fixture
def warm_cluster(cluster: Cluster) -> Cluster:
    """The cluster, where a client's process starts in a fraction of a second."""
    cluster.warm = "shared"
    return cluster


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

    def process(self, name: str) -> dict[str, Any]:
        """What `up` recorded about a process on this machine."""
        found: dict[str, Any] = json.loads((self.directory / "state" / "clusters" / "lab" / f"{name}.json").read_text())
        return found

    def started(self) -> list[psutil.Process]:
        """Every process that belongs to this lab, by its environment."""
        return processes_with(f"LAB={self.directory}")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    environment = flower_environment(tmp_path / "flwr")
    environment |= {"COROLLA_STATE_HOME": str(tmp_path / "state"), "LAB": str(tmp_path)}
    environment |= with_test_models(environment)
    lab = Lab(tmp_path, environment)
    yield lab
    left = lab.started()
    end_processes(left)
    assert left == []


class BackgroundRun:
    """`corolla run --superlink` in the background."""

    def __init__(
        self, place: Cluster | Lab, folder: Path, clients: int, config: dict[str, Any], superlink: str = "test"
    ) -> None:
        words = [
            COROLLA,
            "run",
            "--superlink",
            superlink,
            "--clients",
            str(clients),
            "--output-dir",
            str(folder.parent),
        ]
        inside = place.inside if isinstance(place, Cluster) else ()
        self.clients, self.config, self.folder = clients, config, folder
        self._log = folder.parent / f"{folder.name}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*inside, *words, *settings({"run-name": folder.name, **config})],
                env=place.environment,
                cwd=MODELS,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def recorded(self) -> int:
        """Rounds in metrics.jsonl."""
        path = self.folder / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.is_file() else 0

    def wait_for_round(self, round: int) -> None:
        """Return when a round is recorded. Fails at once if the run ends before."""
        wait_for(lambda: self.recorded() >= round or self.process.poll() is not None)
        assert self.recorded() >= round, self.log

    def finish(self) -> None:
        code = self.process.wait(timeout=800)
        assert code == 0, self.log


class LossyGrid(InProcessGrid):
    """A grid on which some clients fail in some rounds: (round, client id)."""

    missing: frozenset[tuple[int, int]] = frozenset()

    def _handle(self, message: Message) -> Message:
        if message.metadata.message_type == "train":
            if (int(message.metadata.group_id), message.metadata.dst_node_id - 1) in self.missing:
                return Message(Error(0, "missing in the run that is replayed"), reply_to=message)
        return super()._handle(message)


def replay(run: BackgroundRun, directory: Path) -> str:
    """Digest of an undisturbed run in one process that aggregates, round by round, the replies which `run` aggregated.

    With no reply missing from a round's record that is the same experiment without any fault.
    """
    raw = {
        "run-name": "replay",
        "output-dir": str(directory),
        "state-dir": str(directory / "replay-state"),
        **run.config,
    }
    raw |= {"num-clients": run.clients, "min-available-clients": 0, "min-results": 0.0}
    replies = {(r["round"], int(client)) for r in rounds(run.folder) for client in r["clients"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(MODELS))
        grid = LossyGrid(client_app, raw, run.clients)
        asked = {(round, client) for round in range(1, len(rounds(run.folder)) + 1) for client in range(run.clients)}
        grid.missing = frozenset(asked - replies)
        folder = server_app.run(grid, parse(raw, METHOD_PARAMS), lambda what, done, total: None)
    return str(summary(folder.path)["digest"])


def with_test_models(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to an environment in which models of gated.py are built."""
    paths = [str(MODELS), *filter(None, [environment.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def corolla(
    *arguments: str, environment: dict[str, str] | None = None, directory: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would, in a directory."""
    return subprocess.run(
        [COROLLA, *arguments],
        env=environment or dict(os.environ),
        cwd=directory,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def settings(values: dict[str, Any]) -> list[str]:
    """--set options."""
    return [word for k, v in values.items() for word in ("--set", f"{k}={json.dumps(v)}")]


def summary(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return result


def rounds(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
