"""The scripts in examples/ as modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fl_app import plugins

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@contextmanager
def example(model: str, *packages: str) -> Iterator[Any]:
    """Import an example as a run imports its model, `module:function`. Without one of the packages the test is skipped."""
    for package in packages:
        pytest.importorskip(package)
    plugins.reset(EXAMPLES)
    try:
        yield plugins.load("model", model) and sys.modules[model.partition(":")[0]]
    finally:
        plugins.reset()
