"""What clients report, checked and summarized, and the digest over all that was evaluated."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from flwr.compat.common import recorddict_compat as compat
from flwr.compat.common.typing import Code, EvaluateRes, Status
from safetensors.numpy import load_file, save_file
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

from benchmarks import digests
from corolla.experiments.exported import run_models
from corolla.experiments.runs import RecordedRun
from corolla.report import tables
from corolla.report.arrays import read_run
from corolla.report.groups import grouped
from fl_app.errors import UserError
from fl_app.layout import Model
from fl_app.metrics import Metric, Reports, of_evaluation
from fl_app.server import record as records
from fl_app.server.run_folder import RunFolder, read_metrics, read_summary
from fl_app.tasks import Classification, MultiLabel, Regression
from fl_app.transport import wire
from fl_app.transport.wire import Upload, WireError
from strategies import METHODS
from tests.conftest import IN_TWO_ROUNDS, Run, f32
from tests.facts import mentions, rejected

SAID = {"train-samples": 24, "test-samples": 10}


def upload(num_examples: int = 24, **metrics: Any) -> Upload:
    reported = {name.replace("_", "-"): value for name, value in metrics.items()}
    return Upload(Model(f32(1), f32()), metrics={"test-samples": 10, "loss": 0.5} | reported, num_examples=num_examples)


def test_known_numbers_are_kept_and_nothing_else() -> None:
    sent = upload(
        accuracy_before=0.5, seconds_train=1.0, alpha=0.25, collaborators=3, text="x", state_version="000002-000000"
    )
    kept = {
        "test-samples": 10,
        "loss": 0.5,
        "accuracy-before": 0.5,
        "seconds-train": 1.0,
        "state-version": "000002-000000",
    }
    assert records.check_upload(sent) == kept
    assert records.check_upload(sent, Reports([Metric("alpha")]), SAID, "000002-000000") == {**kept, "alpha": 0.25}


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (upload(loss=1.5e308), r"metric loss must be a number in \[0, 1e\+30\], got 1.5e\+308"),
        (upload(loss_before=-1), "metric loss-before"),
        (upload(seconds_train=1e31), "metric seconds-train"),
        (upload(seconds_train="x" * 10), "metric seconds-train"),
        (
            upload(2**62),
            "num_examples must be the 24 that the client reported when it connected, got 4611686018427387904",
        ),
        (upload(test_samples=11), "test-samples must be the 10 that the client reported when it connected, got 11"),
        (upload(state_version="000001-000000"), "state-version must be 000002-000000 or empty, got '000001-000000'"),
        (upload(state_used="../x"), "state-used must be a state's version"),
    ],
)
def test_numbers_that_cannot_be(sent: Upload, words: str) -> None:
    with pytest.raises(WireError, match=words):
        records.check_upload(sent, None, SAID, "000002-000000")


def test_no_number_of_a_client_makes_a_mean_that_json_does_not_have() -> None:
    rows = [{"loss": 1.7e308, "test-samples": 2**52}] * 3
    assert records.mean_and_pooled(rows, "loss") == (None, None)
    notes = {"notes": [math.inf, 1.0]}
    rows = [records.client_row({"loss": value, "test-samples": 1}, 1, 1, 1, notes) for value in (math.inf, 1.0)]
    record = records.round_record(1, dict(enumerate(rows)), 2, 3, {"x": {"y": math.nan}}, [])
    assert json.loads(json.dumps(record, allow_nan=False))["loss"] == 1.0
    assert (
        record["x"] == {"y": None}
        and record["clients"]["0"]["notes"] == [None, 1.0]
        and record["clients"]["0"]["loss"] is None
    )


def test_an_evaluation_s_samples_are_those_the_client_told() -> None:
    sha = "ab" * 32
    assert records.check_evaluation({"accuracy": 0.5, "sha256": sha, "x": 3}, 10, SAID) == {
        "accuracy": 0.5,
        "sha256": sha,
    }
    with rejected(WireError, "", "test-samples", "10"):
        records.check_evaluation({"accuracy": 0.5, "sha256": sha}, 11, SAID)


def test_pooled_is_the_metric_over_all_samples_or_not_there() -> None:
    """With sklearn over all samples at once: RMSE is no mean of RMSEs, AUC follows from nobody's AUC."""
    g = np.random.default_rng(0)
    parts = [(g.normal(size=n), g.normal(scale=1 + n / 10, size=n)) for n in (5, 20, 80)]
    rows = [
        {
            "rmse": root_mean_squared_error(y, p),
            "mae": mean_absolute_error(y, p),
            "r2": r2_score(y, p),
            "test-samples": len(y),
        }
        for y, p in parts
    ]
    y, p = (np.concatenate(side) for side in zip(*parts, strict=True))
    record = records.reduced(rows, of_evaluation(Regression.metrics))
    assert record["rmse-pooled"] == pytest.approx(root_mean_squared_error(y, p), rel=1e-9)
    assert record["mae-pooled"] == pytest.approx(mean_absolute_error(y, p), rel=1e-9)
    assert "r2-pooled" not in record and record["r2"] == pytest.approx(np.mean([row["r2"] for row in rows]))
    assert record["rmse-pooled"] > np.average([row["rmse"] for row in rows], weights=[5, 20, 80])
    for task in (Classification, MultiLabel):
        names = {
            name for metric in of_evaluation(task.metrics) for name in metric.record_names if name.endswith("-pooled")
        }
        own = {"accuracy-pooled", "accuracy-finetuned-pooled"} if task is Classification else set()
        assert names == own | {"loss-pooled"}


