"""Flower's SuperExec, which starts a node's applications, each from the code that the site has judged.

    python -m deploy.superexec [--warm | --shared] OPTIONS

OPTIONS are flower-superexec's. For every message Flower starts a new Python (`flwr-clientapp`), which imports PyTorch,
Flower's own code and the application's code, Corolla's included, from the application that the SuperLink sent. That
application is unpacked once, and not for every message. Its directory is named by the whole hash of the archive, and
its files are compared with the archive's before every start: Flower names it by eight digits, and compares nothing.

With --warm, a process that has imported PyTorch and Flower's code is forked instead (fl_app/forking.py). Confined
applications stay confined: the warm process starts under SuperExec's rules. With --shared, nodes of this machine fork
from one warm process (`shared_link`). Where Flower lacks the place for that, the log reports it, and no process
is forked.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib
import io
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.detached import state_home
from deploy.patches import Pace
from fl_app import forking, log_format, machine
from fl_app.files import lock, make_directory, opener, publish_text
from fl_app.forking import Link, Warm
from fl_app.known_names import PACKAGES
from fl_app.privacy import secure_random
from fl_app.processes import LAUNCH

log = logging.getLogger("corolla")

WARM, SHARED = "--warm", "--shared"
"""Options: applications are forked from a warm process of this node, or from one that nodes share."""
_SERVE, _SERVE_ALL = "--serve", "--serve-all"
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
            forking.serve(int(control), functools.partial(run_application, warm()))
        case [option, control] if option == _SERVE_ALL:
            with leaving_its_starter(int(control)) as (listener, secret):
                forking.serve_all(listener, functools.partial(run_application, warm()), secret)
        case [option, *_] if option in (WARM, SHARED):
            del sys.argv[1]
            _run_superexec(option)
        case _:
            _run_superexec()


def _run_superexec(option: str = "") -> None:
    """Run Flower's SuperExec. option: WARM, SHARED, or empty."""
    launcher: Any = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")
    loop: Any = importlib.import_module("flwr.supercore.superexec.run_superexec")
    command: Any = importlib.import_module("flwr.supercore.cli.flower_superexec")
    log_format.configure("superexec")
    start_safely(launcher)
    if option:
        try:
            install(launcher, loop, option == SHARED)
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
        if self._shared and (link := shared_link([*command, _SERVE_ALL])):
            return link
        return Warm([*command, _SERVE])

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


# One warm process for the nodes of a cluster on one machine -----------------------------------------------------------

# A warm process has PyTorch in its memory, 0.4 GB. With one for each of 40 nodes, 24 GB are too few. Here the first node
# starts a process that other nodes of this user find by a socket. The socket's name is a hash of all that a process gets at
# its start and cannot change later: nodes that differ there have different processes. An application's environment and
# working directory are those of its node.
# The process ends with its last node. If it is killed, the applications that run at that moment fail. The next message
# starts another one.
# A confined application must not fork an unconfined process here, and Landlock does not keep it from a Unix socket. So the
# warm process serves only processes that know a secret, in a file that confined applications cannot read.


# Environment variables that Python, the libraries and Flower read at the start, by their beginnings. INVOCATION_ID is
# systemd's: it ends a unit with all its processes.
_AT_START = (
    "ATEN_",
    "CUDA",
    "FLWR_",
    "GLIBC_",
    "GOMP_",
    "GOTO_",
    "INVOCATION_ID",
    "KMP_",
    "LANG",
    "LC_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "NPY_",
    "NUMPY_",
    "NVIDIA_",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
    "PYTORCH_",
    "TORCH",
    "TZ",
)
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
# askers that may wait while the process imports its modules
_BACKLOG = 4096
_SECRET_BYTES = 32


def shared_link(command: Sequence[str]) -> Link | None:
    """Return a link to the shared warm process, started if there is none.

    command: starts it; the file number of its listening socket is appended. It calls `leaving_its_starter` first. Returns None, and
    logs the reason, if this node needs a warm process of its own.
    """
    try:
        try:
            return _connected(command)
        except ConnectionError:
            # it ended in this moment
            return _connected(command)
    except OSError as error:
        log.warning("the nodes' shared warm process cannot be used (%s): this node has one of its own", error)
        return None


def shared_directory() -> Path:
    """Return the shared_directory of the sockets, their secrets and the processes' logs."""
    return state_home() / "warm"


def name_of(environment: Mapping[str, str]) -> str:
    """Return the socket's name for a node with this environment: a hash of all that nodes with one process share."""
    at_start = {name: value for name, value in environment.items() if name.startswith(_AT_START)}
    mask = os.umask(0o077)
    os.umask(mask)
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES] if sys.platform == "linux" else []
    alike = [sys.executable, machine.versions(), sorted(at_start.items()), mask, cores, namespaces]
    return hashlib.sha256(json.dumps(alike).encode()).hexdigest()[:16]


@contextlib.contextmanager
def leaving_its_starter(listener: int) -> Iterator[tuple[socket.socket, bytes]]:
    """Fork: the child goes on, and the parent ends. So the child outlives the node that started it.

    Yield the listening socket, and the secret from standard input.
    """
    secret = sys.stdin.buffer.read(_SECRET_BYTES)
    if len(secret) < _SECRET_BYTES:
        sys.exit("the process that starts this one has ended")
    if os.fork():
        os._exit(0)
    with socket.socket(fileno=listener) as listening:
        yield listening, secret


def _connected(command: Sequence[str]) -> Link:
    name, where = name_of(os.environ), shared_directory()
    make_directory(where)
    kept = where / f"{name}.secret"
    with lock(where / f"{name}.lock", wait=True), _short(where) as short:
        control = socket.socket(socket.AF_UNIX)
        try:
            try:
                control.connect(f"{short}/{name}")
            # none has been started, or it has ended
            except (FileNotFoundError, ConnectionRefusedError):
                publish_text(kept, secure_random.secret(_SECRET_BYTES // 2).hex())
                _start_shared(command, f"{short}/{name}", kept)
                control.connect(f"{short}/{name}")
            control.sendall(kept.read_bytes())
        except OSError:
            control.close()
            raise
    return Link(control)


def _start_shared(command: Sequence[str], address: str, secret: Path) -> None:
    """Start the warm process. It listens at once, and answers when it has imported its modules. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(address)
    with socket.socket(socket.AF_UNIX) as listener, open(secret.with_suffix(".log"), "ab", opener=opener) as log_file:
        listener.bind(address)
        listener.listen(_BACKLOG)
        # returns when the process has left this one's children
        started = subprocess.run(
            [*command, str(listener.fileno())],
            input=secret.read_bytes(),
            stdout=log_file,
            stderr=log_file,
            # the end of a launch is not its end
            env={name: value for name, value in os.environ.items() if name != LAUNCH},
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    if started.returncode:
        raise OSError(f"it ended with exit code {started.returncode}; see {secret.with_suffix('.log')}")


@contextlib.contextmanager
def _short(where: Path) -> Iterator[str]:
    """Yield a short path of a shared_directory, where it can be had (Linux): a socket's path has at most 108 bytes."""
    descriptor = os.open(where, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}" if sys.platform == "linux" else str(where)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()
