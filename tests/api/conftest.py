"""Small runs started from Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import corolla
from tests.conftest import SMALL
from tests.report.conftest import undrawn as undrawn

Start = Callable[..., corolla.Run]


@pytest.fixture
def start(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """corolla.run with the small run's keys, in one process, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    own = {name.replace("-", "_"): value for name, value in SMALL.items()}
    own |= {"state_dir": str(tmp_path / "state"), "data_dir": str(data_dir), "in_process": True}

    def begin(*arguments: Any, **keywords: Any) -> corolla.Run:
        return corolla.run(*arguments, **{**own, **keywords})

    return begin
