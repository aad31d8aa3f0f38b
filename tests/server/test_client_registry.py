"""Who is connected, over a grid whose nodes do what each test says."""

from __future__ import annotations

import time
from typing import Any

import pytest
from flwr.app import Error, RecordDict

from fl_app.errors import UserError
from fl_app.known_names import CLIENT_NAME
from fl_app.transport import client_registry as registry_module
from fl_app.transport.exchange import Exchange
from fl_app.transport.identity import Holders, Identity
from fl_app.transport.wire import WireError
from tests.facts import mentions, rejected
from tests.server.fake_grid import SILENT, UNDELIVERED, exchange, properties, three


@pytest.fixture(autouse=True)
def poll_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "POLL_SECONDS", 0.005)


def refused(e: Exchange) -> str:
    with pytest.raises(UserError) as info:
        e.registry.wait()
    return str(info.value)


def test_clients_are_known_by_their_ids() -> None:
    e = exchange(three())
    e.registry.wait()
    assert e.registry.client_ids == [0, 1, 2] and e.registry.num_clients == 3
    assert [e.message(i, RecordDict(), "train", 1).metadata.dst_node_id for i in e.registry.client_ids] == [77, 91, 50]
    assert e.registry.properties[2]["client-id"] == 2


def test_too_few_clients_fail_after_the_timeout() -> None:
    nodes = three()
    del nodes[77]
    text = refused(exchange(nodes))
    assert mentions(text, "min-available-clients", "3 clients", "connected", "2 were after 0", "[1, 2]")


def test_clients_may_come_later() -> None:
    nodes, polls = {}, []

    def arrive(what: str, done: int, total: int) -> None:
        polls.append((what, done, total))
        nodes.update(three())

    e = exchange(nodes, arrive, available_timeout=10)
    e.registry.wait()
    assert e.registry.client_ids == [0, 1, 2] and polls[0] == ("clients connected", 0, 3)


def test_a_slow_nodes_properties_are_waited_for() -> None:
    answers = iter([SILENT] * 5 + [properties(1)] * 5)
    e = exchange(three() | {91: lambda: next(answers)}, available_timeout=0.02, round_timeout=10)
    e.registry.wait()
    assert e.registry.client_ids == [0, 1, 2]


def test_a_query_that_could_not_be_delivered_is_sent_again() -> None:
    nodes = three() | {91: UNDELIVERED}
    e = exchange(nodes, lambda *a: nodes.update({91: properties(1)}), available_timeout=10)
    e.registry.wait()
    assert e.registry.client_ids == [0, 1, 2] and e.grid.asked.count(91) == 2  # type: ignore[attr-defined]


# properties that are refused


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (properties(1, 4), "client 1: num-partitions must be the run's 3 clients, got 4"),
        (properties(1, "3"), "client 1: num-partitions must be the run's 3 clients, got '3'"),
        (properties(3), "client 3: partition-id must be in [0, 3), got 3"),
        (properties(-1), "client -1: partition-id must be in [0, 3), got -1"),
        (properties("1"), "client 1: partition-id must be in [0, 3), got '1'"),
        ({"num-clients": 3}, "client ?: partition-id must be in [0, 3), got None"),
        (properties(1, error="no such file /site"), "client 1: no such file /site"),
        (Error(0, "ModuleNotFoundError: my_models"), "a node: no properties: ModuleNotFoundError: my_models"),
        (RecordDict(), "a node: malformed properties"),
    ],
)
def test_refused_properties(answer: Any, words: str) -> None:
    text = refused(exchange(three() | {91: answer}))
    assert text.startswith("clients that cannot take part:\n") and words in text


def test_two_nodes_with_the_same_partition_id() -> None:
    text = refused(exchange(three() | {91: properties(2)}))
    assert text == "clients that cannot take part:\n  client 2: two SuperNodes carry this partition-id"


def test_all_refusals_are_reported_together() -> None:
    text = refused(exchange({1: properties(0, error="a"), 2: properties(1, error="b"), 3: properties(2, error="c")}))
    assert text.splitlines()[1:] == ["  client 0: a", "  client 1: b", "  client 2: c"]


