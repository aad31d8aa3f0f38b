"""Flower's SuperExec, which starts a node's applications, with a warm process.

    python -m deploy.superexec [--shared] OPTIONS

OPTIONS are flower-superexec's. For every message Flower starts a new Python, which imports PyTorch and Flower's own
code. Here a warm process has imported them, and is forked (fl_app/forking.py). The child imports the application's
code, Corolla's included, from the application that the SuperLink sent. That application is unpacked once, and not for
every message. Confined applications stay confined: the warm process starts under SuperExec's rules.

With --shared, nodes of this machine fork from one warm process (deploy/shared_warm.py).

Written for Flower 1.39. If a version lacks the places that are replaced, Flower's own way is used, and the log reports
it.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import json
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deploy import shared_warm
from deploy.pace import Pace
from fl_app import forking, log_format
from fl_app.files import lock, make_directory
from fl_app.forking import Link, Warm
from fl_app.known_names import PACKAGES

log = logging.getLogger("corolla")

WARM, WARM_FOR_ALL, FROM_SHARED = "--warm", "--warm-for-all", "--shared"
# least seconds between two polls for a message of this node
_SHORTEST = 0.05
# Modules that every application imports. Not numpy.random: forked processes would share the state of its generator.
_IMPORTED = (
    "flwr.supernode.runtime.run_clientapp",
    "flwr.compat.client.numpy_client",
    "flwr.compat.common",
    "httpcore",
    "sqlite3",
    "statistics",
    "threadpoolctl",
    "tomllib",
    "torch",
)
# digits of an archive's hash in the name of its directory
_DIGITS = 8


def main() -> None:
    """Run as SuperExec, or as its warm process."""
    if sys.argv[1:2] == [WARM]:
        forking.serve(int(sys.argv[2]), functools.partial(run_application, warm()))
        return
    if sys.argv[1:2] == [WARM_FOR_ALL]:
        with shared_warm.detached(int(sys.argv[2])) as (listener, secret):
            forking.serve_all(listener, functools.partial(run_application, warm()), secret)
        return
    shared = sys.argv[1:2] == [FROM_SHARED]
    if shared:
        del sys.argv[1]
    launcher: Any = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")
    loop: Any = importlib.import_module("flwr.supercore.superexec.run_superexec")
    command: Any = importlib.import_module("flwr.supercore.cli.flower_superexec")
    log_format.configure("superexec")
    try:
        install(launcher, loop, shared)
    except (AttributeError, TypeError) as error:
        log.warning(
            "this Flower starts applications in another way: they are not forked from a warm process (%s)", error
        )
    sys.argv[0] = "flower-superexec"
    command.flower_superexec()


def install(launcher: Any, loop: Any, shared: bool = False) -> None:
    """Make Flower fork applications from a warm process.

    launcher, loop: Flower's modules. shared: the warm process also serves other nodes. Raises AttributeError if the
    modules lack the replaced places.
    """
    executor, client = launcher.SubprocessExecutor, launcher.TaskType.CLIENT_APP
    start, pace = executor.launch, Pace(_SHORTEST)
    accepted = importlib.import_module("flwr.supercore.superexec.executor.types").LaunchResult.accepted
    # it needs a second to be ready, while the SuperNode connects
    forker = Forker(shared)

    def launch(self: Any, spec: Any) -> Any:
        pace.work()
        if spec.task_type != client or spec.runtime_dependency_install:
            return start(self, spec)
        try:
            forker.start(spec)
        except (OSError, AttributeError) as error:
            log.warning(
                "an application could not be forked from a warm process, and starts in a new Python (%s)", error
            )
            return start(self, spec)
        return accepted()

    # check now, because the loop calls it only later
    if not callable(loop.time.sleep):
        raise AttributeError("run_superexec does not sleep")
    executor.launch, loop.time = launch, pace


class Forker:
    """Starts ClientApps from a warm process. A warm process that has ended is replaced.

    shared: the warm process also serves other nodes of this machine.
    """

    def __init__(self, shared: bool = False) -> None:
        self._shared = shared
        self._warm = self._start()

    def start(self, spec: Any) -> None:
        """Start the ClientApp that Flower's ExecutionSpec describes. Raises OSError if no process can be forked."""
        names = ("runtime_api_address", "token", "insecure", "root_certificates_path", "parent_pid")
        task = {name: getattr(spec, name) for name in names}
        # a shared warm process has those of another node
        task |= {"environment": dict(os.environ), "directory": os.getcwd()}
        try:
            self._fork(json.dumps(task).encode(), spec.suppress_output)
        except ConnectionError:
            self._warm.close()
            self._warm = self._start()
            self._fork(json.dumps(task).encode(), spec.suppress_output)

    def _start(self) -> Link:
        command = [sys.executable, "-P", "-m", "deploy.superexec"]
        if self._shared and (link := shared_warm.connect([*command, WARM_FOR_ALL])):
            return link
        return Warm([*command, WARM])

    def _fork(self, task: bytes, silent: bool) -> None:
        with open(os.devnull, "wb") as nowhere:
            _, link = self._warm.fork(nowhere.fileno() if silent else 2, followed=False)
        with link:
            link.sendall(task)


def warm() -> dict[str, str]:
    """Import the modules that applications need. Return the environment variables that they set."""
    before = dict(os.environ)
    # the collector's passes free nothing here, and take a fifth of the time
    gc.disable()
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.enable()
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def run_application(imported: Mapping[str, str], asker: socket.socket) -> None:
    """Run a ClientApp for one message, as `flwr-clientapp` does.

    imported: the environment variables that imports have set.
    """
    with asker.makefile("rb") as incoming:
        task = json.loads(incoming.read())
    os.environ.clear()
    os.environ.update({**imported, **task["environment"]})
    os.chdir(task["directory"])
    run: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    if hasattr(run, "install_from_fab"):
        run.install_from_fab = installing_once(run.install_from_fab)
    # an application brings its own copies
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]
    path = task["root_certificates_path"]
    run.run_clientapp(
        runtime_api_address=task["runtime_api_address"],
        token=task["token"],
        insecure=task["insecure"],
        certificates=Path(path).read_bytes() if path else None,
        parent_pid=task["parent_pid"],
        runtime_dependency_install=False,
    )


def installing_once(install: Callable[..., Path]) -> Callable[..., Path]:
    """Return Flower's `install_from_fab`, which unpacks an archive for every message, changed so that it does so once.

    An archive's directory appears with all its files: another process of this machine never sees a part of them.
    """
    from flwr.supercore.utils import get_flwr_home

    def install_once(archive: bytes, **_: object) -> Path:
        apps, digits = get_flwr_home() / "apps", hashlib.sha256(archive).hexdigest()[:_DIGITS]
        make_directory(apps)
        with lock(apps / f".{digits}.lock", wait=True):
            if there := next(apps.glob(f"*.{digits}"), None):
                return there
            with tempfile.TemporaryDirectory(prefix=".new-", dir=apps) as fresh:
                unpacked = install(archive, Path(fresh), skip_prompt=True)
                return unpacked.rename(apps / unpacked.name)

    return install_once


if __name__ == "__main__":
    main()
