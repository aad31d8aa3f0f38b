from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_app.client import CorollaClient
from client_app.session import Session
from client_app.stored_state import StateStore, StoredState, missing_clients, remove, state_root, stored
from fl_app.errors import DeploymentError, UserError
from fl_app.layout import NOTHING
from fl_app.run_secret import experiment_of
from fl_app.site_directory import site_directory
from fl_app.transport.wire import Download
from strategies import METHODS
from tests.conftest import config, f32
from tests.facts import rejected

STATE = StoredState({"local.params": f32(1, 2, 3), "mask": np.array([9, 2], np.uint8), "count": np.array(5)})


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    return StateStore(tmp_path, "abc", 7)


def file_of(store: StateStore, version: str) -> Path:
    return store.directory / f"{version}.state"


def names(store: StateStore) -> list[str]:
    return sorted(p.name for p in store.directory.iterdir()) if store.directory.exists() else []


def numbered(value: float) -> StoredState:
    return StoredState({"w": f32(value)})


def test_round_trip(store: StateStore) -> None:
    version = store.save(STATE, 3, 1)
    assert names(store) == [f"{version}.state"]  # no temporary file is left
    got = store.load(version).arrays
    assert set(got) == set(STATE.arrays)
    for name, array in STATE.arrays.items():
        assert got[name].dtype == array.dtype and got[name].tolist() == array.tolist()


def test_a_loaded_state_can_be_changed_and_saved_again(store: StateStore) -> None:
    state = store.load(store.save(numbered(1), 1, 0))
    state.arrays["w"] = state.arrays["w"] + 1
    state.arrays["strided"] = np.arange(6, dtype=np.float32).reshape(2, 3).T
    again = store.load(store.save(state, 2, 0)).arrays
    assert again["w"].tolist() == [2] and again["strided"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_versions_sort_as_rounds_and_attempts(store: StateStore) -> None:
    pairs = [(9, 0), (10, 0), (10, 1), (10, 11), (10, 99), (99, 9), (100, 0), (123456, 12)]
    versions = [store.save(numbered(0), r, a) for r, a in pairs]
    assert versions == sorted(set(versions))


def test_exactly_the_named_generation_is_loaded(store: StateStore) -> None:
    versions = [store.save(numbered(r), r, 0) for r in (1, 2, 3)]
    assert store.load(versions[1]).arrays["w"].tolist() == [2]  # not the latest
    assert store.load(versions[0]).arrays["w"].tolist() == [1]
    repeated = store.save(numbered(9), 2, 1)
    assert store.load(versions[1]).arrays["w"].tolist() == [2]
    assert store.load(repeated).arrays["w"].tolist() == [9]


def test_no_version_is_the_empty_state(store: StateStore) -> None:
    store.save(numbered(1), 1, 0)
    assert store.load("").arrays == {}


def test_an_empty_state_writes_nothing(store: StateStore, tmp_path: Path) -> None:
    assert store.save(StoredState(), 1, 0) == ""
    assert list(tmp_path.iterdir()) == []


def test_clients_and_experiments_are_apart(tmp_path: Path) -> None:
    stores = [StateStore(tmp_path, e, c) for e in ("a", "b") for c in (0, 1)]
    versions = [store.save(numbered(k), 1, 0) for k, store in enumerate(stores)]
    loaded = [store.load(version).arrays["w"].tolist() for store, version in zip(stores, versions, strict=True)]
    assert loaded == [[0], [1], [2], [3]]


def test_missing(store: StateStore) -> None:
    store.save(numbered(1), 1, 0)
    with rejected(UserError, "client 7", "state of 000002-00", "missing", "000002-00.state"):
        store.load("000002-00")


@pytest.mark.parametrize("keep", [0, 1, 31, 32, 40, -1])
def test_truncated(store: StateStore, keep: int) -> None:
    version = store.save(STATE, 1, 0)
    path = file_of(store, version)
    path.write_bytes(path.read_bytes()[:keep])
    with rejected(UserError, "", "client 7", f"state of {version}", "damaged (checksum)", "state"):
        store.load(version)


@pytest.mark.parametrize("position", [0, 31, 32, 45, -1])
def test_bit_flipped(store: StateStore, position: int) -> None:
    version = store.save(STATE, 1, 0)
    path = file_of(store, version)
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)
    with rejected(UserError, "", "client 7", f"state of {version}", "damaged"):
        store.load(version)