@pytest.mark.parametrize("refusing, waits", [(3, False), (2, True)])
def test_a_run_whose_sites_all_refuse_ends_at_once(monkeypatch: pytest.MonkeyPatch, refusing: int, waits: bool) -> None:
    # nodes of a deployment may come later
    monkeypatch.setattr(registry_module, "has_fixed_nodes", lambda grid: False)
    nodes = {k: properties(k, error="refused//methods") for k in range(refusing)}
    clock = iter(range(10**6))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    text = refused(exchange(nodes, available_timeout=1000.0, round_timeout=1.0))
    assert text.startswith("clients that cannot take part:\n  client 0: refused by its site (methods)")
    assert (next(clock) > 1000) == waits


def test_a_run_without_some_clients_ends_at_once_if_all_others_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "has_fixed_nodes", lambda grid: False)
    clock = iter(range(10**6))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    nodes = {k: properties(k, error="refused//methods", **{CLIENT_NAME: f"plant {k}"}) for k in range(2)}
    text = refused(exchange(nodes, available_timeout=1000.0, round_timeout=1.0, without="2"))
    assert mentions(text, "client 0 (plant 0)", "refused", "site (methods)")
    assert next(clock) < 1000


# nodes that come and go


def test_a_node_is_replaced(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module.log, "propagate", True)
    nodes = three()
    e = exchange(nodes)
    e.registry.wait()
    del nodes[77]
    nodes[123] = properties(0)
    e.registry.refresh()
    assert e.registry.client_ids == [0, 1, 2]
    assert e.message(0, RecordDict(), "train", 2).metadata.dst_node_id == 123
    # the old node of client 1 is not yet known to be gone
    nodes[124] = properties(1)
    e.registry.refresh()
    assert e.message(1, RecordDict(), "train", 2).metadata.dst_node_id == 91
    assert mentions(caplog.text, "client 1 cannot take", "part", "two SuperNodes", "partition-id")
    assert e.registry.left_out == [{"who": "client 1", "cause": "two SuperNodes carry this partition-id"}]
    del nodes[91]
    e.registry.refresh()
    assert e.registry.left_out == []
    assert e.message(1, RecordDict(), "train", 2).metadata.dst_node_id == 124
    assert mentions(caplog.text, "client 1", "another SuperNode")
    assert e.grid.asked.count(124) == 1  # type: ignore[attr-defined]


def test_a_client_is_gone(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module.log, "propagate", True)
    nodes = three()
    nodes[50] |= {CLIENT_NAME: "Bern"}
    e = exchange(nodes, min_available_clients=2)
    e.registry.wait()
    del nodes[50]
    e.registry.refresh()
    assert e.registry.client_ids == [0, 1] and mentions(caplog.text, "client 2 (Bern)", "is gone")
    del nodes[77]
    with rejected(UserError, "min-available-clients", "2 clients", "connected", "1 were after", "(client ids [1])"):
        e.registry.refresh()


def test_a_refused_latecomer_does_not_stop_the_run(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module.log, "propagate", True)
    nodes = three()
    e = exchange(nodes)
    e.registry.wait()
    nodes[99] = properties(2, 7)
    e.registry.refresh()
    assert e.registry.client_ids == [0, 1, 2] and mentions(caplog.text, "num-partitions", "run's 3 clients", "got 7")


# a start among nodes that lie


