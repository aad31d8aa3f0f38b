"""Free space against the bytes that a round needs, and a disk that is full: one line; with room again the run goes on."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fl_app import server_app
from fl_app.errors import UserError
from fl_app.layout import Model
from fl_app.server import checkpoint, disk
from fl_app.server.disk import DiskEstimate, Disks
from fl_app.server.run_folder import RunFolder, read_summary
from fl_app.transport import wire
from strategies import METHODS
from strategies.engine.estimates import disk_estimate
from tests.conftest import Run, config, f32, flat_layout
from tests.disks import full_disk
from tests.facts import mentions, rejected
from tests.methods.federation import Federation


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A SuperLink's database, as its ServerApps know it."""
    path = tmp_path / "superlink.db"
    path.touch()
    monkeypatch.setenv(disk.DATABASE, str(path))
    return path


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(disk, "free", lambda path: count)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # d = 10, b = 2: 48 bytes a model; three clients; the server keeps no client's model
        ({"method": "fedavg"}, DiskEstimate(3 * 96, 3 * 48, 48, 48)),
        ({"method": "fedavg", "fraction-train": 0.5}, DiskEstimate(2 * 96, 2 * 48, 48, 48)),
        ({"method": "fedavg", "keep-uploads": "every 1"}, DiskEstimate(3 * 96, 3 * 48, 48 + 3 * 96, 48)),
        # a mask of 10 bits has 2 bytes; the server keeps a model per client
        ({"method": "fedcac"}, DiskEstimate(3 * 98, 3 * 50, 48 + 3 * 48, 48)),
    ],
)
def test_the_bytes_of_a_round(settings: dict[str, object], expected: DiskEstimate) -> None:
    parsed = config(**settings)
    layout = flat_layout([6, 4], [2])
    method = METHODS[parsed.method]
    initial = Model(f32(*range(10)), f32(0, 0))
    server = method.server(parsed, layout, initial, method.travelling(parsed, layout), RunFolder(Path(), ""))
    assert disk_estimate(server, server.protocol.expected()) == expected


@pytest.mark.parametrize(
    ("method", "keys"),
    [("heterofl", {"rates": "1, 0.4"}), ("perfedmask", {"capacity": 0.5}), ("pfedhn", {}), ("fedproto", {})],
)
def test_the_bytes_of_clients_that_hold_parts(tmp_path: Path, method: str, keys: dict[str, object]) -> None:
    fed = Federation(tmp_path, method, **{method: keys})
    server = fed.server
    sent = sum(server.download_for(i, server.attempt, "train").model.nbytes for i in range(3))
    uploads = sum(wire.payload_bytes(wire.encode_upload(server.protocol.expected_from(i).blank())) for i in range(3))
    whole = server.global_model.nbytes
    # these four keep no client's model on the server; pFedHN has a layer of 100 d weights, and its momentum
    checkpoint = whole + (2 * 4 * 100 * server.layout.d if method == "pfedhn" else 0)
    assert disk_estimate(server, server.protocol.expected()) == DiskEstimate(sent + uploads, uploads, checkpoint, whole)


def test_pages_that_a_database_reuses_are_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "superlink.db"
    free(monkeypatch, 1000)
    assert disk.room_in(path) == 1000
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE objects (content BLOB)")
        connection.execute("INSERT INTO objects VALUES (?)", (bytes(409_600),))
        connection.commit()
        assert disk.room_in(path) == 1000
        connection.execute("DELETE FROM objects")
        connection.commit()
    assert 1000 + 409_600 <= disk.room_in(path) <= 1000 + path.stat().st_size
    path.with_name("superlink.db-wal").write_bytes(bytes(500))
    assert disk.room_in(path) >= 1500
    path.write_bytes(b"no database")
    assert disk.room_in(path) == 1500


