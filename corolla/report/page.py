"""`corolla report`: one self-contained page about one or more runs, with its pictures and figures as files."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape, unescape
from pathlib import Path
from typing import TYPE_CHECKING

from corolla.experiments import latex
from corolla.experiments.result_table import caption, text_table
from corolla.report import assets
from corolla.report.accuracy import accuracy
from corolla.report.arrays import ReportedRun, read_runs
from corolla.report.by_kind import of_run
from corolla.report.clients import clients_section
from corolla.report.cost_pictures import costs
from corolla.report.csv_files import CLIENTS, ROUNDS, clients_csv, rounds_csv
from corolla.report.features import of_features
from corolla.report.groups import Group, grouped, short
from corolla.report.losses import losses
from corolla.report.partitions import partitions
from corolla.report.pictures import SCALE, Panel
from corolla.report.recorded import client_labels
from corolla.report.swept import swept
from corolla.report.tables import (
    differences,
    differences_section,
    failure_list,
    results_table,
    settings_sentence,
    settings_table,
    swatch,
    warnings,
)
from corolla.report.timeline import of_waiting
from corolla.report.upload_figures import of_all_uploads, of_uploads, spreads_of
from fl_app import progress
from fl_app.errors import UserError
from fl_app.files import make_directory, publish

if TYPE_CHECKING:
    from corolla.experiments.exported.client_answers import ClientAnswers

PAGE = "report.html"
PICTURES = "report-figures"
LATEX = "results.tex"
# page element with the names of the run folders
RUNS = '<meta name="corolla-runs" content="{}">'
# start of the report's CSV files
_CSV = "run,method,seed,"
# nothing is fetched: the page's scripts may only draw
_POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"
# most names of clients that the field of the highlighted client proposes
_MOST_NAMES = 2000

# pictures by name and kind: png, svg, pdf
Drawn = Mapping[str, Mapping[str, bytes]]


def write_report(
    paths: Sequence[Path],
    output: Path,
    figures: Path | None = None,
    tables: Path | None = None,
    title: Callable[[str], str] | None = None,
    tested: Callable[[Path], Sequence[ClientAnswers]] | None = None,
) -> tuple[Path, Path]:
    """Write report.html and the folder of pictures into `output`, and return their paths.

    Both replace an earlier report's. paths: run folders, or folders of run folders. figures: directory for every
    picture as PNG, SVG and PDF. tables: directory for the numbers as CSV. title: with `tables`, also write results.tex,
    with the methods' names that it returns. tested: returns the answers of a run's final models on test samples, which
    are drawn too.

    Raises UserError naming every path without a run, a directory that cannot be written, or an existing file of such a
    name that is not a report's; and what `tested` raises.
    """
    with _writing("--output", output):
        reported(output)
    for path in [tables / name for name in (ROUNDS, CLIENTS)] if tables else []:
        with _writing("--tables", path.parent):
            if path.exists() and not _beginning(path).startswith((_CSV, "\n")) and path.stat().st_size:
                raise UserError(key="--tables", rule=f"{path} exists and is not a report's; choose another directory")
    groups = grouped(read_runs(paths))
    runs = [run for group in groups for run in group.runs]
    # fail early: the pictures take long
    answers = {run.number: tested(run.path) for run in runs} if tested else {}
    with _writing("--output", output):
        make_directory(output / PICTURES)
    shared, own = pictures_of(groups)
    for run in runs if answers else []:
        own[run.number] += of_features(run, answers[run.number])
    every = [*shared, *(panel for panels in own.values() for panel in panels)]
    drawn = _draw(every, ("png", "svg", "pdf") if figures else ("png",))
    pictures = output / PICTURES
    with _writing("--output", output):
        # keep other files in this directory
        for name in _pictured(output):
            (pictures / f"{name}.png").unlink(missing_ok=True)
        _write_files(pictures, _of_kinds(drawn, "png"))
        heights = {name: _height(files["png"]) for name, files in drawn.items()}
        _write_files(output, {PAGE: page(groups, shared, own, heights).encode()})
    if figures:
        with _writing("--figures", figures):
            _write_files(figures, _of_kinds(drawn, "png", "svg", "pdf"))
    if tables:
        with _writing("--tables", tables):
            _write_files(tables, {ROUNDS: rounds_csv(runs).encode(), CLIENTS: clients_csv(runs).encode()})
            if title:
                _write_files(tables, {LATEX: _latex(groups, title).encode()})
    return output / PAGE, pictures


def pictures_of(groups: Sequence[Group]) -> tuple[list[Panel], dict[str, list[Panel]]]:
    """Return the pictures of all runs together, and those of single runs by their numbers. None is drawn yet."""
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
    return shared, own


def _latex(groups: Sequence[Group], title: Callable[[str], str]) -> str:
    """Return the tables of results and of differences as LaTeX, with the page's names of rows."""
    rows = [group.row for group in groups]
    header, *body = text_table(rows)
    # A sweep's runs share their group's label. The first run's name would contain its seed.
    made = [
        group.first.path.name
        if len(group.runs) == 1
        else latex.by_paper(group.label.removeprefix(f"{group.number} "), title)
        for group in groups
    ]
    names = [group.name or name for group, name in zip(groups, made, strict=True)]
    own = {"run": names, "method": [group.method for group in groups]}
    more = [key for key in own if key not in header]
    lines = [[*(own[key][k] for key in more), *line] for k, line in enumerate(body)]
    table = latex.titled([[*more, *header], *lines], title)
    results = latex.results([group.runs for group in groups], rows, table, caption(rows))
    return "\n".join([results, *(latex.tabular(*found) for found in differences(groups, names))])


