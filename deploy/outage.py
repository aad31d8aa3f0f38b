"""A SuperNode outlives errors of its SuperLink, such as those of a full disk under the SuperLink's database.

Flower's SuperNode retries only while it cannot connect. If the SuperLink answers a call with an internal error, Flower's
loop ends the process, or the thread of its heartbeats ends and the node counts as gone for good. Here both try again.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from deploy.patches import changing

log = logging.getLogger("corolla")

T = TypeVar("T")
# names of gRPC's status codes
_FAULTS = ("INTERNAL", "UNKNOWN")
_HTTP_FAULT = 500


def is_fault(error: Exception) -> bool:
    """Return whether an error of a call means that the SuperLink failed, over gRPC or HTTP."""
    code = getattr(error, "code", None)
    if callable(code):
        return getattr(code(), "name", "") in _FAULTS
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return isinstance(status, int) and status >= _HTTP_FAULT


def patient(call: Callable[..., T], instead: T) -> Callable[..., T]:
    """Return a call that gives `instead` when the SuperLink fails. The first failure of an outage is logged."""
    failing = False

    @functools.wraps(call)
    def try_call(*given: Any, **named: Any) -> T:
        nonlocal failing
        try:
            result = call(*given, **named)
        except Exception as error:
            if not is_fault(error):
                raise
            if not failing:
                log.warning("the SuperLink fails (its log has the reason, for example a full disk); trying again")
            failing = True
            return instead
        failing = False
        return result

    return try_call


def keep_heartbeats() -> None:
    """Let Flower's heartbeats continue after an internal error of the SuperLink. Warn if Flower has no place for it."""
    with changing("sends heartbeats", "a failing SuperLink may lose this node"):
        sender: Any = importlib.import_module("flwr.supercore.heartbeat").HeartbeatSender
        begin = sender.__init__

        def begin_patiently(self: Any, heartbeat_fn: Callable[[], bool]) -> None:
            # after False, Flower tries again
            begin(self, patient(heartbeat_fn, False))

        sender.__init__ = begin_patiently
