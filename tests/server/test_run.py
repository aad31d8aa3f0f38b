"""Whole runs in one process: the real ServerApp and ClientApp, joined by InProcessGrid."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from client_app.trainer import LocalTrainer
from corolla.api.live import log_to
from fl_app import models, weights
from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.layout import Layout, Model
from fl_app.server import matrices
from fl_app.server.run_folder import RUN, RunFolder, ask_to_stop, read_about, read_config, read_metrics, read_summary
from fl_app.transport import wire
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHODS as ALL_METHODS
from strategies.fedcac import personalize
from strategies.kernels import masks
from tests.api.test_live import display, drawn
from tests.conftest import IN_TWO_ROUNDS, Run
from tests.facts import mentions, rejected
from tests.report.builders import write
from tests.report.conftest import undrawn as undrawn
from tests.tracking.test_tensorboard import read_events

METHODS = ("fedavg", "local", "fedcac")


def rounds(folder: RunFolder) -> list[dict[str, Any]]:
    return list(read_metrics(folder.path))


def layout_of(model: str) -> Layout:
    return Layout.of(models.build(model, in_channels=1, num_classes=10, image_size=8))


# results


@pytest.mark.parametrize("model", ["mlp", "resnet8"])
@pytest.mark.parametrize("method", METHODS)
def test_a_run(run: Run, method: str, model: str) -> None:
    small = {"num_clients": 2, "train_samples": 10, "test_samples": 6} if model == "resnet8" else {}
    folder = run(method=method, model=model, fedcac={"tau": 0.3}, **small)
    n, layout = small.get("num_clients", 3), layout_of(model)
    records = rounds(folder)
    assert [r["round"] for r in records] == [1, 2]
    # plain JSON has neither
    assert not {"NaN", "Infinity"} & {*re.split(r"\W+", (folder.path / "metrics.jsonl").read_text())}
    whole = 4 * (layout.d + layout.b)
    down = {"fedavg": whole, "fedcac": whole, "local": 0}[method]
    up = down + (-(-layout.d // 8) if method == "fedcac" else 0)
    for record in records:
        assert set(record) >= {
            "round",
            "accuracy-before",
            "accuracy-before-pooled",
            "accuracy-after",
            "accuracy-after-pooled",
            "loss",
            "seconds",
            "upload-bytes",
            "download-bytes",
            "failures",
            "clients",
        }
        assert record["failures"] == [] and list(record["clients"]) == [str(i) for i in range(n)]
        for row in record["clients"].values():
            assert row["upload-bytes"] == up and row["download-bytes"] == down
            assert row["train-samples"] == small.get("train_samples", 24)
            assert row["test-samples"] == small.get("test_samples", 10)
            assert ("collaborators" in row) == (method == "fedcac")
            assert {"train", "evaluate"} <= set(row["seconds"])
        overlap = matrices.matrix_of(folder.path, record, "overlap")
        assert "overlap" not in record and (overlap is not None) == (method == "fedcac")
        assert overlap is None or overlap.values.shape == (n, n)
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
    assert resolved["num-clients"] == n and resolved["run-name"] == "run"
    tables = {name: table for name, table in resolved.items() if isinstance(table, dict)}
    assert list(tables) == {"local": []}.get(method, [method])
    assert method != "fedcac" or tables["fedcac"]["tau"] == 0.3
    saved = {p.name for p in (folder.path / "models").glob("*")} if (folder.path / "models").exists() else set()
    assert ("global.safetensors" in saved) == (method != "local")
    assert ("client-0.safetensors" in saved) == (method == "fedcac")
    if method != "local":
        model_file = weights.load_safetensors(folder.path / "models" / "global.safetensors", layout)
        assert model_file.params.shape == (layout.d,)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedcac", {}),
        ("local", {"model": "tests.small_models:batchnorm", "augment": "crop-flip", "momentum": 0.9}),
    ],
)
def test_a_rerun_gives_the_same_bits(run: Run, method: str, options: dict[str, Any]) -> None:
    def measured(**changes: Any) -> tuple[Any, ...]:
        folder = run(method=method, num_clients=2, train_samples=9, **options, **changes)
        accuracies = [(r["accuracy-before"], r["accuracy-after"], r["loss"]) for r in rounds(folder)]
        return read_summary(folder.path)["digest"], accuracies

    first = measured(run_name="a")
    assert measured(run_name="b") == first
    assert measured(run_name="c", seed=1)[0] != first[0]


def test_fedcac_in_a_run_is_the_mathematics(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[np.ndarray, np.ndarray, int]] = []
    original = wire.decode_upload

    def spy(content: Any, expected: Any) -> Any:
        upload = original(content, expected)
        sent.append((upload.model.params.copy(), upload.mask.copy(), upload.num_examples))
        return upload

    monkeypatch.setattr(wire, "decode_upload", spy)
    folder = run(
        method="fedcac", num_server_rounds=1, partition="dirichlet", min_samples=5, fedcac={"tau": 0.3, "beta": 2}
    )
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


@pytest.mark.parametrize(
    "method",
    [*METHODS, *(pytest.param(name, marks=pytest.mark.nightly) for name in ALL_METHODS if name not in METHODS)],
)
def test_the_rate_of_fine_tuning_does_not_decay(run: Run, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    tuned, train = [], LocalTrainer.train

    def watched(self: LocalTrainer, start: Model, **options: Any) -> Model:
        if options.get("purpose") == "finetune":
            tuned.append(self.learning_rate)
        return train(self, start, **options)

    monkeypatch.setattr(LocalTrainer, "train", watched)
    settings = {"schedule": "cosine", "finetune_epochs": 1, "evaluate_every": 1, "learning_rate": 0.05}
    run(method=method, **settings, **IN_TWO_ROUNDS.get(method, {}))
    # three clients, two evaluations; the round's rate in the second is half
    assert tuned == [0.05] * 6


def test_cosine_and_constant_fine_tune_the_same_models_alike(run: Run) -> None:
    """In round 1 both have the same rate; after it the models are the same, and so is what fine-tuning makes of them."""

    def tuned(name: str, **more: Any) -> list[float]:
        folder = run(run_name=name, num_server_rounds=4, evaluate_every=1, finetune_epochs=3, **more)
        return [row["accuracy-finetuned"] for row in rounds(folder)[0]["evaluation"]["clients"].values()]

    constant = tuned("constant")
    assert tuned("cosine", schedule="cosine") == constant == tuned("decay", learning_rate_decay=0.1)
    assert tuned("tiny", finetune_learning_rate=1e-9) != constant


def test_a_finished_run_is_never_overwritten(run: Run) -> None:
    folder = run(num_server_rounds=1)
    before = read_summary(folder.path)
    with rejected(UserError, "", "run-name", "/run exists already", "choose another name", "remove"):
        run(num_server_rounds=1, seed=4)
    assert read_summary(folder.path) == before


def test_fedcac_with_local_statistics_does_not_send_them(run: Run) -> None:
    small = {"model": "tests.small_models:batchnorm", "num_clients": 2, "train_samples": 8, "num_server_rounds": 2}
    folder = run(method="fedcac", fedcac={"batchnorm-statistics": "local"}, **small)
    layout = layout_of("tests.small_models:batchnorm")
    for record in rounds(folder):
        for row in record["clients"].values():
            assert row["upload-bytes"] == 4 * layout.d + -(-layout.d // 8) and row["download-bytes"] == 4 * layout.d


OPTIONS: list[dict[str, Any]] = [
    {"selection": "random"},
    {"selection": "sensitivity-reverse"},
    {"collaboration": "none"},
    {"collaboration": "top"},
    {"non-critical": "as-critical"},
    {"tau": 0.0},
    {"tau": 1.0},
    {"beta": 1},
]


def test_every_option_changes_the_result(run: Run) -> None:
    # sharp data (two classes each), so that thresholds choose some clients and not others
    def digest(name: str, **fedcac: Any) -> str:
        common = {"num_clients": 4, "partition": "pathological", "run_name": name}
        return str(read_summary(run(method="fedcac", fedcac={"beta": 4} | fedcac, **common).path)["digest"])

    plain = digest("plain")
    assert [option for option in OPTIONS if digest(str(OPTIONS.index(option)), **option) == plain] == []


# partial participation


def test_partial_participation(run: Run) -> None:
    folder = run(method="fedcac", num_clients=5, fraction_train=0.4, num_server_rounds=4)
    records = rounds(folder)
    took_part = [sorted(map(int, r["clients"])) for r in records]
    assert all(len(ids) == 2 for ids in took_part) and len({tuple(ids) for ids in took_part}) > 1
    # all clients, not only the round's
    assert list(records[-1]["evaluation"]["clients"]) == ["0", "1", "2", "3", "4"]
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


# small clients


@pytest.fixture
def uneven(tmp_path: Path) -> dict[str, Any]:
    """Client 0 has one sample, client 1 no test data, client 2 batch-size + 1 samples."""
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (40, 8, 8, 1), np.uint8)
    data, split = tmp_path / "data.npz", tmp_path / "split.npz"
    np.savez(data, x_train=x, y_train=np.arange(40) % 10, x_test=x[:20], y_test=np.arange(20) % 10)
    np.savez(
        split,
        train_idx_0=[3],
        train_idx_1=np.arange(4, 12),
        train_idx_2=np.arange(12, 33),
        test_idx_0=[0, 1],
        test_idx_1=np.zeros(0, int),
        test_idx_2=np.arange(5, 15),
    )
    return {
        "dataset": f"npz:{data}",
        "partition": f"file:{split}",
        "batch_size": 20,
        "model": "tests.small_models:batchnorm",
    }


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
    folder = run(method="local", keep_state=True)
    assert not (folder.path / "models").exists()
    assert {p.parent.name for p in (tmp_path / "state").rglob("*.state")} == {f"client-{i:04d}" for i in range(3)}


def test_state_is_removed_with_its_finished_run(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = run(method="local", run_name="one")
    assert list((tmp_path / "state").iterdir()) == []
    # a model of so little training may well answer one class
    assert not [record for record in caplog.records if not mentions(record.getMessage(), "predicts the same", "class")]
    with rejected(UserError, "resume", "clients of", "/one removed", "state when", "ended", "keep-state = true can"):
        run(method="local", run_name="one", resume=str(folder.path), num_server_rounds=4)
    kept = run(method="local", run_name="two", keep_state=True)
    longer = run(method="local", run_name="two", resume=str(kept.path), num_server_rounds=4)
    assert len(rounds(longer)) == 4 and list((tmp_path / "state").iterdir()) == []
    run(method="fedavg", run_name="three")  # has none
    run(method="fedavg", run_name="three", resume=str(folder.path.with_name("three")), num_server_rounds=4)


def test_generations_that_no_checkpoint_names_are_deleted_at_once(run: Run, tmp_path: Path) -> None:
    run(method="local", num_server_rounds=9, checkpoint_every=3, keep_state=True, num_clients=2)
    left = sorted(p.stem[:6] for p in (tmp_path / "state").rglob("client-0001/*.state"))
    # checkpoints after 3 and 6, what round 9 started from, and its result
    assert left == [
        "000003",
        "000006",
        "000008",
        "000009",
    ]


def test_initial_weights(run: Run, tmp_path: Path) -> None:
    first = run(run_name="first")
    file = first.path / "models" / "global.safetensors"
    second = run(run_name="second", initial_weights=str(file))
    # round 1 of the second run starts where the first ended
    final, start = rounds(first)[-1]["evaluation"]["clients"], rounds(second)[0]["clients"]
    assert [start[i]["loss-before"] for i in "012"] == [final[i]["loss"] for i in "012"]


@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_a_part_of_the_initial_weights(run: Run, tmp_path: Path, method: str) -> None:
    first = run(run_name="first", model="mlp", num_server_rounds=1)
    tensors = load_file(first.path / "models" / "global.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("classifier.")}
    seeded = models.build("mlp", in_channels=1, num_classes=10, image_size=8, seed=0).state_dict()
    save_file(kept, tmp_path / "part.safetensors")
    save_file(seeded | kept, tmp_path / "whole.safetensors")
    part, whole = (
        run(
            method=method,
            run_name=name,
            model="mlp",
            num_server_rounds=1,
            initial_weights=str(tmp_path / f"{name}.safetensors"),
            initial_weights_partial=name == "part",
        )
        for name in ("part", "whole")
    )
    assert read_summary(part.path)["digest"] == read_summary(whole.path)["digest"]
    assert mentions(
        (part.path / "log.txt").read_text(), "from the seed (2)", "classifier.weight [10, 64]", "classifier.bias [10]"
    )


@pytest.mark.parametrize("method", ["local", "lg-fedavg", "fedper", "fedbn"])
def test_what_stays_local_starts_from_the_file_of_initial_weights_too(run: Run, method: str) -> None:
    model: dict[str, Any] = {"model": "tests.small_models:batchnorm", "num_server_rounds": 1, "local_epochs": 1}
    file = str(run(run_name="first", **model).path / "models" / "global.safetensors")
    plain, own = (
        rounds(run(method=name, run_name=name, initial_weights=file, **model))[0] for name in ("fedavg", method)
    )
    before = ({i: row["loss-before"] for i, row in record["clients"].items()} for record in (plain, own))
    assert next(before) == next(before)


# the grid itself


def test_clients_are_handled_one_after_the_other_and_in_any_order(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = read_summary(run(method="fedcac", run_name="forward").path)["digest"]
    original = InProcessGrid.pull_messages

    def last_first(self: InProcessGrid, message_ids: Any) -> Any:
        return original(self, list(message_ids)[::-1])

    monkeypatch.setattr(InProcessGrid, "pull_messages", last_first)
    assert read_summary(run(method="fedcac", run_name="backward").path)["digest"] == forward


def test_runs_without_a_name_that_start_in_the_same_second_have_a_folder_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fl_app.server.run_folder.time.strftime", lambda form: "20260101-120000")
    unnamed = RunConfig(output_dir=str(tmp_path))
    folders = [RunFolder.create(unnamed, "e") for _ in range(3)]
    name = f"20260101-120000-{unnamed.method}-digits-seed0"
    assert [folder.path.name for folder in folders] == [name, f"{name}-2", f"{name}-3"]
    assert [read_config(folder.path)["run-name"] for folder in folders] == [name, f"{name}-2", f"{name}-3"]


def test_asking_whether_to_stop_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / RUN).write_text("{}")
    folder = RunFolder(tmp_path, "an experiment")
    assert not folder.asked_to_stop()
    assert ask_to_stop(tmp_path)
    assert folder.asked_to_stop() and folder.asked_to_stop()
    folder.forget_stop()
    assert not folder.asked_to_stop()


# Whole runs in one process of other tasks than classification, and of images that are not square ----------------------


def arrays(directory: Path, x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Write a data set, a quarter of it for test, and return a run's settings for it."""
    k = len(x) * 3 // 4
    np.savez(directory / "data.npz", x_train=x[:k], y_train=y[:k], x_test=x[k:], y_test=y[k:])
    return {"dataset": f"npz:{directory / 'data.npz'}", "partition": "iid", "train_samples": 0, "test_samples": 0}