def _draw(panels: Sequence[Panel], kinds: Sequence[str]) -> Drawn:
    """Draw every picture in every kind, and report the progress: on a busy machine each takes seconds."""
    drawn: dict[str, dict[str, bytes]] = {panel.name: {} for panel in panels}
    steps = [(panel, kind) for panel in panels for kind in kinds]
    for done, (panel, kind) in enumerate(steps):
        progress.report("drawing pictures", done, len(steps))
        drawn[panel.name][kind] = panel.render(kind)
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
    raise UserError(key="--output", rule=f"{path} exists and is not a report of runs; choose another directory")


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
        raise UserError(key=option, rule=f"cannot write into {directory}: {error.strerror}") from None


def _write_files(directory: Path, contents: Mapping[str, bytes]) -> None:
    make_directory(directory)
    for name, content in contents.items():
        publish(directory / name, functools.partial(Path.write_bytes, data=content))


def page(
    groups: Sequence[Group],
    shared: Sequence[Panel],
    own: Mapping[str, list[Panel]],
    heights: Mapping[str, int],
    live: str = "",
) -> str:
    """Return the page. shared: pictures of all runs. own: pictures by a run's number. heights: of pictures, in pixels.

    live: what a page that grows knows already (corolla/report/live_report.py).
    """
    runs = [run for group in groups for run in group.runs]
    panels = [*shared, *(panel for panels in own.values() for panel in panels)]
    policy = f"{_POLICY}; connect-src 'self'" if live else _POLICY
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        RUNS.format(escape(", ".join(run.path.name for run in runs))),
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f"<title>{escape(heading(runs))}</title>\n<style>{assets.STYLE}</style></head>\n<body>",
        tools(runs, bool(live)) if panels or live else "",
        f"<main>{main_part(groups, shared, own, heights)}</main>",
        f"<script>{assets.SCRIPT}</script>",
        *(scripts(panels) if panels or live else ()),
        f'<script type="module">const seen = {json.dumps(live)};{assets.LIVE}</script>' if live else "",
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def heading(runs: Sequence[ReportedRun]) -> str:
    """Return the page's title."""
    names = ", ".join(dict.fromkeys(run.method for run in runs))
    return f"{len(runs)} runs: {names}" if len(runs) > 1 else f"One run: {names}"


