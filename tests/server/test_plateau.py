"""The schedule `plateau`: the server counts the drops of the learning rate, and clients train with what they are told."""

from __future__ import annotations

from typing import Any

import pytest

from corolla.experiments.runs import RecordedRun
from fl_app.config import parse
from fl_app.server.run_folder import RunFolder
from fl_app.stopping import plateau_of
from strategies import METHOD_PARAMS
from tests.conftest import Run

SETTINGS: dict[str, Any] = {
    "num_server_rounds": 6,
    "learning_rate": 1.5,
    "learning_rate_decay": 0.1,
    "evaluate_every": 1,
    "batch_size": 4,
}


def digests(folder: RunFolder) -> list[str]:
    return [evaluation["digest"] for evaluation in RecordedRun(folder.path).evaluations.values()]


@pytest.mark.parametrize(
    "more",
    [
        {"method": "fedavg"},
        {"method": "fedavg", "validation_ratio": 0.25},
        {"method": "scaffold"},
        {"method": "fedavg", "private": True},
    ],
    ids=["loss", "validation", "scaffold", "private"],
)
def test_rounds_train_with_the_drops_so_far_also_when_resumed(
    run: Run, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    settings = {**SETTINGS, **more}
    constant = digests(run(**{**settings, "learning_rate_decay": 1.0}, run_name="constant"))
    whole = run(**settings, schedule="plateau:1", run_name="whole")
    rule = plateau_of(parse(RecordedRun(whole.path).settings, METHOD_PARAMS))
    records = list(RecordedRun(whole.path).rounds.values())
    first = next(t for t in range(1, 6) if rule.drops(records[:t]))
    assert digests(whole)[:first] == constant[:first]
    assert digests(whole)[first] != constant[first]

    asked = iter([False] * (first - 1) + [True])
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "asked_to_stop", lambda self: next(asked))
        cut = run(**settings, schedule="plateau:1", run_name="cut")
    assert len(RecordedRun(cut.path).rounds) == first
    run(**settings, schedule="plateau:1", run_name="cut", resume=str(cut.path))
    assert digests(cut) == digests(whole)


def test_a_plateau_that_is_never_reached_changes_nothing(run: Run) -> None:
    settings = {**SETTINGS, "num_server_rounds": 2}
    plateau = run(**settings, schedule="plateau:9", run_name="plateau")
    constant = run(**{**settings, "learning_rate_decay": 1.0}, run_name="constant")
    assert digests(plateau) == digests(constant)
