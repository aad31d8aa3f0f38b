"""The figures of docs/architecture.md are those of a round, and the counts that they are made of."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest

from benchmarks import round_trace, size
from benchmarks.round_trace import Call, Counts

PAGE = (round_trace.ROOT / "docs" / "architecture.md").read_text("utf-8")
TOLERANCE = 0.05


@pytest.fixture(params=round_trace.METHODS)
def measured(request: pytest.FixtureRequest) -> tuple[str, dict[str, Counts], set[str]]:
    """A method, its numbers, and the files of its round's server part."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        calls, counts = round_trace.measured(request.param)
    finally:
        logging.disable(before)
    return request.param, counts, {call.file for call in round_trace.without_clients(calls)}


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="versions of Python differ in their calls")
def test_the_figures_of_the_page_are_those_of_a_round(measured: tuple[str, dict[str, Counts], set[str]]) -> None:
    method, counts, server_files = measured
    assert not [file for file in server_files if file.startswith("client_app/")]
    found = {part: tuple(numbers) for part, numbers in counts.items()}
    rows = re.findall(rf"^\| {method} \| (\w+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    printed = {part: tuple(map(int, numbers)) for part, *numbers in rows}
    assert printed.keys() == found.keys()
    for part, numbers in found.items():
        assert printed[part] == pytest.approx(numbers, rel=TOLERANCE, abs=2), part
    assert counts["server"].changes < counts["round"].changes < counts["run"].changes


def test_counts_by_hand() -> None:
    server, client = "fl_app/transport/wire.py", "client_app/client.py"
    calls = [Call(server, "a", False), Call(client, "b", True), Call(client, "c", True), Call(server, "a", False)]
    assert round_trace.counted(calls)[:3] == (2, 3, 2)
    assert round_trace.counted(round_trace.without_clients(calls))[:3] == (1, 1, 0)
    sees = ("def f(config): ...", "config.x", "self.config.x", "f(config=1)", "config = 1")
    assert all(map(round_trace.sees_config, sees))
    assert not any(map(round_trace.sees_config, ("from fl_app.config import parse", "'config'", "configs = 1")))


def test_sizes_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "def f(x):\n    return [y for y in x] if (z := x) else 1; pass\n"
    assert size.size_of(text) == (1, 2, 3, 1, 3)
    assert size.size_of(text).density == 1000
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(text)
    size.main([str(tmp_path), "--files"])
    *files, whole = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[:4] for line in files] == [["1", "2", "3", "1"]] * 2
    assert whole.split() == ["2", "4", "6", "2", "1000.0", "all"]
