"""Tables on the terminal, and how numbers are written in them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from corolla.api.console import command, console, nearby
from corolla.experiments.runs import RecordedRun
from corolla.experiments.table import cell, single_runs
from corolla.experiments.table import size as size

CAPTION = (
    "{}. final: mean over {} after the last round, each on its own test data; pooled: weighted by test samples; "
    "best: best round of the mean over its clients, before they train, so it can be below final"
)
ROUNDS = (
    "seconds: of all rounds together, without the start; before and after, while it runs: the model a client receives, and what "
    "its own training makes of it"
)


def show_results(folders: Sequence[Path]) -> None:
    """End with a table of the runs and the folders' paths."""
    runs = [RecordedRun(folder) for folder in folders]
    summaries = [run.summary for run in runs]
    header, *body = fitting(single_runs(runs), console.width if console.is_terminal else 0)
    table = Table(*header)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in body:
        table.add_row(*row)
    console.print(table)
    for s, metric in zip(summaries, [run.headline for run in runs], strict=True):
        if (name := f"unseen-{metric.name}") in s:
            tuned = s.get(f"{name}-finetuned")
            after = f", {cell(metric, tuned)} after finetune-epochs" if tuned is not None else ""
            console.print(f"{s['method']}: clients that never trained (unseen): {cell(metric, s[name])}{after}")
        if s["failures"]:
            console.print(
                f"{s['method']}: {s['failures']} replies were missing, late or refused (who, and why: see the report); best, "
                "before and after are of the other clients alone"
            )
        if s.get("far-uploads"):
            console.print(
                f"{s['method']}: {s['far-uploads']} uploads were used though they lay far from the others' (whose: see the "
                "report); max-update-norm = 3 would drop them"
            )
    has_unseen = any(f"unseen-{run.headline.name}" in run.summary for run in runs)
    who = "all clients that train" if has_unseen else "all clients"
    console.print(CAPTION.format(", ".join(dict.fromkeys(run.headline.name for run in runs)), who))
    console.print(ROUNDS)
    for method, tested in {(run.summary["method"], run.tested): None for run in runs if run.tested}:
        console.print(f"{escape(method)}: {escape(tested)}")
    if any(s.get("scale") == "small" for s in summaries):
        console.print("cut by --scale small: not comparable with the papers' figures")
    for folder in folders:
        console.print(f"{folder}", soft_wrap=True)


def fitting(lines: list[list[str]], width: int) -> list[list[str]]:
    """Return a table of results with as many columns as a terminal has room for, so that none is cut; width 0: all."""
    for name in ("pooled", "download", "upload", "best"):
        needed = 1 + sum(3 + max(len(line[k]) for line in lines) for k in range(len(lines[0])))
        if width and needed > width:
            k = lines[0].index(name)
            lines = [line[:k] + line[k + 1 :] for line in lines]
    return lines


def show_next(runs: Sequence[Path]) -> None:
    """Say what to do next: the command that writes a report of exactly these runs, or folders of runs, as it can be typed here."""
    words = [command(), "report", *(shlex.quote(nearby(run)) for run in runs)]
    console.print(f"\nnext: {escape(' '.join(words))}    # a page with tables and pictures", soft_wrap=True)


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
