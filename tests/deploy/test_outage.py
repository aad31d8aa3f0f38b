"""A SuperNode tries again where its SuperLink fails, and where nothing else is wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from flwr.supercore import heartbeat

from deploy import patches


class Failing(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__()
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code


def over_http(status: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError("", request=httpx.Request("POST", "http://a"), response=httpx.Response(status))


FAULTS = [Failing(grpc.StatusCode.INTERNAL), Failing(grpc.StatusCode.UNKNOWN), over_http(500)]
OTHERS = [Failing(grpc.StatusCode.UNAUTHENTICATED), over_http(401), ValueError("500"), RuntimeError()]


def test_only_failures_of_the_superlink_are_faults() -> None:
    assert all(map(patches.is_fault, FAULTS)) and not any(map(patches.is_fault, OTHERS))


def test_a_poll_finds_nothing_while_the_superlink_fails(caplog: pytest.LogCaptureFixture) -> None:
    answers: Iterator[Any] = iter([*FAULTS, "message", FAULTS[0], OTHERS[0]])

    def receive() -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    poll = patches.patient(receive, None)
    with caplog.at_level(logging.WARNING, "corolla"):
        assert [poll() for _ in range(5)] == [None, None, None, "message", None]
        # an outage is one line
        assert len(caplog.records) == 2
        with pytest.raises(grpc.RpcError):
            poll()


def test_heartbeats_go_on_after_the_superlink_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat.HeartbeatSender, "__init__", heartbeat.HeartbeatSender.__init__)
    patches.keep_heartbeats()
    fails = True

    def beat() -> bool:
        if fails:
            raise Failing(grpc.StatusCode.INTERNAL)
        return True

    sender = heartbeat.HeartbeatSender(beat)
    # Flower's own thread tries again after this error, and ends after any other
    with pytest.raises(heartbeat.HeartbeatFailure):
        sender._heartbeat()
    fails = False
    sender._heartbeat()
