"""The only way by which processes without walls reach files in a directory that applications may write."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fl_app import foreign_files
from fl_app.foreign_files import FoundFile, Refused

pytestmark = pytest.mark.timeout(60)


def link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "secret")


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.path.relpath(path))


# what an application may put where a file is expected
INSTEAD: dict[str, Callable[[Path], object]] = {
    "a link": link,
    "a pipe": os.mkfifo,
    "a socket": listening,
    "a directory": Path.mkdir,
    "too many bytes": lambda path: path.write_bytes(b"x" * 101),
    "a hole": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40),
    "no mode": lambda path: path.touch(0),
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of applications, beside a file of the account that they cannot read."""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "root").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "root"


@pytest.mark.parametrize("kind", INSTEAD)
def test_only_a_regular_file_of_a_fair_size_is_read(root: Path, kind: str) -> None:
    if kind == "no mode" and not os.geteuid():
        pytest.skip("root reads it")
    INSTEAD[kind](root / "file")
    with pytest.raises(Refused, match=str(root / "file")):
        foreign_files.read(root, "file", 100)
    (root / "sound").write_bytes(b"x" * 100)
    assert foreign_files.read(root, "sound", 100) == b"x" * 100


def test_no_part_of_a_path_may_be_a_link(root: Path) -> None:
    (root / "real").mkdir()
    (root / "real" / "file").write_text("own")
    for name, target in (("inside", "real"), ("outside", "..")):
        (root / name).symlink_to(target)
    assert foreign_files.read_text(root, "real/file") == "own"
    for path in ("inside/file", "outside/secret"):
        with pytest.raises(Refused):
            foreign_files.read(root, path)
        assert foreign_files.entries(root, path.partition("/")[0]) == []
        with pytest.raises(Refused):
            foreign_files.remove(root, path)
        with pytest.raises(Refused):
            foreign_files.write(root, path, b"new")
    assert (root.parent / "secret").read_text() == "secret"


@pytest.mark.parametrize("path", ["../secret", "..", ".", "", "/etc/passwd", "a//b", "a/../../secret", "a\0b"])
def test_no_path_leads_out(root: Path, path: str) -> None:
    for work in (foreign_files.read, foreign_files.remove, lambda *at: foreign_files.write(at[0], at[1], b"")):
        with pytest.raises(Refused):
            work(root, path)


def test_the_root_may_be_reached_through_a_link(root: Path) -> None:
    (root / "file").write_text("own")
    (root.parent / "other").symlink_to(root)
    assert foreign_files.read_text(root.parent / "other", "file") == "own"


def test_a_missing_file_is_none(root: Path) -> None:
    for path in ("file", "a/b"):
        with pytest.raises(FileNotFoundError):
            foreign_files.read(root, path)
    assert foreign_files.entries(root / "nowhere") == list(foreign_files.walk(root, "a")) == []
    foreign_files.remove(root, "a/b")


def test_text_is_utf_8(root: Path) -> None:
    (root / "file").write_bytes(b"\xff")
    with pytest.raises(Refused):
        foreign_files.read_text(root, "file")


def test_a_leased_file_does_not_wait(root: Path) -> None:
    (root / "file").write_text("own")
    # by it the holder hears that another process wants the file
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        with (root / "file").open("a") as held:
            fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            with pytest.raises(Refused):
                foreign_files.read(root, "file")
    finally:
        signal.signal(signal.SIGIO, before)


def test_a_file_that_grows_is_not_read_for_ever(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_files, "_PIECE", 10)
    (root / "file").write_bytes(b"x")
    opened = foreign_files.open_file

    def growing(*where: object) -> object:
        file = opened(*where)  # type: ignore[arg-type]
        (root / "file").write_bytes(b"x" * 1000)
        return file

    monkeypatch.setattr(foreign_files, "open_file", growing)
    with pytest.raises(Refused, match="100 bytes"):
        foreign_files.read(root, "file", 100)


