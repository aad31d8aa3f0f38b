"""Commands about recorded runs: `corolla compare`, `summary`, `runs`, `report`, `watch` and `audit join`."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import webbrowser
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from corolla.api import comparing as api_comparing
from corolla.api.console import console, errors, say_partial, say_unfinished, warn
from corolla.api.recorded_run import client_answers
from corolla.api.waiting import waiting
from corolla.cli.completion import metrics_of, rows_of
from corolla.cli.options import JsonOption, QuietOption
from corolla.cli.output import echo, of_run, show_json, show_table
from corolla.experiments import collect as collecting
from corolla.experiments import compare as comparing
from corolla.experiments import costs as costing
from corolla.experiments import grouping, latex, paper_table, result_table, significance
from corolla.experiments.compare import PaperLine
from corolla.experiments.runs import RecordedRun, below, existing, in_tree, listing, named
from fl_app import exit_codes, extras
from fl_app.errors import UserError, counted
from fl_app.sources import SOURCES
from strategies import METHOD_PARAMS, METHODS

PAPER_CAPTION = "accuracies in per cent; ours: mean ± standard deviation over the seeds"
LatexOption = Annotated[bool, typer.Option("--latex", help="Print the tables as LaTeX, for booktabs.")]

Tables = list[tuple[list[list[str]], str]]
"""Tables as (lines, header first; caption)."""
audit_app = typer.Typer(no_args_is_help=True, help="Compare what the server and the sites wrote down.")
# digits of a hash that tell keys and messages apart
_DIGITS = 8


class Cost(Enum):
    """Costs of reaching a value, by which rows are ordered."""

    rounds = "rounds"
    bytes = "bytes"
    seconds = "seconds"


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders (a sweep's).")],
    paper: Annotated[bool, typer.Option("--paper", help="Compare with the papers' figures.")] = False,
    dataset: Annotated[
        str, typer.Option(help="With the papers' figures: the data set that your own data count as, e.g. cifar10.")
    ] = "",
    metric: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            shell_complete=metrics_of,
            help="The metric to compare, e.g. auc (default: the runs' headline).",
        ),
    ] = "",
    reference: Annotated[
        str,
        typer.Option(
            metavar="ROW",
            shell_complete=rows_of,
            help="The row that the others are compared with: its method, its values, or one of its runs (default: the first).",
        ),
    ] = "",
    to: Annotated[
        float | None,
        typer.Option(
            metavar="VALUE",
            help="Also show rounds, bytes and seconds until this accuracy, e.g. 80 or 0.8, or until this RMSE.",
        ),
    ] = None,
    by: Annotated[Cost | None, typer.Option(help="With --to: order its rows by this cost, the least first.")] = None,
    costs: Annotated[
        bool, typer.Option("--costs", help="Also show seconds and bytes, per round, per client and in all.")
    ] = False,
    as_json: JsonOption = False,
    latex: LatexOption = False,
) -> None:
    """Compare runs and test their differences; with --paper, compare them with the published figures.

    Runs that differ only in the seed share a row. All other rows are compared with the first, or with --reference.
    """
    if dataset and not grouping.named(dataset):
        known = ", ".join(name for name, source in SOURCES.items() if source.known)
        raise UserError(
            key=f"--dataset {dataset}", rule=f"with --paper, name the data set that your own data count as: {known}"
        )
    if metric and (paper or dataset):
        raise UserError(key=f"--metric {metric}", rule="not with --paper, where each preset names the paper's figure")
    for option, given in (("--costs", costs), ("--to", to is not None)):
        if given and (paper or dataset):
            raise UserError(
                key=option, rule="not with --paper, whose tables hold accuracies only; compare the runs once more"
            )
    if by and to is None:
        raise UserError(f"--by {by.value} needs --to: it orders rows by their cost of reaching that value")
    ordered = by.value if by else ""
    if as_json and latex:
        raise UserError("--json and --latex exclude each other")
    if reference and (paper or dataset):
        raise UserError(
            key=f"--reference {reference}", rule="not with --paper, where each row is compared with a published figure"
        )
    found, unfinished = comparing.load(runs, METHOD_PARAMS, metric)
    say_unfinished(unfinished)
    say_partial(found)
    groups = comparing.with_reference(comparing.group(found), reference)
    for run, before in comparing.repeated(found):
        warn(f"{run.path} repeats the settings and the seed of {before.path}: it gets a separate row")
    if not (paper or dataset):
        if as_json:
            show_json({**comparison_json(groups, to, costs, ordered), "unfinished": unfinished})
        elif latex:
            show_comparison_as_latex(groups, to, costs, ordered)
        else:
            show_comparison(groups, to, costs, ordered)
        return
    lines = [line for group in groups for line in comparing.beside(group, METHOD_PARAMS, dataset)]
    if as_json:
        show_json({"rows": [paper_table.as_told(line) for line in lines]})
    elif latex:
        columns = paper_table.columns(lines)
        show_latex([(one.table, "\n".join([one.title, PAPER_CAPTION, *one.notes])) for one in columns])
    else:
        show_beside_papers(lines, found, dataset)
    if not lines:
        raise typer.Exit(exit_codes.FAILED)


def show_beside_papers(lines: Sequence[PaperLine], found: Sequence[RecordedRun], dataset: str) -> None:
    """List runs without a published counterpart, and print the others beside the published figures, column by column.

    dataset: name as which the user's own data set counts.
    """
    matched = {id(run) for line in lines for run in line.runs}
    left = [run for run in found if id(run) not in matched]
    for run in left:
        echo(f"no published counterpart: {run.path} ({comparing.kind(run.config)})")
    if not dataset and not all(grouping.named(run.config.dataset) for run in left):
        echo("--dataset NAME, e.g. cifar10, compares your own data with a paper's")
    if not lines:
        return
    if left:
        echo()
    if every := paper_table.figures_table(lines):
        show_table(every)
        echo(paper_table.CAPTION)
    else:
        echo("no table of all figures: no run records any")
    for column in paper_table.columns(lines):
        echo(f"\n{column.title}")
        show_table(column.table)
        echo("\n".join([PAPER_CAPTION, *column.notes]))


def show_comparison(groups: Sequence[Sequence[RecordedRun]], to: float | None, costs: bool, by: str) -> None:
    """Print groups of runs side by side, with `costs` what they cost, their cost of reaching `to`, and their differences.

    by: the cost that orders the rows of `to`, "" for none.
    """
    differences = significance.tables(groups, significance.MOST_LISTED)
    for place, (table, caption) in enumerate([*result_tables(groups, to, costs, by), *differences]):
        if place:
            echo()
        show_table(table)
        echo(caption)
    if not differences:
        echo(f"\nno table of differences: {significance.why_no_table(groups)}")


def result_tables(groups: Sequence[Sequence[RecordedRun]], to: float | None, costs: bool, by: str = "") -> Tables:
    """Return the tables of groups of runs side by side, each with its caption. by: as in `show_comparison`.

    Raises UserError for a `to` outside the metric's range.
    """
    rows = comparing.result_rows(groups)
    notes = result_table.undefined_notes(run for runs in groups for run in runs)
    tables: Tables = [(result_table.text_table(rows), "\n".join([result_table.caption(rows), *notes]))]
    if costs:
        tables.append((costing.accuracy_and_costs_table(groups), costing.CAPTION))
    if to is not None:
        tables.append((costing.costs_table(groups, to, by), costing.TO_CAPTION))
    return tables


def comparison_json(
    groups: Sequence[Sequence[RecordedRun]], to: float | None, costs: bool, by: str = ""
) -> dict[str, object]:
    """Return the rows of a comparison as `corolla.compare` does, with what was asked for: costs, and those of reaching `to`.

    by: as in `show_comparison`.
    """
    rows = api_comparing.rows_of(groups)
    for row, group in zip(rows, groups, strict=True):
        row["runs"] = [str(run.path) for run in group]
    if costs:
        for row, group in zip(rows, groups, strict=True):
            row["costs"] = [costing.costs(run) for run in group]
    if to is not None:
        for row, group in zip(rows, groups, strict=True):
            row["reached"] = [costing.reached_as_told(run, to) for run in group]
        rows = [rows[place] for place in costing.order(groups, to, by)] if by else rows
    return {"rows": rows}


def show_comparison_as_latex(groups: Sequence[Sequence[RecordedRun]], to: float | None, costs: bool, by: str) -> None:
    """Print the tables of `show_comparison` as LaTeX, with the best figures and significance marked."""
    (lines, caption), *others = result_tables(groups, to, costs, by)
    typer.echo(latex.results(groups, comparing.result_rows(groups), latex.titled(lines, METHODS.title), caption))
    show_latex([*others, *significance.tables(groups, significance.MOST_LISTED)])


def show_latex(tables: Tables) -> None:
    """Print tables as LaTeX, with methods under their papers' names."""
    typer.echo(
        "\n".join(latex.tabular(latex.titled(lines, METHODS.title), caption) for lines, caption in tables), nl=False
    )