# The digest of a run: over parameters and buffers of every model that a client was evaluated with (version 2) ---------

# whose models hold what is computed beside training: classifiers, a mixture's weights, statistics of their own
COMPUTING = ("fedavg", "fedbn", "pfedfda", "fedconcat", "fedem")

A, B, C, D = (hashlib.sha256(letter).hexdigest() for letter in (b"a", b"b", b"c", b"d"))


def last_evaluation(folder: RunFolder) -> Mapping[str, Any]:
    evaluation: Mapping[str, Any] = list(read_metrics(folder.path))[-1]["evaluation"]
    return evaluation


def as_recorded_earlier(folder: RunFolder) -> None:
    """Rewrite a run's files as a run recorded them that had version 1."""
    rounds = list(read_metrics(folder.path))
    evaluation = rounds[-1]["evaluation"]
    for row in evaluation["clients"].values():
        row.pop("buffers-sha256", None)
    evaluation["digest"] = records.digest(evaluation["clients"].values(), version=1)
    del evaluation["digest-version"]
    lines = "".join(f"{json.dumps(record)}\n" for record in rounds)
    (folder.path / "metrics.jsonl").write_text(lines)
    summary = {**read_summary(folder.path), "digest": evaluation["digest"]}
    del summary["digest-version"]
    (folder.path / "summary.json").write_text(json.dumps(summary))


def test_by_hand() -> None:
    rows = [{"sha256": A, "buffers-sha256": B}, {"sha256": C, "buffers-sha256": D}]
    raw = [bytes.fromhex(each) for each in (A, B, C, D)]
    assert records.digest(rows) == hashlib.sha256(b"".join(raw)).hexdigest()
    assert records.digest(rows, version=1) == hashlib.sha256(raw[0] + raw[2]).hexdigest()
    plain = [{"sha256": A}, {"sha256": C}]
    assert records.digest(plain) == records.digest(plain, version=1) == records.digest(rows, version=1)


def test_a_client_hashes_buffers_where_there_are_any() -> None:
    params, buffers = np.float32([1, 2]), np.float32([3])
    assert wire.hashes(Model(params, buffers[:0])) == {"sha256": hashlib.sha256(params.tobytes()).hexdigest()}
    found = wire.hashes(Model(params, buffers))
    assert found["buffers-sha256"] == hashlib.sha256(buffers.tobytes()).hexdigest() and len(found) == 2


