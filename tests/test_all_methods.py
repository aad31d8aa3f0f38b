"""Every method, built in or from outside (tests/plugins), through the same rounds: plain and BatchNorm model, full and
partial participation, in one process.

Per case: reruns give equal bits, the wire carries exactly the documented bytes, a run killed after a checkpoint and resumed
(client state reloaded from disk at the generation the server names) ends with the same bits. tests/e2e runs every method
through Flower's simulation and compares the digests.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from client_app.client_app import app
from fl_app import models
from fl_app.config import RunConfig, parse
from fl_app.keys import Scalar
from fl_app.layout import Layout
from fl_app.server import checkpoint
from fl_app.server.inprocess import InProcessGrid
from fl_app.server.run_folder import RunFolder, read_metrics, read_summary
from fl_app.server_app import run
from strategies import METHOD_PARAMS, METHODS
from tests.conftest import OWN_METHODS

CLIENTS = 4
MODELS = {"plain": "mlp", "batchnorm": "resnet8", "convolutional": "cnn"}


def start(directory: Path, name: str, **config: Scalar) -> tuple[RunFolder, RunConfig]:
    raw: dict[str, Scalar] = {
        "num-server-rounds": 2, "num-clients": CLIENTS, "train-samples": 24, "test-samples": 12, "local-epochs": 1,
        "batch-size": 12, "learning-rate": 0.05, "device": "cpu", "checkpoint-every": 1, "run-name": name,
        "output-dir": str(directory), "state-dir": str(directory / "state"), **{k.replace("_", "-"): v for k, v in config.items()},
    }  # fmt: skip
    parsed = parse(raw, METHOD_PARAMS)
    return run(InProcessGrid(app, raw, CLIENTS), parsed, lambda *_: None), parsed


def documented_bytes(method: str, layout: Layout, round: int) -> tuple[int, int]:
    """Bytes up and down per client in a round, as docs/methods.md has them (defaults)."""
    tensors = {slot.name: 4 * slot.size for slot in layout.params + layout.buffers}
    whole = sum(tensors.values())
    mask = -(-layout.d // 8)
    head = sum(n for name, n in tensors.items() if name in layout.classifier)
    norms = sum(n for name, n in tensors.items() if name in layout.batchnorm)
    classes, width = next(s.shape for s in layout.params if s.name in layout.classifier and len(s.shape) == 2)
    gaussians = 4 * (classes * width + width * (width + 1) // 2)
    travels = {
        "local": 0, "fedper": whole - head, "fedrep": whole - head, "fedbabu": whole - head, "lg-fedavg": head,
        "fedbn": whole - norms, "flute": whole - head, "pfedfda": whole - head + gaussians,
        "floco": whole + 9 * 4 * classes * width,
    }.get(method, whole)  # fmt: skip
    extra = {"fedcac": mask, "feddac": mask, "fedselect": mask, "fedobp": 8 * len(layout.params), "fedgen": 4 * classes}
    generator = (32 + classes + 3) * 256 + (256 + 1) * width + 2 * 256  # noise 32, hidden 256; and its statistics
    sent = {"fedgen": 4 * generator + classes} if round > 1 else {}
    return travels + extra.get(method, 0), travels + sent.get(method, 0)


def documented_extras(method: str, layout: Layout) -> tuple[int, int]:
    """Bytes up and down of the extra arrays of tests/plugins, as their docstrings have them."""
    if method != "prototypes:METHOD":
        return 0, 0
    classes, features = next(slot.shape for slot in layout.params if slot.name in layout.classifier)
    return 4 * classes * features + 8 * classes, 4 * classes * features + classes


@pytest.mark.usefixtures("own_methods")
@pytest.mark.parametrize("fraction", [1.0, 0.5], ids=["full", "partial"])
@pytest.mark.parametrize("model", ["plain", "batchnorm", pytest.param("convolutional", marks=pytest.mark.long)])
@pytest.mark.parametrize("method", [*METHODS, *OWN_METHODS])
def test_two_rounds(tmp_path: Path, method: str, model: str, fraction: float) -> None:
    config: dict[str, Scalar] = {"method": method, "model": MODELS[model], "fraction_train": fraction}
    folder, parsed = start(tmp_path, "one", **config)
    summary = read_summary(folder.path)
    rounds = list(read_metrics(folder.path))
    assert summary["digest"] and summary["failures"] == 0 and len(rounds) == 2
    assert [len(r["clients"]) for r in rounds] == [int(CLIENTS * fraction)] * 2
    assert len(rounds[-1]["evaluation"]["clients"]) == CLIENTS

    layout = Layout.of(models.build(MODELS[model], in_channels=1, num_classes=10, image_size=8))
    for record in rounds:
        plain, more = documented_bytes(method, layout, record["round"]), documented_extras(method, layout)
        documented = [plain[0] + more[0], plain[1] + more[1]]
        for client in record["clients"].values():
            assert [client["upload-bytes"], client["download-bytes"]] == documented

    again, _ = start(tmp_path, "two", **config)
    assert read_summary(again.path)["digest"] == summary["digest"]

    # as if the server had died after the first round's checkpoint, with the clients ahead of it
    (folder.path / "summary.json").unlink()
    for file in (folder.path / checkpoint.DIRECTORY).glob("round-000002.*"):
        file.unlink()
    shutil.rmtree(folder.path / "models", ignore_errors=True)
    raw = {**parsed.resolved, "resume": str(folder.path)}
    resumed = run(InProcessGrid(app, raw, CLIENTS), dataclasses.replace(parsed, resume=str(folder.path)), lambda *_: None)
    assert read_summary(resumed.path)["digest"] == summary["digest"]
    for before, after in zip(rounds, read_metrics(resumed.path), strict=True):
        assert json.dumps(strip(before)) == json.dumps(strip(after))


def strip(record: dict[str, object]) -> dict[str, object]:
    """Drop times, which differ between runs."""
    return {
        k: strip(v) if isinstance(v, dict) else v  # type: ignore[arg-type]
        for k, v in record.items()
        if k != "seconds"
    }
