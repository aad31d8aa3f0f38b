"""The live panel on a real terminal (a pty): it moves while the run goes on, and leaves the terminal as it was."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.e2e.conftest import COROLLA, Cluster, settings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

HIDE, SHOW, OTHER_SCREEN = "\x1b[?25l", "\x1b[?25h", "\x1b[?1049h"


Typing = tuple[Callable[[str], bool], str]
CTRL_C = "\x03"


def on_a_terminal(
    words: list[str], environment: dict[str, str], typing: Sequence[Typing] = (), directory: Path | None = None
) -> tuple[int, str]:
    """Run `corolla` in a terminal of 100 x 30; exit code and everything written.

    typing: what is typed, each once its condition holds for what was written since the one before.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    before = termios.tcgetattr(slave)

    def log_in() -> None:
        # a test run in the background ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [COROLLA, *words],
        cwd=directory,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**environment, "TERM": "xterm-256color"},
        start_new_session=True,
        preexec_fn=log_in,
    )
    text, since, todo, deadline = "", 0, list(typing), time.monotonic() + 240
    key, typed = "", 0.0
    try:
        while time.monotonic() < deadline:
            if select.select([master], [], [], 0.1)[0]:
                text += os.read(master, 1 << 16).decode(errors="replace")
            elif process.poll() is not None:
                break
            if todo and todo[0][0](text[since:]):
                since, key, typed = len(text), todo.pop(0)[1], time.monotonic()
                os.write(master, key.encode())
            elif key == CTRL_C and len(text) == since and time.monotonic() - typed > 10:
                # one that comes just before Python waits for a line has no effect until the next key
                typed = time.monotonic()
                os.write(master, key.encode())
        assert process.poll() is not None, f"it did not end\n{text[-2000:]}"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert termios.tcgetattr(slave) == before
    os.close(master)
    os.close(slave)
    return process.returncode, text


def few_rounds(tmp_path: Path, **changes: object) -> list[str]:
    values = {
        "num-server-rounds": 3,
        "train-samples": 30,
        "test-samples": 10,
        "local-epochs": 2,
        "fedcac.beta": 2,
        "run-name": "live",
        "output-dir": str(tmp_path / "runs"),
        "state-dir": str(tmp_path / "state"),
    }
    return settings(values | changes)


def assert_a_live_run(code: int, text: str, rounds: int, clients: int) -> None:
    assert code == 0, text[-3000:]
    assert text.count(HIDE) == text.count(SHOW) > 0 and OTHER_SCREEN not in text
    panel, _, after = text.rpartition(SHOW)
    assert f"/{clients} replies" in panel and f"{rounds}/{rounds} done" in panel and "±" in panel
    assert "round 1/3: accuracy" not in text, "a plain line beside the panel"
    assert "final" in after and "live" in after and "╭─ fedcac" not in after


def test_the_panel_in_this_process(tmp_path: Path) -> None:
    words = ["run", "--in-process", "--clients", "4", *few_rounds(tmp_path, **{"local-epochs": 100})]
    assert_a_live_run(*on_a_terminal(words, dict(os.environ)), rounds=3, clients=4)


@pytest.mark.nightly
def test_the_panel_of_a_simulation(tmp_path: Path) -> None:
    words = ["run", "--clients", "4", *few_rounds(tmp_path, **{"local-epochs": 200})]
    assert_a_live_run(*on_a_terminal(words, dict(os.environ)), rounds=3, clients=4)


