"""A server that breaks the protocol, against real clients with keys in files: what it gets is noise, or a refusal.

Where a test is run `weakened`, one mechanism is taken away, and the same attack gives a single client's upload to the last bit.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from client_app import private_round
from client_app.client_app import app as client_app
from client_app.run_keys import SiteKeys
from fl_app import models
from fl_app.config import parse
from fl_app.data import open_client
from fl_app.layout import NOTHING, Layout, Model
from fl_app.privacy import aggregation_groups, masking, pins
from fl_app.privacy.aggregation_groups import GroupSplit
from fl_app.privacy.keyring import PEERS, RunKeys, exchange, halves, open_keyring, text_of
from fl_app.privacy.masking import derived
from fl_app.privacy.transcript import SentHashes, Transcript
from fl_app.transport import wire
from fl_app.transport.inprocess import InProcessGrid
from fl_app.transport.wire import (
    AGREE,
    AGREED,
    BETWEEN,
    COMMITTED,
    OPEN,
    OPENED,
    PRIVATE_KEYS,
    SHARES,
    SIGNED,
    SPLIT,
    SPLITS,
    SUM,
    Download,
    Expected,
)
from strategies import METHOD_PARAMS
from tests.conftest import flat
from tests.facts import mentions, rejected
from tests.privacy.keys import make

N = 6
SETTINGS: dict[str, Any] = {
    "method": "fedavg",
    "private": True,
    "num_clients": N,
    "train_samples": 8,
    "partition": "dirichlet",
    "min_samples": 4,
    "round_retries": 8,
}


class Server:
    """Asks clients for what it likes. bare: by client and attempt, what the client would have sent without masks."""

    def __init__(self, raw: dict[str, Any], keys: Sequence[Path], **changes: Any) -> None:
        self.n = len(keys)
        self.raw = raw | flat({**SETTINGS, "num_clients": self.n, **changes})
        nodes = {i: {PRIVATE_KEYS: str(path)} for i, path in enumerate(keys)}
        self.grid = InProcessGrid(client_app, self.raw, self.n, nodes)
        layout = Layout.of(models.build("mlp", in_channels=1, num_classes=10, image_size=8))
        self.d = layout.d
        self.model = Model(np.full(layout.d, 0.01, np.float32), np.zeros(0, np.float32))
        self.shares: dict[tuple[int, int], dict[int, str]] = {}
        self.committed: dict[tuple[int, int], dict[int, str]] = {}
        self.facts = [self.properties(i) for i in range(self.n)]

    def properties(self, client_id: int) -> dict[str, Any]:
        reply = self.grid._handle(Message(wire.encode_query(), client_id + 1, wire.QUERY))
        return wire.decode_properties(reply.content)

    def hash_of(self, model: Model) -> str:
        return SentHashes(self.raw.get("private-left-out") != "client").of(Download("train", 1, 0, "e", model), {})

    def ask(
        self,
        client_id: int,
        members: Sequence[int],
        attempt: int = 0,
        model: Model | None = None,
        experiment: str = "abc",
        state: str = "",
        splits: Sequence[GroupSplit] = (),
        **said: Any,
    ) -> np.ndarray:
        """Return a client's answer, uint64 [d + 1]. Raises WireError with its refusal."""
        model = model or self.model
        told = {
            "private-members": ",".join(map(str, members)),
            "private-keys": ",".join(str(self.facts[i]["private-keys"]) for i in members),
            "private-sent": ",".join(self.hash_of(model) for _ in members),
            "private-most": 0.0,
            SPLITS: aggregation_groups.written(splits),
        } | said
        sent = Download("train", 1, attempt, experiment, model, state_version=state, method=told)
        content = wire.encode_download(sent)
        reply = self.grid._handle(Message(content, client_id + 1, "train"))
        assert reply.has_content(), reply.error
        upload = wire.decode_upload(reply.content, Expected(0, 0, extras={SUM: ("<u8", (self.d + 1,))}))
        self.shares[client_id, attempt] = dict(zip(members, str(upload.metrics[SHARES]).split(","), strict=True))
        hashes = str(upload.metrics[COMMITTED]).split(",")
        self.committed[client_id, attempt] = dict(zip(members, hashes[:-1], strict=True))
        return np.array(upload.extras[SUM])

    def help_open(
        self, client_id: int, survivors: Sequence[int], attempt: int = 0, agreed: dict[int, str] | None = None
    ) -> tuple[list[bytes], list[bytes]]:
        """Return a client's shares of the survivors' masks, and its keys with the others. Raises WireError with its refusal."""
        held = {SHARES: ",".join(self.shares[j, attempt].get(client_id, "") for j in survivors)}
        held[COMMITTED] = ",".join(self.committed[j, attempt].get(client_id, "") for j in survivors)
        if agreed is not None:
            held[AGREED] = ",".join(agreed.get(i, "") for i in survivors)
        found = self.question(OPEN, client_id, survivors, attempt, **held)
        shares, keys = ([bytes.fromhex(word) for word in str(found[n]).split(",") if word] for n in (OPENED, BETWEEN))
        return shares, keys

    def question(
        self,
        task: str,
        client_id: int,
        survivors: Sequence[int],
        attempt: int = 0,
        experiment: str = "abc",
        **said: str,
    ) -> dict[str, Any]:
        told = {"private-members": ",".join(map(str, survivors)), **said}
        content = wire.encode_download(Download(task, 1, attempt, experiment, NOTHING, method=told))
        reply = self.grid._handle(Message(content, client_id + 1, wire.QUERY))
        return wire.decode_answer(reply.content)

    def sign(
        self, client_id: int, parts: Sequence[Sequence[int]], splits: Sequence[GroupSplit] = (), experiment: str = "abc"
    ) -> str:
        """Return a client's signature of its aggregation group's split. Raises WireError with its refusal."""
        asked = aggregation_groups.written([*splits, GroupSplit(tuple(map(tuple, parts)))])
        return str(self.question(SPLIT, client_id, [], experiment=experiment, **{SPLITS: asked})[SIGNED])

    def split(self, parts: Sequence[Sequence[int]], by: Sequence[int], splits: Sequence[GroupSplit] = ()) -> GroupSplit:
        """Return a split with these clients' signatures."""
        return GroupSplit(tuple(map(tuple, parts)), {i: self.sign(i, parts, splits) for i in by})

    def agreed(self, survivors: Sequence[int], attempt: int = 0) -> dict[int, str]:
        return {i: self.question(AGREE, i, survivors, attempt)[AGREED] for i in survivors}

    def opened(
        self, words: np.ndarray, members: Sequence[int], survivors: Sequence[int] | None = None, attempt: int = 0
    ) -> np.ndarray:
        """Return the sum of survivors' uploads, without masks."""
        survivors = members if survivors is None else survivors
        gone, answers = [i for i in members if i not in survivors], {}
        agreed = self.agreed(survivors, attempt) if gone else None
        for i in survivors:
            answers[i] = self.help_open(i, survivors, attempt, agreed)
        seeds = masking.restore(list(survivors), [[answers[i][0][k] for i in survivors] for k in range(len(survivors))])
        between = {(i, j): key for i in survivors for j, key in zip(gone, answers[i][1], strict=True)}
        words = words.copy()
        masking.remove(words, [masking.own_mask(seed) for seed in seeds], survivors, gone, between)
        return words

    def sum(self, members: Sequence[int], attempt: int = 0, **said: Any) -> np.ndarray:
        return self.opened(total(self.ask(i, members, attempt, **said) for i in members), members, attempt=attempt)

    def forget(self, client_id: int) -> Message:
        content = wire.encode_download(Download("forget", 1, 0, "abc", Model(*[np.zeros(0, np.float32)] * 2)))
        return self.grid._handle(Message(content, client_id + 1, "train"))


