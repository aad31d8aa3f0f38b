"""Who is still there, with real, small processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from fl_app.processes import (
    LAUNCHER,
    end_processes,
    flower_environment,
    free_ports,
    identity,
    is_alive,
    orphans,
    processes_with,
)


def sleeper(**environment: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["sleep", "60"], env=os.environ | environment)
    # its environment is its own only after exec
    time.sleep(0.05)
    return process


def test_a_process_is_known_until_it_ends() -> None:
    with sleeper() as process:
        who = identity(process.pid)
        assert is_alive(who) and is_alive(identity(os.getpid()))
        # the mark of another, as a recycled pid would have
        assert not is_alive(f"{os.getpid()}:{who.partition(':')[2]}")
        process.send_signal(signal.SIGKILL)
        while is_alive(who):  # a zombie, too, is gone
            time.sleep(0.01)
    assert not is_alive(who) and not is_alive("") and not is_alive("x:y") and not is_alive(f"{process.pid}:None")


def test_what_a_killed_launcher_left_is_found_and_nothing_else() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with sleeper(**{LAUNCHER: identity(launcher.pid)}) as left, sleeper(**{LAUNCHER: identity(os.getpid())}) as ours:
        assert left.pid not in [p.pid for p in orphans()]
        launcher.kill()
        launcher.communicate()
        found = [p for p in orphans() if p.pid in (left.pid, ours.pid)]
        assert [p.pid for p in found] == [left.pid]
        end_processes(found)
        assert left.poll() is not None and ours.poll() is None
        ours.kill()


def test_processes_are_found_by_their_environment() -> None:
    with sleeper(COROLLA_TEST="a=b") as mine, sleeper(COROLLA_TEST="a") as other:
        assert [p.pid for p in processes_with("COROLLA_TEST=a=b")] == [mine.pid]
        mine.kill()
        other.kill()


def test_free_ports_are_distinct() -> None:
    assert len(set(free_ports(20))) == 20


def test_flowers_processes_keep_what_they_have_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in flower_environment()
