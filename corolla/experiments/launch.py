"""Start of runs through Flower's own commands: a private SuperLink for simulations, and `flwr run` with its environment."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import TracebackType

from corolla.experiments import namespace, ray_cluster, superlink_supervisor
from fl_app import plugins
from fl_app.errors import MALFORMED, UserError, counted, size
from fl_app.files import make_directory, refuse_unwritable
from fl_app.keys import Scalar
from fl_app.processes import (
    LAUNCH,
    LAUNCHER,
    end_processes,
    flower_environment,
    identity,
    orphans,
    processes_with,
    script,
)
from fl_app.server import trackers
from fl_app.toml import to_toml
from fl_app.transport.app_bundle import APP_DIRECTORY, bundle

log = logging.getLogger("corolla")

_END_SECONDS = 60
# bytes of a socket's name: sun_path without its last 0
_LONGEST_NAME = 107 if sys.platform == "linux" else 103
_LONGEST_TEMPORARY = _LONGEST_NAME - len(
    "/corolla-flwr-12345678/ray/session_2000-01-01_00-00-00_123456_1234567/sockets/plasma_store"
)


@dataclass(frozen=True)
class RayCluster:
    """An existing Ray cluster. address: HOST:PORT of its head.

    directory: visible to all its machines, for the app that they load.
    """

    address: str
    directory: Path


class SimulationSuperLink:
    """A private SuperLink for simulations, with its own home directory. Leaving the context ends everything it started.

    A supervisor (corolla/experiments/superlink_supervisor.py) runs it, in a separate network if the kernel allows that.
    `inside` holds the words to put before a command that talks to it: they enter that network. If this process is
    killed, the supervisor ends the remaining processes. say: called with a text at the start of a wait, and with "" at
    its end. ray: use this Ray cluster instead of starting one. at_once: clients that train at the same time in this
    machine's memory.
    """

    name = superlink_supervisor.NAME

    def __init__(
        self, say: Callable[[str], None] = lambda text: None, ray: RayCluster | None = None, at_once: int = 0
    ) -> None:
        self._say, self._ray = say, ray
        if ray:
            make_directory(ray.directory)
        else:
            refuse_without_shared_memory()
        self.home = Path(
            tempfile.mkdtemp(
                prefix="corolla-flwr-", dir=str(ray.directory) if ray else _short(str(temporary_directory()))
            )
        )
        self.environment = flower_environment(self.home)
        self.environment[LAUNCH] = str(self.home)
        self.environment[LAUNCHER] = identity(os.getpid())
        self.environment["COROLLA_SIMULATION"] = str(at_once)
        if ray:
            self.environment |= ray_cluster.environment(ray.address) | {superlink_supervisor.NETWORK: "host"}
        else:
            # Ray's socket directory is writable for every user, so it lies in the private home
            self.environment["RAY_TMPDIR"] = str(self.home)
        self.inside: list[str] = []

    def __enter__(self) -> SimulationSuperLink:
        """Start it, and return when it answers."""
        # processes of a killed `corolla run` would keep training
        if left := orphans():
            self._say(f"ending {counted(len(left), 'process', 'processes')} of an interrupted run")
            end_processes(left)
        self._say("starting a SuperLink for the simulation")
        self._supervisor = subprocess.Popen(
            [sys.executable, "-P", "-m", superlink_supervisor.__name__, str(self.home)],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,
        )
        assert self._supervisor.stdout is not None
        try:
            answer = json.loads(self._supervisor.stdout.readline() or '{"error": "the SuperLink\'s supervisor ended"}')
            if "error" in answer:
                raise UserError(answer["error"])
        except BaseException:
            self.__exit__(None, None, None)
            raise
        if not answer["shared"]:
            self.inside = [sys.executable, "-P", "-m", namespace.__name__, str(self._supervisor.pid)]
        elif not self._ray:  # a Ray cluster needs the network
            log.warning(
                "no network of its own for the simulation (%s): see docs/security.md",
                answer["shared"],
            )
        self._say("")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the supervisor end it. End and remove the leftovers of a supervisor that was killed."""
        self._say("ending the simulation's processes")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._supervisor.communicate(timeout=_END_SECONDS)
        end_processes(processes_with(f"{LAUNCH}={self.home}"))
        self._supervisor.wait()
        shutil.rmtree(self.home, ignore_errors=True)
        if self._ray:
            # fails if another simulation uses the directory
            with contextlib.suppress(OSError):
                os.removedirs(self._ray.directory)


def _short(directory: str) -> str:
    """Return a directory for temporary files with a path short enough for the names of Ray's sockets."""
    return directory if len(directory.encode()) <= _LONGEST_TEMPORARY else "/tmp"


