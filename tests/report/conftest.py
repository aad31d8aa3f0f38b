"""Real runs that the report's tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from client_app.client_app import app as client_app
from corolla.report import page
from corolla.report.charts import Panel
from fl_app import server_app
from fl_app.config import parse
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS
from tests.conftest import SMALL, flat


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Callable[..., Path]:
    def start(name: str, **changes: Any) -> Path:
        own = {"output-dir": str(tmp_path_factory.mktemp("runs")), "state-dir": str(tmp_path_factory.mktemp("state"))}
        raw = SMALL | own | {"data-dir": str(data_dir), "run-name": name} | flat(changes)
        config = parse(raw, METHOD_PARAMS)
        grid = InProcessGrid(client_app, raw, config.num_clients)
        return server_app.run(grid, config, lambda what, done, total: None).path

    return start


@pytest.fixture(scope="session")
def fedcac(start: Callable[..., Path]) -> Path:
    return start(
        "fedcac-run",
        method="fedcac",
        partition="pathological",
        num_clients=20,
        train_samples=40,
        test_samples=10,
        num_server_rounds=8,
        local_epochs=3,
        learning_rate=0.1,
        evaluate_every=4,
        fedcac={"beta": 3},
    )


@pytest.fixture(scope="session")
def fedavg(start: Callable[..., Path]) -> Path:
    return start("fedavg-run", method="fedavg", num_server_rounds=3)


@pytest.fixture(scope="session")
def local(start: Callable[..., Path]) -> Path:
    return start("local-run", method="local", num_server_rounds=3)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave every picture empty, for tests of what stands around pictures: drawing is most of a report's time."""
    monkeypatch.setattr(Panel, "render", lambda panel, kind="png": b"")
    monkeypatch.setattr(page, "data_of", lambda panels: "{}")
