"""A newer Flower computes the same: digests of one process and of a simulation (`make test-next` makes the environment)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fl_app.transport.app_bundle import APP_DIRECTORY
from tests.e2e.conftest import settings, summary

pytestmark = [pytest.mark.next, pytest.mark.timeout(900)]

NEXT = os.environ.get("COROLLA_NEXT", "")  # its Python


def digest(python: str, name: str, directory: Path, *options: str) -> str:
    """Run a small experiment with a Python's Flower."""
    values = {
        "method": "fedcac",
        "num-server-rounds": 3,
        "fedcac.beta": 2,
        "train-samples": 40,
        "local-epochs": 1,
        "device": "cpu",
    }
    values |= {"output-dir": str(directory), "run-name": name, "state-dir": str(directory / f"{name}-state")}
    words = [python, "-m", "corolla.cli", "run", "--clients", "3", *options, *settings(values)]
    done = subprocess.run(words, cwd=APP_DIRECTORY, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(summary(directory / name)["digest"])


def version(python: str) -> tuple[int, ...]:
    code = "import flwr; print(flwr.__version__)"
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    return tuple(int(word) for word in said.split(".")[:2])


@pytest.mark.skipif(not NEXT, reason="COROLLA_NEXT names no Python with a newer Flower; `make test-next` makes one")
def test_a_newer_flower_gives_the_same_digests(tmp_path: Path) -> None:
    assert version(NEXT) > version(sys.executable)
    pinned = digest(sys.executable, "pinned", tmp_path, "--in-process")
    assert digest(NEXT, "next", tmp_path, "--in-process") == pinned
    assert digest(sys.executable, "pinned-simulation", tmp_path) == pinned
    assert digest(NEXT, "next-simulation", tmp_path) == pinned
