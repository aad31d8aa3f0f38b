"""Whole runs in one process: the real ServerApp and ClientApp, joined by InProcessGrid."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

import client_app.client
from client_app.client_app import app as real_app
from client_app.client_app import client_fn
from client_app.trainer import LocalTrainer
from fl_app import models, weights, wire
from fl_app.errors import UserError
from fl_app.layout import Layout, Model
from fl_app.server.inprocess import InProcessGrid
from fl_app.server.run_folder import RunFolder, read_metrics, read_summary
from strategies import masks
from strategies.fedcac import personalize
from tests.conftest import Run

METHODS = ("fedavg", "local", "fedcac")


def rounds(folder: RunFolder) -> list[dict[str, Any]]:
    return list(read_metrics(folder.path))


def layout_of(model: str) -> Layout:
    return Layout.of(models.build(model, in_channels=1, num_classes=10, image_size=8))


def no_run_folder(raw: dict[str, Any]) -> bool:
    runs = Path(raw["output-dir"])
    return not runs.exists() or not list(runs.iterdir())


# results


@pytest.mark.parametrize("model", ["mlp", "resnet8"])
@pytest.mark.parametrize("method", METHODS)
def test_a_run(run: Run, method: str, model: str) -> None:
    small = {"num_clients": 2, "train_samples": 10, "test_samples": 6} if model == "resnet8" else {}
    folder = run(method=method, model=model, fedcac={"tau": 0.3}, **small)
    n, layout = small.get("num_clients", 3), layout_of(model)
    records = rounds(folder)
    assert [r["round"] for r in records] == [1, 2]
    whole = 4 * (layout.d + layout.b)
    down = {"fedavg": whole, "fedcac": whole, "local": 0}[method]
    up = down + (-(-layout.d // 8) if method == "fedcac" else 0)
    for record in records:
        assert set(record) >= {
            "round", "accuracy-before", "accuracy-before-pooled", "accuracy-after", "accuracy-after-pooled", "loss",
            "seconds", "upload-bytes", "download-bytes", "failures", "clients",
        }  # fmt: skip
        assert record["failures"] == [] and list(record["clients"]) == [str(i) for i in range(n)]
        for row in record["clients"].values():
            assert row["upload-bytes"] == up and row["download-bytes"] == down
            assert row["train-samples"] == small.get("train_samples", 24)
            assert row["test-samples"] == small.get("test_samples", 10)
            assert ("collaborators" in row) == (method == "fedcac")
            assert {"train", "evaluate"} <= set(row["seconds"])
        assert ("overlap" in record) == (method == "fedcac") and np.shape(record.get("overlap", [])) in ((0,), (n, n))
        assert record["upload-bytes"] == n * up and record["download-bytes"] == n * down
        for name in ("accuracy-before", "accuracy-after", "loss"):
            mean = np.mean([row[name] for row in record["clients"].values()])
            assert record[name] == pytest.approx(mean)
        assert record["seconds"]["round"] >= record["seconds"]["personalize"] >= 0
    assert "evaluation" not in records[0] and list(records[1]["evaluation"]["clients"]) == [str(i) for i in range(n)]

    summary = read_summary(folder.path)
    assert summary["final-accuracy"] == records[1]["evaluation"]["accuracy"]
    assert summary["best-accuracy"] == max(r["accuracy-before"] for r in records)
    assert summary["rounds"] == 2 and summary["absent"] == [] and summary["failures"] == 0
    assert len(summary["digest"]) == 64 and summary["upload-bytes"] == 2 * n * up
    assert summary["num-clients"] == n and summary["method"] == method

    resolved = tomllib.loads((folder.path / "config.toml").read_text())
    assert resolved["num-clients"] == n and resolved["fedcac"]["tau"] == 0.3 and resolved["run-name"] == "run"
    saved = {p.name for p in (folder.path / "models").glob("*")} if (folder.path / "models").exists() else set()
    assert ("global.safetensors" in saved) == (method != "local")
    assert ("client-0.safetensors" in saved) == (method == "fedcac")
    if method != "local":
        model_file = weights.load_safetensors(folder.path / "models" / "global.safetensors", layout)
        assert model_file.params.shape == (layout.d,)


@pytest.mark.parametrize("method", METHODS)
def test_a_rerun_gives_the_same_bits(run: Run, method: str) -> None:
    def measured(**changes: Any) -> tuple[Any, ...]:
        folder = run(method=method, **changes)
        accuracies = [(r["accuracy-before"], r["accuracy-after"], r["loss"]) for r in rounds(folder)]
        return read_summary(folder.path)["digest"], accuracies

    first = measured(run_name="a")
    assert measured(run_name="b") == first
    assert measured(run_name="c", seed=1)[0] != first[0]


def test_a_rerun_with_batchnorm_dropout_free_augmentation_and_momentum(run: Run) -> None:
    options = {"model": "resnet8", "augment": "crop-flip", "momentum": 0.9, "train_samples": 9, "num_clients": 2}
    digests = [read_summary(run(method="fedcac", run_name=name, **options).path)["digest"] for name in "ab"]
    assert digests[0] == digests[1]


def test_local_training_needs_no_server(run: Run) -> None:
    # each client alone: training it for 2 rounds is the same whether others take part or not
    folder = run(method="local", num_server_rounds=3)
    records = rounds(folder)
    for i in ("0", "1", "2"):
        rows = [r["clients"][i] for r in records]
        # what a round starts from is what the round before ended with, read back from the client's disk
        assert [row["accuracy-before"] for row in rows[1:]] == [row["accuracy-after"] for row in rows[:-1]]
        assert records[-1]["evaluation"]["clients"][i]["accuracy"] == rows[-1]["accuracy-after"]


def test_fedcac_in_a_run_is_the_mathematics(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[np.ndarray, np.ndarray, int]] = []
    original = wire.decode_upload

    def spy(content: Any, expected: Any) -> Any:
        upload = original(content, expected)
        sent.append((upload.model.params.copy(), upload.mask.copy(), upload.num_examples))
        return upload

    monkeypatch.setattr(wire, "decode_upload", spy)
    folder = run(method="fedcac", num_server_rounds=1, partition="dirichlet", min_samples=5, fedcac={"tau": 0.3, "beta": 2})
    W, bits = np.stack([w for w, _, _ in sent]), np.stack([m for _, m, _ in sent])
    counts = np.array([n for _, _, n in sent], float)
    assert len(set(counts)) == 3, "the test wants unequal clients"
    mean, personalized = personalize(W, bits, 1, beta=2, weights=counts)
    layout = layout_of("mlp")
    assert {masks.popcount(row) for row in bits} == {masks.num_selected(layout.sizes, 0.3)}
    directory = folder.path / "models"
    assert (weights.load_safetensors(directory / "global.safetensors", layout).params == mean).all()
    for i in range(3):
        saved = weights.load_safetensors(directory / f"client-{i}.safetensors", layout)
        assert (saved.params == personalized[i]).all()


def test_evaluate_every(run: Run) -> None:
    records = rounds(run(num_server_rounds=5, evaluate_every=2))
    assert [r["round"] for r in records if "evaluation" in r] == [2, 4, 5]


def test_a_finished_run_is_never_overwritten(run: Run) -> None:
    folder = run(num_server_rounds=1)
    before = read_summary(folder.path)
    with pytest.raises(UserError, match=r"run-name: .*/run exists already; choose another name or remove it"):
        run(num_server_rounds=1, seed=4)
    assert read_summary(folder.path) == before


def test_fedcac_with_local_statistics_does_not_send_them(run: Run) -> None:
    small = {"model": "resnet8", "num_clients": 2, "train_samples": 8, "num_server_rounds": 2}
    folder = run(method="fedcac", fedcac={"batchnorm-statistics": "local"}, **small)
    layout = layout_of("resnet8")
    for record in rounds(folder):
        for row in record["clients"].values():
            assert row["upload-bytes"] == 4 * layout.d + -(-layout.d // 8) and row["download-bytes"] == 4 * layout.d


@pytest.mark.parametrize("option", [
    {"selection": "random"}, {"selection": "sensitivity-reverse"}, {"collaboration": "none"}, {"collaboration": "top"},
    {"non-critical": "as-critical"}, {"tau": 0.0}, {"tau": 1.0}, {"beta": 1},
], ids=str)  # fmt: skip
def test_every_option_changes_the_result(run: Run, option: dict[str, Any]) -> None:
    # sharp data (two classes each), so that thresholds choose some clients and not others
    def digest(name: str, **fedcac: Any) -> str:
        common = {"num_clients": 4, "partition": "pathological", "run_name": name}
        return str(read_summary(run(method="fedcac", fedcac={"beta": 4} | fedcac, **common).path)["digest"])

    assert digest("plain") != digest("changed", **option)


# partial participation


def test_partial_participation(run: Run) -> None:
    folder = run(method="fedcac", num_clients=5, fraction_train=0.4, num_server_rounds=4)
    records = rounds(folder)
    took_part = [sorted(map(int, r["clients"])) for r in records]
    assert all(len(ids) == 2 for ids in took_part) and len({tuple(ids) for ids in took_part}) > 1
    assert list(records[-1]["evaluation"]["clients"]) == ["0", "1", "2", "3", "4"]  # all clients, not only the round's
    directory, layout = folder.path / "models", layout_of("mlp")
    saved = {p.name for p in directory.iterdir()}
    assert saved == {"global.safetensors"} | {f"client-{i}.safetensors" for ids in took_part for i in ids}
    assert weights.load_safetensors(directory / "global.safetensors", layout)


def test_local_clients_that_are_absent_keep_their_model(run: Run) -> None:
    records = rounds(run(method="local", num_clients=4, fraction_train=0.5, num_server_rounds=4))
    last: dict[str, float] = {}
    for record in records:
        for i, row in record["clients"].items():
            if i in last:
                assert row["accuracy-before"] == last[i]
            last[i] = row["accuracy-after"]
    for i, row in records[-1]["evaluation"]["clients"].items():
        assert i not in last or row["accuracy"] == last[i]


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


@pytest.mark.parametrize(("change", "cause"), [
    (raising, "RuntimeError: out of memory"),
    (with_nan, "array params has 1 non-finite values"),
    (shorter, "array params has shape (17225,), expected (17226,)"),
    (in_float64, "array params has dtype float64, expected float32"),
    (one_bit_more, "mask has 8614 ones, expected 8613"),
    (all_ones, "mask has ones beyond its 17226 bits"),
    (without_mask, "expected the arrays ['params', 'mask'], got ['params']"),
    (too_accurate, "metric accuracy-after must be a number in [0, 1], got 7.0"),
    (no_samples, "num_examples must be at least 1, got 0"),
])  # fmt: skip
def test_a_bad_client_is_dropped_by_name_and_the_others_go_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, change: Callable[[wire.Upload], wire.Upload], cause: str
) -> None:
    monkeypatch.setattr(client_app.client.CorollaClient, "_train", corrupting(1, change))
    folder = run(method="fedcac", num_clients=3)
    for record in rounds(folder):
        (failure,) = record["failures"]
        assert failure["client"] == 1 and cause in failure["cause"]
        assert list(record["clients"]) == ["0", "2"]
        collaborators = [i for row in record["clients"].values() for i in row["collaborators"]]
        assert 1 not in collaborators
    summary = read_summary(folder.path)
    assert summary["failures"] == 2 and summary["digest"]  # it can still be evaluated, on the global model
    saved = {p.name for p in (folder.path / "models").iterdir()}
    assert saved == {"global.safetensors", "client-0.safetensors", "client-2.safetensors"}


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
    assert failure["client"] == 1 and "client 1: state of 000001-" in failure["cause"]
    assert records[1]["evaluation"]["absent"] == [1] and records[1]["evaluation"]["digest"] is None


def test_all_clients_failing(run: Run, monkeypatch: pytest.MonkeyPatch, raw_config: dict[str, Any]) -> None:
    def fail(self: Any, download: Any) -> wire.Upload:
        raise RuntimeError("no disk")

    monkeypatch.setattr(client_app.client.CorollaClient, "_train", fail)
    with pytest.raises(UserError) as info:
        run()
    text = str(info.value)
    assert text.startswith("round 1") and all(f"client {i}: RuntimeError: no disk" in text for i in range(3))
    assert not (Path(raw_config["output-dir"]) / "run" / "summary.json").exists()


@pytest.mark.parametrize("metrics", [
    {"accuracy": 7.0}, {"sha256": "no hash"}, {"accuracy": "high"}, {"error": "out of memory"},
], ids=str)  # fmt: skip
def test_a_bad_evaluation_is_dropped_by_name(run: Run, monkeypatch: pytest.MonkeyPatch, metrics: dict[str, Any]) -> None:
    original = client_app.client.CorollaClient.evaluate

    def evaluate(self: Any, parameters: Any, config: Any) -> Any:
        loss, n, own = original(self, parameters, config)
        return loss, n, {**own, **(metrics if self.client_id == 2 else {})}

    monkeypatch.setattr(client_app.client.CorollaClient, "evaluate", evaluate)
    folder = run(num_server_rounds=1)
    evaluation = rounds(folder)[0]["evaluation"]
    assert [f["client"] for f in evaluation["failures"]] == [2] and evaluation["absent"] == [2]
    assert evaluation["digest"] is None and evaluation["accuracy"] is not None
    assert read_summary(folder.path)["absent"] == [2]


# bad input leaves nothing behind


@pytest.mark.parametrize(("changes", "words"), [
    ({"model": "no_such_module:make"}, "model no_such_module:make: cannot import no_such_module"),
    ({"model": "tests.test_run:raises"}, "the factory raised RuntimeError: no weights"),
    ({"model": "tests.test_run:wrong_size"}, "must give logits of shape [2, 10], got [2, 11]"),
    ({"model": "json:dumps"}, "model json:dumps: the factory raised TypeError"),
    ({"initial_weights": "/no/such.safetensors"}, "initial-weights /no/such.safetensors: no such file"),
    ({"dataset": "npz:/no/such.npz"}, "/no/such.npz"),
    ({"dataset": "folder:/no/such/folder"}, "/no/such/folder"),
    ({"partition": "file:/no/such.npz"}, "partition: no file /no/such.npz"),
    ({"partition": "pathological", "classes_per_client": 11}, "classes-per-client"),
    ({"train_samples": 100_000}, "train-samples"),
    ({"num_clients": 3, "min_available_clients": 4}, "min-available-clients"),
    ({"fedcac": {"tau": "abc"}}, "fedcac.tau: expected a number, got 'abc'"),
    ({"output_dir": "/proc/none"}, "output-dir: cannot create /proc/none/run"),
])  # fmt: skip
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
    with pytest.raises(UserError, match="client 0: device: cuda asked for, this machine has 0 usable GPUs"):
        run(device="cuda")
    assert no_run_folder(raw_config)


def test_a_client_with_another_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    original = models.build

    def other(name: str, **options: Any) -> Any:
        return original("cnn" if building else name, **options)

    building = False
    original_context = client_app.client.CorollaClient._context

    def context(self: Any, download: Any) -> Any:
        nonlocal building
        building = self.client_id == 1
        try:
            return original_context(self, download)
        finally:
            building = False

    monkeypatch.setattr(models, "build", other)
    monkeypatch.setattr(client_app.client.CorollaClient, "_context", context)
    (failure,) = rounds(run(num_server_rounds=1))[0]["failures"]
    assert failure["client"] == 1 and "received 17226 parameters" in failure["cause"]


def test_nodes_without_their_configuration(raw_config: dict[str, Any], run: Run) -> None:
    with pytest.raises(UserError, match="num-partitions must be the run's 3 clients, got 5"):
        run(node_configs={1: {"num-partitions": 5}})
    with pytest.raises(UserError, match=r"the SuperNode needs --node-config 'partition-id=K num-partitions=N'"):
        run(node_configs={1: {"partition-id": "one"}})
    assert no_run_folder(raw_config)


def test_clients_whose_data_differ(run: Run, tmp_path: Path, raw_config: dict[str, Any]) -> None:
    nodes = {}
    for i, side in enumerate((8, 8, 10)):
        path = tmp_path / f"site{i}.npz"
        x = np.random.default_rng(i).integers(0, 256, (12, side, side), np.uint8)
        np.savez(path, x_train=x, y_train=np.arange(12) % 2, x_test=x[:4], y_test=np.arange(4) % 2)
        nodes[i] = {"data-path": str(path)}
    with pytest.raises(UserError) as info:
        run(dataset="node", classes="0,1", node_configs=nodes)
    assert "clients [0, 1]: 1 channels, 2 classes, 8 pixels" in str(info.value)
    assert "clients [2]: 1 channels, 2 classes, 10 pixels" in str(info.value)
    assert no_run_folder(raw_config)
    del nodes[2]
    records = rounds(run(dataset="node", classes="0,1", node_configs=nodes, num_clients=2))
    assert records[-1]["evaluation"]["accuracy"] is not None


# small clients


@pytest.fixture
def uneven(tmp_path: Path) -> dict[str, Any]:
    """Client 0 has one sample, client 1 no test data, client 2 batch-size + 1 samples."""
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (40, 8, 8, 1), np.uint8)
    data, split = tmp_path / "data.npz", tmp_path / "split.npz"
    np.savez(data, x_train=x, y_train=np.arange(40) % 10, x_test=x[:20], y_test=np.arange(20) % 10)
    np.savez(
        split, train_idx_0=[3], train_idx_1=np.arange(4, 12), train_idx_2=np.arange(12, 33), test_idx_0=[0, 1],
        test_idx_1=np.zeros(0, int), test_idx_2=np.arange(5, 15),
    )  # fmt: skip
    return {"dataset": f"npz:{data}", "partition": f"file:{split}", "batch_size": 20, "model": "resnet8"}


@pytest.mark.parametrize("method", METHODS)
def test_one_sample_and_no_test_data(run: Run, uneven: dict[str, Any], method: str) -> None:
    folder = run(method=method, **uneven)
    for record in rounds(folder):
        assert record["failures"] == []
        rows = record["clients"]
        assert [rows[i]["train-samples"] for i in "012"] == [1, 8, 21]
        assert [rows[i]["test-samples"] for i in "012"] == [2, 0, 10]
        assert rows["1"]["accuracy-before"] is None and rows["1"]["loss"] is not None
        # unweighted over those that have it; pooled by test samples
        a, b = rows["0"]["accuracy-before"], rows["2"]["accuracy-before"]
        assert record["accuracy-before"] == pytest.approx((a + b) / 2)
        assert record["accuracy-before-pooled"] == pytest.approx((2 * a + 10 * b) / 12)
    summary = read_summary(folder.path)
    assert summary["digest"] and summary["final-accuracy"] is not None


def test_nobody_has_test_data(run: Run, uneven: dict[str, Any], tmp_path: Path) -> None:
    split = dict(np.load(tmp_path / "split.npz"))
    np.savez(tmp_path / "none.npz", **{k: v if "train" in k else v[:0] for k, v in split.items()})
    summary = read_summary(run(**(uneven | {"partition": f"file:{tmp_path / 'none.npz'}", "model": "mlp"})).path)
    assert summary["final-accuracy"] is None and summary["best-accuracy"] is None and summary["digest"]


# models


def test_collect_personal_models(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: dict[int, np.ndarray] = {}
    original = LocalTrainer.train

    def train(self: LocalTrainer, start: Model, **options: Any) -> Model:
        result = original(self, start, **options)
        trained[self.client_id] = result.params
        return result

    monkeypatch.setattr(LocalTrainer, "train", train)
    folder = run(method="local", collect_personal_models=True)
    layout = layout_of("mlp")
    assert {p.name for p in (folder.path / "models").iterdir()} == {f"client-{i}.safetensors" for i in range(3)}
    for i in range(3):
        saved = weights.load_safetensors(folder.path / "models" / f"client-{i}.safetensors", layout)
        assert (saved.params == trained[i]).all()


def test_without_collecting_local_models_stay_on_the_clients(run: Run, tmp_path: Path) -> None:
    folder = run(method="local")
    assert not (folder.path / "models").exists()
    assert {p.parent.name for p in (tmp_path / "state").rglob("*.state")} == {f"client-{i:04d}" for i in range(3)}


def test_initial_weights(run: Run, tmp_path: Path) -> None:
    first = run(run_name="first")
    file = first.path / "models" / "global.safetensors"
    second = run(run_name="second", initial_weights=str(file))
    # round 1 of the second run starts where the first ended
    final, start = rounds(first)[-1]["evaluation"]["clients"], rounds(second)[0]["clients"]
    assert [start[i]["loss-before"] for i in "012"] == [final[i]["loss"] for i in "012"]


# the grid itself


def test_clients_are_handled_one_after_the_other_and_in_any_order(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = read_summary(run(method="fedcac", run_name="forward").path)["digest"]
    original = InProcessGrid.pull_messages

    def last_first(self: InProcessGrid, message_ids: Any) -> Any:
        return original(self, list(message_ids)[::-1])

    monkeypatch.setattr(InProcessGrid, "pull_messages", last_first)
    assert read_summary(run(method="fedcac", run_name="backward").path)["digest"] == forward


def test_the_client_app_is_the_deployed_one() -> None:
    assert isinstance(real_app, ClientApp) and callable(client_fn)


def test_metrics_are_plain_json(run: Run) -> None:
    folder = run(method="fedcac", num_server_rounds=1)
    (line,) = (folder.path / "metrics.jsonl").read_text().splitlines()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(line, parse_constant=refuse)


def test_a_clients_odd_numbers_and_texts_harm_nobody_else(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN seconds are recorded as null, NaN sample counts drop the client, its text cannot forge our log marks."""
    real = wire.encode_upload

    def odd(upload: wire.Upload) -> Any:
        arrays, num_examples, metrics = real(upload)
        return arrays, num_examples, {**metrics, "seconds-train": float("nan")}

    monkeypatch.setattr(wire, "encode_upload", odd)
    clients = next(read_metrics(run().path))["clients"]
    assert all(row["seconds"]["train"] is None for row in clients.values())
    assert wire.one_line("boom\ncorolla: error: fake\n" + "x" * 900).count("\n") == 0
