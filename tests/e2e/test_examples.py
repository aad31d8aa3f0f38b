"""The examples, as their first lines say to start them: the same bits in simulation, in one process and over gRPC."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Cluster, corolla, settings, summary

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = 4

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.mark.parametrize("example, metric", [("tabular", "mae"), ("series", "accuracy"), ("lora", "accuracy")])
def test_an_example_in_all_three_modes(cluster: Cluster, tmp_path: Path, example: str, metric: str) -> None:
    if example == "lora":
        pytest.importorskip("timm")
        subprocess.run([sys.executable, str(ROOT / "examples/lora_model.py")], check=True)
    cluster.start(CLIENTS)
    modes = {"simulation": ["--clients", "4"], "in-process": ["--in-process"], "deployment": ["--superlink", "test"]}
    found = {}
    for mode, arguments in modes.items():
        own = {"run-name": f"{example}-{mode}", "state-dir": str(tmp_path / "state")}
        done = corolla(
            "run",
            f"examples/{example}.toml",
            *arguments,
            "--output-dir",
            str(tmp_path),
            *settings(own),
            environment=cluster.environment,
            directory=ROOT,
        )
        assert done.returncode == 0, f"{mode}\n{done.stdout}\n{done.stderr}"
        told = summary(tmp_path / f"{example}-{mode}")
        assert told["failures"] == 0
        found[mode] = (told["digest"], told[f"final-{metric}"], told[f"best-{metric}"])
    assert found["simulation"][0] is not None
    assert found["in-process"] == found["deployment"] == found["simulation"]
