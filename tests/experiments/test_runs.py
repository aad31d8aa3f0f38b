"""Run folders as results: found one by one, in folders of them, and by their experiment's id; read as far as they go."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from corolla.experiments.runs import RecordedRun, by_experiment, find, inside
from fl_app.errors import UserError
from tests.facts import each_mentions, mentions, rejected


def folder(path: Path, experiment: str = "e", finished: bool = True) -> Path:
    path.mkdir(parents=True)
    (path / "config.toml").write_text("seed = 3\n\n[fedcac]\ntau = 0.5\n")
    (path / "run.json").write_text(json.dumps({"experiment": experiment, "starts": 0}))
    (path / "metrics.jsonl").write_text('{"round": 2}\nhalf a li\n{"round": 1}\n')
    if finished:
        (path / "summary.json").write_text('{"rounds": 2}')
    return path


def test_a_folder_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    done, begun = RecordedRun(folder(tmp_path / "a")), RecordedRun(folder(tmp_path / "b", finished=False))
    assert done.settings == {"seed": 3, "fedcac.tau": 0.5}
    assert list(done.rounds) == [1, 2] and done.clients == {}
    assert done.finished and done.summary == {"rounds": 2}
    assert not begun.finished
    with pytest.raises(UserError, match="did not finish"):
        begun.summary  # noqa: B018
    with rejected(UserError, "", "run folder"):
        RecordedRun(tmp_path).settings  # noqa: B018


def test_paths_and_folders_of_runs_are_found_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = folder(tmp_path / "a"), folder(tmp_path / "b", finished=False)
    (tmp_path / "logs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert [run.path for run in find([b, tmp_path, Path("a")])] == [b, a]
    (folder(tmp_path / "c" / "bad") / "config.toml").write_text("seed =")
    with pytest.raises(UserError) as caught:
        find([a, tmp_path / "logs", tmp_path / "nowhere", tmp_path / "c"])
    *lines, bad = str(caught.value).splitlines()
    assert mentions(bad, f"{tmp_path / 'c' / 'bad'}", "run folder") and "not valid TOML" in bad
    assert each_mentions(
        lines,
        (tmp_path / "logs", "run folder", "no run (no", "config.toml", "neither do", "folders"),
        (tmp_path / "nowhere", "no such file", "directory"),
    )


def test_runs_that_left_nothing_are_seen_too(tmp_path: Path) -> None:
    a = folder(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / ".lock").touch()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").touch()
    (tmp_path / "plugged" / "plugins").mkdir(parents=True)
    (tmp_path / "plugged" / ".lock").touch()
    assert [run.path for run in inside(tmp_path)] == [a, tmp_path / "empty", tmp_path / "locked", tmp_path / "plugged"]


def test_experiments_are_found_in_sweeps_too(tmp_path: Path) -> None:
    a, b = folder(tmp_path / "a", "one"), folder(tmp_path / "sweep" / "b", "two")
    os.truncate(folder(tmp_path / "c") / "run.json", 5)
    assert {name: run.path for name, run in by_experiment(tmp_path).items()} == {"one": a, "two": b}
