"""Process bookkeeping with real, small processes: only what was started is ended, children included."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy import detached, node
from deploy.inventory import LOCAL
from fl_app.errors import DeploymentError, UserError
from fl_app.processes import start_mark
from tests.conftest import wait_for
from tests.facts import each_mentions, rejected


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COROLLA_STATE_HOME", str(tmp_path))
    directory = detached.cluster_directory("lab")
    directory.mkdir(parents=True)
    return directory


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_stop_ends_a_process_and_its_record_goes(directory: Path) -> None:
    record = detached.start(directory, "t", "sleeper", ["sleep", "60"], {})
    assert detached.alive(record) and detached.read_record(directory, "sleeper") == record
    assert detached.stop(directory, "t", "sleeper")
    assert not detached.alive(record) and detached.records(directory) == []
    assert detached.stop(directory, "t", "sleeper")  # again: nothing to do


def test_a_recycled_pid_is_not_touched(directory: Path, bystander: subprocess.Popen[bytes]) -> None:
    # start times count in hundredths of a second
    time.sleep(0.05)
    record = detached.start(directory, "t", "sleeper", ["true"], {})
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(record.pid).wait(30)
    # the pid lives, its start time is another
    recycled = dataclasses.replace(record, pid=bystander.pid)
    (directory / "sleeper.json").write_text(json.dumps(dataclasses.asdict(recycled)))
    assert not detached.alive(recycled)
    assert detached.stop(directory, "t", "sleeper")
    assert bystander.poll() is None


def test_another_clusters_process_is_not_touched(directory: Path) -> None:
    record = detached.start(directory, "mine", "sleeper", ["sleep", "60"], {})
    assert detached.stop(directory, "yours", "sleeper")
    assert detached.alive(record)
    assert detached.stop(directory, "mine", "sleeper")


def test_children_are_ended_also_those_that_left_the_family(directory: Path) -> None:
    code = (
        "import subprocess, time\n"
        "subprocess.Popen(['sleep', '60'])\n"
        "subprocess.Popen(['sh', '-c', 'sleep 60 & echo $! > orphan'], start_new_session=True).wait()\n"
        "open('ready', 'w').close()\n"
        "time.sleep(60)\n"
    )
    detached.start(directory, "t", "parent", [sys.executable, "-c", code], {})
    other = detached.start(directory, "t", "other", ["sleep", "60"], {})
    wait_for((directory / "ready").exists, 30)
    orphan = int((directory / "orphan").read_text())
    record = detached.read_record(directory, "parent")
    assert record is not None
    family = [p.pid for p in psutil.Process(record.pid).children(recursive=True)] + [orphan]
    assert detached.stop(directory, "t", "parent")
    assert [pid for pid in family if start_mark(pid)] == []
    assert detached.alive(other)  # same token, another name
    assert detached.stop(directory, "t", "other")


def test_a_process_that_ignores_sigterm_is_killed(directory: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open('ready', 'w').close(); time.sleep(60)"
    )
    record = detached.start(directory, "t", "stubborn", [sys.executable, "-c", code], {})
    wait_for((directory / "ready").exists, 30)
    assert detached.stop(directory, "t", "stubborn", seconds=0.5)
    assert not detached.alive(record)


def test_a_second_start_of_the_same_name_is_refused(directory: Path) -> None:
    detached.start(directory, "t", "sleeper", ["sleep", "60"], {})
    with rejected(DeploymentError, "", "sleeper is already", "running here"):
        detached.start(directory, "u", "sleeper", ["sleep", "60"], {})
    with rejected(DeploymentError, "", "sleeper", "cluster 'lab'", "running already"):
        node.handle(
            {"action": "prepare", "cluster": "lab", "token": "u", "paths": [], "free": [], "files": {}, "ports": 0}
        )
    detached.stop(directory, "t", "sleeper")


def test_a_command_that_is_not_there(directory: Path) -> None:
    with rejected(DeploymentError, "x", "cannot start /no/such", "No such file", "directory"):
        detached.start(directory, "t", "x", ["/no/such"], {})


def test_log_and_environment(directory: Path) -> None:
    code = "import os; print(os.environ['A'], os.environ['FLWR_HOME'], os.environ['FLWR_TELEMETRY_ENABLED'])"
    record = detached.start(directory, "t", "talker", [sys.executable, "-c", code], {"A": "b"})
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(record.pid).wait(30)
    assert detached.log_end(directory, "talker", 5) == f"b {directory / 'flwr'} 0"
    assert detached.log_end(directory, "nobody", 5) == ""


def test_a_killed_nodes_log_says_that_it_ended(directory: Path) -> None:
    record = detached.start(directory, "t", "supernode-0", ["sh", "-c", "echo Connection attempt failed; sleep 60"], {})
    logs = {"action": "logs", "cluster": "lab", "token": "t", "name": "supernode-0", "lines": 5}
    wait_for(lambda: node.handle(logs)["text"], 30)
    assert [words.partition(":")[0] for words in node.handle(logs)["means"]] == ["not connected"]
    for process in [*psutil.Process(record.pid).children(), psutil.Process(record.pid)]:
        process.kill()
        process.wait()
    assert [words.partition(":")[0] for words in node.handle(logs)["means"]] == ["ended"]


def test_prepare_reports_all_problems_and_writes_nothing(directory: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        request = {
            "action": "prepare",
            "cluster": "other",
            "token": "t",
            "paths": ["/no/such/site"],
            "free": [["127.0.0.1", port]],
            "files": {"ca.crt": "x"},
            "ports": 3,
        }
        with pytest.raises(UserError) as error:
            node.handle(request)
    assert each_mentions(
        str(error.value).splitlines(),
        ("/no/such/site", "no such file", "directory"),
        (f"port {port}", "cannot listen on 127.0.0.1", "Address already"),
    )
    assert not detached.cluster_directory("other").exists()


def test_prepare_writes_private_files(directory: Path) -> None:
    who = {"cluster": "lab", "token": "t"}
    reply = node.handle({"action": "prepare", "paths": [], "free": [], "files": {"k": "secret"}, "ports": 3, **who})
    assert (directory / "keys" / "k").read_text() == "secret"
    assert (directory / "keys" / "k").stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700
    assert len(set(reply["ports"])) == 3
    node.handle({"action": "clear", **who})
    assert not (directory / "keys").exists()


def test_a_node_id_is_not_read_from_a_log(directory: Path) -> None:
    """The log moves, and has an application's words too."""
    log = directory / "supernode-0.log"
    log.write_text("INFO : SuperNode ID: 1234567\nmore\n")
    assert node._node_id(directory, "supernode-0") == ""
    for name, noted, found in (("0", "1234567", "1234567"), ("1", "", ""), ("2", "\u0661", ""), ("3", "12\n", "")):
        detached.node_id_file(directory, f"supernode-{name}").write_text(noted)
        assert node._node_id(directory, f"supernode-{name}") == found
    detached.rotate(log, most=1)
    assert node._node_id(directory, "supernode-0") == "1234567"


