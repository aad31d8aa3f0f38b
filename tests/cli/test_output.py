"""A run ends with its summary whatever its output can show, and whether or not anybody reads it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from corolla.api.console import Lenient, LoggedConsole
from tests.conftest import Command

RUN = (
    "--in-process --clients 2 --no-progress --set method=local --set dataset=digits --set num-server-rounds=2 --set local-epochs=1 "
    "--set train-samples=20 --set test-samples=10 --set run-name=here"
)


@pytest.fixture
def corolla(command: Command, tmp_path: Path, data_dir: Path) -> Callable[[], int]:
    """Run RUN in this process. Its standard output may be any other than pytest's."""
    return lambda: command("run", *RUN.split(), "--output-dir", tmp_path, "--set", f"data-dir={data_dir}")[0]


def test_a_run_whose_output_is_closed_ends_with_its_summary(tmp_path: Path, data_dir: Path) -> None:
    words = [sys.executable, "-m", "corolla", "run", *RUN.split(), "--output-dir", str(tmp_path)]
    words += ["--set", f"data-dir={data_dir}"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(words, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert (tmp_path / "here" / "summary.json").is_file()


def test_a_run_whose_output_is_full_ends_with_its_summary(
    corolla: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "wb", buffering=0) as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(full, "utf-8", write_through=True))
        assert corolla() == 0
    assert (tmp_path / "here" / "summary.json").is_file()


def test_a_run_of_an_output_in_ascii_ends_with_its_summary(
    corolla: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    output = io.TextIOWrapper(raw, "ascii", write_through=True)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        assert corolla() == 0
    assert (tmp_path / "here" / "summary.json").is_file()
    assert b"round 2/2: accuracy" in raw.getvalue() and b"+-" in raw.getvalue()


def test_signs_become_ascii_and_others_a_question_mark() -> None:
    raw = io.BytesIO()
    console = LoggedConsole(file=io.TextIOWrapper(raw, "latin-1", write_through=True), width=80)
    console.print("5 ± 1 … Köln 平 → 3")
    assert raw.getvalue().decode("latin-1") == "5 ± 1 ... Köln ? -> 3\n"
    console.file = io.StringIO()
    console.print("±平")
    assert isinstance(console.file, Lenient) and console.file.getvalue() == "±平\n"