def test_a_run_that_cannot_fit_is_refused(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disks = Disks(tmp_path / "runs" / "a", DiskEstimate(20e6, 10e6, 5e6, 4e6))
    free(monkeypatch, 10_000_000)
    disks.refuse()
    free(monkeypatch, 9_900_000)
    with pytest.raises(UserError) as error:
        disks.refuse()
    assert mentions(
        str(error.value),
        "superlink.database",
        f"{database} has room for 9.9",
        "round needs about 20",
        "10 MB",
        "uploads alone",
        "free space there",
    )
    free(monkeypatch, 3_000_000)
    with rejected(UserError, "output-dir", "/runs/a", "3 MB are free", "checkpoint takes about 4"):
        disks.refuse()
    monkeypatch.delenv(disk.DATABASE)
    free(monkeypatch, 4_000_000)
    Disks(tmp_path, DiskEstimate(20e6, 10e6, 5e6, 4e6)).refuse()


def test_a_disk_that_gets_short_is_named_once(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disks = Disks(tmp_path, DiskEstimate(20e6, 10e6, 5e6, 4e6))
    line = f"superlink.database: {database} has room for 39 MB, a round needs about 20 MB"
    for count in (40_000_000, 39_000_000, 38_000_000, 40_000_000, 39_000_000):
        free(monkeypatch, count)
        disks.check()
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [line, line]
    monkeypatch.delenv(disk.DATABASE)
    free(monkeypatch, 9_000_000)
    Disks(tmp_path, DiskEstimate(20e6, 10e6, 5e6, 4e6)).check()
    assert mentions(caplog.messages[-1], "output-dir", tmp_path, "9 MB are free", "round's checkpoint", "5 MB")


def test_flowers_errors_on_a_full_disk_become_one_line(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("Failed to push object")
    free(monkeypatch, 2 << 20)
    assert server_app._named(error) is error
    free(monkeypatch, 0)
    assert mentions(str(server_app._named(error)), "superlink.database", f"disk of {database}", "full")
    monkeypatch.delenv(disk.DATABASE)
    assert server_app._named(error) is error


def test_a_run_on_a_disk_without_room_for_its_checkpoint_starts_nothing(run: Run, tmp_path: Path) -> None:
    with full_disk(tmp_path, free=40 * 1024) as there:
        with rejected(UserError, "output-dir", "/run", "kB are free", "checkpoint takes about"):
            run(output_dir=str(there))
        assert list(there.iterdir()) == []


def test_a_file_system_without_a_size_counts_as_empty() -> None:
    assert disk.free(Path("/proc/none/run")) > 1e15


# A full disk under the run folder is one line; with room again the run goes on and ends with the same digest ----------

SETTINGS = {"num_server_rounds": 3, "checkpoint_every": 1, "collect_personal_models": True}


# nothing, the config, no checkpoint, one, the last models
@pytest.mark.parametrize("kib", [4, 16, 60, 200, 400])
def test_a_run_on_a_full_disk_ends_in_one_line_and_goes_on(run: Run, tmp_path: Path, kib: int) -> None:
    with full_disk(tmp_path, free=kib * 1024) as there:
        full = f"cannot (write under|create) {there}/run: No space left on device"
        words = f"^output-dir: ({full}|{there}/run: .* are free, and a checkpoint takes about)"
        with pytest.raises(UserError, match=words) as error:
            run(output_dir=str(there), **SETTINGS)
        assert "\n" not in str(error.value)
        if not checkpoint.rounds(there / "run"):
            return
        subprocess.run(["mount", "-o", "remount,size=8m", str(there)], check=True)
        resumed = run(resume=str(there / "run"), **SETTINGS)
        assert read_summary(resumed.path)["digest"] == read_summary(run(**SETTINGS).path)["digest"]


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(tmp_path: Path) -> None:
    with full_disk(tmp_path, free=300_000) as there:
        checkpoint.save(there, 1, {"w": np.zeros(30_000, np.float32)}, {"record": {}})
        with rejected(UserError, "output-dir", "No space left"):
            checkpoint.save(there, 2, {"w": np.zeros(60_000, np.float32)}, {"record": {}})
        assert checkpoint.load_latest(there).meta["round"] == 1
        assert [path.name for path in (there / "checkpoints").glob(".*")] == []
