"""A warm process that forks children. They share its imports, which take seconds, and start in milliseconds.

`Warm` starts this process and asks it for children. The process imports the modules that its children need, computes
nothing, and calls `serve`. It must have no threads of OpenMP, torch or CUDA, because threads do not survive a fork.
Each child gets one end of a socket, and standard output and error chosen by the asker. The asker holds the other end.

Children end with the warm process, and the warm process ends with its asker: any end of the asker closes its end of the
warm process's socket. A warm process can also have several askers (`serve_all`). Then each asker's children end with
it, and the warm process ends with the last asker.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hmac
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

# Requests: fork a child, fork a child without keeping its exit code, return a child's exit code.
# A request is one byte and a pid (0 to fork). The answer is one number: a pid, an exit code, or the negative number of the
# error of fork(2).
_FORK, _FORGET, _STATUS = b"f", b"n", b"s"
_REQUEST, _ANSWER = struct.Struct("!ci"), struct.Struct("!i")
# option of prctl(2) that sets the signal that a process gets when its parent ends
_PARENT_DEATH_SIGNAL = 1
# seconds for a warm process to end its children and itself
_END_SECONDS = 5.0
# seconds that a warm process waits for its first asker
_FIRST_SECONDS = 60.0
# connections that have not sent the secret; of more, the oldest is closed
_MOST_SILENT = 64


class Link:
    """An asker's end of the socket to a warm process."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def fork(self, output: int, followed: bool = True) -> tuple[int, socket.socket]:
        """Return a new child's pid, and the socket to it. output: file number of its standard output and error.

        followed: whether `status` will be called for the child. Raises OSError if the warm process has ended or cannot fork.
        """
        if self._control.fileno() < 0:
            raise ConnectionError("the link is closed")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                request = _REQUEST.pack(_FORK if followed else _FORGET, 0)
                socket.send_fds(self._control, [request], [theirs.fileno(), output])
                pid = self._answer()
                if pid < 0:
                    raise OSError(-pid, os.strerror(-pid))
                return pid, ours
            except BaseException:
                ours.close()
                raise

    def status(self, pid: int) -> int:
        """Kill a child that has not ended, and return its exit code as `subprocess` does: negative for a signal.

        Raises OSError if the warm process has ended.
        """
        self._control.sendall(_REQUEST.pack(_STATUS, pid))
        return self._answer()

    def close(self) -> None:
        """End this asker's children, and the warm process if it has no other asker."""
        self._control.close()

    def _answer(self) -> int:
        received = self._control.recv(_ANSWER.size, socket.MSG_WAITALL)
        if len(received) < _ANSWER.size:
            raise ConnectionError("the process that starts others has ended")
        return int(_ANSWER.unpack(received)[0])


class Warm(Link):
    """A warm process that this process starts.

    command: starts it; the number of its socket is appended. given: its standard input. output: file number of its
    standard output and error; None: those of this process. environment: its variables; None: those of this process.
    files: numbers of further files that it inherits.
    """

    def __init__(
        self,
        command: Sequence[str],
        given: bytes = b"",
        output: int | None = None,
        environment: Mapping[str, str] | None = None,
        files: Iterable[int] = (),
    ) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=None if environment is None else dict(environment),
                pass_fds=[theirs.fileno(), *files],
                # only the asker gets Ctrl-C, and then ends this process
                start_new_session=True,
            )
        assert self._process.stdin is not None
        # a process that ended at once has read nothing
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(given)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def close(self) -> None:
        """End the process and all its children."""
        super().close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(control: int, work: Callable[[socket.socket], None]) -> None:
    """Fork a child for every request until the asker ends. Then end all children.

    control: the socket's file number. work: the function that a child calls with its socket; the child ends when it
    returns or raises.
    """
    _prepare()
    asker = _Asker(socket.socket(fileno=control), work)
    with asker.control:
        while asker.answer((asker.control,)):
            pass
    asker.kill_children()
    asker.reap(wait=True)


