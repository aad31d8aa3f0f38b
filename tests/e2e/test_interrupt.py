"""A run that is told to end, or is killed, leaves nothing running and no temporary home."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import COROLLA, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


def launched(directory: Path) -> list[psutil.Process]:
    """Processes whose COROLLA_LAUNCH lies under a directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("COROLLA_LAUNCH", "").startswith(str(directory)):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_stopped_simulation_leaves_nothing(number: signal.Signals) -> None:
    with tempfile.TemporaryDirectory(prefix="c") as short:  # Ray's sockets need a short path
        stop_and_look(Path(short), number)


def stop_and_look(tmp_path: Path, number: signal.Signals) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    words = [COROLLA, "run", "--clients", "2", "--set", "num-server-rounds=5000", "--set", f"output-dir={tmp_path / 'runs'}"]
    process = subprocess.Popen(
        words, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run in the background ignores it
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("round 2/"):
            break
    assert launched(tmp_path)
    process.send_signal(number)
    process.communicate(timeout=90)
    assert process.returncode != 0
    if number == signal.SIGKILL:  # what is left ends by itself
        wait_for(lambda: not launched(tmp_path) and not list(tmp_path.glob("corolla-flwr-*")), seconds=60)
    assert launched(tmp_path) == []
    assert list(tmp_path.glob("corolla-flwr-*")) == []
