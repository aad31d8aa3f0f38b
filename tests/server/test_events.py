"""TensorBoard events."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fl_app.errors import UserError
from fl_app.server.run_folder import read_metrics
from tests.conftest import Run


def test_tensorboard_events_hold_every_round(run: Run) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = run(tensorboard=True, num_server_rounds=3).path
    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    rounds = list(read_metrics(path))
    for tag, value in (
        ("accuracy/before-training", lambda r: r["accuracy-before"]),
        ("accuracy/after-training", lambda r: r["accuracy-after"]),
        ("loss/training", lambda r: r["loss"]), ("bytes/upload", lambda r: r["upload-bytes"]),
        ("seconds/round", lambda r: r["seconds"]["round"]), ("failures", lambda r: len(r["failures"])),
    ):  # fmt: skip
        scalars = events.Scalars(tag)
        assert [s.step for s in scalars] == [1, 2, 3]
        assert [s.value for s in scalars] == pytest.approx([value(r) for r in rounds], rel=1e-5)
    assert [s.step for s in events.Scalars("accuracy/all-clients")] == [3]


def test_tensorboard_that_is_missing_is_said_before_the_run_starts(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "tensorboard" else find(name, *rest))
    with pytest.raises(UserError, match="tensorboard: the package tensorboard is not installed"):
        run(tensorboard=True)
    assert not (tmp_path / "runs").exists()