def total(parts: Any) -> np.ndarray:
    return np.add.reduce(list(parts), axis=0, dtype=np.uint64)


def is_noise(words: np.ndarray) -> bool:
    """Whether the first three bits of 17,000 words are uniform."""
    high = words >> np.uint64(61)
    shares = np.bincount(high.astype(int), minlength=8) / words.size
    return bool(np.abs(shares - 1 / 8).max() < 0.02)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], np.ndarray]:
    """By client, and by the number of its answer, its upload before masks."""
    seen: dict[tuple[int, int], np.ndarray] = {}
    honest = masking.mask

    def noted(words: np.ndarray, client_id: int, keys: Any) -> None:
        number = sum(i == client_id for i, _ in seen)
        seen[client_id, number] = words.copy()
        honest(words, client_id, keys)

    monkeypatch.setattr(masking, "mask", noted)
    return seen


@pytest.fixture
def keys(tmp_path: Path) -> list[Path]:
    return make(tmp_path / "keys", N)


def without(monkeypatch: pytest.MonkeyPatch, *fields: str) -> None:
    """Leave parts out of the transcript that masks are derived from."""
    whole = Transcript.digest.fget  # type: ignore[attr-defined]
    blank = {"sent": (), "keys": (), "listed": "", "members": (), "config": "", "most": 0.0}
    short = {name: blank[name] for name in fields}
    monkeypatch.setattr(Transcript, "digest", property(lambda self: whole(dataclasses.replace(self, **short))))


