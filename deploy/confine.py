"""Confinement of an application by the kernel: `python -m deploy.confine RULES -- COMMAND ...` becomes the command.

It uses Linux's Landlock: a process sets rules for itself, they hold for all processes it starts, and no code or account
can lift them later. RULES is JSON: paths to read, paths to write, TCP ports to connect to. Nothing else of the file
system can be read or written, and no outside process can be traced. TCP is restricted from Linux 6.7 on. Without
Landlock (Linux 5.13) the command does not start.

Landlock leaves ways out: OPEN lists them. deploy/bubblewrap.py closes them, and runs this module inside its walls with
`--inside CHANNEL`. Landlock is then the second wall, and is left out where the kernel has none.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fl_app.errors import DeploymentError
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
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin")
# other parts of the system that Landlock leaves readable
_SETTINGS = ("/etc", "/proc", "/sys", "/run/systemd/resolve")
OPEN = (
    "Unix sockets: a service that listens on one answers (docker.sock, ssh-agent, systemd --user, D-Bus)",
    "terminals: keys can be typed into another terminal of this account (TIOCSTI)",
    "/dev/shm: other processes' shared memory can be read and changed",
    "chmod: the mode and owner of any file of this account can be changed",
    "/etc: its files can be read",
    "processes: other processes of this account can be ended, and their names, arguments and environment read",
    "keyrings: keys that the kernel keeps for this account can be read",
    "network: UDP, name lookups and other protocols but TCP are open; TCP too before Linux 6.7",
)
"""The ways out that Landlock leaves open, one line each."""
NONE = "this kernel has no Landlock (Linux 5.13 and later, if it is not switched off)"
INSIDE = "--inside"
# Variables that an application's processes get: those that Python, Flower, Corolla and the libraries of numbers read, by
# their beginnings. All others stay outside, as do those that are named like a secret.
_VARIABLES = (
    *("AMD_", "ATEN_", "COROLLA_", "CUBLAS", "CUDA", "CUDNN", "FLWR_", "GLIBC_", "GOMP_", "GOTO_", "HIP_", "HSA_"),
    *("INVOCATION_ID", "KMP_", "LANG", "LC_", "MALLOC_", "MKL_", "NCCL_", "NPY_", "NUMPY_", "NVIDIA_", "OMP_"),
    *("OPENBLAS_", "PYTORCH_", "ROCR_", "TORCH", "TRITON_", "TZ"),
)
# of Python's own variables those that name no code
_PYTHONS = (
    *("PYTHONDEVMODE", "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER", "PYTHONHASHSEED", "PYTHONIOENCODING"),
    *("PYTHONMALLOC", "PYTHONUNBUFFERED", "PYTHONUTF8"),
)
# variables that name code which runs before the walls inside are closed, and the separators of their parts
_PLACES = {"PATH": ":", "PYTHONPATH": ":", "PYTHONHOME": ":", "LD_LIBRARY_PATH": "[:;]", "LD_PRELOAD": "[: ]"}
# no module comes from the directory in which a process starts, or from a home: applications write both
_SAFE = {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}
_SECRET = re.compile("SECRET|TOKEN|PASS|PWD|KEY|CREDENTIAL|AUTH")


@dataclass(frozen=True)
class Confinement:
    """The reach of a confined process.

    read, write: files, and directories with all their contents; ports: TCP ports to connect to.
    """

    read: tuple[str, ...]
    write: tuple[str, ...]
    ports: tuple[int, ...]

    def targets(self) -> tuple[str, ...]:
        """Return the files and directories to which the paths lead now."""
        return tuple(map(os.path.realpath, (*self.read, *self.write)))

    def refuse_led_out(self) -> None:
        """Raise UserError if one of the paths lies in a directory that the process may write, and leads out of it.

        A process that was confined before could have made the link.
        """
        writable = [Path(os.path.realpath(place)) for place in self.write]
        for place in map(os.path.abspath, (*self.read, *self.write)):
            target = Path(os.path.realpath(place))
            above = {Path(os.path.realpath(path)) for path in Path(place).parents}
            for own in writable:
                if any(path.is_relative_to(own) for path in above) and not target.is_relative_to(own):
                    raise DeploymentError(
                        key="confine", rule=f"{place} lies in {own}, which applications write, and leads to {target}"
                    )


def installation() -> tuple[str, ...]:
    """Return the paths of Python and the system's libraries."""
    places = [*_SYSTEM, sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *sys.path]
    return tuple(dict.fromkeys(place for place in places if place.startswith("/") and place != "/"))