@pytest.mark.parametrize(
    "answer",
    [
        properties(7),
        properties("0"),
        properties(2**60),
        properties(True),
        properties(1, 2**40),
        properties(1, error="\x1b[2Jno"),
        {},
        Error(0, "crash"),
        RecordDict(),
        SILENT,
        properties(2, **{"in-channels": 3}),
        properties(0, **{"class-counts": "9" * 5000}),
        properties(1, **{"train-samples": 2**62}),
    ],
    ids=[
        "id-beyond",
        "id-in-words",
        "huge-id",
        "truth-value",
        "2^40-clients",
        "refuses",
        "nothing",
        "error",
        "empty",
        "silent",
        "other-shape",
        "long-counts",
        "2^62-samples",
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_who_cannot_take_part_is_left_out_once_there_are_enough(
    answer: Any, first: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module.log, "propagate", True)
    liar = {20: answer} if first else {99: answer}
    e = exchange(three() | liar, num_clients=3, round_timeout=0.5)
    e.registry.wait()
    # who answers with an error is asked again
    for _ in range(2):
        e.registry.refresh()
    assert e.registry.client_ids == [0, 1, 2] and set(e.registry.node_of.values()) == {50, 77, 91}
    assert ("not answered" if answer is SILENT else "cannot take part") in caplog.text
    assert "\x1b" not in caplog.text


def test_a_silent_node_is_named_while_it_waits_to_be_asked_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module.log, "propagate", True)
    e = exchange(
        three() | {99: SILENT}, num_clients=3, round_timeout=0.28, available_timeout=0.3
    )  # asked again at 0.31
    e.registry.wait()
    assert mentions(caplog.text, "not answered within")


def test_how_many_clients_there_are_is_what_most_say() -> None:
    e = exchange({20: properties(0, 1)} | three(), num_clients=0)
    e.registry.wait()
    assert e.registry.num_clients == e.registry.minimum == 3 and e.registry.client_ids == [0, 1, 2]


def test_a_client_may_come_after_others_were_refused() -> None:
    nodes = {20: properties(5), 50: properties(2), 77: properties(0)}
    e = exchange(nodes, lambda *told: nodes.update(three()), available_timeout=10)
    e.registry.wait()
    assert e.registry.client_ids == [0, 1, 2]


def test_a_node_that_comes_back_as_another_client_is_refused() -> None:
    nodes = three()
    e = exchange(nodes, min_available_clients=1)
    e.registry.wait()
    del nodes[50]
    e.registry.refresh()
    nodes[50] = properties(1)
    e.registry.refresh()
    assert e.registry.client_ids == [0, 1] and e.registry.node_of[1] == 91
    # not even when that one is gone
    del nodes[91]
    e.registry.refresh()
    assert e.registry.client_ids == [0]
    nodes[50] = properties(2)
    nodes[91] = properties(1)
    e.registry.refresh()
    assert e.registry.client_ids == [0, 1]  # node 50 is asked once


def test_only_what_was_asked_for_is_kept_of_properties() -> None:
    e = exchange(three() | {91: properties(1, **{"x" * 1000: "y", "class-names": "[]"})})
    e.registry.wait()
    assert set(e.registry.properties[1]) == {*properties(1), "class-names"}


# Whose a client id is -------------------------------------------------------------------------------------------------

A, B = Identity(b"a"), Identity(b"b")


def refused_claim(holders: Holders, client_id: int, who: Identity, online: bool) -> str:
    with pytest.raises(WireError) as info:
        holders.claim(client_id, who, online)
    return str(info.value)


def test_an_id_is_its_first_holders() -> None:
    holders = Holders()
    holders.claim(1, A, False)
    assert mentions(refused_claim(holders, 1, B, True), "two SuperNodes carry", "partition-id")
    holders.claim(1, A, True)  # itself


def test_a_node_is_one_client_for_the_whole_run() -> None:
    holders = Holders()
    holders.claim(1, A, False)
    assert mentions(refused_claim(holders, 2, A, False), "key is", "client 1")


def test_a_node_that_nobody_registered_comes_back_with_a_new_key_once_it_is_gone() -> None:
    holders = Holders()
    holders.claim(1, A, False)
    holders.claim(1, B, False)
    assert mentions(refused_claim(holders, 2, B, False), "key is", "client 1")
    # a key that is nobody's any more
    holders.claim(2, A, False)


def test_a_registered_key_keeps_its_id_while_its_node_is_away() -> None:
    holders = Holders()
    holders.claim(1, Identity(b"a", "hospital"), False)
    assert mentions(refused_claim(holders, 1, B, False), "partition-id belongs", "key of hospital")
    assert mentions(refused_claim(holders, 1, Identity(b"c", "bank"), False), "partition-id belongs", "key of hospital")
    holders.claim(1, Identity(b"new", "hospital"), False)  # its key was renewed


def test_who_was_registered_for_an_id_has_the_first_right_to_it() -> None:
    holders = Holders()
    holders.claim(1, Identity(b"b", "supernode-2"), False)
    holders.claim(1, Identity(b"a", "supernode-1"), True)
    assert mentions(
        refused_claim(holders, 1, Identity(b"b", "supernode-2"), True), "two SuperNodes carry", "partition-id"
    )
