"""`corolla audit join`: what the server and the sites wrote down about a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from corolla.api.console import console
from corolla.cli.options import JsonOption
from corolla.experiments.runs import named
from fl_app import exit_codes
from fl_app.errors import counted

audit_app = typer.Typer(no_args_is_help=True, help="Compare what the server and the sites wrote down.")

# digits of a hash that tell keys and messages apart
_DIGITS = 8


def join(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    audits: Annotated[
        list[Path], typer.Argument(metavar="AUDIT", help="Sites' audits: audit.jsonl, or the directory that has it.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Put a run's trail and its sites' audits side by side. Exit with code 1 if they differ."""
    from rich.table import Table

    from corolla.api import trails

    joined = trails.join(named(run.expanduser()), audits)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "clients": joined.clients,
                    "messages": joined.rows,
                    "differences": joined.differences,
                    "apart": joined.apart,
                },
                indent=1,
            )
        )
    else:
        table = Table("client", "name", "SuperNode", "key", "messages", "answers", "samples", "data", "audit")
        for each in joined.clients:
            samples = " + ".join(str(each[name]) for name in ("train-samples", "test-samples") if name in each)
            keys = ", ".join(key.removeprefix("SHA256:")[:_DIGITS] for key in each["keys"])
            cells = (
                str(each["client"]),
                each["name"],
                each["supernode"],
                keys,
                str(each["messages"]),
                str(each["answers"]),
            )
            data = each.get("data-sha256", "")[:_DIGITS]
            table.add_row(*map(escape, (*cells, samples, data, each["audit"])))
        console.print(table)
        if submitters := sorted({name for each in joined.clients for name in each["submitters"]}):
            console.print(escape(f"submitted by {', '.join(submitters)}"), soft_wrap=True)
        for each in joined.apart:
            console.print(escape(f"{each['audit']}: had no part in the run: {each['why']}"), soft_wrap=True)
        for line in joined.differences:
            console.print(escape(line), soft_wrap=True)
        if not joined.differences:
            console.print(f"the server and the sites agree on {counted(len(joined.rows), 'message')}")
    if joined.differences:
        raise typer.Exit(exit_codes.FAILED)