Bare = dict[tuple[int, int], np.ndarray]


def test_an_honest_server_has_the_sum(raw_config: dict[str, Any], keys: list[Path], bare: Bare) -> None:
    server = Server(raw_config, keys)
    found = server.sum(range(N))
    assert (found == total(bare[i, 0] for i in range(N))).all()
    # one that is gone after its upload
    answers = [server.ask(i, range(N), 2) for i in range(N)]
    held = {i: server.help_open(i, range(N), 2)[0] for i in (5, 1, 3, 0)}
    seeds = masking.restore([5, 1, 3, 0], [[held[i][k] for i in (5, 1, 3, 0)] for k in range(N)])
    words = total(answers)
    masking.remove(words, [masking.own_mask(seed) for seed in seeds], range(N), [], {})
    assert (words == found).all()
    assert is_noise(server.ask(0, range(N), 1)) and not is_noise(bare[0, 0])


@pytest.mark.parametrize("weakened", [True, False])
def test_another_model_to_the_others(
    raw_config: dict[str, Any], keys: list[Path], bare: Bare, monkeypatch: pytest.MonkeyPatch, weakened: bool
) -> None:
    """The server knows what clients make of a model of its own choice. Here it knows it exactly."""
    if weakened:
        without(monkeypatch, "sent")
    server = Server(raw_config, keys)
    chosen = Model(np.zeros(server.d, np.float32), np.zeros(0, np.float32))
    answers = [server.ask(i, range(N), model=None if i == 0 else chosen) for i in range(N)]
    if not weakened:
        assert is_noise(total(answers) - total(bare[i, 0] for i in range(1, N)))
        with rejected(wire.WireError, "", "sealed no shares", "client 0", "attempt"):
            server.opened(total(answers), range(N))
        return
    found = server.opened(total(answers), range(N)) - total(bare[i, 0] for i in range(1, N))
    assert (found == bare[0, 0]).all()
    # the truth is not answered
    mixed = ",".join(server.hash_of(server.model if i == 0 else chosen) for i in range(N))
    with rejected(wire.WireError, "", "fewer than 3", "client 0 is sent"):
        server.ask(0, range(N), 1, **{"private-sent": mixed})


@pytest.mark.parametrize("weakened", [True, False])
def test_six_and_then_five_of_them(raw_config: dict[str, Any], keys: list[Path], bare: Bare, weakened: bool) -> None:
    server = Server(raw_config, keys, **({"private_left_out": "client"} if weakened else {}))
    whole = server.sum(range(N))
    if weakened:
        assert (whole - server.sum(range(5), 1) == bare[5, 0]).all()
        return
    for i in range(5):
        with rejected(wire.WireError, "", "splits an aggregation", "group"):
            server.ask(i, range(5), 1)
    # in two aggregation groups of three they go on
    splits = [server.split([[0, 1, 2], [3, 4, 5]], [0, 2, 3, 5])]
    assert not is_noise(server.sum(range(3), 2, splits=splits)) and not is_noise(
        server.sum(range(3, 6), 2, splits=splits)
    )


def test_a_sum_of_which_others_were_not_asked_for_the_opening(raw_config: dict[str, Any], keys: list[Path]) -> None:
    """A client answers for its whole aggregation group, whatever it has been asked to open."""
    server = Server(raw_config, keys)
    for i in range(N):
        server.ask(i, range(N))
    with rejected(wire.WireError, "", "splits an aggregation", "group"):
        server.ask(0, range(5), 1)


