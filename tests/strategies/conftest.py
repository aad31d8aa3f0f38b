"""A user's working directory, and the command in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fl_app import cli, plugins

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's working directory."""
    path = sys.path[:]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    plugins.look_in(Path())
    yield tmp_path / "here"
    plugins.look_in()
    sys.path[:] = path


@pytest.fixture
def corolla(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data_dir: Path) -> Command:
    monkeypatch.setenv("COROLLA_STATE_DIR", str(here / "state"))
    monkeypatch.setenv("COROLLA_DATA_DIR", str(data_dir))

    def invoke(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["corolla", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        return int(exit_.value.code or 0), out, " ".join(err.split())

    return invoke