def flwr_run(
    superlink: str,
    config: Mapping[str, Scalar],
    environment: Mapping[str, str],
    on_line: Callable[[str], None],
    federation_config: str = "",
    inside: Sequence[str] = (),
    private: bool = False,
) -> str:
    """Submit a run with `flwr run --stream`, pass on every line of its log, and return its final status.

    inside: words before every command, which enter the SuperLink's network. private: the SuperLink ends with this
    command, so that Ctrl-C need not stop the run on it. Raises UserError if Flower did not accept the run.
    """
    # files in a private SuperLink's home are removed with it, even if this process is killed
    place = environment["FLWR_HOME"] if private else None
    with (
        bundle(config, place) as app,
        tempfile.NamedTemporaryFile("w", suffix=".toml", dir=place, encoding="utf-8") as overrides,
    ):
        overrides.write(to_toml(config))
        overrides.flush()
        command = [*inside, script("flwr"), "run", str(app), superlink, "--stream", "--run-config", overrides.name]
        if federation_config:
            command += ["--federation-config", federation_config]
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
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
            if run_id and not private:
                _output([*inside, script("flwr"), "stop", run_id, superlink], environment)
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    if not run_id:
        raise UserError("Flower did not accept the run:\n" + "\n".join(lines[-15:]))
    return status(run_id, superlink, environment, inside)


COMPLETED = "finished:completed"
LOST = "lost"  # no SuperLink answers


def status(run_id: str, superlink: str, environment: Mapping[str, str], inside: Sequence[str] = ()) -> str:
    """Return a run's status as named by `flwr ls`; LOST if no SuperLink answers.

    The exit code of `flwr run --stream` is no status: it is 0 even if the run failed.
    """
    deadline = time.monotonic() + 30
    while True:
        output = _output(
            [*inside, script("flwr"), "ls", superlink, "--run-id", run_id, "--format", "json"], environment
        )
        try:
            found = str(json.loads(output)["runs"][0]["status"])
        except MALFORMED:
            return LOST
        if found.startswith("finished") or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def _output(command: list[str], environment: Mapping[str, str]) -> str:
    return subprocess.run(
        command, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8"
    ).stdout


def refuse_foreign_packages(directory: Path) -> None:
    """Raise UserError naming a module in the current directory that would hide a package of Corolla's from clients.

    Ray makes simulated clients search the current directory of its driver first.
    """
    importlib.invalidate_caches()
    for name in plugins.PACKAGES:
        spec = PathFinder.find_spec(name, [str(directory)])
        origin = spec.origin if spec else None
        if origin is not None and Path(origin).resolve().parent != APP_DIRECTORY / name:
            raise UserError(
                f"{origin} would be imported by simulated clients in place of Corolla's package {name}: rename it, start the run "
                "in another directory, or use --in-process"
            )


@contextlib.contextmanager
def simulation(
    num_clients: int,
    cpus_per_client: float,
    gpus_per_client: float,
    say: Callable[[str], None] = lambda text: None,
    ray: RayCluster | None = None,
) -> Iterator[Callable[[Mapping[str, Scalar], Callable[[str], None]], str]]:
    """Yield run(config, on_line) -> final status, for simulated runs on one private SuperLink.

    say, ray: see SimulationSuperLink. Raises UserError if a module in the current directory hides one of Corolla's
    packages.
    """
    from corolla.experiments.pool import workers

    refuse_foreign_packages(Path.cwd())
    federation = (
        f"num-supernodes={num_clients} client-resources-num-cpus={cpus_per_client:g} "
        f"client-resources-num-gpus={float(gpus_per_client)}"
    )
    # a client on a GPU has its vectors there
    here = 0 if ray or gpus_per_client else workers(cpus_per_client, num_clients)
    with SimulationSuperLink(say, ray, here) as superlink:

        def submit(config: Mapping[str, Scalar], on_line: Callable[[str], None]) -> str:
            with trackers.following_log(config, on_line) as take:
                environment, inside = superlink.environment, superlink.inside
                return flwr_run(superlink.name, config, environment, take, federation, inside, private=True)

        yield submit


# Space for its processes ----------------------------------------------------------------------------------------------


NEEDED = 50e6
"""Bytes of temporary files of a small simulation: copies of the app, Ray's logs and sockets, the SuperLink's database."""
SHARED = Path("/dev/shm")
IN_PROCESS = "run with --in-process, which needs none"


def temporary_directory() -> Path:
    """Return the directory for temporary files. Raises UserError if it cannot be written, or has too little space."""
    named = Path(os.environ.get("TMPDIR") or "")
    try:
        # tempfile silently skips a full directory
        directory = named if named.is_absolute() and named.is_dir() else Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise UserError(key="TMPDIR", rule=f"{error.strerror}; set it to a writable folder, or {IN_PROCESS}") from None
    way_out = f"make room there, set TMPDIR to another folder, or {IN_PROCESS}"
    try:
        refuse_unwritable("TMPDIR", directory)
    except UserError as error:
        raise UserError(f"{error}; {way_out}") from None
    free = shutil.disk_usage(directory).free
    if free < NEEDED:
        raise UserError(
            key="TMPDIR",
            rule=f"{directory} has {size(free)} left, a simulation needs {size(NEEDED)} or more; {way_out}",
        )
    return directory


def refuse_without_shared_memory() -> None:
    """Raise UserError if this machine's shared memory cannot be written. Ray would wait for it without end."""
    if SHARED.is_dir() and not os.access(SHARED, os.W_OK):
        raise UserError(
            key=SHARED,
            rule="cannot be written, but a simulation's processes share memory there; mount it writable "
            f"(in a container: --shm-size), or {IN_PROCESS}",
        )
