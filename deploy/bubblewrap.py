"""Walls around a site's applications, made by bubblewrap: only named paths exist behind them.

The processes get mounts, process ids, shared memory and queues, a host name and a network of their own. /proc, /dev,
/dev/shm and /tmp are private. There is no /run and no home. Of /etc there are the linker's files and certificates, and
made-up lists of accounts and hosts. The named paths appear at their usual places. No capabilities are left, no terminal
is theirs, and nothing of the SuperNode's is open: their output goes through a pipe.

The network has one member, itself. An application must reach its SuperNode by TCP (Flower's Runtime API). So the first
process inside listens at the SuperNode's address in that network, and hands the listening socket out. The SuperNode
carries bytes between its connections and the real address (`_carry`).

All processes inside give up the calls that pass walls of namespaces (`call_filter`), and confine themselves by
Landlock (deploy/confine.py), where the kernel has it.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import errno
import functools
import glob
import os
import platform
import re
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deploy import confine
from deploy.confine import Confinement
from fl_app.errors import plain_lines

PROGRAM = "bwrap"
LOOPBACK = "127.0.0.1"
FIRST = 1
"""The process id of the first process behind the walls. With it, all others end."""
_SHARED_NETWORK = (
    "network: applications share the machine's; UDP is open, and TCP too where Landlock cannot restrict it"
)
_ALL_CALLS = "Unix sockets, keyrings: on this architecture no calls are refused; a socket in a named path answers"
_ONE_WALL = f"second wall: {confine.NONE}; bubblewrap's walls stand alone"
_ALWAYS = (
    *("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
    *("--new-session", "--die-with-parent", "--cap-drop", "ALL"),
)
_NETWORK, _NO_MORE_USERS = "--unshare-net", "--disable-userns"
# parts of the system for the linker, for certificates, and for libraries of GPUs and processors
_ETC = tuple(
    f"/etc/{name}"
    for name in ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "ssl/certs")
    + ("ssl/openssl.cnf", "pki/tls/certs", "pki/ca-trust/extracted")
)
_SYS = tuple(f"/sys/{name}" for name in ("bus", "class", "dev", "devices", "fs/cgroup", "module"))
# files of /proc about processes and keys outside, for all namespaces
_OF_OTHERS = tuple(
    f"/proc/{name}"
    for name in ("acpi", "kcore", "key-users", "keys", "kmsg", "latency_stats", "sched_debug", "scsi", "timer_list")
)
_GPUS = ("/dev/nvidia*", "/dev/dri", "/dev/kfd", "/dev/dxg")
_NAME = "application"
# bytes that are carried at once, and most connections at a time
_PIECE, _MOST_CONNECTIONS = 1 << 18, 128
_PROBE_SECONDS = 20
# how fast output may come; faster processes wait
_BYTES_PER_SECOND = 2 << 20
# Flower's log has it
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")


@dataclass(frozen=True)
class Walls:
    """The options with which bubblewrap makes its walls on this machine. network: applications get one of their own."""

    program: str
    options: tuple[str, ...]
    network: bool

    @property
    def open(self) -> tuple[str, ...]:
        """The ways out that these walls leave open, one line each."""
        ways = ((_SHARED_NETWORK, self.network), (_ALL_CALLS, has_call_filter()))
        return tuple(way for way, closed in (*ways, (_ONE_WALL, confine.landlock_version() > 0)) if not closed)

    def start(
        self,
        confinement: Confinement,
        command: Sequence[str],
        home: str,
        environment: Mapping[str, str],
        given: Sequence[int] = (),
    ) -> Inside:
        """Start a command behind the walls.

        home: the directory in which it runs, one of those that it may write. given: open files that it gets. Raises
        OSError.
        """
        confinement = replace(confinement, write=(*confinement.write, "/tmp"))
        ours, theirs = socket.socketpair()
        channel = theirs.fileno() if self.network else -1
        with theirs, _given_files() as (words, files):
            return Inside(
                [
                    *(self.program, *self.options, *mounts(confinement), *words),
                    *("--remount-ro", "/", "--chdir", home, "--"),
                    *confine.confined_command(confinement, command, channel),
                ],
                {**environment, "HOME": home, "USER": _NAME, "LOGNAME": _NAME},
                [theirs.fileno(), *files, *given],
                ours,
                confinement.ports,
            )


class Inside:
    """A process that is confined, whose output and connections are carried.

    It has no standard input, and of this process's files none but those given. output: the thread that carries its output.
    channel: a socket from which its listening sockets come. ports: of this machine, to which its connections may lead.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        files: Sequence[int] = (),
        channel: socket.socket | None = None,
        ports: Sequence[int] = (),
    ) -> None:
        self._addresses = [(LOOPBACK, port) for port in ports]
        self._listeners = list[socket.socket]()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            # a file or a terminal could be read, changed and opened anew by its number
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            pass_fds=files,
        )
        self.output = _in_background(self._print)
        if channel is not None:
            _in_background(functools.partial(self._answer, channel))

    def kill(self) -> None:
        """End the process; behind walls, with it all that it has started."""
        self._process.kill()

    def terminate(self) -> None:
        """End it."""
        self.kill()

    def wait(self) -> int:
        """Return the exit code when the process has ended."""
        code = self._process.wait()
        for listener in self._listeners:
            # a thread that waits for a connection notices this, not a close
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        return code

    def _print(self) -> None:
        assert self._process.stdout is not None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with self._process.stdout as output:
            while piece := os.read(output.fileno(), _PIECE):
                # a terminal obeys control characters, and answers some of them
                text = plain_lines(_COLOUR.sub("", decoder.decode(piece)))
                with contextlib.suppress(OSError):
                    os.write(2, text.encode())
                # the log is made smaller every few seconds
                time.sleep(len(piece) / _BYTES_PER_SECOND)

    def _answer(self, channel: socket.socket) -> None:
        """Accept connections on each listening socket that comes from inside."""
        with channel:
            while True:
                _, files, _, _ = socket.recv_fds(channel, 1, 1)
                if not files:
                    return
                listener = socket.socket(fileno=files[0])
                # the other side chose the socket
                if (address := listener.getsockname()) not in self._addresses:
                    listener.close()
                    continue
                self._listeners.append(listener)
                _in_background(functools.partial(_carry_all, listener, address))


