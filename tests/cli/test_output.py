"""A run ends with its summary whatever its output can show, and whether or not anybody reads it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from corolla.api.log_file import LoggedConsole
from corolla.api.output import Lenient

RUN = (
    "--in-process --clients 2 --no-progress --set method=local --set dataset=digits --set num-server-rounds=2 --set local-epochs=1 "
    "--set train-samples=20 --set test-samples=10 --set run-name=here"
)


@pytest.mark.parametrize("output", ["ascii", "full", "closed"])
def test_no_run_ends_because_a_line_cannot_be_printed(tmp_path: Path, output: str) -> None:
    command = [sys.executable, "-m", "corolla", "run", *RUN.split(), "--output-dir", str(tmp_path)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii" if output == "ascii" else "utf-8"}
    reading, writing = os.pipe()
    os.close(reading)
    places = {"ascii": subprocess.PIPE, "full": os.open("/dev/full", os.O_WRONLY), "closed": writing}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, stdout=places[output], stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert (tmp_path / "here" / "summary.json").is_file()
    if output == "ascii":
        assert "round 2/2: accuracy" in done.stdout and "+-" in done.stdout


def test_signs_become_ascii_and_others_a_question_mark() -> None:
    raw = io.BytesIO()
    console = LoggedConsole(file=io.TextIOWrapper(raw, "latin-1", write_through=True), width=80)
    console.print("5 ± 1 … Köln 平 → 3")
    assert raw.getvalue().decode("latin-1") == "5 ± 1 ... Köln ? -> 3\n"
    console.file = io.StringIO()
    console.print("±平")
    assert isinstance(console.file, Lenient) and console.file.getvalue() == "±平\n"
