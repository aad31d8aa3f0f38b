"""Starts runs through Flower's own commands: a private SuperLink for simulations, `flwr run` with the environment it needs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

import psutil

import fl_app
from fl_app.errors import UserError
from fl_app.keys import Scalar
from fl_app.processes import (
    LAUNCH,
    LAUNCHER,
    end_processes,
    flower_environment,
    free_ports,
    identity,
    orphans,
    processes_with,
    script,
    wait_for_http,
)
from fl_app.toml import to_toml

APP_DIRECTORY = Path(fl_app.__file__).resolve().parent.parent


class SimulationSuperLink:
    """A SuperLink of our own for simulations: own FLWR_HOME, free ports, ended with everything it started."""

    name = "simulation"

    def __init__(self) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="corolla-flwr-")
        self.home = Path(self._home.name)
        self.environment = flower_environment(self.home)
        self.environment[LAUNCH] = str(self.home)
        self.environment[LAUNCHER] = identity(os.getpid())
        self.environment["COROLLA_SIMULATION"] = "1"
        self.log = self.home / "superlink.log"

    def __enter__(self) -> SimulationSuperLink:
        """Start it and wait until it answers."""
        end_processes(orphans())  # what a killed `corolla run` left would go on training
        port = free_ports(1)[0]
        self.home.joinpath("config.toml").write_text(
            f'[superlink]\ndefault = "{self.name}"\n[superlink.{self.name}]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        command = [script("flower-superlink"), "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
        with self.log.open("wb") as log:
            self.process = psutil.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            wait_for_http(f"http://127.0.0.1:{port}/health", self.process, self.log)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it, then whatever it left running."""
        end_processes([self.process])
        end_processes(processes_with(f"{LAUNCH}={self.home}"))
        self._home.cleanup()


def flwr_run(
    superlink: str,
    config: Mapping[str, Scalar],
    environment: Mapping[str, str],
    on_line: Callable[[str], None],
    federation_config: str = "",
) -> str:
    """Submit a run with `flwr run --stream`, pass every line of its log on, and return its final status.

    Ctrl-C stops the run before it is raised again. Raises UserError if Flower did not accept the run.
    """
    if not (APP_DIRECTORY / "pyproject.toml").is_file():
        raise UserError(f"{APP_DIRECTORY} has no pyproject.toml: install Corolla from a clone (`make install`)")
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as overrides:
        overrides.write(to_toml(config))
        overrides.flush()
        command = [script("flwr"), "run", str(APP_DIRECTORY), superlink, "--stream", "--run-config", overrides.name]
        if federation_config:
            command += ["--federation-config", federation_config]
        process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        run_id, lines = "", []
        try:
            assert process.stdout is not None
            for raw in process.stdout:
                line = raw.rstrip("\n")
                lines.append(line)
                if started := re.search(r"Successfully started run (\d+)", line):
                    run_id = started[1]
                on_line(line)
            process.wait()
        except BaseException:
            if run_id:
                _flwr(["stop", run_id, superlink], environment)
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    if not run_id:
        raise UserError("Flower did not accept the run:\n" + "\n".join(lines[-15:]))
    return status(run_id, superlink, environment)


COMPLETED = "finished:completed"


def status(run_id: str, superlink: str, environment: Mapping[str, str]) -> str:
    """Return a run's status as `flwr ls` names it; its --stream exits 0 even when the run failed."""
    deadline = time.monotonic() + 30
    while True:
        output = _flwr(["ls", superlink, "--run-id", run_id, "--format", "json"], environment)
        try:
            found = str(json.loads(output)["runs"][0]["status"])
        except (ValueError, KeyError, IndexError):
            return f"unknown: {output[-500:]}"
        if found.startswith("finished") or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def _flwr(arguments: list[str], environment: Mapping[str, str]) -> str:
    command = [script("flwr"), *arguments]
    return subprocess.run(command, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout


@contextlib.contextmanager
def simulation(
    num_clients: int, cpus_per_client: float, gpus_per_client: float
) -> Iterator[Callable[[Mapping[str, Scalar], Callable[[str], None]], str]]:
    """Yield run(config, on_line) -> final status, for simulated runs on one private SuperLink."""
    federation = (
        f"num-supernodes={num_clients} client-resources-num-cpus={cpus_per_client:g} "
        f"client-resources-num-gpus={float(gpus_per_client)}"
    )
    with SimulationSuperLink() as superlink:
        yield lambda config, on_line: flwr_run(superlink.name, config, superlink.environment, on_line, federation)
