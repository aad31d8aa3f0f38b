"""`corolla report`: one self-contained page about one or more runs, with its pictures and figures as files."""

from __future__ import annotations

import base64
import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape, unescape
from pathlib import Path

from corolla.experiments.latex import tabular
from corolla.experiments.table import caption, text_table
from corolla.report.accuracy import accuracy
from corolla.report.arrays import ReportedRun, read_runs
from corolla.report.assets import SCRIPT, STYLE
from corolla.report.by_kind import of_run
from corolla.report.clients import clients_section
from corolla.report.costs import costs
from corolla.report.csv_files import CLIENTS, ROUNDS, clients_csv, rounds_csv
from corolla.report.figures import DPI, Panel
from corolla.report.groups import Group, grouped, short
from corolla.report.losses import losses
from corolla.report.partitions import partitions
from corolla.report.swept import swept
from corolla.report.tables import (
    differences_section,
    failure_list,
    results_table,
    settings_sentence,
    settings_table,
    swatch,
    warnings,
)
from corolla.report.upload_figures import of_all_uploads, of_uploads, spreads_of
from corolla.report.waiting import of_waiting
from fl_app import progress
from fl_app.errors import UserError
from fl_app.files import make_directory, publish

PAGE = "report.html"
PICTURES = "report-figures"
LATEX = "results.tex"
# page element with the names of the run folders
RUNS = '<meta name="corolla-runs" content="{}">'
# start of the report's CSV files
_CSV = "run,method,seed,"
_DARK = "dark"  # a PNG for dark screens

# pictures by name and kind: png, dark, svg, pdf
Drawn = Mapping[str, Mapping[str, bytes]]


def write_report(
    paths: Sequence[Path],
    output: Path,
    figures: Path | None = None,
    tables: Path | None = None,
    latex: bool = False,
) -> tuple[Path, Path]:
    """Write report.html and the folder of pictures into `output`, and return their paths.

    Both replace an earlier report's. paths: run folders, or folders of run folders. figures: directory for every
    picture as PNG, SVG and PDF. tables: directory for the numbers as CSV. latex: with `tables`, also write results.tex.

    Raises UserError naming every path without a run, a directory that cannot be written, or an existing file of such a
    name that is not a report's.
    """
    with _writing("--output", output):
        reported(output)
    for path in [tables / name for name in (ROUNDS, CLIENTS)] if tables else []:
        with _writing("--tables", path.parent):
            if path.exists() and not _beginning(path).startswith((_CSV, "\n")) and path.stat().st_size:
                raise UserError(f"--tables: {path} exists and is not a report's; choose another directory")
    groups = grouped(read_runs(paths))
    # fail early: the pictures take long
    with _writing("--output", output):
        make_directory(output / PICTURES)
    runs = [run for group in groups for run in group.runs]
    spreads = {run.number: spreads_of(run) for run in runs}
    shared = [
        *swept(groups),
        *accuracy(groups),
        *losses(groups),
        *of_all_uploads(groups, spreads),
        *costs(groups),
        *partitions(runs),
    ]
    own = {run.number: [*of_waiting(run), *of_run(run), *of_uploads(run, spreads[run.number])] for run in runs}
    every = [*shared, *(panel for panels in own.values() for panel in panels)]
    drawn = _draw(every, ("png", _DARK, "svg", "pdf") if figures else ("png", _DARK))
    pictures = output / PICTURES
    with _writing("--output", output):
        # keep other files in this directory
        for name in _pictured(output):
            (pictures / f"{name}.png").unlink(missing_ok=True)
        _write_files(pictures, _of_kinds(drawn, "png"))
        _write_files(output, {PAGE: page(groups, shared, own, drawn).encode()})
    if figures:
        with _writing("--figures", figures):
            _write_files(figures, _of_kinds(drawn, "png", "svg", "pdf"))
    if tables:
        with _writing("--tables", tables):
            _write_files(tables, {ROUNDS: rounds_csv(runs).encode(), CLIENTS: clients_csv(runs).encode()})
            if latex:
                _write_files(tables, {LATEX: _latex(groups).encode()})
    return output / PAGE, pictures


def _latex(groups: Sequence[Group]) -> str:
    """Return the table of results as LaTeX, with the page's names of rows."""
    rows = [group.row for group in groups]
    header, *body = text_table(rows)
    # A sweep's runs share their group's label. The first run's name would contain its seed.
    made = [
        group.first.path.name if len(group.runs) == 1 else group.label.removeprefix(f"{group.number} ")
        for group in groups
    ]
    named = [(group.name or name, group.method) for group, name in zip(groups, made, strict=True)]
    own = [key for key in ("run", "method") if key not in header]
    lines = [[*names[: len(own)], *line] for names, line in zip(named, body, strict=True)]
    return tabular([[*own, *header], *lines], caption(rows))


def _draw(panels: Sequence[Panel], kinds: Sequence[str]) -> Drawn:
    """Draw every picture in every kind, and report the progress: on a busy machine each takes seconds."""
    drawn: dict[str, dict[str, bytes]] = {panel.name: {} for panel in panels}
    steps = [(panel, kind) for panel in panels for kind in kinds]
    for done, (panel, kind) in enumerate(steps):
        progress.report("drawing pictures", done, len(steps))
        drawn[panel.name][kind] = panel.render(dark=True) if kind == _DARK else panel.render(kind)
    return drawn


def _of_kinds(drawn: Drawn, *kinds: str) -> dict[str, bytes]:
    return {f"{name}.{kind}": contents[kind] for name, contents in drawn.items() for kind in kinds}


