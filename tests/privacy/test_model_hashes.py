"""Clients of confidential runs send no hashes of their models, by which guesses of their data can be tested."""

from __future__ import annotations

import re
from typing import Any

import pytest
from flwr.common import RecordDict

from fl_app.metrics import SENT_DIGEST_VERSION
from fl_app.server.run_folder import read_metrics, read_summary
from fl_app.transport import wire
from tests.conftest import Run

CASES: list[dict[str, Any]] = [
    {"method": "fedavg", "private": True},
    {"method": "apfl", "private": True, "report_accuracy": False},
    {"method": "fedcac", "private": True, "model": "tests.small_models:batchnorm"},
    {"method": "fedcac", "dp_epsilon": 8.0},
    {"method": "local", "dp_epsilon": 8.0, "private": False},
]


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The metrics of all evaluations as they come from clients, as text."""
    seen: list[str] = []
    decode = wire.decode_evaluation

    def spy(content: RecordDict, hashed: bool = True) -> Any:
        seen.append(repr({name: dict(record) for name, record in content.config_records.items()}))
        seen.append(repr({name: dict(record) for name, record in content.metric_records.items()}))
        return decode(content, hashed)

    monkeypatch.setattr(wire, "decode_evaluation", spy)
    return seen


@pytest.mark.parametrize("changes", CASES)
def test_no_hash_of_a_model_leaves_a_client(run: Run, replies: list[str], changes: dict[str, Any]) -> None:
    whole = {"num_server_rounds": 2, "train_samples": 24, "num_clients": 3, **changes}
    folder = run(**whole)
    assert len(replies) >= 6
    for text in replies:
        assert "sha256" not in text and not re.search("[0-9a-fA-F]{40,}", text)
    last = list(read_metrics(folder.path))[-1]["evaluation"]
    assert not any("sha256" in name for row in last["clients"].values() for name in row)
    summary = read_summary(folder.path)
    assert summary["digest"] and summary["digest-version"] == SENT_DIGEST_VERSION


def test_the_digest_is_of_what_the_server_has(run: Run) -> None:
    whole = {"method": "fedavg", "private": True, "num_server_rounds": 1, "train_samples": 24}
    digests = [
        read_summary(run(run_name=name, seed=seed, **whole).path)["digest"]
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_a_plain_run_still_has_hashes(run: Run, replies: list[str]) -> None:
    folder = run(method="fedavg", num_server_rounds=1)
    assert sum("'sha256'" in text for text in replies) == len(replies) // 2
    assert read_summary(folder.path)["digest-version"] == 2


def test_an_older_client_s_hash_is_not_recorded() -> None:
    from flwr.compat.common import recorddict_compat as compat
    from flwr.compat.common.typing import Code, EvaluateRes, Status

    told = compat.evaluateres_to_recorddict(
        EvaluateRes(Status(Code.OK, ""), 1.0, 3, {"sha256": "a" * 64, "accuracy": 0.5})
    )
    assert wire.decode_evaluation(told, hashed=False)[2] == {"accuracy": 0.5}
