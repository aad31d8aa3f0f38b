"""`corolla.load` and `corolla.compare`: run folders that are there, whole or damaged."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pandas
import pytest

import corolla
from corolla import cli
from fl_app.errors import UserError
from tests.api.conftest import Start
from tests.facts import rejected


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_in_a_line(path: Path) -> None:
    lines = path.read_text().splitlines()
    *whole, half = lines[: len(lines) // 2]
    path.write_text("\n".join([*whole, half.partition("=")[0]]))


def drop_round(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "half a config": ("config.toml", cut_in_a_line, "is not a run folder: .*config.toml"),
    "no config": ("config.toml", Path.unlink, r"holds no run \(no config.toml\)"),
    "half a summary": ("summary.json", cut, "summary.json cannot be read"),
    "a summary of another kind": (
        "summary.json",
        lambda p: p.write_text("[]"),
        "summary.json cannot be read: must hold a table",
    ),
    "half of the rounds": ("metrics.jsonl", cut, "metrics.jsonl: no readable record of round"),
    "a round less": ("metrics.jsonl", drop_round, "metrics.jsonl: no readable record of round 1"),
    "no rounds": ("metrics.jsonl", Path.unlink, "metrics.jsonl: no readable record of round 1, 2"),
    "half of the clients": ("clients.json", cut, "clients.json cannot be read"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_damaged_is_named(start: Start, case: str) -> None:
    path = start().path
    assert corolla.load(path).summary["rounds"] == 2
    name, damage, said = DAMAGE[case]
    damage(path / name)
    with pytest.raises(UserError, match=said):
        corolla.load(path)


def test_a_run_may_be_the_reference(start: Start) -> None:
    first, second = start(run_name="a"), start(run_name="b", method="local")
    assert list(corolla.compare([first, second], reference=second)["method"]) == ["local", "fedavg"]
    assert list(corolla.compare([first, second], reference=first.path)["method"]) == ["fedavg", "local"]


def test_an_interrupted_run_has_its_rounds(start: Start) -> None:
    found = start()
    (found.path / "summary.json").unlink()
    again = corolla.load(str(found.path))
    assert again.state == "interrupted" and len(again.rounds) == 2 and "interrupted" in again._repr_html_()
    with rejected(UserError, "", "run did not", "finish"):
        again.summary  # noqa: B018
    with rejected(UserError, "", "run did not", "finish"):
        again.model()


def test_a_folder_of_runs_is_no_run(start: Start, tmp_path: Path) -> None:
    for name in ("a", "b"):
        start(run_name=name)
    with rejected(UserError, "", "runs", "holds several", "compare them all"):
        corolla.load(tmp_path / "runs")
    with rejected(UserError, "", "none", "no such file", "directory"):
        corolla.load(tmp_path / "none")


def test_compare_is_the_commands_table_as_numbers(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        start(method=m, seed=s, run_name=f"{m}-{s}", num_server_rounds=1) for m in ("fedavg", "local") for s in (0, 1)
    ]
    (runs[3].path.parent / "half").mkdir()
    (runs[3].path.parent / "half" / "config.toml").write_text((runs[3].path / "config.toml").read_text())
    capsys.readouterr()
    frame = corolla.compare([*runs, tmp_path / "runs" / "half"])
    assert "skipped, not finished" in capsys.readouterr().err
    pandas.testing.assert_frame_equal(frame, corolla.compare(tmp_path / "runs"))

    assert list(frame["method"]) == ["fedavg", "local"] and list(frame["n"]) == [2, 2]
    finals = [[run.summary["final-accuracy"] for run in runs[k : k + 2]] for k in (0, 2)]
    assert list(frame["final-accuracy"]) == pytest.approx([sum(pair) / 2 for pair in finals])
    assert frame["final-accuracy-std"][0] == pytest.approx(pandas.Series(finals[0]).std())
    assert list(frame["verdict"])[0] == "(first)" and frame["seeds"][1] == 2 and pandas.isna(frame["difference"][0])

    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["corolla", "compare", str(tmp_path / "runs")])
    with pytest.raises(SystemExit):
        cli.main()
    printed = capsys.readouterr().out
    for row in frame.to_dict("records"):
        assert f"{100 * row['final-accuracy']:.2f} ± {100 * row['final-accuracy-std']:.2f}" in printed
    assert f"{100 * frame['difference'][1]:+.2f}" in printed and frame["verdict"][1] in printed
    by_client = frame["by-client"][1]
    assert len(by_client) == frame["pairs"][1] and sum(by_client.values()) / len(by_client) == frame["difference"][1]


def test_compare_of_nothing_finished_is_an_error(start: Start) -> None:
    found = start()
    (found.path / "summary.json").unlink()
    with pytest.raises(UserError, match="no finished run"):
        corolla.compare([found])
    with rejected(UserError, "", "no runs", "compare", "name run folders"):
        corolla.compare([])


def test_what_a_run_keeps_for_loading_its_model(start: Start) -> None:
    about = json.loads((start().path / "run.json").read_text())
    assert about["shape"] == {"in_channels": 1, "num_classes": 10, "image_size": 8, "input_shape": []}
