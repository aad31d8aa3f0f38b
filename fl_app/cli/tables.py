"""Tables on the terminal, and how numbers are written in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from fl_app.cli.settings import console
from fl_app.experiments.runs import Run

CAPTION = (
    "accuracy. final: mean over all clients after the last round, each on its own test data; pooled: the same over all samples; "
    "best: highest round of the mean over its clients, before they train, so it can be below final"
)


def show_results(folders: Sequence[Path]) -> None:
    """End with a table of the runs and the folders' paths."""
    table = Table("method", "final", "pooled", "best", "upload", "download", "seconds")
    for column in table.columns[1:]:
        column.justify = "right"
    summaries = [Run(folder).summary for folder in folders]
    for s in summaries:
        table.add_row(
            s["method"], percent(s["final-accuracy"]), percent(s["final-accuracy-pooled"]), percent(s["best-accuracy"]),
            size(s["upload-bytes"]), size(s["download-bytes"]), f"{s['seconds']:.1f}",
        )  # fmt: skip
    console.print(table)
    console.print(CAPTION)
    if any(s.get("scale") == "small" for s in summaries):
        console.print("cut by --scale small: not comparable with the papers' figures")
    for folder in folders:
        console.print(f"{folder}", soft_wrap=True)


def show_table(lines: Sequence[Sequence[str]]) -> None:
    """Print a table whose first line is the header; plain columns when output is not a terminal."""
    header, *body = lines
    if not console.is_terminal:
        widths = [max(len(line[k]) for line in lines) for k in range(len(header))]
        for line in lines:
            typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        return
    table = Table(*header)
    for line in body:
        table.add_row(*map(escape, line))
    console.print(table)


def percent(value: float | None) -> str:
    """Format a ratio as a percentage."""
    return "n/a" if value is None else f"{100 * value:.2f} %"


def size(nbytes: float) -> str:
    """Format bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            break
        nbytes /= 1000
    return f"{nbytes:.3g} {unit}"
