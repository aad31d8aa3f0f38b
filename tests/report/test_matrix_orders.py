"""Orders of a matrix between clients: by clusters of the round that shows them, and by groups that the method found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from corolla.report.arrays import read_runs
from corolla.report.by_kind import of_run
from corolla.report.charts import Panel
from corolla.report.groups import grouped
from fl_app.figures import Groups, Matrix
from tests.facts import each_mentions, mentions
from tests.report.builders import folder, record
from tests.report.read import frame_with

FIGURES = (Matrix("overlap", "Overlap", value="overlap"), Groups("cluster", "Clusters"))


def overlap(tmp_path: Path, rounds: int, seen_in: int, clients: int = 20, clustered: bool = False) -> Panel:
    """The picture of a run whose clients i, i + 4, ... have a large overlap in one round, and all alike in the others."""
    draw, group = np.random.default_rng(0), np.arange(clients) % 4
    records = []
    for t in range(1, rounds + 1):
        values = np.where(np.equal.outer(group, group), 0.9, 0.1) if t == seen_in else np.full((clients, clients), 0.5)
        values = values + draw.uniform(0, 0.05, values.shape)
        own = {"accuracy-before": 0.5}
        rows = {str(i): {**own, "cluster": int(group[i])} if clustered else dict(own) for i in range(clients)}
        records.append(record(t, rows, overlap=((values + values.T) / 2).tolist()))
    run = folder(tmp_path / "run", records, figures=FIGURES, method="fedcac", num_clients=clients)
    (panel,) = [one for one in of_run(grouped(read_runs([run]))[0].first) if one.name == "overlap-1"]
    return panel


def in_blocks(order: list[str]) -> bool:
    groups = [int(client) % 4 for client in order]
    return sum(a != b for a, b in zip(groups, groups[1:], strict=False)) == 3


def test_clusters_of_an_early_round_are_named_shown_and_an_order(tmp_path: Path) -> None:
    panel = overlap(tmp_path, rounds=8, seen_in=3)
    assert mentions(panel.caption, "round 3", "4 clusters")
    assert panel.switch is not None and each_mentions(
        list(panel.switch), ("order by overlap",), ("order by clusters", "round 3")
    )
    last, early = ([*change["client"]["sort"]] for change in panel.switch.values())
    assert in_blocks(early) and not in_blocks(last)


@pytest.mark.parametrize(("rounds", "seen_in"), [(30, 3), (30, 30)])
def test_the_clearest_round_is_among_those_of_the_slider(tmp_path: Path, rounds: int, seen_in: int) -> None:
    panel = overlap(tmp_path, rounds, seen_in, clients=40)
    shown = set(frame_with(panel, "round", "value")["round"])
    assert {seen_in, rounds} <= shown and len(shown) < rounds


def test_clusters_of_the_last_round_are_the_order_already(tmp_path: Path) -> None:
    panel = overlap(tmp_path, rounds=3, seen_in=3)
    assert "In round 3" in panel.caption and panel.switch is None


def test_a_matrix_without_clusters_names_none(tmp_path: Path) -> None:
    panel = overlap(tmp_path, rounds=3, seen_in=0)
    assert "clusters" not in panel.caption and panel.switch is None


def test_groups_that_the_method_found_are_an_order(tmp_path: Path) -> None:
    panel = overlap(tmp_path, rounds=3, seen_in=0, clustered=True)
    assert panel.switch is not None and list(panel.switch) == ["order by overlap", "order by groups"]
    assert in_blocks(panel.switch["order by groups"]["other"]["sort"])
