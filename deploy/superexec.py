"""Flower's SuperExec, which starts a node's applications, each from the code that the site has judged.

    python -m deploy.superexec [--warm] OPTIONS

OPTIONS are flower-superexec's. For every message Flower starts a new Python (`flwr-clientapp`), which imports PyTorch,
Flower's own code and the application's code, Corolla's included, from the application that the SuperLink sent. That
application is unpacked once, and not for every message. Its directory is named by the whole hash of the archive, and
its files are compared with the archive's before every start: Flower names it by eight digits, and compares nothing.

With --warm, a process that has imported PyTorch and Flower's code is forked instead (fl_app/forking.py). Confined
applications stay confined: the warm process starts under SuperExec's rules. Where Flower lacks the place for that, the log
reports it, and no process
is forked.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import io
import json
import logging
import os
import socket
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deploy.patches import Pace
from fl_app import forking, log_format
from fl_app.files import lock, make_directory
from fl_app.forking import Warm
from fl_app.known_names import PACKAGES

log = logging.getLogger("corolla")

WARM = "--warm"
"""Option: applications are forked from a warm process of this node."""
_SERVE = "--serve"
_CLIENT = "flwr-clientapp"
# directory of unpacked applications in Flower's home
_CODE = "code"
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


def main() -> None:
    """Run as SuperExec, as its warm process, or as one application."""
    match sys.argv[1:]:
        case [command, *_] if command == _CLIENT:
            del sys.argv[0]
            unpack_safely(importlib.import_module("flwr.supernode.runtime.run_clientapp"))
            importlib.import_module("flwr.supernode.cli").flwr_clientapp()
        case [option, control] if option == _SERVE:
            import_all()
            forking.serve(int(control), run_application)
        case [option, *_] if option == WARM:
            del sys.argv[1]
            _run_superexec(warm=True)
        case _:
            _run_superexec()


def _run_superexec(warm: bool = False) -> None:
    launcher: Any = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")
    loop: Any = importlib.import_module("flwr.supercore.superexec.run_superexec")
    command: Any = importlib.import_module("flwr.supercore.cli.flower_superexec")
    log_format.configure("superexec")
    start_safely(launcher)
    if warm:
        try:
            install(launcher, loop)
        except (AttributeError, TypeError) as error:
            log.warning(
                "this Flower starts applications in another way: they are not forked from a warm process (%s)", error
            )
    sys.argv[0] = "flower-superexec"
    command.flower_superexec()


def start_safely(launcher: Any) -> None:
    """Let Flower start applications by this module, which unpacks them safely.

    launcher: Flower's module. Raises AttributeError if it lacks the replaced place.
    """
    processes = launcher.subprocess

    def start(words: Sequence[str], **how: Any) -> Any:
        if words[0] == _CLIENT:
            words = [sys.executable, "-P", "-m", "deploy.superexec", *words]
        return processes.Popen(words, **how)

    launcher.subprocess = types.SimpleNamespace(Popen=start, DEVNULL=processes.DEVNULL)


def install(launcher: Any, loop: Any) -> None:
    """Make Flower fork applications from a warm process.

    launcher, loop: Flower's modules. Raises AttributeError if they lack the replaced places.
    """
    executor, client = launcher.SubprocessExecutor, launcher.TaskType.CLIENT_APP
    start, pace = executor.launch, Pace(_SHORTEST)
    accepted = importlib.import_module("flwr.supercore.superexec.executor.types").LaunchResult.accepted
    # it needs a second to be ready, while the SuperNode connects
    forker = Forker()

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
    """Starts ClientApps from a warm process. A warm process that has ended is replaced."""

    def __init__(self) -> None:
        self._warm = self._start()

    def start(self, spec: Any) -> None:
        """Start the ClientApp that Flower's ExecutionSpec describes. Raises OSError if no process can be forked."""
        names = ("runtime_api_address", "token", "insecure", "root_certificates_path", "parent_pid")
        task = json.dumps({name: getattr(spec, name) for name in names}).encode()
        try:
            self._fork(task, spec.suppress_output)
        except ConnectionError:
            self._warm.close()
            self._warm = self._start()
            self._fork(task, spec.suppress_output)

    def _start(self) -> Warm:
        return Warm([sys.executable, "-P", "-m", "deploy.superexec", _SERVE])

    def _fork(self, task: bytes, silent: bool) -> None:
        with open(os.devnull, "wb") as nowhere:
            _, link = self._warm.fork(nowhere.fileno() if silent else 2, followed=False)
        with link:
            link.sendall(task)


