"""Metrics for Prometheus: run folders become numbers; the dashboard and the alerts ask for numbers that exist."""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import threading
import types
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy import certificates, commands, inventory, prometheus, superlink_nodes
from deploy.commands import HostPlaces
from deploy.prometheus import PREFIX, TABLE, Exporter, Watched
from fl_app.errors import DeploymentError
from fl_app.server import events
from tests.facts import mentions, rejected

ROOT = Path(__file__).resolve().parent.parent.parent
NOWHERE = {"address": "127.0.0.1:1", "insecure": True}


def line(event: events.Event) -> str:
    return events.encode(event) + "\n"


def record(number: int, failures: list[dict[str, Any]] | None = None, clients: int = 3, **more: Any) -> str:
    written = {
        "round": number,
        "accuracy-before": 0.25 * number,
        "accuracy-after": 0.5,
        "loss": 1.5 / number,
        "download-bytes": 100,
        "upload-bytes": 70,
        "failures": failures or [],
        "clients": {str(k): {} for k in range(clients)},
        "seconds": {"round": 3.0, "wait": 2.0, "prepare": 1.0},
        **more,
    }
    return line(events.Round.of(written, 4))


def started(round: int = 0) -> str:
    return line(events.Started(folder="/runs/one", round=round, rounds=4))


def write(runs: Path, lines: str, name: str = "one") -> Path:
    folder = runs / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_text(started() + lines)
    return folder


FAILED = [{"client": 2, "cause": "no reply within 5 s"}, {"client": 1, "cause": "error 8: killed"}]


def test_a_run_folder_becomes_numbers(tmp_path: Path) -> None:
    left = [{"who": "client 2", "cause": "refused by its site: methods"}]
    folder = write(tmp_path, record(1, FAILED) + record(2, FAILED[:1], 2, **{"left-out": left}))
    exporter = Exporter(Watched(tmp_path, NOWHERE))
    found = exporter.samples()
    assert found["rounds_total"] == {("one",): 2} and found["run_rounds"] == {("one",): 4}
    assert found["replies_total"] == {("one",): 5} and found["left_out"] == {("one",): 1}
    assert found["phase_seconds_total"] == {("one", "wait"): 4, ("one", "prepare"): 2}
    assert found["bytes_total"] == {("one", "download"): 200, ("one", "upload"): 140}
    assert found["failures_total"] == {("one", "2", "late"): 2, ("one", "1", "ended"): 1}
    assert found["score"] == {("one", "accuracy", "before"): 0.5, ("one", "accuracy", "after"): 0.5}
    assert found["loss"] == {("one",): 0.75} and found["run_finished"] == {("one",): 0}
    assert found["superlink_up"] == {(): 0} and found["disk_free_bytes"][("runs",)] > 0

    # only what is new is read: half a line waits for its end
    third = record(3)
    with (folder / "events.jsonl").open("a") as file:
        file.write(third[:-9])
        file.flush()
        assert exporter.samples()["rounds_total"] == {("one",): 2}
        file.write(third[-9:] + line(events.Finished(summary={"rounds": 3})))
    found = exporter.samples()
    assert found["rounds_total"] == {("one",): 3} and found["replies_total"] == {("one",): 8}
    assert found["run_finished"] == {("one",): 1}


def test_a_resumed_run_repeats_rounds(tmp_path: Path) -> None:
    folder = write(tmp_path, "".join(map(record, (1, 2, 3))) + '{"event":"round","rou\n')
    exporter = Exporter(Watched(tmp_path, NOWHERE))
    assert exporter.samples()["rounds_total"] == {("one",): 3}
    with (folder / "events.jsonl").open("a") as file:
        file.write(started(1))
        file.flush()
        assert exporter.samples()["rounds_total"] == {("one",): 1}
        file.write("".join(map(record, (2, 3, 4))))
    found = exporter.samples()
    assert found["rounds_total"] == {("one",): 4} and found["replies_total"] == {("one",): 18}