def find() -> Walls | None:
    """Return the highest walls that bubblewrap can make here; None if it is missing or can make none: see `why_not`."""
    return _found()[0]


def why_not() -> str:
    """Return why bubblewrap can make no walls here, or ""."""
    return _found()[1]


@functools.cache
def _found() -> tuple[Walls | None, str]:
    # a relative place of PATH is another one elsewhere
    if sys.platform != "linux" or not os.path.isabs(program := shutil.which(PROGRAM) or ""):
        return None, "bubblewrap (bwrap) is not installed"
    why = ""
    for network in (True, False):
        for more in ((_NO_MORE_USERS,), ()):
            walls = Walls(program, (*_ALWAYS, *([_NETWORK] if network else []), *more), network)
            if not (problem := _problem(walls)):
                return walls, ""
            why = why or f"bubblewrap can make no walls here ({problem})"
    return None, why


def _problem(walls: Walls) -> str:
    """Return bubblewrap's words if it cannot start Python behind such walls, or ""."""
    least = Confinement(confine.installation(), (), ())
    command = [walls.program, *walls.options, *mounts(least), "--", sys.executable, "-I", "-S", "-c", ""]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_PROBE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return said[0] if done.returncode else ""


def mounts(confinement: Confinement) -> list[str]:
    """Return bubblewrap's options for the file system of a confinement. A path that does not exist is left out."""
    words = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for path in _changeable_in_proc():
        words += ["--ro-bind-try", path, path]
    for path in filter(os.path.exists, _OF_OTHERS):
        # a device that is no device there cannot be opened
        words += ["--tmpfs", path, "--remount-ro", path] if os.path.isdir(path) else ["--ro-bind", "/dev/null", path]
    for pattern in _GPUS:
        for path in sorted(glob.glob(pattern)):
            words += ["--dev-bind-try", path, path]
    read = (*_SYS, *_ETC, *confinement.read, *_links(sys.executable))
    options = dict.fromkeys(map(os.path.realpath, read), "--ro-bind-try")
    options |= dict.fromkeys((os.path.realpath(place) for place in confinement.write if place != "/tmp"), "--bind-try")
    made = dict[Path, str]()
    # a directory before its contents
    for place, option in sorted(options.items(), key=lambda item: len(Path(item[0]).parts)):
        if next((made[above] for above in Path(place).parents if above in made), "") != option:
            made[Path(place)] = option
            words += [option, place, place]
    for place in (*read, *confinement.write):
        link = next((path for path in (*reversed(Path(place).parents), Path(place)) if path.is_symlink()), None)
        # a link that lies in a directory that is there leads to its target, which is there too
        if link is not None and not any(above in made for above in link.parents):
            words += [options[os.path.realpath(place)], place, place]
    return words


def _changeable_in_proc() -> Iterator[str]:
    """Yield all that root could change in /proc beside the processes: the kernel's settings."""
    with os.scandir("/proc") as entries:
        for entry in entries:
            if not entry.name.isdigit() and not entry.is_symlink():
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode) or mode & 0o222:
                    yield entry.path


