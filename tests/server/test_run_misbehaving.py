"""Whole runs in one process whose input is bad, or whose clients misbehave."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message

import client_app.client
from client_app.client_app import app as real_app
from client_app.trainer import LocalTrainer
from fl_app import models
from fl_app.errors import UserError
from fl_app.layout import Model
from fl_app.server import matrices
from fl_app.server.run_folder import RunFolder, read_metrics, read_summary
from fl_app.transport import wire
from strategies.kernels import masks
from tests.conftest import Run
from tests.facts import mentions, rejected


def rounds(folder: RunFolder) -> list[dict[str, Any]]:
    return list(read_metrics(folder.path))


# clients that misbehave


def corrupting(client_id: int, change: Callable[[wire.Upload], wire.Upload]) -> Callable[..., Any]:
    """A `fit` whose upload is changed after everything else, for one client."""
    original = client_app.client.CorollaClient._train

    def train(self: Any, download: Any) -> wire.Upload:
        upload = original(self, download)
        return change(upload) if self.client_id == client_id else upload

    return train


def replaced(upload: wire.Upload, **changes: Any) -> wire.Upload:
    return wire.Upload(**(vars(upload) | changes))


def with_nan(upload: wire.Upload) -> wire.Upload:
    params = upload.model.params.copy()
    params[5] = np.nan
    return replaced(upload, model=Model(params, upload.model.buffers))


def raising(upload: wire.Upload) -> wire.Upload:
    raise RuntimeError("out of memory")


def shorter(upload: wire.Upload) -> wire.Upload:
    return replaced(upload, model=Model(upload.model.params[:-1], upload.model.buffers))


def in_float64(upload: wire.Upload) -> wire.Upload:
    return replaced(upload, model=Model(upload.model.params.astype(np.float64), upload.model.buffers))  # type: ignore[arg-type]


def all_ones(upload: wire.Upload) -> wire.Upload:
    assert upload.mask is not None
    return replaced(upload, mask=np.full_like(upload.mask, 255))


def one_bit_more(upload: wire.Upload) -> wire.Upload:
    assert upload.mask is not None
    d = upload.model.params.size
    mask = masks.unpack(upload.mask, d)
    mask[np.flatnonzero(~mask)[0]] = True
    return replaced(upload, mask=masks.pack(mask))


def without_mask(upload: wire.Upload) -> wire.Upload:
    return replaced(upload, mask=None)


def too_accurate(upload: wire.Upload) -> wire.Upload:
    return replaced(upload, metrics={**upload.metrics, "accuracy-after": 7.0})


def no_samples(upload: wire.Upload) -> wire.Upload:
    return replaced(upload, num_examples=0)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (raising, "RuntimeError: out of memory"),
        (with_nan, "array params has 1 non-finite values"),
        (shorter, "array params has shape (17225,), expected (17226,)"),
        (in_float64, "array params has dtype float64, expected float32"),
        (one_bit_more, "mask has 8614 ones, expected 8613"),
        (all_ones, "mask has ones beyond its 17226 bits"),
        (without_mask, "expected the arrays ['params', 'mask'], got ['params']"),
        (too_accurate, "metric accuracy-after must be a number in [0, 1], got 7.0"),
        (no_samples, "num_examples must be at least 1, got 0"),
    ],
)
def test_a_bad_client_is_dropped_by_name_and_the_others_go_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, change: Callable[[wire.Upload], wire.Upload], cause: str
) -> None:
    monkeypatch.setattr(client_app.client.CorollaClient, "_train", corrupting(1, change))
    folder = run(method="fedcac", num_clients=3)
    for record in rounds(folder):
        (failure,) = record["failures"]
        assert failure["client"] == 1 and cause in failure["cause"]
        assert list(record["clients"]) == ["0", "2"]
        collaborators = matrices.read(folder.path, record["round"])["collaborators"]
        assert collaborators.values.dtype == bool and collaborators.columns.tolist() == [0, 2]
    summary = read_summary(folder.path)
    # it can still be evaluated, on the global model
    assert summary["failures"] == 2 and summary["digest"]
    saved = {p.name for p in (folder.path / "models").iterdir()}
    assert saved == {"global.safetensors", "client-0.safetensors", "client-2.safetensors"}


def test_bytes_are_those_that_travelled_in_both_directions(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropped uploads and attempts that do not count have travelled too."""
    plain = rounds(run(method="fedavg", num_clients=3, num_server_rounds=1, run_name="plain"))[0]
    monkeypatch.setattr(client_app.client.CorollaClient, "_train", corrupting(1, with_nan))
    dropped = rounds(run(method="fedavg", num_clients=3, num_server_rounds=1, run_name="dropped"))[0]
    assert dropped["upload-bytes"] == plain["upload-bytes"] == 3 * plain["clients"]["0"]["upload-bytes"]
    assert list(dropped["clients"]) == ["0", "2"]

    monkeypatch.undo()
    attempts: list[int] = []
    train = client_app.client.CorollaClient._train

    def failing_at_first(self: Any, download: wire.Download) -> wire.Upload:
        if download.attempt not in attempts:
            attempts.append(download.attempt)
        if download.attempt == attempts[0] and self.client_id:
            raise RuntimeError("away")
        return train(self, download)

    monkeypatch.setattr(client_app.client.CorollaClient, "_train", failing_at_first)
    repeated = rounds(run(method="fedavg", num_clients=3, num_server_rounds=1, run_name="repeated"))[0]
    one = plain["clients"]["0"]["upload-bytes"]
    assert len(attempts) == 2 and len(repeated["failures"]) == 2
    assert repeated["upload-bytes"] == 4 * one and repeated["download-bytes"] == 2 * plain["download-bytes"]


