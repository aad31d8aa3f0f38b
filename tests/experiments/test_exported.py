"""Models that leave a run: the same answers from PyTorch and ONNX files as from the run's own network; their cards; `predict`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from corolla.experiments.exported import loading, predict
from corolla.experiments.exported.export import FileForm, export
from fl_app import data, model_card, models, weights
from fl_app.config import parse
from fl_app.errors import UserError
from fl_app.known_names import MODELS
from fl_app.layout import Layout
from fl_app.server.run_folder import DATA, NORMALIZED_BY, read_config, read_metrics
from fl_app.tasks import named
from fl_app.tasks.task import Inputs
from fl_app.toml import to_toml
from strategies import METHOD_PARAMS, METHODS
from tests.conftest import Command, Run, of_each_kind
from tests.disks import full_disk
from tests.facts import mentions, rejected
from tests.fl_app.test_tasks import OWN
from tests.small_models import BATCHNORM

TINY = {"num_server_rounds": 1, "num_clients": 2, "train_samples": 12, "test_samples": 12}


def images(directory: Path, task: str) -> dict[str, Any]:
    """Write a data set of 60 images 16x16 and return a run's settings for it."""
    generator = np.random.default_rng(0)
    x = generator.integers(0, 256, (60, 16, 16, 3), np.uint8)
    y = x.mean((1, 2)) / 100 if task == "regression" else np.arange(60) % 4
    np.savez(directory / "data.npz", x_train=x, y_train=y, x_test=x[:30], y_test=y[:30])
    return {"dataset": f"npz:{directory / 'data.npz'}", "partition": "iid", "task": task, "learning_rate": 0.01}


def own_network(folder: Path, client: int | None, model: str, shape: dict[str, Any]) -> torch.nn.Module:
    """Build a run's model from its safetensors file, without what exports it."""
    module = models.build(model, **shape)
    name = "global" if client is None else f"client-{client}"
    weights.write(module, weights.load_safetensors(folder / "models" / f"{name}.safetensors", Layout.of(module)))
    return module.eval()


