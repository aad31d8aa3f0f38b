"""An aggregation group is split in one way, whatever each member is sent: two thirds of the members sign, each of them once."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_app.privacy import aggregation_groups
from fl_app.privacy.aggregation_groups import GroupSplit, Membership, Parts, parts_of, read, written
from fl_app.transport import wire
from fl_app.transport.outgoing import Mode, Way
from tests.facts import rejected
from tests.privacy.keys import make
from tests.privacy.test_lying_server import Bare, Server, bare, is_noise

__all__ = ["bare"]

N = 7
X, Y = [[0, 1, 2], [3, 4, 5, 6]], [[0, 1, 2, 6], [3, 4, 5]]


@pytest.fixture
def keys(tmp_path: Path) -> list[Path]:
    return make(tmp_path / "keys", N)


def needs_signatures(count: int, got: int) -> Any:
    return rejected(wire.WireError, "", "needs the signatures", f"{count} members", f"got {got}")


@pytest.mark.parametrize("weakened", [True, False])
def test_a_group_cut_in_two_ways_each_before_other_members(
    raw_config: dict[str, Any], keys: list[Path], bare: Bare, monkeypatch: pytest.MonkeyPatch, weakened: bool
) -> None:
    """All seven, then 0 to 2 and 3 to 5: the rest is client 6."""
    if weakened:
        monkeypatch.setattr(aggregation_groups, "threshold", lambda members: 3)
    server = Server(raw_config, keys)
    whole = server.sum(range(N))
    one, other = server.split(X, [0, 1, 2, 6]), server.split(Y, [3, 4, 5])
    if weakened:
        rest = whole - server.sum([0, 1, 2], 1, splits=[one]) - server.sum([3, 4, 5], 1, splits=[other])
        assert (rest == bare[6, 0]).all()
        return
    for i in range(N):
        with rejected(wire.WireError, "", "signed another split"):
            server.sign(i, Y if i in one.signatures else X)
    for i in (0, 1, 2):
        with needs_signatures(5, 4):
            server.ask(i, [0, 1, 2], 1, splits=[one])
    for i in (3, 4, 5):
        with needs_signatures(5, 3):
            server.ask(i, [3, 4, 5], 1, splits=[other])
        # a split that the client has not signed itself
        with rejected(wire.WireError, "", "signed another split"):
            server.ask(i, [3, 4, 5, 6], 1, splits=[one])


def test_who_has_not_signed_goes_on_in_its_part(raw_config: dict[str, Any], keys: list[Path]) -> None:
    server = Server(raw_config, keys)
    one = server.split(X, [0, 1, 2, 3, 4])
    # it was away, and learns of the split now
    words = {i: server.ask(i, X[1], 0, splits=[one]) for i in X[1]}
    assert not is_noise(server.opened(sum(words.values()), X[1]))
    # and then it need not be told again
    assert not is_noise(server.sum(X[1], 1))


def test_a_signature_is_of_one_experiment(raw_config: dict[str, Any], keys: list[Path]) -> None:
    server = Server(raw_config, keys)
    one = server.split(X, range(5))
    later = Server(raw_config, keys)
    with needs_signatures(5, 0):
        later.ask(0, X[0], experiment="other", splits=[one])
    # in a later run of the experiment it holds, and the client has not forgotten what it signed
    with rejected(wire.WireError, "", "signed another split"):
        Server(raw_config, keys).sign(0, Y)
    assert not is_noise(Server(raw_config, keys).sum(X[0], splits=[one]))


def test_a_client_that_starts_again_has_not_forgotten_what_it_signed(
    raw_config: dict[str, Any], keys: list[Path]
) -> None:
    server = Server(raw_config, keys)
    before = server.sign(0, X)
    server.grid._contexts.clear()
    assert server.sign(0, X) == before
    with rejected(wire.WireError, "", "signed another split"):
        server.sign(0, Y)


def test_two_runs_of_an_experiment_at_once_get_one_signature(
    raw_config: dict[str, Any], keys: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ask at the same moment: without a lock of the experiment's notes both would find nothing signed."""
    servers = [Server(raw_config, keys), Server(raw_config, keys)]
    honest, both = Membership.signing, threading.Barrier(2, timeout=3)

    def signing(self: Membership, parts: Parts) -> Membership:
        found = honest(self, parts)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait()
        return found

    monkeypatch.setattr(Membership, "signing", signing)

    def asked(server: Server, parts: list[list[int]]) -> str:
        try:
            return server.sign(0, parts)
        except wire.WireError:
            return ""

    with ThreadPoolExecutor(2) as pool:
        signed = list(pool.map(asked, servers, [X, Y]))
    assert sum(map(bool, signed)) == 1


