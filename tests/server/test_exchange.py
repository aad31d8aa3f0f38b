"""The exchange with clients over a grid whose nodes do what each test says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Error, Message, RecordDict

from fl_app.transport import exchange as exchange_module
from fl_app.transport.exchange import Exchange, Reply
from tests.server.fake_grid import SILENT, UNDELIVERED, exchange, three


@pytest.fixture(autouse=True)
def poll_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "POLL_SECONDS", 0.005)


def connected(nodes: dict[int, Any], **changes: Any) -> Exchange:
    e = exchange(nodes, **changes)
    e.registry.wait()
    return e


def ask(e: Exchange, timeout: float = 0.03) -> dict[int, Reply]:
    requests = (e.message(i, RecordDict(), "train", 1) for i in e.registry.client_ids)
    replies = list(e.ask("round 1", requests, timeout, len(e.registry.client_ids)))
    assert len(replies) == len({r.client_id for r in replies}) == len(e.registry.client_ids)
    return {r.client_id: r for r in replies}


def test_replies_are_told_apart() -> None:
    nodes = three()
    e = connected(nodes)
    nodes |= {n: RecordDict() for n in nodes}
    contents = dict(nodes)
    replies = ask(e)
    assert {i: replies[i].content for i in replies} == {0: contents[77], 1: contents[91], 2: contents[50]}
    assert all(replies[i].content is contents[n] for i, n in ((0, 77), (1, 91), (2, 50)))


def test_progress_counts_replies() -> None:
    nodes, told = three(), []
    e = connected(nodes, progress=lambda *a: told.append(a))
    told.clear()
    ask(e)
    assert told == [("round 1", k, 3) for k in (0, 1, 2, 3)]


def test_progress_is_told_while_none_replies() -> None:
    nodes, told = three(), []
    e = connected(nodes, progress=lambda *a: told.append(a))
    nodes[50] = SILENT
    ask(e)
    # a display that left out the first shows the next
    assert told.count(("round 1", 2, 3)) > 1


@pytest.mark.parametrize(
    ("node", "answer", "expected"),
    [
        (91, UNDELIVERED, Reply(1, None, "the message could not be delivered")),
        (50, SILENT, Reply(2, None, "no reply within 0.03 s")),
        (77, Error(5, "node unavailable"), Reply(0, None, "error 5: node unavailable")),
    ],
)
def test_a_message_without_a_reply_is_told_with_its_cause(node: int, answer: object, expected: Reply) -> None:
    nodes = three()
    e = connected(nodes)
    nodes[node] = answer
    replies = ask(e)
    assert replies.pop(expected.client_id) == expected
    assert all(reply.content is not None for reply in replies.values())


def weight() -> RecordDict:
    return RecordDict({"arrays": ArrayRecord([np.zeros(250, np.float32)])})  # 1000 bytes


@pytest.mark.parametrize(
    ("in_flight", "useful", "most"),
    [(1, math.inf, 1), (1000, math.inf, 1), (1001, math.inf, 2), (math.inf, 2, 2), (math.inf, math.inf, 3)],
)
def test_unanswered_messages_are_limited_by_their_bytes_and_by_their_use(
    in_flight: float, useful: float, most: int
) -> None:
    e = connected(three())
    e.in_flight, e.useful_messages = in_flight, useful
    unanswered, highest = 0, 0

    def requests() -> Iterator[Message]:
        nonlocal unanswered, highest
        for i in e.registry.client_ids:
            unanswered += 1
            highest = max(highest, unanswered)
            yield e.message(i, weight(), "train", 1)

    for _ in e.ask("round 1", requests(), 5, 3):
        unanswered -= 1
    assert unanswered == 0 and highest == most


def test_silent_clients_do_not_keep_the_others_from_being_asked() -> None:
    nodes = three()
    e = connected(nodes)
    e.in_flight = 1
    nodes[77] = nodes[50] = SILENT
    replies = ask(e)
    assert [i for i in replies if replies[i].content is None] == [0, 2] and replies[1].content is not None


def test_messages_carry_the_round() -> None:
    message = connected(three()).message(1, RecordDict(), "train", 7)
    assert message.metadata.group_id == "7" and message.metadata.message_type == "train"
    # outlives the round's timeout
    assert message.metadata.ttl > 0.05
