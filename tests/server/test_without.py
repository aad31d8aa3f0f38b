"""A run that goes on without clients: fewer than there were, or without those that are gone for good, by name."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message

from client_app.client_app import app as client_app
from corolla.api.one_run import LaunchOptions, configure
from corolla.experiments.runs import RecordedRun
from fl_app.errors import UserError
from fl_app.server.run_folder import read_about, read_metrics
from fl_app.transport.wire import QUERY
from tests.conftest import Command, Run
from tests.experiments.months import SETTING, WINE, wine
from tests.facts import rejected
from tests.server.fake_grid import exchange, three


def words(**values: Any) -> list[str]:
    return [
        word for name, value in values.items() for word in ("--set", f"{name.replace('_', '-')}={json.dumps(value)}")
    ]


@pytest.fixture
def june(command: Command, tmp_path: Path) -> Path:
    setting = {**SETTING, "dataset": f"table:{wine(tmp_path / 'june.csv')}", "classes": ",".join(WINE)}
    places = {"output_dir": str(tmp_path), "state_dir": str(tmp_path / "state"), "data_dir": str(tmp_path / "data")}
    more = {"method": "fedper", "num_server_rounds": 2, "keep_state": True, "run_name": "june"}
    more["collect_personal_models"] = True
    code, out, err = command("run", "--in-process", *words(**{**setting, **places, **more}))
    assert code == 0, out + err
    return tmp_path / "june"


def test_a_client_that_is_gone_is_left_out_by_name(command: Command, june: Path, tmp_path: Path) -> None:
    celle = next(i for i, facts in json.loads((june / "clients.json").read_text()).items() if facts["name"] == "celle")
    code, out, err = command("run", "--in-process", "--resume", june, "--without", "celle", *words(num_server_rounds=3))
    assert code == 0, out + err
    *_, last = read_metrics(june)
    evaluation, summary = last["evaluation"], RecordedRun(june).summary
    assert last["clients"].keys() == evaluation["clients"].keys() == {"0", "1", "2"} - {celle}
    assert (evaluation["expected"], evaluation["absent"]) == (2, []) and summary["digest"]
    code, out, err = command("export", june, "--to", tmp_path / "models")
    assert code == 0, err
    assert {path.name for path in (tmp_path / "models").glob("*.pt")} == {"celle.pt", "uelzen.pt", "verden.pt"}
    # it is gone in later parts of the run, too, and its entry stays
    code, out, err = command(
        "run", "--in-process", "--resume", june, "--without", "verden", *words(num_server_rounds=4)
    )
    assert code == 0, out + err
    *_, last = read_metrics(june)
    assert len(last["clients"]) == 1 and json.loads((june / "clients.json").read_text())[celle]["name"] == "celle"


@pytest.mark.parametrize(
    "given", [["--without", "hannover", "--resume"], ["--without", "celle", "--from"], ["--without", "7", "--resume"]]
)
def test_only_a_client_of_a_run_can_be_left_out(command: Command, june: Path, given: list[str]) -> None:
    code, _, err = command("run", "--in-process", *given, june)
    assert code == 2 and given[1] in err
    code, _, err = command("run", "--in-process", "--set", "without=1")
    assert code == 2 and "--without" in err


def test_a_run_may_go_on_with_fewer_clients(command: Command, june: Path) -> None:
    more = words(num_server_rounds=3, min_available_clients=2)
    code, out, err = command("run", "--in-process", "--resume", june, *more)
    assert code == 0, out + err


def test_the_rounds_line_says_of_how_many_clients_its_means_are(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    def handle(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 1 and message.metadata.message_type != QUERY:
            raise RuntimeError("it has left")
        return client_app(message, context)

    with caplog.at_level("INFO", "corolla"):
        run(app=handle, num_clients=4, min_results=0.5)
        run(app=handle, num_clients=4, min_results=0.5, fraction_train=0.5, seed=3, run_name="sampled")
    lines = [line for line in caplog.messages if line.startswith(("round 1/2", "round 2/2"))]
    assert [", 3 of 4 clients, " in line for line in lines[:2]] == [True] * 2 and "; 3 of 4 clients " in lines[1]
    # by the key two of four train
    told = [line.partition(" clients, ")[0].rpartition(", ")[2] for line in lines[2:]]
    assert set(told) <= {"2", "1 of 2"}, told


def test_no_round_waits_for_one_that_is_gone() -> None:
    nodes = three()
    del nodes[91]
    e = exchange(nodes, without="1")
    e.registry.wait()
    assert e.registry.minimum == 2 and e.registry.client_ids == [0, 2]
    e = exchange(nodes, without="1", min_available_clients=3)
    e.registry.wait()
    with rejected(UserError, "min-available-clients", "2 clients", "connected", "1 were"):
        exchange({50: nodes[50]}, without="1").registry.wait()


def test_one_that_comes_back_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    e = exchange(three(), without="1")
    e.registry.wait()
    assert e.registry.client_ids == [0, 2] and [each["who"] for each in e.registry.left_out] == ["client 1"]


def test_a_client_that_left_months_ago_is_still_known_by_name(june: Path, tmp_path: Path) -> None:
    """July's run never had it, and August's says again that it is gone."""
    july = shutil.copytree(june, tmp_path / "july")
    clients = json.loads((july / "clients.json").read_text())
    (july / "clients.json").write_text(
        json.dumps({i: facts for i, facts in clients.items() if facts["name"] != "celle"})
    )
    (july / "run.json").write_text(json.dumps({**read_about(june), "from": {"run": str(june)}}))
    celle = next(i for i, facts in clients.items() if facts["name"] == "celle")
    how = LaunchOptions(superlink="lab", from_run=july, without=["celle"], output_dir=str(tmp_path))
    assert configure(None, {}, how)[1].without == celle
    with pytest.raises(UserError, match="hannover"):
        configure(None, {}, dataclasses.replace(how, without=["hannover"]))
