"""System calls that a walled application gives up, because they pass walls of namespaces: a filter of seccomp.

- Sockets of any family but IP and netlink. A Unix socket in a path that the site named would answer, and a socket to the
  hypervisor (vsock) knows no namespaces. Pairs of connected sockets remain, which reach nobody else.
- The kernel's keyrings, which processes of one account share.
- Typing into a terminal (TIOCSTI, TIOCLINUX).
- io_uring, which would make sockets past this filter.
- The kernel's log (syslog), its measurements of all processes (perf events) and its programs (BPF): namespaces do not hold
  for them, and on some machines they need no right.
- Files that run as their owner or group (set-user-ID, set-group-ID). Another account that reaches one would start it
  outside the walls, as the SuperNode's account.

Bubblewrap sets the filter, for its own first process behind the walls too: an application may trace that one, where the
kernel has no Landlock, and let it make these calls.
"""

from __future__ import annotations

import ctypes
import errno
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


def is_known() -> bool:
    """Return whether there is a filter for this machine's architecture."""
    return platform.machine() in _MACHINES


def program() -> bytes:
    """Return the filter as bubblewrap's option --seccomp reads it; empty on an architecture without one."""
    return b"".join(map(bytes, _program(_MACHINES[platform.machine()]))) if is_known() else b""


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
