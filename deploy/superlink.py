"""A SuperLink whose fleet port takes SuperNodes' calls alone: `python -P -m deploy.superlink --fleet HOST:PORT -- OPTIONS`.

OPTIONS are flower-superlink's. Flower 1.39 serves SuperNodes over gRPC on a port of their own. Newer versions serve
SuperNodes, runs and control calls over HTTP on one port, so that whoever reaches it can submit code to every site. Here
Flower's server listens on loopback alone. A second port, the fleet's, serves the same application behind `FleetOnly`.

If Flower lacks the place for it, the SuperLink does not start. With `--grpc` a newer Flower serves SuperNodes of 1.39 at
the fleet port, over gRPC as 1.39 does.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import ipaddress
import logging
import os
import re
import socket
import sqlite3
import stat
import sys
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deploy import certificates, detached, patches
from deploy.patches import changing
from deploy.unanswered import Kept
from fl_app import log_format
from fl_app.errors import DeploymentError
from fl_app.exit_codes import ending_on_bad_input
from fl_app.files import make_directory
from fl_app.server.disk import DATABASE

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# calls of SuperNodes. A pattern of all that may pass, because a list of what may not would miss spellings: a server
# decodes %2f in a path.
_FLEET = re.compile(rb"/v1/fleet/[a-z-]+")
_MODULE, _SERVER = "flwr.superlink.cli.flower_superlink", "uvicorn"
# Flower's function that returns the log settings of its server
_LOGGING = "get_uvicorn_log_config"
MOST_BYTES = 64 << 20
"""Most bytes of a request's body. Flower sends a message in pieces of at most 20 MB."""
BACKLOG = 2048
_FORBIDDEN, _TOO_LARGE = 403, 413
# variables with which a newer Flower opens further ports: for control calls, and for SuperNodes over gRPC
_CONTROL, _GRPC = "FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API"
# of a closed web socket: against the server's policy
_POLICY = 1008


class FleetOnly:
    """An ASGI application that refuses, on the fleet port, all but POST requests of SuperNodes.

    app: Flower's. port: the fleet's. The kernel knows the port at which a connection arrived, so no header can forge it.
    Elsewhere, and for the application's own start and end, app is called as it is.
    """

    def __init__(self, app: App, port: int) -> None:
        self._app, self._port = app, port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it on."""
        if scope["type"] == "lifespan" or not self._is_fleet(scope):
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": _POLICY})
        elif status := refused(scope):
            headers = [(b"content-length", b"0"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
        else:
            await self._app(scope, receive, send)

    def _is_fleet(self, scope: Scope) -> bool:
        server = scope.get("server")
        # without a known port, as at a Unix socket, the fleet's rules hold
        return not server or server[1] is None or server[1] == self._port


def refused(scope: Scope) -> int:
    """Return the HTTP status that refuses a request at the fleet port; 0 if it may pass.

    A request passes if it is a POST to a fleet path, as it came over the wire, without a query, and declares how many bytes
    its body has: at most MOST_BYTES.
    """
    path = scope.get("raw_path")
    if scope["method"] != "POST" or not isinstance(path, bytes) or not _FLEET.fullmatch(path) or scope["query_string"]:
        return _FORBIDDEN
    lengths = [value for name, value in scope["headers"] if name.lower() == b"content-length"]
    coded = any(name.lower() == b"transfer-encoding" for name, _ in scope["headers"])
    if coded or len(lengths) != 1 or not re.fullmatch(rb"[0-9]{1,12}", lengths[0]):
        return _FORBIDDEN
    return _TOO_LARGE if int(lengths[0]) > MOST_BYTES else 0


def main() -> None:
    """Start a SuperLink."""
    parser = argparse.ArgumentParser(prog="deploy.superlink")
    parser.add_argument("--fleet", required=True, metavar="HOST:PORT")
    parser.add_argument("--grpc", action="store_true", help="serve SuperNodes over gRPC, as Flower 1.39 does")
    parser.add_argument("--log-format", default="", help="text or json; otherwise as $COROLLA_LOG_FORMAT says")
    parser.add_argument("flower", nargs="*")
    given = parser.parse_args()
    with ending_on_bad_input():
        log_format.choose(given.log_format)
        run(given.fleet, given.flower, given.grpc)


def run(fleet: str, options: list[str], grpc: bool = False) -> None:
    """Become a SuperLink with these options of flower-superlink.

    fleet: HOST:PORT for SuperNodes. grpc: whether they connect over gRPC, which Flower 1.39 always uses. Raises
    UserError before anything listens.
    """
    at = address(fleet)
    for variable in (_CONTROL, _GRPC):
        if variable in os.environ:
            raise DeploymentError(
                key=variable, rule="opens a port that is not guarded; unset it (--grpc serves SuperNodes over gRPC)"
            )
    for option in ("--fleet-api-address", "--fleet-api-type"):
        if any(word.split("=")[0] == option for word in options):
            raise DeploymentError(
                key=option, rule=f"--fleet names the address of SuperNodes, got {fleet}; leave {option} out"
            )
    flower = importlib.import_module(_MODULE)
    # after the import, which gives Flower's logger its handler
    log_format.configure("superlink")
    detached.keep_small()
    if hasattr(flower, _LOGGING):
        settings = getattr(flower, _LOGGING)
        # in JSON its server would give its loggers another format
        setattr(flower, _LOGGING, lambda level: None if log_format.is_json() else without_access(settings(level)))
    old = serves_grpc(metadata.version("flwr"))
    if not old:
        guard(flower, None if grpc else at)
    if grpc and not old:
        os.environ[_GRPC] = "1"
    if grpc or old:
        options = [*options, "--fleet-api-address", fleet]
    if path := database_of(options):
        if note := make_private(Path(path)):
            logging.getLogger("corolla").warning(note)
        forget_deleted(Path(path))
        # ServerApps inherit it
        os.environ[DATABASE] = path
    keep_superexec(flower)
    patches.register_in_one_step()
    patches.allow_slow_starts(patches.IN_MEMORY, patches.SQL)
    certificates.watch(certificates.named_by(options))
    sys.argv = ["flower-superlink", *options]
    flower.flower_superlink()


def keep_superexec(flower: Any) -> None:
    """Let Flower's module start its SuperExec again whenever that ends. Warn if the module has no place for it.

    SuperExec starts ServerApps, and ends with an error where the SuperLink fails, as on a full disk. Without it every later
    run waits for ever.
    """
    with changing("starts its SuperExec", "no run starts after an error of the SuperLink, until it is started anew"):
        processes = flower.subprocess

        def start(words: Sequence[str], **how: Any) -> Kept:
            return Kept(functools.partial(processes.Popen, words, **how))

        flower.subprocess = SimpleNamespace(Popen=start, TimeoutExpired=processes.TimeoutExpired)


def without_access(settings: dict[str, Any]) -> dict[str, Any]:
    """Return log settings of Flower's server without lines of requests, which would be most of the log."""
    settings["loggers"].setdefault("uvicorn.access", {})["level"] = "WARNING"
    return settings