def _links(program: str) -> Iterator[str]:
    """Yield each file that a program's symbolic links name, in turn."""
    path = Path(program)
    # the kernel follows 40
    for _ in range(40):
        if not path.is_symlink():
            return
        path = Path(os.path.normpath(path.parent / path.readlink()))
        yield str(path)


@contextlib.contextmanager
def _given_files() -> Iterator[tuple[list[str], list[int]]]:
    """Yield bubblewrap's options with its open files, and these files' numbers.

    They are files of /etc that name this account and loopback alone, and the filter of system calls.
    """
    uid, gid = os.getuid(), os.getgid()
    texts = {
        "/etc/passwd": f"{_NAME}:x:{uid}:{gid}::/tmp:/bin/sh\n",
        "/etc/group": f"{_NAME}:x:{gid}:\n",
        "/etc/hosts": f"{LOOPBACK} localhost\n::1 localhost\n",
    }
    with contextlib.ExitStack() as opened:

        def number_of(content: bytes) -> int:
            file = opened.enter_context(open(os.memfd_create("given"), "wb", buffering=0))
            file.write(content)
            file.seek(0)
            return file.fileno()

        words, files = list[str](), list[int]()
        for path, text in texts.items():
            files.append(number_of(text.encode()))
            words += ["--ro-bind-data", str(files[-1]), path]
        if calls := call_filter():
            files.append(number_of(calls))
            words += ["--seccomp", str(files[-1])]
        yield words, files


# Carrying ---------------------------------------------------------------------------------------------------------------


def _in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


class _Carried:
    """The connections that are carried. The first is the one of which nothing came for the longest time.

    One more than may be open closes the first. So an application that opens connections and is silent takes no way from
    the others.
    """

    def __init__(self) -> None:
        self._pairs = dict[socket.socket, socket.socket]()
        self._lock = threading.Lock()

    def add(self, inside: socket.socket, outside: socket.socket) -> None:
        """Put a connection last."""
        with self._lock:
            silent = next(iter(self._pairs.items())) if len(self._pairs) >= _MOST_CONNECTIONS else ()
            if silent:
                del self._pairs[silent[0]]
            self._pairs[inside] = outside
        for one in silent:
            # a thread that waits for bytes notices this, not a close
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def note(self, inside: socket.socket) -> None:
        """Put a connection of which bytes came last, if it is not closed."""
        with self._lock:
            if (outside := self._pairs.pop(inside, None)) is not None:
                self._pairs[inside] = outside

    def remove(self, inside: socket.socket) -> None:
        """Take out a connection that has ended."""
        with self._lock:
            self._pairs.pop(inside, None)


def _carry_all(listener: socket.socket, to: tuple[str, int]) -> None:
    """Carry bytes between each connection and an address, until the listening socket is shut down."""
    carried, free = _Carried(), threading.BoundedSemaphore(_MOST_CONNECTIONS)
    with listener:
        while True:
            try:
                inside, _ = listener.accept()
            except OSError:
                return
            try:
                outside = socket.create_connection(to)
            except OSError:
                inside.close()
                continue
            carried.add(inside, outside)
            # the threads of a connection that was closed end at once
            free.acquire()
            _in_background(functools.partial(_carry, inside, outside, carried, free))


def _carry(inside: socket.socket, outside: socket.socket, carried: _Carried, free: threading.BoundedSemaphore) -> None:
    with contextlib.suppress(OSError), inside, outside:
        for one in (inside, outside):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        note = functools.partial(carried.note, inside)
        back = _in_background(functools.partial(_copy, outside, inside, note))
        _copy(inside, outside, note)
        back.join()
    carried.remove(inside)
    free.release()


def _copy(source: socket.socket, target: socket.socket, note: Callable[[], None]) -> None:
    """Copy bytes until the source ends, then end the target's input. note: called for each piece."""
    with contextlib.suppress(OSError):
        while piece := source.recv(_PIECE):
            note()
            target.sendall(piece)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


# System calls ---------------------------------------------------------------------------------------------------------

# What a walled application gives up, because it passes walls of namespaces, by a filter of seccomp:
# - Sockets of any family but IP and netlink. A Unix socket in a path that the site named would answer, and a socket to the
#   hypervisor (vsock) knows no namespaces. Pairs of connected sockets remain, which reach nobody else.
# - The kernel's keyrings, which processes of one account share.
# - Typing into a terminal (TIOCSTI, TIOCLINUX).
# - io_uring, which would make sockets past this filter.
# - The kernel's log (syslog), its measurements of all processes (perf events) and its programs (BPF): namespaces do not hold
#   for them, and on some machines they need no right.
# - Files that run as their owner or group (set-user-ID, set-group-ID). Another account that reaches one would start it
#   outside the walls, as the SuperNode's account.
# Bubblewrap sets the filter, for its own first process behind the walls too: an application may trace that one, where the
# kernel has no Landlock, and let it make these calls.


