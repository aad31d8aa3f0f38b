"""`corolla watch`."""

from __future__ import annotations

import contextlib
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from corolla.api.console import console, errors
from corolla.api.waiting import waiting
from fl_app import extras
from fl_app.errors import UserError


def watch(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of run folders.")],
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the loopback address; 0: any free one.")] = 0,
    until_input_ends: Annotated[bool, typer.Option("--until-input-ends", hidden=True)] = False,
) -> None:
    """Serve the report of runs as a page that grows by their rounds. Only this machine reaches it. Ctrl-C ends it."""
    extras.require_pictures("corolla watch")
    with waiting(errors) as shown:
        shown.step("reading the runs", brief=True)
        # imported here because altair takes a second
        from corolla.report.live_report import LiveReport

        try:
            server = LiveReport(runs, port)
        except OSError as error:
            raise UserError(key="--port", rule=f"must be free, {port} is not: {error.strerror}") from None
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        console.print(server.url, soft_wrap=True)
        if open_:
            webbrowser.open(server.url)
        with contextlib.suppress(KeyboardInterrupt):
            if until_input_ends:
                sys.stdin.read()
            else:
                serving.join()
    finally:
        server.stop()
        server.server_close()
