"""`keep-best`: the models of the round that was best on validation data are a run's models, and their figures its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import corolla
from corolla.experiments.exported.export import export
from corolla.experiments.runs import RecordedRun
from fl_app.errors import ConfigurationError
from fl_app.server import checkpoint
from fl_app.server.run_folder import RunFolder
from strategies import METHODS
from tests.conftest import Run, config
from tests.experiments.months import cancer

# the learning rate is too high: the best round is not the last one
SETTINGS: dict[str, Any] = {
    "keep_best": True,
    "validation_ratio": 0.25,
    "evaluate_every": 1,
    "num_server_rounds": 6,
    "checkpoint_every": 4,
    "learning_rate": 2.0,
    "train_samples": 40,
    "seed": 2,
}


def best_of(run: RecordedRun) -> int:
    values = {t: evaluation["validation-accuracy"] for t, evaluation in run.evaluations.items()}
    return min(t for t in values if values[t] == max(values.values()))


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedcac"])
def test_the_models_of_the_best_round_are_the_runs(run: Run, method: str) -> None:
    folder = run(**SETTINGS, method=method, collect_personal_models=True)
    recorded = RecordedRun(folder.path)
    best = best_of(recorded)
    assert best < 6, "choose other settings: the last round is the best"
    summary, evaluation = recorded.summary, recorded.evaluations[best]
    assert summary["kept-round"] == best and summary["rounds"] == 6
    assert summary["digest"] == evaluation["digest"] != recorded.evaluations[6]["digest"]
    assert summary["final-accuracy"] == evaluation["accuracy"]
    assert recorded.last_evaluation == (best, evaluation)
    # each model's hash is that of the client in the best round's evaluation
    for client in range(3):
        assert corolla.load(folder.path).model(client) is not None
    _, card = export(folder.path, METHODS, 1, folder.path / "one.pt")
    assert card["metrics"]["accuracy"] == evaluation["clients"]["1"]["accuracy"]
    straight = run(**{**SETTINGS, "num_server_rounds": best, "keep_best": False}, method=method, run_name="straight")
    assert RecordedRun(straight.path).summary["digest"] == summary["digest"]


@pytest.mark.parametrize("stop_after", [2, 5])
def test_a_resumed_run_keeps_the_same_round(run: Run, monkeypatch: pytest.MonkeyPatch, stop_after: int) -> None:
    whole = RecordedRun(run(**SETTINGS, method="fedper", run_name="whole").path).summary
    asked = iter([False] * (stop_after - 1) + [True])
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "asked_to_stop", lambda self: next(asked))
        cut = run(**SETTINGS, method="fedper", run_name="cut").path
    assert len(RecordedRun(cut).rounds) == stop_after
    run(**SETTINGS, method="fedper", run_name="cut", resume=str(cut))
    resumed = RecordedRun(cut).summary
    same = ("kept-round", "digest", "final-accuracy")
    assert [resumed[name] for name in same] == [whole[name] for name in same]


def test_only_the_best_rounds_checkpoint_stays_beside_the_newest(run: Run) -> None:
    folder = run(**SETTINGS, method="fedavg")
    best = best_of(RecordedRun(folder.path))
    there = checkpoint.rounds(folder.path)
    assert best in there and there[-1] == 6 and len(there) <= 3
    kept = checkpoint.load_latest(folder.path, best)
    assert kept.meta["round"] == best


def test_rounds_without_the_key_are_not_marked(run: Run) -> None:
    folder = run(**{**SETTINGS, "keep_best": False, "num_server_rounds": 2})
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert all("kept" not in json.loads(line)["evaluation"] for line in lines)
    assert "kept-round" not in RecordedRun(folder.path).summary


@pytest.mark.parametrize("name", ["validation_ratio", "evaluate_every", "report_accuracy"])
def test_it_needs_figures_to_judge_by(name: str) -> None:
    given = {"keep_best": True, "validation_ratio": 0.1, "evaluate_every": 2, "report_accuracy": True}
    with pytest.raises(ConfigurationError) as refused:
        config(**{**given, name: type(given[name])(0)})
    assert refused.value.key == "keep-best" and name.replace("_", "-") in refused.value.rule


def test_sites_keep_their_models_of_the_best_round(run: Run, tmp_path: Path, site_dir: Path) -> None:
    files = [cancer(tmp_path / f"{k}.csv", slice(k, None, 3)) for k in range(3)]
    setting = {**SETTINGS, "dataset": "node", "target": "kind", "classes": "malignant,benign", "method": "fedper"}
    setting |= {"learning_rate": 0.1, "seed": 0}
    folder = run(**setting, node_configs={k: {"data-path": str(file)} for k, file in enumerate(files)})
    recorded = RecordedRun(folder.path)
    best = best_of(recorded)
    assert best < 6, "choose other settings: the last round is the best"
    for client, row in recorded.evaluations[best]["clients"].items():
        (own,) = site_dir.glob(f"models/*-{client}/*/summary.json")
        told = json.loads(own.read_text())
        assert (told["rounds"], told["digest"]) == (best, row["sha256"])
        assert row["sha256"] != recorded.evaluations[6]["clients"][client]["sha256"]


def test_a_private_run_keeps_the_best_round(run: Run) -> None:
    folder = run(**SETTINGS, method="fedavg", private=True)
    recorded = RecordedRun(folder.path)
    best = best_of(recorded)
    assert recorded.summary["kept-round"] == best < 6
    assert recorded.summary["digest"] == recorded.evaluations[best]["digest"]


def test_another_run_goes_on_from_the_kept_round(run: Run) -> None:
    june = run(**SETTINGS, method="fedper", run_name="june", keep_state=True)
    assert best_of(RecordedRun(june.path)) < 6
    july = run(
        method="fedper",
        run_name="july",
        from_run=str(june.path),
        num_server_rounds=1,
        learning_rate=1e-12,
        **{name: SETTINGS[name] for name in ("validation_ratio", "train_samples", "seed")},
    )
    first = RecordedRun(july.path).rounds[1]["clients"]
    kept = RecordedRun(june.path).last_evaluation[1]["clients"]
    assert {i: row["loss-before"] for i, row in first.items()} == pytest.approx({i: kept[i]["loss"] for i in first})
