"""What commands print: tables on a terminal, and the values of `--json`.

No name and no number of a table is cut. A table that is too wide is narrowed in this order. Headings break at hyphens and
dots, and long cells wrap at their spaces. Lines between cells go, then optional columns. Shorter cells wrap, but never the
first column, and no note in brackets. If even that does not fit, each row becomes a list with one line per cell.

`--json` prints one value, and nothing else on standard output. docs/experiments.md describes its contents.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table

from corolla.api.console import command, console, nearby
from corolla.experiments.result_table import cell, chosen, is_pooled, single_runs, undefined_notes
from corolla.experiments.runs import RecordedRun
from fl_app import data, tasks
from fl_app.errors import UserError, counted
from fl_app.keys import specs
from fl_app.metrics import moments
from strategies import METHODS

if TYPE_CHECKING:
    from corolla.presets import Preset
    from fl_app.config import RunConfig
    from fl_app.data import DatasetInfo

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
    pooled = "pooled: over all test samples; " if is_pooled(runs) else ""
    console.print(
        CAPTION.format(
            ", ".join(dict.fromkeys(run.headline.name for run in runs)),
            "all clients that train" if has_unseen else "all clients",
            pooled,
            chosen(runs),
        )
    )
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


# Layout ---------------------------------------------------------------------------------------------------------------


Lines = Sequence[Sequence[str]]

# terminal columns of a cell that does not wrap: at first, and where it is not enough that optional columns are left out
_LONG, _SHORTER = 30, (20, 14, 10, 8)
_KEPT = "\u00a0"


def fit(
    lines: Lines, width: int, may_be_missing: Sequence[str] = (), *, numbers_right: bool = False
) -> tuple[Table | str, list[str]]:
    """Return a table for a terminal, or a text with markup if none fits, and the columns that were left out.

    lines: header first. width: of the terminal. may_be_missing: columns that may be left out, in this order.
    numbers_right: all columns but the first are aligned to the right.
    """
    long = _narrowed(lines, _LONG)
    for rows, lined in ((lines, True), (long, True), (long, False)):
        if needed(rows, lined) <= width:
            return _drawn(rows, lined, numbers_right), []
    missing: list[str] = []
    for name in may_be_missing:
        if name in lines[0]:
            missing.append(name)
            rows = _narrowed(_without(lines, missing), _LONG)
            if needed(rows, lined=False) <= width:
                return _drawn(rows, False, numbers_right), missing
    for most in _SHORTER:
        rows = _narrowed(_without(lines, missing), most)
        if needed(rows, lined=False) <= width:
            return _drawn(rows, False, numbers_right), missing
    header, *body = lines
    # a list has room for all columns
    texts = ["\n".join(f"{name}: {cell}" for name, cell in zip(header, row, strict=True)) for row in body]
    return escape("\n\n".join(texts)), []


def needed(lines: Lines, lined: bool = True) -> int:
    """Return a table's width in terminal columns. lined: with lines between cells."""
    widths = [max(_width(line[k]) for line in lines) for k in range(len(lines[0]))]
    return sum(widths) + (3 * len(widths) + 1 if lined else 2 * (len(widths) - 1))


def _width(cell: str) -> int:
    return max(map(cell_len, cell.split("\n")))


def _without(lines: Lines, missing: Sequence[str]) -> Lines:
    kept = [k for k, heading in enumerate(lines[0]) if heading not in missing]
    return [[line[k] for k in kept] for line in lines]


def _narrowed(lines: Lines, most: int) -> Lines:
    """Return a table whose cells wrap beyond `most` terminal columns, and whose headings are no wider than need be."""
    body = [[row[0], *(_wrapped(cell, most) for cell in row[1:])] for row in lines[1:]]
    widths = [max([_width(row[k]) for row in body], default=1) for k in range(len(lines[0]))]
    return [list(map(_broken, lines[0], widths)), *body]


