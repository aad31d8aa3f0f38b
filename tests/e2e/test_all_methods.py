"""Every method through Flower's simulation, on one SuperLink: the digest is that of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_app.experiments.launch import COMPLETED, simulation
from strategies import METHODS
from tests.e2e.conftest import corolla, settings, summary

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def test_simulation_equals_one_process(tmp_path: Path) -> None:
    common = {
        "num-server-rounds": 2, "num-clients": 4, "fraction-train": 0.5, "train-samples": 24, "test-samples": 12,
        "local-epochs": 1, "learning-rate": 0.05, "model": "resnet8", "device": "cpu", "state-dir": str(tmp_path / "state"),
    }  # fmt: skip
    with simulation(4, 1, 0) as submit:
        for method in METHODS:
            config = {**common, "method": method, "output-dir": str(tmp_path), "run-name": f"{method}-simulation"}
            lines: list[str] = []
            assert submit(config, lines.append) == COMPLETED, "\n".join(lines)
            config["run-name"] = f"{method}-one-process"
            done = corolla("run", "--in-process", *settings(config))
            assert done.returncode == 0, done.stderr
            digests = [summary(tmp_path / f"{method}-{mode}")["digest"] for mode in ("simulation", "one-process")]
            assert digests[0] == digests[1] is not None, method
