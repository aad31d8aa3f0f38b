"""What a process behind walls has exported is taken as files of an export, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deploy.exporting import _taken
from fl_app.errors import UserError


def test_an_export_is_taken(tmp_path: Path) -> None:
    out, to = tmp_path / "made" / "out", tmp_path / "to"
    names = ("celle.pt", "celle.pt.json", "celle.pt.plugins/own.py", "celle.pt.plugins/more/own.py")
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    (tmp_path / "secret").write_text("secret")
    (out / "link.pt").symlink_to(tmp_path / "secret")
    os.mkfifo(out / "pipe.pt")
    assert {path.relative_to(to).as_posix() for path in _taken(out.parent, "out", to)} == set(names)
    assert {str(path.relative_to(to)) for path in to.rglob("*") if path.is_file()} == set(names)
    assert all((to / name).read_text() == name for name in names)


@pytest.mark.parametrize("name", [".bashrc", ".pt", "own.py", "celle.pt/x", "celle.pt.plugins/.x", "a b.pt", "x.pt.sh"])
def test_no_other_file_is_taken(tmp_path: Path, name: str) -> None:
    (tmp_path / "out" / name).parent.mkdir(parents=True)
    (tmp_path / "out" / name).touch()
    with pytest.raises(UserError):
        list(_taken(tmp_path, "out", tmp_path / "to"))
    assert not any(path.is_file() for path in tmp_path.glob("to/**/*"))
