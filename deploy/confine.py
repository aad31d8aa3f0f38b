"""Confinement of an application by the kernel: `python -m deploy.confine RULES -- COMMAND ...` becomes the command.

It uses Linux's Landlock: a process sets rules for itself, they hold for all processes it starts, and no code or account
can lift them later. RULES is JSON: paths to read, paths to write, TCP ports to connect to. Nothing else of the file
system can be read or written, and no outside process can be traced. TCP is restricted from Linux 6.7 on. Without
Landlock (Linux 5.13) the command does not start.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fl_app.errors import UserError
from fl_app.exit_codes import ending_on_bad_input

# numbers of the system calls, the same on all architectures
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_EXECUTE, _WRITE, _READ, _LIST, _TRUNCATE, _IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15
# the rights that apply to files; the others apply to directories
_ON_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL
# all rights, by the kernel's version of Landlock; later versions have _LATEST
_ALL = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_LATEST = (1 << 16) - 1
_BIND, _CONNECT = 1, 2
_PATH, _PORT = 1, 2
_NO_NEW_PRIVILEGES = 38
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/proc", "/sys", "/run/systemd/resolve")


@dataclass(frozen=True)
class Confinement:
    """The reach of a confined process.

    read, write: files, and directories with all their contents; ports: TCP ports to connect to.
    """

    read: tuple[str, ...]
    write: tuple[str, ...]
    ports: tuple[int, ...]


def installation() -> tuple[str, ...]:
    """Return the paths of Python and the system's libraries."""
    places = [*_SYSTEM, sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *sys.path]
    return tuple(dict.fromkeys(place for place in places if place.startswith("/") and place != "/"))


def landlock_version() -> int:
    """Return the kernel's version of Landlock; 0 means none."""
    if sys.platform != "linux":
        return 0  # the number is another system call there
    return max(0, int(_libc().syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))))


def confined_command(confinement: Confinement, command: Sequence[str]) -> list[str]:
    """Return a command line that confines its process and then becomes the command."""
    return [sys.executable, "-P", "-m", "deploy.confine", json.dumps(asdict(confinement)), "--", *command]


def confine_process(confinement: Confinement) -> None:
    """Confine this process, and all that it will start, permanently. Raises UserError if the kernel cannot."""
    libc, supported = _libc(), landlock_version()
    if not supported:
        raise UserError("confine: this kernel has no Landlock (Linux 5.13 and later, if it is not switched off)")
    handled = _ALL.get(supported, _LATEST)
    attributes = [handled, *([_BIND | _CONNECT] if supported >= 4 else [])]
    words = (ctypes.c_uint64 * len(attributes))(*attributes)
    ruleset = _call(libc, _CREATE, words, ctypes.c_size_t(ctypes.sizeof(words)), ctypes.c_uint32(0))
    reading, writing = handled & (_EXECUTE | _READ | _LIST), handled
    devices = handled & (_READ | _WRITE | _LIST | _IOCTL | _TRUNCATE)
    # OpenMP libraries make files there; some end the process if they cannot
    shared = ("/dev/shm",)
    for places, rights in ((confinement.read, reading), ((*confinement.write, *shared), writing), (("/dev",), devices)):
        for place in places:
            _allow(libc, ruleset, place, rights)
    # CUDA names its threads there, and does not start otherwise. A rule for a file in /proc holds while it is open.
    _allow(libc, ruleset, "/proc/self/task", handled & (_READ | _LIST | _WRITE | _TRUNCATE), keep_open=True)
    for port in confinement.ports if supported >= 4 else ():
        rule = (ctypes.c_uint64 * 2)(_CONNECT, port)
        _call(libc, _ADD, ruleset, _PORT, rule, 0)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise UserError(f"confine: {os.strerror(ctypes.get_errno())}")
    _call(libc, _RESTRICT, ruleset, 0)
    os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, place: str, rights: int, keep_open: bool = False) -> None:
    try:
        descriptor = os.open(place, os.O_PATH | os.O_CLOEXEC)
    # a missing path needs no right
    except OSError:
        return
    if not Path(place).is_dir():
        rights &= _ON_FILES
    rule = ctypes.create_string_buffer(rights.to_bytes(8, sys.byteorder) + descriptor.to_bytes(4, sys.byteorder), 12)
    try:
        _call(libc, _ADD, ruleset, _PATH, rule, 0)
    finally:
        if keep_open:
            # it stays open in the command that this process becomes
            os.set_inheritable(descriptor, True)
        else:
            os.close(descriptor)


def _call(libc: ctypes.CDLL, number: int, *arguments: object) -> int:
    result = int(libc.syscall(number, *arguments))
    if result < 0:
        raise UserError(f"confine: the kernel refuses ({os.strerror(ctypes.get_errno())})")
    return result


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Confine this process, then become the command."""
    rules, _, *command = sys.argv[1:]
    with ending_on_bad_input():
        confine_process(Confinement(**{name: tuple(values) for name, values in json.loads(rules).items()}))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
