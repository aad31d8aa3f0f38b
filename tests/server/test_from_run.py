"""A run that goes on from another one, and one that goes on without some clients, by name."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import Context, Message
from safetensors.numpy import load_file

from client_app.client_app import app as client_app
from corolla.api.one_run import LaunchOptions, configure
from corolla.experiments.exported import predict
from corolla.experiments.exported.export import export
from corolla.experiments.runs import RecordedRun
from fl_app.errors import UserError
from fl_app.server.run_folder import RunFolder, read_about, read_metrics, read_summary
from fl_app.transport.wire import QUERY
from strategies import METHODS
from tests.conftest import Command, Run
from tests.experiments.months import SETTING, WINE, cancer, wine
from tests.facts import rejected
from tests.server.fake_grid import exchange, three

KEPT = ("fedcac", "fedamp", "cfl", "scaffold")
# their clients keep parts at home, as FedPer's do, or nothing
BY_NIGHT = ("ditto", "apfl", "fedper", "fedrep", "fedavg", "fedbabu")


def table_of(path: Path, plants: list[str]) -> Path:
    """Write the wines of some plants, in this order of rows, under their names."""
    frame = pd.read_csv(wine(path))
    frame[frame["plant"].isin(plants)].to_csv(path, index=False)
    return path


def month(
    run: Run, path: Path, name: str, plants: tuple[str, ...] = ("celle", "uelzen", "verden"), **changes: Any
) -> RunFolder:
    table = table_of(path / f"{name}.csv", [*plants])
    setting = {
        **SETTING,
        "dataset": f"table:{table}",
        "classes": ",".join(WINE),
        "num_clients": len(plants),
        "run_name": name,
        "keep_state": True,
        "num_server_rounds": 3,
        "method": "fedper",
        "normalize": "unit",
        "learning_rate": 0.0005,
    }
    return run(**{**setting, **changes})


def before(folder: RunFolder) -> dict[str, float]:
    """Return the loss of each client's model before the first round, by name."""
    rows = next(iter(read_metrics(folder.path)))["clients"]
    names = json.loads((folder.path / "clients.json").read_text())
    return {names[i]["name"]: row["loss-before"] for i, row in rows.items()}


def last(folder: RunFolder) -> dict[str, float]:
    rows = list(read_metrics(folder.path))[-1]["evaluation"]["clients"]
    names = json.loads((folder.path / "clients.json").read_text())
    return {names[i]["name"]: row["loss"] for i, row in rows.items()}


@pytest.mark.parametrize("method", [*KEPT, *(pytest.param(name, marks=pytest.mark.nightly) for name in BY_NIGHT)])
def test_clients_start_where_they_ended(run: Run, tmp_path: Path, method: str) -> None:
    june = month(run, tmp_path, "june", method=method)
    old = {path.name: path.read_bytes() for path in (tmp_path / "state").rglob("*.state")}
    july = month(run, tmp_path, "july", method=method, from_run=str(june.path), num_server_rounds=1)
    start, end = before(july), last(june)
    assert all(start[name] == pytest.approx(end[name], rel=1e-4) for name in end)
    # the earlier run's states stay, so that another run may go on from it again
    now = {path.name: path.read_bytes() for path in (tmp_path / "state").rglob("*.state")}
    assert all(now[name] == content for name, content in old.items())
    again = month(run, tmp_path, "again", method=method, from_run=str(june.path), num_server_rounds=1)
    assert read_summary(again.path)["digest"] == read_summary(july.path)["digest"]


def test_columns_are_matched_by_name(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As at sites: in the earlier run's order, and others are left out."""
    more = {"normalize": "mean-std", "num_server_rounds": 1, "collect_personal_models": True}
    june = month(run, tmp_path, "june", **more)
    july = month(run, tmp_path, "july", from_run=str(june.path), **more)
    frame = pd.read_csv(tmp_path / "july.csv").assign(shift=1.5)
    frame[[*frame.columns[::-1]]].to_csv(turned := tmp_path / "turned.csv", index=False)
    later = month(run, tmp_path, "later", from_run=str(june.path), dataset=f"table:{turned}", **more)
    assert read_summary(later.path)["digest"] == read_summary(july.path)["digest"]
    assert sum("shift" in line and "celle" in line and "verden" in line for line in caplog.messages) == 1
    for over in ("sites", "site"):
        own = month(
            run, tmp_path, over, from_run=str(later.path), dataset=f"table:{turned}", normalize_over=over, **more
        )
        _, card = export(own.path, METHODS, 1, tmp_path / "own.pt")
        asked = [predict.read_inputs([path], card).samples for path in (turned, tmp_path / "july.csv")]
        assert list(card["features"]) == list(frame.columns[:13]) and (asked[0] == asked[1]).all()
        assert np.argmax(card["input"]["mean"]) == list(card["features"]).index("proline")


def test_clients_are_matched_by_name(run: Run, tmp_path: Path) -> None:
    june = month(run, tmp_path, "june")
    july = month(run, tmp_path, "july", ("uelzen", "verden"), from_run=str(june.path))
    for name in ("uelzen", "verden"):
        assert before(july)[name] == pytest.approx(last(june)[name], rel=1e-4)
    told = read_about(july.path)["from"]
    assert told == {"run": str(june.path), "digest": read_summary(june.path)["digest"], "clients": {"0": 1, "1": 2}}
    # a client that is new to this run starts from the seed
    august = month(run, tmp_path, "august", from_run=str(july.path), num_server_rounds=1)
    start = before(august)
    assert start["uelzen"] == pytest.approx(last(july)["uelzen"], rel=1e-4)
    assert read_about(august.path)["from"]["clients"] == {"1": 0, "2": 1}


def test_a_resumed_start_knows_its_origin(run: Run, tmp_path: Path) -> None:
    june = month(run, tmp_path, "june")
    whole = month(run, tmp_path, "whole", from_run=str(june.path), num_server_rounds=2, fraction_train=0.4)
    part = month(run, tmp_path, "part", from_run=str(june.path), num_server_rounds=1, fraction_train=0.4)
    resumed = month(
        run, tmp_path, "part", from_run=str(june.path), num_server_rounds=2, fraction_train=0.4, resume=str(part.path)
    )
    assert read_summary(resumed.path)["digest"] == read_summary(whole.path)["digest"]


def test_what_differs_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    june = month(run, tmp_path, "june", num_server_rounds=1)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"method": "fedrep"}, "method"),
        ({"model": "cnn"}, "model"),
        ({"classes": ",".join(WINE[::-1])}, "classes: another order"),
        ({"exclude": "ash"}, "features: ash only there"),
    ]
    for changes, words in cases:
        with pytest.raises(UserError, match=words):
            month(run, tmp_path, "july", from_run=str(june.path), **changes)


