"""Who must not get in: refused with a reason that a log names in words, while the others' run goes on.

One TLS cluster of three SuperNodes, the third of which has gone; in its place comes one with an unregistered key, with another
CA's certificate, without a key, and one that speaks plaintext.
"""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import yaml

from deploy import node
from deploy.superlink import serves_grpc
from fl_app.processes import end_processes, free_ports, processes_with, script
from tests.e2e.conftest import BackgroundRun, Lab, rounds, summary, wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

# only gRPC's log of a SuperLink tells of plaintext at its TLS port
PLAINTEXT = "spoke plaintext to the TLS port" if serves_grpc(metadata.version("flwr")) else ""
# what the SuperNode's own log says, what that means, and what `corolla cluster logs superlink` says
REFUSALS = {
    "unregistered": (
        "[code: 2004] Failed to activate SuperNode",
        "key is not registered",
        "key is not registered here",
    ),
    "no-key": ("[code: 2001] SuperNode authentication is enabled", "started without a key", ""),
    "wrong-ca": ("CERTIFICATE_VERIFY_FAILED", "did not sign the SuperLink's certificate", ""),
    "plaintext": ("Connection attempt failed", "plaintext to a TLS port", PLAINTEXT),
}


class Intruders:
    """SuperNodes outside the launcher, each with its log."""

    def __init__(self, lab: Lab, fleet: int) -> None:
        self.lab, self.fleet = lab, fleet
        self.logs: dict[str, Path] = {}

    def start(self, name: str, *arguments: str, client: int = 2) -> None:
        self.logs[name] = self.lab.directory / f"{name}.log"
        command = [script("flower-supernode"), *arguments, "--superlink", f"127.0.0.1:{self.fleet}"]
        command += ["--port", str(free_ports(1)[0]), "--node-config", f"partition-id={client} num-partitions=3"]
        with self.logs[name].open("wb") as log:
            subprocess.Popen(
                command,
                env=self.lab.environment | {"INTRUDER": str(self.lab.directory)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def end(self) -> None:
        """End them and what they started: Flower's helper of a SuperNode that was refused outlives it for a while."""
        end_processes(processes_with(f"INTRUDER={self.lab.directory}"))

    def log(self, name: str) -> str:
        return self.logs[name].read_text(errors="replace")


@pytest.mark.nightly
def test_refused_supernodes_are_told_why_and_the_run_goes_on_without_them(lab: Lab) -> None:
    fleet, _ = lab.write(tls=True, hosts=[{"host": "local", "supernodes": 3, "gpus": [], "warm": True}])
    other = lab.directory / "other.yaml"
    other.write_text(yaml.safe_dump({"tls": True, "hosts": [{"host": "local"}]}))
    for target in (lab.inventory, other):
        assert lab.cluster("keys", target=str(target)).returncode == 0
    up = lab.cluster("up", "--timeout", "300")
    assert up.returncode == 0, up.stdout + up.stderr
    end_processes([psutil.Process(lab.process("supernode-2")["pid"])])

    keys, theirs = lab.directory / "lab-keys", lab.directory / "other-keys"
    ca, foreign_ca = (("--root-certificates", str(d / "ca.crt")) for d in (keys, theirs))
    key, foreign_key = (
        ("--auth-supernode-private-key", str(d / name))
        for d, name in ((keys, "supernode-2.key"), (theirs, "supernode-0.key"))
    )
    intruders = Intruders(lab, fleet)
    intruders.start("unregistered", *ca, *foreign_key)
    intruders.start("no-key", *ca)
    intruders.start("wrong-ca", *foreign_ca, *key)
    intruders.start("plaintext", "--insecure")

    config = {"method": "fedcac", "num-server-rounds": 3, "train-samples": 40, "min-available-clients": 2}
    config["state-dir"] = str(lab.directory / "client-state")
    run = BackgroundRun(lab, lab.directory / "without", 3, config, superlink="lab")
    for name, (text, _, _) in REFUSALS.items():
        wait_for(lambda name=name, text=text: text in intruders.log(name), 300)  # type: ignore[misc]
    run.finish()
    for record in rounds(run.folder):
        assert sorted(record["clients"]) == ["0", "1"] and record["failures"] == []
    assert rounds(run.folder)[-1]["evaluation"]["absent"] == [2]
    assert summary(run.folder)["final-accuracy"] is not None

    told = lab.cluster("logs", "superlink").stdout
    for name, (_, meaning, superlink) in REFUSALS.items():
        assert "SuperNode ID" not in intruders.log(name), name
        assert any(meaning in said for said in node.explain_refusals("supernode-2", intruders.log(name))), (
            intruders.log(name)
        )
        assert superlink in told, (name, told)
    status = lab.cluster("status")
    assert status.returncode == 1 and status.stdout.count("online") == 2, status.stdout

    # the launcher's own node: its key replaced by one that is not registered
    (keys / "supernode-2.key").write_bytes((theirs / "supernode-0.key").read_bytes())
    restarted = lab.cluster("restart", "supernode-2", "--timeout", "120")
    assert restarted.returncode == 2 and "supernode-2.pub" in restarted.stderr
    (keys / "supernode-2.pub").write_bytes((theirs / "supernode-0.pub").read_bytes())
    restarted = lab.cluster("restart", "supernode-2", "--timeout", "120")
    assert restarted.returncode == 2 and "supernode-2: ended" in restarted.stderr, restarted.stderr
    for said in (restarted.stderr, lab.cluster("logs", "supernode-2").stdout):
        assert "=> refused: its key" in " ".join(said.split()), said

    intruders.end()
    assert lab.cluster("down").returncode == 0


def test_a_registered_key_speaks_for_its_own_client_alone(lab: Lab) -> None:
    """Clients 0 and 2 go while a run goes on, a SuperNode with client 2's registered key comes as client 0, then client 2."""
    fleet, _ = lab.write(tls=True, hosts=[{"host": "local", "supernodes": 3, "gpus": [], "warm": True}])
    assert lab.cluster("keys").returncode == 0
    up = lab.cluster("up", "--timeout", "300")
    assert up.returncode == 0, up.stdout + up.stderr
    config = {"method": "fedcac", "num-server-rounds": 4, "train-samples": 40, "local-epochs": 1}
    config |= {"min-results": 0.1, "state-dir": str(lab.directory / "client-state")}
    # once two are gone the run waits for one of them
    config |= {"min-available-clients": 2, "available-timeout": 300}
    run = BackgroundRun(lab, lab.directory / "r", 3, config, superlink="lab")
    run.wait_for_round(1)
    end_processes([psutil.Process(lab.process(f"supernode-{i}")["pid"]) for i in (0, 2)])
    keys = lab.directory / "lab-keys"
    own = ("--root-certificates", str(keys / "ca.crt"), "--auth-supernode-private-key", str(keys / "supernode-2.key"))
    gone = ("client 0 is gone", "client 2 is gone")
    wait_for(lambda: all(line in run.log for line in gone) or run.process.poll() is not None)
    intruders = Intruders(lab, fleet)
    try:
        intruders.start("as-another", *own, client=0)
        refused = "client 0 cannot take part: its key is that of client 2"
        wait_for(lambda: refused in run.log or run.process.poll() is not None)
    finally:
        intruders.end()
    assert refused in run.log, run.log
    assert lab.cluster("restart", "supernode-2", "--timeout", "120").returncode == 0
    run.finish()
    assert "SuperNode ID" in intruders.log("as-another"), intruders.log("as-another")  # the SuperLink lets it in
    first, *later = rounds(run.folder)
    assert sorted(first["clients"]) == ["0", "1", "2"] and summary(run.folder)["absent"] == [0]
    assert all("0" not in record["clients"] for record in later) and "2" in later[-1]["clients"], run.log
    assert lab.cluster("down").returncode == 0
