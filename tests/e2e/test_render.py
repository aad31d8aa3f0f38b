"""What `corolla cluster commands` prints, run by a shell, and by a stand-in for Slurm: a run as in one process."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from deploy.health import answers
from fl_app.processes import end_processes
from fl_app.server import checkpoint
from tests import slurm
from tests.e2e.conftest import Lab, corolla, settings, summary, wait_for

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

CONFIG = {"method": "fedcac", "num-server-rounds": 3, "train-samples": 40, "checkpoint-every": 1, "device": "cpu"}


def words(lab: Lab, name: str) -> list[str]:
    return [
        "--output-dir",
        str(lab.directory),
        *settings({**CONFIG, "run-name": name, "state-dir": str(lab.directory / f"state-{name}")}),
    ]


def digest_in_process(lab: Lab) -> str:
    done = corolla("run", "--in-process", "--clients", "2", *words(lab, "plain"), environment=lab.environment)
    assert done.returncode == 0, done.stderr
    return str(summary(lab.directory / "plain")["digest"])


def test_printed_commands_make_a_cluster(lab: Lab) -> None:
    _, control = lab.write(tls=True, hosts=[{"host": "local", "supernodes": 2, "gpus": []}])
    assert lab.cluster("keys").returncode == 0
    printed = lab.cluster("commands")
    assert printed.returncode == 0, printed.stderr
    start, rest = printed.stdout.split("# here, once the SuperLink answers\n")
    log = lab.directory / "shell.log"

    def shell(text: str) -> int:
        with log.open("a") as out:
            done = subprocess.run(["bash", "-e"], input=text, text=True, stdout=out, stderr=out, env=lab.environment)
        return done.returncode

    assert shell(start) == 0, log.read_text()
    ca = str(lab.directory / "lab-keys" / "ca.crt")
    wait_for(lambda: answers(f"https://127.0.0.1:{control}/health", ca))
    assert shell(f"{rest.rstrip()} {shlex.join(words(lab, 'deployed'))}") == 0, log.read_text()
    assert summary(lab.directory / "deployed")["digest"] == digest_in_process(lab)
    end_processes(lab.started())


def test_a_job_runs_is_cut_off_and_goes_on(lab: Lab) -> None:
    lab.write(tls=True, hosts=[{"host": "local", "supernodes": 2, "gpus": []}])
    printed = lab.cluster("commands", "--slurm")
    assert printed.returncode == 0, printed.stderr
    script = lab.directory / "lab.sh"
    script.write_text(printed.stdout)
    assert slurm.options(script)["--ntasks"] == "2"

    def submit(job: int, *arguments: str) -> subprocess.Popen[str]:
        return slurm.sbatch(script, *arguments, directory=lab.directory, environment=lab.environment, job=job)

    first, folder = submit(1, *words(lab, "job")), lab.directory / "job"
    wait_for(lambda: max(checkpoint.rounds(folder), default=0) >= 1 or first.poll() is not None)
    # as Slurm before a job's time is over
    first.send_signal(signal.SIGTERM)
    out = first.communicate(timeout=120)[0]
    assert first.returncode == 143 and not (folder / "summary.json").exists(), out
    assert lab.started() == []

    second = submit(2, "--resume", str(folder))
    out = second.communicate(timeout=300)[0]
    assert second.returncode == 0, out
    assert re.search(r"resumed after round [12]", out), out
    assert summary(folder)["digest"] == digest_in_process(lab)
    assert lab.started() == []
    left = {path.name for path in (lab.directory / "corolla-lab-2").iterdir()}
    assert {"superlink.log", "supernode-0.log", "supernode-1.log"} <= left and not {"keys", "flwr"} & left
    assert not Path(lab.directory / "corolla-lab-1" / "keys").exists()
