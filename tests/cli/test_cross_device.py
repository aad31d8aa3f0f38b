"""The example of a cross-device study."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from corolla.experiments.runs import RecordedRun
from tests.conftest import Command

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "cross-device.toml"


def test_the_example_is_a_run_of_ten_thousand_clients(command: Command) -> None:
    code, out, err = command("run", EXAMPLE, "--dry-run")
    assert code == 0, err
    told = dict(re.findall(r"^([\w.-]+) *= *(\S+)", out, re.MULTILINE))
    assert (told["num-clients"], told["num-server-rounds"]) == ("10000", "200")
    assert round(float(told["fraction-train"]) * int(told["num-clients"])) == 20


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_example_runs(command: Command, tmp_path: Path) -> None:
    """With fewer clients and rounds, as many of them a round; more clients than digits has training samples."""
    settings = {"num-server-rounds": 3, "fraction-train": 0.01, "run-name": "study", "state-dir": tmp_path / "state"}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    options = ["--in-process", "--clients", "2000", "--output-dir", tmp_path]
    code, _, err = command("run", EXAMPLE, *options, *words)
    assert code == 0, err
    run = RecordedRun(tmp_path / "study")
    assert run.finished and run.failures == []
    assert [len(record["clients"]) for record in run.rounds.values()] == [20, 20, 20]
    assert run.coverage == (2000, 2000)