def test_a_dropped_client_leaves_no_trace_in_the_others(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 2's bad upload, decoded into the round's stack or not, is as if it had never been sent."""
    monkeypatch.setattr(client_app.client.CorollaClient, "_train", corrupting(2, with_nan))
    nan = run(method="fedcac", run_name="nan")
    monkeypatch.undo()
    monkeypatch.setattr(client_app.client.CorollaClient, "_train", corrupting(2, raising))
    absent = run(method="fedcac", run_name="absent")
    monkeypatch.undo()
    plain = run(method="fedcac", run_name="plain")

    def hashes(folder: RunFolder) -> list[str]:
        clients = rounds(folder)[-1]["evaluation"]["clients"]
        return [clients[i]["sha256"] for i in ("0", "1")]

    assert hashes(nan) == hashes(absent) != hashes(plain)


def test_a_client_that_crashes_outside_our_code(run: Run) -> None:
    def crash(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 0 and message.metadata.message_type == "train":
            raise MemoryError("killed")
        return real_app(message, context)

    folder = run(app=crash)
    for record in rounds(folder):
        (failure,) = record["failures"]
        assert failure["client"] == 0 and "MemoryError: killed" in failure["cause"]


def test_one_failure_of_local_training_keeps_the_earlier_state(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upload of round 2 is refused, so the client goes on from round 1's generation, though round 2's is on disk."""
    calls = []

    def second_time(upload: wire.Upload) -> wire.Upload:
        calls.append(1)
        return too_accurate(upload) if len(calls) == 2 else upload

    monkeypatch.setattr(client_app.client.CorollaClient, "_train", corrupting(1, second_time))
    records = rounds(run(method="local", num_server_rounds=3))
    assert [f["client"] for f in records[1]["failures"]] == [1]
    assert records[2]["clients"]["1"]["accuracy-before"] == records[0]["clients"]["1"]["accuracy-after"]
    assert records[2]["clients"]["1"]["loss-before"] == records[0]["clients"]["1"]["loss-after"]
    assert records[2]["clients"]["0"]["loss-before"] == records[1]["clients"]["0"]["loss-after"]


def test_a_lost_state_file_fails_that_client_by_name(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def lose(upload: wire.Upload) -> wire.Upload:
        for path in (tmp_path / "state").rglob("client-0001/*.state"):
            path.unlink()
        return upload

    monkeypatch.setattr(client_app.client.CorollaClient, "_train", corrupting(1, lose))
    records = rounds(run(method="local"))
    (failure,) = records[1]["failures"]
    assert "is missing" in failure["cause"]
    assert failure["client"] == 1 and failure["cause"].startswith("state of 000001-")
    assert records[1]["evaluation"]["absent"] == [1] and records[1]["evaluation"]["digest"] is None


def test_all_clients_failing(run: Run, monkeypatch: pytest.MonkeyPatch, raw_config: dict[str, Any]) -> None:
    def fail(self: Any, download: Any) -> wire.Upload:
        raise RuntimeError("no disk")

    monkeypatch.setattr(client_app.client.CorollaClient, "_train", fail)
    with pytest.raises(UserError) as info:
        run()
    text = str(info.value)
    assert text.startswith("round 1") and all(
        mentions(text, f"client {i}", "RuntimeError", "no disk") for i in range(3)
    )
    assert not (Path(raw_config["output-dir"]) / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    ("rate", "what"),
    [
        (1e6, r"loss-after is \d.*"),
        (1e8, "loss-after is inf"),
        (1e12, r"rmse-after is \d.*"),
        (1e16, "loss-after is nan"),
    ],
)
def test_a_regression_that_diverges_says_so(run: Run, tmp_path: Path, rate: float, what: str) -> None:
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x_train=x[:40], y_train=x[:40].sum(1), x_test=x[40:], y_test=x[40:].sum(1))
    rows = {"dataset": f"npz:{tmp_path / 'rows.npz'}", "partition": "iid", "train_samples": 0, "test_samples": 0}
    with pytest.raises(UserError) as info:
        # one step: its loss is that of before
        run(**rows, task="regression", learning_rate=rate, batch_size=100)
    for i in range(3):
        said = rf"client {i}: training diverged: its {what} \(learning-rate {re.escape(f'{rate:g}')}\)$"
        assert re.search(said, str(info.value), re.MULTILINE)


def test_one_client_whose_training_diverges_is_named_and_harms_nobody_else(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(client_app.client.CorollaClient, "_train", corrupting(1, raising))
        absent = run(run_name="absent")
    usual = LocalTrainer.__dict__["learning_rate"].fget
    assert usual is not None
    monkeypatch.setattr(
        LocalTrainer, "learning_rate", property(lambda self: 1e30 if self.client_id == 1 else usual(self))
    )
    folder = run(run_name="diverged")
    for record, same in zip(rounds(folder), rounds(absent), strict=True):
        (failure,) = record["failures"]
        assert failure["client"] == 1
        assert re.fullmatch(r".*training diverged: its loss is \S+ \(learning-rate 1e\+30\)", failure["cause"])
        assert list(record["clients"]) == ["0", "2"]
        for i in ("0", "2"):
            assert record["clients"][i]["accuracy-after"] == same["clients"][i]["accuracy-after"]
        assert record["loss"] == same["loss"] and record["loss"] < 10
    evaluation = rounds(folder)[-1]["evaluation"]
    assert all(row["sha256"] and 0 <= row["accuracy"] <= 1 for row in evaluation["clients"].values())
    assert evaluation["digest"] == rounds(absent)[-1]["evaluation"]["digest"] is not None


@pytest.mark.parametrize(
    "metrics",
    [
        {"accuracy": 7.0},
        {"sha256": "no hash"},
        {"accuracy": "high"},
        {"error": "out of memory"},
    ],
    ids=str,
)
def test_a_bad_evaluation_is_dropped_by_name(
    run: Run, monkeypatch: pytest.MonkeyPatch, metrics: dict[str, Any]
) -> None:
    original = client_app.client.CorollaClient.reply

    def reply(self: Any, kind: Any, content: Any) -> Any:
        answer = original(self, kind, content)
        if kind == "evaluate" and self.client_id == 2:
            answer["evaluateres.metrics"].update(metrics)
        return answer

    monkeypatch.setattr(client_app.client.CorollaClient, "reply", reply)
    folder = run(num_server_rounds=1)
    evaluation = rounds(folder)[0]["evaluation"]
    assert [f["client"] for f in evaluation["failures"]] == [2] and evaluation["absent"] == [2]
    assert evaluation["digest"] is None and evaluation["accuracy"] is not None
    assert read_summary(folder.path)["absent"] == [2]


def test_a_clients_odd_numbers_and_texts_harm_nobody_else(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN seconds are recorded as null, NaN sample counts drop the client, its text cannot forge our log marks."""
    real = wire.encode_upload

    def odd(upload: wire.Upload) -> Any:
        reply = real(upload)
        reply.config_records[wire.RESULT]["seconds-train"] = float("nan")
        return reply

    monkeypatch.setattr(wire, "encode_upload", odd)
    clients = next(read_metrics(run().path))["clients"]
    assert all(row["seconds"]["train"] is None for row in clients.values())
    assert wire.one_line("boom\ncorolla: error: fake\n" + "x" * 900).count("\n") == 0


# Whole runs in one process: the real ServerApp and ClientApp, joined by InProcessGrid ---------------------------------


def no_run_folder(raw: dict[str, Any]) -> bool:
    runs = Path(raw["output-dir"])
    return not runs.exists() or not list(runs.iterdir())


# bad input leaves nothing behind


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "no_such_module:make"}, "model no_such_module:make: cannot import no_such_module"),
        ({"model": "tests.server.test_run_misbehaving:raises"}, "the factory raised RuntimeError: no weights"),
        ({"model": "tests.server.test_run_misbehaving:wrong_size"}, "must give logits of shape [2, 10], got [2, 11]"),
        ({"model": "json:dumps"}, "model json:dumps: the factory raised TypeError"),
        ({"initial_weights": "/no/such.safetensors"}, "initial-weights /no/such.safetensors: no such file"),
        ({"dataset": "npz:/no/such.npz"}, "/no/such.npz"),
        ({"dataset": "folder:/no/such/folder"}, "/no/such/folder"),
        ({"partition": "file:/no/such.npz"}, "partition: /no/such.npz: no such file or directory"),
        ({"partition": "pathological", "classes_per_client": 11}, "classes-per-client"),
        ({"train_samples": 100_000}, "train-samples"),
        ({"num_clients": 3, "min_available_clients": 4}, "min-available-clients"),
        ({"fedcac": {"tau": "abc"}}, "fedcac.tau: expected a number, got 'abc'"),
        ({"output_dir": "/proc/none"}, "output-dir: cannot create /proc/none/run"),
    ],
)
def test_bad_input_leaves_no_run_folder(
    run: Run, raw_config: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as info:
        run(**changes)
    assert words in str(info.value), str(info.value)
    assert len(str(info.value).splitlines()) < 24
    assert no_run_folder(raw_config)


def raises(**shape: int) -> Any:
    raise RuntimeError("no weights")


def wrong_size(in_channels: int, num_classes: int, image_size: int) -> Any:
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes + 1))


def test_cuda_without_a_gpu(run: Run, raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with rejected(UserError, "", "client 0", "device", "cuda asked for", "machine has 0 usable"):
        run(device="cuda")
    assert no_run_folder(raw_config)


def test_a_client_with_another_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    original = models.build

    def other(name: str, **options: Any) -> Any:
        return original("cnn" if building else name, **options)

    building = False
    original_context = client_app.client.CorollaClient._prepare

    def context(self: Any, download: Any) -> Any:
        nonlocal building
        building = self.client_id == 1
        # else it would use the network that the client before has left
        self.session._left.clear()
        try:
            return original_context(self, download)
        finally:
            building = False

    monkeypatch.setattr(models, "build", other)
    monkeypatch.setattr(client_app.client.CorollaClient, "_prepare", context)
    (failure,) = rounds(run(num_server_rounds=1))[0]["failures"]
    assert failure["client"] == 1 and "received 17226 parameters" in failure["cause"]


def test_nodes_without_their_configuration(raw_config: dict[str, Any], run: Run) -> None:
    with rejected(UserError, "", "SuperNode needs --node-config", "'partition-id=K num-partitions=N'"):
        run(node_configs={1: {"partition-id": "one"}})
    assert no_run_folder(raw_config)
    # the number of clients is the run's: an invitation of a larger federation still holds
    assert len(rounds(run(node_configs={1: {"num-partitions": 5}}))[-1]["clients"]) == 3


def test_clients_whose_data_differ(run: Run, tmp_path: Path, raw_config: dict[str, Any]) -> None:
    nodes = {}
    for i, side in enumerate((8, 8, 10)):
        path = tmp_path / f"site{i}.npz"
        x = np.random.default_rng(i).integers(0, 256, (12, side, side), np.uint8)
        np.savez(path, x_train=x, y_train=np.arange(12) % 2, x_test=x[:4], y_test=np.arange(4) % 2)
        nodes[i] = {"data-path": str(path)}
    with pytest.raises(UserError) as info:
        run(dataset="node", classes="0,1", node_configs=nodes)
    assert mentions(str(info.value), "clients [0, 1]", "1 channels", "2 classes", "8 pixels")
    assert mentions(str(info.value), "clients [2]", "1 channels", "2 classes", "10 pixels")
    assert no_run_folder(raw_config)
    del nodes[2]
    records = rounds(run(dataset="node", classes="0,1", node_configs=nodes, num_clients=2))
    assert records[-1]["evaluation"]["accuracy"] is not None
