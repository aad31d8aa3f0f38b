"""A count of the training samples that a run gives a client, by a process behind the walls of applications.

The data are read by the client's code, and in some forms of data a file can say what code runs. Applications may write
some of these files. So the SuperNode's process, which has no walls, opens none of them. It takes a number from the
process that counts, or the text of an error, up to a size and a time.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from fl_app.errors import DeploymentError
from fl_app.keys import Scalar

SECONDS = 600.0
"""Most seconds of a count. Data that were not prepared before are converted in it."""
_MODULE = "client_app.counting"
_MOST = 1 << 16


class CountingProcess(Protocol):
    """A process that counts."""

    def kill(self) -> None:
        """End it."""

    def wait(self) -> int:
        """Return its exit code when it has ended."""


Start = Callable[[Sequence[str], int], CountingProcess]
"""Starts a command; the second argument is the number of a file that it gets."""


class Unconfined:
    """A process without walls, where applications have none either. Processes that it starts end with it."""

    def __init__(self, command: Sequence[str], file: int) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[file], start_new_session=True)

    def kill(self) -> None:
        """End it, and all that it has started."""
        os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Return its exit code when it has ended."""
        return self._process.wait()


def count(
    config: Mapping[str, Scalar], client_id: int, num_clients: int, data_path: str, start: Start = Unconfined
) -> int:
    """Return the number of training samples on which a run's config lets a client train.

    Raises UserError if they cannot be counted, or not in SECONDS. Its text is the counting process's.
    """
    request = {"config": dict(config), "client_id": client_id, "num_clients": num_clients, "data_path": data_path}
    ours, theirs = socket.socketpair()
    with ours:
        try:
            with theirs:
                process = start([sys.executable, "-P", "-m", _MODULE, str(theirs.fileno())], theirs.fileno())
        except OSError as error:
            raise DeploymentError(f"the process that counts them cannot be started ({error})") from None
        try:
            answer = _ask(ours, json.dumps(request).encode())
        finally:
            # not waited for before: what it does after its answer does not matter
            process.kill()
            process.wait()
    if re.fullmatch(rb"\d{1,15}", answer):
        return int(answer)
    if answer.startswith(b"!"):
        raise DeploymentError(answer[1:].decode(errors="replace"))
    raise DeploymentError("the process that counts them failed; this node's log says why")


def _ask(channel: socket.socket, request: bytes) -> bytes:
    """Send a request and return all that comes back. Raises UserError if it is too late or too long."""
    end, answer = time.monotonic() + SECONDS, bytearray()
    try:
        channel.settimeout(SECONDS)
        channel.sendall(request)
        channel.shutdown(socket.SHUT_WR)
        while piece := channel.recv(_MOST):
            answer += piece
            if len(answer) > _MOST:
                raise DeploymentError(f"the answer may have {_MOST} bytes, it has more")
            channel.settimeout(max(end - time.monotonic(), 0.001))
    except TimeoutError:
        raise DeploymentError(f"they could not be counted in {SECONDS:g} seconds") from None
    # it ended before it has read the request
    except OSError:
        return b""
    return bytes(answer)