def test_two_clients_of_one_name_do_not_start_from_one_state(run: Run, tmp_path: Path) -> None:
    names = ("celle", "uelzen", "verden")
    setting = {"dataset": "node", "target": "kind", "classes": "malignant,benign", "method": "fedper"}
    files = [cancer(tmp_path / f"{name}.csv", slice(k, None, 3)) for k, name in enumerate(names)]

    def sites(*called: str) -> dict[int, dict[str, str]]:
        return {k: {"data-path": str(files[k]), "name": name} for k, name in enumerate(called)}

    june = run(**setting, run_name="june", keep_state=True, node_configs=sites(*names))
    july = run(**setting, run_name="july", from_run=str(june.path), node_configs=sites(*names[::-1]))
    assert read_about(july.path)["from"]["clients"] == {"0": 2, "1": 1, "2": 0}
    with rejected(UserError, "from", "two clients", "'celle'"):
        run(**setting, run_name="two", from_run=str(june.path), node_configs=sites("celle", "celle", "verden"))


def test_in_a_private_run_no_client_starts_from_an_older_state_than_the_others(run: Run, tmp_path: Path) -> None:
    """Sums hide clients that begin alike. A plain run goes on from the last sound state, with a warning."""
    june = month(run, tmp_path, "june")
    kept: dict[Path, list[Path]] = {}
    for path in sorted((tmp_path / "state").rglob("*.state")):
        kept.setdefault(path.parent, []).append(path)
    *earlier, last_of = next(iter(kept.values()))
    assert earlier
    last_of.write_bytes(last_of.read_bytes()[:-1] + b"?")
    month(run, tmp_path, "july", from_run=str(june.path), num_server_rounds=1)
    private = {"private": True, "round_retries": 0, "num_server_rounds": 1, "from_run": str(june.path)}
    month(run, tmp_path, "client", private_left_out="client", **private)
    with rejected(UserError, None, "missing or damaged"):
        month(run, tmp_path, "group", **private)


@pytest.mark.parametrize("over", ["sites", "initial"])
def test_the_scaling_goes_on_if_asked(run: Run, tmp_path: Path, over: str) -> None:
    june = month(run, tmp_path, "june", normalize="mean-std")
    plants = ("uelzen", "verden")
    july = month(run, tmp_path, "july", plants, normalize="mean-std", from_run=str(june.path), normalize_over=over)
    scaling = [read_about(folder.path)["data"]["normalization"]["mean"] for folder in (june, july)]
    assert (scaling[0] == scaling[1]) == (over == "initial")
    same = [before(july)[name] == pytest.approx(last(june)[name], rel=1e-4) for name in plants]
    assert all(same) == (over == "initial")


def test_removed_states_are_named(run: Run, tmp_path: Path) -> None:
    june = month(run, tmp_path, "june", keep_state=False)
    with pytest.raises(UserError, match="keep-state"):
        month(run, tmp_path, "july", from_run=str(june.path))


def test_the_command_and_the_tree(run: Run, tmp_path: Path, command: Command) -> None:
    june = month(run, tmp_path, "june")
    table = table_of(tmp_path / "later.csv", ["celle", "uelzen", "verden"])
    code, _, err = command(
        "run",
        "--in-process",
        "--from",
        june.path,
        "--set",
        f"dataset=table:{table}",
        "--set",
        "num-server-rounds=1",
        "--set",
        "run-name=july",
    )
    # keys that only the earlier run sets are no news
    assert code == 0 and "has no effect" not in err, err
    july = RunFolder(tmp_path / "runs" / "july", "")
    assert before(july)["celle"] == pytest.approx(last(june)["celle"], rel=1e-4)
    code, out, _ = command("runs", tmp_path / "runs", "--tree")
    lines = [line for line in out.splitlines() if "june" in line or "july" in line]
    assert code == 0 and "june" in lines[0] and "└─" in lines[1]
    code, _, err = command("run", "--from", june.path, "--resume", june.path)
    assert code == 2 and "--resume" in err
    assert load_file(june.path / "models" / "global.safetensors") and np.isfinite(last(june)["celle"])


# A run that goes on without clients: fewer than there were, or without those that are gone for good, by name ----------


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
