"""A method of one's own that prints or fails: what the run says of it, and what its log keeps."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import RecordDict

import corolla
from client_app.client import CorollaClient
from client_app.session import Session
from fl_app import debugging, plugins
from fl_app.debugging import Place
from fl_app.errors import UserError
from fl_app.layout import NOTHING
from fl_app.server.events import NAME
from fl_app.transport import wire
from strategies import METHODS
from tests.api.conftest import Start, start
from tests.conftest import Command, Run, config
from tests.facts import mentions, rejected

__all__ = ["start"]

OWN = """
from corolla.method import FedAvg, LocalUpdate, Method, NoParams, all_tensors

class Client(LocalUpdate):
    def train(self, start, state, ctx):
        print("at", ctx.round)
        if ctx.client_id == {failing}:
            raise KeyError("lost")
        return ctx.trainer.train(start)

class Server(FedAvg):
    def personalize(self, round, uploads):
        print("server at", round)
        {server}
        super().personalize(round, uploads)

METHOD = Method("own_printing", NoParams, Server, Client, all_tensors)
"""


RUN_OWN = ["run", "--in-process", "--clients", "2", "--set", "method=own_printing:METHOD", "--set", "train-samples=20"]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Any]:
    """Write the user's method."""

    def begin(failing: int = -1, server: str = "pass") -> str:
        (tmp_path / "own_printing.py").write_text(OWN.format(failing=failing, server=server))
        plugins.reset(tmp_path)
        return "own_printing:METHOD"

    yield begin
    plugins.reset()


def test_what_is_printed_stands_in_the_runs_log(write: Any, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "corolla")
    folder = run(method=write(failing=1))
    kept = (folder.path / NAME).read_text().splitlines()
    said = [line.split(" ", 2)[2] for line in kept if line[:2] == "20"]
    for line in ("client 0: at 1", "client 2: at 2", "server: server at 1"):
        assert said.count(line) == 1
    dropped = "round 1: client 1 dropped: KeyError: 'lost' (own_printing.py:8, in train)"
    assert dropped in said and any(line.startswith("round 2/2: accuracy") and "data:" not in line for line in said)
    # once for all rounds, from the user's frame on
    assert kept.count("KeyError: 'lost'") == 1 and sum("in train" in line and "File" in line for line in kept) == 1
    assert not any("client.py" in line or line.startswith("progress") for line in kept)
    assert (folder.path / NAME).stat().st_mode & 0o777 == 0o600


def test_a_sites_traceback_stays_in_its_log(write: Any, caplog: pytest.LogCaptureFixture) -> None:
    parsed = config(method=write(failing=0))

    answers = {}
    for place in Place:
        client = CorollaClient(Session(parsed, METHODS[parsed.method]), 0, "", "", 1, place)
        answers[place] = client.reply("fit", RecordDict()).config_records[wire.RESULT]
    assert wire.TRACEBACK not in answers[Place.DEPLOYMENT] and wire.PRINTED not in answers[Place.DEPLOYMENT]
    assert answers[Place.DEPLOYMENT][wire.ERROR] == "failed//"
    assert mentions(str(answers[Place.DEPLOYMENT][wire.DETAILS]), "traceback", "SuperNode")
    assert len([r for r in caplog.records if r.exc_info]) == 1
    for place in (Place.SIMULATION, Place.IN_PROCESS):
        assert "Traceback" in str(answers[place][wire.TRACEBACK])
        assert "SuperNode" not in str(answers[place][wire.ERROR])


def test_a_breakpoint_in_a_simulated_client_ends_the_run(monkeypatch: pytest.MonkeyPatch, run: Run, write: Any) -> None:
    method = write()
    original = CorollaClient._train

    def stop(self: CorollaClient, download: Any) -> Any:
        if self.client_id == 1:
            with monkeypatch.context() as patch:
                patch.setattr(sys, "breakpointhook", sys.breakpointhook)
                debugging.refuse_breakpoints()
                breakpoint()
        return original(self, download)

    monkeypatch.setattr(CorollaClient, "_train", stop)
    with rejected(UserError, "", "breakpoint()", "tests/server/test_own_code.py", "--in-process"):
        run(method=method)


def test_a_reply_loses_what_is_for_the_author_alone() -> None:
    reply = wire.encode_upload(wire.Upload(NOTHING))
    reply.config_records["fitres.metrics"][wire.PRINTED] = "one\ntwo"
    assert isinstance(reply, RecordDict) and wire.take_aside(reply) == ("", "one\ntwo", "")
    assert wire.PRINTED not in reply.config_records["fitres.metrics"]


def test_the_command_shows_the_users_frames_of_its_server_half(
    write: Any, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(server="self.global_model.params = uploads.W[0]")
    code, _, err = command(*RUN_OWN)
    assert code == 1 and err.count("File") <= 2 and "own_printing.py" in err
    assert mentions(err, "error", "FrozenInstanceError", "cannot assign", "'params' (own_printing.py:14", "personalize")


def test_python_sees_the_error_not_the_frames(start: Start, write: Any) -> None:
    def frames(error: BaseException) -> int:
        trace, count = error.__traceback__, 0
        while trace is not None:
            trace, count = trace.tb_next, count + 1
        return count

    with pytest.raises(UserError) as bad:
        start(learning_rate=-1)
    assert frames(bad.value) <= 4 and bad.value.__suppress_context__
    with pytest.raises(UserError) as missing:
        corolla.load("no-such-run")
    assert frames(missing.value) <= 3
    with pytest.raises(UserError) as whole:
        start(learning_rate=-1, verbose=True)
    assert frames(whole.value) > 4
    with pytest.raises(AttributeError) as own:
        start(method=write(server="uploads.nothing"))
    assert frames(own.value) <= 5 and "personalize" in debugging.place_of(own.value)


def test_the_command_ends_as_failed_if_clients_cannot_train(
    write: Any, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(failing=1)
    code, _, err = command(*RUN_OWN, "--set", "min-results=1")
    assert code == 1, err
    assert mentions(err, "error", "round 1", "2 attempts (round-retries)")
    assert mentions(err, "KeyError", "'lost' (own_printing.py:8", "train")
