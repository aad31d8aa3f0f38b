from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

import client_app.client
from client_app.trainer import LocalTrainer
from tests.client_app.test_train import data_of, mlp
from tests.conftest import Run, config

TRAINING = """
import ctypes, os, resource, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a huge page would hide faults
from benchmarks.training import client_data, configure
from client_app.session import prepare_training
from client_app.trainer import LocalTrainer
from fl_app import models, weights
module = models.build("cnn", in_channels=1, num_classes=10, image_size=28)
# a process of its own for each: what is imported, and takes seconds, they share
for more in ({}, {"MALLOC_ARENA_MAX": "8"}):
    if not os.fork():
        break
    os.wait()
else:
    raise SystemExit
os.environ |= more
config = configure(model="cnn", local_epochs=1, batch_size=32, learning_rate=0.01, device="cpu")
prepare_training(config.client_threads)
trainer, start = LocalTrainer(module, config, client_data(128, 28, 1), 1, 0), weights.read(module)
trainer.train(start)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
trainer.train(start)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_a_trained_process_does_not_fault_its_memory_in_again() -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run([sys.executable, "-c", TRAINING], env=env, capture_output=True, text=True, check=True)
    kept, left_alone = map(int, done.stdout.split())
    assert kept < left_alone / 5


def test_a_client_sets_its_threads(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(client_app.client, "prepare_training", asked.append)
    run(client_threads=2, num_server_rounds=1)
    assert asked and set(asked) == {2}


def test_a_trainer_leaves_the_process_alone() -> None:
    before = torch.get_num_threads()
    LocalTrainer(mlp(), config(client_threads=before + 1), data_of(8), 1, 0)
    assert torch.get_num_threads() == before