@pytest.mark.parametrize("weakened", [True, False])
def test_a_known_model_to_half_of_a_group_and_one_more(
    raw_config: dict[str, Any], keys: list[Path], bare: Bare, monkeypatch: pytest.MonkeyPatch, weakened: bool
) -> None:
    """Training fails with the second model, so that the server knows what its clients upload. The members stay the same."""
    if weakened:
        monkeypatch.setattr(SiteKeys, "_require_group", lambda *_: None)
    server = Server(raw_config, keys, report_accuracy=False)
    ruined = Model(np.full(server.d, 1e30, np.float32), np.zeros(0, np.float32))

    def asked(attempt: int, live: Sequence[int]) -> np.ndarray:
        models = {i: server.model if i in live else ruined for i in range(N)}
        sent = ",".join(server.hash_of(models[i]) for i in range(N))
        found = [server.ask(i, range(N), attempt, models[i], **{"private-sent": sent}) for i in range(N)]
        return server.opened(total(found), range(N), attempt=attempt)

    # the smallest that the rule of three members allows, and with it one of the others
    if weakened:
        first = asked(0, [0, 1, 2])
        second = total(
            [
                server.ask(i, range(N), 1, **{"private-sent": ",".join([server.hash_of(server.model)] * 6)})
                for i in range(N)
            ]
        )
        difference = server.opened(second, range(N), attempt=1) - first
        assert (difference == total(bare[i, 1] for i in (3, 4, 5)) - total(bare[i, 0] for i in (3, 4, 5))).all()
        assert all(len(np.unique(bare[i, 0][:-1])) == 1 for i in (3, 4, 5))
        return
    for live in (3, 4):
        sent = ",".join(server.hash_of(server.model if i < live else ruined) for i in range(N))
        for i in range(live):
            with rejected(wire.WireError, "", "splits an aggregation", "group"):
                server.ask(i, range(N), 1, **{"private-sent": sent})


def test_another_state_is_another_hash() -> None:
    """A state that an earlier attempt made may be known to the server. In the earlier run each has a number of its own."""

    def hashed(states: bool, state: str, **origin: object) -> str:
        told = {wire.STATE_OF: json.dumps({"secret": "s", **origin})} if origin else {}
        return SentHashes(states).of(Download("train", 1, 0, "e", NOTHING, state_version=state, method=told), {})

    assert hashed(True, "000001-000000") != hashed(True, "") != hashed(True, "", client=1, version="000002-000000")
    assert hashed(True, "", client=1, version="000002-000000") == hashed(True, "", client=2, version="000002-000000")
    assert hashed(True, "", client=1, version="000002-000000") != hashed(True, "", client=1, version="000003-000000")
    # clients that are away for a round have older ones
    assert hashed(False, "000001-000000") == hashed(False, "") == hashed(False, "", client=1, version="000002-000000")


@pytest.mark.parametrize("weakened", [True, False])
def test_a_member_that_announces_anothers_key(
    raw_config: dict[str, Any],
    keys: list[Path],
    bare: Bare,
    monkeypatch: pytest.MonkeyPatch,
    site_dir: Path,
    weakened: bool,
) -> None:
    """A key with its unused bit set is the same key. What others reveal of the one that "dropped out" is then the other's."""
    if weakened:
        short = lambda keys, public, other, label: derived(exchange(keys.masks, public), "mask", label)  # noqa: E731
        monkeypatch.setattr(private_round, "_mask_key", short)
    server = Server(raw_config, keys, private_left_out="client")
    liar, victim, survivors = 5, 1, [0, 1, 2, 3]
    masks, _, _ = halves(str(server.facts[victim]["private-keys"]))
    _, seals, _ = halves(str(server.facts[liar]["private-keys"]))
    public = masks[:31] + bytes([masks[31] ^ 0x80]) + seals
    ring = open_keyring(str(keys[liar]), 0, liar, N)
    config = json.loads(next(site_dir.glob(f"keys/*-{ring.own[:32]}/private")).read_text())[0][2]
    statement = RunKeys(ring, server.grid._run, config, None, None, b"")._statement(liar, public)
    server.facts[liar]["private-keys"] = text_of(public + ring.signer.sign(statement))
    alone = {i: server.ask(i, range(N)) for i in range(5)}[victim].copy()
    agreed = server.agreed(survivors)
    found = {i: server.help_open(i, survivors, 0, agreed) for i in survivors}
    seeds = masking.restore(survivors, [[found[i][0][survivors.index(victim)] for i in survivors]])
    known = dict(zip([4, 5], found[victim][1], strict=True)) | {i: found[i][1][1] for i in (0, 2, 3)}
    between = {(victim, j): key for j, key in known.items()}
    masking.remove(alone, [masking.own_mask(seed) for seed in seeds], [victim], known, between)
    assert is_noise(alone) is not weakened and (alone == bare[victim, 0]).all() == weakened


