"""The exchange with clients over a grid whose nodes do what each test says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.compat.common import recorddict_compat as compat
from flwr.compat.common.typing import Code, GetPropertiesRes, Status

from fl_app.errors import UserError
from fl_app.keys import Scalar
from fl_app.server import exchange as exchange_module
from fl_app.server.exchange import Exchange, Reply
from fl_app.server.inprocess import InProcessGrid
from tests.conftest import config

SILENT = object()
UNDELIVERED = object()


class FakeGrid(InProcessGrid):
    """nodes: per node id what it answers: properties, an Error, SILENT or UNDELIVERED; a callable is asked each time.

    All answers that are ready come in one pull, in reverse order of sending.
    """

    def __init__(self, nodes: dict[int, Any]) -> None:
        super().__init__(ClientApp(), {}, 0)
        self.nodes = nodes
        self.asked: list[int] = []

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            node = message.metadata.dst_node_id
            self.asked.append(node)
            delivered = self.nodes.get(node, UNDELIVERED) is not UNDELIVERED
            ids += super().push_messages([message]) if delivered else [""]
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for message_id in message_ids:
            message = self._pending.get(message_id)
            answer = self.nodes.get(message.metadata.dst_node_id, SILENT) if message else SILENT
            if callable(answer):
                answer = answer()
            if message is None or answer is SILENT:
                continue
            del self._pending[message_id]
            replies.append(reply_to(message, answer))
        return replies[::-1]


def reply_to(message: Message, answer: Any) -> Message:
    if isinstance(answer, Error):
        reply = Message(answer, reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = 1  # Flower's own error replies come from the SuperLink, not the node
        return reply
    if isinstance(answer, RecordDict):
        return Message(answer, reply_to=message)
    result = GetPropertiesRes(Status(Code.OK, ""), dict(answer))
    return Message(compat.getpropertiesres_to_recorddict(result), reply_to=message)


def properties(client_id: Any, num_clients: Any = 3, **more: Scalar) -> dict[str, Any]:
    data = {"in-channels": 1, "image-size": 8, "num-classes": 10, "train-samples": 5, "test-samples": 2}
    return {"client-id": client_id, "num-clients": num_clients, **data, **more}


def exchange(nodes: dict[int, Any], progress: Callable[..., None] = lambda *a: None, **changes: Any) -> Exchange:
    fields = {"num_clients": 3, "available_timeout": 0.05, "round_timeout": 0.05} | changes
    return Exchange(FakeGrid(nodes), config(**fields), progress)


def three() -> dict[int, Any]:
    return {50: properties(2), 77: properties(0), 91: properties(1)}


@pytest.fixture(autouse=True)
def poll_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "POLL_SECONDS", 0.005)


def refused(e: Exchange) -> str:
    with pytest.raises(UserError) as info:
        e.wait_for_clients()
    return str(info.value)


# who is connected


def test_clients_are_known_by_their_ids() -> None:
    e = exchange(three())
    e.wait_for_clients()
    assert e.client_ids == [0, 1, 2] and e.num_clients == 3
    assert [e.message(i, RecordDict(), "train", 1).metadata.dst_node_id for i in e.client_ids] == [77, 91, 50]
    assert e.properties[2]["client-id"] == 2


def test_every_node_is_asked_once() -> None:
    e = exchange(three())
    e.wait_for_clients()
    e.refresh()
    e.refresh()
    assert sorted(e.grid.asked) == [50, 77, 91]  # type: ignore[attr-defined]


def test_the_number_of_clients_comes_from_the_nodes_if_not_configured() -> None:
    e = exchange({1: properties(0, 2), 2: properties(1, 2)}, num_clients=0)
    e.wait_for_clients()
    assert e.num_clients == 2 and e.minimum == 2 and e.client_ids == [0, 1]


def test_fewer_clients_than_there_are_may_be_enough() -> None:
    nodes = three()
    del nodes[91]
    e = exchange(nodes, min_available_clients=2)
    e.wait_for_clients()
    assert e.client_ids == [0, 2]


def test_too_few_clients_fail_after_the_timeout() -> None:
    nodes = three()
    del nodes[77]
    text = refused(exchange(nodes))
    assert text.startswith("min-available-clients: 3 clients must be connected, 2 were after 0 s (client ids [1, 2])")


def test_clients_may_come_later() -> None:
    nodes, polls = {}, []

    def arrive(what: str, done: int, total: int) -> None:
        polls.append((what, done, total))
        nodes.update(three())

    e = exchange(nodes, arrive, available_timeout=10)
    e.wait_for_clients()
    assert e.client_ids == [0, 1, 2] and polls[0] == ("clients connected", 0, 3)


def test_a_slow_nodes_properties_are_waited_for() -> None:
    answers = iter([SILENT] * 5 + [properties(1)] * 5)
    e = exchange(three() | {91: lambda: next(answers)}, available_timeout=0.02, round_timeout=10)
    e.wait_for_clients()
    assert e.client_ids == [0, 1, 2]


def test_a_query_that_could_not_be_delivered_is_sent_again() -> None:
    nodes = three() | {91: UNDELIVERED}
    e = exchange(nodes, lambda *a: nodes.update({91: properties(1)}), available_timeout=10)
    e.wait_for_clients()
    assert e.client_ids == [0, 1, 2] and e.grid.asked.count(91) == 2  # type: ignore[attr-defined]


# properties that are refused


@pytest.mark.parametrize(("answer", "words"), [
    (properties(1, 4), "client 1: num-partitions must be the run's 3 clients, got 4"),
    (properties(1, "3"), "client 1: num-partitions must be the run's 3 clients, got '3'"),
    (properties(3), "client 3: partition-id must be in [0, 3), got 3"),
    (properties(-1), "client -1: partition-id must be in [0, 3), got -1"),
    (properties("1"), "client 1: partition-id must be in [0, 3), got '1'"),
    ({"num-clients": 3}, "client ?: partition-id must be in [0, 3), got None"),
    (properties(1, error="no such file /site"), "client 1: no such file /site"),
    (Error(0, "ModuleNotFoundError: my_models"), "a node: no properties: ModuleNotFoundError: my_models"),
    (RecordDict(), "a node: malformed properties"),
])  # fmt: skip
def test_refused_properties(answer: Any, words: str) -> None:
    text = refused(exchange(three() | {91: answer}))
    assert text.startswith("clients that cannot take part:\n") and words in text


def test_two_nodes_with_the_same_partition_id() -> None:
    text = refused(exchange(three() | {91: properties(2)}))
    assert text == "clients that cannot take part:\n  client 2: two SuperNodes carry this partition-id"


def test_all_refusals_are_reported_together() -> None:
    text = refused(exchange({1: properties(0, error="a"), 2: properties(1, error="b"), 3: properties(2, error="c")}))
    assert text.splitlines()[1:] == ["  client 0: a", "  client 1: b", "  client 2: c"]


# nodes that come and go


def test_a_node_is_replaced(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module.log, "propagate", True)
    nodes = three()
    e = exchange(nodes)
    e.wait_for_clients()
    del nodes[77]
    nodes[123] = properties(0)
    e.refresh()
    assert e.client_ids == [0, 1, 2]
    assert e.message(0, RecordDict(), "train", 2).metadata.dst_node_id == 123
    nodes[124] = properties(1)  # the old node of client 1 is not yet known to be gone
    e.refresh()
    assert e.message(1, RecordDict(), "train", 2).metadata.dst_node_id == 124
    assert "client 1 is now another SuperNode" in caplog.text
    del nodes[91]
    e.refresh()
    assert e.message(1, RecordDict(), "train", 2).metadata.dst_node_id == 124


def test_a_client_is_gone(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module.log, "propagate", True)
    nodes = three()
    e = exchange(nodes, min_available_clients=2)
    e.wait_for_clients()
    del nodes[50]
    e.refresh()
    assert e.client_ids == [0, 1] and "client 2 is gone" in caplog.text
    del nodes[77]
    with pytest.raises(UserError, match=r"2 clients must be connected, 1 were after .*\(client ids \[1\]\)"):
        e.refresh()


def test_a_refused_latecomer_does_not_stop_the_run(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module.log, "propagate", True)
    nodes = three()
    e = exchange(nodes)
    e.wait_for_clients()
    nodes[99] = properties(2, 7)
    e.refresh()
    assert e.client_ids == [0, 1, 2] and "num-partitions must be the run's 3 clients, got 7" in caplog.text


# asking


def connected(nodes: dict[int, Any], **changes: Any) -> Exchange:
    e = exchange(nodes, **changes)
    e.wait_for_clients()
    return e


def ask(e: Exchange, timeout: float = 0.03) -> dict[int, Reply]:
    requests = (e.message(i, RecordDict(), "train", 1) for i in e.client_ids)
    replies = list(e.ask("round 1", requests, timeout, len(e.client_ids)))
    assert len(replies) == len({r.client_id for r in replies}) == len(e.client_ids)
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


def test_an_undeliverable_message() -> None:
    nodes = three()
    e = connected(nodes)
    nodes[91] = UNDELIVERED
    replies = ask(e)
    assert replies[1] == Reply(1, None, "the message could not be delivered")
    assert replies[0].content is not None and replies[2].content is not None


def test_a_late_reply() -> None:
    nodes = three()
    e = connected(nodes)
    nodes[50] = SILENT
    replies = ask(e, timeout=0.03)
    assert replies[2] == Reply(2, None, "no reply within 0.03 s")
    assert replies[0].content is not None and replies[1].content is not None


def test_an_error_reply_is_mapped_by_the_message_it_answers() -> None:
    nodes = three()
    e = connected(nodes)
    nodes[77] = Error(5, "node unavailable")
    replies = ask(e)
    assert replies[0] == Reply(0, None, "error 5: node unavailable")
    assert replies[1].content is not None and replies[2].content is not None


def weight() -> RecordDict:
    return RecordDict({"arrays": ArrayRecord([np.zeros(250, np.float32)])})  # 1000 bytes and .npy's header


@pytest.mark.parametrize(("in_flight", "most"), [(1, 1), (1100, 1), (1200, 2), (math.inf, 3)])
def test_unanswered_messages_are_limited_by_their_bytes(in_flight: float, most: int) -> None:
    e = connected(three())
    e.in_flight = in_flight
    unanswered, highest = 0, 0

    def requests() -> Iterator[Message]:
        nonlocal unanswered, highest
        for i in e.client_ids:
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
    assert message.metadata.ttl > 0.05  # outlives the round's timeout