def test_multi_label(run: Run, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(240, 4)).astype(np.float32)
    labels = (x[:, :3] > 0).astype(int)
    folder = run(
        **arrays(tmp_path, x, labels), task="multi-label", classes="red,green,blue", learning_rate=0.5, local_epochs=5
    )
    records, summary = list(read_metrics(folder.path)), read_summary(folder.path)
    assert read_about(folder.path)["classes"] == ["red", "green", "blue"]
    assert 0.3 < records[0]["auc-before"] < 0.9 < records[1]["auc-before"] <= summary["best-auc"]
    assert summary["final-auc"] > 0.95 and summary["final-f1"] > 0.85 and summary["failures"] == 0
    assert set(records[-1]["clients"]) == {"0", "1", "2"} and "accuracy" not in records[-1]["evaluation"]


@pytest.mark.parametrize("model", ["cnn", pytest.param("resnet8", marks=pytest.mark.nightly)])
def test_images_that_are_not_square(run: Run, tmp_path: Path, model: str) -> None:
    y = np.arange(96) % 2
    x = np.random.default_rng(0).integers(0, 100, (96, 6, 4), np.uint8)
    x[y == 1, 4:] += 120  # the two lowest of six rows
    folder = run(**arrays(tmp_path, x, y), model=model, learning_rate=0.05, momentum=0.9, local_epochs=5)
    summary, last = read_summary(folder.path), list(read_metrics(folder.path))[-1]
    network = models.build(model, in_channels=1, num_classes=2, image_size=6, input_shape=(1, 6, 4))
    layout = Layout.of(network)
    assert all(row["upload-bytes"] == 4 * (layout.d + layout.b) for row in last["clients"].values())
    assert summary["failures"] == 0 and summary["digest"]
    # in training, where chance is 0.69; BatchNorm's statistics take more rounds
    assert last["loss"] < 0.3


