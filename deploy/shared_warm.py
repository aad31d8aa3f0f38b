"""One warm process for the nodes of a cluster on one machine.

A warm process has PyTorch in its memory, 0.4 GB. With one for each of 40 nodes, 24 GB are too few. Here the first node
starts a process that other nodes of this user find by a socket. The socket's name is a hash of all that a process gets
at its start and cannot change later: nodes that differ there have different processes. An application's environment
and working directory are those of its node.

The process ends with its last node. If it is killed, the applications that run at that moment fail. The next message
starts another one.

A confined application must not fork an unconfined process here, and Landlock does not keep it from a Unix socket. So
the warm process serves only processes that know a secret. The secret is in a file that confined applications cannot
read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from deploy.detached import state_home
from fl_app import machine
from fl_app.files import lock, make_directory, opener, publish_text
from fl_app.forking import Link
from fl_app.privacy import secure_random
from fl_app.processes import LAUNCH

log = logging.getLogger("corolla")

# whose warm process a node's applications are forked from: its own, or one that nodes of the machine share
OWN, SHARED = "own", "shared"
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


def connect(command: Sequence[str]) -> Link | None:
    """Return a link to the shared warm process, started if there is none.

    command: starts it; the file number of its listening socket is appended. It calls `detached` first. Returns None, and
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


def directory() -> Path:
    """Return the directory of the sockets, their secrets and the processes' logs."""
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
def detached(listener: int) -> Iterator[tuple[socket.socket, bytes]]:
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
    name, where = name_of(os.environ), directory()
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
                _start(command, f"{short}/{name}", kept)
                control.connect(f"{short}/{name}")
            control.sendall(kept.read_bytes())
        except OSError:
            control.close()
            raise
    return Link(control)


def _start(command: Sequence[str], address: str, secret: Path) -> None:
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
    """Yield a short path of a directory, where it can be had (Linux): a socket's path has at most 108 bytes."""
    descriptor = os.open(where, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}" if sys.platform == "linux" else str(where)
    finally:
        os.close(descriptor)
