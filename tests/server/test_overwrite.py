"""A run in place of another one of its name: only where that is a run, and only when the new one is about to start."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from corolla.experiments.runs import RecordedRun
from fl_app.config import parse
from fl_app.errors import UserError
from fl_app.files import explain_full_disk
from fl_app.server import run_folder
from fl_app.server.run_folder import RunFolder, check_free
from strategies import METHOD_PARAMS
from tests.conftest import Command, Run
from tests.facts import mentions, rejected


def test_a_run_replaces_the_one_of_its_name(run: Run, tmp_path: Path) -> None:
    old = run(num_server_rounds=1)
    (old.path / "notes.txt").write_text("mine")
    with rejected(UserError, "", "exists already", "choose another name", "remove", "overwrite = true replaces"):
        run(num_server_rounds=2)
    new = run(num_server_rounds=2, overwrite=True)
    assert new.path == old.path and new.experiment != old.experiment
    assert RecordedRun(new.path).summary["rounds"] == 2 and not (new.path / "notes.txt").exists()
    # a run that is continued replaces nothing, and nothing is left aside
    assert RecordedRun(new.path).settings["overwrite"] is False
    assert [path.name for path in new.path.parent.iterdir()] == ["run"]
    assert run(run_name="new", overwrite=True).path.name == "new"


def test_the_old_run_stays_until_the_new_one_is_about_to_start(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = run(num_server_rounds=1)
    before = {path: path.read_bytes() for path in old.path.rglob("*") if path.is_file()}

    def unchanged() -> bool:
        return {path: path.read_bytes() for path in old.path.rglob("*") if path.is_file()} == before

    with pytest.raises(UserError):
        run(overwrite=True, train_samples=100_000)
    assert unchanged()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "publish_text", full)
        with pytest.raises(UserError, match="No space left"), explain_full_disk("output-dir", tmp_path):
            run(overwrite=True)
    assert unchanged() and [path.name for path in old.path.parent.iterdir()] == ["run"]


def test_a_place_that_cannot_have_runs_is_told_before_they_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in ("file", "file/runs"):
        with rejected(UserError, "output-dir", "file is no directory", place):
            check_free(parse({"output-dir": str(tmp_path / place)}, METHOD_PARAMS))
    check_free(parse({"output-dir": str(tmp_path / "new" / "runs")}, METHOD_PARAMS))


def test_what_is_no_run_is_never_removed(tmp_path: Path, run: Run) -> None:
    runs = tmp_path / "runs"

    def check(name: str = "x", **keys: object) -> None:
        raw = {"run-name": name, "output-dir": str(runs), "overwrite": True, "dataset": "digits", **keys}
        config = parse(raw, METHOD_PARAMS)
        check_free(config)
        RunFolder.create(config, "new").close()

    (runs / "x").mkdir(parents=True)
    (runs / "x" / "thesis.tex").write_text("all of it")
    with rejected(UserError, "overwrite", "x", "run folder", "choose another run-name", "remove it yourself"):
        check()
    # another program's config.toml
    (runs / "x" / "config.toml").write_text('title = "mine"\n')
    with rejected(UserError, "overwrite", "no run folder"):
        check()
    # a folder of runs
    one = run(run_name="one")
    sweep = runs / "sweep"
    sweep.mkdir()
    one.path.rename(sweep / "one")
    for name in ("config.toml", "run.json"):
        (sweep / name).write_bytes((sweep / "one" / name).read_bytes())
    with rejected(UserError, "overwrite", "sweep is no", "run folder"):
        check("sweep")
    (runs / "link").symlink_to(sweep / "one")
    with rejected(UserError, "overwrite", "link is no", "run folder"):
        check("link")
    file = runs / "file"
    file.write_text("a file")
    with rejected(UserError, "overwrite", "file is no", "run folder"):
        check("file")
    assert file.read_text() == "a file" and (runs / "x" / "thesis.tex").exists() and (sweep / "one").is_dir()
    with rejected(UserError, "overwrite", "needs the run-name", "run to remove"):
        check("")


def test_a_run_that_goes_on_or_is_read_is_not_removed(tmp_path: Path, run: Run, command: Command) -> None:
    old = run()
    for key, value in {
        "initial-weights": str(old.path / "models" / "global.safetensors"),
        "dataset": f"npz:{old.path}/data.npz",
        "data-dir": str(old.path),
    }.items():
        raw = {"run-name": "run", "output-dir": str(tmp_path / "runs"), "overwrite": True, key: value}
        with rejected(UserError, "overwrite", f"{key} lies in {old.path}", "removed"):
            check_free(parse(raw, METHOD_PARAMS))
    words = ["run", "--in-process", "--overwrite", "--output-dir", tmp_path / "runs", "--set", "run-name=run"]
    with (old.path / ".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        code, out, err = command(*words)
        assert code == 2 and out == "" and mentions(err, "run is still", "another process", "end that first")
    assert json.loads((old.path / "run.json").read_text())["experiment"] == old.experiment


def test_the_option(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["run", "--in-process", "--clients", "2"]
    sets = ["--set", "num-server-rounds=1", "--set", "local-epochs=1", "--set", "train-samples=20"]
    assert command(*words, *sets, "--set", "run-name=a")[0] == 0
    first = json.loads(Path("runs/a/run.json").read_text())["experiment"]
    code, out, err = command(*words, *sets, "--set", "run-name=a", "--overwrite")
    assert code == 0 and mentions(out, "runs/a was overwritten", "earlier run", "removed"), err
    assert json.loads(Path("runs/a/run.json").read_text())["experiment"] != first
    code, _, err = command(*words, *sets, "--overwrite")
    assert code == 2 and mentions(err, "overwrite", "needs the run-name", "run to remove")
    code, _, err = command("run", "--in-process", "--resume", "runs/a", "--overwrite")
    assert code == 2 and mentions(err, "--resume and --overwrite", "each other")


def test_a_run_that_another_process_began_meanwhile_is_not_removed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(num_server_rounds=1)
    make, others = vars(run_folder)["make_directory"], list[RunFolder]()

    def later(path: Path, **options: bool) -> None:
        if path.name == "run" and not others:
            monkeypatch.undo()
            others.append(run(num_server_rounds=1, overwrite=True))
        make(path, **options)

    monkeypatch.setattr(run_folder, "make_directory", later)
    with rejected(UserError, "run-name", "another process", "run meanwhile", "should replace"):
        run(num_server_rounds=1, overwrite=True)
    (other,) = others
    assert RecordedRun(other.path).summary["experiment"] == other.experiment
    assert len([*other.path.parent.glob(".run.overwritten-*/summary.json")]) == 1
