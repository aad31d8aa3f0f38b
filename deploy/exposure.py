"""Whether other machines can send control calls to a SuperLink: whoever can, can run code on every node.

Flower 1.40 and newer serve control calls and SuperNodes on one port, and open-source Flower has no login. deploy.superlink
keeps that port on loopback. A SuperLink that was started by hand may not.
"""

from __future__ import annotations

import http.client
import socket
import ssl
from importlib import metadata

import psutil

from deploy.connection import address_of
from deploy.superlink import is_loopback, serves_grpc
from fl_app.errors import DeploymentError

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