def summary(
    run: Annotated[Path, typer.Argument(help="A run folder, or the name of one under runs.")],
    as_json: JsonOption = False,
) -> None:
    """Show the results of a finished run: its summary.json."""
    recorded = RecordedRun(existing(run))
    if as_json:
        show_json({"run": str(recorded.path), **recorded.summary, "undefined": recorded.undefined})
        return
    told = {"run": recorded.path, **recorded.summary}
    width = max(map(len, told))
    for name, value in told.items():
        echo(f"{name:{width}}  {value}")
    for note in recorded.undefined_notes:
        echo(note)


def runs(
    directories: Annotated[
        list[Path] | None, typer.Argument(help="Directories of run folders (default: runs).")
    ] = None,
    collect: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Also write compact copies of finished runs there, for a repository; compare and report read them.",
        ),
    ] = None,
    tree: Annotated[
        bool, typer.Option("--tree", help="Put each run below the one that it goes on from (`corolla run --from`).")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List run folders, including those of sweeps, with their state: finished, running, or interrupted (can be resumed)."""
    places = directories or [Path("runs")]
    found = [run for place in places for run in below(place)]
    if as_json:
        show_json([of_run(run) for run in found])
    elif not found:
        console.print(f"no runs in {', '.join(map(str, places))}", soft_wrap=True)
    else:
        levels = in_tree(found) if tree else [(run, 0) for run in found]
        header, *rows = listing([run for run, _ in levels])
        for row, (_, level) in zip(rows, levels, strict=True):
            row[0] = f"{'   ' * (level - 1)}└─ {row[0]}" if level else row[0]
        show_table([header, *rows], may_be_missing=("written", "dataset", "seed", "method"))
    if collect is not None:
        for path in collecting.collect([run for run in found if run.state == "finished"], collect):
            (errors if as_json else console).print(f"{path}", soft_wrap=True)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of run folders.")],
    output: Annotated[Path, typer.Option(help="Directory for report.html and report-figures/.")] = Path("."),
    figures: Annotated[Path | None, typer.Option(help="Also write every picture there, as PNG, SVG and PDF.")] = None,
    tables: Annotated[Path | None, typer.Option(help="Also write rounds.csv and clients.csv there.")] = None,
    latex: Annotated[
        bool, typer.Option("--latex", help="With --tables: also write results.tex, for booktabs.")
    ] = False,
    features: Annotated[
        bool,
        typer.Option(
            "--features",
            help="Also test each client's final model: confusion matrices, and the features of test samples by t-SNE.",
        ),
    ] = False,
    quiet: QuietOption = False,
) -> None:
    """Write a page with tables and pictures of one or more runs, and the pictures as PNG files."""
    if latex and tables is None:
        raise UserError(key="--latex", rule="needs --tables DIR, the directory of results.tex")
    if output.suffix.lower() in (".html", ".htm") and not output.is_dir():
        raise UserError(key="--output", rule="must be a directory for report.html", value=str(output))
    extras.require_pictures("corolla report")
    # standard output gets only the paths
    with waiting(errors) as shown:
        shown.step("reading the runs", brief=True)
        # imported here because altair takes a second
        from corolla.report.page import reported, write_report

        before = reported(output)
        written = write_report(
            runs, output, figures, tables, METHODS.title if latex else None, client_answers if features else None
        )
    for path in written:
        console.print(f"{path}", soft_wrap=True)
    if before and before != reported(output):
        console.print(f"(replaces the report of {escape(before)})", soft_wrap=True)


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


@audit_app.command("join", epilog="Example: corolla audit join runs/july celle/audit.jsonl")
def join(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    audits: Annotated[
        list[Path], typer.Argument(metavar="AUDIT", help="Sites' audits: audit.jsonl, or the directory that has it.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Put a run's trail and its sites' audits side by side. Exit with code 1 if they differ."""
    from corolla.api import trails

    joined = trails.join(named(run.expanduser()), audits)
    if as_json:
        told = {"clients": joined.clients, "messages": joined.rows}
        typer.echo(json.dumps({**told, "differences": joined.differences, "apart": joined.apart}, indent=1))
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