def answers(file: Path, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    known = model_card.read(file)
    return predict.ask(loading.open_file(file, known, METHODS), samples, known)


NIGHTLY = [
    *(("mlp", task) for task in ("classification", "regression")),
    ("cnn", "classification"),
    ("cnn", "regression"),
    ("resnet8", "regression"),
    *((model, "classification") for model, known in MODELS.items() if known.blocks),
]


@pytest.mark.parametrize(
    ("model", "task"),
    [
        (BATCHNORM["model"], "classification"),
        *(pytest.param(*case, marks=[pytest.mark.nightly, pytest.mark.timeout(900)]) for case in NIGHTLY),
    ],
)
def test_onnx_answers_as_torch(run: Run, tmp_path: Path, model: str, task: str) -> None:
    pytest.importorskip("onnxruntime")
    # BatchNorm's parameters and statistics are each client's own
    batchnorm = model not in ("mlp", "cnn")
    method = "fedbn" if batchnorm else "local"
    # statistics that fit
    trained = {"local_epochs": 15, "batch_size": 6} if batchnorm and model != "resnet8" else {}
    setting = {"normalize": "mean-std", "collect_personal_models": True, **TINY, **images(tmp_path, task), **trained}
    folder = run(method=method, model=model, **setting)
    outputs_of = {}
    found = data.prepare_for(parse(read_config(folder.path), METHOD_PARAMS))
    samples = np.array(found.x_test)
    shape = found.info.model_arguments
    inputs = Inputs(named(task), "mean-std", 3, torch.device("cpu"), found.info.mean, found.info.std)
    for client in (0, 1):
        network = own_network(folder.path, client, model, shape)
        with torch.no_grad():
            want = network(inputs(torch.from_numpy(samples)))
        file, _ = export(folder.path, METHODS, client, tmp_path / f"{client}.onnx", form=FileForm.onnx)
        outputs, predictions = answers(file, samples)
        outputs_of[client] = outputs
        np.testing.assert_allclose(outputs, want.numpy(), atol=1e-5, rtol=1e-5)
        final = want.softmax(1) if task == "classification" else want
        np.testing.assert_allclose(predictions, final.numpy(), atol=1e-5, rtol=1e-5)
        for count in (1, 2):  # any number of samples
            np.testing.assert_allclose(answers(file, samples[:count])[0], outputs[:count], atol=1e-5, rtol=1e-5)
    assert np.abs(outputs_of[0] - outputs_of[1]).max() > 1e-3
    if batchnorm:
        mine, other = (own_network(folder.path, client, model, shape) for client in (0, 1))
        for name, buffer in mine.named_buffers():
            buffer.copy_(other.get_buffer(name))
        # its own statistics are in the file
        with torch.no_grad():
            assert (mine(inputs(torch.from_numpy(samples))) - torch.from_numpy(outputs_of[0])).abs().max() > 1e-4


@pytest.mark.parametrize("method", of_each_kind())
def test_every_methods_model_answers_as_the_run_measured(run: Run, tmp_path: Path, method: str) -> None:
    more = {"num_server_rounds": 2, "fedconcat": {"encoder_rounds": 1}} if method == "fedconcat" else {}
    folder = run(method=method, collect_personal_models=True, **{**TINY, **more})
    rows = list(read_metrics(folder.path))[-1]["evaluation"]["clients"]
    config = parse(read_config(folder.path), METHOD_PARAMS)
    for client in (0, 1):
        file, told = export(folder.path, METHODS, client, tmp_path / f"{client}.pt")
        part = data.open_client(config, client)
        outputs, _ = answers(file, part.x_test)
        _, accuracy = predict.measure(outputs, part.y_test, told)
        assert accuracy == rows[str(client)]["accuracy"] == told["metrics"]["accuracy"]
        assert told["metrics"]["clients"] == 1 and told["parameters-sha256"] == rows[str(client)]["sha256"]


def test_predictions_are_measured_by_the_runs_headline(run: Run, tmp_path: Path) -> None:
    folder = run(collect_personal_models=True, headline="macro-f1", **TINY)
    rows = list(read_metrics(folder.path))[-1]["evaluation"]["clients"]
    part = data.open_client(parse(read_config(folder.path), METHOD_PARAMS), 0)
    file, told = export(folder.path, METHODS, 0, tmp_path / "0.pt")
    metric, value = predict.measure(answers(file, part.x_test)[0], part.y_test, told)
    assert metric.name == "macro-f1" and value == rows["0"]["macro-f1"]


@pytest.mark.parametrize(
    "method",
    ["pfedgate", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("fedem", "floco", "pfedfda"))],
)
def test_onnx_of_methods_that_wrap_the_network(run: Run, tmp_path: Path, method: str) -> None:
    pytest.importorskip("onnxruntime")
    folder = run(method=method, collect_personal_models=True, **TINY)
    files = [export(folder.path, METHODS, 1, tmp_path / f"1{end}", form=FileForm(end))[0] for end in (".pt", ".onnx")]
    samples = np.random.default_rng(0).integers(0, 256, (9, 1, 8, 8), np.uint8)
    for ours, theirs in zip(*(answers(file, samples) for file in files), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)
    probabilities = answers(files[1], samples)[1]
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)


# cards


@pytest.fixture
def exported(run: Run, tmp_path: Path) -> Path:
    return export(run(method="fedcac", **TINY).path, METHODS, 1, tmp_path / "model.pt")[0]