def test_signatures_count_once_and_for_their_makers(raw_config: dict[str, Any], keys: list[Path]) -> None:
    server = Server(raw_config, keys)
    one = server.split(X, range(4))
    text = one.signatures[0]
    for forged in (
        dict.fromkeys(range(N), text),
        one.signatures | dict.fromkeys(range(7, 20), text),
        one.signatures | {5: ""},
        one.signatures | {5: "A" * 88},
    ):
        valid = sum(forged[i] == one.signatures.get(i) for i in range(N) if i in forged)
        with needs_signatures(5, valid):
            server.ask(0, X[0], splits=[dataclasses.replace(one, signatures=forged)])


def test_a_group_that_was_split_is_neither_split_again_nor_divided(
    raw_config: dict[str, Any], keys: list[Path]
) -> None:
    server = Server(raw_config, keys)
    one = server.split(X, range(5))
    assert not is_noise(server.sum(X[0], splits=[one]))
    for i in X[0]:
        with rejected(wire.WireError, "", "signs splits", "group alone"):
            server.sign(i, Y)
        with rejected(wire.WireError, "", "splits an aggregation", "group"):
            server.ask(i, sorted({i, 3, 4}), 1)
    # who has not heard of it yet does not answer for a part
    with rejected(wire.WireError, "", "splits an aggregation", "group"):
        server.ask(5, X[1], 1)


@pytest.mark.parametrize(
    "parts",
    [
        [range(7)],
        [[0, 1], [2, 3, 4, 5, 6]],
        [[0, 1, 2], [3, 4, 5]],
        [[0, 1, 2], [2, 3, 4, 5, 6]],
        [[0, 1, 2], [3, 4, 5, 6, 7]],
        [[3, 4, 5, 6], [0, 1, 2]],
        [[2, 1, 0], [3, 4, 5, 6]],
        [[0, 1, 2], [3, 4, 5, 6], []],
        [],
    ],
)
def test_what_is_no_partition_is_not_signed_and_splits_nothing(
    raw_config: dict[str, Any], parts: list[list[int]]
) -> None:
    known, anybody = Membership(0, tuple(range(N))), lambda *_: True
    with pytest.raises(ValueError):
        known.signing(tuple(map(tuple, parts)))
    split = GroupSplit(tuple(map(tuple, parts)), dict.fromkeys(range(N), "x"))
    try:
        assert known.after([split], anybody) == known
    except ValueError:
        pass


def test_texts_that_are_no_splits(raw_config: dict[str, Any], keys: list[Path]) -> None:
    server = Server(raw_config, keys)
    for text in ("", "x", "{}", "[1]", "[[1, 2]]", '[[[["a"]], {}]]', "[" * 5000, "null", "[[[], []]]"):
        with pytest.raises(wire.WireError):
            server.question(wire.SPLIT, 0, [], **{wire.SPLITS: text})
    assert not is_noise(server.sum(range(N)))


def test_a_signature_may_leave_a_site(raw_config: dict[str, Any], keys: list[Path]) -> None:
    text = Server(raw_config, keys).sign(0, X)
    assert Way(frozenset({Mode.PRIVATE})).admits("properties", wire.SIGNED, text)


def test_splits_travel_as_they_are() -> None:
    splits = [GroupSplit(parts_of(X), {0: "a", 6: "b"}), GroupSplit(((0, 1, 2), (3, 4, 5)))]
    assert read(written(splits)) == splits and read("[]") == []


# Random servers --------------------------------------------------------------------------------------------------------