def test_false_dropouts(raw_config: dict[str, Any], keys: list[Path], bare: Bare) -> None:
    """The server has all uploads of an attempt, and asks for the keys of clients that it says have dropped out."""
    server = Server(raw_config, keys, private_left_out="client")
    answers = [server.ask(i, range(N)) for i in range(N)]
    assert is_noise(total(answers)) and is_noise(total(answers[1:]))
    with rejected(wire.WireError, "", "sum needs 4", "members", "got 3"):
        server.question(AGREE, 1, [1, 2, 3])
    without_0 = server.opened(total(answers[1:]), range(N), range(1, N))
    assert (without_0 == total(bare[i, 0] for i in range(1, N))).all()
    # the others have answered for this set, and reveal no share of client 0's own mask
    for i in range(1, N):
        with rejected(wire.WireError, "", "another sum", "000001-000000 was opened before"):
            server.help_open(i, range(N))
    # all keys of client 0 with the others are known now: its own mask still hides it
    agreed = server.agreed(range(1, N))
    known = [server.help_open(i, range(1, N), 0, agreed)[1][0] for i in range(1, N)]
    alone = answers[0].copy()
    masking.remove(alone, [], [0], range(1, N), {(0, i): key for i, key in zip(range(1, N), known, strict=True)})
    assert is_noise(alone) and not is_noise(bare[0, 0])


# two clients of six, with views that only four of six have to share
VIEWS = {0: [0, 1, 4, 5], 1: [0, 1, 4, 5], 2: [0, 1, 2, 3], 3: [0, 1, 2, 3], 4: [2, 3, 4, 5], 5: [2, 3, 4, 5]}


@pytest.mark.parametrize("weakened", [True, False])
def test_another_set_of_survivors_for_each(
    raw_config: dict[str, Any], keys: list[Path], bare: Bare, monkeypatch: pytest.MonkeyPatch, weakened: bool
) -> None:
    """Where members need not agree, what each reveals of another set opens the sum of clients 0 and 1 alone."""
    if weakened:
        monkeypatch.setattr(RunKeys, "agrees", lambda *_: True)
    server = Server(raw_config, keys, private_left_out="client")
    answers = [server.ask(i, range(N)) for i in range(N)]
    if not weakened:
        for i, view in VIEWS.items():
            agreed = {i: server.question(AGREE, i, view)[AGREED]}
            with rejected(wire.WireError, "", "4 members", "those", "left"):
                server.help_open(i, view, 0, agreed)
            # nor with another's signature in the place of those that are missing, or of another set
            with rejected(wire.WireError, "", "4 members", "agreed"):
                server.help_open(i, view, 0, dict.fromkeys(view, agreed[i]))
            with rejected(wire.WireError, "", "another sum", "000001-000000 was opened before"):
                server.question(AGREE, i, range(N))
        return
    told = {i: server.help_open(i, view, 0, dict.fromkeys(view, "")) for i, view in VIEWS.items()}
    holders = [0, 1, 2, 3]
    seeds = masking.restore(holders, [[told[i][0][VIEWS[i].index(x)] for i in holders] for x in (0, 1)])
    between = {(x, u): told[x][1][[2, 3].index(u)] for x in (0, 1) for u in (2, 3)}
    between |= {(x, u): told[u][1][[0, 1].index(x)] for x in (0, 1) for u in (4, 5)}
    found = answers[0] + answers[1]
    masking.remove(found, [masking.own_mask(seed) for seed in seeds], [0, 1], [2, 3, 4, 5], between)
    assert (found == bare[0, 0] + bare[1, 0]).all()


def test_notes_of_another_experiment_open_nothing(raw_config: dict[str, Any], keys: list[Path]) -> None:
    """Under another experiment's name a client would know no aggregation groups."""
    server = Server(raw_config, keys)
    server.sum(range(N))
    for i in range(N):
        server.ask(i, range(N), 1)
    for survivors in (range(1, N), range(N)):
        with pytest.raises(wire.WireError, match="serve another experiment"):
            server.question(OPEN, 5, survivors, 1, experiment="other")


