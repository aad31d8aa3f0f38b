"""The alerts: promtool tries each rule with numbers that fire it and with others, and run folders have such numbers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import superlink_nodes
from deploy.prometheus import PREFIX, TABLE, Exporter, Watched
from fl_app.server import events
from tests.deploy.test_metrics import FAILED, MONITORING, NOWHERE, line, record, started, write

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(not PROMTOOL, reason="promtool is not installed (Debian: prometheus)")


def promtool(*words: str, directory: Path = MONITORING) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL
    return subprocess.run([PROMTOOL, *words], cwd=directory, capture_output=True, text=True)


def test_each_alert_has_numbers_that_fire_it_and_numbers_that_do_not() -> None:
    rules = [
        rule for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
    ]
    cases = yaml.safe_load((MONITORING / "alerts.test.yaml").read_text())["tests"]
    tried = [(each["alertname"], bool(each["exp_alerts"])) for case in cases for each in case["alert_rule_test"]]
    assert {*tried} == {(rule["alert"], fires) for rule in rules for fires in (True, False)}


@needs_promtool
def test_the_rules_fire_on_these_numbers_alone() -> None:
    done = promtool("test", "rules", "alerts.test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def fired(directory: Path, samples: Mapping[str, Mapping[tuple[str, ...], float]], minutes: int = 8) -> dict[str, Any]:
    """Return the alerts that fire when an exporter has had these numbers for some minutes: their labels by name."""
    series = []
    for name, values in samples.items():
        for labels, value in values.items():
            told = ",".join(f"{key}={json.dumps(text)}" for key, text in zip(TABLE[name].labels, labels, strict=True))
            series.append({"series": f"{PREFIX}{name}{{{told}}}", "values": f"{value}x{minutes}"})
    rules = MONITORING / "alerts.yaml"
    names = [rule["alert"] for group in yaml.safe_load(rules.read_text())["groups"] for rule in group["rules"]]
    asked = [
        {"alertname": name, "eval_time": f"{minutes}m", "exp_alerts": [{"exp_labels": {"no": "such"}}]}
        for name in names
    ]
    case = {"interval": "1m", "input_series": series, "alert_rule_test": asked}
    text = {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [case]}
    (directory / "case.yaml").write_text(yaml.safe_dump(text))
    found: dict[str, Any] = {}
    done = promtool("test", "rules", "case.yaml", directory=directory)
    for answer in (done.stdout + done.stderr).split("alertname: ")[1:]:
        for alert in answer.partition("got:[")[2].split("Labels:{")[1:]:
            of_alert = dict(pair.split("=", 1) for pair in alert.partition("}")[0].split(", "))
            found.setdefault(answer.partition(",")[0], []).append({key: json.loads(v) for key, v in of_alert.items()})
    return found


def samples_of(runs: Path, monkeypatch: pytest.MonkeyPatch, **statuses: str) -> dict[str, Any]:
    """Return an exporter's numbers with SuperNodes of these statuses, by registered name."""
    nodes = [types.SimpleNamespace(name=name.replace("_", "-"), status=status) for name, status in statuses.items()]
    monkeypatch.setattr(superlink_nodes, "nodes_and_runs", lambda *_: (nodes, []))
    return Exporter(Watched(runs, NOWHERE)).samples()


@pytest.fixture
def named(tmp_path: Path) -> Path:
    folder = write(tmp_path, record(1))
    names = {"0": {"name": "celle"}, "1": {"name": "verden"}, "2": {}, "3": {"name": "twice"}, "4": {"name": "twice"}}
    (folder / "clients.json").write_text(json.dumps(names))
    return tmp_path


def test_numbers_have_the_names_of_clients(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (named / "one" / "events.jsonl").open("a") as file:
        file.write(record(2, FAILED))
    statuses = {f"supernode_{k}": "online" for k in (1, 2, 3)} | {
        "supernode_0": "offline",
        "supernode_9": "unregistered",
    }
    found = samples_of(named, monkeypatch, **statuses)
    assert found["failures_total"] == {("one", "2", "late"): 1, ("one", "verden", "ended"): 1}
    up = {("celle",): 0, ("verden",): 1, ("supernode-2",): 1, ("supernode-3",): 1}
    assert found["node_up"] == up and found["runs"] == {("finished:failed",): 0}


def ended(event: events.Event) -> str:
    return line(event)


FINISHED = ended(events.Finished(summary={"rounds": 1}))
ERROR = ended(events.Failed(kind="input", message="a disk"))


@pytest.mark.parametrize(
    ("lines", "is_failed", "is_going"),
    [("", 0, 1), (FINISHED, 0, 0), (ERROR, 1, 0), (ended(events.Stopped(round=1)), 0, 0), (ERROR + started(1), 0, 1)],
    # texts hold the time, and names of tests must be the same in every process
    ids=["nothing", "finished", "failed", "stopped", "resumed"],
)
def test_how_a_run_stands(tmp_path: Path, lines: str, is_failed: int, is_going: int) -> None:
    folder = write(tmp_path, record(1) + lines)
    os.utime(folder / "events.jsonl", (0, 0))
    found = Exporter(Watched(tmp_path, NOWHERE)).samples()
    assert found["run_failed"] == {("one",): is_failed} and found["run_going"] == {("one",): is_going}
    assert found["run_idle_seconds"][("one",)] > 1e9


@needs_promtool
def test_an_operator_sees_the_plant_the_run_and_the_first_failure(
    named: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = {"supernode_0": "online", "supernode_1": "online"}
    assert fired(tmp_path, samples_of(named, monkeypatch, **online)) == {}
    left = {"left-out": [{"who": "client 2", "cause": "refused by its site: methods"}]}
    with (named / "one" / "events.jsonl").open("a") as file:
        file.write(record(2, FAILED[1:], **left))
    found = fired(tmp_path, samples_of(named, monkeypatch, **{**online, "supernode_0": "offline"}))
    assert [each["client"] for each in found.pop("ClientOffline")] == ["celle"]
    assert [each["client"] for each in found.pop("RepliesDropped")] == ["verden"]
    assert [each["run"] for each in found.pop("NodesLeftOut")] == ["one"] and not found
    with (named / "one" / "events.jsonl").open("a") as file:
        file.write(ERROR)
    assert fired(tmp_path, samples_of(named, monkeypatch, **online)).keys() == {"RunFailed", "RepliesDropped"}
    assert fired(tmp_path, {}).keys() == {"MetricsGone"}


@needs_promtool
def test_an_operator_sees_a_run_that_writes_nothing(
    named: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(named, record(1), "killed")
    later = (folder / "events.jsonl").stat().st_mtime - 2000
    os.utime(folder / "events.jsonl", (later, later))
    found = fired(tmp_path, samples_of(named, monkeypatch))
    assert [each["run"] for each in found.pop("RunStalled")] == ["killed"] and not found