def test_a_started_process_has_no_node_id_yet(directory: Path) -> None:
    file = detached.node_id_file(directory, "supernode-0")
    file.write_text("1")
    code = f"import os; print(os.environ['{detached.NODE_ID}'] == '{file}', os.path.exists('{file}'))"
    record = detached.start(directory, "t", "supernode-0", [sys.executable, "-c", code], {})
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(record.pid).wait(30)
    assert detached.log_end(directory, "supernode-0", 9) == "True False"


def test_ssh_failures_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deploy import cluster

    ssh = tmp_path / "ssh"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    request = {"action": "status", "cluster": "lab", "token": "t"}
    for script, expected in (
        ("echo 'user@n: Permission denied (publickey).' >&2; exit 255", "user@n: ssh failed: .*Permission denied"),
        ("echo 'sh: /p: not found' >&2; exit 127", "user@n: cannot run /p there; is `python` right"),
        ('echo "/p: No module named deploy" >&2; exit 1', "user@n: /p has no Corolla of this version"),
        ("echo oops >&2; exit 3", "user@n: /p -m deploy.node ended with code 3: oops"),
        ('echo Welcome; echo \'corolla-node: {"error": "disk full"}\'', "user@n: disk full"),
    ):
        ssh.write_text(f"#!/bin/sh\n{script}\n")
        ssh.chmod(0o755)
        with pytest.raises(UserError, match=expected):
            cluster.ask("user@n", "/p", request)
    ssh.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\" > args; echo Welcome; echo 'corolla-node: {\"processes\": {}}'\n")
    monkeypatch.chdir(tmp_path)
    assert cluster.ask("user@n", "/a b/python", request) == {"processes": {}}
    assert (tmp_path / "args").read_text().splitlines()[-3:] == ["--", "user@n", "'/a b/python' -P -m deploy.node"]


def test_hosts_are_asked_together_and_all_failures_told() -> None:
    from deploy import cluster

    def work(host: str) -> int:
        if host != LOCAL:
            raise UserError(f"{host}: no")
        return 1

    assert cluster.each(work, [LOCAL]) == {LOCAL: 1}
    with pytest.raises(UserError, match="a: no\nb: no"):
        cluster.each(work, ["a", LOCAL, "b"])


def test_half_a_record_and_an_unfinished_one_are_none(directory: Path) -> None:
    # a full disk left both
    (directory / ".superlink.json").touch()
    (directory / "supernode-0.json").write_text('{"name": "super')
    (directory / "supernode-1.json").write_text("[]")
    assert detached.records(directory) == []
    record = detached.start(directory, "t", "supernode-0", ["sleep", "60"], {})
    assert detached.records(directory) == [record]
    # its process is found by its token
    (directory / "supernode-0.json").write_text("")
    assert detached.stop(directory, "t", "supernode-0") and not detached.alive(record)
