"""Clients that sign falsely: the server names them, and the others go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fl_app.privacy.aggregation_groups import Parts
from fl_app.privacy.keyring import RunKeys, text_of
from fl_app.server.run_folder import RunFolder, read_summary
from tests.conftest import Run
from tests.facts import mentions, rejected
from tests.privacy.runs import PRIVATE, rounds
from tests.privacy.test_private_liars import run_without

LIAR = 3
FALSE = text_of(bytes(64))


def lies(keys: RunKeys) -> bool:
    return keys.ring.client_id == LIAR


def named(folder: RunFolder) -> list[list[tuple[int, int | None, str]]]:
    """By round, the failures: client, attempt, cause."""
    return [[(f["client"], f.get("attempt"), f["cause"]) for f in record["failures"]] for record in rounds(folder)]


@pytest.fixture
def false_survivors(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = RunKeys.agree

    def agree(self: RunKeys, label: str, survivors: Sequence[int]) -> str:
        return honest(self, label, [0, 1] if lies(self) else survivors)

    monkeypatch.setattr(RunKeys, "agree", agree)


def test_false_keys_of_a_run(run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    gone = run(run_name="gone", **PRIVATE)
    honest = RunKeys.announced.func  # type: ignore[attr-defined]

    def announced(self: RunKeys) -> str:
        text = str(honest(self))
        return text[:-88] + FALSE if lies(self) else text

    monkeypatch.setattr(RunKeys, "announced", property(announced))
    with rejected(Exception, "", f"client {LIAR}", "property private-keys", "not signed", "keys"):
        run(run_name="all", **PRIVATE)
    folder = run(run_name="lies", min_available_clients=4, **PRIVATE)
    for record in rounds(folder):
        assert sorted(record["clients"]) == ["0", "1", "2", "4"] and not record["failures"]
        (left_out,) = record["left-out"]
        assert left_out["who"] == f"client {LIAR}" and mentions(left_out["cause"], "not signed", "keys")
    assert f"client {LIAR}" in caplog.text and read_summary(folder.path)["digest"] != read_summary(gone.path)["digest"]


def test_a_false_signature_of_the_survivors_does_not_count(
    raw_config: dict[str, Any], false_survivors: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven clients, of which one drops out: five signatures suffice."""
    folder = run_without(raw_config, (1, 0, 2), num_clients=7, train_samples=8, run_name="lies")
    monkeypatch.undo()
    honest = run_without(raw_config, (1, 0, 2), num_clients=7, train_samples=8, run_name="honest")
    assert read_summary(folder.path)["digest"] == read_summary(honest.path)["digest"]
    assert [[row[:2] for row in of] for of in named(folder)] == [[(2, None), (LIAR, None)], []]
    assert mentions(named(folder)[0][1][2], "signature", "left is false")


def test_with_too_few_signatures_of_the_survivors_the_others_are_asked_again(
    raw_config: dict[str, Any], false_survivors: None
) -> None:
    """Five clients, of which one drops out: four signatures are needed."""
    folder = run_without(raw_config, (1, 0, 2))
    first, second = rounds(folder)
    assert list(first["clients"]) == ["0", "1", "4"] and len(second["clients"]) == 5
    assert [row[:2] for row in named(folder)[0]] == [(2, 1), (LIAR, 1)]


def test_a_false_signature_of_a_split_does_not_count(
    raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine clients, of which one drops out: six of the eight that are left must sign."""
    settings = {"num_clients": 9, "private_left_out": "group", "train_samples": 8, "min_results": 0.3}
    honest, sign = run_without(raw_config, (1, 0, 2), run_name="honest", **settings), RunKeys.sign_split

    for number, text in enumerate((FALSE, "", "x", "é", ",", '"', FALSE + FALSE)):

        def sign_split(self: RunKeys, experiment: str, parts: Parts, text: str = text) -> str:
            return text if lies(self) else sign(self, experiment, parts)

        monkeypatch.setattr(RunKeys, "sign_split", sign_split)
        folder = run_without(raw_config, (1, 0, 2), run_name=f"lies-{number}", **settings)
        assert read_summary(folder.path)["digest"] == read_summary(honest.path)["digest"]
        assert [[row[:2] for row in of] for of in named(folder)] == [[(2, None), (LIAR, None)], []]
        assert mentions(named(folder)[0][1][2], "signature", "group is false")
        assert sorted(map(int, rounds(folder)[0]["clients"])) == [3, 4, 5, 6, 7, 8]
