"""Commands about runs that are there: `corolla compare`, `report` and `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fl_app.cli.settings import console, errors
from fl_app.cli.tables import show_table
from strategies import METHOD_PARAMS, METHODS


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of them (a sweep's).")],
    paper: Annotated[bool, typer.Option("--paper", help="Beside the papers' figures.")] = False,
    dataset: Annotated[str, typer.Option(help="What the runs' own data set is to count as, e.g. cifar10.")] = "",
) -> None:
    """Put runs beside each other, or, with --paper, beside the published figures, with the settings that differ."""
    from fl_app.experiments import compare as comparing

    found, unfinished = comparing.load(runs, METHOD_PARAMS)
    for folder in unfinished:
        errors.print(f"skipped, not finished: {escape(str(folder))}", soft_wrap=True)
    groups = comparing.group(found)
    if not paper:
        show_table(comparing.side_by_side(groups))
        return
    lines = [line for group in groups for line in comparing.beside(group, METHOD_PARAMS, dataset)]
    if lines:
        show_table(comparing.table(lines))
        typer.echo("accuracies in per cent; ours: mean ± standard deviation over n seeds")
    for line in lines:
        typer.echo("\n".join([f"\n{line.preset.name}", *(f"  {text}" for text in comparing.describe(line))]))
    matched = {id(run) for line in lines for run in line.runs}
    for run in found:
        if id(run) not in matched:
            typer.echo(f"no published counterpart: {run.folder.path} ({comparing.kind(run.config)})")


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of run folders.")],
    output: Annotated[Path, typer.Option(help="Directory for report.html and report-figures/.")] = Path("."),
    figures: Annotated[Path | None, typer.Option(help="Directory for every picture as PNG, SVG and PDF.")] = None,
    tables: Annotated[Path | None, typer.Option(help="Directory for rounds.csv and clients.csv.")] = None,
) -> None:
    """Write a page with tables and pictures of one or more runs, and the pictures as PNG."""
    from fl_app.report.page import write_report

    declared = {name: method.figures for name, method in METHODS.items()}
    for path in write_report(runs, output, declared, figures, tables):
        console.print(f"{path}", soft_wrap=True)


def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    client: Annotated[int | None, typer.Option(help="Client id; without it the global model.")] = None,
    output: Annotated[Path | None, typer.Option(help="File to write (default: in the current directory).")] = None,
) -> None:
    """Write one of a run's final models as a PyTorch state dict."""
    from fl_app.experiments.export import export_state_dict

    path = export_state_dict(run, client, output)
    console.print(f"{path}", soft_wrap=True)
