"""A network of its own for what a simulation starts (Linux): only a loopback, which nobody outside reaches.

For root a network namespace is enough. Everybody else needs a user namespace around it, in which one keeps one's own id: files
belong to whom they belonged. `python -m corolla.experiments.namespace PID COMMAND...` runs a command where process PID is.
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
    """Return why a network of one's own cannot be had here, or "". Tried in a process of its own: halfway there is no way back."""
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
    """Move this process, which must have one thread, into a new network with a loopback. Raises OSError where that is refused."""
    uid, gid = os.geteuid(), os.getegid()
    _libc("unshare", _NETWORK if uid == 0 else _USER | _NETWORK)
    if uid != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SET_FLAGS, struct.pack("16sH22x", b"lo", _UP))


def enter(pid: int) -> None:
    """Move this process, which must have one thread, into the user and the network namespace of another one."""
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
