"""`corolla sweep FILE --optuna N`: trials chosen by validation data, in a study that goes on where it was interrupted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from corolla.experiments import sweep as sweeping
from corolla.experiments.sweep import Range, Sweep
from fl_app.errors import UserError
from tests.conftest import Command
from tests.facts import mentions, rejected

pytest.importorskip("optuna", reason="optuna is not installed")
from corolla.experiments.search import STUDY, Drawn, Study

SPACE: dict[str, Any] = {
    "learning-rate": Range(0.001, 1.0, log=True),
    "local-epochs": Range(1, 4),
    "optimizer": ["sgd", "adam"],
}
FILE = """
[settings]
num-clients = 2
num-server-rounds = 2
train-samples = 40
method = "fedavg"
{settings}

[grid]
seed = [0, 1]

[search]
learning-rate = {{ low = 0.001, high = 1.0, log = true }}
optimizer = ["sgd", "adam"]
"""


def figure(drawn: Drawn) -> float:
    return -abs(math.log10(float(drawn.values["learning-rate"])) + 2) - float(drawn.values["local-epochs"])


def trials(directory: Path, count: int) -> list[Drawn]:
    """Do some trials of one command, and return all trials so far."""
    directory.mkdir(exist_ok=True)
    study = Study(directory, Sweep(search=SPACE), {})
    for _ in range(count):
        drawn = study.ask()
        # every fifth trial's runs fail
        study.tell(drawn, None if drawn.number % 5 == 0 else figure(drawn), True)
    return study.trials


def test_an_interrupted_study_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = trials(tmp_path / "a", 18)
    for count in (3, 9, 6):
        trials(tmp_path / "b", count)
        # ended within a trial
        Study(tmp_path / "b", Sweep(search=SPACE), {}).ask()
    assert trials(tmp_path / "b", 0) == whole
    values = [drawn.values for drawn in whole]
    assert [drawn.number for drawn in whole] == list(range(1, 19))
    assert all(0.001 <= v["learning-rate"] <= 1 and v["local-epochs"] in (1, 2, 3, 4) for v in values)  # type: ignore[operator]
    assert {type(v["local-epochs"]) for v in values} == {int} and {v["optimizer"] for v in values} == {"sgd", "adam"}
    # it finds what is better
    assert max(map(figure, whole[10:])) > max(map(figure, whole[:5]))


def test_a_study_belongs_to_its_search(tmp_path: Path) -> None:
    trials(tmp_path, 1)
    for sweep, given in (
        (Sweep(search={**SPACE, "optimizer": ["sgd", "adamw"]}), {}),
        (Sweep(search=SPACE), {"seed": 1}),
    ):
        with rejected(UserError, "--optuna", "study of another", "search"):
            Study(tmp_path, sweep, given)


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ("momentum = 0.5", "momentum: must be a list of values, or a table"),
        ("momentum = [0.5]", "momentum: must be a list"),
        ("momentum = { low = 0.5 }", "momentum: must be a list of values, or a table"),
        ("momentum = { low = 0.5, high = 0.1 }", "low < high"),
        ("momentum = { low = 0, high = 0.5, log = true }", "both above 0 with log"),
        ('momentum = { low = "a", high = "b" }', "low < high"),
        ("seed = [0, 1]", r"seed: belongs in \[grid\]"),
        ("batch-size = [8, 16]", "batch-size: belongs in one part"),
    ],
)
def test_a_search_that_makes_no_sense(tmp_path: Path, search: str, said: str) -> None:
    (tmp_path / "s.toml").write_text(f"[settings]\nbatch-size = 10\n[search]\n{search}\n")
    with pytest.raises(UserError, match=said):
        sweeping.read_sweep(tmp_path / "s.toml")


def test_a_search_runs_chooses_by_validation_data_and_goes_on(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COROLLA_STATE_DIR", str(tmp_path / "state"))
    Path("s.toml").write_text(FILE.format(settings="validation-ratio = 0.2"))
    code, out, err = command("sweep", "s.toml", "--in-process", "--optuna", "2")
    assert code == 0, err
    folder = tmp_path / "runs" / "s"
    done = {path: path.stat().st_mtime_ns for path in folder.glob("*/summary.json")}
    assert len(done) == 4 and (folder / STUDY).is_file()
    assert mentions(out, "best of all", "validation accuracy") and "trial 2 of 2" in out
    # the study's figures are those of the validation data, over the seeds
    import optuna

    study = optuna.load_study(study_name="corolla", storage=f"sqlite:///{folder / STUDY}")
    summaries = [json.loads(path.read_text()) for path in done]
    mean = sum(one["final-validation-accuracy"] for one in summaries) / 4
    assert sum(trial.value for trial in study.trials) / 2 == pytest.approx(mean)
    code, out, err = command("sweep", "s.toml", "--in-process", "--optuna", "3")
    assert code == 0 and "trial 3 of 3" in out and "trial 2 of 3" not in out, err
    assert all(path.stat().st_mtime_ns == before for path, before in done.items())
    assert len(list(folder.glob("*/summary.json"))) == 6


@pytest.mark.parametrize(
    ("settings", "words", "said"),
    [
        ("", ("--optuna", "2"), "set validation-ratio above 0"),
        ("validation-ratio = 0.2", (), r"has a [search]: give the number of trials"),
        ("validation-ratio = 0.2", ("--optuna", "2", "--dry-run"), "--optuna and --dry-run exclude each other"),
        ("validation-ratio = 0.2", ("--optuna", "2", "--best-by", "test"), "--optuna and --best-by exclude each other"),
    ],
)
def test_what_no_search_can_do(
    tmp_path: Path, command: Command, settings: str, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "s.toml").write_text(FILE.format(settings=settings))
    code, _, err = command("sweep", tmp_path / "s.toml", "--in-process", "--output-dir", tmp_path / "out", *words)
    assert code == 2 and said in " ".join(err.split()), err
    (tmp_path / "plain.toml").write_text("[settings]\nnum-clients = 2\n")
    code, _, err = command("sweep", tmp_path / "plain.toml", "--optuna", "2")
    assert code == 2 and "has no [search]" in " ".join(err.split())