def test_of_a_group_the_absent_goes_with_two_others(raw_config: dict[str, Any], keys: list[Path]) -> None:
    server = Server(raw_config, keys)
    server.sum(range(N))
    assert is_noise(total([server.ask(i, range(N), 1) for i in range(N)]))
    for survivors in (range(1, N), range(2, N)):
        with rejected(wire.WireError, "", "splits an aggregation", "group"):
            server.question(AGREE, 5, survivors, 1)


def test_six_attempts_over_five_of_six(raw_config: dict[str, Any], keys: list[Path]) -> None:
    server = Server(raw_config, keys)
    for attempt, left_out in enumerate(range(5), 1):
        members = [i for i in range(N) if i != left_out]
        for i in members[:4]:
            with rejected(wire.WireError, "", "splits an aggregation", "group"):
                server.ask(i, members, attempt)


def test_weights_of_6_and_nearly_0(raw_config: dict[str, Any], keys: list[Path], bare: Bare) -> None:
    server = Server(raw_config, keys)
    # any bound, since the run's key allows none: sums under several bounds show who has how many samples
    for most in (1e-300, 0.5, -1.0, float("nan"), float("inf"), 1.0, 5.0):
        with rejected(wire.WireError, "", "bound on counts", "cannot be"):
            server.ask(0, range(N), **{"private-most": most})
    weights = [6.0, *[1e-300] * 5]
    found = server.opened(total(server.ask(i, range(N), **{"private-weight": weights[i]}) for i in range(N)), range(N))
    assert (found == total(bare[i, 0] for i in range(N))).all()
    # every client's own count
    counts = [int(bare[i, 0][-1]) / 2.0 ** (masking.scale(N, 1.0) - 24) for i in range(N)]
    config = parse({**server.raw, "num-clients": N}, METHOD_PARAMS)
    assert counts == [len(open_client(config, i).y_train) for i in range(N)] and len(set(counts)) > 3


@pytest.mark.parametrize("weakened", [True, False])
def test_another_bound_on_counts_for_each(
    raw_config: dict[str, Any], keys: list[Path], bare: Bare, monkeypatch: pytest.MonkeyPatch, weakened: bool
) -> None:
    """One client counts as it is, the others as one sample each."""
    if weakened:
        without(monkeypatch, "most")
    server = Server(raw_config, keys, max_size_weight=3)
    found = total(server.ask(i, range(N), **{"private-most": 1e6 if i == 0 else 1.0}) for i in range(N))
    if weakened:
        assert (server.opened(found, range(N)) == total(bare[i, 0] for i in range(N))).all()
        return
    with pytest.raises(wire.WireError, match="sealed no shares"):
        server.opened(found, range(N))


def second_cluster(keys: list[Path], directory: Path) -> list[Path]:
    """The same sites, each with the next number, admitted to another cluster."""
    lines = (keys[0].parent / PEERS).read_text().splitlines()
    turned = [f"{(i + 1) % N} {line.partition(' ')[2]}" for i, line in enumerate(lines)]
    paths = []
    for i in range(N):
        (directory / str(i)).mkdir(parents=True)
        paths.append(directory / str(i) / "node.x25519")
        paths[-1].write_bytes(keys[(i - 1) % N].read_bytes())
        paths[-1].chmod(0o600)
        (directory / str(i) / PEERS).write_text("\n".join(sorted(turned)) + "\n")
    return paths


def agree(site: Path, path: Path, client_id: int) -> None:
    pins.accept(site, open_keyring(str(path), 0, client_id, N).own, pins.hash_of(path.parent / PEERS))


def test_the_same_keys_under_another_number(
    raw_config: dict[str, Any], keys: list[Path], bare: Bare, tmp_path: Path, site_dir: Path
) -> None:
    """Two answers of one site under the same masks would be the difference of its two models."""
    first = Server(raw_config, keys)
    one = first.ask(0, range(N))
    again = second_cluster(keys, tmp_path / "again")
    other = Server(raw_config, again)
    assert "has changed" in str(other.facts[1]["error"])
    for i, path in enumerate(again):
        agree(site_dir, path, i)
    other.facts = [other.properties(i) for i in range(N)]
    # site 0 has number 1
    with rejected(wire.WireError, "", "experiment began", "other aggregation groups", "another list", "keys"):
        other.ask(1, range(N))
    assert is_noise(one - other.ask(1, range(N), experiment="other"))
    # in one run it keeps its number
    other.grid._run = first.grid._run
    other.grid._contexts.clear()
    assert mentions(other.properties(1)["error"], "asked this site", "another configuration", "list of keys")


