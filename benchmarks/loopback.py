"""A SuperLink and SuperNodes on loopback, for benchmarks: own FLWR_HOME, free ports, ended with their children."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from fl_app.keys import Scalar
from fl_app.processes import LAUNCH, end_processes, flower_environment, free_ports, processes_with, wait_for_http

# name of the SuperLink connection
NAME = "loopback"


class Loopback:
    """A SuperLink and `num_nodes` SuperNodes. `directory` is on every process's PYTHONPATH, and is deleted at the end.

    gate: options of `deploy.supernode`, which starts the nodes as `corolla cluster` does; None starts them with
    Flower's own command. python: with the Flower and Corolla that all processes use.
    """

    def __init__(self, num_nodes: int, gate: Sequence[str] | None = None, python: str = sys.executable) -> None:
        self.num_nodes, self._gate, self._python = num_nodes, gate, python
        self._commands = Path(python).parent
        self._directory = tempfile.TemporaryDirectory(prefix="corolla-loopback-")
        self.directory = Path(self._directory.name)
        self.environment = flower_environment(self.directory)
        self.environment["PATH"] = f"{self._commands}{os.pathsep}{self.environment['PATH']}"
        self.environment[LAUNCH] = str(self.directory)
        self.environment["PYTHONPATH"] = str(self.directory)
        self.environment["COROLLA_STATE_HOME"] = str(self.directory / "nodes")
        self.environment["COROLLA_SITE_DIR"] = str(self.directory / "site")
        self._processes: list[psutil.Popen] = []

    def __enter__(self) -> Loopback:
        """Start everything. SuperNodes retry until they reach the SuperLink."""
        port, fleet = free_ports(1)[0], f"127.0.0.1:{free_ports(1)[0]}"
        (self.directory / "config.toml").write_text(
            f'[superlink]\ndefault = "{NAME}"\n[superlink.{NAME}]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        guarded = [self._python, "-P", "-m", "deploy.superlink", "--fleet", fleet, "--"]
        try:
            self._start("superlink", *guarded, "--insecure", "--host", "127.0.0.1", "--port", str(port))
            wait_for_http(f"http://127.0.0.1:{port}/health", self._processes[0], self.directory / "superlink.log")
            for k in range(self.num_nodes):
                node = f"partition-id={k} num-partitions={self.num_nodes}"
                address = ["--superlink", fleet, "--port", str(free_ports(1)[0]), "--node-config", node]
                command = [str(self._commands / "flower-supernode")]
                if self._gate is not None:
                    command = [self._python, "-P", "-m", "deploy.supernode", "--name", str(k), *self._gate, "--"]
                self._start(f"supernode-{k}", *command, "--insecure", *address)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the processes and their children, and delete the directory."""
        end_processes([*self._processes])
        end_processes(processes_with(f"{LAUNCH}={self.directory}"))
        self._directory.cleanup()

    def supernodes(self) -> list[psutil.Process]:
        """Return all processes of the SuperNodes."""
        # a shared warm process belongs to no launch
        shared = set(processes_with(f"FLWR_HOME={self.directory}")) - set(processes_with(f"{LAUNCH}={self.directory}"))
        return [p for node in self._processes[1:] for p in (node, *node.children(recursive=True))] + list(shared)

    def _start(self, name: str, *command: str) -> None:
        with (self.directory / f"{name}.log").open("wb") as log:
            self._processes.append(
                psutil.Popen(
                    command,
                    env=self.environment,
                    cwd=self.directory,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def run(self, *command: str) -> str:
        """Run one of the installed commands and return its output. If it fails, exit with the output."""
        done = subprocess.run(
            [str(self._commands / command[0]), *command[1:]],
            env=self.environment,
            # a run takes modules from the current directory alone
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if done.returncode:
            sys.exit(f"{' '.join(command[:2])} failed:\n{done.stdout[-3000:]}")
        return done.stdout

    def corolla(self, name: str, config: Mapping[str, Scalar]) -> list[dict[str, Any]]:
        """Run our app on the SuperNodes. Return the lines of metrics.jsonl."""
        values = {
            **config,
            "run-name": name,
            "data-dir": str(self.directory / "data"),
            "state-dir": str(self.directory / "state"),
        }
        words = [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        output = ["--output-dir", str(self.directory)]
        self.run("corolla", "run", "--superlink", NAME, "--clients", str(self.num_nodes), *output, *words)
        return [json.loads(line) for line in (self.directory / name / "metrics.jsonl").read_text().splitlines()]


TINY_MODEL = """\
from torch import nn

def build(in_channels, num_classes, image_size):
    return nn.Sequential(nn.AdaptiveAvgPool2d((4, 6)), nn.Flatten(), nn.Linear(24 * in_channels, num_classes))
"""  # 250 parameters, 1 kB, for scikit-learn's digits


LARGE_MODEL = TINY_MODEL.replace("* in_channels, num", "* in_channels, 320_000), nn.Linear(320_000, num")
"""A model of 11.2 million parameters, 45 MB, whose training takes little time too."""


def tiny(directory: Path, model: str = TINY_MODEL) -> dict[str, Scalar]:
    """Write a model. Return settings with which its training takes almost no time."""
    (directory / "tinymodel.py").write_text(model)
    return {
        "method": "fedcac",
        "dataset": "digits",
        "model": "tinymodel:build",
        "train-samples": 20,
        "test-samples": 10,
        "batch-size": 20,
        "local-epochs": 1,
        "partition": "iid",
        "device": "cpu",
    }
