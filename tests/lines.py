"""A line per test file instead of dots, as soon as all of its tests are done, whoever ran them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest


class FileLines:
    """Pytest's terminal output with -q."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._left: Counter[str] = Counter()
        self._outcomes: dict[str, Counter[str]] = {}
        self._seconds: dict[str, float] = defaultdict(float)
        self._failed: set[str] = set()
        self._total = self._done = 0

    def pytest_sessionstart(self) -> None:
        self._write("collecting tests")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._expect(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Iterable[str]) -> None:
        # every worker collects the same
        if not self._total:
            self._expect(ids)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        if report.when == "call" and report.passed and not hasattr(report, "wasxfail"):
            return "passed", "", ""  # no dot
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._seconds[file] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self._outcomes.setdefault(file, Counter())[report.outcome] += 1
        if report.when == "teardown":
            self._done += 1
            self._left[file] -= 1
            if not self._left[file]:
                told = ", ".join(f"{count} {outcome}" for outcome, count in self._outcomes.get(file, Counter()).items())
                part = 100 * self._done // max(self._total, 1)
                self._write(f"{part:3}%  {file}: {told} ({self._seconds[file]:.1f} s)")

    def _expect(self, ids: Iterable[str]) -> None:
        self._left = Counter(name.partition("::")[0] for name in ids)
        self._total = self._left.total()

    def _write(self, line: str) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(line)