class Clients:
    """Clients of one aggregation group, of which some work with the server: they sign all that it likes."""

    def __init__(self, n: int, liars: Sequence[int], random: np.random.Generator) -> None:
        self.n, self.liars, self.random = n, set(liars), random
        self.honest = [i for i in range(n) if i not in self.liars]
        self.known = {i: Membership(i, tuple(range(n))) for i in self.honest}
        self.made: set[tuple[int, Parts]] = set()
        self.sums: list[list[int]] = []

    def has_signed(self, client_id: int, parts: Parts, text: str) -> bool:
        members = [i for own in parts for i in own]
        few = 3 * len(self.liars.intersection(members)) < len(members)
        return (client_id, parts) in self.made or (client_id in self.liars and few)

    def some(self, of: Sequence[int], least: int = 0) -> list[int]:
        count = int(self.random.integers(least, len(of) + 1))
        return sorted(self.random.choice(of, count, replace=False).tolist()) if count else []

    def parts(self) -> Parts:
        """A division of an aggregation group that an honest client believes in, now and then into parts that are too small."""
        own = list(self.known[self.random.choice(self.honest)].members)
        self.random.shuffle(own)
        cuts = sorted({int(self.random.integers(2, max(3, len(own) - 1))) for _ in range(self.random.integers(1, 3))})
        return parts_of(part for part in np.split(np.array(own), cuts) if len(part))

    def act(self, splits: list[GroupSplit]) -> None:
        """Ask for signatures of a split, tell some of splits, and ask for a sum."""
        if self.random.random() < 0.6:
            splits.append(GroupSplit(self.parts(), dict.fromkeys(range(self.n), "x")))
        wanted = splits[int(self.random.integers(len(splits)))].parts if splits else ()
        for i in self.some(self.honest):
            for step in (lambda m: m.after(splits, self.has_signed), lambda m: m.signing(wanted)):
                self._try(i, step)
            if wanted in self.known[i].signed:
                self.made.add((i, wanted))
        for i in self.some(self.honest):
            for split in splits:
                self._try(i, lambda m, split=split: m.after([split], self.has_signed))
        views = [self.known[i].members for i in self.honest]
        members = set(views[int(self.random.integers(len(views)))]) | set(
            self.some(range(self.n)) if self.random.random() < 0.3 else []
        )
        asked = [i for i in self.honest if i in members]
        if asked and all(members.issuperset(self.known[i].members) for i in asked):
            self.sums.append(sorted(members))

    def _try(self, i: int, step: Callable[[Membership], Membership]) -> None:
        try:
            self.known[i] = step(self.known[i])
        except ValueError:
            return

    def told_apart(self) -> list[tuple[int, ...]]:
        """Pairs of honest clients that count each other in their aggregation group, of which some sum has one alone.

        Without liars also everybody in a sum who is not in the same sums as two others.
        """
        found: list[tuple[int, ...]] = []
        of = {i: [i in own for own in self.sums] for i in self.honest}
        for i in self.honest:
            mates = [j for j in self.known[i].members if j in self.known and i in self.known[j].members]
            found += [(i, j) for j in mates if of[i] != of[j]]
            if not self.liars and any(of[i]) and sum(of[j] == of[i] for j in of) < 3:
                found.append((i,))
        return found


def attacked(seed: int) -> Clients:
    random = np.random.default_rng(seed)
    n = int(random.integers(6, 14))
    liars = random.choice(n, int(random.integers(0, -(-n // 3))), replace=False).tolist()
    clients, splits = Clients(n, liars, random), list[GroupSplit]()
    for _ in range(12):
        clients.act(splits)
    return clients


@given(st.integers(0, 2**32))
def test_no_sums_that_honest_clients_answer_tell_fewer_than_a_group(seed: int) -> None:
    """Whatever a server asks and tells each, with fewer than a third of an aggregation group's signatures of its own."""
    clients = attacked(seed)
    assert not clients.told_apart()
    # least squares over all sums: it gives the same share of everybody who is in the same ones
    if clients.sums and not clients.liars:
        A = np.array([[float(i in own) for i in range(clients.n)] for own in clients.sums])
        assert np.diag(np.linalg.pinv(A) @ A).max() < 1 / 3 + 1e-9


def test_with_fewer_signatures_random_servers_tell_clients_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(attacked(seed).told_apart() for seed in range(300))
    monkeypatch.setattr(aggregation_groups, "threshold", lambda members: 2)
    assert any(attacked(seed).told_apart() for seed in range(300))
