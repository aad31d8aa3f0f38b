"""What tests of faults share: the configs of their runs, and what they look for in the records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.conftest import BackgroundRun, replay, rounds, summary

# part of the model is aggregated and part of it stays with the client: both must survive
COMMON: dict[str, Any] = {"method": "fedper", "model": "gated:mlp", "num-server-rounds": 3, "checkpoint-every": 1}
# a round is repeated until every reply is there; what goes wrong does so in the last round
EVERY_REPLY: dict[str, Any] = {"min-results": 1.0, "round-retries": 1, "num-server-rounds": 2}


def failures(run: BackgroundRun) -> list[tuple[int, int, int]]:
    """(round, client, attempt) of whatever failed; attempt 0 where the round counted all the same."""
    return [(r["round"], f["client"], f.get("attempt", 0)) for r in rounds(run.folder) for f in r["failures"]]


def causes(run: BackgroundRun) -> str:
    return "\n".join(f["cause"] for r in rounds(run.folder) for f in r["failures"])


def assert_nothing_is_lost(run: BackgroundRun, tmp_path: Path) -> None:
    digest = summary(run.folder)["digest"]
    assert digest is not None and digest == replay(run, tmp_path)
