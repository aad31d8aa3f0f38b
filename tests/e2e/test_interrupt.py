"""A run that is told to end, or is killed, leaves nothing running and no temporary home."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from client_app.client_app import RAY
from tests.e2e.conftest import COROLLA, runs, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def launched(directory: Path) -> list[psutil.Process]:
    """Processes whose COROLLA_LAUNCH lies under a directory."""
    found = psutil.process_iter(["environ", "name", "nice"])
    return [
        process
        for process in found
        if (process.info["environ"] or {}).get("COROLLA_LAUNCH", "").startswith(str(directory))
    ]


def supervisors(directory: Path) -> list[psutil.Process]:
    """The supervisor of a launch, then its standby."""
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        if "corolla.experiments.superlink_supervisor" in line and any(word.startswith(str(directory)) for word in line):
            found.append(process)
    return sorted(found, key=lambda process: len(process.cmdline()))


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)]
)
def test_a_stopped_pool_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    with started(tmp_path, "pool") as process:
        below = psutil.Process(process.pid).children(recursive=True)
        # the warm process and its workers
        assert len(below) == 1 + min(2, os.cpu_count() or 1)
        process.send_signal(number)
        _, err = process.communicate(timeout=90)
    assert process.returncode != 0
    if number == signal.SIGINT:
        assert "stopping after" in err and "stopped after round" in err and "run --backend pool --re" in err
    wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in below), seconds=20)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.nightly) for n in (signal.SIGTERM, signal.SIGKILL))]
)
def test_a_stopped_simulation_leaves_nothing(number: signal.Signals) -> None:
    # Ray's sockets need a short path
    with tempfile.TemporaryDirectory(prefix="c", dir="/tmp") as short:
        with started(Path(short)) as process:
            process.send_signal(number)
            out, err = process.communicate(timeout=90)
        assert process.returncode != 0
        # it finishes its round first
        if number == signal.SIGINT:
            assert "press Ctrl-C again" in err and "stopped after round" in err
            assert len([line for line in out.splitlines() if line.startswith("round ")]) < 11
        look(Path(short), seconds=60 if number == signal.SIGKILL else 0)


@pytest.mark.nightly
def test_a_simulation_whose_launcher_and_supervisor_are_killed_leaves_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="c", dir="/tmp") as short:
        with started(Path(short)) as process:
            supervisors(Path(short))[0].kill()
            process.kill()
            process.communicate(timeout=90)
        look(Path(short), seconds=60)


@pytest.mark.faults
@pytest.mark.nightly
def test_a_superlink_that_dies_is_one_sentence_and_the_way_on() -> None:
    with tempfile.TemporaryDirectory(prefix="c", dir="/tmp") as short:
        with started(Path(short)) as process:
            for child in psutil.Process(process.pid).children(recursive=True):
                if runs(child, "flower-superlink"):
                    child.kill()
            _, err = process.communicate(timeout=150)
        said = " ".join(err.split())
        assert process.returncode == 1 and "continue with:" in said
        assert "--resume" in said and "{" not in said
        look(Path(short), seconds=60)


@contextlib.contextmanager
def started(tmp_path: Path, backend: str = "ray") -> Iterator[subprocess.Popen[str]]:
    """A simulation whose second round is done; if the block fails it is ended, and what it said is shown."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    for name in RAY:
        # this process has imported the ClientApp, which sets them
        environment.pop(name, None)
    words = [
        COROLLA,
        "run",
        "--clients",
        "2",
        "--backend",
        backend,
        "--set",
        "num-server-rounds=5000",
        "--set",
        f"output-dir={tmp_path / 'runs'}",
    ]
    process = subprocess.Popen(
        words,
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a test run in the background ignores it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print(line, end="")
            if line.startswith("round 2/"):
                break
        running = [process.info for process in launched(tmp_path)]
        if backend == "ray":
            assert any(info["name"].startswith("ray::") for info in running)
            assert {info["nice"] for info in running} == {psutil.Process().nice()}
            assert len(supervisors(tmp_path)) == 2
        else:
            assert running == supervisors(tmp_path) == []
        yield process
    except BaseException:
        process.kill()
        print(*process.communicate())
        raise


def look(tmp_path: Path, seconds: float) -> None:
    """Nothing is left, or it ends by itself in time."""
    if seconds:
        wait_for(lambda: not launched(tmp_path) and not list(tmp_path.glob("corolla-*")), seconds)
        wait_for(lambda: not supervisors(tmp_path), seconds=10)
    assert launched(tmp_path) == supervisors(tmp_path) == []
    assert list(tmp_path.glob("corolla-*")) == list(tmp_path.glob("tmp*.toml")) == []
