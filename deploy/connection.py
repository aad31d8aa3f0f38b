"""The cluster's SuperLink connection in the user's Flower config: one table, `[superlink.NAME]`, edited as text.

The rest of the file stays byte for byte the same. The result is parsed before it is written. If the edit would change
anything else, the file is left alone. Edits wait for each other: clusters may start and end at the same time.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import ssl
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from deploy.superlink import is_loopback, serves_grpc
from fl_app.errors import DeploymentError
from fl_app.files import lock, publish_text
from fl_app.keys import nearest
from fl_app.toml import value_to_toml


def config_path() -> Path:
    """Return Flower's config file, under $FLWR_HOME or ~/.flwr."""
    from flwr.supercore.utils import get_flwr_home

    path: Path = get_flwr_home() / "config.toml"
    return path


def require_free(path: Path, name: str, table: dict[str, Any]) -> None:
    """Raise UserError if the connection cannot be added, for example because one of its name exists."""
    _with_table(path, _text(path), name, table)


def add(path: Path, name: str, table: dict[str, Any]) -> None:
    """Add the table `[superlink.NAME]`. Raises UserError if another one of that name exists."""
    with _locked(path):
        _write(path, _with_table(path, _text(path), name, table))


def remove(path: Path, name: str, table: dict[str, Any]) -> None:
    """Remove our table if it still exists unchanged. Raises UserError if it cannot be cut out."""
    # a lock is a file beside it: a directory that is read only keeps no cluster from ending whose table is gone
    if path.exists() and _holds(_parse(path, path.read_text(encoding="utf-8")), name, table):
        with _locked(path):
            _remove(path, name, table)


def _holds(config: Mapping[str, Any], name: str, table: dict[str, Any]) -> bool:
    found = config.get("superlink", {}).get(name)
    return isinstance(found, dict) and all(found.get(key) == value for key, value in table.items())


def _remove(path: Path, name: str, table: dict[str, Any]) -> None:
    text = path.read_text(encoding="utf-8")
    before = _parse(path, text)
    if not _holds(before, name, table):
        return
    kept: list[str] = []
    inside = False
    for line in text.splitlines(keepends=True):
        if re.fullmatch(rf"""\s*\[\s*superlink\s*\.\s*["']?{re.escape(name)}["']?\s*\]\s*(#.*)?""", line.strip()):
            inside = True
            if kept and not kept[-1].strip():
                # `add` put an empty line before the table
                kept.pop()
        elif inside and (not line.strip() or line.lstrip().startswith(("[", "#"))):
            inside = False
        if not inside:
            kept.append(line)
    after = "".join(kept)
    rest = {k: v for k, v in before["superlink"].items() if k != name}
    expected = {**before, "superlink": rest} if rest else {k: v for k, v in before.items() if k != "superlink"}
    if _parse(path, after) != expected:
        raise DeploymentError(key=path, rule=f"[superlink.{name}] cannot be cut out safely; remove it by hand")
    _write(path, after)


def require_known(name: str) -> None:
    """Raise UserError if Flower's config file has no connection of this name.

    If there is no file, Flower's default config counts.
    """
    path = config_path()
    links = _parse(path, _text(path)).get("superlink", {})
    known = [link for link, table in links.items() if isinstance(table, dict)] if isinstance(links, dict) else []
    if name not in known:
        raise DeploymentError(
            key=f"--superlink {name}",
            rule=f"{path} has no connection of this name; it has {', '.join(known) or 'none'}{nearest(name, known)}; "
            "`corolla cluster up` adds the one of a cluster",
        )


def address_of(name: str) -> tuple[str, int, bool] | None:
    """Return the host and port of a connection's SuperLink, and whether it uses TLS; None without a usable address."""
    table = _connection(name)
    host, _, port = str(table.get("address", "")).rpartition(":")
    if not host or not port.isdigit():
        return None
    return host.strip("[]"), int(port), not table.get("insecure")


def _connection(name: str) -> dict[str, Any]:
    path = config_path()
    table = _parse(path, _text(path)).get("superlink", {}).get(name, {})
    return table if isinstance(table, dict) else {}


