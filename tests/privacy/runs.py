"""A small private run, and what is left of it."""

from __future__ import annotations

from typing import Any

from fl_app.server.run_folder import RunFolder, read_metrics

# five clients can spare none with private-left-out = group
PRIVATE = {"private": True, "num_clients": 5, "private_left_out": "client"}


def rounds(folder: RunFolder) -> list[dict[str, Any]]:
    return list(read_metrics(folder.path))
