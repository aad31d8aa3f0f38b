"""Reports of interrupted, damaged and missing runs."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

import pytest

from corolla.report import page as report
from corolla.report.arrays import read_run
from fl_app.errors import UserError
from fl_app.server.run_folder import read_metrics
from tests.facts import mentions
from tests.report.builders import folder, record, write


def test_an_interrupted_run_reports_what_there_is(
    fedcac: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (fedcac / "metrics.jsonl").read_text().splitlines()
    run = folder(tmp_path / "cut", [], finished=False, method="fedcac", num_server_rounds=8)
    (run / "metrics.jsonl").write_text("\n".join([lines[0], "{garbage", *lines[2:5], "7", lines[5][:200]]))
    shutil.copytree(fedcac / "matrices", run / "matrices")
    monkeypatch.setattr(logging.getLogger("corolla"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="corolla"):
        assert [r["round"] for r in read_metrics(run)] == [1, 3, 4, 5]
    assert [int(n) for n in re.findall(r"line (\d+) is not a round", caplog.text)] == [2, 6, 7]
    page, names = write(tmp_path / "out", run)
    assert mentions(page, "is not finished", "last recorded round", "is 5 of 8")
    assert mentions(page, "no readable", "round 2") and "round 4" in page
    assert {"accuracy", "clients", "overlap-1", "collaborators-1"} <= names


@pytest.mark.parametrize(
    "line",
    [
        "null",
        "[]",
        '{"round": 0}',
        '{"round": true}',
        '{"round": 2, "clients": []}',
        '{"round": 2, "clients": {"0": 3}}',
        '{"round": 2, "accuracy-before": "x"}',
        '{"round": 2, "failures": ["x"]}',
        '{"round": 2, "evaluation": 1}',
        '{"round": 2, "evaluation": {"clients": []}}',
        "\0\0",
        "",
    ],
)
def test_a_line_that_is_no_record_of_a_round_is_skipped(line: str, tmp_path: Path) -> None:
    run = folder(tmp_path / "r", [record(t, {"0": {"accuracy-before": 0.5}}) for t in (1, 3)], num_server_rounds=3)
    path = run / "metrics.jsonl"
    first, last = path.read_text().splitlines()
    path.write_text(f"{first}\n{line}\n{last}\n")
    assert [r["round"] for r in read_metrics(run)] == [1, 3]
    assert read_run(run).missing == [2]


def test_a_record_that_lacks_everything_harms_nobody(tmp_path: Path) -> None:
    run = folder(tmp_path / "r", [record(t, {"0": {"accuracy-before": 0.5}}) for t in (1, 3)], num_server_rounds=3)
    path = run / "metrics.jsonl"
    first, last = path.read_text().splitlines()
    path.write_text(f'{first}\n{{"round": 2}}\n{last}\n')
    page, names = write(tmp_path / "out", run)
    assert "no readable record" not in page and "accuracy" in names


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_any_round_has_no_pictures_and_says_so(fedavg: Path, tmp_path: Path) -> None:
    run = folder(tmp_path / "early", [], finished=False, num_server_rounds=5)
    page, names = write(tmp_path / "out", run)
    assert mentions(page, "no round is", "recorded") and not names and "<figure" not in page
    page, names = write(tmp_path / "out", fedavg, run)
    assert mentions(page, "no round is", "recorded") and "accuracy" in names


def test_paths_that_are_no_runs_are_all_named(fedavg: Path, tmp_path: Path) -> None:
    (tmp_path / "hollow").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.toml").write_text("= nothing")
    with pytest.raises(UserError) as error:
        report.write_report([fedavg, tmp_path / "gone", tmp_path / "hollow", tmp_path / "bad"], tmp_path / "out")
    for word in (
        "gone: no such file or directory",
        "hollow: this run folder holds no run",
        "bad is not a run folder",
    ):
        assert word in str(error.value)
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output: cannot write"):
        report.write_report([fedavg], tmp_path / "file")