def _wrapped(cell: str, most: int) -> str:
    lines = textwrap.wrap(
        re.sub(r"\(.*\)", lambda note: note[0].replace(" ", _KEPT), cell),
        most,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace(_KEPT, " ")


def _broken(heading: str, width: int) -> str:
    """Break a heading at hyphens, dots and spaces into lines of a width, or as short as possible."""
    lines = [""]
    for piece in re.findall(r"[^-. ]+[-. ]?|[-. ]", heading):
        if lines[-1] and cell_len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def _drawn(lines: Lines, lined: bool, numbers_right: bool) -> Table:
    table = Table(box=box.HEAVY_HEAD if lined else None, padding=(0, 1) if lined else (0, 2, 0, 0), pad_edge=lined)
    for k, heading in enumerate(lines[0]):
        table.add_column(escape(heading), justify="right" if numbers_right and k else "left", no_wrap=True)
    for row in lines[1:]:
        table.add_row(*map(escape, row))
    return table


# JSON -----------------------------------------------------------------------------------------------------------------


def show_json(value: Any) -> None:
    """Print a value as JSON. Floats that JSON lacks, such as NaN, become null."""
    typer.echo(json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(inner) for inner in value]
    if hasattr(value, "item"):
        # a NumPy number
        return _plain(value.item())
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)


def of_run(run: RecordedRun) -> dict[str, Any]:
    """Return a line of the listing of `corolla runs`: folder, state, rounds, main settings and last figure."""
    try:
        settings = run.settings
    except UserError as error:
        return {"run": str(run.path), "name": run.path.name, "state": "unreadable", "error": str(error)}
    last = list(run.rounds.values())[-1] if run.rounds else {}
    metric = run.headline.name
    evaluation = last.get("evaluation") or {}
    return {
        "run": str(run.path),
        "name": run.path.name,
        "state": run.state,
        "stopped-early": run.stopped_early,
        "rounds": last.get("round", 0),
        "planned-rounds": settings.get("num-server-rounds"),
        "method": run.method,
        "dataset": settings.get("dataset"),
        "seed": settings.get("seed"),
        "metric": metric,
        "value": evaluation.get(metric) if run.finished else last.get(moments(metric)[0]),
        "of-clients": run.covered_note(run.headline) or "all",
    }


def of_presets(found: Iterable[Preset], seconds: Mapping[str, float | None] | None = None) -> list[dict[str, Any]]:
    """Return a row per preset: name, the published figure in per cent as text or null, paper, and its place in the paper.

    seconds: of a run of each preset on this machine, by name, None if unknown; then rows have them too.
    """
    return [
        {
            "preset": preset.name,
            "published": str(preset.published) if preset.published else None,
            "paper": preset.paper,
            "source": preset.source,
            "table": preset.table,
            "column": preset.column,
            **({} if seconds is None else {"seconds": seconds[preset.name]}),
        }
        for preset in found
    ]


def of_methods(names: Iterable[str]) -> list[dict[str, Any]]:
    """Return a row per method: name, summary, and its parameters with default, range and meaning."""
    rows = []
    for name in names:
        method = METHODS[name]
        parameters = [
            {"key": spec.name, "default": spec.default, "range": spec.range.replace("`", ""), "meaning": spec.doc}
            for spec in specs(method.params, method.name)
        ]
        rows.append({"method": name, "summary": METHODS.summary(name), "parameters": parameters})
    return rows


def of_data(config: RunConfig, info: DatasetInfo) -> dict[str, Any]:
    """Return the content of `corolla data show`: the data set, and each client's samples, by class if there are classes."""
    of_classes = tasks.of(config).has_classes
    clients = []
    for client_id in range(config.num_clients):
        part = data.open_client(config, client_id)
        row: dict[str, Any] = {"client": client_id, "train": len(part.y_train), "test": len(part.y_test)}
        if client_id < len(info.groups):
            row["name"] = info.groups[client_id]
        if of_classes:
            for name, labels in {"train-classes": part.y_train, "test-classes": part.y_test}.items():
                row[name] = {info.classes[k]: int((labels == k).sum()) for k in range(info.num_classes)}
        else:
            shift = info.facts.target_shift or [0.0] * len(info.classes)
            means = part.y_train.mean(0) if len(part.y_train) else [None] * len(info.classes)
            row["target-means"] = {
                name: None if mean is None else float(mean) + off
                for name, mean, off in zip(info.classes, means, shift, strict=True)
            }
        clients.append(row)
    return {
        "dataset": config.dataset,
        "samples": info.samples,
        "train": info.num_train,
        "test": info.num_test,
        "shape": list(info.input_shape),
        "classes" if of_classes else "targets": list(info.classes),
        "columns": [list(column) for column in info.facts.columns],
        "clients": clients,
        "remarks": [*info.remarks, *data.partition_remarks(config)],
    }
