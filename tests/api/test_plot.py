"""A run's frames of pairs, and its pictures as charts."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest

import corolla
from fl_app.figures import Matrix
from tests.report.builders import folder, record

altair = pytest.importorskip("altair", reason="altair is not installed")


@pytest.fixture
def run(tmp_path: Path) -> corolla.Run:
    rows = {str(i): {"accuracy-before": 0.5 + i / 10} for i in range(3)}
    overlap = [[1.0, 0.25, None], [0.25, 1.0, 0.5], [None, 0.5, 1.0]]
    records = [record(1, rows, overlap=overlap), record(2, rows)]
    path = folder(tmp_path / "run", records, figures=(Matrix("overlap", "Overlap"),), method="fedcac", num_clients=3)
    return corolla.load(path)


def test_pairs_have_a_row_for_each_number_between_two_clients(run: corolla.Run) -> None:
    pairs = run.pairs
    assert pairs.index.names == ["round", "client", "other"]
    assert len(pairs) == 7 and set(pairs.index.get_level_values("round")) == {1}
    assert pairs.loc[1, 0, 1]["overlap"] == 0.25 and (1, 0, 2) not in pairs.index


def test_a_run_without_numbers_between_clients_has_no_pairs(tmp_path: Path) -> None:
    rows = {str(i): {"accuracy-before": 0.5} for i in range(3)}
    pairs = corolla.load(folder(tmp_path / "run", [record(1, rows)], num_clients=3)).pairs
    assert len(pairs) == 0 and pairs.index.names == ["round", "client", "other"]


def test_pictures_are_charts_that_can_be_changed_and_saved(run: corolla.Run, tmp_path: Path) -> None:
    assert {"accuracy", "clients", "overlap"} <= {*dir(run.plot)} and "overlap(): " in repr(run.plot)
    chart = run.plot.clients()
    assert isinstance(chart, altair.TopLevelMixin)
    rule = altair.Chart(pandas.DataFrame({"at": [50.0]})).mark_rule().encode(x="at:Q")
    (chart + rule).properties(title="July").save(tmp_path / "clients.svg")
    assert "July" in (tmp_path / "clients.svg").read_text()
    for name in dir(run.plot):
        getattr(run.plot, name)().save(tmp_path / f"{name}.svg")


def test_a_picture_that_the_run_does_not_have(run: corolla.Run) -> None:
    with pytest.raises(AttributeError, match=r"'attention'.*overlap"):
        _ = run.plot.attention