def serve_all(listener: socket.socket, work: Callable[[socket.socket], None], secret: bytes) -> None:
    """Serve every asker that connects, as `serve` does for one.

    Return when the last one has ended, or if none has come in a minute. listener: a Unix socket that listens. secret: what
    an asker sends first.
    """
    _prepare()
    # None: has not yet sent the secret
    askers: dict[socket.socket, _Asker | None] = {}
    ended: list[_Asker] = []
    seconds = _FIRST_SECONDS
    with selectors.DefaultSelector() as ready:

        def drop(control: socket.socket) -> None:
            ready.unregister(control)
            control.close()
            if asker := askers.pop(control):
                # not waited for: a child that cannot be killed must not stop the others
                asker.kill_children()
                ended.append(asker)

        ready.register(listener, selectors.EVENT_READ)
        # one that has connected meanwhile is still served
        while found := ready.select(None if any(askers.values()) else seconds):
            for key, _ in found:
                control = key.data
                if control is None:
                    silent = [other for other, asker in askers.items() if asker is None]
                    if len(silent) >= _MOST_SILENT:
                        drop(silent[0])
                    with contextlib.suppress(OSError):
                        control, _ = listener.accept()
                        askers[control] = None
                        ready.register(control, selectors.EVENT_READ, control)
                elif control not in askers:
                    # dropped a moment ago
                    continue
                elif asker := askers[control]:
                    if not asker.answer((listener, *askers)):
                        drop(control)
                elif _knows(control, secret):
                    askers[control], seconds = _Asker(control, work), 0.0
                else:
                    drop(control)
            ended = [asker for asker in ended if asker.reap()]


def _knows(control: socket.socket, secret: bytes) -> bool:
    """Return whether a secret has come from a socket. It comes as a whole."""
    try:
        return hmac.compare_digest(control.recv(len(secret), socket.MSG_DONTWAIT), secret)
    except OSError:
        return False


def _prepare() -> None:
    """Make this process ready to fork children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # keep all objects: a later garbage collection would touch, and so copy, all of them in every child
    gc.collect()
    gc.freeze()


class _Asker:
    """The warm process's side of one asker. work: as for `serve`.

    Each child is the leader of a process group, and is killed with it.
    """

    def __init__(self, control: socket.socket, work: Callable[[socket.socket], None]) -> None:
        self.control, self._work = control, work
        self._children, self._forgotten = set[int](), set[int]()

    def answer(self, opened: Iterable[socket.socket]) -> bool:
        """Do what the asker requests next. Return False if it has ended. opened: sockets that a child closes."""
        try:
            received, files, _, _ = socket.recv_fds(self.control, _REQUEST.size, 2, socket.MSG_WAITALL)
            if len(received) < _REQUEST.size:
                return False
            kind, pid = _REQUEST.unpack(received)
            if kind == _STATUS:
                _kill(pid)
                answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                self._children.discard(pid)
            else:
                answer = self._fork(kind == _FORK, files, opened)
            self.control.sendall(_ANSWER.pack(answer))
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def _fork(self, followed: bool, files: Sequence[int], opened: Iterable[socket.socket]) -> int:
        """Return a new child's pid, or the negative number of the error."""
        self._forgotten = set(filter(_is_left, self._forgotten))
        # asked for here: a child whose parent has ended before it runs would see another one
        me = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or 1)
        if pid == 0:
            for one in opened:
                one.close()
            _work(files, self._work, me)
        for file in files:
            os.close(file)
        if pid > 0:
            _lead_group(pid)
            (self._children if followed else self._forgotten).add(pid)
        return pid

    def kill_children(self) -> None:
        """Kill all children that are left."""
        for pid in self._children | self._forgotten:
            _kill(pid)

    def reap(self, wait: bool = False) -> bool:
        """Return whether killed children are left that have not ended. wait: until all have ended."""
        if wait:
            for pid in self._children | self._forgotten:
                os.waitpid(pid, 0)
            return False
        self._children = set(filter(_is_left, self._children | self._forgotten))
        self._forgotten = set()
        return bool(self._children)


def _is_left(pid: int) -> bool:
    """Return whether a child has not ended. Kill the processes that an ended one has started and left."""
    if os.waitpid(pid, os.WNOHANG)[0] == 0:
        return True
    _kill(pid)
    return False


def _lead_group(pid: int) -> None:
    """Make a child the leader of a process group. Parent and child both do so: the later one has nothing to do."""
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)


def _kill(pid: int) -> None:
    # a child that has ended keeps its exit code
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _work(files: Sequence[int], work: Callable[[socket.socket], None], parent: int) -> NoReturn:
    code = 1
    try:
        # have the kernel kill this process when its parent ends, where it can
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
            # the parent may have ended before prctl
            if os.getppid() != parent:
                os._exit(1)
        _lead_group(os.getpid())
        own, output = files
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        # never closed: when the socket ends, the asker takes this process for ended and asks for its exit code
        asker = socket.socket(fileno=own)
        work(asker)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
