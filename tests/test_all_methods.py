"""Every method, built in or from outside (tests/plugins), through the same rounds: plain and BatchNorm model, full and
partial participation, in one process. Each day every method has the BatchNorm model and half of the clients.

Per case: the wire carries exactly the documented bytes. A run killed after a checkpoint and resumed with two clients at once
(client state reloaded from disk at the generation the server names) ends with the same bits. tests/e2e runs every method through
Flower's simulation and compares the digests.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any, get_origin

import numpy as np
import pytest

from client_app.at_once import Lanes
from client_app.client_app import app
from corolla.experiments import dry_run
from fl_app import models
from fl_app.config import RunConfig, parse
from fl_app.errors import RoundFailed, UserError
from fl_app.keys import Scalar
from fl_app.layout import Layout, Model
from fl_app.metrics import Reports, declared
from fl_app.server import checkpoint
from fl_app.server.events import Round, decode, encode
from fl_app.server.run_folder import RunFolder, read_metrics, read_summary
from fl_app.server_app import run
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS, METHODS
from strategies.base import Method
from strategies.baselines.heterofl import part_of
from tests.conftest import IN_TWO_ROUNDS, OWN_METHODS, of_each_kind

CLIENTS = 4
SHAPE: dict[str, Any] = {"in_channels": 1, "num_classes": 10, "image_size": 8}
KINDS = ("fedavg", "fedcac", "fedbn", "fedproto", "ifca", "scaffold", "fedfomo", "fedconcat", "apple")
"""One method each that averages, masks, keeps a part, sends prototypes, has clusters, corrects, sends others' models, has phases,
and learns whom to send."""
MODELS = {"plain": "mlp", "batchnorm": "tests.small_models:batchnorm", "residual": "resnet8", "convolutional": "cnn"}


def start(directory: Path, name: str, **config: Scalar) -> tuple[RunFolder, RunConfig]:
    raw: dict[str, Scalar] = {
        "num-server-rounds": 2,
        "num-clients": CLIENTS,
        "train-samples": 24,
        "test-samples": 12,
        "local-epochs": 1,
        "batch-size": 12,
        "learning-rate": 0.05,
        "device": "cpu",
        "checkpoint-every": 1,
        "keep-state": True,
        "run-name": name,
        "output-dir": str(directory),
        "state-dir": str(directory / "state"),
        **{k.replace("_", "-"): v for k, v in config.items()},
        **IN_TWO_ROUNDS.get(str(config["method"]), {}),
    }
    parsed = parse(raw, METHOD_PARAMS)
    return run(InProcessGrid(app, raw, CLIENTS), parsed, lambda *_: None), parsed


def documented_bytes(method: str, layout: Layout, round: int, participants: int) -> tuple[int, int]:
    """Bytes up and down per client in a round of so many, the first or the second, as docs/methods/index.md has them (defaults)."""
    tensors = {slot.name: 4 * slot.size for slot in layout.params + layout.buffers}
    whole = sum(tensors.values())
    mask = -(-layout.d // 8)
    head = sum(n for name, n in tensors.items() if name in layout.classifier)
    norms = sum(n for name, n in tensors.items() if name in layout.batchnorm)
    classes, width = next(s.shape for s in layout.params if s.name in layout.classifier and len(s.shape) == 2)
    part = part_of(layout, 0.5)
    half = 4 * int(part.params.sum() + part.buffers.sum())
    prototypes = 4 * classes * width + 8 * classes
    gaussians = 4 * (classes * width + width * (width + 1) // 2)
    travels = {
        "local": 0,
        "fedper": whole - head,
        "fedrep": whole - head,
        "fedbabu": whole - head,
        "lg-fedavg": head,
        "fedbn": whole - norms,
        "flute": whole - head,
        "pfedfda": whole - head + gaussians,
        "fedas": whole - head,
        "fedem": 3 * whole,
        "perfedmask": whole - head,
        "floco": whole + 9 * 4 * classes * width,
        "fedproto": 0,
        "heterofl": half,
    }.get(method, whole)
    extra = {
        "fedcac": mask,
        "feddac": mask,
        "fedselect": mask,
        "fedobp": 8 * len(layout.params),
        "fedgen": 4 * classes,
        "fedma": 8 * classes,
        "feddwa": 4 * layout.d,
        "fedfomo": 4 * 5,
        "ifca": 4,
        "fedproto": prototypes,
        "fedpac": prototypes + 4 * classes * width + 8,
        "apple": 8 * CLIENTS,
    }
    # noise 32, hidden 256; and its statistics
    generator = (32 + classes + 3) * 256 + (256 + 1) * width + 2 * 256
    # as many others as have been seen
    later = {
        "fedgen": 4 * generator + classes,
        "fedfomo": (participants - 2) * whole,
        "fedproto": prototypes,
        "fedpac": prototypes,
        "apple": 8 * CLIENTS + 4 * layout.d + 8,
    }
    # a classifier on as many encoders as there are clients, all different
    if method == "fedconcat" and round > 1:
        classifier = 4 * (CLIENTS * width * classes + classes)
        return classifier, classifier + CLIENTS * (whole - head)
    sent = {"scaffold": 4 * layout.d, "ifca": 3 * whole, "apple": 8 * CLIENTS, "heterofl": 8} | (
        later if round > 1 else {}
    )
    return travels + extra.get(method, 0), travels + sent.get(method, 0)


def documented_extras(method: str, layout: Layout) -> tuple[int, int]:
    """Bytes up and down of the extra arrays of tests/plugins, as their docstrings have them."""
    if method != "prototypes:METHOD":
        return 0, 0
    classes, features = next(slot.shape for slot in layout.params if slot.name in layout.classifier)
    return 4 * classes * features + 8 * classes, 4 * classes * features + classes


def assert_reports_are_sent(method: Method, rounds: list[dict[str, Any]]) -> None:
    """Every client sends what its half declares; what figures draw beside that, the server may record instead."""
    own = {metric.name for metric in declared(method.reports)}
    for record in rounds:
        for client in record["clients"].values():
            assert own <= client.keys(), "Method.reports"
            assert {metric.name for metric in method.recorded} <= client.keys() | record.keys(), "Method.figures"


@pytest.mark.usefixtures("own_methods")
@pytest.mark.parametrize(
    ("method", "model", "fraction"),
    [
        pytest.param(
            method,
            model,
            fraction,
            id=f"{method}-{model}-{'full' if fraction == 1 else 'partial'}",
            marks=() if fraction in everyday.get(model, ()) else pytest.mark.nightly,
        )
        for method in (*METHODS, *OWN_METHODS)
        for everyday in [{"batchnorm": (0.5,), **({"plain": (1.0,)} if method in KINDS else {})}]
        for model, fraction in itertools.product(MODELS, (1.0, 0.5))
    ],
)
def test_two_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str, model: str, fraction: float) -> None:
    config: dict[str, Scalar] = {"method": method, "model": MODELS[model], "fraction_train": fraction}
    if (method, model) == ("fedma", "residual"):
        with pytest.raises(UserError, match="chain of layers"):
            start(tmp_path, "one", **config)
        return
    others = watch_tested(METHODS[method].local_update, monkeypatch)
    undeclared: list[str] = []
    monkeypatch.setattr(Reports, "warn_of_undeclared", lambda self, names: undeclared.extend(names))
    folder, parsed = start(tmp_path, "one", **config)
    assert any(others) == bool(METHODS[method].tested_in(parsed)), "Method.tested"
    assert not undeclared, "Method.reports"
    monkeypatch.undo()
    summary = read_summary(folder.path)
    rounds = list(read_metrics(folder.path))
    assert summary["digest"] and summary["failures"] == 0 and len(rounds) == 2
    assert [len(r["clients"]) for r in rounds] == [int(CLIENTS * fraction)] * 2
    assert_reports_are_sent(METHODS[method], rounds)
    assert len(rounds[-1]["evaluation"]["clients"]) == CLIENTS

    layout = Layout.of(models.build(MODELS[model], **SHAPE))
    for record in rounds:
        plain = documented_bytes(method, layout, record["round"], len(record["clients"]))
        more = documented_extras(method, layout)
        documented = [plain[0] + more[0], plain[1] + more[1]]
        for client in record["clients"].values():
            assert [client["upload-bytes"], client["download-bytes"]] == documented
        told = Round.of(record, 2)  # what the panel is fed with
        assert decode(encode(told)) == told and (told.round, told.rounds, told.failures) == (record["round"], 2, [])
        assert told.before_deviation is not None and told.after_deviation is not None
        assert told.loss is not None and told.loss > 0 and told.upload_bytes >= 0 and told.seconds["round"] > 0
        assert told.evaluated == (record["round"] == 2) and (not told.evaluated or 0 <= (told.all_clients or 0) <= 1)

    if method in METHODS and fraction < 1:
        # what a dry run says of the last round; it knows of no third client's model that FedFomo would send
        priced = dry_run.round_bytes(parsed, METHODS[method], SHAPE)
        assert rounds[-1]["upload-bytes"] == priced.participants * priced.upload
        assert rounds[-1]["download-bytes"] == priced.participants * priced.download
    assert summary["scale"] == "full"

    # as if the server had died after the first round's checkpoint, with the clients ahead of it
    (folder.path / "summary.json").unlink()
    for file in (folder.path / checkpoint.DIRECTORY).glob("round-000002.*"):
        file.unlink()
    shutil.rmtree(folder.path / "models", ignore_errors=True)
    raw = {**parsed.resolved, "resume": str(folder.path)}
    # now clients take turns, each in a lane whose network the one before left there
    lanes = Lanes(2)
    resumed = run(
        InProcessGrid(app, raw, CLIENTS, answer=lanes.answer),
        dataclasses.replace(parsed, resume=str(folder.path)),
        lambda *_: None,
    )
    lanes.close()
    assert read_summary(resumed.path)["digest"] == summary["digest"]
    for before, after in zip(rounds, read_metrics(resumed.path), strict=True):
        assert json.dumps(strip(before)) == json.dumps(strip(after))


@pytest.mark.parametrize(
    ("method", "model", "rate"),
    [
        pytest.param(method, model, rate, marks=() if rate == 1e9 or method in KINDS else pytest.mark.nightly)
        for method in METHODS
        for model, rate in (("plain", 1e9), ("plain", 1e3), ("batchnorm", 1e3))
    ],
)
def test_a_rate_above_what_a_method_bears_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, model: str, rate: float
) -> None:
    """Whatever it breaks first: a loss, a mask's scores, statistics, or arrays that the server would refuse."""
    key = "pfedme.inner-learning-rate" if method == "pfedme" else "learning-rate"
    config: dict[str, Scalar] = {"method": method, "model": MODELS[model], "round_retries": 0, key: rate}
    told = ""
    try:
        start(tmp_path, "one", num_server_rounds=3, train_samples=60, local_epochs=2, **config)
    except RoundFailed as error:
        told = str(error)
    failed = [line for line in told.splitlines() if line.startswith("  client ")]
    failed += [text for record in caplog.records if "dropped: " in (text := record.getMessage())]
    # with a fixed classifier or a gate, a body whose units are all dead has no gradient
    assert failed or rate < 1e9 or method in ("fedbabu", "perfedmask", "pfedgate")
    assert all(f"{key} {rate:g}" in line for line in failed), failed


