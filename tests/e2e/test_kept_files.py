"""A live cluster's files: its database is closed and keeps no upload, logs stay small, `up` goes on after a dead SuperLink."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import tarfile
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Lab, corolla, settings, summary, wait_for

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def test_the_database_is_closed_and_empty_and_up_starts_a_dead_superlink(lab: Lab) -> None:
    database = lab.directory / "kept" / "flower.db"
    database.parent.mkdir()
    before = os.umask(0o022)
    try:
        lab.write(
            tls=True, superlink={"database": str(database)}, hosts=[{"host": "local", "supernodes": 2, "gpus": []}]
        )
        assert lab.cluster("keys").returncode == 0
        up = lab.cluster("up", "--timeout", "300")
    finally:
        os.umask(before)
    assert up.returncode == 0, up.stdout + up.stderr
    run(lab, "first")
    files = sorted(database.parent.iterdir())
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600] * len(files) and len(files) >= 1
    assert stat.S_IMODE(database.parent.stat().st_mode) == 0o700
    wait_for(lambda: left(database) == [0, 0, 0], 60, every=0.2)

    superlink, node = (lab.process(name)["pid"] for name in ("superlink", "supernode-0"))
    psutil.Process(superlink).kill()
    wait_for(lambda: lab.cluster("status").returncode == 1, 60)
    again = lab.cluster("up", "--timeout", "300")
    assert again.returncode == 0, again.stdout + again.stderr
    assert lab.process("superlink")["pid"] != superlink and lab.process("supernode-0")["pid"] == node
    wait_for(lambda: lab.cluster("status").returncode == 0, 300)
    status = json.loads(lab.cluster("status", "--json").stdout)
    assert len({row["key"] for row in status if row["client"]}) == 2
    run(lab, "second")
    assert 'HTTP/1.1" 200' not in (lab.directory / "state" / "clusters" / "lab" / "superlink.log").read_text(
        errors="replace"
    )
    for name in ("superlink", "supernode-0"):
        log = lab.directory / "state" / "clusters" / "lab" / f"{name}.log"
        with log.open("ab") as file:
            file.write(b"x\n" * (6 << 20))
        wait_for(lambda log=log: log.stat().st_size < 1 << 20, 60, every=0.2)
        assert log.with_name(f"{log.name}.1").stat().st_size > 10 << 20
    # a node's id is in no log
    assert lab.cluster("status").returncode == 0
    archive = lab.directory / "kept.tar"
    (lab.directory / "none").mkdir()
    backed = lab.cluster("backup", str(archive), "--runs", str(lab.directory / "none"))
    assert backed.returncode == 0 and stat.S_IMODE(archive.stat().st_mode) == 0o600, backed.stdout + backed.stderr
    with tarfile.open(archive) as packed:
        packed.extractall(lab.directory / "unpacked", filter="data")
    copies = [path for path in (lab.directory / "unpacked").rglob("*") if is_database(path)]
    assert copies and [left(copy)[:2] for copy in copies] == [[0, 0]] * len(copies)
    assert lab.cluster("down").returncode == 0


def left(database: Path) -> list[int]:
    """Return how many messages and objects a database has, and how long its log is."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as link:
        count = [link.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("objects", "message_res")]
    link.close()
    log = Path(f"{database}-wal")
    return [*count, log.stat().st_size if log.exists() else 0]


def is_database(path: Path) -> bool:
    return path.is_file() and path.read_bytes()[:15] == b"SQLite format 3"


def run(lab: Lab, name: str) -> None:
    config = {"method": "fedcac", "num-server-rounds": 1, "train-samples": 40, "run-name": name}
    config["state-dir"] = str(lab.directory / "client-state")
    words = ("run", "--superlink", "lab", "--clients", "2", "--output-dir", str(lab.directory), *settings(config))
    done = corolla(*words, environment=lab.environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(lab.directory / name)["digest"] is not None
