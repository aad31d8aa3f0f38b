from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fl_app.errors import UserError
from fl_app.privacy.keyring import PEERS, open_keyring
from fl_app.wire import SEED_KEYS
from tests.privacy.keys import make


def change(path: Path, client_id: int, word: int, other: int) -> None:
    """Put a word of another client's line in the place of this one's."""
    lines = [line.split() for line in (path.parent / PEERS).read_text().splitlines()]
    lines[client_id][word] = lines[other][word]
    (path.parent / PEERS).write_text("\n".join(map(" ".join, lines)))


def test_both_ends_of_a_pair_have_the_same_key_and_nobody_else(tmp_path: Path) -> None:
    rings = [open_keyring(str(path), 0, i, 3) for i, path in enumerate(make(tmp_path, 3))]
    keys = [ring.masks((j for j in range(3) if j != i), "e", 1, 0) for i, ring in enumerate(rings)]
    assert keys[0][1] == keys[1][0] and keys[0][2] == keys[2][0] and keys[1][2] == keys[2][1]
    assert len({keys[0][1], keys[0][2], keys[1][2]}) == 3
    assert rings[0].masks([1], "e", 1, 1)[1] != keys[0][1] != rings[0].masks([1], "f", 1, 0)[1]
    assert len({ring.fingerprint for ring in rings}) == 1


def test_what_is_sealed_is_opened_by_each_and_by_no_other(tmp_path: Path) -> None:
    rings = [open_keyring(str(path), 0, i, 3) for i, path in enumerate(make(tmp_path, 3))]
    sealed = rings[0].seal()
    for i, ring in enumerate(rings):
        assert ring.open(sealed[i], 0) == rings[0].secret
        with pytest.raises(UserError, match=f"was not sealed by client 0 for client {i}"):
            ring.open(sealed[(i + 1) % 3], 0)
    with pytest.raises(UserError, match="was not sealed by client 1"):
        rings[2].open(sealed[2], 1)
    for broken in ("", "!", sealed[1][:-8], sealed[1][:20]):
        with pytest.raises(UserError, match="was not sealed"):
            rings[1].open(broken, 0)


def test_keys_from_the_seed_are_the_same_everywhere_and_others_for_another_seed() -> None:
    def said(seed: int) -> str:
        ring = open_keyring(SEED_KEYS, seed, 0, 4)
        return hashlib.sha256(ring.secret + b"".join(ring.masks([1, 2, 3], "e", 1, 0).values())).hexdigest()

    assert said(1) == said(1) != said(2)
    assert (
        open_keyring(SEED_KEYS, 1, 0, 4).masks([3], "e", 1, 0)[3]
        == open_keyring(SEED_KEYS, 1, 3, 4).masks([0], "e", 1, 0)[0]
    )


def test_a_list_somebody_has_changed_is_refused(tmp_path: Path) -> None:
    paths = make(tmp_path, 3)
    # a public half that its node key has not signed
    change(paths[0], 2, 4, 1)
    with pytest.raises(UserError, match="client 2's key for private runs is not signed by its node key"):
        open_keyring(str(paths[0]), 0, 0, 3)
    change(paths[1], 2, 2, 1)  # another node key
    with pytest.raises(UserError, match="client 2's key for private runs is not signed"):
        open_keyring(str(paths[1]), 0, 1, 3)
    for word in (2, 4, 5):  # one site twice
        change(paths[2], 0, word, 1)
    with pytest.raises(UserError, match="the same key for two clients"):
        open_keyring(str(paths[2]), 0, 2, 3)


def test_what_is_missing_or_open_is_named(tmp_path: Path) -> None:
    paths = make(tmp_path, 3)
    with pytest.raises(UserError, match="no key for private runs"):
        open_keyring("", 0, 0, 3)
    with pytest.raises(UserError, match=r"must have the clients 0 to 3, it has 3"):
        open_keyring(str(paths[0]), 0, 0, 4)
    with pytest.raises(UserError, match=r"is not the key that .* has for client 1"):
        open_keyring(str(paths[0]), 0, 1, 3)
    paths[0].chmod(0o640)
    with pytest.raises(UserError, match="must be its owner's alone"):
        open_keyring(str(paths[0]), 0, 0, 3)
    paths[1].write_text("nothing")
    with pytest.raises(UserError, match="is no X25519 private key"):
        open_keyring(str(paths[1]), 0, 1, 3)
    (paths[2].parent / PEERS).write_text("0 a b c\n")
    with pytest.raises(UserError, match="must have a line per client"):
        open_keyring(str(paths[2]), 0, 2, 3)
    (paths[2].parent / PEERS).unlink()
    with pytest.raises(UserError, match="cannot be read"):
        open_keyring(str(paths[2]), 0, 2, 3)
