"""A user's working directory, and the command in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_app import plugins
from tests.conftest import Command


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's working directory."""
    path = sys.path[:]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    plugins.reset(Path())
    yield tmp_path / "here"
    plugins.reset()
    sys.path[:] = path


@pytest.fixture
def corolla(here: Path, monkeypatch: pytest.MonkeyPatch, data_dir: Path, command: Command) -> Command:
    monkeypatch.setenv("COROLLA_STATE_DIR", str(here / "state"))
    monkeypatch.setenv("COROLLA_DATA_DIR", str(data_dir))
    return command
