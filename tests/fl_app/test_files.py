"""Writing, locking and building once; and that what a run keeps is its owner's alone."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from client_app.client_app import app
from fl_app import files
from fl_app.config import parse
from fl_app.errors import UserError
from fl_app.keys import Scalar
from fl_app.server_app import run
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS
from tests.facts import rejected


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# publish


def test_publish_replaces_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    files.publish_text(path, "one\n")
    files.publish_text(path, "zwölf\n")
    assert path.read_text(encoding="utf-8") == "zwölf\n" and mode(path) == 0o600

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.publish(path, fail)
    assert path.read_text(encoding="utf-8") == "zwölf\n" and os.listdir(tmp_path) == ["a.txt"]


def test_publish_closes_the_file_before_anything_is_in_it(tmp_path: Path) -> None:
    seen = []
    files.publish(tmp_path / "a", lambda temporary: seen.append((mode(temporary), temporary.stat().st_size)), 0o644)
    assert seen == [(0o600, 0)] and mode(tmp_path / "a") == 0o644


def test_publish_into_no_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.publish_text(tmp_path / "none" / "a", "x")


def test_a_link_at_the_temporary_files_place_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    temporary = tmp_path / f".a.{os.getpid()}-{threading.get_ident()}.tmp"
    temporary.symlink_to(victim)
    files.publish_text(tmp_path / "a", "new")
    assert victim.read_text() == "mine" and (tmp_path / "a").read_text() == "new" and not temporary.is_symlink()


def test_directories_are_made_closed_and_left_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    files.make_directory(tmp_path / "open" / "a" / "b")
    assert [mode(tmp_path / "open" / p) for p in (".", "a", "a/b")] == [0o755, 0o700, 0o700]
    files.make_directory(tmp_path / "open")
    assert mode(tmp_path / "open") == 0o755
    with pytest.raises(FileExistsError):
        files.make_directory(tmp_path / "open", exist_ok=False)


# lock


def test_a_lock_is_held_until_closed_or_its_process_ends(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from fl_app import files; files.lock(Path(sys.argv[1]), wait=False)"
    command = [sys.executable, "-c", code, str(tmp_path / ".lock")]
    with files.lock(tmp_path / ".lock", wait=False):
        assert b"BlockingIOError" in subprocess.run(command, capture_output=True).stderr
        with pytest.raises(BlockingIOError):
            files.lock(tmp_path / ".lock", wait=False)
    assert subprocess.run(command).returncode == 0
    files.lock(tmp_path / ".lock", wait=True).close()
    assert mode(tmp_path / ".lock") == 0o600


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        files.lock(tmp_path / ".lock", wait=True)
    (tmp_path / ".one.lock").symlink_to(tmp_path / "elsewhere")
    with rejected(UserError, "data-dir", "cannot write under", "Too many", "symbolic links"):
        files.build_once(tmp_path / "one", lambda directory: None, key="data-dir")
    assert not (tmp_path / "elsewhere").exists()


# build once


def test_build_once(tmp_path: Path) -> None:
    built = []

    def build(directory: Path) -> None:
        assert mode(directory) == 0o700
        built.append(directory)
        np.save(directory / "x.npy", np.arange(len(built)))

    target = tmp_path / "root" / "things" / "one"
    for force, size in ((False, 1), (False, 1), (True, 2)):
        files.build_once(target, build, key="data-dir", force=force)
        assert np.load(target / "x.npy").size == size
    assert [mode(p) for p in (target.parent.parent, target.parent, target, target / "x.npy")] == [0o700] * 3 + [0o600]
    assert sorted(os.listdir(target.parent)) == [".one.lock", "one"]


def test_build_once_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with rejected(UserError, "data-dir", "cannot write under", "file/things (Not a directory)"):
        files.build_once(tmp_path / "file" / "things" / "one", lambda directory: None, key="data-dir")


# what a run keeps


def test_data_state_and_run_folders_are_closed_to_others(tmp_path: Path) -> None:
    """A site's file of mode 600 must not become readable by way of its converted copy, or of what was trained on it."""
    rng = np.random.default_rng(0)
    npz = tmp_path / "site.npz"
    x, y = rng.integers(0, 256, (12, 8, 8), np.uint8), np.arange(12) % 2
    np.savez(npz, x_train=x, y_train=y, x_test=x, y_test=y)
    npz.chmod(0o600)
    raw: dict[str, Scalar] = {
        "dataset": f"npz:{npz}",
        "partition": "iid",
        "train-samples": 4,
        "test-samples": 2,
        "num-clients": 2,
        "method": "ditto",
        "num-server-rounds": 1,
        "local-epochs": 1,
        "device": "cpu",
        "collect-personal-models": True,
        "track": "tensorboard" if find_spec("tensorboard") else "",
        "data-dir": str(tmp_path / "data"),
        "output-dir": str(tmp_path / "runs"),
        "state-dir": str(tmp_path / "state"),
        "keep-state": True,
    }
    folder = run(InProcessGrid(app, raw, 2), parse(raw, METHOD_PARAMS), lambda *_: None)
    made = [p for root in ("data", "runs", "state") for p in [tmp_path / root, *(tmp_path / root).rglob("*")]]
    names = {p.name for p in made}
    assert {"x_train.npy", "flat.npy", "info.json", "metrics.jsonl", "global.safetensors", "round-000001.json"} <= names
    assert any(name.endswith(".state") for name in names) and folder.path in made
    wrong = {str(p): oct(mode(p)) for p in made if mode(p) != (0o700 if p.is_dir() else 0o600)}
    assert not wrong


def test_files_of_rounds_are_told_from_others(tmp_path: Path) -> None:
    for name in (
        "round-000012.json",
        "round-3.json",
        "round-3-copy.json",
        "round-.json",
        "round-\u0664.json",
        "round-4.npz",
        "x.json",
    ):
        (tmp_path / name).touch()
    assert files.numbered(tmp_path, ".json") == [3, 12] and files.numbered(tmp_path, ".npz") == [4]
    assert files.numbered(tmp_path / "none", ".json") == []


def test_a_file_larger_than_the_process_may_write_is_explained_as_a_full_disk(tmp_path: Path) -> None:
    with rejected(UserError, "output-dir", f"cannot write under {tmp_path}", "File too large"):
        with files.explain_full_disk("output-dir", tmp_path):
            raise OSError(errno.EFBIG, "File too large")