def watch_tested(local_update: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Collect, of every model a client is tested with, whether it is another than the one training starts from or ends with."""
    found: list[bool] = []
    cls = get_origin(local_update) or local_update
    personal = cls.personal

    def watched(self: Any, model: Model, state: Any, ctx: Any) -> Model:
        used: Model = personal(self, model, state, ctx)
        found.append(not np.array_equal(used.params, model.params))
        return used

    monkeypatch.setattr(cls, "personal", watched)
    return found


FOR_CLASSES = {name for name, method in METHODS.items() if method.needs_classes} | {"pfedgate"}


@pytest.mark.parametrize("method", [*sorted(FOR_CLASSES), *of_each_kind(*FOR_CLASSES)])
def test_regression(tmp_path: Path, method: str) -> None:
    """Every method learns numbers from rows, or says by name that it is about classes."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(90, 6)).astype(np.float32)
    y = x @ draw.normal(size=6)
    np.savez(tmp_path / "rows.npz", x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:])
    config: dict[str, Scalar] = {
        "method": method,
        "dataset": f"npz:{tmp_path / 'rows.npz'}",
        "task": "regression",
        "partition": "iid",
        "train_samples": 0,
        "test_samples": 0,
        "learning_rate": 0.02,
        "data_dir": str(tmp_path / "data"),
    }
    why = {"pfedgate": "its gate looks at images"}.get(method, "it is for classes, and task regression has none")
    if method in FOR_CLASSES:
        with pytest.raises(UserError, match=f"method {method}: {why}"):
            start(tmp_path, "one", **config)
        return
    folder, _ = start(tmp_path, "one", **config)
    summary, rounds = read_summary(folder.path), list(read_metrics(folder.path))
    assert summary["digest"] and summary["failures"] == 0
    assert all(r["rmse-before"] > 0 and r["rmse-after"] > 0 for r in rounds) and rounds[-1]["evaluation"]["mae"] > 0
    assert summary["final-rmse"] == rounds[-1]["evaluation"]["rmse"]
    assert summary["best-rmse"] == min(r["rmse-before"] for r in rounds)


def strip(record: dict[str, object]) -> dict[str, object]:
    """Drop times, which differ between runs."""
    return {
        k: strip(v) if isinstance(v, dict) else v  # type: ignore[arg-type]
        for k, v in record.items()
        if k != "seconds"
    }
