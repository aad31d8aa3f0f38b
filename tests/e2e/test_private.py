"""A private run's client is killed in the middle of a round, in a real deployment with a key per site."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Cluster, Run, replay, rounds, summary
from tests.privacy.keys import make

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


def test_a_killed_client_costs_one_repeat_among_the_others(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start_superlink()
    for client_id, key in enumerate(make(tmp_path / "keys", 4)):
        cluster.start_supernode(client_id, 4, private_keys=str(key))
    cluster.hold(1, training=2)
    config = {"method": "fedcac", "private": True, "model": "gated:mlp", "num-server-rounds": 3, "min-results": 0.5}
    run = Run(cluster, tmp_path / "killed", 4, config)
    cluster.training(1, 2).kill()
    run.finish()
    records = rounds(run.folder)
    assert [sorted(r["clients"]) for r in records] == [["0", "1", "2", "3"], ["0", "2", "3"], ["0", "1", "2", "3"]]
    assert [(f["client"], f["attempt"]) for f in records[1]["failures"]] == [(1, 1)]
    assert "clients [1] dropped out" in run.log
    digest = summary(run.folder)["digest"]
    assert digest is not None and digest == replay(run, tmp_path)
