"""MLflow and Weights & Biases follow real runs into stores on disk; a tracker that is down is a warning, once."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fl_app.config import parse
from fl_app.errors import UserError
from fl_app.server import trackers
from fl_app.server.events import LOG_MARK, Started, encode
from fl_app.server.run_folder import read_metrics, read_summary
from strategies import METHOD_PARAMS
from tests.conftest import SMALL, Run
from tests.disks import full_disk
from tests.facts import mentions, rejected


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What a run warns of, but that models of so little training answer one class."""
    told: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING and "predicts the same class" not in record.getMessage():
                told.append(record.getMessage())

    log, handler = logging.getLogger("corolla"), Handler()
    log.addHandler(handler)
    yield told
    log.removeHandler(handler)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No tracker of the user's own, nothing outside of the test's directory, and time for a slow machine's imports."""
    monkeypatch.setattr(trackers, "SECONDS", 240.0)
    # MLflow's artifacts of a store by address lie below
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "WANDB_"))]:
        monkeypatch.delenv(name)
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-own"))


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start at once, without the process that would try the tracker before the run: such tests are below."""
    monkeypatch.setattr(trackers, "_why_not", lambda name, environment: "")


def mlflow_runs(uri: str) -> tuple[Any, list[Any]]:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("corolla")
    return client, client.search_runs([experiment.experiment_id]) if experiment else []


@pytest.mark.usefixtures("unchecked")
def test_mlflow_holds_metrics_config_and_models(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    found = run(track="mlflow", method="fedcac", num_server_rounds=3, fedcac={"beta": 2}, metrics="all")
    without = run(method="fedcac", num_server_rounds=3, fedcac={"beta": 2}, metrics="all", run_name="without")
    summary, rounds = read_summary(found.path), list(read_metrics(found.path))
    assert summary["digest"] == read_summary(without.path)["digest"]

    # nothing is written elsewhere
    assert not (tmp_path / "mlflow.db").exists()
    client, (entry,) = mlflow_runs(f"sqlite:///{tmp_path}/runs/mlflow/mlflow.db")
    assert entry.info.status == "FINISHED" and entry.info.run_name == "run"
    assert entry.data.tags["corolla.digest"] == summary["digest"]
    assert entry.data.params["method"] == "fedcac" and entry.data.params["fedcac.beta"] == "2"
    assert "feddac.tau" not in entry.data.params
    for name, value in (
        ("accuracy/before-training", lambda r: r["accuracy-before"]),
        ("loss/training", lambda r: r["loss"]),
        ("accuracy/after-training-pooled", lambda r: r["accuracy-after-pooled"]),
        ("seconds/round", lambda r: r["seconds"]["round"]),
    ):
        history = client.get_metric_history(entry.info.run_id, name)
        assert {m.step: m.value for m in history} == {r["round"]: value(r) for r in rounds}
    last = rounds[-1]["evaluation"]
    assert entry.data.metrics["accuracy/all-clients"] == last["accuracy"] == entry.data.metrics["final-accuracy"]
    assert entry.data.metrics["all-clients/macro-f1"] == last["macro-f1"]

    artifacts = {file.path for file in client.list_artifacts(entry.info.run_id)}
    assert {"config.toml", "metrics.jsonl", "clients.json", "summary.json", "models"} <= artifacts
    models = {Path(file.path).name for file in client.list_artifacts(entry.info.run_id, "models")}
    assert models == {path.name for path in (found.path / "models").iterdir()}
    kept = Path(entry.info.artifact_uri.removeprefix("file://")) / "models" / "client-1.safetensors"
    assert kept.read_bytes() == (found.path / "models" / "client-1.safetensors").read_bytes()
    wrong = [str(p) for p in (tmp_path / "runs" / "mlflow").rglob("*") if p.stat().st_mode & 0o077]
    # closed to others, as everything of a run
    assert not wrong


@pytest.mark.nightly
def test_a_resumed_run_goes_on_in_its_mlflow_run(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    first = run(track="mlflow", num_server_rounds=3, keep_state=True, checkpoint_every=1)
    for file in (first.path / "checkpoints").glob("round-000003.*"):
        file.unlink()
    (first.path / "summary.json").unlink()
    run(track="mlflow", num_server_rounds=4, keep_state=True, resume=str(first.path))
    client, (entry,) = mlflow_runs(f"sqlite:///{tmp_path}/runs/mlflow/mlflow.db")
    history = client.get_metric_history(entry.info.run_id, "loss/training")
    assert [(m.step, m.value) for m in history] == [(r["round"], r["loss"]) for r in read_metrics(first.path)]
    assert entry.info.status == "FINISHED"


def test_wandb_offline_holds_metrics_config_and_models(
    run: Run, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    found = run(track="wandb,", method="fedcac", num_server_rounds=3, fedcac={"beta": 2}, run_name="fedcac,seed=0")
    assert not warnings
    (directory,) = (found.path / "wandb").glob("offline-run-*")
    (file,) = directory.glob("*.wandb")
    history, config, summary, artifacts, exits = wandb_records(file)
    rounds = list(read_metrics(found.path))
    assert [row["loss/training"] for row in history] == [r["loss"] for r in rounds]
    assert [row["_step"] for row in history] == [1, 2, 3]
    assert config["method"] == "fedcac" and config["fedcac.beta"] == 2
    assert summary["final-accuracy"] == read_summary(found.path)["final-accuracy"]
    (artifact,) = artifacts
    assert {
        f"models/{path.name}" for path in (found.path / "models").iterdir()
    } < artifact and "config.toml" in artifact
    assert exits == [0]


def leveldb_log(content: bytes, position: int) -> Iterator[bytes]:
    """Records of LevelDB's log format, in blocks of 32 KiB: checksum (4 bytes), length (2), kind (1: whole, 2 .. 4: its parts)."""
    parts, at = b"", 0
    while at + 7 <= len(content):
        left = 32768 - (position + at) % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def wandb_records(file: Path) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any], list[set[str]], list[int]]:
    """What an offline run's file holds: history, config, summary, artifacts' files, exit codes."""
    from wandb.proto import wandb_internal_pb2

    history: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    artifacts: list[set[str]] = []
    exits: list[int] = []
    for data in leveldb_log(file.read_bytes()[7:], 7):  # behind W&B's own header
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(data)
        match record.WhichOneof("record_type"):
            case "history":
                history.append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
            case "run":
                config |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
            case "config":
                config |= {i.key: json.loads(i.value_json) for i in record.config.update}
            case "summary":
                summary |= {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.summary.update}
            case "artifact":
                artifacts.append({entry.path for entry in record.artifact.manifest.contents})
            case "request" if record.request.WhichOneof("request_type") == "log_artifact":
                artifacts.append({entry.path for entry in record.request.log_artifact.artifact.manifest.contents})
            case "exit":
                exits.append(record.exit.exit_code)
    return history, config, summary, artifacts, exits