def reported(output: Path) -> str:
    """Return the names of the runs in a directory's report; "" if there is no report.

    Raises UserError if report.html is not a report, OSError if it cannot be read.
    """
    path = output / PAGE
    if not path.exists():
        return ""
    begin, (before, after) = _beginning(path), RUNS.split("{}")
    if found := re.search(f"^{re.escape(before)}(.*?){re.escape(after)}$", begin, re.MULTILINE):
        return unescape(found[1])
    raise UserError(f"--output: {path} exists and is not a report of runs; choose another directory")


def _pictured(output: Path) -> list[str]:
    """Return the names of the pictures in a directory's report."""
    path = output / PAGE
    page = path.read_text("utf-8", "replace") if path.exists() else ""
    return [name for name in map(unescape, re.findall('<figure id="([^"]+)">', page)) if Path(name).name == name]


def _beginning(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(100_000).decode("utf-8", "replace")


@contextlib.contextmanager
def _writing(option: str, directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{option}: cannot write into {directory}: {error.strerror}") from None


def _write_files(directory: Path, contents: Mapping[str, bytes]) -> None:
    make_directory(directory)
    for name, content in contents.items():
        publish(directory / name, functools.partial(Path.write_bytes, data=content))


def page(groups: Sequence[Group], shared: Sequence[Panel], own: Mapping[str, list[Panel]], drawn: Drawn) -> str:
    """Return the page. shared: pictures of all runs. own: pictures by a run's number. drawn: all pictures, light and dark."""
    runs = [run for group in groups for run in group.runs]
    names = ", ".join(dict.fromkeys(run.method for run in runs))
    title = f"{len(runs)} runs: {names}" if len(runs) > 1 else f"One run: {names}"
    single_clients = clients_section(groups)
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        RUNS.format(escape(", ".join(run.path.name for run in runs))),
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n<body><main>",
        f"<h1>{escape(title)}</h1>",
        settings_sentence(runs),
        warnings(runs),
        contents(groups, shared, own, bool(single_clients)),
        results_table(groups),
        settings_table(groups),
        differences_section(groups),
    ]
    if shared:
        parts += [
            '<h2 id="pictures"><a href="#pictures">Pictures</a></h2>',
            *(figure(panel, drawn) for panel in shared),
        ]
    parts.append(single_clients)
    for group in groups:
        if any(own[run.number] or run.failures for run in group.runs):
            anchor = f"run-{group.number}"
            parts.append(
                f'<h2 id="{anchor}"><a href="#{anchor}">{swatch(groups, group)}{escape(short(group.label, 60))}</a></h2>'
            )
            parts += [single(run, own[run.number], drawn, k > 0) for k, run in enumerate(group.runs)]
    parts.append(f"</main><script>{SCRIPT}</script></body></html>\n")
    return "\n".join(part for part in parts if part)


def contents(
    groups: Sequence[Group], shared: Sequence[Panel], own: Mapping[str, list[Panel]], single_clients: bool = False
) -> str:
    """Return links to everything on the page. single_clients: whether there are tables of single clients."""

    def item(anchor: str, text: str, below: Sequence[Panel] = ()) -> str:
        inner = "".join(item(panel.name, panel.title) for panel in below)
        return f'<li><a href="#{escape(anchor)}">{escape(text)}</a>{f"<ul>{inner}</ul>" if inner else ""}</li>'

    items = [item("results", "Results")]
    if shared:
        items.append(item("pictures", "Pictures", [panel for panel in shared if not panel.folded]))
    if single_clients:
        items.append(item("single-clients", "Single clients"))
    for group in groups:
        if any(own[run.number] or run.failures for run in group.runs):
            items.append(item(f"run-{group.number}", short(group.label, 60), own[group.first.number]))
    return f'<nav id="contents"><details open><summary>Contents</summary><ul>{"".join(items)}</ul></details></nav>'


def single(run: ReportedRun, panels: Sequence[Panel], drawn: Drawn, folded: bool) -> str:
    """Return a run's own pictures and failures. folded: show them on demand."""
    parts = "\n".join([*(figure(panel, drawn) for panel in panels), failure_list(run)])
    if not folded or not (panels or run.failures):
        return parts.strip()
    return f'<details class="folded"><summary>{escape(short(run.label, 60))}</summary>\n{parts}</details>'


def figure(panel: Panel, drawn: Drawn) -> str:
    """Return a picture with its caption, embedded for light and dark screens."""
    bright, dark = drawn[panel.name]["png"], drawn[panel.name][_DARK]
    width, height = (
        int.from_bytes(bright[at : at + 4], "big") * 100 // DPI for at in (16, 20)
    )  # PNG header, 100 px/inch
    sources = [f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}" for data in (bright, dark)]
    name, title = escape(panel.name), escape(panel.title)
    text = (
        f'<figure id="{name}"><h3><a href="#{name}">{title}</a></h3>\n'
        f'<div class="picture" id="{name}-full"><picture>'
        f'<source media="screen and (prefers-color-scheme: dark)" srcset="{sources[1]}">'
        f'<img alt="{title}" width="{width}" height="{height}" style="--w:{width}px" src="{sources[0]}"></picture></div>\n'
        f'<p class="zoom"><a class="full" href="#{name}-full">full size</a><a class="fit" href="#{name}">fit to the page</a></p>\n'
        f"<figcaption>{escape(panel.caption)}</figcaption></figure>"
    )
    return f'<details class="folded"><summary>{title}</summary>\n{text}</details>' if panel.folded else text