def main_part(
    groups: Sequence[Group], shared: Sequence[Panel], own: Mapping[str, list[Panel]], heights: Mapping[str, int]
) -> str:
    """Return the tables and the pictures' places."""
    runs = [run for group in groups for run in group.runs]
    single_clients = clients_section(groups)
    parts = [
        f"<h1>{escape(heading(runs))}</h1>",
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
            *(figure(panel, heights) for panel in shared),
        ]
    parts.append(single_clients)
    for group in groups:
        if any(own[run.number] or run.failures for run in group.runs):
            anchor = f"run-{group.number}"
            parts.append(
                f'<h2 id="{anchor}"><a href="#{anchor}">{swatch(groups, group)}{escape(short(group.label, 60))}</a></h2>'
            )
            parts += [single(run, own[run.number], heights, k > 0) for k, run in enumerate(group.runs)]
    return "\n".join(part for part in parts if part)


def tools(runs: Sequence[ReportedRun], live: bool) -> str:
    """Return the line that highlights a client in all pictures, and turns from light to dark. live: the page grows."""
    names = dict.fromkeys(name for run in runs for name in client_labels(run, map(int, run.clients)))
    options = "".join(f'<option value="{escape(name)}">' for name in list(names)[:_MOST_NAMES])
    return (
        '<div class="tools"><label>client <input id="tool-client" type="search" list="tool-names" placeholder="all alike"></label>'
        f'<datalist id="tool-names">{options}</datalist><button type="button" id="tool-paper">dark</button>'
        + '<span id="tool-live" role="status">growing with the run</span>'
        * live
        + "</div>"
        f"<noscript><p>The pictures need scripts. They are also files, in {PICTURES}.</p></noscript>"
    )


def data_of(panels: Sequence[Panel]) -> str:
    """Return the pictures' data as JSON. Each of their data is in it once."""
    datasets: dict[str, str] = {}
    specs = {}
    for panel in panels:
        datasets |= panel.spec["datasets"]
        specs[panel.name] = {**panel.spec, "datasets": list(panel.spec["datasets"]), "$schema": ""}
    return json.dumps({"datasets": datasets, "specs": specs}, ensure_ascii=False)


def scripts(panels: Sequence[Panel]) -> list[str]:
    """Return the pictures' data, and the program that draws them."""
    import vl_convert

    library = str(vl_convert.javascript_bundle(None)).replace("</script", "<\\/script")
    data = data_of(panels).replace("<", "\\u003c")
    return [
        f'<script type="application/json" id="pictures-data">{data}</script>',
        f'<script type="module">{library}</script>',
        f'<script type="module">{assets.PICTURES}</script>',
    ]


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


def single(run: ReportedRun, panels: Sequence[Panel], heights: Mapping[str, int], folded: bool) -> str:
    """Return a run's own pictures and failures. folded: show them on demand."""
    parts = "\n".join([*(figure(panel, heights) for panel in panels), failure_list(run)])
    if not folded or not (panels or run.failures):
        return parts.strip()
    return f'<details class="folded"><summary>{escape(short(run.label, 60))}</summary>\n{parts}</details>'


def figure(panel: Panel, heights: Mapping[str, int]) -> str:
    """Return the place of a picture, with its caption."""
    name, title = escape(panel.name), escape(panel.title)
    text = (
        f'<figure id="{name}"><h3><a href="#{name}">{title}</a></h3>\n'
        f'<div class="picture" role="img" aria-label="{title}" style="--h:{heights.get(panel.name, 0)}px"></div>\n'
        f'<p class="actions"></p>\n<figcaption>{escape(panel.caption)}</figcaption></figure>'
    )
    return f'<details class="folded"><summary>{title}</summary>\n{text}</details>' if panel.folded else text


def _height(png: bytes) -> int:
    """Return the height in a PNG's header, in pixels of the page."""
    return int(int.from_bytes(png[20:24], "big") / SCALE)
