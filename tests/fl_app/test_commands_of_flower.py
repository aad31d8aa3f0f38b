"""Where Flower's commands are found: beside Python, where Flower is installed, on the path."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

from fl_app.errors import UserError
from fl_app.processes import flower_environment, script


def test_an_environment_that_borrows_flower_finds_its_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    beside = Path(script("flwr"))
    assert beside.parent == Path(sys.executable).parent
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert Path(script("flower-superlink")).samefile(beside.with_name("flower-superlink"))
    places = flower_environment()["PATH"].split(os.pathsep)
    assert places[0] == str(tmp_path) and Path(places[1]).samefile(beside.parent)
    monkeypatch.setattr(importlib.metadata, "files", lambda name: None)
    monkeypatch.setenv("PATH", str(beside.parent))
    assert script("flwr") == str(beside)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="flwr"):
        script("flwr")
