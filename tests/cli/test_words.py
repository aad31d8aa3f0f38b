"""What the command says so that nobody is misled: what figures are of, and what was probably meant."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from corolla.cli.tables import fitting
from fl_app.server.run_folder import read_about
from strategies.base import OWN_MODEL
from tests.conftest import Command


def test_a_method_with_a_second_model_says_which_one_is_tested(corolla: Command) -> None:
    sets = ["--set", "num-server-rounds=1", "--set", "local-epochs=1", "--set", "train-samples=20"]
    # at the start, and below the table
    for method, count in (("ditto", 2), ("fedavg", 0)):
        code, out, err = corolla(
            "run", "--in-process", *sets, "--set", f"method={method}", "--set", f"run-name={method}"
        )
        assert code == 0, err
        assert " ".join(out.split()).count(f"{method}: {OWN_MODEL}") == count
        assert read_about(Path("runs", method))["tested"] == (OWN_MODEL if count else "")


def test_a_narrow_terminal_has_fewer_columns_of_results_and_none_that_is_cut() -> None:
    lines = [
        ["method", "final", "pooled", "best", "upload", "download", "seconds"],
        ["fedcac", "100.00 %", "98.25 %", "91.67 %", "11.4 MB", "11 MB", "24.4"],
    ]
    assert fitting(lines, 0) == fitting(lines, 72) == lines
    assert fitting(lines, 71)[0] == ["method", "final", "best", "upload", "download", "seconds"]
    assert fitting(lines, 60)[1] == ["fedcac", "100.00 %", "91.67 %", "11.4 MB", "24.4"]
    assert fitting(lines, 20)[0] == ["method", "final", "seconds"]


ENDING = """
import atexit, threading
from corolla import cli

class Kept:
    def __del__(self):
        print("taken apart")

def late():
    threading.main_thread().join()
    print("thread")

cli.kept = Kept()
atexit.register(print, "atexit")
threading.Thread(target=late).start()
cli.{}()
"""


@pytest.mark.parametrize(("words", "code"), [(["methods", "fedcac"], 0), (["run", "--set", "seed"], 2)])
def test_it_ends_as_python_does_but_takes_nothing_apart(words: list[str], code: int) -> None:
    """Which of torch takes seconds on a busy machine."""
    done = {
        name: subprocess.run([sys.executable, "-c", ENDING.format(name), *words], capture_output=True, text=True)
        for name in ("main", "command")
    }
    assert done["main"].returncode == done["command"].returncode == code
    assert done["main"].stderr == done["command"].stderr and ("expected KEY=VALUE" in done["main"].stderr) == (
        code == 2
    )
    assert done["command"].stdout.splitlines()[-2:] == ["thread", "atexit"]
    assert done["main"].stdout == done["command"].stdout + "taken apart\n"


def test_it_ends_where_nobody_reads_its_words() -> None:
    command = subprocess.Popen(
        [sys.executable, "-m", "corolla", "methods", "--table"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stdout and command.stderr
    command.stdout.close()
    said = command.stderr.read()
    assert command.wait() != 0 and "Traceback" not in said
