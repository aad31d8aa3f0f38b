from __future__ import annotations

from pathlib import Path

import pytest

from fl_app.errors import DeploymentError, UserError
from fl_app.privacy.keyring import (
    PEERS,
    RunKeys,
    drawn_run_keys,
    exchange,
    open_keyring,
    raw,
    run_keys_from_seed,
)
from fl_app.transport.wire import SEED_KEYS
from tests.facts import rejected
from tests.privacy.keys import make


def change(path: Path, client_id: int, word: int, other: int) -> None:
    """Put a word of another client's line in the place of this one's."""
    lines = [line.split() for line in (path.parent / PEERS).read_text().splitlines()]
    lines[client_id][word] = lines[other][word]
    (path.parent / PEERS).write_text("\n".join(map(" ".join, lines)))


def run_keys(paths: list[Path], run: int = 1, config: str = "c") -> list[RunKeys]:
    rings = [open_keyring(str(path), 0, i, len(paths)) for i, path in enumerate(paths)]
    return [drawn_run_keys(ring, run, config) for ring in rings]


def test_keys_of_a_run_are_new_and_read_only_by_those_with_the_same_run_list_and_configuration(tmp_path: Path) -> None:
    paths = make(tmp_path / "one", 3)
    a, b, c = run_keys(paths)
    assert a.verified(1, b.announced) == (raw(b.masks), raw(b.seals)) != c.verified(1, b.announced)[::-1]
    assert exchange(a.masks, raw(b.masks)) == exchange(b.masks, raw(a.masks)) != exchange(a.seals, raw(b.seals))
    assert len({raw(keys.masks) for keys in (a, *run_keys(paths))}) == 4
    others = {
        "another run": run_keys(paths, run=2)[1],
        "another configuration": run_keys(paths, config="d")[1],
        "another list": run_keys(make(tmp_path / "two", 3))[1],
        "another client": c,
    }
    for why, keys in others.items():
        with rejected(DeploymentError, "private", "client 1 has not", "signed", "said to use"):
            a.verified(1, keys.announced)
            raise AssertionError(why)
    for broken in ("", "!", b.announced[:-8], a.announced[:20] + b.announced[20:]):
        with pytest.raises(UserError, match="has not signed"):
            a.verified(1, broken)
    assert len({keys.ring.fingerprint for keys in (a, b, c)}) == 1 != a.ring.fingerprint


def test_what_is_sealed_is_opened_by_each_and_by_no_other(tmp_path: Path) -> None:
    several = run_keys(make(tmp_path, 3))
    first, sealed = several[0], several[0].seal({i: keys.announced for i, keys in enumerate(several)})
    for i, keys in enumerate(several):
        assert keys.open(sealed[i], 0, first.announced) == first.secret
        with rejected(UserError, "private", "not sealed", f"client 0 for client {i}"):
            keys.open(sealed[(i + 1) % 3], 0, first.announced)
    with rejected(UserError, "private", "not sealed", "client 1"):
        several[2].open(sealed[2], 1, several[1].announced)
    for broken in ("", "!", sealed[1][:-8], sealed[1][:20]):
        with pytest.raises(UserError, match="was not sealed"):
            several[1].open(broken, 0, first.announced)
    with rejected(DeploymentError, "private", "client 2 has not", "signed"):
        first.seal({2: several[1].announced})


def test_a_thief_of_permanent_keys_opens_nothing_that_was_sealed_in_a_run(tmp_path: Path) -> None:
    paths = make(tmp_path, 3)
    several, stolen = run_keys(paths), run_keys(paths)
    sealed = several[0].seal({1: several[1].announced})[0]
    assert several[1].open(sealed, 0, several[0].announced) == several[0].secret
    with rejected(UserError, "private", "not sealed", "client 0 for client 1"):
        stolen[1].open(sealed, 0, several[0].announced)


def test_names_have_other_tags_in_another_run(tmp_path: Path) -> None:
    a, b, _ = run_keys(make(tmp_path, 3))
    assert a.ring.for_each("names", 1)[1] == b.ring.for_each("names", 1)[0] != a.ring.for_each("names", 2)[1]


def test_keys_from_the_seed_are_the_same_everywhere_and_others_for_another_seed() -> None:
    def said(seed: int, client_id: int = 0) -> RunKeys:
        return run_keys_from_seed(open_keyring(SEED_KEYS, seed, client_id, 4), seed, 1, "c")

    assert said(1).announced == said(1).announced != said(2).announced
    assert said(1).secret == said(1, 3).secret and raw(said(1).masks) != raw(said(1, 3).masks)
    assert said(1).verified(3, said(1, 3).announced)


def test_a_list_somebody_has_changed_is_refused(tmp_path: Path) -> None:
    paths = make(tmp_path, 3)
    # a public half that its node key has not signed
    change(paths[0], 2, 4, 1)
    with rejected(DeploymentError, "private", "client 2's key for", "not signed", "node key"):
        open_keyring(str(paths[0]), 0, 0, 3)
    change(paths[1], 2, 2, 1)  # another node key
    with rejected(DeploymentError, "private", "client 2's key for", "not signed"):
        open_keyring(str(paths[1]), 0, 1, 3)
    for word in (2, 4, 5):  # one site twice
        change(paths[2], 0, word, 1)
    with rejected(DeploymentError, "private", "same key for", "two clients"):
        open_keyring(str(paths[2]), 0, 2, 3)


def test_what_is_missing_or_open_is_named(tmp_path: Path) -> None:
    paths = make(tmp_path, 3)
    with rejected(DeploymentError, "private", "no key for", "private runs"):
        open_keyring("", 0, 0, 3)
    with rejected(DeploymentError, "private", "clients 0 to 3", "it has 3"):
        open_keyring(str(paths[0]), 0, 0, 4)
    with rejected(DeploymentError, "private", "not the key", "has for client 1"):
        open_keyring(str(paths[0]), 0, 1, 3)
    paths[0].chmod(0o640)
    with rejected(DeploymentError, "private", "owner's alone"):
        open_keyring(str(paths[0]), 0, 0, 3)
    paths[1].write_text("nothing")
    with rejected(DeploymentError, "private", "no X25519 private key"):
        open_keyring(str(paths[1]), 0, 1, 3)
    (paths[2].parent / PEERS).write_text("0 a b c\n")
    with rejected(DeploymentError, "private", "line per client"):
        open_keyring(str(paths[2]), 0, 2, 3)
    (paths[2].parent / PEERS).unlink()
    with pytest.raises(UserError, match="cannot be read"):
        open_keyring(str(paths[2]), 0, 2, 3)