@pytest.mark.usefixtures("undrawn")
def test_a_regression_is_told_by_its_headline(run: Run, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(80, 3)).astype(np.float32)
    (panel, _), (plain, console) = display(), display(terminal=False)
    with log_to(panel):
        folder = run(**arrays(tmp_path, x, x.sum(1)), task="regression", learning_rate=0.02, track="tensorboard")
    records, summary = list(read_metrics(folder.path)), read_summary(folder.path)
    before = [record["rmse-before"] for record in records]

    shown = "\n".join(drawn(panel))
    assert (
        mentions(shown, "rmse (mean ± std)", "before", "after training")
        and f"{before[1]:.4g} ± " in shown
        and "accuracy" not in shown
    )
    with log_to(plain):
        run(**arrays(tmp_path, x, x.sum(1)), task="regression", learning_rate=0.02, run_name="again")
    assert f"round 2/2: rmse {before[1]:.4g} ± " in console.file.getvalue()  # type: ignore[attr-defined]

    page, names = write(tmp_path / "out", folder.path)
    assert "RMSE over rounds" in page and f">{summary['final-rmse']:.4g}<" in page and "ccuracy" not in page
    assert {"rmse", "clients-rmse"} <= names and not any("accuracy" in name for name in names)

    events = read_events(folder.path)
    tags = events.Tags()["scalars"]
    assert {"rmse/before-training", "rmse/after-training", "rmse/all-clients", "all-clients/mae"} <= set(tags)
    assert [event.value for event in events.Scalars("rmse/before-training")] == pytest.approx(before, rel=1e-5)
    assert not any("accuracy" in tag for tag in tags)
