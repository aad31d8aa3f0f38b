"""A report that grows with its runs: a page on the loopback address (`corolla watch`)."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from corolla.experiments.runs import find
from corolla.report.arrays import read_runs
from corolla.report.groups import grouped
from corolla.report.page import Page, data_of
from corolla.report.tables import PARTS
from fl_app.privacy.secure_random import secret
from fl_app.server.run_folder import METRICS, SUMMARY

# seconds that a page's question waits for news, and between two looks at the run folders
WAITS, LOOKS = 20.0, 0.5
HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


class LiveReport(ThreadingHTTPServer):
    """The server of the page of some runs. url: its address, with a token that nobody else knows.

    `serve_forever` answers until `stop`. Only this machine's programs reach it, and only with the token.
    """

    daemon_threads = False
    block_on_close = True

    def __init__(self, paths: Sequence[Path], port: int = 0) -> None:
        """Listen. paths: run folders, or folders of run folders. port: 0 for any free one.

        Raises UserError naming every path without a run, OSError if the port is taken.
        """
        self._paths = list(paths)
        self._token = secret().hex()
        self._ending = threading.Event()
        self._making = threading.Lock()
        find(self._paths)
        super().__init__(("127.0.0.1", port), _Answer)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/{self._token}/"

    def stop(self) -> None:
        """Answer the questions that wait, with the last state, and end `serve_forever`. Called from another thread."""
        self._ending.set()
        self.shutdown()

    def state(self) -> str:
        """Return a name of what the runs have recorded until now."""
        sizes = (run.path / name for run in find(self._paths) for name in (METRICS, SUMMARY))
        return "-".join(str(path.stat().st_size if path.exists() else 0) for path in sizes)

    def changed(self, known: str) -> str:
        """Wait until the runs have another state than `known`, and return it; "" if they have none after a while."""
        end = time.monotonic() + WAITS
        while (now := self.state()) == known:
            if self._ending.is_set() or time.monotonic() > end:
                return ""
            self._ending.wait(LOOKS)
        return now

    def content(self, path: str, question: str) -> tuple[int, str, bytes]:
        """Return (status, content type, content) of an address. question: what stands behind its `?`."""
        if path != f"/{self._token}/":
            return 404, "text/plain", b"not here"
        after = parse_qs(question).get("after")
        state = self.changed(after[0]) if after else self.state()
        if not state:
            return (503 if self._ending.is_set() else 204), "text/plain", b""
        # pages that wait for the same state share it
        with self._making:
            return self._made(state, after is not None)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - it lives as long as the process
    def _made(self, state: str, part: bool) -> tuple[int, str, bytes]:
        page = Page(grouped(read_runs(self._paths)))
        if not part:
            return 200, "text/html; charset=utf-8", page.html({}, state).encode()
        told = {"state": state, "title": page.title, "main": PARTS.main(page, {})}
        return 200, "application/json", json.dumps({**told, "pictures": json.loads(data_of(page.panels))}).encode()


class _Answer(BaseHTTPRequestHandler):
    server: LiveReport

    def do_GET(self) -> None:  # noqa: N802 - the library's name
        """Answer with the page, or with what changed."""
        asked = urlsplit(self.path)
        status, kind, content = self.server.content(asked.path, asked.query)
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(content)), **HEADERS}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""
