"""Commands about runs that are there: `corolla compare`, `runs` and `report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from corolla.api.console import console, errors, say_partial, say_unfinished, warn
from corolla.api.waiting import waiting
from corolla.cli.tables import show_table
from fl_app import extras
from fl_app.errors import UserError
from fl_app.sources import SOURCES
from strategies import METHOD_PARAMS, METHODS

if TYPE_CHECKING:
    from corolla.experiments.runs import RecordedRun


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of them (a sweep's).")],
    paper: Annotated[bool, typer.Option("--paper", help="Beside the papers' figures.")] = False,
    dataset: Annotated[str, typer.Option(help="What your own data are to count as, e.g. cifar10.")] = "",
    to: Annotated[
        float | None,
        typer.Option(
            metavar="VALUE", help="Rounds, bytes and seconds to an accuracy, e.g. 0.8, or to an RMSE as low as that."
        ),
    ] = None,
) -> None:
    """Put runs beside each other, and say which is better; with --paper, beside the published figures.

    Runs that differ in the seed alone are one row. The first row's runs are what the others are compared with.
    """
    from corolla.experiments import compare as comparing
    from corolla.experiments import grouping, paper_metrics

    if dataset and not (grouping.named(dataset) and paper):
        known = ", ".join(name for name, source in SOURCES.items() if source.known)
        raise UserError(f"--dataset {dataset}: with --paper, what your own data are to count as: {known}")
    found, unfinished = comparing.load(runs, METHOD_PARAMS)
    say_unfinished(unfinished)
    say_partial(found)
    groups = comparing.group(found)
    for run, before in comparing.repeated(found):
        warn(f"{run.path} repeats the settings and the seed of {before.path}: it has a row of its own")
    if not paper:
        show_comparison(groups, to)
        return
    lines = [line for group in groups for line in comparing.beside(group, METHOD_PARAMS, dataset)]
    if lines:
        show_table(comparing.paper_table(lines))
        typer.echo("accuracies in per cent; ours: mean ± standard deviation over n seeds")
        if every := paper_metrics.figures_table(lines):
            typer.echo()
            show_table(every)
            typer.echo(paper_metrics.CAPTION)
        for title, texts in comparing.described(lines):
            typer.echo("\n".join([f"\n{title}", *(f"  {text}" for text in texts)]))
    matched = {id(run) for line in lines for run in line.runs}
    left = [run for run in found if id(run) not in matched]
    for run in left:
        typer.echo(f"no published counterpart: {run.path} ({comparing.kind(run.config)})")
    if not dataset and not all(grouping.named(run.config.dataset) for run in left):
        typer.echo("--dataset NAME, e.g. cifar10, says what your own data are")


def show_comparison(groups: Sequence[Sequence[RecordedRun]], to: float | None) -> None:
    """Print groups of runs side by side, what each took to reach an accuracy, and their paired differences."""
    from corolla.experiments import compare as comparing
    from corolla.experiments import cost_to_target, significance
    from corolla.experiments.table import text_table

    # first of all, for what is wrong with `to`
    reached = cost_to_target.costs_table(groups, to) if to is not None else []
    show_table(text_table(comparing.result_rows(groups)))
    if reached:
        typer.echo()
        show_table(reached)
        typer.echo(cost_to_target.CAPTION)
    if differences := significance.differences_table(groups):
        typer.echo()
        show_table(differences)
        typer.echo(significance.caption(groups))


def runs(
    directories: Annotated[
        list[Path] | None, typer.Argument(help="Directories of run folders (default: runs).")
    ] = None,
    collect: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Also write there what a repository keeps of finished runs, for compare and report."
        ),
    ] = None,
) -> None:
    """List run folders: what is finished, what is running, what can be resumed; a sweep's runs too."""
    from corolla.experiments.runs import below, listing

    places = directories or [Path("runs")]
    found = [run for place in places for run in below(place)]
    if not found:
        console.print(f"no runs in {', '.join(map(str, places))}", soft_wrap=True)
        return
    show_table(listing(found))
    if collect is not None:
        from corolla.experiments import collect as collecting

        for path in collecting.collect([run for run in found if run.state == "finished"], collect):
            console.print(f"{path}", soft_wrap=True)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of run folders.")],
    output: Annotated[Path, typer.Option(help="Directory for report.html and report-figures/.")] = Path("."),
    figures: Annotated[Path | None, typer.Option(help="Directory for every picture as PNG, SVG and PDF.")] = None,
    tables: Annotated[Path | None, typer.Option(help="Directory for rounds.csv and clients.csv.")] = None,
) -> None:
    """Write a page with tables and pictures of one or more runs, and the pictures as PNG."""
    extras.require("matplotlib", "corolla report")
    declared = {name: method.figures for name, method in METHODS.items()}
    # standard output has the paths alone
    with waiting(errors) as shown:
        shown.step("reading the runs", brief=True)
        # here, for matplotlib takes seconds
        from corolla.report.page import reported, write_report

        before = reported(output)
        written = write_report(runs, output, declared, figures, tables)
    for path in written:
        console.print(f"{path}", soft_wrap=True)
    if before and before != reported(output):
        console.print(f"(in place of the report of {escape(before)})", soft_wrap=True)