def database_of(options: Sequence[str]) -> str:
    """Return the absolute path of the database that flower-superlink's options name, "" if it is no file."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--database", default="")
    given: str = parser.parse_known_args(options)[0].database
    return "" if not given or given.startswith(":") or "://" in given else str(Path(given).absolute())


def serves_grpc(version: str) -> bool:
    """Return whether this version of Flower serves SuperNodes over gRPC on a port of their own."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return (major, minor) < (1, 40)


def address(text: str, option: str = "--fleet") -> tuple[str, int]:
    """Return the host and the port of HOST:PORT; an IPv6 address has brackets. option: for errors. Raises UserError."""
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536 or "[" in host:
        raise DeploymentError(key=option, rule="must be HOST:PORT", value=text)
    return host, int(port)


def guard(flower: Any, fleet: tuple[str, int] | None) -> None:
    """Let Flower's module serve its application on loopback, and at the fleet's host and port behind `FleetOnly`.

    fleet: None if Flower serves SuperNodes over gRPC. Raises UserError if the module no longer calls `uvicorn.run`.
    """
    uvicorn: Any = getattr(flower, _SERVER, None)
    if not callable(getattr(uvicorn, "run", None)):
        raise DeploymentError(
            key=f"flwr {metadata.version('flwr')}",
            rule=f"its SuperLink cannot be guarded ({_MODULE} has no {_SERVER}.run); use a version that "
            "docs/deployment.md names",
        )

    def serve(app: App, **options: Any) -> None:
        if not is_loopback(str(options.get("host"))):
            raise DeploymentError(
                key="--host",
                rule="Flower's control calls must stay on loopback",
                value=options.get("host"),
                hint="; SuperNodes use --fleet",
            )
        if options.get("workers", 1) != 1 or options.get("reload") or options.get("uds") or options.get("fd"):
            raise DeploymentError(
                key=f"flwr {metadata.version('flwr')}",
                rule="its SuperLink starts its server in a way that is not known here",
            )
        sockets = [listening(*fleet)] if fleet else []
        config = uvicorn.Config(FleetOnly(app, fleet[1]) if fleet else app, **options)
        server = uvicorn.Server(config)
        server.run(sockets=[config.bind_socket(), *sockets])
        if not server.started:
            raise SystemExit(3)  # as uvicorn.run does

    setattr(flower, _SERVER, SimpleNamespace(run=serve))


