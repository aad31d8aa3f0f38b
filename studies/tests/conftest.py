"""Fixtures of Corolla's own tests for these tests. After each test no plug-ins are registered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fl_app import plugins
from tests.conftest import data_dir, own_logging, raw_config, run

__all__ = ["data_dir", "own_logging", "raw_config", "run"]


@pytest.fixture(autouse=True)
def no_plugins() -> Iterator[None]:
    yield
    plugins.reset()
