"""Deployments with two versions of Flower: equal digests, and a cluster that is upgraded between two runs.

COROLLA_NEXT names a Python with a newer Flower (`make test-newer` makes one); this Python has 1.39.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from deploy.superlink import serves_grpc
from tests.e2e.conftest import Lab, own_cluster, settings, summary

OLD, NEW = sys.executable, os.environ.get("COROLLA_NEXT", "")
CLIENTS = 2
CONFIG = {"method": "fedcac", "fedcac.beta": 2, "num-server-rounds": 2, "train-samples": 40, "local-epochs": 1}

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not NEW, reason="COROLLA_NEXT names no Python with a newer Flower"),
    pytest.mark.skipif(not serves_grpc(metadata.version("flwr")), reason="this Flower is not 1.39"),
]


def command(python: str, *words: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `corolla` with a Python's Flower."""
    return subprocess.run(
        [python, "-m", "corolla.cli", *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def digest(python: str, folder: Path, *options: str, environment: dict[str, str], **config: Any) -> str:
    """Run an experiment, and return its digest. folder: of the run; its clients' state is beside it."""
    values = CONFIG | {"state-dir": str(folder.parent / "client-state"), "keep-state": True}
    values |= {key.replace("_", "-"): value for key, value in config.items()}
    if "--resume" in options:
        values = {key: value for key, value in values.items() if key in ("num-server-rounds", "state-dir")}
        options = (*options, str(folder))
    else:
        values |= {"run-name": folder.name}
        options = (*options, "--clients", str(CLIENTS), "--output-dir", str(folder.parent))
    done = command(python, "run", *options, *settings(values), environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(summary(folder)["digest"])


@pytest.mark.parametrize(
    ("superlink", "node", "grpc"),
    [
        pytest.param(OLD, OLD, False, marks=pytest.mark.nightly),
        pytest.param(NEW, NEW, False, marks=pytest.mark.nightly),
        pytest.param(NEW, OLD, True, marks=pytest.mark.nightly),
    ],
    ids=["1.39-over-grpc", "newer-over-http", "newer-superlink-with-nodes-of-1.39"],
)
def test_deployments_of_all_versions_give_the_digest_of_one_process(
    tmp_path: Path, superlink: str, node: str, grpc: bool
) -> None:
    with own_cluster(tmp_path) as cluster:
        cluster.python, cluster.node_python, cluster.grpc, cluster.warm = superlink, node, grpc, "own"
        cluster.start(CLIENTS)
        deployed = digest(superlink, tmp_path / "deployed", "--superlink", "test", environment=cluster.environment)
        alone = digest(OLD, tmp_path / "alone", "--in-process", environment=cluster.environment)
    assert deployed == alone


def test_an_upgraded_cluster_continues_with_its_keys_and_state(lab: Lab) -> None:
    """The steps of docs/deployment.md, "Upgrading a cluster"; and back, with the copy of the database."""
    database, copies = lab.directory / "superlink.db", lab.directory / "copies"
    files = [Path(f"{database}{end}") for end in ("", "-wal", "-shm")]
    lab.write(
        tls=True,
        superlink={"database": str(database)},
        hosts=[{"host": "local", "supernodes": CLIENTS, "gpus": [], "warm": True}],
    )

    def cluster(python: str, *words: str) -> subprocess.CompletedProcess[str]:
        return command(python, "cluster", words[0], str(lab.inventory), *words[1:], environment=lab.environment)

    def up(python: str) -> list[str]:
        """Start the cluster, and return its nodes' ids at the SuperLink."""
        done = cluster(python, "up", "--timeout", "300")
        assert done.returncode == 0, done.stdout + done.stderr
        beside = Path(python).parent / "flwr"
        listed = subprocess.run(
            [beside, "supernode", "list", "lab", "--format", "json"],
            env=lab.environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        return sorted(str(found["node-id"]) for found in json.loads(listed)["nodes"])

    def down(python: str) -> None:
        done = cluster(python, "down")
        assert done.returncode == 0, done.stdout + done.stderr

    folder = lab.directory / "run"
    assert cluster(OLD, "keys").returncode == 0
    nodes = up(OLD)
    digest(OLD, folder, "--superlink", "lab", environment=lab.environment)
    down(OLD)
    copies.mkdir()
    for path in filter(Path.exists, files):
        shutil.copy(path, copies)

    assert up(NEW) == nodes and len(nodes) == CLIENTS
    assert cluster(NEW, "status").returncode == 0
    upgraded = digest(NEW, folder, "--superlink", "lab", "--resume", environment=lab.environment, num_server_rounds=4)
    down(NEW)

    (alone := lab.directory / "on-1.39").mkdir()
    digest(OLD, alone / "run", "--in-process", environment=lab.environment)
    assert upgraded == digest(
        OLD, alone / "run", "--in-process", "--resume", environment=lab.environment, num_server_rounds=4
    )

    refused = cluster(OLD, "up", "--timeout", "300")
    assert refused.returncode == 2 and "Can't locate revision" in refused.stderr, refused.stderr
    for path in files:
        path.unlink(missing_ok=True)
    for path in copies.iterdir():
        shutil.copy(path, lab.directory)
    assert up(OLD) == nodes
    down(OLD)
