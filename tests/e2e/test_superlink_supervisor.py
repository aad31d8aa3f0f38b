"""A simulation's SuperLink lives no longer than its launcher, whoever of launcher and supervisor is killed (no run, so no Ray)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fl_app.processes import processes_with
from tests.e2e.conftest import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

LAUNCHER = """
import sys
from corolla.experiments.launch import SimulationSuperLink
with SimulationSuperLink() as superlink:
    print(superlink.home, superlink._supervisor.pid, flush=True)
    sys.stdin.read()
"""


def supervisors(home: str) -> list[int]:
    """Pids of the supervisor and of its standby."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if {"corolla.experiments.superlink_supervisor", home} <= set(process.cmdline()):
                found.append(process.pid)
    return found


@pytest.mark.parametrize(
    "killed", [(), ("launcher",), ("supervisor",), ("launcher", "supervisor"), ("launcher", "standby")]
)
def test_nothing_is_left(killed: tuple[str, ...]) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None and launcher.stdin is not None
    home, supervisor = launcher.stdout.readline().split()
    mark = f"COROLLA_LAUNCH={home}"
    assert len(processes_with(mark)) >= 2 and Path(home).is_dir()
    (standby,) = set(supervisors(home)) - {int(supervisor)}
    pids = {"supervisor": int(supervisor), "standby": standby, "launcher": launcher.pid}
    # the launcher last: whoever else is killed has not seen it end
    for name in sorted(killed):
        os.kill(pids[name], signal.SIGKILL)
    if "launcher" not in killed:
        # a supervisor alone may be killed: the launcher goes on, and cleans up itself
        assert processes_with(mark)
        launcher.stdin.close()
    launcher.wait(120)
    wait_for(
        lambda: not processes_with(mark) and not Path(home).exists() and not supervisors(home), seconds=60, every=0.1
    )