def import_all() -> None:
    """Import the modules that applications need."""
    # the collector's passes free nothing here, and take a fifth of the time
    gc.disable()
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.enable()


def run_application(asker: socket.socket) -> None:
    """Run a ClientApp for one message, as `flwr-clientapp` does."""
    with asker.makefile("rb") as incoming:
        task = json.loads(incoming.read())
    run: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    unpack_safely(run)
    path = task["root_certificates_path"]
    run.run_clientapp(
        runtime_api_address=task["runtime_api_address"],
        token=task["token"],
        insecure=task["insecure"],
        certificates=Path(path).read_bytes() if path else None,
        parent_pid=task["parent_pid"],
        runtime_dependency_install=False,
    )


def unpack_safely(run: Any) -> None:
    """Let Flower unpack an application by `installing_once`, and let its own copies of Corolla's packages be imported.

    run: Flower's module of the process of an application. Raises AttributeError if it lacks the replaced place.
    """
    run.install_from_fab = installing_once(run.install_from_fab)
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]


def installing_once(install: Callable[..., Path]) -> Callable[..., Path]:
    """Return Flower's `install_from_fab`, which unpacks an archive for every message, changed so that it does so once.

    The archive has a directory of its own, which becomes Flower's home, in which Flower looks for the code. It appears with
    all its files: another process of this machine never sees a part of them. If a file has changed since, or one was
    added, the archive is unpacked anew.
    """
    from flwr.supercore.utils import get_flwr_home

    codes = get_flwr_home() / _CODE

    def install_once(archive: bytes, **_: object) -> Path:
        digest = hashlib.sha256(archive).hexdigest()
        make_directory(codes)
        place = codes / digest
        with lock(codes / f".{digest}.lock", wait=True):
            if not _is_unpacked(archive, place):
                with tempfile.TemporaryDirectory(prefix=".new-", dir=codes) as fresh:
                    (Path(fresh) / "new").mkdir()
                    install(archive, Path(fresh) / "new", skip_prompt=True)
                    if os.path.lexists(place):
                        place.rename(Path(fresh) / "old")
                    (Path(fresh) / "new").rename(place)
        os.environ["FLWR_HOME"] = str(place)
        return next((place / "apps").iterdir())

    return install_once


def _is_unpacked(archive: bytes, place: Path) -> bool:
    """Return whether a directory has the files of an application's archive, no other ones, and no link.

    Compiled files are not looked at.
    """
    found = dict[str, Path]()
    for folder, below, files in os.walk(place):
        below[:] = [name for name in below if name != "__pycache__"]
        there = [Path(folder, name) for name in (*below, *files)]
        if any(path.is_symlink() for path in there):
            return False
        found |= {path.relative_to(place).as_posix(): path for path in there[len(below) :]}
    # apps/APPLICATION/FILE
    roots = {tuple(name.split("/")[:2]) for name in found}
    inside = {name.split("/", 2)[-1]: path for name, path in found.items()}
    with zipfile.ZipFile(io.BytesIO(archive)) as packed:
        # Flower checks .info, and leaves it out
        wanted = {one.filename: one for one in packed.infolist() if not one.is_dir()}
        wanted = {name: one for name, one in wanted.items() if not name.startswith(".info/")}
        try:
            return (
                len(roots) == 1
                and inside.keys() == wanted.keys()
                and all(inside[name].is_file() for name in wanted)
                and all(inside[name].stat().st_size == one.file_size for name, one in wanted.items())
                and all(inside[name].read_bytes() == packed.read(one) for name, one in wanted.items())
            )
        except OSError:
            return False


if __name__ == "__main__":
    main()
