"""`corolla cluster commands`: the launcher's own command lines as shell text, whatever is in them; what a job cannot start."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from deploy import commands, inventory
from fl_app import shell
from fl_app.errors import DeploymentError
from tests import slurm
from tests.facts import mentions, rejected

TWO_HOSTS = {
    "superlink": {"fleet-address": "server.example.org"},
    "hosts": [
        {"host": "local", "gpus": [0, 1], "environment": {"WORDS": "a b $HOME 'c'"}},
        {"host": "me@node2", "python": "/opt/my corolla/bin/python", "data-path": "/data/x y", "threads": 4},
    ],
}


def arguments(text: str) -> list[list[str]]:
    """What a shell makes of every command that stays running: its arguments, variables in place."""
    lines = [line.removesuffix(" &") for line in text.splitlines() if line.endswith(" &")]
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    found = []
    for line in lines:
        done = subprocess.run(
            ["bash", "-c", f"python3 -c '{code}' {line}"],
            capture_output=True,
            text=True,
            check=True,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/home/me"},
        )
        found.append(json.loads(done.stdout))
    return found


def test_a_shell_starts_what_the_launcher_would(tmp_path: Path) -> None:
    lab = inventory.parse(TWO_HOSTS, "lab", tmp_path)
    text = commands.by_host(lab)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    link, first, second, third = arguments(text)
    assert link[0] == "env" and "deploy.superlink" in link and f"{tmp_path}/lab-keys/server.key" in link
    place = commands._place(lab, "me@node2", "/opt/my corolla/bin/python")
    assert place.directory == f"{shell.variable('HOME')}/.local/state/corolla/clusters/lab"
    there = commands.HostPlaces("/home/me/.local/state/corolla/clusters/lab", place.scripts, place.ports)
    process = commands.supernode(lab, lab.supernodes[2], there, 0)
    assert third[-len(process.command) :] == list(process.command) and 'data-path="/data/x y"' in third[-1]
    assert {"OMP_NUM_THREADS=4", "FLWR_HOME=/home/me/.local/state/corolla/clusters/lab/flwr"} <= set(third)
    assert "WORDS=a b $HOME 'c'" in first and "CUDA_VISIBLE_DEVICES=1" in second
    # a node is registered before it starts: an unknown key is refused
    assert text.index("register") < text.index("# local: supernode-0") and text.rstrip().endswith("--clients 3")
    assert mentions(text, f"scp -p {tmp_path}/lab-keys/ca.crt {tmp_path}/lab-keys/supernode-2.key", "me@node2")


def test_ports_of_a_host_differ(tmp_path: Path) -> None:
    hosts = [{"host": "local", "supernodes": 3}]
    # the second's next numbers meet the fleet port
    for control in (8000, 9090):
        lab = inventory.parse({"superlink": {"control-port": control}, "hosts": hosts}, "lab", tmp_path)
        ports = commands._place(lab, "local", "/p/python").ports
        assert len({*ports, 9092, control}) == len(ports) + 2 == 5


def test_a_job_asks_for_what_the_inventory_has(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(commands.slurm(inventory.parse(TWO_HOSTS, "lab", tmp_path)))
    subprocess.run(["bash", "-n", str(path)], check=True)
    asked = slurm.options(path)
    assert (asked["--ntasks"], asked["--gpus-per-task"], asked["--cpus-per-task"]) == (
        "3",
        "1",
        "4",
    ) and "--nodes" not in asked
    # which GPU a task has, Slurm says
    assert "CUDA_VISIBLE_DEVICES" not in path.read_text()
    assert "address=$(hostname -f)" in path.read_text() and "tls: true" in path.read_text()
    path.write_text(commands.slurm(inventory.parse({"hosts": [{"host": "local", "gpus": []}]}, "lab", tmp_path)))
    asked = slurm.options(path)
    assert asked["--nodes"] == "1" and "--gpus-per-task" not in asked and "CUDA_VISIBLE_DEVICES=''" in path.read_text()
    joining = inventory.parse({"tls": True, "hosts": [{"host": "local"}, {"host": "joins"}]}, "lab", tmp_path)
    with rejected(DeploymentError, "hosts", "clients 1", "own sites"):
        commands.slurm(joining)
    assert mentions(commands.by_host(joining), "clients 1", "their sites")


@pytest.mark.parametrize("text", ["plain", "", "a b", "it's", '$HOME `id` \\ " *', "ends\\"])
def test_words(text: str) -> None:
    line = shell.line(["printf", "%s|", text, f"{text}{shell.variable('own')}{text}"], {"A": text})
    done = subprocess.run(["bash", "-c", f"own='x  y'; {line}"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{text}|{text}x  y{text}|"