def bad_certificate(name: str, seconds: float = 5) -> str:
    """Return the fault of the certificate of a connection's SuperLink.

    Return "" if it has no fault, or if there is no answer. Flower's own commands report the fault as a network error.
    """
    table, found = _connection(name), address_of(name)
    if found is None or not found[2]:
        return ""
    host, port, _ = found
    try:
        context = ssl.create_default_context(cafile=table.get("root-certificates"))
        with socket.create_connection((host, port), timeout=seconds) as plain:
            context.wrap_socket(plain, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        return str(error.verify_message)
    except (OSError, ValueError):
        pass
    return ""


def _with_table(path: Path, text: str, name: str, table: dict[str, Any]) -> str:
    before = _parse(path, text)
    links = before.get("superlink", {})
    if isinstance(links, dict) and name in links:
        raise DeploymentError(
            f"{path} has a connection named {name!r} already; rename or remove its [superlink.{name}], "
            "or give the cluster another `name`"
        )
    lines = [f"[superlink.{name}]", *(f"{key} = {value_to_toml(value)}" for key, value in table.items())]
    gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
    after = text + gap + "\n".join(lines) + "\n"
    expected = {**before, "superlink": {**links, name: table}} if isinstance(links, dict) else None
    if _parse(path, after) != expected:
        raise DeploymentError(key=path, rule=f"cannot add [superlink.{name}] without changing the rest; add it by hand")
    return after


def _text(path: Path) -> str:
    """Return the file's text, or the text that Flower itself would create."""
    if path.exists():
        return path.read_text(encoding="utf-8")
    from flwr.cli.constant import DEFAULT_FLOWER_CONFIG_TOML

    return str(DEFAULT_FLOWER_CONFIG_TOML)


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (RecursionError, ValueError) as error:
        raise DeploymentError(key=path, rule=f"not valid TOML ({error}); mend it first") from None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let no other `add` or `remove` change the file meanwhile. Raises UserError if it cannot be read or written."""
    target = path.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with lock(target.with_name(f".{target.name}.lock"), wait=True):
            yield
    except OSError as error:
        raise DeploymentError(key=path, rule=f"cannot be changed: {error.strerror}") from None
    # the file, or a path to be written to it, is not UTF-8
    except UnicodeError as error:
        raise DeploymentError(key=path, rule=f"cannot be changed: {error}") from None


def _write(path: Path, text: str) -> None:
    """Replace the file in one step, through a symbolic link, and keep its mode."""
    target = path.resolve()
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
    publish_text(target, text, mode)


# Control calls from other machines ------------------------------------------------------------------------------------

# Whoever can send control calls to a SuperLink can run code on every node. Flower 1.40 and newer serve them and SuperNodes on
# one port, and open-source Flower has no login. deploy.superlink keeps that port on loopback. A SuperLink that was started by
# hand may not.


_CONTROL, _FLEET = "/v1/control/list-runs", "/v1/fleet/get-run"
# Answers of a guard, of a proxy that asks for a login, and of programs other than a SuperLink. Flower's own answer to an
# empty call is 415.
_CLOSED = frozenset((401, 403, 404, 405, 407, 501, 502, 503, 504))
# answers of a port without such calls
_MISSING = frozenset((404, 405, 501))


def require_closed(name: str) -> None:
    """Raise UserError if control calls to a connection's SuperLink work from other machines.

    name: of a connection in Flower's config. A SuperLink on this machine is asked at this machine's other addresses.
    This Flower may be one that serves SuperNodes on a port of their own. Then a SuperLink that does so, too, is left alone:
    who reaches its SuperNodes' port cannot send control calls.
    """
    if not (found := address_of(name)):
        return
    host, port, secure = found
    local = is_loopback(host) or host == "localhost"
    two_ports = serves_grpc(metadata.version("flwr"))
    for at in own_addresses() if local else [host]:
        if two_ports and answer(_FLEET, at, port, secure) in (None, *_MISSING):
            continue
        if answer(_CONTROL, at, port, secure) not in (None, *_CLOSED):
            raise DeploymentError(
                key=f"--superlink {name}",
                rule=f"its SuperLink takes control calls at {at}, port {port}: any machine that reaches this "
                "port can run code on every node; start it with `corolla cluster up`, or `python -P -m "
                "deploy.superlink`, and reach it over loopback or an ssh tunnel (docs/deployment.md)",
            )


def own_addresses() -> list[str]:
    """Return this machine's addresses that others may reach."""
    every = [address for each in psutil.net_if_addrs().values() for address in each]
    found = [address.address for address in every if address.family in (socket.AF_INET, socket.AF_INET6)]
    return [text for text in found if not is_loopback(text)]


def answer(call: str, host: str, port: int, secure: bool, seconds: float = 3) -> int | None:
    """Return the status of a SuperLink's answer to an empty call, whatever its certificate. None: no answer."""
    try:
        if secure:
            # who answers is not the question
            context = ssl._create_unverified_context()
            link: http.client.HTTPConnection = http.client.HTTPSConnection(host, port, timeout=seconds, context=context)
        else:
            link = http.client.HTTPConnection(host, port, timeout=seconds)
        try:
            link.request("POST", call, headers={"Content-Length": "0"})
            return link.getresponse().status
        finally:
            link.close()
    except (OSError, http.client.HTTPException):
        return None