@pytest.mark.nightly
def test_the_panel_of_a_deployment(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start_superlink()
    for client_id in range(2):
        cluster.start_supernode(client_id, 2)
    words = ["run", "--superlink", "test", "--clients", "2", *few_rounds(tmp_path)]
    assert_a_live_run(*on_a_terminal(words, cluster.environment), rounds=3, clients=2)


def test_ctrl_c_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    words = ["run", "--in-process", "--clients", "4", *few_rounds(tmp_path, **{"num-server-rounds": 5000})]
    # a fast machine shows few of the numbers
    some = re.compile(r"[1-9]\d*/5000 done")
    code, text = on_a_terminal(words, dict(os.environ), [(lambda text: bool(some.search(text)), CTRL_C)])
    assert code == 130 and "Traceback" not in text
    assert text.count(HIDE) == text.count(SHOW) > 0
    after = text.rpartition(SHOW)[2]
    assert f"corolla run --in-process --resume {tmp_path / 'runs' / 'live'}" in after.replace("\r\n", "")


def test_a_run_that_fails_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    words = ["run", "--in-process", "--clients", "4", *few_rounds(tmp_path, **{"learning-rate": 1e38})]
    code, text = on_a_terminal(words, dict(os.environ))
    assert code == 1 and "diverged" in text and "Traceback" not in text
    assert text.count(HIDE) == text.count(SHOW) > 0 and text.rindex(SHOW) < text.index("error:")


# A debugger

STOPPING = """
from corolla.method import FedAvg, LocalUpdate, Method, NoParams, all_tensors


class Client(LocalUpdate):
    def train(self, start, state, ctx):
        here = f"round {ctx.round} of client {ctx.client_id}"
        if ctx.client_id == 1:
            STOP
        return ctx.trainer.train(start)


METHOD = Method("mine", NoParams, FedAvg, Client, all_tensors)
"""
PROMPT = "(Pdb) "


def debugged(tmp_path: Path, keys: Sequence[tuple[str, str]], stop: str = "breakpoint()") -> tuple[int, str]:
    """Run two rounds of a method with a breakpoint; keys: what is typed, each once a text is there."""
    (tmp_path / "mine.py").write_text(STOPPING.replace("STOP", stop))
    words = ["run", "--in-process", "--clients", "3", *few_rounds(tmp_path, method="mine:METHOD")]
    typing = [(lambda text, wanted=wanted: wanted in text, key) for wanted, key in keys]
    return on_a_terminal(words, dict(os.environ), typing, tmp_path)  # type: ignore[arg-type]


def test_a_debugger_has_the_terminal_to_itself(tmp_path: Path) -> None:
    keys = [(PROMPT, "p here\n"), (PROMPT, "p 6 * 7\n"), *[(PROMPT, "c\n")] * 3]
    code, text = debugged(tmp_path, keys)
    assert code == 0 and "3/3 done" in text and text.count(HIDE) == text.count(SHOW), text[-3000:]
    stops = [part for part in text.split(HIDE) if PROMPT in part]
    assert len(stops) == 3
    for number, stop in enumerate(stops, 1):
        _, _, debugger = stop.rpartition(SHOW)
        # the panel is neither repainted nor moved while somebody types
        assert "mine.py(" in debugger and "rounds" not in debugger and "replies" not in debugger
        assert f"round {number} of client 1" in debugger or number > 1
    assert "'round 1 of client 1'" in stops[0] and "42" in stops[0]


@pytest.mark.parametrize(
    ("stop", "keys"),
    [
        pytest.param("import pdb; pdb.set_trace()", [(PROMPT, "q\n")], id="quit"),
        pytest.param("breakpoint()", [(PROMPT, "\x04")], id="end of input"),
        pytest.param("breakpoint()", [(PROMPT, CTRL_C), ("press Ctrl-C again", CTRL_C)], id="at the prompt"),
    ],
)
def test_who_leaves_a_debugger_ends_the_run(tmp_path: Path, stop: str, keys: list[tuple[str, str]]) -> None:
    code, text = debugged(tmp_path, keys, stop)
    assert code == 130 and "dropped" not in text and "BdbQuit" not in text and "Traceback" not in text, text[-3000:]
    assert text.count(PROMPT) == 1
    assert f"corolla run --in-process --resume {tmp_path / 'runs' / 'live'}" in text.replace("\r\n", "")


def test_two_ctrl_c_after_continue_end_the_run(tmp_path: Path) -> None:
    stop = "breakpoint()\n            while True: pass"
    keys = [(PROMPT, "c\n"), ("replies", CTRL_C), ("press Ctrl-C again", CTRL_C)]
    code, text = debugged(tmp_path, keys, stop)
    assert code == 130 and text.count(PROMPT) == 1 and "Program interrupted" not in text, text[-3000:]


def test_no_progress_shows_lines_alone(tmp_path: Path) -> None:
    words = ["run", "--in-process", "--no-progress", "--clients", "3", *few_rounds(tmp_path)]
    code, text = on_a_terminal(words, dict(os.environ))
    assert code == 0 and HIDE not in text and "\x1b[1A" not in text
    assert "round 1/3: accuracy" in text and "round 3/3: accuracy" in text