# instructions of classic BPF
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
# places in the filter's input: the call's number, the architecture, the low words of the first arguments
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24
# calls of the other ABI of x86-64 (x32) have this bit
_X32 = 0x40000000
_FAMILIES = (2, 10, 16)  # IPv4, IPv6, netlink
_STREAM, _SEQUENCED, _KIND = 1, 5, 0xF
_TYPING = (0x5412, 0x541C)
_RUNS_AS_OWNER = 0o6000


@dataclass(frozen=True)
class _Machine:
    """An architecture's name in the kernel, and its numbers of calls."""

    audit: int
    socket: int
    socketpair: int
    ioctl: int
    # add_key, request_key, keyctl, io_uring_setup, openat2 (its mode is not seen here), syslog, perf_event_open, bpf
    refused: tuple[int, ...]
    # calls that give a file a mode, and the place of the mode among their arguments
    modes: tuple[tuple[int, int], ...]


# chmod, fchmod, fchmodat, fchmodat2, open, openat, creat, mknod, mknodat
_MODES_X86 = ((90, 1), (91, 1), (268, 2), (452, 2), (2, 2), (257, 3), (85, 1), (133, 1), (259, 2))
# fchmod, fchmodat, fchmodat2, openat, mknodat
_MODES_ARM = ((52, 1), (53, 2), (452, 2), (56, 3), (33, 2))
_MACHINES = {
    "x86_64": _Machine(0xC000003E, 41, 53, 16, (248, 249, 250, 425, 437, 103, 298, 321), _MODES_X86),
    "aarch64": _Machine(0xC00000B7, 198, 199, 29, (217, 218, 219, 425, 437, 116, 241, 280), _MODES_ARM),
}


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("value", ctypes.c_uint32))


def has_call_filter() -> bool:
    """Return whether there is a filter for this machine's architecture."""
    return platform.machine() in _MACHINES


def call_filter() -> bytes:
    """Return the filter as bubblewrap's option --seccomp reads it; empty on an architecture without one."""
    return b"".join(map(bytes, _program(_MACHINES[platform.machine()]))) if has_call_filter() else b""


def _program(machine: _Machine) -> Iterator[_Instruction]:
    yield from _unless(_ARCHITECTURE, (machine.audit,), errno.ENOSYS)
    yield from [_Instruction(_LOAD, 0, 0, _NUMBER), _Instruction(_AT_LEAST, 0, 1, _X32), _refuse(errno.ENOSYS)]
    for number in machine.refused:
        yield from [_Instruction(_EQUAL, 0, 1, number), _refuse(errno.ENOSYS)]
    yield from _for_call(machine.socket, list(_unless(_FIRST, _FAMILIES, errno.EAFNOSUPPORT)))
    yield from _for_call(machine.socketpair, list(_unless(_SECOND, (_STREAM, _SEQUENCED), errno.EACCES, _KIND)))
    for number, argument in machine.modes:
        mode = _FIRST + 8 * argument
        yield from _for_call(number, list(_unless(mode, (0,), errno.EPERM, _RUNS_AS_OWNER)))
    typing = [_Instruction(_LOAD, 0, 0, _SECOND)]
    for request in _TYPING:
        typing += [_Instruction(_EQUAL, 0, 1, request), _refuse(errno.EPERM)]
    yield from _for_call(machine.ioctl, typing)
    yield _Instruction(_RETURN, 0, 0, _ALLOW)


def _refuse(error: int) -> _Instruction:
    return _Instruction(_RETURN, 0, 0, _ERROR | error)


def _unless(place: int, values: Sequence[int], error: int, mask: int = 0) -> Iterator[_Instruction]:
    """Refuse with an error unless a word is one of the values. mask: the bits of the word that count; 0 means all."""
    yield _Instruction(_LOAD, 0, 0, place)
    if mask:
        yield _Instruction(_AND, 0, 0, mask)
    for k, value in enumerate(values):
        yield _Instruction(_EQUAL, len(values) - k, 0, value)
    yield _refuse(error)


def _for_call(number: int, instructions: Sequence[_Instruction]) -> Iterator[_Instruction]:
    """Go through the instructions for one call alone. The number is loaded before and after."""
    yield _Instruction(_EQUAL, 0, len(instructions) + 1, number)
    yield from instructions
    yield _Instruction(_RETURN, 0, 0, _ALLOW)
