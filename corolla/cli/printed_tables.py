"""Tables on the terminal, and the format of their numbers."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from corolla.api.console import command, console, nearby
from corolla.cli.column_widths import fit, needed
from corolla.experiments.result_table import cell, chosen, is_pooled, single_runs, undefined_notes
from corolla.experiments.runs import RecordedRun
from fl_app.errors import counted

CAPTION = (
    "{}. final: mean over {} after the last round, each on its own test data; {}"
    "best: best mean over a round's clients, before they train, so it can be below final, {}"
)
SECONDS = "seconds: of all rounds together, without the start"
ROUNDS = "; before and after, while it runs: the model that a client starts its training from, and the trained one"


def show_results(folders: Sequence[Path]) -> None:
    """Print the final table of runs, notes on it, and the folders' paths."""
    runs = [RecordedRun(folder) for folder in folders]
    summaries = [run.summary for run in runs]
    show_table(single_runs(runs), may_be_missing=("pooled", "download", "upload", "best"), boxed=True)
    for s, metric in zip(summaries, [run.headline for run in runs], strict=True):
        if (name := f"unseen-{metric.name}") in s:
            tuned = s.get(f"{name}-finetuned")
            after = f", {cell(metric, tuned)} after finetune-epochs" if tuned is not None else ""
            console.print(f"{s['method']}: clients that never trained (unseen): {cell(metric, s[name])}{after}")
        if early := s.get("stopped-early"):
            console.print(escape(f"{s['method']}: {s['rounds']} rounds; {early}"))
        if s["failures"]:
            missing = counted(s["failures"], "reply was", "replies were")
            console.print(
                f"{s['method']}: {missing} missing, late or refused (clients and reasons: see the report); best, before and "
                "after are only of the other clients"
            )
        if s.get("far-uploads"):
            used = counted(s["far-uploads"], "upload was used though it", "uploads were used though they")
            console.print(
                f"{s['method']}: {used} lay far from the others' (clients: see the report); max-update-norm = 3 would drop "
                f"{'it' if s['far-uploads'] == 1 else 'them'}"
            )
    has_unseen = any(f"unseen-{run.headline.name}" in run.summary for run in runs)
    who = "all clients that train" if has_unseen else "all clients"
    judged = ", ".join(dict.fromkeys(run.headline.name for run in runs))
    pooled = "pooled: over all test samples; " if is_pooled(runs) else ""
    console.print(CAPTION.format(judged, who, pooled, chosen(runs)))
    if others := ", ".join(dict.fromkeys(metric.name for run in runs for metric in run.others)):
        console.print(f"{others}: final as well, mean over the clients with data that define it")
    if any(run.is_validated for run in runs):
        console.print("validation: as final, on each client's own validation data")
    for note in undefined_notes(runs):
        console.print(escape(note))
    console.print(SECONDS + ROUNDS * any(not run.tested for run in runs))
    for method, tested in {(run.summary["method"], run.tested): None for run in runs if run.tested}:
        console.print(f"{escape(method)}: {escape(tested)}")
    if any(s.get("scale") == "small" for s in summaries):
        console.print("cut by --scale small: not comparable with the papers' figures")
    for folder in folders:
        console.print(f"{folder}", soft_wrap=True)


def show_next(runs: Sequence[Path], several: bool) -> None:
    """Print the commands that compare and report exactly these runs, or folders of runs, as they can be typed here.

    several: whether there is anything to compare.
    """
    uses = {"compare": "which is better, tested over clients"} if several else {}
    uses["report"] = "a page with tables and pictures"
    for place, (verb, what) in enumerate(uses.items()):
        words = " ".join([command(), verb, *(shlex.quote(nearby(run)) for run in runs)])
        start = "     " if place else "\nnext:"
        console.print(f"{start} {escape(words)}    # {what}", soft_wrap=True)


def show_table(lines: Sequence[Sequence[str]], may_be_missing: Sequence[str] = (), boxed: bool = False) -> None:
    """Print a table with its header as the first line; plain columns if output is not a terminal, unless boxed.

    may_be_missing: columns that a narrow terminal may leave out, in this order. boxed: align numbers to the right, and
    draw lines between cells also if output is not a terminal, as far as they fit.
    """
    if not console.is_terminal and not (boxed and needed(lines) <= console.width):
        widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
        for line in lines:
            echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        return
    drawn, missing = fit(lines, console.width, may_be_missing, numbers_right=boxed)
    console.print(drawn, soft_wrap=isinstance(drawn, str))
    if missing:
        console.print(f"left out at this width: {', '.join(missing)}", soft_wrap=True)


def echo(text: str = "") -> None:
    """Print a line without markup, unless the command is quiet."""
    console.print(text, markup=False, soft_wrap=True)
