"""The report's numbers against real runs and by hand."""

from __future__ import annotations

import json
import logging
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas
import pytest

from corolla.report import arrays
from fl_app.server.run_folder import client_facts, read_clients
from tests.facts import mentions
from tests.report.builders import folder, record
from tests.report.read import last_matrix


def test_clients_with_the_same_classes_have_the_highest_overlap(fedcac: Path) -> None:
    run = arrays.read_run(fedcac)
    told, found = arrays.class_counts(run), last_matrix(run, "overlap")
    assert told is not None and found is not None and told[0] == found[0] == list(range(20))
    similarity, overlap = arrays.cosine(told[1]), found[1].copy()
    np.fill_diagonal(overlap, -1)
    np.fill_diagonal(similarity, -1)
    with_twin = [i for i in range(20) if similarity[i].max() > 0.99]
    assert len(with_twin) >= 4
    for i in with_twin:
        assert similarity[i, overlap[i].argmax()] > 0.99, f"client {i}"
    none = overlap[similarity == 0]
    assert overlap[similarity > 0.99].min() > none.max()


def test_similar_clients_are_drawn_side_by_side(fedcac: Path) -> None:
    told = arrays.class_counts(arrays.read_run(fedcac))
    assert told is not None
    similarity = arrays.cosine(told[1])
    order = arrays.by_likeness(similarity)
    assert sorted(order) == list(range(20))
    place = {client: k for k, client in enumerate(order)}
    for i, j in combinations(range(20), 2):
        if similarity[i, j] > 0.99:
            between = order[min(place[i], place[j]) : max(place[i], place[j]) + 1]
            assert all(similarity[i, k] > 0.99 for k in between)


def test_clusters_are_counted_and_clearest_where_links_within_are_strong() -> None:
    group = np.arange(12) % 3
    within = np.equal.outer(group, group)
    clear, blurred = (np.where(within, high, low) for high, low in ((0.9, 0.1), (0.6, 0.4)))
    assert arrays.clusters(clear)[1] == arrays.clusters(blurred)[1] == 3
    assert 1 >= arrays.clusters(clear)[0] > arrays.clusters(blurred)[0] > 0
    assert arrays.clusters(np.ones((4, 4))) == arrays.clusters(np.eye(2)) == (0.0, 1)


def test_figures_of_the_table_are_those_of_the_summary(fedcac: Path, fedavg: Path) -> None:
    for path in (fedcac, fedavg):
        run, summary = arrays.read_run(path), json.loads((path / "summary.json").read_text())
        assert run.last_evaluation is not None and run.finished and not run.missing
        assert run.last_evaluation[1]["accuracy"] == summary["final-accuracy"]
        assert run.outcome == {name: summary[name] for name in run.outcome}
        assert {
            "final-accuracy",
            "best-accuracy",
            "digest",
            "digest-version",
            "upload-bytes",
            "seconds",
            "failures",
        } <= run.outcome.keys()
        assert len(run.failures) == summary["failures"]


def test_class_counts_are_the_clients_training_labels(fedcac: Path) -> None:
    clients = read_clients(fedcac)
    assert sorted(clients, key=int) == [str(i) for i in range(20)]
    for facts in clients.values():
        assert sum(facts["class-counts"]) == facts["train-samples"] == 40
        assert sum(n > 0 for n in facts["class-counts"]) == 2 and facts["test-samples"] == 10


@pytest.mark.parametrize("text", ["1,2", "1,2,x", "1,-2,3", "1,,3", "1,2,3,4", "²,1,1"])
def test_malformed_class_counts_are_dropped_and_logged(text: str, caplog: pytest.LogCaptureFixture) -> None:
    properties = {"train-samples": 5, "test-samples": 2, "num-classes": 3, "class-counts": text}
    log = logging.getLogger("corolla")
    log.addHandler(caplog.handler)
    try:
        assert client_facts(7, properties) == {"train-samples": 5, "test-samples": 2}
    finally:
        log.removeHandler(caplog.handler)
    assert mentions(caplog.text, "client 7", "class-counts", "3 counts")
    assert client_facts(7, properties | {"class-counts": "1,0,4"})["class-counts"] == [1, 0, 4]


def test_curves_bytes_and_seconds_by_hand(tmp_path: Path) -> None:
    rounds = [
        record(1, {"0": {"accuracy-before": 0.1}, "1": {"accuracy-before": 0.3}}),
        record(
            2,
            {"0": {"accuracy-before": 0.5}, "1": {"accuracy-before": None}, "2": {"accuracy-before": 0.9}}
            | {"1": {"accuracy-before": 0.7}},
        ),
    ]
    run = arrays.read_run(folder(tmp_path / "r", rounds))
    curve = arrays.curve([run], "accuracy-before")
    assert curve is not None
    assert curve.index.tolist() == [1, 2]
    assert curve["mean"].tolist() == pytest.approx([0.2, 0.7])
    assert curve["low"].tolist() == pytest.approx([0.15, 0.6]) and curve["high"].tolist() == pytest.approx([0.25, 0.8])
    # round 1: its downloads; round 2: all of round 1 and its downloads
    spent = arrays.until(run)
    assert spent["bytes"].to_dict() == {1: 40, 2: 180}
    assert spent["mean"].tolist() == pytest.approx([0.2, 0.7])
    assert arrays.server_seconds(run) == {"wait": 2.0, "evaluate": 1.0}
    assert arrays.client_seconds(run) == {"train": 1.0, "evaluate": 0.5}
    assert arrays.curve([run], "evaluation") is None
    known, source = arrays.last_known(run)
    assert known.to_dict() == {0: 0.5, 1: 0.7, 2: 0.9} and "last round" in source


def test_short_curves_are_drawn_as_they_are_and_long_ones_as_running_means() -> None:
    short = pandas.Series(np.random.default_rng(0).random(79))
    assert arrays.smooth(short) is short
    assert [arrays.window(rounds) for rounds in (79, 80, 400, 500, 1000)] == [1, 3, 11, 13, 25]
    smooth = arrays.smooth(pandas.Series(np.arange(80) ** 2.0)).tolist()
    assert smooth[:3] == pytest.approx([0, (0 + 1 + 4) / 3, (1 + 4 + 9) / 3])
    assert smooth[-1] == pytest.approx((78**2 + 79**2) / 2)
    long = np.random.default_rng(0).random(400)
    found = arrays.smooth(pandas.DataFrame({"long": long, "flat": 0.3}, range(1, 401)))
    assert found["long"].iloc[[0, 2, 200]].tolist() == pytest.approx([long[0], long[:5].mean(), long[195:206].mean()])
    assert found["flat"].tolist() == pytest.approx([0.3] * 400)
