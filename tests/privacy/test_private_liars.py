"""Private runs with clients that drop out, and with some that do otherwise than was agreed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from flwr.app import Error, Message

import client_app.client
from client_app import run_keys
from client_app.client_app import app as client_app_
from fl_app import server_app
from fl_app.config import parse
from fl_app.errors import RoundFailed, UserError
from fl_app.privacy import masking
from fl_app.privacy.keyring import Keyring, open_keyring
from fl_app.server.run_folder import RunFolder, read_summary
from fl_app.transport import wire
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS
from tests.conftest import Run, flat
from tests.facts import mentions, rejected
from tests.privacy.runs import PRIVATE, rounds


class Absent(InProcessGrid):
    """A grid on which clients fail in attempts of a round: (round, attempt, client id)."""

    missing: frozenset[tuple[int, int, int]] = frozenset()

    def _handle(self, message: Message) -> Message:
        if message.metadata.message_type == "train":
            said = message.content.config_records["fitins.config"]
            if (said["round"], said["attempt"], message.metadata.dst_node_id - 1) in self.missing:
                return Message(Error(0, "gone"), reply_to=message)
        return super()._handle(message)


def run_without(raw: dict[str, Any], *missing: tuple[int, int, int], **changes: Any) -> RunFolder:
    raw = raw | flat({**PRIVATE, **changes})
    grid = Absent(client_app_, raw, raw["num-clients"])
    grid.missing = frozenset(missing)
    return server_app.run(grid, parse(raw, METHOD_PARAMS), lambda what, done, total: None)


def test_who_drops_out_costs_no_repeat(
    raw_config: dict[str, Any], arriving: list[tuple[wire.Upload, wire.Expected]]
) -> None:
    folder = run_without(raw_config, (1, 0, 2), method="fedcac")
    first, second = rounds(folder)
    assert list(first["clients"]) == ["0", "1", "3", "4"] and len(second["clients"]) == 5
    assert [(f["client"], f.get("attempt")) for f in first["failures"]] == [(2, None)]
    sums = [upload.extras[wire.SUM] for upload, expected in arriving if wire.SUM in expected.extras]
    assert len(sums) == 4 + 5


@pytest.mark.parametrize("task", [wire.AGREE, wire.OPEN])
def test_who_goes_away_before_the_sum_is_opened_is_not_needed_unless_another_dropped_out(
    raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    whole = run_without(raw_config, run_name="whole")
    honest = client_app.client.CorollaClient._answered

    def gone(self: Any, question: wire.Download) -> Any:
        if self.client_id == 3 and (question.task, question.round, question.attempt) == (task, 1, 0):
            raise UserError("gone")
        return honest(self, question)

    monkeypatch.setattr(client_app.client.CorollaClient, "_answered", gone)
    folder = run_without(raw_config, run_name="one")
    assert len(rounds(folder)[0]["clients"]) == 5
    assert read_summary(folder.path)["digest"] == read_summary(whole.path)["digest"]
    with rejected(RoundFailed, "", "failed in 1 attempts", "client 2", "error 0", "gone", "client 3", "gone"):
        run_without(raw_config, (1, 0, 2), round_retries=0, run_name="two")
    first, _ = rounds(run_without(raw_config, (1, 0, 2), run_name="three"))
    assert list(first["clients"]) == ["0", "1", "4"]
    assert [(f["client"], f["attempt"]) for f in first["failures"]] == [(2, 1), (3, 1)]


@pytest.mark.parametrize("dropped", [(), ((1, 0, 2),)])
def test_where_nobody_opens_the_sum_nobody_is_to_blame(
    raw_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, dropped: tuple[tuple[int, int, int], ...]
) -> None:
    honest = client_app.client.CorollaClient._answered

    def silent(self: Any, question: wire.Download) -> Any:
        if (question.task, question.round, question.attempt) == (wire.OPEN, 1, 0):
            raise UserError("the network is down")
        return honest(self, question)

    monkeypatch.setattr(client_app.client.CorollaClient, "_answered", silent)
    first, second = rounds(run_without(raw_config, *dropped))
    assert len(first["clients"]) == 5 - len(dropped) and len(second["clients"]) == 5


def test_with_too_few_left_the_round_fails(raw_config: dict[str, Any]) -> None:
    gone = [(1, attempt, i) for attempt in (0, 1) for i in (0, 2, 4)]
    with rejected(RoundFailed, "", "round 1", "2 attempts", "client 4", "error 0", "gone"):
        run_without(raw_config, *gone, min_results=0.1)


def changing(
    monkeypatch: pytest.MonkeyPatch, client_id: int, change: Callable[[wire.Upload, wire.Download], wire.Upload]
) -> None:
    """Let one client change what it sends, after all else."""
    original = client_app.client.CorollaClient._train

    def train(self: Any, download: wire.Download) -> wire.Upload:
        upload = original(self, download)
        return change(upload, download) if self.client_id == client_id else upload

    monkeypatch.setattr(client_app.client.CorollaClient, "_train", train)


def shortened(upload: wire.Upload) -> wire.Upload:
    return dataclasses.replace(upload, extras={wire.SUM: upload.extras[wire.SUM][:-7]})


def test_a_truncated_upload_is_dropped_and_the_others_go_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    changing(monkeypatch, 1, lambda upload, download: shortened(upload) if download.round == 1 else upload)
    first, second = rounds(run(**PRIVATE))
    assert list(first["clients"]) == ["0", "2", "3", "4"] and len(second["clients"]) == 5
    assert mentions(first["failures"][0]["cause"], "array masked", "shape") and first["failures"][0]["client"] == 1


def test_an_upload_of_another_attempt_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[wire.Upload] = []

    def replaying(upload: wire.Upload, download: wire.Download) -> wire.Upload:
        kept.append(upload)
        return kept[0]

    changing(monkeypatch, 1, replaying)
    first, second = rounds(run(**PRIVATE))
    assert len(first["clients"]) == 5 and list(second["clients"]) == ["0", "2", "3", "4"]
    assert mentions(second["failures"][0]["cause"], "masks belong", "attempt 000001-000000", "not to 000002-000000")


def test_a_replayed_upload_that_lies_about_its_attempt_spoils_the_round_and_no_model(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[wire.Upload] = []

    def replaying(upload: wire.Upload, download: wire.Download) -> wire.Upload:
        kept.append(upload)
        return dataclasses.replace(upload, extras=kept[0].extras)

    changing(monkeypatch, 1, replaying)
    with rejected(RoundFailed, "", "round 2", "2 attempts", "masks of clients [0, 1, 2, 3, 4]", "not cancel"):
        run(**PRIVATE)


def test_a_client_answers_no_attempt_twice(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = InProcessGrid._handle
    answers: list[Message] = []

    def twice(self: Any, message: Message) -> Message:
        # a client frees the arrays that it has read
        again = copy.deepcopy(message)
        reply = handle(self, message)
        if (
            message.metadata.message_type == "train"
            and message.content.config_records["fitins.config"]["task"] == "train"
        ):
            answers.append(handle(self, again))
        return reply

    monkeypatch.setattr(InProcessGrid, "_handle", twice)
    run(num_server_rounds=1, **PRIVATE)
    said = [reply.content.config_records["fitres.metrics"].get(wire.ERROR, "") for reply in answers]
    assert len(said) == 5 and all(
        mentions(str(text), "private", "attempt 000001-000000 was answered", "before") for text in said
    )
    assert all(
        not list(reply.content.array_records["fitres.parameters"]) or wire.payload_bytes(reply.content) < 100
        for reply in answers
    )


def test_a_client_with_another_key_spoils_every_sum_it_is_in(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = masking.mask

    def lying(words: masking.Words, client_id: int, keys: Mapping[int, bytes]) -> None:
        honest(words, client_id, {j: key[::-1] for j, key in keys.items()} if client_id == 3 else keys)

    monkeypatch.setattr(masking, "mask", lying)
    with rejected(RoundFailed, "", "do not cancel", "them has wrong", "keys"):
        run(**PRIVATE)


def test_a_client_with_another_list_is_left_out_by_name(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other(where: str, seed: int, client_id: int, num_clients: int) -> Keyring:
        return open_keyring(where, seed + (client_id == 3), client_id, num_clients)

    monkeypatch.setattr(run_keys, "open_keyring", other)
    folder = run(min_available_clients=4, **PRIVATE)
    assert list(rounds(folder)[0]["clients"]) == ["0", "1", "2", "4"]
    assert any("client 3" in line and mentions(line, "list of all", "sites' keys") for line in caplog.messages)