def test_every_changed_byte_is_found(exported: Path) -> None:
    assert model_card.read(exported)["model"] == "client-1"
    for path in (exported, model_card.beside(exported)):
        content = path.read_bytes()
        # of the card every third byte, of the model some from all over it
        for at in range(0, len(content), 3 if path.suffix == ".json" else len(content) // 70):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            with rejected(UserError, "", "has changed since"):
                model_card.read(exported)
        path.write_bytes(content[:-1])
        with pytest.raises(UserError):
            model_card.read(exported)
        path.write_bytes(content)
    model_card.read(exported)
    model_card.beside(exported).unlink()
    with rejected(UserError, "", "model.pt.json", "no such file", "directory", "model.pt needs", "card beside"):
        model_card.read(exported)


def test_a_card_tells_the_run(run: Run, tmp_path: Path) -> None:
    folder = run(method="fedcac", **TINY)
    _, mine = export(folder.path, METHODS, 1, tmp_path / "1.pt")
    _, common = export(run(method="ditto", run_name="c", **TINY).path, METHODS, None, tmp_path / "g.pt")
    last, clients = list(read_metrics(folder.path))[-1], json.loads((folder.path / "clients.json").read_text())
    assert mine["run"]["digest"] == last["evaluation"]["digest"] and mine["settings"]["fedcac.tau"] == 0.5
    assert mine["data"]["class-counts"] == clients["1"]["class-counts"] and mine["data"]["train-samples"] == 12
    assert common["data"]["train-samples"] == 24
    assert mine["metrics"] == {"clients": 1, "accuracy": last["evaluation"]["clients"]["1"]["accuracy"]}
    # no client uses the common part as it is
    assert common["metrics"] == {}
    assert str(tmp_path) not in (tmp_path / "1.pt.json").read_text()
    _, average = export(run(method="fedavg", run_name="b", **TINY).path, METHODS, None, tmp_path / "a.pt")
    assert average["metrics"]["clients"] == 2 and average["metrics"]["accuracy"] == average["run"]["final-accuracy"]


def test_a_client_that_uses_the_global_model_is_given_that_one(run: Run, tmp_path: Path) -> None:
    folder = run(method="fedavg", **TINY)
    common, theirs = (export(folder.path, METHODS, client, tmp_path / f"{client}.pt") for client in (None, 1))
    same = [torch.load(file) for file, _ in (common, theirs)]
    assert same[0].keys() == same[1].keys() and all(torch.equal(same[0][name], same[1][name]) for name in same[0])
    assert theirs[1]["model"] == "client-1" and theirs[1]["parameters-sha256"] == common[1]["parameters-sha256"]
    rows = list(read_metrics(folder.path))[-1]["evaluation"]["clients"]
    assert theirs[1]["metrics"] == {"clients": 1, "accuracy": rows["1"]["accuracy"]}
    for method, said in (("ditto", "which only the client can make"), ("fedper", "holds no model of client 1")):
        other = run(method=method, run_name=method, **TINY).path
        with rejected(UserError, "", said, "run with --set", "collect-personal-models=true"):
            export(other, METHODS, 1, tmp_path / "no.pt")
    assert not (tmp_path / "no.pt").exists()


# the commands


@pytest.fixture
def corolla(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Command) -> Command:
    monkeypatch.chdir(tmp_path)
    return command


def test_images_get_a_class_and_its_probability(corolla, run: Run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("onnxruntime")
    x = np.random.default_rng(1).integers(0, 256, (40, 8, 8), np.uint8)
    names = np.array(["cat", "dog", "fox", "owl"])
    np.savez(tmp_path / "d.npz", x_train=x, y_train=names[np.arange(40) % 4], x_test=x, y_test=names[np.arange(40) % 4])
    folder = run(method="fedavg", dataset=f"npz:{tmp_path / 'd.npz'}", partition="iid", **TINY)
    network = own_network(folder.path, None, "mlp", {"in_channels": 1, "num_classes": 4, "image_size": 8})
    with torch.no_grad():
        sure = network(torch.from_numpy(x[:3, None]).float() / 255).softmax(1)
    for k in range(3):
        Image.fromarray(x[k]).save(tmp_path / f"{k}.png")
    np.savez(tmp_path / "three.npz", x=x[:3], y=names[:3])
    want = [[names[int(row.argmax())], f"{float(row.max()):.4f}"] for row in sure]
    for end in ("pt", "onnx"):
        code, out, _ = corolla("export", folder.path, "--output", f"m.{end}", *(["--onnx"] if end == "onnx" else []))
        assert code == 0 and model_card.read(Path(f"m.{end}"))["sha256"] in out
        code, out, _ = corolla("predict", f"m.{end}", "0.png", "1.png", "2.png")
        assert code == 0
        assert [line.split() for line in out.splitlines()] == [
            ["input", "class", "probability"],
            *([f"{k}.png", *want[k]] for k in range(3)),
        ]
        code, out, _ = corolla("predict", f"m.{end}", "three.npz")
        right = sum(row[0] == name for row, name in zip(want, names, strict=False))
        assert code == 0 and out.splitlines()[-1] == f"accuracy {100 * right / 3:.2f} % on 3 samples"
    assert corolla("verify", "m.onnx")[1].startswith("m.onnx: sound (")
    content = bytearray(Path("m.onnx").read_bytes())
    content[len(content) // 2] ^= 0x10
    Path("m.onnx").write_bytes(content)
    for words in (("verify", "m.onnx"), ("predict", "m.onnx", "0.png")):
        code, _, err = corolla(*words)
        assert code == 2 and mentions(err, "m.onnx has changed", "since", "exported", "its sha256 is")


def test_numbers_get_their_value(corolla, run: Run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("onnxruntime")
    generator = np.random.default_rng(0)
    x = generator.normal(50, 20, (80, 5)).astype(np.float32)
    y = (x @ generator.normal(0, 0.05, (5, 2))).astype(np.float32)
    np.savez(tmp_path / "t.npz", x_train=x, y_train=y, x_test=x[:40], y_test=y[:40])
    own = {"dataset": f"npz:{tmp_path / 't.npz'}", "partition": "iid", "task": "regression", "classes": "dose,days"}
    folder = run(method="fedavg", normalize="mean-std", **own, **TINY)
    network = own_network(
        folder.path, None, "mlp", {"in_channels": 5, "num_classes": 2, "image_size": 1, "input_shape": (5,)}
    )
    with torch.no_grad():
        want = network((torch.from_numpy(x) - torch.from_numpy(x).mean(0)) / torch.from_numpy(x).std(0, correction=0))
    np.savez(tmp_path / "rows.npz", x=x[:2])
    for end in ("pt", "onnx"):
        assert corolla("export", folder.path, "--output", f"m.{end}", *(["--onnx"] if end == "onnx" else []))[0] == 0
        code, out, _ = corolla("predict", f"m.{end}", "rows.npz")
        assert code == 0
        header, *rows = [line.split() for line in out.splitlines()]
        assert header == ["input", "dose", "days"] and [row[0] for row in rows] == ["rows.npz[0]", "rows.npz[1]"]
        np.testing.assert_allclose([[float(v) for v in row[1:]] for row in rows], want[:2].numpy(), rtol=1e-3)


def test_a_task_of_ones_own_goes_along(  # type: ignore[no-untyped-def]
    corolla, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    (tmp_path / "far.py").write_text(OWN)
    x = np.random.default_rng(0).normal(0, 1, (60, 4)).astype(np.float32)
    np.savez("rows.npz", x_train=x, y_train=x.sum(1), x_test=x[:20], y_test=x[:20].sum(1))
    more = (
        "dataset=npz:rows.npz",
        "task=far:Median",
        "partition=iid",
        "method=fedavg",
        "run-name=a",
        "num-server-rounds=1",
    )
    settings = [word for key in (*more, "train-samples=12", "test-samples=8") for word in ("--set", key)]
    assert corolla("run", "--in-process", "--clients", "2", *settings)[0] == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for end in ("pt", "onnx"):
        code, out, _ = corolla(
            "export", "runs/a", "--output", f"elsewhere/m.{end}", *(["--onnx"] if end == "onnx" else [])
        )
        assert code == 0 and f"elsewhere/m.{end}.plugins" in out
    (tmp_path / "far.py").unlink()
    monkeypatch.chdir(elsewhere)
    for end in ("pt", "onnx"):
        code, out, err = corolla("predict", f"m.{end}", "../rows.npz")
        assert code == 0 and "mae " in out and "on 20 samples" in out, err
        assert mentions(err, "running Python code", elsewhere / f"m.{end}.plugins" / "far.py")
        # code that only lies beside a model, perhaps a downloaded one, does not run
        Path(f"m.{end}.plugins", "far.py").rename("far.py")
        monkeypatch.chdir(tmp_path)
        # the commands before left their folders on this process's import path
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not entry.startswith(str(tmp_path))])
        code, _, err = corolla("predict", f"elsewhere/m.{end}", "rows.npz")
        assert code == 2 and "running Python code" not in err and "far" in err
        monkeypatch.chdir(elsewhere)
        Path("far.py").unlink()


def test_what_does_not_fit_is_named(corolla, exported: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    def complaint(*inputs: str) -> str:
        code, _, err = corolla("predict", exported, *inputs)
        assert code == 2
        return str(err)

    Image.fromarray(np.zeros((9, 7), np.uint8)).save("size.png")
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save("colour.png")
    Path("text.png").write_text("no image")
    grey = np.zeros((2, 8, 8), np.uint8)
    np.savez("shape.npz", x=np.zeros((2, 9, 9), np.uint8))
    np.savez("dtype.npz", x=grey.astype(np.float32)[..., None])
    np.savez("labels.npz", x=grey, y=[3, 10])
    np.savez("counts.npz", x=grey, y=[3])
    np.savez("names.npz", pixels=grey)
    np.savez("none.npz", x=grey[:0])
    assert mentions(complaint("size.png"), "size.png has 7x9 pixels", "model takes 8x8")
    assert mentions(complaint("colour.png"), "colour.png", "colour", "model takes grayscale", "images")
    assert mentions(complaint("text.png"), "text.png cannot be", "read", "image")
    assert mentions(complaint("missing.png"), "missing.png", "no such file", "directory")
    assert mentions(complaint("shape.npz"), "x holds samples uint8 [1, 9, 9]", "model takes uint8 [1, 8, 8]")
    assert mentions(complaint("dtype.npz"), "x holds samples float32 [1, 8, 8]", "model takes uint8 [1, 8, 8]")
    assert mentions(complaint("labels.npz"), "class 10", "below 10", "number of classes")
    assert mentions(complaint("counts.npz"), "target", "2 samples", "got 1")
    assert mentions(complaint("names.npz"), "names.npz", "no array x", "x_test")
    assert mentions(complaint("none.npz"), "x must hold", "got none")
    assert mentions(complaint("shape.npz", "size.png"), "table or .npz", "or image files", "got shape.npz", "size.png")


def test_images_are_resized_where_the_runs_were(corolla, run: Run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    generator = np.random.default_rng(0)
    for side in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / "f" / side / name).mkdir(parents=True)
            for k in range(8):
                Image.fromarray(generator.integers(0, 256, (20, 30, 3), np.uint8)).save(
                    tmp_path / "f" / side / name / f"{k}.png"
                )
    own = {"dataset": f"folder:{tmp_path / 'f'}", "partition": "iid", "image_size": 10}
    folder = run(method="fedavg", **own, **(TINY | {"train_samples": 8, "test_samples": 8}))
    file, known = export(folder.path, METHODS, None, tmp_path / "m.pt")
    config = parse(read_config(folder.path), METHOD_PARAMS)
    paths = [tmp_path / "f" / "test" / "cat" / "3.png", tmp_path / "f" / "test" / "dog" / "5.png"]
    samples = predict.read_inputs(paths, known).samples
    assert np.array_equal(samples, data.prepare_for(config).x_test[[3, 8 + 5]])
    code, out, _ = corolla("predict", file, *paths)
    assert code == 0 and {line.split()[1] for line in out.splitlines()[1:]} <= {"cat", "dog"}


def test_sixteen_bit_images_are_read_with_the_bits_of_the_runs(corolla, run: Run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    generator = np.random.default_rng(0)
    for side in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / "f" / side / name).mkdir(parents=True)
            for k in range(8):
                pixels = generator.integers(0, 500 if side == "test" else 4096, (8, 8), np.uint16)
                Image.fromarray(pixels).save(tmp_path / "f" / side / name / f"{k}.png")
    own = {"dataset": f"folder:{tmp_path / 'f'}", "partition": "iid"}
    folder = run(method="fedavg", **own, **(TINY | {"train_samples": 8, "test_samples": 8}))
    file, known = export(folder.path, METHODS, None, tmp_path / "m.pt")
    assert known["input"]["bits"] == 12
    paths = [tmp_path / "f" / "test" / "cat" / "3.png", tmp_path / "f" / "test" / "dog" / "5.png"]
    samples = predict.read_inputs(paths, known).samples
    assert np.array_equal(samples, data.prepare_for(parse(read_config(folder.path), METHOD_PARAMS)).x_test[[3, 13]])
    assert corolla("predict", file, *paths)[0] == 0
    Image.fromarray(np.full((8, 8), 4096, np.uint16)).save(tmp_path / "bright.png")
    code, _, err = corolla("predict", file, tmp_path / "bright.png")
    assert code == 2 and mentions(err, "bright.png", "values below 4096", "because the training", "12 bits", "got 4096")


def test_a_file_that_is_not_its_cards_model(exported: Path, tmp_path: Path) -> None:
    known = model_card.read(exported)
    for other in ({"classes": known["classes"][:-1]}, {"shape": {**known["shape"], "num_classes": 12}}):
        changed = {
            name: value for name, value in known.items() if name not in ("file", "sha256", "bytes", "card-sha256")
        } | other
        model_card.write(exported, changed)
        with pytest.raises(UserError, match="its card names 9|does not fit model mlp"):
            answers(exported, np.zeros((2, 1, 8, 8), np.uint8))


def test_what_is_needed_and_not_there(
    corolla: Any,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = run(method="fedavg", normalize="mean-std", **TINY)
    code, _, err = corolla("export", folder.path, "--output", "m.pt", "--onnx")
    assert code == 2 and (mentions(err, "end in .onnx") or "is missing" in err)
    code, _, err = corolla("export", folder.path, "--output", "nowhere/m.pt")
    assert code == 2 and mentions(err, "--output", "cannot write nowhere/m.pt", "No such file")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    code, _, err = corolla("export", folder.path, "--onnx")
    assert code == 2 and mentions(err, "onnx", "onnxruntime is missing", "pip install 'corolla[onnx]'")
    nodes = tmp_path / "nodes"
    shutil.copytree(folder.path, nodes)
    site = {"dataset": "node", "classes": ",".join("0123456789"), "normalize-over": "site"}
    (nodes / "config.toml").write_text(to_toml({**read_config(nodes), **site}))
    # where each site scales by its own data, the server knows no scaling
    facts = json.loads((nodes / "run.json").read_text())
    del facts[DATA][NORMALIZED_BY]
    (nodes / "run.json").write_text(json.dumps(facts))
    code, _, err = corolla("export", nodes)
    assert code == 2 and mentions(err, "normalize-over", "mean and standard", "node's own data")
    assert [p.name for p in tmp_path.glob("*.pt*")] == []


def test_an_export_on_a_full_disk_ends_in_one_line(run: Run, tmp_path: Path) -> None:
    folder = run(**TINY)
    with full_disk(tmp_path, free=4096) as there:
        with rejected(UserError, "--output", "No space left", "device") as error:
            export(folder.path, METHODS, None, there / "a.pt")
        assert "\n" not in str(error.value) and not [*there.iterdir()]
