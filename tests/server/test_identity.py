"""Whose a client id is."""

from __future__ import annotations

import pytest

from fl_app.transport.identity import Holders, Identity
from fl_app.transport.wire import WireError
from tests.facts import mentions

A, B = Identity(b"a"), Identity(b"b")


def refused(holders: Holders, client_id: int, who: Identity, online: bool) -> str:
    with pytest.raises(WireError) as info:
        holders.claim(client_id, who, online)
    return str(info.value)


def test_an_id_is_its_first_holders() -> None:
    holders = Holders()
    holders.claim(1, A, False)
    assert mentions(refused(holders, 1, B, True), "two SuperNodes carry", "partition-id")
    holders.claim(1, A, True)  # itself


def test_a_node_is_one_client_for_the_whole_run() -> None:
    holders = Holders()
    holders.claim(1, A, False)
    assert mentions(refused(holders, 2, A, False), "key is", "client 1")


def test_a_node_that_nobody_registered_comes_back_with_a_new_key_once_it_is_gone() -> None:
    holders = Holders()
    holders.claim(1, A, False)
    holders.claim(1, B, False)
    assert mentions(refused(holders, 2, B, False), "key is", "client 1")
    # a key that is nobody's any more
    holders.claim(2, A, False)


def test_a_registered_key_keeps_its_id_while_its_node_is_away() -> None:
    holders = Holders()
    holders.claim(1, Identity(b"a", "hospital"), False)
    assert mentions(refused(holders, 1, B, False), "partition-id belongs", "key of hospital")
    assert mentions(refused(holders, 1, Identity(b"c", "bank"), False), "partition-id belongs", "key of hospital")
    holders.claim(1, Identity(b"new", "hospital"), False)  # its key was renewed


def test_who_was_registered_for_an_id_has_the_first_right_to_it() -> None:
    holders = Holders()
    holders.claim(1, Identity(b"b", "supernode-2"), False)
    holders.claim(1, Identity(b"a", "supernode-1"), True)
    assert mentions(refused(holders, 1, Identity(b"b", "supernode-2"), True), "two SuperNodes carry", "partition-id")
