"""A SuperLink whose fleet port takes SuperNodes' calls alone: `python -P -m deploy.superlink --fleet HOST:PORT -- OPTIONS`.

OPTIONS are flower-superlink's. Flower 1.39 serves SuperNodes over gRPC on a port of their own. Newer versions serve
SuperNodes, runs and control calls over HTTP on one port, so that whoever reaches it can submit code to every site. Here
Flower's server listens on loopback alone. A second port, the fleet's, serves the same application behind `FleetOnly`.

If Flower lacks the place for it, the SuperLink does not start. With `--grpc` a newer Flower serves SuperNodes of 1.39 at
the fleet port, over gRPC as 1.39 does.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import ipaddress
import logging
import os
import re
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deploy import database, expiry, log_size, objects, slow_start
from deploy.patches import changing
from deploy.unanswered import Kept
from fl_app import log_format
from fl_app.errors import DeploymentError
from fl_app.exit_codes import ending_on_bad_input
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
    log_size.keep_small()
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
        if note := database.make_private(Path(path)):
            logging.getLogger("corolla").warning(note)
        database.forget_deleted(Path(path))
        # ServerApps inherit it
        os.environ[DATABASE] = path
    keep_superexec(flower)
    objects.register_in_one_step()
    slow_start.allow_slow_starts(slow_start.IN_MEMORY, slow_start.SQL)
    expiry.watch(expiry.named_by(options))
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


if __name__ == "__main__":
    main()
