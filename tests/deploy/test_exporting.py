"""What a process behind walls has exported is taken as files of an export, or not at all."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from deploy import exporting
from deploy.exporting import taken
from fl_app.errors import UserError
from tests.facts import rejected


def test_an_export_is_taken(tmp_path: Path) -> None:
    out, to = tmp_path / "made" / "out", tmp_path / "to"
    names = ("celle.pt", "celle.pt.json", "celle.pt.plugins/own.py", "celle.pt.plugins/more/own.py")
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    (tmp_path / "secret").write_text("secret")
    (out / "link.pt").symlink_to(tmp_path / "secret")
    os.mkfifo(out / "pipe.pt")
    assert {path.relative_to(to).as_posix() for path in taken(out.parent, "out", to)} == set(names)
    assert {str(path.relative_to(to)) for path in to.rglob("*") if path.is_file()} == set(names)
    assert all((to / name).read_text() == name for name in names)


def test_an_adapter_is_taken_as_a_new_folder(tmp_path: Path) -> None:
    out, to = tmp_path / "made" / "out", tmp_path / "to"
    weights = "celle-adapter/adapter_model.safetensors"
    names = (weights, f"{weights}.json", f"{weights}.plugins/own.py", "celle-adapter/adapter_config.json")
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    assert {path.relative_to(to).as_posix() for path in taken(out.parent, "out", to)} == set(names)
    with rejected(UserError, "node export", "celle-adapter exists already"):
        taken(out.parent, "out", to)


@pytest.mark.parametrize(
    "name",
    [
        *(".bashrc", ".pt", "own.py", "celle.pt/x", "celle.pt.plugins/.x", "a b.pt", "x.pt.sh", "x-adapter"),
        *("x-adapter/own.py", "x/model.safetensors", "x-merged/sub/model.safetensors", "x-merged/.x.json"),
    ],
)
def test_no_other_file_is_taken(tmp_path: Path, name: str) -> None:
    (tmp_path / "out" / name).parent.mkdir(parents=True)
    (tmp_path / "out" / name).touch()
    with pytest.raises(UserError):
        list(taken(tmp_path, "out", tmp_path / "to"))
    assert not any(path.is_file() for path in tmp_path.glob("to/**/*"))


@pytest.mark.parametrize(
    ("there", "written"),
    [
        # the person's other model gets code, or another content
        (["other.pt"], ["own.pt", "other.pt.plugins/evil.py"]),
        (["other.pt"], ["other.pt.plugins/evil.py"]),
        (["other.pt"], ["own.pt", "other.pt"]),
        (["other.pt"], ["other.pt", "other.pt.json"]),
        (["other.pt.json"], ["other.pt", "other.pt.json"]),
        (["other.pt.plugins/own.py"], ["other.pt"]),
        (["x-adapter/own.py"], ["x-adapter/model.safetensors"]),
        ([], ["x-adapter/model.safetensors", "own.pt"]),
        ([], ["x-adapter/model.safetensors", "y-adapter/config.json"]),
        ([], ["x-adapter/config.json"]),
        ([], ["own.pt", "other.onnx"]),
        ([], []),
    ],
)
def test_one_new_model_is_taken_and_nothing_of_another(tmp_path: Path, there: list[str], written: list[str]) -> None:
    to = tmp_path / "to"
    for name in there:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_text("the person's")
    for name in written:
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("evil")
    with pytest.raises(UserError):
        list(taken(tmp_path, "out", to))
    assert {path.relative_to(to).as_posix() for path in to.rglob("*") if path.is_file()} == set(there)
    assert all((to / name).read_text() == "the person's" for name in there)


def test_a_file_of_any_size_is_copied_with_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    size = 64 << 20
    with (tmp_path / "out" / "own.pt").open("wb") as file:
        file.truncate(size)
    tracemalloc.start()
    try:
        (written,) = taken(tmp_path, "out", tmp_path / "to")
        assert tracemalloc.get_traced_memory()[1] < size / 4
    finally:
        tracemalloc.stop()
    assert written.stat().st_size == size
    monkeypatch.setattr(exporting, "MOST_BYTES", size - 1)
    with pytest.raises(UserError, match=str(size)):
        taken(tmp_path, "out", tmp_path / "again")