def test_a_run_that_replaced_another_is_read_from_its_start(tmp_path: Path) -> None:
    folder = write(tmp_path, record(1, FAILED))
    exporter = Exporter(Watched(tmp_path, NOWHERE))
    assert sum(exporter.samples()["failures_total"].values()) == 2
    (folder / "events.jsonl").rename(folder / "before.jsonl")
    write(tmp_path, record(1) + record(2))
    found = exporter.samples()
    assert found["rounds_total"] == {("one",): 2} and not found["failures_total"]


@pytest.mark.parametrize(
    "lines",
    [
        "[]\n",
        "null\n",
        "{}\n",
        "\xff\n",
        '{"event":"round","round":1}\n',
        record(1).replace("100", '"x"'),
        record(1).replace("1.5", '"x"'),
    ],
)
def test_lines_that_are_no_events_are_skipped(tmp_path: Path, lines: str) -> None:
    write(tmp_path, lines, "bad")
    write(tmp_path, record(1), "good")
    (tmp_path / "a-file").write_text("")
    exporter = Exporter(Watched(tmp_path, NOWHERE))
    for _ in range(2):
        assert exporter.samples()["rounds_total"] == {("good",): 1, ("bad",): 0}


def test_a_folder_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    write(tmp_path, record(1).replace("1.5", "9" * 400), "bad")
    write(tmp_path, record(1), "good")
    (tmp_path / "worse" / "events.jsonl").mkdir(parents=True)
    assert Exporter(Watched(tmp_path, NOWHERE)).samples()["loss"] == {("good",): 1.5}


def test_a_clients_text_is_no_label(tmp_path: Path) -> None:
    causes_ = [f"error {k}: x{k}" for k in range(50)] + ['"} 1\ncorolla_superlink_up 7', "its " + "y" * 500]
    write(tmp_path, record(1, [{"client": 0, "cause": cause} for cause in causes_]), 'run "a"\\')
    found = Exporter(Watched(tmp_path, NOWHERE)).samples()
    assert {labels[2] for labels in found["failures_total"]} == {"ended", "other"}
    families = {f.name: f for f in text_string_to_metric_families(prometheus.text_of(found).decode())}
    assert [sample.value for sample in families["corolla_superlink_up"].samples] == [0]
    assert families["corolla_rounds"].samples[0].labels == {"run": 'run "a"\\'}


def test_a_folder_whose_name_is_no_text_hides_no_other(tmp_path: Path) -> None:
    write(tmp_path, record(1), "caf\udce9")
    write(tmp_path, record(1, seconds={"\ud800": 1.0}), "phase")
    write(tmp_path, record(1), "good")
    found = Exporter(Watched(tmp_path, NOWHERE)).samples()
    families = {f.name: f for f in text_string_to_metric_families(prometheus.text_of(found).decode())}
    assert {sample.labels["run"] for sample in families["corolla_rounds"].samples} == {"caf?", "phase", "good"}


@pytest.mark.parametrize(
    "cause, kind",
    [
        ("client 2: refused by its site: bounds: local-epochs must be at most 10, got 20", "refused"),
        ("no reply within 3600 s", "late"),
        ("error 5: Node Unavailable: no heartbeat", "unavailable"),
        ("error 8: the process ended", "ended"),
        ("malformed reply: ValueError('x')", "malformed"),
        ("array params has 1 non-finite values", "diverged"),
        ("array params has shape (7,), expected (17226,)", "array"),
        ("cannot write its state /x: No space left on device", "state"),
        ("metric accuracy-after must be a number in [0, 1], got 7.0", "other"),
    ],
)
def test_kinds_of_failures(cause: str, kind: str) -> None:
    assert events.cause_kind(cause) == kind and kind in events.CAUSES


