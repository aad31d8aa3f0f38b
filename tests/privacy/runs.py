"""A small private run, and what is left of it."""

from __future__ import annotations

from typing import Any

from fl_app.server.run_folder import RunFolder, read_metrics

PRIVATE = {"private": True, "num_clients": 5}


def rounds(folder: RunFolder) -> list[dict[str, Any]]:
    return list(read_metrics(folder.path))
