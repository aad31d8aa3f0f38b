"""Health checks over HTTP. As a command (a container's health check): `URL`, or `URL CA` with the CA's certificate.

Flower's `/health` answers as soon as the process is up, before a SuperNode has reached its SuperLink. deploy.node checks
whether it is connected.
"""

from __future__ import annotations

import ssl
import sys
import urllib.request


def answers(url: str, ca: str = "", seconds: float = 2) -> bool:
    """Return whether an HTTP(S) URL answers with status 200; no proxy is used. ca: file with the CA's certificate."""
    try:
        context = ssl.create_default_context(cafile=ca) if ca else None
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if context:
            handlers.append(urllib.request.HTTPSHandler(context=context))
        with urllib.request.build_opener(*handlers).open(url, timeout=seconds) as reply:
            return bool(reply.status == 200)
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    raise SystemExit(0 if answers(sys.argv[1], "".join(sys.argv[2:3])) else 1)
