"""TensorBoard events."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from fl_app.errors import ConfigurationError, UserError
from fl_app.server.run_folder import CONFIG, read_config, read_metrics
from tests.conftest import Run
from tests.facts import rejected


def read_events(path: Path) -> Any:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    return events


def test_tensorboard_events_hold_every_round(run: Run) -> None:
    path = run(track="tensorboard", num_server_rounds=3).path
    events = read_events(path)
    rounds = list(read_metrics(path))
    for tag, value in (
        ("accuracy/before-training", lambda r: r["accuracy-before"]),
        ("accuracy/after-training", lambda r: r["accuracy-after"]),
        ("loss/training", lambda r: r["loss"]),
        ("bytes/upload", lambda r: r["upload-bytes"]),
        ("seconds/round", lambda r: r["seconds"]["round"]),
        ("failures", lambda r: len(r["failures"])),
    ):
        scalars = events.Scalars(tag)
        assert [s.step for s in scalars] == [1, 2, 3]
        assert [s.value for s in scalars] == pytest.approx([value(r) for r in rounds], rel=1e-5)
    assert [s.step for s in events.Scalars("accuracy/all-clients")] == [3]
    (config,) = events.Tensors("config")
    assert "| num-server-rounds | 3 |" in config.tensor_proto.string_val[0].decode()
    assert len(list((path / "tensorboard").iterdir())) == 1


def test_rounds_that_a_resumed_run_repeats_are_there_once(run: Run) -> None:
    first = run(track="tensorboard", num_server_rounds=3, keep_state=True, checkpoint_every=1)
    for file in (first.path / "checkpoints").glob("round-000003.*"):
        file.unlink()
    (first.path / "summary.json").unlink()
    run(track="tensorboard", num_server_rounds=4, keep_state=True, resume=str(first.path))
    scalars = read_events(first.path).Scalars("loss/training")
    assert [s.step for s in scalars] == [1, 2, 3, 4]
    assert [s.value for s in scalars] == pytest.approx([r["loss"] for r in read_metrics(first.path)], rel=1e-5)


def test_tensorboard_that_is_missing_is_said_before_the_run_starts(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "tensorboard" else find(name, *rest)
    )
    with rejected(
        UserError,
        "",
        "track",
        "package tensorboard",
        "not installed",
        "pip install 'corolla[tensorboard]'",
        "or leave",
    ):
        run(track="tensorboard")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("value", [True, False])
def test_a_key_of_that_name_is_refused_with_what_it_is(run: Run, value: bool) -> None:
    with rejected(ConfigurationError, "tensorboard", "unknown key", "TensorBoard", "tracker", 'track = "tensorboard"'):
        run(tensorboard=value)


@pytest.mark.parametrize(
    ("said", "track"),
    [
        ("tensorboard = true\n", "tensorboard"),
        ("tensorboard = false\n", ""),
        ('track = "mlflow"\ntensorboard = true\n', "mlflow,tensorboard"),
        ('track = "tensorboard"\ntensorboard = true\n', "tensorboard"),
    ],
)
def test_folders_of_earlier_versions_say_it_in_track(tmp_path: Path, said: str, track: str) -> None:
    (tmp_path / CONFIG).write_text(said)
    config = read_config(tmp_path)
    assert "tensorboard" not in config and config.get("track", "") == track
