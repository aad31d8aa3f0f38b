"""Runs of more clients than can be drawn or listed one by one."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corolla.report import arrays, by_kind, heat_maps, tables
from corolla.report.all_runs import accuracy
from corolla.report.arrays import averaged
from corolla.report.charts import Panel
from corolla.report.groups import grouped
from corolla.report.heat_maps import by_classes, partitions
from corolla.report.page import write_report
from fl_app.figures import Groups, Links, Matrix, Scalars
from tests.facts import mentions
from tests.report.builders import folder, record
from tests.report.read import encoding, frames_of, last_matrix

FIGURES = (
    Matrix("overlap", "Overlap"),
    Links("collaborators", "Collaborators", "others"),
    Scalars("alpha", "Share of the own model", "alpha"),
    Groups("cluster", "Clusters"),
)


def many(path: Path, num_clients: int, rounds: int = 2, **config: Any) -> Path:
    """Write a run: client i has accuracy i / N, data of class i % 4 alone, and is linked with i others."""
    draw = np.random.default_rng(0)
    records = []
    for t in range(1, rounds + 1):
        rows = {
            str(i): {
                "accuracy-before": i / num_clients,
                "accuracy-after": 0.5,
                "collaborators": list(range(i)),
                "alpha": float(draw.random()),
                "cluster": i % 4,
            }
            for i in range(num_clients)
        }
        overlap = np.equal.outer(np.arange(num_clients) % 4, np.arange(num_clients) % 4) * 0.5 + 0.25
        own = {i: {"accuracy": row["accuracy-before"]} for i, row in rows.items()}
        evaluation = {"accuracy": 0.5, "clients": own}
        records.append(record(t, rows, overlap=overlap.tolist(), evaluation=evaluation))
    run = folder(path, records, figures=FIGURES, method="fedcac", num_clients=num_clients, **config)
    counts = np.zeros((num_clients, 4), int)
    counts[np.arange(num_clients), np.arange(num_clients) % 4] = 20
    facts = {
        str(i): {"train-samples": 20, "test-samples": 10, "class-counts": row.tolist()} for i, row in enumerate(counts)
    }
    (run / "clients.json").write_text(json.dumps(facts))
    return run


@pytest.fixture(scope="module")
def three_hundred(tmp_path_factory: pytest.TempPathFactory) -> arrays.ReportedRun:
    return arrays.read_run(many(tmp_path_factory.mktemp("many") / "run", 300))


@pytest.fixture(scope="module")
def sixty(tmp_path_factory: pytest.TempPathFactory) -> arrays.ReportedRun:
    return arrays.read_run(many(tmp_path_factory.mktemp("few") / "run", arrays.MANY))


def test_neighbours_are_averaged_without_what_is_missing() -> None:
    cells = np.array([[1.0, 10.0], [3.0, np.nan], [5.0, np.nan], [7.0, np.nan], [9.0, 50.0]])
    # rows 0 and 1, rows 2 to 4
    np.testing.assert_array_equal(averaged(cells, 2), [[2.0, 10.0], [7.0, 50.0]])
    np.testing.assert_array_equal(averaged(cells[2:4], 1), [[6.0, np.nan]])
    np.testing.assert_array_equal(averaged(cells.T, 2, axis=1), averaged(cells, 2).T)
    assert averaged(cells, 5) is cells


def test_clients_are_ordered_by_their_most_frequent_classes() -> None:
    counts = np.array([[1, 9, 0], [10, 0, 0], [6, 4, 0], [7, 0, 3], [0, 10, 0], [8, 2, 0]])
    # class 0 first: alone, then with class 1, the larger share of class 0 before, then with class 2; then class 1
    assert by_classes(counts).tolist() == [1, 5, 2, 3, 4, 0]


def test_bands_reach_over_nine_tenths_of_many_clients(
    three_hundred: arrays.ReportedRun, sixty: arrays.ReportedRun
) -> None:
    found = arrays.curve([three_hundred], "before")
    assert found is not None
    # accuracies 0, 1/300 .. 299/300
    np.testing.assert_allclose(found[["lowest", "low"]].iloc[0], [0.05 * 299 / 300, 0.25 * 299 / 300])
    np.testing.assert_allclose(found[["highest", "high"]].iloc[0], [0.95 * 299 / 300, 0.75 * 299 / 300])
    few = arrays.curve([sixty, sixty], "before")
    assert few is not None and "lowest" not in few, "two seeds of sixty clients are not many"
    panels = {panel.name: panel for panel in accuracy(grouped([three_hundred]))}
    assert "middle 90 %" in panels["accuracy"].caption and "histogram" in panels
    assert not {"histogram"} & {panel.name for panel in accuracy(grouped([sixty]))}
    assert encoding(panels["histogram"], "x")["scale"]["domain"] == pytest.approx([-0.025, 1.025]), (
        "bins of 5 %, centred"
    )
    assert frames_of(panels["histogram"])[0]["share"].sum() == pytest.approx(1)


def test_the_worst_and_the_best_clients_are_listed(
    three_hundred: arrays.ReportedRun, sixty: arrays.ReportedRun
) -> None:
    section = tables.clients_section(grouped([three_hundred]))
    worst, best, every = re.findall(r"<table.*?</table>", section, re.DOTALL)

    def names(table: str) -> list[str]:
        return re.findall(r'<td class="name"[^>]*>(\d+)</td>', table)

    assert names(worst) == [str(i) for i in range(20)]
    assert names(best) == [str(i) for i in range(299, 279, -1)]
    assert names(every) == [str(i) for i in range(300)]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", best)
    assert cells[:9] == ["299", "20", "10", "1", "3", "99.67", "99.67", "50.00", "2"]
    section = tables.clients_section(grouped([sixty]))
    assert "worst" not in section and section.count("<tr") == 61


def test_a_page_lists_all_clients_of_as_many_runs_as_there_is_room_for(
    three_hundred: arrays.ReportedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = arrays.read_run(many(tmp_path / "other", 100, learning_rate=0.7))
    monkeypatch.setattr(tables, "MOST_LINES", 150)
    section = tables.clients_section(grouped([three_hundred, other]))
    assert mentions(section, "All 300", "clients.csv") and "<summary>All 100</summary>" in section


def test_equal_clients_come_worst_first_by_what_training_adds(tmp_path: Path) -> None:
    rows = {str(i): {"accuracy-before": 0.5, "accuracy-after": 1 - i / 100} for i in range(70)}
    groups = grouped([arrays.read_run(folder(tmp_path / "run", [record(1, rows)]))])
    table = tables.client_table(groups, groups[0].first.headline, few=False)
    assert [line[0].value for line in table.lines] == list(range(69, -1, -1))
    assert "class" not in " ".join(table.head), "no counts are known"


def test_numbers_between_clients_are_read_as_lists_and_by_name(tmp_path: Path) -> None:
    rows: dict[str, dict[str, Any]] = {
        "0": {"accuracy-before": 0.5, "near": [None, 0.25, 1e400]},
        "1": {"accuracy-before": 0.5, "near": {"0": 2, "2": "much", "x": 1}},
        "5": {"accuracy-before": 0.5, "near": [None, 0.5, None]},
    }
    later = {"1": {"accuracy-before": 0.5, "near": [3, 4]}, "9": {"accuracy-before": 0.5}}
    run = arrays.read_run(folder(tmp_path / "run", [record(1, rows), record(2, later)]))
    found = last_matrix(run, "near")
    assert found is not None and found[0] == [0, 1, 2, 5, 9]
    nan = np.nan
    expected = [
        [nan, 0.25, nan, nan, nan],
        [2, 3, nan, 0, 4],
        [nan, nan, nan, nan, nan],
        [nan, 0.5, nan, nan, nan],
        [nan, nan, nan, nan, nan],
    ]
    np.testing.assert_array_equal(found[1], expected)


def drawn_matrix(run: arrays.ReportedRun) -> Panel:
    return Panel("overlap", *(heat_maps.matrix(run, FIGURES[0]) or pytest.fail("no picture")))


def test_matrices_are_ordered_by_cluster_and_thinned(three_hundred: arrays.ReportedRun) -> None:
    panel = drawn_matrix(three_hundred)
    assert mentions(panel.caption, "neighbours among the 300", "clients") and "outlined" not in panel.caption
    overlap, similarity, _ = frames_of(panel)
    assert overlap["client"].nunique() == similarity["client"].nunique() == 100
    # four clusters of 75 clients, 25 rows each: what is in a block is alike
    order = encoding(panel, "y")["sort"]
    place = {name: k // 25 for k, name in enumerate(order)}
    same = overlap["client"].map(place) == overlap["other"].map(place)
    assert len(order) == 100 and overlap[same]["value"].min() > 0.74 and overlap[~same]["value"].max() < 0.26


def test_of_very_many_clients_some_are_drawn(
    three_hundred: arrays.ReportedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heat_maps, "MOST_CLIENTS", 250)
    panel = drawn_matrix(three_hundred)
    assert "250 of the 300 clients" in panel.caption and encoding(panel, "x")["title"] == "250 clients"


def test_clients_over_rounds_are_sorted_and_groups_counted(
    three_hundred: arrays.ReportedRun, sixty: arrays.ReportedRun
) -> None:
    panels = {panel.name: panel for panel in by_kind.of_run(three_hundred)}
    top, below = frames_of(panels["collaborators-1"])
    rows = below[below["round"] == 1]["value"]
    assert len(rows) == 100 and (np.diff(rows) > 0).all(), "least to most"
    assert {"lowest", "low", "high", "highest"} <= {*top.columns}, "two bands"
    assert mentions(panels["collaborators-1"].caption, "sorted by their", "over the rounds")
    assert frames_of(panels["alpha-1"])[1]["row"].nunique() == 100
    counts = frames_of(panels["cluster-1"])[1]
    assert len(counts) == 8 and set(counts["value"]) == {75}
    few = {panel.name: panel for panel in by_kind.of_run(sixty)}
    below = frames_of(few["collaborators-1"])[1]
    assert below[below["round"] == 1]["value"].tolist() == list(range(60))
    assert "sorted" not in few["collaborators-1"].caption


def test_class_distributions_of_many_are_drawn_as_groups(
    three_hundred: arrays.ReportedRun, sixty: arrays.ReportedRun
) -> None:
    (panel,) = partitions([three_hundred])
    assert mentions(panel.caption, "6,000 training", "300 clients") and "All clients have 20." in panel.caption
    mix, spread = frames_of(panel)
    assert len(mix) == 4 * 200 and mix[mix["value"] == 1].groupby("class").size().tolist() == [50] * 4
    assert spread["lowest"].tolist() == [0] * 4 and spread["highest"].tolist() == [20] * 4
    (panel,) = partitions([sixty])
    assert mentions(panel.caption, "Personalization should", "these together") and "a dot" in panel.caption


@pytest.mark.nightly
def test_a_page_of_a_thousand_clients_is_small_and_soon_made(tmp_path: Path) -> None:
    run = many(tmp_path / "run", 1000)
    started = time.process_time()
    page, _ = write_report([run], tmp_path / "out")
    assert time.process_time() - started < 30
    assert page.stat().st_size < 5e6
