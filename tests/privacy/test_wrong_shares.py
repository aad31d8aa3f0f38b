"""Clients that seal wrong shares of their masks, or reveal wrong ones: they are named, and the others go on with the same sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from client_app.client import CorollaClient
from client_app.private_round import Masker
from fl_app.errors import RoundFailed
from fl_app.privacy import masking, secure_random
from fl_app.privacy.keyring import text_of
from fl_app.server.run_folder import RunFolder, read_summary
from fl_app.transport.wire import COMMITTED, OPEN, OPENED, SHARES, Download
from tests.conftest import Run
from tests.facts import mentions, rejected
from tests.privacy.runs import PRIVATE, rounds
from tests.privacy.test_private_liars import run_without

Told = dict[str, str]


def garbage() -> str:
    return text_of(secure_random.secret(60))


def sealing(patch: pytest.MonkeyPatch, change: Callable[[list[str], list[str]], None], liar: int = 3) -> None:
    """Let a client change the shares that it seals, and their hashes."""
    honest = Masker._mask_alone

    def mask_alone(self: Masker, words: Any, label: str) -> Told:
        found = honest(self, words, label)
        if self.site.keys.ring.client_id != liar:
            return found
        texts, hashes = found[SHARES].split(","), found[COMMITTED].split(",")
        change(texts, hashes)
        return {SHARES: ",".join(texts), COMMITTED: ",".join(hashes)}

    patch.setattr(Masker, "_mask_alone", mask_alone)


def revealing(patch: pytest.MonkeyPatch, change: Callable[[list[str]], list[str]], liar: int) -> None:
    """Let a client change the shares that it reveals in the first attempt at round 1."""
    honest = CorollaClient._answered

    def answered(self: CorollaClient, question: Download) -> Any:
        found = honest(self, question)
        if self.client_id == liar and (question.task, question.round, question.attempt) == (OPEN, 1, 0):
            found[OPENED] = ",".join(change(str(found[OPENED]).split(",")))
        return found

    patch.setattr(CorollaClient, "_answered", answered)


def named(record: Mapping[str, Any]) -> list[tuple[int, int | None]]:
    return [(failure["client"], failure.get("attempt")) for failure in record["failures"]]


def digest(folder: RunFolder) -> Any:
    return read_summary(folder.path)["digest"]


def for_all(texts: list[str], hashes: list[str]) -> None:
    texts[:] = [garbage() for _ in texts]


def of_another_seed(texts: list[str], hashes: list[str]) -> None:
    hashes[-1] = masking.commitment(bytes(31), 3)


def with_other_hashes(texts: list[str], hashes: list[str]) -> None:
    hashes[:] = [masking.commitment(bytes(32), 3, i) for i in range(len(hashes))]


@pytest.mark.parametrize("change", [for_all, of_another_seed, with_other_hashes])
def test_who_seals_wrong_shares_for_all_is_named_and_left_out(
    raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, change: Callable[[list[str], list[str]], None]
) -> None:
    gone = run_without(raw_config, (1, 0, 3), (2, 0, 3), run_name="gone")
    sealing(monkeypatch, change)
    folder = run_without(raw_config, run_name="lies")
    for record in rounds(folder):
        assert sorted(record["clients"]) == ["0", "1", "2", "4"] and named(record) == [(3, 1)]
    assert digest(folder) is not None
    first, *_ = rounds(gone)
    assert sorted(first["clients"]) == ["0", "1", "2", "4"]
    same = [{i: row["loss-before"] for i, row in rounds(of)[1]["clients"].items()} for of in (gone, folder)]
    assert same[0] == same[1]


def test_in_groups_it_goes_with_two_others(raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sealing(monkeypatch, for_all)
    settings = {"num_clients": 9, "private_left_out": "group", "train_samples": 8, "min_results": 0.3}
    for record in rounds(run_without(raw_config, **settings)):
        assert sorted(map(int, record["clients"])) == [2, 4, 5, 6, 7, 8] and (3, 1) in named(record)


def test_who_seals_wrong_shares_for_some_costs_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(run_name="whole", **PRIVATE)

    def for_one(texts: list[str], hashes: list[str]) -> None:
        texts[1] = garbage()

    sealing(monkeypatch, for_one)
    folder = run(run_name="one", **PRIVATE)
    assert all(len(record["clients"]) == 5 and not record["failures"] for record in rounds(folder))
    assert digest(folder) == digest(whole)
    assert mentions(caplog.text, "clients [1] have no", "share of client 3's", "mask")


def test_who_reveals_a_wrong_share_is_named_and_the_sum_is_the_same(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(run_name="whole", **PRIVATE)
    revealing(monkeypatch, lambda words: ["0" * 64, *words[1:]], 2)
    folder = run(run_name="wrong", **PRIVATE)
    first, second = rounds(folder)
    assert len(first["clients"]) == len(second["clients"]) == 5
    assert named(first) == [(2, None)] and not second["failures"]
    assert "client 0's mask" in first["failures"][0]["cause"] and digest(folder) == digest(whole)


def test_who_says_that_it_has_no_shares_is_not_needed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(run_name="whole", **PRIVATE)
    revealing(monkeypatch, lambda words: [masking.BLANK.hex()] * len(words), 2)
    folder = run(run_name="blank", **PRIVATE)
    assert all(not record["failures"] for record in rounds(folder)) and digest(folder) == digest(whole)


def test_who_accuses_all_others_where_it_is_needed_is_named_and_not_they(
    raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 2 drops out, so all four others must help."""
    revealing(monkeypatch, lambda words: [masking.BLANK.hex()] * len(words), 1)
    first, second = rounds(run_without(raw_config, (1, 0, 2), (1, 1, 2)))
    assert named(first)[:2] == [(2, 1), (1, 1)] and set(first["clients"]) <= {"0", "2", "3", "4"}
    assert len(second["clients"]) == 5


def test_a_share_of_another_form_is_refused_by_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(texts: list[str], hashes: list[str]) -> None:
        texts[0] = texts[0][:-8]

    sealing(monkeypatch, short)
    for record in rounds(run(**PRIVATE)):
        assert sorted(record["clients"]) == ["0", "1", "2", "4"] and named(record) == [(3, None)]


@pytest.mark.parametrize("count", [0, 4, 6])
def test_a_member_answers_for_no_other_number_of_hashes(run: Run, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    honest = CorollaClient._answered

    def changed(self: CorollaClient, question: Download) -> Any:
        if question.task == OPEN:
            question.method[COMMITTED] = ",".join(["0" * 64] * count)
        return honest(self, question)

    monkeypatch.setattr(CorollaClient, "_answered", changed)
    with rejected(RoundFailed, "", "does not send", "open a sum"):
        run(round_retries=0, **PRIVATE)
