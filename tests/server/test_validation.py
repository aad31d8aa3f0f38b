"""Validation data: kept out of training, the same in every mode; early stopping, and a run's models of its best round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import corolla
from corolla.api.one_run import is_finished
from corolla.cli.output import of_run
from corolla.experiments import result_table
from corolla.experiments.exported.export import export
from corolla.experiments.runs import RecordedRun, listing
from fl_app import data
from fl_app.data import validation
from fl_app.errors import ConfigurationError, DataError, UserError
from fl_app.metrics import best_validated, outcome
from fl_app.server import checkpoint
from fl_app.server.run_folder import RunFolder, read_metrics
from fl_app.stopping import StopRule, rule_of
from fl_app.tasks import ACCURACY
from strategies import METHOD_PARAMS, METHODS
from tests.conftest import Command, Run, config
from tests.experiments.months import cancer
from tests.facts import mentions, rejected


def test_a_split_is_stratified_and_by_seed_and_client() -> None:
    labels = np.array([0] * 20 + [1] * 10 + [2])
    train, held = validation.split(labels, 0.2, seed=0, client_id=3, by_class=True)
    # 31 * 0.2 = 6.2; of the class with one sample none, of the others in proportion
    assert np.bincount(labels[held], minlength=3).tolist() == [4, 2, 0]
    assert sorted([*train, *held]) == list(range(31)) and list(train) == sorted(train)
    again = validation.split(labels, 0.2, seed=0, client_id=3, by_class=True)
    assert np.array_equal(held, again[1])
    for changes in ({"seed": 1}, {"client_id": 4}):
        other = validation.split(labels, 0.2, **{"seed": 0, "client_id": 3, "by_class": True} | changes)
        assert not np.array_equal(held, other[1])


@pytest.mark.parametrize(
    ("labels", "ratio", "size"),
    [([0, 1], 0.1, 1), ([0, 0], 0.9, 1), ([0, 1, 2, 3], 0.5, 1), ([0, 0, 1, 1], 0.9, 2), ([5] * 10, 0.25, 3)],
)
def test_few_samples_have_a_floor(labels: list[int], ratio: float, size: int) -> None:
    train, held = validation.split(np.array(labels), ratio, seed=0, client_id=0, by_class=True)
    assert len(held) == size and len(train) == len(labels) - size


def test_one_sample_cannot_be_divided(run: Run) -> None:
    with rejected(DataError, "validation-ratio", "client 7 needs 2 training", "samples", "got 1"):
        validation.split(np.zeros((1, 2)), 0.5, seed=0, client_id=7, by_class=False)
    keys = config(validation_ratio=0.5, train_samples=1)
    with rejected(DataError, "validation-ratio", "client 0 needs 2 training", "samples"):
        data.check(keys)


def test_clients_with_few_are_named() -> None:
    assert mentions(
        data.partition_remarks(config(validation_ratio=0.1, train_samples=20), brief=True)[-1],
        "validation",
        "fewer than 10 samples",
        "choices depend",
        "client 0",
        "2",
        "client 1",
        "2",
        "client 2",
        "2",
    )
    assert not any("validation" in line for line in data.partition_remarks(config()))


def test_what_is_held_out_is_in_no_other_part() -> None:
    whole, divided = (data.open_client(config(validation_ratio=ratio), 1) for ratio in (0.0, 0.25))
    assert whole.validation is None and len(whole.x_validation) == 0
    assert len(divided.y_train) == 18 and len(divided.y_validation) == 6

    def images(samples: np.ndarray) -> list[bytes]:
        return sorted(image.tobytes() for image in samples)

    assert images(np.concatenate([divided.x_train, divided.x_validation])) == images(whole.x_train)
    assert np.array_equal(divided.x_test, whole.x_test)


def test_a_run_reports_validation_and_chooses_by_it(run: Run) -> None:
    path = run(validation_ratio=0.25, num_server_rounds=4, metrics="auc", evaluate_every=2, finetune_epochs=1).path
    records, recorded = list(read_metrics(path)), RecordedRun(path, METHOD_PARAMS)
    for record in records:
        for name in ("accuracy-before", "accuracy-after", "auc-before", "loss-before", "loss-after"):
            values = [row[f"validation-{name}"] for row in record["clients"].values()]
            known = [value for value in values if value is not None]
            assert record[f"validation-{name}"] == pytest.approx(np.mean(known))
        assert not any(name.startswith("validation-") and name.endswith("-pooled") for name in record)
        assert {row["train-samples"] for row in record["clients"].values()} == {18}
    chosen = max(records, key=lambda record: record["validation-accuracy-before"])
    summary, last = recorded.summary, records[-1]["evaluation"]
    assert summary["best-round"] == chosen["round"] and summary["best-accuracy"] == chosen["accuracy-before"]
    assert summary["best-validation-accuracy"] == chosen["validation-accuracy-before"]
    for name in ("accuracy", "auc", "accuracy-finetuned"):
        assert summary[f"final-validation-{name}"] == last[f"validation-{name}"]
    header, row = result_table.single_runs([recorded])
    assert row[header.index("validation")] == f"{100 * last['validation-accuracy']:.2f} %"
    assert mentions(result_table.chosen([recorded]), "chosen by validation", "data")


def test_validation_data_do_not_train(run: Run, tmp_path: Path) -> None:
    """Other labels there change what is measured on them, and no model."""
    g = np.random.default_rng(0)
    x = g.normal(size=(60, 3)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.float32)
    np.savez(tmp_path / "p.npz", **{f"{part}_idx_0": np.arange(60) for part in ("train", "test")})
    keys = {"partition": f"file:{tmp_path / 'p.npz'}", "num_clients": 1, "task": "regression", "validation_ratio": 0.2}
    _, held = validation.split(y, 0.2, seed=0, client_id=0, by_class=False)
    found = []
    for name, targets in (("a", y), ("b", np.where(np.isin(np.arange(60), held), y + 5, y))):
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=targets, x_test=x, y_test=y)
        found.append(RecordedRun(run(**keys, dataset=f"npz:{tmp_path / name}.npz", run_name=name).path).summary)
    assert found[0]["digest"] == found[1]["digest"] and found[0]["final-rmse"] == found[1]["final-rmse"]
    assert found[0]["final-validation-rmse"] < 1 < 4 < found[1]["final-validation-rmse"]


def test_without_a_split_nothing_is_reported(run: Run) -> None:
    path = run().path
    assert "validation" not in (path / "metrics.jsonl").read_text() + (path / "summary.json").read_text()


def test_the_best_round_is_the_first_of_the_best() -> None:
    rounds: list[dict[str, Any]] = [
        {"round": t, "accuracy-before": test, "validation-accuracy-before": held}
        for t, (test, held) in enumerate([(0.9, 0.1), (0.5, 0.7), (0.8, 0.7), (0.95, None)], 1)
    ]
    best = best_validated(rounds, ACCURACY)
    assert best is not None and best["round"] == 2
    assert outcome(rounds, [ACCURACY])["best-accuracy"] == 0.5
    assert outcome([{**r, "validation-accuracy-before": None} for r in rounds], [ACCURACY])["best-accuracy"] == 0.95


# Early stopping -------------------------------------------------------------------------------------------------------


def rounds_of(*values: float | None) -> list[dict[str, Any]]:
    return [{"round": t, "x": value} for t, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("values", "higher", "margin", "ends"),
    [
        ([0.1, 0.2, 0.2, 0.2], True, 0.0, True),
        ([0.1, 0.2, 0.2], True, 0.0, False),
        ([0.1, 0.2, 0.3, 0.4], True, 0.15, False),
        ([0.1, 0.2, 0.15, 0.21], True, 0.05, True),
        ([0.5, 0.6, 0.7], False, 0.0, True),
        ([0.5, 0.4, 0.45], False, 0.0, False),
        ([None, 0.5, None, None], True, 0.0, True),
        ([None, None, None], True, 0.0, False),
        ([], True, 0.0, False),
    ],
)
def test_when_a_rule_ends_a_run(values: list[float | None], higher: bool, margin: float, ends: bool) -> None:
    rule = StopRule("x", "x", higher, 2, margin)
    assert bool(rule.ended(rounds_of(*values))) == ends


def test_why_it_ended_is_said() -> None:
    rule = StopRule("validation-accuracy", "x", True, 2, 0.01)
    assert mentions(
        rule.ended(rounds_of(0.1, 0.5, 0.505, 0.4)),
        "stop-when",
        "validation-accuracy was 0.5",
        "round 2",
        "not better by 0.01",
        "2 rounds since",
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stop_when": "soon"}, "stop-when: must be `NAME: N rounds without better`, .* got 'soon'"),
        ({"stop_when": "accuracy: 0 rounds without better"}, "stop-when: must be `NAME"),
        ({"stop_when": "acuracy: 3 rounds without better"}, "must watch one of accuracy, .*; did you mean accuracy"),
        (
            {"stop_when": "auc: 3 rounds without better"},
            "must watch one of accuracy, validation-accuracy, .* got 'auc'",
        ),
        (
            {"stop_when": "validation-accuracy: 3 rounds without better"},
            "needs validation data, and validation-ratio is 0",
        ),
        ({"stop_when": "accuracy: 3 rounds without better", "report_accuracy": False}, "report-accuracy = false"),
        ({"stop_when": "loss: 3 rounds without better", "dp_epsilon": 3.0}, "must watch one of"),
    ],
)
def test_rules_that_cannot_be(run: Run, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        run(**changes)


def test_which_figures_can_be_watched() -> None:
    found = rule_of(config(stop_when="validation-loss: 1 round without better by 1e-3", validation_ratio=0.1))
    assert found == StopRule("validation-loss", "validation-loss-before", False, 1, 0.001)
    found = rule_of(config(stop_when="auc: 12 rounds without better", metrics="auc"))
    assert found == StopRule("auc", "auc-before", True, 12)
    assert rule_of(config(stop_when="loss: 2 rounds without better")) == StopRule("loss", "loss", False, 2)
    assert rule_of(config()) is None


STOPPING = {
    "validation_ratio": 0.25,
    # nothing gains so much: the second round is no better, nor the third
    "stop_when": "validation-accuracy: 2 rounds without better by 0.9",
    "num_server_rounds": 8,
}


def test_a_run_ends_early_and_is_finished(run: Run, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run(**STOPPING, keep_state=True).path
    recorded = RecordedRun(path, METHOD_PARAMS)
    assert recorded.finished and list(recorded.rounds) == [1, 2, 3] and list(recorded.evaluations) == [3]
    summary = recorded.summary
    assert summary["rounds"] == 3 and summary["stopped-early"].startswith("stop-when: validation-accuracy was ")
    assert summary["final-accuracy"] is not None and summary["digest"]
    assert is_finished(path, recorded.config)
    header, row = listing([recorded])
    assert row[header.index("state")] == "stopped early" and row[header.index("rounds")] == "3/8"
    assert of_run(recorded)["stopped-early"] == summary["stopped-early"]
    code, out, err = command("run", "--in-process", "--resume", path)
    assert code == 0 and mentions(" ".join(out.split()), "run is complete", "nothing to resume", "stop-when"), err
    # the same models as of a run that was planned for three rounds
    straight = run(num_server_rounds=3, validation_ratio=0.25, run_name="straight")
    assert RecordedRun(straight.path).summary["digest"] == summary["digest"]


def test_a_resumed_run_ends_where_one_that_went_through_does(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = RecordedRun(run(**STOPPING, run_name="whole").path).summary
    from fl_app.server.run_folder import RunFolder

    asked = iter([False, True])
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "asked_to_stop", lambda self: next(asked))
        cut = run(**STOPPING, run_name="cut").path
    assert list(RecordedRun(cut).rounds) == [1, 2] and not RecordedRun(cut).finished
    run(**STOPPING, run_name="cut", resume=str(cut))
    resumed = RecordedRun(cut).summary
    assert resumed["rounds"] == 3 and resumed["stopped-early"] == whole["stopped-early"]
    assert resumed["digest"] == whole["digest"]
    # killed before its summary was written: nothing is trained anew
    lines = (cut / "metrics.jsonl").read_text()
    (cut / "summary.json").unlink()
    about = json.loads((cut / "run.json").read_text())
    (cut / "run.json").write_text(json.dumps({**about, "state-removed": False}))
    run(**STOPPING, run_name="cut", resume=str(cut))
    assert (cut / "metrics.jsonl").read_text() == lines
    assert RecordedRun(cut).summary["digest"] == whole["digest"]


def test_a_run_that_stops_by_its_test_data_says_so(run: Run) -> None:
    path = run(stop_when="accuracy: 1 round without better by 0.9", num_server_rounds=4).path
    assert mentions(
        result_table.chosen([RecordedRun(path)]), "chosen on test", "stop-when watched test", "final figures"
    )


def test_private_and_noisy_runs_report_it_too(run: Run) -> None:
    path = run(private=True, method="fedavg", validation_ratio=0.25).path
    record = list(read_metrics(path))[-1]
    assert record["validation-accuracy-before"] is not None
    quiet = run(private=True, method="fedavg", validation_ratio=0.25, report_accuracy=False, run_name="quiet").path
    assert list(read_metrics(quiet))[-1]["validation-accuracy-before"] is None


# `keep-best`: the models of the round that was best on validation data are a run's models, and their figures its figures

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
