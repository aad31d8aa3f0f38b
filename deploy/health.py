"""Health checks: Flower's gRPC health service, and HTTP. As a command (a container's health check): exit 0 if serving.

Flower's service answers as soon as the process is up, before a SuperNode has reached its SuperLink. deploy.node checks
whether it is connected.
"""

from __future__ import annotations

import ssl
import sys
import urllib.request


def serving(address: str, seconds: float = 2) -> bool:
    """Return whether a gRPC health service at host:port reports that it serves."""
    import grpc
    from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
    from grpc_health.v1.health_pb2_grpc import HealthStub

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            reply = HealthStub(channel).Check(HealthCheckRequest(), timeout=seconds)
        except grpc.RpcError:
            return False
        return bool(reply.status == HealthCheckResponse.SERVING)


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
    raise SystemExit(0 if serving(sys.argv[1]) else 1)