# Trackers that are down -----------------------------------------------------------------------------------------------


def closed_port() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


def one_warning(run: Run, warnings: list[str], **keys: Any) -> str:
    """Run with a tracker; return the one warning it gave. The run is whole."""
    digest = read_summary(run(run_name="without", **keys | {"track": ""}).path)["digest"]
    found = run(**keys)
    assert read_summary(found.path)["digest"] == digest and len(list(read_metrics(found.path))) == 2
    (warning,) = warnings
    return warning


@pytest.mark.nightly
def test_an_unreachable_server(run: Run, warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", closed_port())
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    warning = one_warning(run, warnings, track="mlflow")
    assert mentions(warning, "warning", "mlflow misses part") and "127.0.0.1" in warning


@pytest.mark.nightly
@pytest.mark.usefixtures("unchecked")
def test_a_server_that_never_answers(run: Run, warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setattr(trackers, "SECONDS", 3.0)
    monkeypatch.setattr(trackers, "_MORE", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert mentions(one_warning(run, warnings, track="mlflow"), "took longer than 3 s")


@pytest.mark.nightly
def test_a_full_disk(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A store that cannot be opened is refused before the start."""
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    with full_disk(tmp_path, 64 << 10) as small:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{small}/mlflow.db")
        with rejected(UserError, "", "track", "mlflow cannot work", "full"):
            run(track="mlflow")


@pytest.mark.nightly
@pytest.mark.usefixtures("unchecked")
def test_a_tracker_that_raises(run: Run, warnings: list[str], raw_config: dict[str, Any], tmp_path: Path) -> None:
    """The other tracker is not bothered."""
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mlflow").write_text("a file where MLflow's store is to be")
    assert "FileExistsError" in one_warning(run, warnings, track="mlflow, tensorboard")
    assert list((tmp_path / "runs" / "run" / "tensorboard").iterdir())


@pytest.mark.usefixtures("unchecked")
def test_wandb_with_an_account_and_no_network(
    run: Run, warnings: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", closed_port())
    monkeypatch.setattr(trackers, "SECONDS", 3.0)
    monkeypatch.setattr(trackers, "_MORE", 1.0)
    assert mentions(one_warning(run, warnings, track="wandb"), "wandb misses part")


# Before a run ----------------------------------------------------------------------------------------------------------


def test_a_tracker_is_one_of_those_there_are() -> None:
    rule = "track: must be some of mlflow, wandb, tensorboard, with commas, got 'mlfow'; did you mean mlflow"
    with pytest.raises(UserError, match=rule):
        parse({**SMALL, "track": "tensorboard,mlfow"}, METHOD_PARAMS)


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_missing_package_is_said_before_the_run_starts(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # W&B makes one where it runs: no package
    (tmp_path / name).mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    find = importlib.util.find_spec
    real = importlib.machinery.PathFinder.find_spec(name, [str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda word, *rest: real if word == name else find(word, *rest))
    extra = f"pip install 'corolla[{name}]'"
    with rejected(UserError, "", f"package {name} is not", "server runs", extra, "or leave"):
        run(track=name)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "environment"),
    [
        ("wandb", {}),
        pytest.param("wandb", {"WANDB_API_KEY": "short"}, marks=pytest.mark.nightly),
        pytest.param("wandb", {"WANDB_MODE": "nonsense"}, marks=pytest.mark.nightly),
        pytest.param("mlflow", {"MLFLOW_TRACKING_URI": "nonsense://host"}, marks=pytest.mark.nightly),
    ],
)
def test_a_tracker_that_cannot_work_is_refused_before_the_run_starts(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, environment: dict[str, str]
) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    monkeypatch.setenv("HOME", str(tmp_path))
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(
        UserError, match=rf"track: {name} cannot work where the server runs: \w+Error|Exception"
    ) as caught:
        run(track=f"tensorboard,{name}")
    assert "tensorboard" not in str(caught.value) and not (tmp_path / "runs").exists()


def test_a_package_that_cannot_be_imported_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken" / "tensorboard").mkdir(parents=True)
    (tmp_path / "broken" / "tensorboard" / "__init__.py").write_text("import no_such_module")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    with rejected(UserError, "", "track", "tensorboard cannot work", "no_such_module"):
        run(track="tensorboard")


# Whom the log tells ----------------------------------------------------------------------------------------------------


def test_a_command_starts_followers_where_the_log_tells_the_folder(run: Run, tmp_path: Path) -> None:
    """As for a simulation, whose server cannot reach any tracker's."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    path = run().path
    passed: list[str] = []
    lines = ["Flower's own", LOG_MARK + encode(Started(folder=str(path))), f"{LOG_MARK}more"]
    with trackers.following_log({"track": "tensorboard"}, passed.append) as take:
        for line in lines:
            take(line)
    assert passed == lines
    (events,) = (path / "tensorboard").iterdir()
    size = events.stat().st_size

    resumed = {"track": "tensorboard", "resume": str(path)}
    with trackers.following_log(resumed, passed.append) as take:
        take(LOG_MARK + encode(Started(folder=str(path), round=2)))
    later = next(file for file in (path / "tensorboard").iterdir() if file != events)
    assert later.stat().st_size < size  # no round among them