def test_days_of_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {"superlink": {"fleet-address": "10.0.0.1"}, "hosts": [{"host": "local"}]}
    lab = inventory.parse(raw, "lab", tmp_path)
    certificates.make(lab)
    there = [Path(lab.keys) / name for name in (certificates.CA, certificates.SERVER)]
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=825 + 5)
    monkeypatch.setattr(certificates, "now", lambda: later)
    found = Exporter(Watched(tmp_path, NOWHERE, certificates=[*there, tmp_path / "none"])).samples()
    days = found["certificate_days"]
    assert set(days) == {("ca.crt",), ("server.crt",)} and -5.1 < days[("server.crt",)] < -4.9


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    write(tmp_path, record(1))
    server = prometheus.server(("127.0.0.1", 0), Exporter(Watched(tmp_path, NOWHERE)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_reset_connection_leaves_no_traceback(served: str, capfd: pytest.CaptureFixture[str]) -> None:
    port = int(served.rpartition(":")[2])
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", port)) as link:
            # closed with a reset, at the end of half a request
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            link.sendall(b"GET /metrics HTTP/1.0\r\n")
    # answered after them
    assert urllib.request.urlopen(f"{served}/health").status == 200
    assert "Traceback" not in capfd.readouterr().err


def test_it_is_served_as_prometheus_reads_it(served: str) -> None:
    text = urllib.request.urlopen(f"{served}/metrics").read().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["corolla_rounds"].type == "counter" and families["corolla_nodes"].type == "gauge"
    assert urllib.request.urlopen(f"{served}/health").status == 200
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{served}/../etc/passwd")


@pytest.mark.parametrize("given, at", [("9101", ("127.0.0.1", 9101)), ("0.0.0.0:80", ("0.0.0.0", 80))])
def test_the_address_is_loopback_unless_named(given: str, at: tuple[str, int]) -> None:
    assert commands.listen_address(given) == at


@pytest.mark.parametrize("given", ["", "x", "70000", "host:"])
def test_an_address_that_is_none(given: str) -> None:
    with rejected(DeploymentError, "--metrics", "must be HOST:PORT", "got '", f"{given}'"):
        commands.listen_address(given)


def test_the_clusters_process(tmp_path: Path) -> None:
    raw = {"tls": True, "superlink": {"database": "/db/f.db"}, "hosts": [{"host": "local"}]}
    process = commands.metrics(
        inventory.parse(raw, "lab", tmp_path), HostPlaces("/d", "/s", ()), "0.0.0.0:9101", "/runs"
    )
    words = " ".join(process.command)
    assert mentions(words, "-m deploy.prometheus --listen 0.0.0.0:9101", "/runs --control 127.0.0.1:8000")
    assert mentions(words, "--root-certificates /d/keys/ca.crt") and "--database /db/f.db" in words
    assert process.health == "http://127.0.0.1:9101/health"


# Files that name metrics ------------------------------------------------------------------------------------------------

MONITORING = ROOT / "deploy" / "monitoring"
NAMES = {family.exported for family in TABLE.values()}


def named_in(text: str) -> set[str]:
    return set(re.findall(r"corolla_[a-z_]+", text))


def test_dashboard_and_alerts_ask_for_metrics_and_labels_that_exist() -> None:
    dashboard = json.loads((MONITORING / "grafana" / "dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [variable["query"] for variable in dashboard["templating"]["list"]]
    alerts = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    asked += [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    assert len(asked) > 20
    for query in asked:
        assert named_in(query) and named_in(query) <= NAMES, query
        known = {label for name in named_in(query) for label in TABLE[name.removeprefix(prometheus.PREFIX)].labels}
        used = re.findall(r"by \(([^)]*)\)", query) + re.findall(r"(\w+)=~?\"", query)
        assert {label.strip() for labels in used for label in labels.split(",")} <= known, query
    # a metric that nobody looks at
    assert {"corolla_info", "corolla_run_finished"} == NAMES - {name for query in asked for name in named_in(query)}


def test_the_datasource_is_the_one_that_the_dashboard_names() -> None:
    source = yaml.safe_load((MONITORING / "grafana" / "datasource.yaml").read_text())["datasources"][0]
    dashboard = json.loads((MONITORING / "grafana" / "dashboard.json").read_text())
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {source["uid"]}


# The alerts: promtool tries each rule with numbers that fire it and with others, and run folders have such numbers ----

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