def is_loopback(host: str) -> bool:
    """Return whether a host is an address of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at a host's port. Raises UserError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise DeploymentError(key="--fleet", rule=f"cannot listen on {host}, port {port}: {error.strerror}") from None


# The database: its owner's alone, whatever the umask, and without the messages of ended runs --------------------------

# SQLite leaves deleted bytes in free pages, and in the write-ahead log, until others replace them. A run's uploads would
# stay there for as long. Here deleted bytes are overwritten, and the log is emptied when a run ends.


log = logging.getLogger("corolla")

# SQLite gives the first file's mode to the others when it makes them
DATABASE_FILES = ("", "-wal", "-shm", "-journal")
_OVERWRITE = ("secure_delete", "ON")
_PAUSES = (0.2, 5.0, 60.0)
"""Seconds before the log is emptied, and emptied again: a reader or an open transaction may have been in the way."""


def make_private(path: Path) -> str:
    """Give a database's files mode 0600 and its directory 0700, and make the missing ones.

    Return a note if the directory is not for the database alone to close, "" otherwise: one of the system, or another
    user's. The files are closed there as well. Raises UserError.
    """
    try:
        make_directory(path.parent)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        for end in DATABASE_FILES:
            with contextlib.suppress(FileNotFoundError):
                Path(f"{path}{end}").chmod(0o600)
        about = path.parent.stat()
        mode = stat.S_IMODE(about.st_mode)
        if not mode & 0o077:
            return ""
        if about.st_uid == os.geteuid() and not mode & stat.S_ISVTX and not _is_shared(path.parent):
            path.parent.chmod(0o700)
            return ""
    except OSError as error:
        raise DeploymentError(
            key="superlink.database", rule=f"unable to open database file {path}: {error.strerror}"
        ) from None
    return (
        f"superlink.database: others may list {path.parent} (mode {mode:o}); give the database a directory of its own"
    )


def _is_shared(directory: Path) -> bool:
    """Return whether a directory is the user's home, or is as high as the system's own (/srv, /var/lib)."""
    place = directory.resolve()
    return place == Path.home().resolve() or (os.geteuid() == 0 and len(place.parts) <= 3)


def forget_deleted(path: Path) -> None:
    """Let Flower's SuperLink overwrite deleted bytes in its database, and empty the log when a run ends.

    Free pages of earlier runs are overwritten now. A warning gives the reason if they are not.
    """
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=60)) as database:
            database.execute("PRAGMA secure_delete = ON")
            if database.execute("PRAGMA freelist_count").fetchone()[0]:
                database.execute("VACUUM")
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    # Flower names a file that is no database; a full disk is no reason not to serve
    except sqlite3.Error as error:
        log.warning("superlink.database: deleted bytes of earlier runs in %s could not be overwritten: %s", path, error)
    with changing("keeps its database", "a run's uploads may stay in its free pages"):
        mixin: Any = importlib.import_module("flwr.supercore.sql_mixin")
        module: Any = importlib.import_module("flwr.server.superlink.linkstate.sql_linkstate")
        state, unsigned = module.SqlLinkState, module.int64_to_uint64
        end_tasks, clean, ended = state._finish_run_tasks, state.cleanup_run, threading.Event()

        @functools.wraps(clean)
        def clean_and_empty(self: Any, run_id: int) -> None:
            clean(self, run_id)
            ended.set()

        # every end of a run comes here: finished, stopped, failed, expired. Flower cleans when somebody asks for the run next.
        @functools.wraps(end_tasks)
        def end_and_clean(self: Any, runs: list[tuple[int, int]], **how: Any) -> None:
            end_tasks(self, runs, **how)
            for run_id, _ in runs:
                self.cleanup_run(unsigned(run_id))

        mixin.SQLITE_PRAGMAS = (*mixin.SQLITE_PRAGMAS, _OVERWRITE)
        state._finish_run_tasks, state.cleanup_run = end_and_clean, clean_and_empty
        threading.Thread(target=_keep_empty, args=(path, ended), name="empty-log", daemon=True).start()


def _keep_empty(path: Path, ended: threading.Event) -> None:
    """Empty the log whenever a run has ended: soon, and again after transactions that were open."""
    while ended.wait():
        ended.clear()
        for seconds in _PAUSES:
            time.sleep(seconds)
            with contextlib.suppress(sqlite3.Error):
                empty_log(path)


def empty_log(path: Path) -> bool:
    """Move the write-ahead log's pages into a database and empty the log. Return whether no reader was in the way."""
    with contextlib.closing(sqlite3.connect(path, timeout=5)) as database:
        return not database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]


def copy_database(path: Path, to: Path) -> None:
    """Copy a database that may be in use, without its free pages. The copy has mode 0600. Raises UserError if it is none."""
    try:
        os.close(os.open(to, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=60)) as source:
            source.execute("VACUUM INTO ?", (str(to),))
    except sqlite3.Error as error:
        raise DeploymentError(key="superlink.database", rule=f"{path} cannot be copied: {error}") from None


if __name__ == "__main__":
    main()
