"""The SuperLink's database: its owner's alone whatever the umask, and without a run's uploads after the run's end."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate import sql_linkstate
from flwr.supercore import sql_mixin
from flwr.supercore.constant import TaskType
from flwr.supercore.object_store.sql_object_store import SqlObjectStore

from deploy import detached, superlink
from fl_app.errors import DeploymentError
from tests.conftest import wait_for
from tests.facts import rejected

SECRET = b"a site's upload " * 4096


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the changes of Flower's classes after the test, and empty the log at once."""
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", vars(sql_mixin)["SQLITE_PRAGMAS"])
    for name in ("cleanup_run", "_finish_run_tasks"):
        monkeypatch.setattr(sql_linkstate.SqlLinkState, name, getattr(sql_linkstate.SqlLinkState, name))
    monkeypatch.setattr(superlink, "_PAUSES", (0.0, 0.2))


def files(path: Path) -> list[Path]:
    return [file for file in path.parent.iterdir() if file.name.startswith(path.name)]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def started(path: Path) -> tuple[Any, SqlObjectStore]:
    """Return the state and the objects of a SuperLink with this database, guarded as deploy.superlink does."""
    superlink.make_private(path)
    superlink.forget_deleted(path)
    managers: Any = type("Federations", (), {"report_run_usage": lambda self: None})()
    objects = SqlObjectStore(str(path), verify=False)
    objects.initialize()
    state = sql_linkstate.SqlLinkState(str(path), managers, objects)
    state.initialize()
    return state, objects


def upload(state: Any, objects: SqlObjectStore) -> int:
    """Start a run and store a client's upload, a tree of two objects, in it. Return the run's id."""
    run = state.create_run(None, None, None, {}, "federation", None, None, TaskType.SERVER_APP)
    inner, outer = (hashlib.sha256(text).hexdigest() for text in (b"inner", b"outer"))
    tree = ObjectTree(object_id=outer, children=[ObjectTree(object_id=inner)])
    assert set(objects.preregister(run, tree)) == {inner, outer}
    objects.put(inner, SECRET)
    objects.put(outer, b"outer")
    return int(run)


def holds(path: Path) -> bool:
    return any(SECRET[:512] in file.read_bytes() for file in files(path))


@pytest.mark.usefixtures("umask", "changed")
@pytest.mark.parametrize("there", [False, True])
def test_files_are_the_owners_alone(tmp_path: Path, there: bool) -> None:
    path = tmp_path / "kept" / "flower.db"
    if there:
        # from an earlier version
        path.parent.mkdir(mode=0o777)
        SqlObjectStore(str(path)).initialize()
        assert mode(path) == 0o644
    state, objects = started(path)
    upload(state, objects)
    assert {file.name for file in files(path)} >= {"flower.db", "flower.db-wal", "flower.db-shm"}
    assert {mode(file) for file in files(path)} == {0o600} and mode(path.parent) == 0o700


def test_a_directory_of_the_system_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    assert str(shared) in superlink.make_private(shared / "flower.db")
    monkeypatch.setenv("HOME", str(tmp_path))
    tmp_path.chmod(0o755)
    assert str(tmp_path) in superlink.make_private(tmp_path / "flower.db")
    assert mode(shared) == 0o1777 and mode(tmp_path) == 0o755 and mode(shared / "flower.db") == 0o600
    (tmp_path / "a-directory.db").mkdir()
    with rejected(DeploymentError, "superlink.database", "unable to open", "database file"):
        superlink.make_private(tmp_path / "a-directory.db")


@pytest.mark.usefixtures("changed")
@pytest.mark.parametrize("end", ["stopped", "failed", "expired"])
def test_a_runs_uploads_end_with_it(tmp_path: Path, end: str) -> None:
    path = tmp_path / "kept" / "flower.db"
    state, objects = started(path)
    run = upload(state, objects)
    (found,) = state.get_run_info(run_ids=[run])
    assert holds(path)
    if end == "stopped":
        assert state.stop_run(run)
    elif end == "failed":
        assert state.finish_task(found.primary_task_id, "failed", "")
    else:
        (task,) = state.get_tasks(task_ids=[found.primary_task_id])
        state._on_task_tokens_expired([task])
    wait_for(lambda: not holds(path), 30)
    assert len(objects) == 0


def test_what_an_earlier_version_left_is_overwritten_and_not_copied(tmp_path: Path, changed: None) -> None:
    path = tmp_path / "flower.db"
    with sqlite3.connect(path) as old:
        old.execute("PRAGMA secure_delete = OFF")
        old.execute("CREATE TABLE objects (content)")
        old.execute("INSERT INTO objects VALUES (?)", (SECRET,))
        old.commit()
        old.execute("DELETE FROM objects")
    old.close()
    assert holds(path)
    superlink.copy_database(path, tmp_path / "copy")
    assert not holds(tmp_path / "copy") and mode(tmp_path / "copy") == 0o600
    superlink.forget_deleted(path)
    assert not holds(path)


def test_a_long_log_moves(tmp_path: Path) -> None:
    path = tmp_path / "superlink.log"
    with path.open("ab") as log:
        log.write(b"x" * 100)
        log.flush()
        assert not detached.rotate(path, 100) and detached.rotate(path, 99)
        log.write(b"next\n")
    assert path.read_bytes() == b"next\n" and Path(f"{path}.1").read_bytes() == b"x" * 100
    assert mode(Path(f"{path}.1")) == 0o600


def test_a_process_keeps_its_own_log_small(tmp_path: Path) -> None:
    path = tmp_path / "log"
    code = (
        "import sys, time; from deploy import detached; detached.MOST_BYTES = 50; detached._SECONDS = 0.01\n"
        "detached.rotate.__defaults__ = (50,)\ndetached.keep_small(); sys.stderr.write('x' * 99 + chr(10)); sys.stderr.flush()\n"
        "sys.stdin.read()"
    )
    with path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stderr=log,
            env=os.environ | {detached.LOG_FILE: str(path)},
        )
        try:
            wait_for(lambda: Path(f"{path}.1").exists() and not path.stat().st_size, 30)
        finally:
            process.communicate()
