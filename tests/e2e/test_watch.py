"""`corolla watch`: a page in a real browser that grows by a run's rounds."""

from __future__ import annotations

import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.browser import OPTIONS
from tests.e2e.conftest import COROLLA, wait_for
from tests.report.builders import many_runs

# nothing else is reached
HERE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


class Watched:
    """A run whose rounds are recorded one after the other, and its page's server."""

    def __init__(self, directory: Path, options: list[str]) -> None:
        (self.folder,) = many_runs(directory, num_runs=1, num_clients=6, seeds=1)
        self._lines = (self.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        self.record(2)
        command = [COROLLA, "watch", self.folder, *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.url = self.process.stdout.readline().strip()

    def record(self, lines: int) -> None:
        """Write the first lines of its records."""
        (self.folder / "metrics.jsonl").write_text("".join(self._lines[:lines]))

    def is_waited_for(self) -> bool:
        """Whether a page waits for an answer."""
        return any(one.status == psutil.CONN_ESTABLISHED for one in psutil.Process(self.process.pid).net_connections())

    def end(self) -> None:
        """End the server as a run does that started it."""
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.wait(30) == 0


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    found = Watched(tmp_path / "runs", ["--until-input-ends"])
    yield found
    found.process.kill()
    found.process.wait()


def asked(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.e2e
def test_only_who_has_the_address_sees_the_page(watched: Watched) -> None:
    place, token = re.match(r"(http://127\.0\.0\.1:\d+/)(.+)/$", watched.url).groups()  # type: ignore[union-attr]
    assert len(token) >= 32
    assert [asked(place + path) for path in ("", "x/", f"{token[:-1]}/", f"{token}/x", f"{token}/")] == [404] * 4 + [
        200
    ]
    watched.end()


@pytest.mark.e2e
def test_the_page_grows_until_the_run_ends(watched: Watched, browser: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    with page.open("w") as out:
        # its clock stands while it waits for an answer
        opened = subprocess.Popen(
            [browser, *OPTIONS, HERE, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", watched.url],
            stdout=out,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for(watched.is_waited_for, 120)
            watched.record(3)
            watched.end()
            assert opened.wait(120) == 0
        finally:
            opened.kill()
            opened.wait()
    text = page.read_text()
    assert "no longer watched" in text
    row = re.search(r"<td[^>]*>run-00</td>.*?</tr>", text)
    assert row and re.findall(r'data-value="([^"]*)"', row[0])[-3] == "3", "it shows the round that was recorded last"
    assert len(re.findall(r'<figure id="accuracy">', text)) == 1