def test_a_list_of_keys_that_the_server_made(
    raw_config: dict[str, Any], keys: list[Path], tmp_path: Path, site_dir: Path
) -> None:
    honest = Server(raw_config, keys)
    honest.ask(0, range(N))
    made = make(tmp_path / "made", N)
    lines = (made[0].parent / PEERS).read_text().splitlines()
    agreed = (keys[0].parent / PEERS).read_text()
    # the site's own line stays, and all else is the server's
    (keys[0].parent / PEERS).write_text("\n".join([agreed.splitlines()[0], *lines[1:]]) + "\n")
    assert mentions(honest.properties(0)["error"], "has changed", "its sha256 is")
    with pytest.raises(wire.WireError, match="peers accept"):
        honest.ask(0, range(N), 1)
    (keys[0].parent / PEERS).write_text(agreed)
    assert not is_noise(honest.sum(range(N), 2))


def test_keys_for_a_run_that_the_server_made(raw_config: dict[str, Any], keys: list[Path], tmp_path: Path) -> None:
    """It puts keys of its own in the place of the others'."""
    server, fake = Server(raw_config, keys), Server(raw_config, make(tmp_path / "made", N))
    mine = [str(server.facts[0]["private-keys"]), *(str(fake.facts[i]["private-keys"]) for i in range(1, N))]
    with rejected(wire.WireError, "", "client 1 has not", "signed the keys"):
        server.ask(0, range(N), **{"private-keys": ",".join(mine)})
    # one that has signed, for each
    twice = ",".join([str(server.facts[0]["private-keys"]), *[str(server.facts[1]["private-keys"])] * 5])
    with rejected(wire.WireError, "", "client 2 has not", "signed the keys"):
        server.ask(0, range(N), **{"private-keys": twice})


def test_other_members_for_each(raw_config: dict[str, Any], keys: list[Path]) -> None:
    """What they share would cancel, whoever else they mask with."""
    server = Server(raw_config, keys, private_left_out="client")
    views = {0: [0, 1, 2], 1: [0, 1, 3], 2: [0, 2, 3], 3: [1, 2, 3]}
    assert is_noise(total([server.ask(i, view) for i, view in views.items()]))
    with rejected(wire.WireError, "", "clients [1, 2] sealed no", "shares for client 0"):
        server.help_open(0, views[0])


def test_an_attempt_twice_and_more_attempts_than_a_round_has(raw_config: dict[str, Any], keys: list[Path]) -> None:
    server = Server(raw_config, keys, round_retries=1)
    server.ask(0, range(N), 0)
    with rejected(wire.WireError, "", "attempt 000001-000000 was answered", "before"):
        server.ask(0, range(N), 0)
    with pytest.raises(wire.WireError, match="serve another experiment"):
        server.ask(0, range(N), 0, experiment="other")
    server.ask(0, range(N), 1)
    with rejected(wire.WireError, "", "answered 2", "round 1", "(round-retries)"):
        server.ask(0, range(N), 2)


def test_another_configuration_in_the_same_run(raw_config: dict[str, Any], keys: list[Path]) -> None:
    server = Server(raw_config, keys)
    server.ask(0, range(N))
    other = Server(raw_config, keys, learning_rate=0.5)
    other.grid._run = server.grid._run
    other.grid._contexts.clear()
    assert "with another configuration" in other.properties(0)["error"]


def test_the_keys_of_a_run_are_the_sites_alone_and_gone_after_it(
    raw_config: dict[str, Any], keys: list[Path], site_dir: Path
) -> None:
    server = Server(raw_config, keys)
    announced = [facts["private-keys"] for facts in server.facts]
    # a second question in the same run
    assert server.properties(0)["private-keys"] == announced[0]
    files = sorted(site_dir.glob("keys/*/private"))
    assert len(files) == N and all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    server.ask(0, range(N))
    for i in range(N):
        server.forget(i)
    assert not list(site_dir.glob("keys/*/private"))
    # no new ones for the same run: they would have no notes on its sums
    assert mentions(server.properties(0)["error"], "site has ended")
    assert Server(raw_config, keys).facts[0]["private-keys"] not in announced
