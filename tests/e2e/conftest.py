"""Real Flower processes for end-to-end tests: own FLWR_HOME, free ports, own directories; ended by pid."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from fl_app.launch import end_processes, flower_environment, free_port, processes_with, wait_for_http

COROLLA = str(Path(sys.executable).parent / "corolla")


@dataclass
class Cluster:
    """One flower-superlink and its flower-supernodes on loopback."""

    home: Path
    environment: dict[str, str]
    fleet: str = ""
    port: int = 0
    processes: dict[str, psutil.Popen] = field(default_factory=dict)

    def start_superlink(self) -> None:
        self.port, self.fleet = free_port(), f"127.0.0.1:{free_port()}"
        self.restart_superlink()

    def restart_superlink(self) -> None:
        """Start it on the addresses chosen first."""
        port = self.port
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "test"\n[superlink.test]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        address = ["--host", "127.0.0.1", "--port", str(port), "--fleet-api-address", self.fleet]
        self._start("superlink", "flower-superlink", "--insecure", *address)
        wait_for_http(f"http://127.0.0.1:{port}/health", self.processes["superlink"], self.home / "superlink.log")

    def start_supernode(self, client_id: int, num_clients: int, **config: str) -> None:
        node = f"partition-id={client_id} num-partitions={num_clients}"
        node += "".join(f' {name.replace("_", "-")}="{value}"' for name, value in config.items())
        address = ["--superlink", self.fleet, "--port", str(free_port()), "--node-config", node]
        self._start(f"supernode-{client_id}", "flower-supernode", "--insecure", *address)

    def _start(self, name: str, command: str, *arguments: str) -> None:
        with (self.home / f"{name}.log").open("ab") as log:
            self.processes[name] = psutil.Popen(
                [str(Path(sys.executable).parent / command), *arguments], env=self.environment, cwd=self.home,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def stop(self) -> None:
        end_processes([p for p in self.processes.values() if p.poll() is None])
        end_processes(processes_with(f"COROLLA_LAUNCH={self.home}"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    home = tmp_path / "flwr"
    home.mkdir()
    environment = flower_environment(home)
    environment["COROLLA_LAUNCH"] = str(home)
    running = Cluster(home, environment)
    yield running
    running.stop()
    assert processes_with(f"COROLLA_LAUNCH={home}") == []


def corolla(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would."""
    return subprocess.run(
        [COROLLA, *arguments], env=environment or dict(os.environ), capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def settings(values: dict[str, Any]) -> list[str]:
    """--set options."""
    return [word for k, v in values.items() for word in ("--set", f"{k}={json.dumps(v)}")]


def summary(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return result


def rounds(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