def test_a_walk_finds_files_and_directories_alone(root: Path) -> None:
    for kind, make in INSTEAD.items():
        make(root / kind)
    (root / "a directory" / "below").mkdir()
    (root / "a directory" / "below" / "file").write_text("own")
    (root / "to a directory").symlink_to("a directory")
    found = [entry.path for entry in foreign_files.walk(root)]
    files = ["a hole", "no mode", "too many bytes"]
    assert found == [*files, "a directory", "a directory/below", "a directory/below/file"]
    assert foreign_files.entries(root, "a directory") == [FoundFile("a directory/below", True)]
    (size,) = [entry.nbytes for entry in foreign_files.entries(root) if entry.path == "a hole"]
    assert size == 1 << 40


def test_a_search_ends(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = root
    for _ in range(foreign_files.MOST_DEPTH + 2):
        deep /= "d"
    deep.mkdir(parents=True)
    for work in (lambda: list(foreign_files.walk(root)), lambda: foreign_files.remove(root, "d")):
        with pytest.raises(Refused, match=f"{foreign_files.MOST_DEPTH} directories"):
            work()
    for name, value in (("MOST_ENTRIES", 5), ("MOST_SECONDS", -1.0)):
        with monkeypatch.context() as changed:
            changed.setattr(foreign_files, name, value)
            for work in (lambda: list(foreign_files.walk(root)), lambda: foreign_files.remove(root, "d")):
                with pytest.raises(Refused):
                    work()


def test_a_link_is_removed_and_not_what_it_names(root: Path) -> None:
    kept = root.parent / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (root / "d").mkdir()
    for name, target in (("file", kept / "file"), ("directory", kept)):
        (root / "d" / name).symlink_to(target)
    os.mkfifo(root / "d" / "pipe")
    foreign_files.remove(root, "d")
    assert os.listdir(root) == [] and (kept / "file").exists()
    (root / "link").symlink_to(kept)
    foreign_files.remove(root, "link")
    assert os.listdir(root) == [] and (kept / "file").exists()


def test_a_file_is_written_whole_and_private(root: Path) -> None:
    foreign_files.write(root, "a/b/file", b"one")
    foreign_files.write(root, "a/b/file", b"two")
    assert (root / "a" / "b" / "file").read_bytes() == b"two" and os.listdir(root / "a" / "b") == ["file"]
    assert [(root / path).stat().st_mode & 0o777 for path in ("a", "a/b", "a/b/file")] == [0o700, 0o700, 0o600]
    link(root / "link")
    foreign_files.write(root, "link", b"new")
    assert (root.parent / "secret").read_text() == "secret" and (root / "link").read_text() == "new"


def test_nothing_is_followed_while_an_application_swaps_links(root: Path) -> None:
    """A directory and a file become links and pipes again and again: nothing from outside is ever read or removed."""
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "file").write_text("secret")
    over = threading.Event()

    def swap() -> None:
        k = 0
        while not over.is_set():
            k += 1
            (root / f"real{k}").mkdir()
            (root / f"real{k}" / "file").write_text("own")
            (root / f"link{k}").symlink_to(outside)
            os.rename(root / f"real{k}", root / "d")
            os.rename(root / "d", root / "old")
            os.rename(root / f"link{k}", root / "d")
            os.unlink(root / "d")
            os.mkfifo(root / "d")
            os.unlink(root / "d")
            foreign_files.remove(root, "old")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        seen = set()
        for _ in range(2000):
            try:
                seen.add(foreign_files.read_text(root, "d/file"))
            except (FileNotFoundError, Refused):
                seen.add("")
            seen.update(str(entry.nbytes) for entry in foreign_files.walk(root, "d") if not entry.is_directory)
    finally:
        over.set()
        thread.join()
    assert "secret" not in seen and str(len("secret")) not in seen
    assert (outside / "file").read_text() == "secret"
