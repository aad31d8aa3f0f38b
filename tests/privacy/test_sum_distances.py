"""A client that sends a far model in a private run moves the mean, and the distance of its sum shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_app.private_round import Masker
from fl_app.errors import RoundFailed
from fl_app.transport.wire import Upload
from strategies.engine.screening import SumDistances
from tests.conftest import Run
from tests.facts import mentions, rejected
from tests.privacy.runs import rounds

SETTINGS: dict[str, Any] = {"private": True, "num_clients": 10, "num_server_rounds": 4, "max_size_weight": 1.0}


def test_far_is_what_is_beyond_the_usual_of_the_last_rounds_or_of_the_other_sums() -> None:
    known = SumDistances()
    # nothing is known
    assert known.far(1, {0: 100.0}, 3.0) == {} == known.far(1, {0: 1.0, 1: 100.0}, 3.0)
    assert known.far(1, {0: 1.0, 1: 2.0, 2: 7.0}, 3.0) == {2: 3.5}
    known.note(1, {0: 2.0})
    assert known.far(2, {0: 6.0}, 3.0) == {} and known.far(2, {0: 6.2}, 3.0) == {0: 3.1}
    for round in range(2, 8):
        known.note(round, {0: 1.0})
    # round 1 is too long ago
    assert known.far(8, {0: 3.5}, 3.0) == {0: 3.5}
    assert SumDistances.restored(known.saved()) == known
    still = SumDistances({1: 0.0})
    assert still.far(2, {0: 1.0}, 3.0) == {}


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> None:
    """From round 3 on client 4 sends what brings the mean of ten to a model of its choice."""
    original = Masker.mask

    def lying(masker: Masker, upload: Upload) -> Upload:
        if masker.site.keys.ring.client_id == 4 and masker.transcript.round >= 3:
            upload.model.params[:] = np.clip(
                10 * np.random.default_rng(0).normal(0, 0.1, upload.model.params.size), -8, 8
            )
        return original(masker, upload)

    monkeypatch.setattr(Masker, "mask", lying)


@pytest.mark.usefixtures("liar")
def test_a_client_that_sets_the_mean_is_noticed_and_its_group_is_named(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    folder = run(**SETTINGS)
    (line,) = [line for line in caplog.messages if "times as far from what they were sent as is usual" in line][:1]
    assert mentions(line, "round 3", "sum of clients [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]", "lies")
    # the run folder names the group, too
    far = [record.get("far", []) for record in rounds(folder)]
    assert far[:2] == [[], []] and [entry["client"] for entry in far[2]] == list(range(10))
    assert all(entry["cause"] in line for entry in far[2])
    assert line in " ".join((folder.path / "log.txt").read_text().split())


@pytest.mark.usefixtures("liar")
def test_with_max_update_norm_such_a_sum_is_not_used(run: Run, tmp_path: Path) -> None:
    with rejected(RoundFailed, "", "round 3 failed", "sum of clients [0", "max-update-norm"):
        run(max_update_norm=3.0, **SETTINGS, run_name="refused")
    # of the group's sums only those before the lie count, and the folder says why
    (folder,) = tmp_path.glob("**/refused")
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert mentions((folder / "log.txt").read_text(), "sum of clients [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]", "lies")


@pytest.mark.parametrize("method", ["fedavg", "fedcac", "pfedme"])
def test_honest_clients_are_never_far(run: Run, caplog: pytest.LogCaptureFixture, method: str) -> None:
    own = {"fedcac": {"tau": 0.3, "beta": 9}, "private_regroup": 2} if method == "fedcac" else {}
    settings = {**SETTINGS, "partition": "dirichlet", "min_samples": 4, "num_server_rounds": 6, **own}
    folder = run(method=method, max_update_norm=3.0, **settings)
    assert [record["failures"] for record in rounds(folder)] == [[]] * 6
    assert not any("times as far" in line for line in caplog.messages)
