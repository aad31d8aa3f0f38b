"""Ctrl-C while a run goes on: the round is finished first, or, at the start and the second time, nothing is."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from client_app.client_app import app as client_app
from corolla.api import one_run
from corolla.api.live import AFTER_ROUND, AT_ONCE, Display, answered
from corolla.api.waiting import waiting
from corolla.experiments.launch import LOST
from fl_app import server_app
from fl_app.config import parse
from fl_app.errors import RunFailed
from fl_app.server.events import LOG_MARK, Started, encode
from fl_app.server.run_folder import RUN, STOP, read_metrics
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS
from tests.api.test_live import display
from tests.conftest import Command, Run
from tests.facts import mentions


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def not_ignored() -> Any:
    # tests run in the background ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def shown(folder: Path | None) -> Display:
    out, _ = display(terminal=False)
    out.folder = folder
    return out


def test_the_first_asks_for_the_end_of_the_round_the_second_ends_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / RUN).write_text("{}")
    with pytest.raises(KeyboardInterrupt), answered(shown(tmp_path)):
        press()
        assert (tmp_path / STOP).is_file() and capfd.readouterr().err == f"{AFTER_ROUND}\n"
        press()
    assert capfd.readouterr().err == f"{AT_ONCE}\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("elsewhere", [None, Path("/no/such/folder")])
def test_without_a_round_to_finish_the_first_ends_it(elsewhere: Path | None, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), answered(shown(elsewhere)):
        press()
    assert capfd.readouterr().err == f"{AT_ONCE}\n"


@pytest.mark.parametrize("word", ["stopping", ""])
def test_a_wait_answers_too_unless_what_is_waited_for_does(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), waiting(Console(), **({} if word else {"interrupted": ""})) as shown:
        shown.step("ending the simulation")
        press()
    assert capsys.readouterr().out.splitlines() == list(filter(None, ["ending the simulation", word]))


def test_where_it_is_ignored_it_stays_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with answered(shown(None)):
        press()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_what_the_commands_parent_ignores_stays_so(command: Command, number: signal.Signals) -> None:
    """Nohup ignores hang-ups, so that a run goes on without its terminal."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert command("methods", "--table")[0] == 0
        assert signal.getsignal(number) is signal.SIG_IGN
        signal.signal(number, signal.SIG_DFL)
        assert command("methods", "--table")[0] == 0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)


def test_a_run_ends_after_the_round_and_goes_on_with_the_same_bits(
    run: Run, raw_config: dict[str, Any], tmp_path: Path
) -> None:
    whole = run(num_server_rounds=4, run_name="whole", state_dir=str(tmp_path / "other"))
    raw = raw_config | {"num-server-rounds": 4}
    config = parse(raw, METHOD_PARAMS)

    def stop_in_round_2(what: str, done: int, total: int) -> None:
        if what == "round 2/4" and done == 1:
            (tmp_path / "runs" / "run" / STOP).touch()

    folder = server_app.run(InProcessGrid(client_app, raw, config.num_clients), config, stop_in_round_2)
    assert [record["round"] for record in read_metrics(folder.path)] == [1, 2]
    assert not (folder.path / "summary.json").exists() and not (folder.path / STOP).exists()
    # of a run that ended otherwise: the next one starts without it
    (folder.path / STOP).touch()
    again = run(num_server_rounds=4, resume=str(folder.path))
    ends = [list(read_metrics(path))[-1]["evaluation"]["digest"] for path in (whole.path, again.path)]
    assert ends[0] == ends[1] and len(list(read_metrics(again.path))) == 4


def test_a_superlink_that_died_is_one_sentence_and_the_way_on(raw_config: dict[str, Any], tmp_path: Path) -> None:
    def submit(config: Any, on_line: Any) -> str:
        on_line(LOG_MARK + encode(Started(folder=str(tmp_path / "run"))))
        return LOST

    with pytest.raises(RunFailed) as failed:
        one_run.run_one(raw_config, submit, verbose=False, where="--superlink lab ")
    said = str(failed.value)
    assert mentions(said, "SuperLink ended", "no longer", "reached", "continue with")
    assert mentions(said, "run --superlink", f"--resume {tmp_path / 'run'}") and "{" not in said