def test_the_generation_before_a_damaged_one_is_used(store: StateStore) -> None:
    versions = [store.save(numbered(r), r, a) for r, a in ((1, 0), (2, 0), (2, 1), (3, 0), (4, 0))]
    for version in versions[2:4]:
        file_of(store, version).write_bytes(b"")
    state = store.load(versions[3])
    assert state.version == versions[1] and state.arrays["w"].tolist() == [2]
    assert store.load(versions[4]).version == versions[4]
    for version in versions[:2]:
        file_of(store, version).write_bytes(b"")
    with rejected(UserError, "", f"state of {versions[3]}", "damaged"):  # not the one after it
        store.load(versions[3])


def test_delete_before(store: StateStore) -> None:
    versions = [store.save(numbered(r), r, a) for r, a in ((1, 0), (2, 0), (2, 1), (3, 0))]
    store.delete_before("")
    assert len(names(store)) == 4
    store.delete_before(versions[2])
    assert names(store) == [f"{v}.state" for v in versions[2:]]
    assert store.load(versions[2]).arrays["w"].tolist() == [2]
    # by a killed process; a later one may still be written
    left = store.directory / ".000002-000000.state.99-1.tmp"
    coming = store.directory / ".000003-000000.state.99-1.tmp"
    left.touch()
    coming.touch()
    store.delete_before(versions[3])
    assert names(store) == [coming.name, f"{versions[3]}.state"]
    store.delete_before("000009-00")
    store.delete_before("000009-00")
    assert names(store) == []


def test_generations_a_checkpoint_names_stay(store: StateStore) -> None:
    versions = [store.save(numbered(r), r, 0) for r in range(1, 6)]
    store.delete_before(versions[3], keep={versions[0], versions[2]})
    assert names(store) == [f"{versions[k]}.state" for k in (0, 2, 3, 4)]


def test_forgotten_state_leaves_the_other_clients(tmp_path: Path) -> None:
    stores = [StateStore(tmp_path, "abc", k) for k in (0, 1)]
    for store in stores:
        store.save(STATE, 1, 0)
    stores[0].forget()
    assert [p.name for p in (tmp_path / "abc").iterdir()] == ["client-0001"]
    stores[1].forget()
    stores[1].forget()
    assert list(tmp_path.iterdir()) == []


