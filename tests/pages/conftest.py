"""The `corolla` command in this process and in an empty directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Command
from tests.report.conftest import undrawn as undrawn


@pytest.fixture
def corolla(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Command) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COROLLA_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("COROLLA_STATE_HOME", str(tmp_path / "home"))
    return command
