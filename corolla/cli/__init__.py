"""The `corolla` command."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import click
import typer
from rich.markup import escape
from typer.main import get_command

import deploy.cli
import deploy.node_cli
from corolla.api import console as consoles
from corolla.api.console import HANDLER, errors
from corolla.api.settings import look_for_plugins
from corolla.cli import completion, flower_app, listings, products, results, run, sweeps
from fl_app import debugging, exit_codes, log_format
from fl_app.errors import MethodFault, RoundFailed, RunFailed, UserError

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)
app.callback()(listings.about)
# headings of `corolla -h`
RUN, LOOK, DATA, DEPLOY = "Run", "Look", "Data and state", "Deploy"


def add(name: str, function: Callable[..., Any], heading: str, example: str) -> None:
    """Add a command, with an example of its arguments, under a heading."""
    app.command(name, rich_help_panel=heading, epilog=f"Example: corolla {name} {example}")(function)


add("run", run.run, RUN, "--set method=fedcac --set fedcac.beta=5 --clients 10")
add("demo", run.demo, RUN, "--output-dir demo")
add("sweep", sweeps.sweep, RUN, "digits --output-dir sweep")
app.add_typer(flower_app.app, name="flower", rich_help_panel=RUN)
add("compare", results.compare, LOOK, "runs/mine runs/base --to 80")
add("report", results.report, LOOK, "runs/mine runs/base --output report")
add("watch", results.watch, LOOK, "runs/mine --open")
add("export", products.export, LOOK, "runs/mine --client 3 --onnx")
add("verify", products.verify, LOOK, "mine-client-3.onnx")
add("predict", products.predict, LOOK, "mine-client-3.onnx rows.csv")
add("runs", results.runs, LOOK, "runs")
add("summary", results.summary, LOOK, "runs/mine --json")
add("presets", listings.presets, RUN, "'fedobp/fashion-mnist*'")
add("methods", listings.methods, RUN, "fedcac")
app.add_typer(listings.data_app, name="data", rich_help_panel=DATA)
app.add_typer(listings.state_app, name="state", rich_help_panel=DATA)
app.add_typer(deploy.cli.app, name="cluster", rich_help_panel=DEPLOY)
deploy.node_cli.app.command("export", epilog="Example: corolla node export --to models")(products.node_export)
app.add_typer(deploy.node_cli.app, name="node", rich_help_panel=DEPLOY)
app.add_typer(results.audit_app, name="audit", rich_help_panel=DEPLOY)
app.command("reference", hidden=True)(listings.reference)


def build_command() -> click.Command:
    """Return the command with all its subcommands. Its help prints texts as they are written, including [brackets]."""
    found = get_command(app)
    _mend_refusals(found)
    _escape(found)
    return found


def _mend_refusals(command: Any) -> None:
    """Let a command and its subcommands suggest another command's name only once."""
    if hasattr(click.exceptions, "NoSuchCommand"):
        # from 8.4 on click suggests it too
        command.suggest_commands = False
    for below in getattr(command, "commands", {}).values():
        _mend_refusals(below)


def _escape(command: Any) -> None:
    """Escape Rich's markup in the help of a command, its options and its subcommands."""
    for shown in (command, *command.params):
        for field in ("help", "short_help", "epilog"):
            if text := getattr(shown, field, None):
                setattr(shown, field, escape(text))
    for below in getattr(command, "commands", {}).values():
        _escape(below)


def main() -> None:
    """Run the command.

    Invalid input ends with a message and exit code 2; a failed run or an error in the user's own code with 1.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        # nohup ignores SIGHUP
        if signal.getsignal(number) is not signal.SIG_IGN:
            # end all processes that the command started, as Ctrl-C does
            signal.signal(number, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=HANDLER)
    look_for_plugins()
    consoles.console.quiet = consoles.events = consoles.opens = False
    consoles.begin_warnings()
    consoles.open_log(None)
    completion.join_words()
    try:
        build_command()(prog_name="corolla")
    except Exception as error:
        ours = isinstance(error, (UserError, RunFailed))
        if not ours and not debugging.place_of(error):
            raise
        if not ours or consoles.verbose:
            errors.print(escape(debugging.trace_of(error)), soft_wrap=True)
        if log_format.is_json():
            typer.echo(log_format.now("launcher", "error", debugging.reason(error)), err=True)
        else:
            errors.print(f"[bold red]error:[/] {escape(debugging.reason(error))}", soft_wrap=True)
        bad_input = isinstance(error, UserError) and not isinstance(error, (RoundFailed, MethodFault))
        raise SystemExit(exit_codes.BAD_INPUT if bad_input else exit_codes.FAILED) from None


def command() -> None:
    """Run the command and end the process: `main`, then the steps of Python's exit, except taking torch apart.

    That step searches all of torch's objects for cycles, which takes seconds on a busy machine and has no use.
    """
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, int) and sys.gettrace() is None and sys.getprofile() is None:
            # wait for threads, as multiprocessing does at the end of its processes
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            # the reader of the output may have ended, or never existed
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(end.code)
        raise


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