def cleaned(environment: Mapping[str, str], writable: Iterable[str | Path] = ()) -> dict[str, str]:
    """Return those variables of an environment that an application may have.

    writable: the directories that applications write. Paths of code are left out if they are empty or relative, because
    they depend on the directory in which a process starts, or if they lie in one of those.
    """
    found = {
        name: value
        for name, value in environment.items()
        if (name.startswith(_VARIABLES) or name in _PYTHONS) and not _SECRET.search(name.upper())
    }
    kept = [Path(os.path.realpath(place)) for place in writable]

    def is_safe(part: str, name: str) -> bool:
        if name == "LD_PRELOAD" and part and "/" not in part:
            # looked for in the system's directories
            return True
        places = {Path(os.path.normpath(part)), Path(os.path.realpath(part))}
        return part.startswith("/") and not any(place.is_relative_to(above) for place in places for above in kept)

    for name, separator in _PLACES.items():
        parts = [part for part in re.split(separator, environment.get(name, "")) if is_safe(part, name)]
        if parts:
            found[name] = separator.strip("[]")[0].join(parts)
    return found | _SAFE


def landlock_version() -> int:
    """Return the kernel's version of Landlock; 0 means none."""
    if sys.platform != "linux":
        return 0  # the number is another system call there
    return max(0, int(_libc().syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))))


def confined_command(confinement: Confinement, command: Sequence[str], channel: int | None = None) -> list[str]:
    """Return a command line that confines its process and then becomes the command.

    channel: None outside bubblewrap's walls. Inside, the file number of a socket to the process outside, which gets
    listening sockets for the ports and then answers there; -1 if the network is the machine's.
    """
    inside = [] if channel is None else [INSIDE, str(channel)]
    return [sys.executable, "-P", "-m", "deploy.confine", json.dumps(asdict(confinement)), *inside, "--", *command]


def confine_process(confinement: Confinement) -> None:
    """Confine this process, and all that it will start, permanently. Raises UserError if the kernel cannot."""
    libc, supported = _libc(), landlock_version()
    if not supported:
        raise DeploymentError(key="confine", rule=NONE)
    handled = _ALL.get(supported, _LATEST)
    attributes = [handled, *([_BIND | _CONNECT] if supported >= 4 else [])]
    words = (ctypes.c_uint64 * len(attributes))(*attributes)
    ruleset = _call(libc, _CREATE, words, ctypes.c_size_t(ctypes.sizeof(words)), ctypes.c_uint32(0))
    reading, writing = handled & (_EXECUTE | _READ | _LIST), handled
    devices = handled & (_READ | _WRITE | _LIST | _IOCTL | _TRUNCATE)
    # OpenMP libraries make files there; some end the process if they cannot
    shared = ("/dev/shm",)
    readable = (*confinement.read, *_SETTINGS)
    for places, rights in ((readable, reading), ((*confinement.write, *shared), writing), (("/dev",), devices)):
        for place in places:
            _allow(libc, ruleset, place, rights)
    # CUDA names its threads there, and does not start otherwise. A rule for a file in /proc holds while it is open.
    _allow(libc, ruleset, "/proc/self/task", handled & (_READ | _LIST | _WRITE | _TRUNCATE), keep_open=True)
    for port in confinement.ports if supported >= 4 else ():
        rule = (ctypes.c_uint64 * 2)(_CONNECT, port)
        _call(libc, _ADD, ruleset, _PORT, rule, 0)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise DeploymentError(key="confine", rule=os.strerror(ctypes.get_errno()))
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
        raise DeploymentError(key="confine", rule=f"the kernel refuses ({os.strerror(ctypes.get_errno())})")
    return result


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Confine this process, then become the command."""
    start = sys.argv.index("--")
    rules, *options = sys.argv[1:start]
    command = sys.argv[start + 1 :]
    confinement = Confinement(**{name: tuple(values) for name, values in json.loads(rules).items()})
    with ending_on_bad_input():
        if options[:1] == [INSIDE]:
            if (channel := int(options[1])) >= 0:
                _hand_out_ports(channel, confinement.ports)
            if landlock_version():
                confine_process(confinement)
        else:
            confine_process(confinement)
    os.execvp(command[0], command)


def _hand_out_ports(channel: int, ports: Sequence[int]) -> None:
    """Listen at ports of this process's own network, and give the sockets to the process outside.

    channel: the file number of a socket to that process, which answers there from now on.
    """
    with socket.socket(fileno=channel) as outside:
        for port in ports:
            with socket.create_server(("127.0.0.1", port)) as listener:
                socket.send_fds(outside, [b"p"], [listener.fileno()])


if __name__ == "__main__":
    main()
