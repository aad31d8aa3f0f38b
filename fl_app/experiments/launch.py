"""Starts runs through Flower's own commands: a private SuperLink for simulations, `flwr run` with the environment it needs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

import psutil

import fl_app
from fl_app.errors import UserError
from fl_app.keys import Scalar
from fl_app.server.run_folder import to_toml

APP_DIRECTORY = Path(fl_app.__file__).resolve().parent.parent
_START_SECONDS = 60
_LAUNCHER = "COROLLA_LAUNCHER"  # pid and start time of the command that started a simulation's processes


def flower_environment(flwr_home: Path | None = None) -> dict[str, str]:
    """Environment for Flower's processes: no telemetry, no run-time installation of dependencies."""
    env = dict(os.environ)
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    env["FLWR_TELEMETRY_ENABLED"] = "0"
    env["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] = "1"
    env["FLWR_DISABLE_UPDATE_CHECK"] = "1"
    env["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    env["PYTHONUNBUFFERED"] = "1"
    if flwr_home is not None:
        env["FLWR_HOME"] = str(flwr_home)
    return env


def free_port() -> int:
    """Return a TCP port that was free on loopback a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class SimulationSuperLink:
    """A SuperLink of our own for simulations: own FLWR_HOME, free ports, ended with everything it started."""

    name = "simulation"

    def __init__(self) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="corolla-flwr-")
        self.home = Path(self._home.name)
        self.environment = flower_environment(self.home)
        self.environment["COROLLA_LAUNCH"] = str(self.home)
        self.environment[_LAUNCHER] = _identity(psutil.Process())
        self.environment["COROLLA_SIMULATION"] = "1"
        self.log = self.home / "superlink.log"

    def __enter__(self) -> SimulationSuperLink:
        """Start it and wait until it answers."""
        end_processes(orphans())  # what a killed `corolla run` left would go on training
        port = free_port()
        self.home.joinpath("config.toml").write_text(
            f'[superlink]\ndefault = "{self.name}"\n[superlink.{self.name}]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        command = [_script("flower-superlink"), "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
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
        end_processes(processes_with(f"COROLLA_LAUNCH={self.home}"))
        self._home.cleanup()


def wait_for_http(url: str, process: psutil.Popen, log: Path) -> None:
    """Return when `url` answers. Raises UserError with the end of the log if the process ends first or takes too long."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1):
            return
        time.sleep(0.05)
    raise UserError(f"the SuperLink did not start; the end of its log:\n{log.read_text(errors='replace')[-2000:]}")


def processes_with(variable: str) -> list[psutil.Process]:
    """Processes of this user whose environment has NAME=value (that of what we launched, children included)."""
    name, value = variable.split("=", 1)
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(name) == value:
                found.append(process)
    return found


def orphans() -> list[psutil.Process]:
    """Return processes of simulations whose `corolla` command is gone without having ended them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ValueError):
            launcher = process.environ().get(_LAUNCHER)
            if launcher and process.pid != os.getpid() and not _is_alive(launcher):
                found.append(process)
    return found


def _identity(process: psutil.Process) -> str:
    return f"{process.pid}:{process.create_time()}"


def _is_alive(identity: str) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return _identity(psutil.Process(int(identity.partition(":")[0]))) == identity
    return False


def end_processes(processes: list[psutil.Process], seconds: float = 10) -> None:
    """SIGTERM, and SIGKILL for those that are still there after `seconds`."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=seconds)


def _script(name: str) -> str:
    """Return the path of a command installed beside this Python."""
    return str(Path(sys.executable).parent / name)


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
        command = [_script("flwr"), "run", str(APP_DIRECTORY), superlink, "--stream", "--run-config", overrides.name]
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
    command = [_script("flwr"), *arguments]
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
