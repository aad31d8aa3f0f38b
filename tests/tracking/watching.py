"""A callback for tests that need any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Watch:
    """It does nothing."""

    def on_run_end(self, summary: Mapping[str, Any] | None) -> None:
        """Do nothing."""
