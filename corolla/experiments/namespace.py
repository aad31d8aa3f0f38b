"""A separate network for a simulation's processes (Linux): it has only a loopback, which no other process reaches.

For root a network namespace is enough. Other users need a user namespace around it. It maps the user's id to itself, so
that the owner of files stays the same. `python -m corolla.experiments.namespace PID COMMAND...` runs a command in the
namespaces of process PID.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

# CLONE_NEWUSER, CLONE_NEWNET
_USER, _NETWORK = 0x10000000, 0x40000000
_SET_FLAGS, _UP = 0x8914, 1  # SIOCSIFFLAGS, IFF_UP


def why_not() -> str:
    """Return the reason why a network namespace cannot be created here, or "".

    A child process tries it, since a partial change of namespaces cannot be undone.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            unshare()
        except BaseException as error:
            os.write(writer, str(error).encode() or b"?")
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        reason = pipe.read()
    os.waitpid(child, 0)
    return reason


def unshare() -> None:
    """Move this process, which must have one thread, into a new network with a loopback.

    Raises OSError if that is refused.
    """
    uid, gid = os.geteuid(), os.getegid()
    _libc("unshare", _NETWORK if uid == 0 else _USER | _NETWORK)
    if uid != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SET_FLAGS, struct.pack("16sH22x", b"lo", _UP))


def enter(pid: int) -> None:
    """Move this process, which must have one thread, into the user and network namespaces of process `pid`."""
    for name, kind in (("user", _USER), ("net", _NETWORK)):
        theirs = f"/proc/{pid}/ns/{name}"
        if os.readlink(theirs) != os.readlink(f"/proc/self/ns/{name}"):
            descriptor = os.open(theirs, os.O_RDONLY)
            _libc("setns", descriptor, kind)
            os.close(descriptor)


def _libc(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        raise OSError(f"this system has no {name}")
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    enter(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
