"""The `corolla` command."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading

import typer
from rich.markup import escape

import deploy.cli
import deploy.node_cli
from corolla.api.console import errors
from corolla.api.settings import look_for_plugins
from corolla.cli import listings, products, results, runs, sweeps, verify
from fl_app.errors import RunFailed, UserError

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)
app.callback()(listings.about)
app.command("run")(runs.run)
app.command("demo")(runs.demo)
app.command("sweep")(sweeps.sweep)
app.command("compare")(results.compare)
app.command("report")(results.report)
app.command("export")(products.export)
app.command("verify")(products.verify)
app.command("predict")(products.predict)
app.command("runs")(results.runs)
app.command("presets")(listings.presets)
app.command("methods")(listings.methods)
listings.data_app.command("verify")(verify.data_verify)
app.add_typer(listings.data_app, name="data")
app.add_typer(listings.state_app, name="state")
app.add_typer(deploy.cli.app, name="cluster")
app.add_typer(deploy.node_cli.app, name="node")
app.command("reference", hidden=True)(listings.reference)


def main() -> None:
    """Run the command; bad input ends with a message and exit code 2, a failed run with 1."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            # end what we started, as Ctrl-C does
            signal.signal(number, _interrupt)
    look_for_plugins()
    try:
        app(prog_name="corolla")
    except (UserError, RunFailed) as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise SystemExit(1 if isinstance(error, RunFailed) else 2) from None


def command() -> None:
    """Run the command and end the process: `main`, then all that Python does at its end but for taking torch apart.

    That is a search for cycles among all of its objects, which nobody needs and which takes seconds on a busy machine.
    """
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, int) and sys.gettrace() is None and sys.getprofile() is None:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as multiprocessing does at its processes' end
            atexit._run_exitfuncs()
            # who read the output may be gone, or never was there
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(end.code)
        raise


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
