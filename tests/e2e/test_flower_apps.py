"""The Flower apps of examples/flower with `flwr run`: in Flower's simulation, and on SuperLink and SuperNodes."""

from __future__ import annotations

import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from corolla.experiments.launch import SimulationSuperLink
from fl_app.processes import script
from tests.e2e.conftest import Cluster

APPS = Path(__file__).resolve().parents[2] / "examples" / "flower"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def accuracies(printed: str) -> list[float]:
    """The mean accuracy of each round, from what a run has printed."""
    return [float(found) for found in re.findall(r"Aggregated MetricRecord: \{'accuracy': ([\d.e-]+)[,}]", printed)]


NEEDS_JAX = pytest.mark.skipif(find_spec("jax") is None, reason="the example needs jax: pip install jax")


@pytest.mark.parametrize(
    "app", ["pytorch", pytest.param("sklearn", marks=pytest.mark.nightly), pytest.param("jax", marks=NEEDS_JAX)]
)
def test_in_simulation(app: str) -> None:
    with SimulationSuperLink() as link:
        done = subprocess.run(
            [*link.inside, script("flwr"), "run", str(APPS / app), link.name, "--stream"]
            + ["--run-config", "num-server-rounds=4"]
            + ["--federation-config", "num-supernodes=4 client-resources-num-cpus=1 client-resources-num-gpus=0.0"],
            env=link.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    told = accuracies(done.stdout)
    assert done.returncode == 0 and len(told) == 4, done.stdout + done.stderr
    assert told[-1] > 0.85 and "0 failures" in done.stdout and "dropped" not in done.stdout


@pytest.mark.long
def test_on_superlink_and_supernodes(cluster: Cluster) -> None:
    cluster.start(2)
    done = subprocess.run(
        [
            *cluster.inside,
            script("flwr"),
            "run",
            str(APPS / "pytorch"),
            "test",
            "--stream",
            "--run-config",
            "num-server-rounds=1",
        ],
        env={**os.environ, **cluster.environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert len(accuracies(done.stdout)) == 1 and "dropped" not in done.stdout, done.stdout + done.stderr