@pytest.mark.parametrize("of", ["sha256", "buffers-sha256"])
def test_a_hash_that_is_none_is_refused(of: str) -> None:
    told = EvaluateRes(Status(Code.OK, ""), 1.0, 3, {"sha256": A, "buffers-sha256": B, of: "no hash"})
    with rejected(wire.WireError, "", of, "64 hexadecimal digits", "got 'no hash'"):
        wire.decode_evaluation(compat.evaluateres_to_recorddict(told))


def test_statistics_that_differ_make_another_digest(run: Run) -> None:
    """Training reads no running statistics: whether they are averaged or kept, parameters are the same."""
    found = {}
    for which in ("global", "local"):
        own = {"batchnorm_statistics": which}
        found[which] = run(model="tests.small_models:batchnorm", num_server_rounds=1, run_name=which, fedavg=own)
    summaries = {which: read_summary(folder.path) for which, folder in found.items()}
    assert all(summary["digest-version"] == 2 for summary in summaries.values())
    assert summaries["global"]["digest"] != summaries["local"]["digest"]
    # version 1 could not tell them apart
    first = {records.digest(last_evaluation(folder)["clients"].values(), 1) for folder in found.values()}
    assert len(first) == 1
    rows = {which: list(last_evaluation(folder)["clients"].values()) for which, folder in found.items()}
    assert (
        len({row["buffers-sha256"] for row in rows["global"]}) == 1
        and len({row["sha256"] for row in rows["local"]}) == 1
    )
    assert len({row["buffers-sha256"] for row in rows["local"]}) == 3


@pytest.mark.parametrize(
    "method",
    [name if name in COMPUTING else pytest.param(name, marks=pytest.mark.nightly) for name in METHODS],
)
def test_every_method_hashes_all_that_it_evaluates(run: Run, method: str) -> None:
    """Collected models are those that were evaluated: parameters, statistics, and classifiers that the method computes."""
    own = IN_TWO_ROUNDS.get(method, {})
    folder = run(method=method, model="tests.small_models:batchnorm", collect_personal_models=True, **own)
    clients = last_evaluation(folder)["clients"]
    for i in range(3):
        model = run_models.load(folder.path, i, METHODS)
        assert model.is_of(clients[str(i)]) and set(model.hashes) == {"sha256", "buffers-sha256"}
        assert not model.missing


def test_a_collected_model_with_other_statistics_is_named(run: Run) -> None:
    folder = run(model="tests.small_models:batchnorm", collect_personal_models=True)
    file = folder.path / "models" / "client-1.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("running_mean"))
    save_file({**tensors, name: tensors[name] + 1}, file)
    with rejected(UserError, "", "not the model", "that client 1", "evaluated", "its buffers-sha256 is"):
        run_models.load(folder.path, 1, METHODS)
    as_recorded_earlier(folder)
    assert run_models.load(folder.path, 1, METHODS).client == 1


def test_earlier_runs_are_marked_and_never_taken_for_the_same(run: Run) -> None:
    folders = [
        run(model="tests.small_models:batchnorm", num_server_rounds=1, run_name=name) for name in ("earlier", "later")
    ]
    digest = read_summary(folders[1].path)["digest"]
    as_recorded_earlier(folders[0])
    outcome = RecordedRun(folders[0].path).outcome
    assert outcome["digest-version"] == 1 and outcome["digest"] != digest
    runs = [read_run(folder.path) for folder in folders]
    table = tables.results_table(grouped(runs))
    assert f"{outcome['digest'][:8]}</code> (version 1)" in table and f"{digest[:8]}</code><" in table
    assert mentions(table, "Digests of version 1", "not cover BatchNorm", "statistics", "not comparable", "others")
    assert "version 1" not in tables.results_table(grouped(runs[1:]))


def test_the_tool_prints_both_versions(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "FRACTIONS", (1.0,))
    monkeypatch.setattr(digests, "CLIENTS", 2)
    lines = []
    for version in ("1", "2"):
        digests.main(["--version", version, "fedavg"])
        lines.append(capsys.readouterr().out.splitlines())
    assert [printed[0] for printed in lines] == ["digest-version = 1", "digest-version = 2"]
    same = {one.split()[1]: one == two for one, two in zip(lines[0][1:], lines[1][1:], strict=True)}
    assert same == {"mlp": True, "resnet8": False}
