"""The compose files' SuperNodes without containers: what their shells would run, on this machine, keeps its site's rules."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from deploy import audit
from fl_app import reasons
from fl_app.processes import free_ports
from tests.e2e.conftest import BackgroundRun, Cluster, rounds
from tests.privacy.keys import make

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

DEPLOY = Path(__file__).resolve().parent.parent.parent / "deploy"
FILES = {name: yaml.safe_load((DEPLOY / name).read_text()) for name in ("compose.yaml", "compose.tls.yaml")}


def start(cluster: Cluster, directory: Path, client_id: int, file: str, here: dict[str, str]) -> None:
    """Start a SuperNode by its container's command. here: what stands for what there."""
    (port,) = free_ports(1)
    *shell, line = FILES[file]["services"][f"supernode-{client_id}"]["command"]
    here = {
        "$$": "$",
        "superlink:9092": cluster.fleet,
        "--port 8000": f"--port {port}",
        "exec python ": f"exec {sys.executable} ",
        **here,
    }
    for there, word in here.items():
        assert there in line, line
        line = line.replace(there, word)
    cluster._start(
        f"node-{client_id}", [*shell, line], CLIENT_ID=str(client_id), COROLLA_STATE_HOME=str(directory / "audit")
    )


@pytest.mark.nightly
def test_sites_of_containers_refuse_by_name(cluster: Cluster, tmp_path: Path) -> None:
    """Node 0 has no rules, node 1's allow another method."""
    cluster.start_superlink()
    for client_id in range(2):
        site = tmp_path / f"site-{client_id}"
        site.mkdir()
        if client_id == 1:
            (site / "site.toml").write_text('methods = ["fedobp"]\n')
        start(
            cluster, tmp_path, client_id, "compose.yaml", {"num-partitions=4": "num-partitions=2", "/site/": f"{site}/"}
        )
    cluster.wait_for_nodes()
    config = {
        "method": "fedcac",
        "num-server-rounds": 2,
        "train-samples": 40,
        "local-epochs": 1,
        "min-available-clients": 1,
    }
    run = BackgroundRun(cluster, tmp_path / "r", 2, config | {"state-dir": str(tmp_path / "state")})
    run.finish()
    assert "client 1 cannot take part: refused by its site (method: methods); " in " ".join(run.log.split())
    assert [sorted(record["clients"]) for record in rounds(run.folder)] == [["0"], ["0"]]
    kinds = [
        [entry["kind"] for entry in audit.entries(tmp_path / "audit" / "sites" / f"supernode-{i}")] for i in range(2)
    ]
    assert "upload" in kinds[0] and "upload" not in kinds[1] and kinds[1][0] == "start"


def test_containers_with_keys_run_private_and_those_without_say_so(cluster: Cluster, tmp_path: Path) -> None:
    """TLS apart, which the nodes of compose.tls.yaml have besides; node 3 is one of compose.yaml."""
    cluster.start_superlink()
    for client_id, key in enumerate(make(tmp_path / "keys", 4)):
        key.rename(key.with_name("supernode.x25519"))
        keyed = {
            "--root-certificates /keys/ca.crt --auth-supernode-private-key /keys/supernode.key": "--insecure",
            "'/keys/": f"'{key.parent}/",
        }
        file, here = ("compose.tls.yaml", keyed) if client_id < 3 else ("compose.yaml", {})
        start(cluster, tmp_path, client_id, file, {**here, "/site/": f"{tmp_path}/none/"})
    cluster.wait_for_nodes()
    config = {
        "method": "fedavg",
        "private": True,
        # otherwise no one answers while a member of the aggregation group is away
        "private-left-out": "client",
        "num-server-rounds": 1,
        "train-samples": 40,
        "min-available-clients": 3,
    }
    run = BackgroundRun(cluster, tmp_path / "r", 4, config | {"state-dir": str(tmp_path / "state")})
    run.finish()
    reason = reasons.Reason("deployment", "private", "keys").sentence
    assert f"client 3 cannot take part: {reason}" in " ".join(run.log.split())
    assert "no key for private" in " ".join(cluster.log("node-3").split())
    assert [sorted(record["clients"]) for record in rounds(run.folder)] == [["0", "1", "2"]]


@pytest.mark.parametrize("name", list(FILES))
def test_no_container_starts_a_supernode_without_its_gate(name: str) -> None:
    nodes = {service: about for service, about in FILES[name]["services"].items() if service.startswith("supernode-")}
    assert len(nodes) == 4
    for about in nodes.values():
        words = about["command"][-1].split()
        assert words[:5] == ["exec", "python", "-P", "-m", "deploy.supernode"] and "flower-supernode" not in words
