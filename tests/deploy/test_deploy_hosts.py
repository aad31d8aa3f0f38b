"""What hosts must have in common: versions, and clocks."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from deploy import cluster, inventory, lifecycle, node
from deploy.cluster import Cluster
from deploy.lifecycle import check_clocks
from fl_app.errors import DeploymentError, UserError
from tests.disks import full_disk
from tests.facts import mentions, rejected


def found(flwr: str = "1.39.0", torch: str = "2.11.0") -> dict[str, str]:
    return {"corolla": "0.1.0", "flwr": flwr, "torch": torch}


def test_hosts_have_the_same_versions(capsys: pytest.CaptureFixture[str]) -> None:
    lifecycle.compare_versions({"local": found(), "node2": found(torch="2.12.0")}, print)
    assert mentions(capsys.readouterr().out, "note", "torch is 2.12.0", "node2 and 2.11.0", "local")
    with rejected(DeploymentError, "", "flwr is 1.39.1", "node2 and 1.39.0", "local", "install the same", "version"):
        lifecycle.compare_versions({"local": found(), "node2": found("1.39.1")}, print)


@pytest.mark.parametrize("flwr", ["1.43.0", "1.43.0.dev20261026", "2.0.0"])
def test_a_newer_flower_is_refused_by_name(flwr: str) -> None:
    with rejected(DeploymentError, "local", f"flwr {flwr} is newer", "1.42", "anyone that reaches", "every node"):
        lifecycle.compare_versions({"local": found(flwr), "node2": found(flwr)}, print)


def test_the_newest_flower_that_may_be_installed_is_the_newest_that_is_started() -> None:
    project = Path(lifecycle.__file__).parent.parent / "pyproject.toml"
    major, minor = lifecycle.NEWEST
    assert f'"flwr[simulation]>=1.39,<{major}.{minor + 1}"' in project.read_text()


@pytest.mark.parametrize(
    ("off", "words"), [(5.5, "5.5 s ahead of"), (400, "400.0 s ahead of"), (-306, "306.0 s behind")]
)
def test_a_clock_whose_supernodes_would_be_refused(off: float, words: str) -> None:
    rule = "SuperLink's host \\(local\\)\n.* 5 s ahead or 305 s behind"
    with pytest.raises(DeploymentError, match=f"^node2: .* {words} .*{rule}"):
        lifecycle.compare_clocks({"local": 10.0, "node2": 10.0 + off, "node3": 11.0}, "local", authenticated=True)
    assert len(lifecycle.compare_clocks({"local": 10.0, "node2": 10.0 + off}, "local", authenticated=False)) == 1


def test_small_differences_are_said_or_nothing() -> None:
    assert lifecycle.compare_clocks({"local": 0.0, "a": 1.9, "b": -1.9}, "local", authenticated=True) == []
    (note,) = lifecycle.compare_clocks({"local": 0.0, "a": -60.0}, "local", authenticated=True)
    assert mentions(note, "note", "clock is 60.0", "SuperLink's host (local)")


def test_a_real_answer_holds_the_other_sides_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host is another process behind a command named ssh; this host's clock is set back."""
    (tmp_path / "ssh").write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nexec sh -c "$3"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("COROLLA_STATE_HOME", str(tmp_path / "state"))
    raw = {
        "superlink": {"fleet-address": "10.0.0.1"},
        "hosts": [{"host": "local"}, {"host": "node2", "python": sys.executable}],
    }
    lab = Cluster(inventory.parse(raw, "lab", tmp_path), "token", "", "now")
    assert abs(lab.ask("node2", "clock")["clock"] - time.time()) < 1
    said: list[str] = []
    check_clocks(lab, ["node2"], said.append)
    assert said == []
    monkeypatch.setattr(node, "now", lambda: time.time() - 30)
    with pytest.raises(UserError, match=r"node2: its clock is (29\.|30\.)\d s ahead"):
        check_clocks(lab, ["node2"], said.append)
    assert cluster.ask("local", "", {"action": "clock", "cluster": "lab", "token": ""})["clock"] < time.time() - 29


def test_little_space_under_the_database_is_noted_and_none_is_refused() -> None:
    assert lifecycle.note_on_space("local", "/x/lab.db", None) == "" == lifecycle.note_on_space("a", "/x", 2e9)
    noted = lifecycle.note_on_space("local", "/x/lab.db", 300e6)
    assert mentions(noted, "note", "local", "superlink.database", "/x/lab.db", "300 MB are free")
    with rejected(DeploymentError, "", "local", "superlink.database", "/x/lab.db", "3.2 MB are free", "database needs"):
        lifecycle.note_on_space("local", "/x/lab.db", 3.2e6)


def test_a_host_tells_the_space_under_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_STATE_HOME", str(tmp_path / "state"))
    request = {"action": "prepare", "cluster": "lab", "token": "t", "paths": [], "free": [], "files": {}, "ports": 0}
    assert node.handle(request | {"database": ""})["free"] is None
    with full_disk(tmp_path, free=1 << 20) as there:
        assert node.handle(request | {"database": str(there / "lab.db")})["free"] == 1 << 20
