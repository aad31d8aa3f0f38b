"""Where a client trains: CPU or GPU, and how torch gets into its process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from client_app.trainer import resolve_device
from fl_app.errors import UserError
from tests.client_app.test_train import mlp, train, with_batchnorm
from tests.facts import rejected


@pytest.mark.parametrize(("device", "gpus"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, device: str, gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with rejected(UserError, "device", f"{device} asked for", f"machine has {gpus} usable", "GPUs"):
        resolve_device(device)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [str(resolve_device(d)) for d in ("auto", "cpu", "cuda:1")] == ["cpu", "cpu", "cuda:1"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert str(resolve_device("auto")) == "cuda"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_training_on_a_gpu_is_training_on_the_cpu_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for make in (mlp, with_batchnorm):
        on_gpu = train(make, device="cuda", momentum=0.9, augment="crop-flip")
        on_cpu = train(make, device="cpu", momentum=0.9, augment="crop-flip")
        np.testing.assert_allclose(on_gpu.params, on_cpu.params, atol=1e-3)  # another order of summation


def test_torch_is_imported_with_the_collector_off() -> None:
    """In a fresh process, as in a deployment; what the import left behind is never looked at again."""
    code = (
        "import gc, sys; from client_app import client, session\n"
        "assert 'torch' not in sys.modules and 'sqlalchemy' not in sys.modules; before = gc.get_stats()[2]['collections']\n"
        "session.import_torch(); assert 'torch' in sys.modules and gc.isenabled() and gc.get_freeze_count() > 100_000\n"
        "assert gc.get_stats()[2]['collections'] == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