def test_state_does_not_lie_in_the_sites_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run names where state lies, and what is noted for good must not be where it can be deleted."""
    site = tmp_path / "site" / experiment_of("abc")
    monkeypatch.setenv("COROLLA_SITE_DIR", str(site))
    (tmp_path / "link").symlink_to(site)

    def opened(experiment: str = "abc", **changes: Any) -> None:
        client = CorollaClient(Session(config(num_clients=8, **changes), METHODS["fedavg"]), 7, "", "", 1)
        client._download = Download("train", 1, 0, experiment, NOTHING)
        assert client.data and client._store

    for root in (site, site / "runs", tmp_path / "site", tmp_path / "link", tmp_path / "site" / "x" / ".."):
        with rejected(DeploymentError, "state-dir", "lies", "site's own directory", "no run may", "name"):
            opened(state_dir=str(root))
    with rejected(DeploymentError, "data-dir", "lies", "site's own directory", "no run may", "name"):
        opened(data_dir=str(site / "x"))
    opened("other", state_dir=str(tmp_path / "site"))
    # what the machine says itself is no run's doing
    monkeypatch.setenv("COROLLA_STATE_DIR", str(site / "state"))
    monkeypatch.setenv("COROLLA_DATA_DIR", str(site / "data"))
    opened(state_dir="", data_dir="")
    monkeypatch.delenv("COROLLA_STATE_DIR")
    monkeypatch.setenv("COROLLA_SITE_DIR", "relative")
    with rejected(DeploymentError, "COROLLA_SITE_DIR", "absolute path", "got relative"):
        opened(state_dir=str(tmp_path))
    monkeypatch.delenv("COROLLA_SITE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "user"))
    assert site_directory() == tmp_path / "user" / "corolla" / ".site"
    # beside the experiments, none of which has such a name
    StateStore(state_root(""), "site", 7)


def test_only_the_server_with_a_runs_secret_reaches_its_state(tmp_path: Path) -> None:
    """Everybody may know the experiment's id: it is in run.json, in messages of the client, and a directory's name."""

    def asked(task: str, secret: str) -> CorollaClient:
        client = CorollaClient(Session(config(num_clients=8, state_dir=str(tmp_path)), METHODS["fedavg"]), 7, "", "", 1)
        client._download = Download(task, 1, 0, secret, NOTHING, state_version="000001-000000")
        if task == "forget":
            client._forget(client._download)
        return client

    asked("train", "of A")._store.save(STATE, 1, 0)
    for guess in (experiment_of("of A"), "of B", "", "../of A"):
        with rejected(UserError, "client 7", "state of 000001-000000", "missing"):
            asked("collect", guess)._store.load("000001-000000")
        asked("forget", guess)
    assert asked("collect", "of A")._store.load("000001-000000").arrays["count"] == STATE.arrays["count"]
    asked("forget", "of A")
    assert list(tmp_path.iterdir()) == []


def test_delete_before_without_any_state(store: StateStore) -> None:
    store.delete_before("000001-00")
    assert names(store) == []


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    # a file in its place: works for root too, whom permissions do not stop
    (tmp_path / "state").write_text("a file")
    store = StateStore(tmp_path / "state", "abc", 7)
    with rejected(UserError, "client 7", "cannot write", "state to", "/client-0007/", "state", "Not a directory"):
        store.save(numbered(1), 1, 0)


def test_a_full_disk_leaves_the_old_generation_and_no_part_of_the_new(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = store.save(numbered(1), 1, 0)

    def full(descriptor: int) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with rejected(UserError, "client 7", "cannot write", "state to", "No space left", "device"):
        store.save(numbered(2), 2, 0)
    assert names(store) == [f"{version}.state"]
    assert store.load(version).arrays["w"].tolist() == [1]


def test_stored_and_remove(tmp_path: Path) -> None:
    assert stored(tmp_path / "nowhere") == [] and stored(tmp_path) == []
    for experiment, clients in (("old", 2), ("new", 1)):
        for client in range(clients):
            StateStore(tmp_path, experiment, client).save(STATE, 1, 0)
    for path in (tmp_path / "old").rglob("*.state"):
        os.utime(path, (1000, 1000))
    (tmp_path / "empty").mkdir()
    (tmp_path / "a file").write_text("not ours")

    found = stored(tmp_path)
    assert [(e.experiment, e.clients) for e in found] == [("old", 2), ("new", 1)]
    assert found[0].modified == 1000
    assert found[0].nbytes == sum(p.stat().st_size for p in (tmp_path / "old").rglob("*.state"))

    remove(tmp_path, "old")
    assert [e.experiment for e in stored(tmp_path)] == ["new"] and not (tmp_path / "old").exists()
    for unknown in ("old", "", "..", "empty"):
        with rejected(UserError, "", "no client state", f"of experiment '{unknown}' under"):
            remove(tmp_path, unknown)


def test_state_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_STATE_DIR", "/from/environment")
    assert state_root("/configured") == Path("/configured")
    assert state_root("") == Path("/from/environment")
    monkeypatch.delenv("COROLLA_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg")
    assert state_root("") == Path("/xdg/corolla")
    assert state_root("~/here") == Path.home() / "here"


# Many clients ---------------------------------------------------------------------------------------------------------


def test_no_directory_has_more_than_a_thousand_entries(tmp_path: Path) -> None:
    several = [StateStore(tmp_path, "abc", i) for i in range(3200)]
    for store in several:
        store.directory.mkdir(parents=True)
    assert len({store.directory for store in several}) == 3200
    for directory in (tmp_path / "abc", *(tmp_path / "abc").glob("clients-*")):
        assert 0 < len(list(directory.iterdir())) <= 1000
    assert several[7].directory == tmp_path / "abc" / "client-0007"
    assert several[2719].directory == tmp_path / "abc" / "clients-002000" / "client-2719"


@pytest.mark.parametrize("client_id", [499, 500, 1000, 1234567])
def test_state_in_a_group_is_found_listed_and_removed(tmp_path: Path, client_id: int) -> None:
    store = StateStore(tmp_path, "abc", client_id)
    version = store.save(STATE, 1, 0)
    assert not missing_clients(tmp_path, "abc", {client_id: version})
    assert missing_clients(tmp_path, "abc", {client_id: "000009-000000"}) == [client_id]
    (found,) = stored(tmp_path)
    assert (found.experiment, found.clients) == ("abc", 1)
    store.forget()
    assert list(tmp_path.iterdir()) == []
    store.save(STATE, 1, 0)
    remove(tmp_path, "abc")
    assert list(tmp_path.iterdir()) == []
