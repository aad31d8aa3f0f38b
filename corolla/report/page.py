"""`corolla report`: one self-contained page about one or more runs, with its pictures and figures as files."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import altair as alt

from corolla.experiments import latex
from corolla.experiments.result_table import caption, text_table
from corolla.report import all_runs, assets, by_kind, csv_files, heat_maps, model_pictures, swept, tables
from corolla.report.arrays import client_labels, read_runs
from corolla.report.charts import SCALE, Panel
from corolla.report.groups import Group, grouped, short
from corolla.report.tables import PICTURES
from corolla.report.theme import CONFIG
from fl_app import progress
from fl_app.data.prepared import cache_directory
from fl_app.errors import UserError
from fl_app.files import make_directory, publish, publish_text

if TYPE_CHECKING:
    from corolla.experiments.exported.loading import ClientAnswers

PAGE = "report.html"
LATEX = "results.tex"
OF_MODELS = ("confusion", "features")
"""Pictures that test the final models when they are first asked for."""
# page element with the names of the run folders
RUNS = re.compile('^<meta name="corolla-runs" content="(.*?)">$', re.MULTILINE)
# start of the report's CSV files
_CSV = "run,method,seed,"
# nothing is fetched: the page's scripts may only draw
_POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"
# most names of clients that the field of the highlighted client proposes
_MOST_NAMES = 2000


class Page:
    """What a report is made from: groups of runs, and their pictures, none of which is drawn yet.

    shared: pictures of all runs. own: pictures by a run's number.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups, self.runs = groups, [run for group in groups for run in group.runs]
        spreads = {run.number: model_pictures.spreads_of(run) for run in self.runs}
        self.shared = [
            *swept.swept(groups),
            *all_runs.accuracy(groups),
            *all_runs.losses(groups),
            *model_pictures.of_all_uploads(groups, spreads),
            *all_runs.costs(groups),
            *heat_maps.partitions(self.runs),
        ]
        self.own: dict[str, list[Panel]] = {}
        for run in self.runs:
            uploads = model_pictures.of_uploads(run, spreads[run.number])
            self.own[run.number] = [*by_kind.of_waiting(run), *by_kind.of_run(run), *uploads]

    @property
    def panels(self) -> list[Panel]:
        """All pictures, in the order of the page."""
        return sum(self.own.values(), self.shared)

    @property
    def title(self) -> str:
        """The page's title."""
        names = ", ".join(dict.fromkeys(run.method for run in self.runs))
        return f"{len(self.runs)} runs: {names}" if len(self.runs) > 1 else f"One run: {names}"

    @cached_property
    def parts(self) -> dict[str, Any]:
        """What `parts.html` puts on the page, besides its pictures."""
        groups = self.groups
        return {
            "settings": tables.shared_settings(self.runs),
            "warnings": tables.warnings(self.runs),
            "results": tables.results_table(groups),
            "keys": list(dict.fromkeys(key for group in groups for key in group.settings)),
            "differences": tables.differences(groups, [short(group.label) for group in groups]),
            "clients": tables.clients_section(groups),
            "with_own": [group for group in groups if any(self.own[run.number] or run.failures for run in group.runs)],
            "swatches": tables.swatches(groups),
        }

    def html(self, heights: Mapping[str, int], live: str = "") -> str:
        """Return the page. heights: of pictures, in pixels.

        live: what a page that grows knows already (corolla/report/live_report.py).
        """
        names = dict.fromkeys(name for run in self.runs for name in client_labels(run, map(int, run.clients)))
        return tables.TEMPLATES.get_template("page.html").render(
            page=self,
            heights=heights,
            live=live,
            names=", ".join(run.path.name for run in self.runs),
            policy=_POLICY + "; connect-src 'self'" * bool(live),
            clients=list(names)[:_MOST_NAMES],
            assets=assets,
            data=data_of(self.panels),
            library=library,
        )


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
    for path in [tables / name for name in (csv_files.ROUNDS, csv_files.CLIENTS)] if tables else []:
        with _writing("--tables", path.parent):
            if path.exists() and not _beginning(path).startswith((_CSV, "\n")) and path.stat().st_size:
                raise UserError(key="--tables", rule=f"{path} exists and is not a report's; choose another directory")
    report = Page(grouped(read_runs(paths)))
    # fail early: the pictures take long
    if tested:
        for run in report.runs:
            report.own[run.number] += model_pictures.of_features(run, tested(run.path))
    pictures = output / PICTURES
    with _writing("--output", output):
        make_directory(pictures)
    # on a busy machine each picture takes seconds
    every = [(panel, kind) for panel in report.panels for kind in (("png", "svg", "pdf") if figures else ("png",))]
    drawn: dict[str, bytes] = {}
    for panel, kind in every:
        progress.report("drawing pictures", len(drawn), len(every))
        drawn[f"{panel.name}.{kind}"] = panel.render(kind)
    with _writing("--output", output):
        # keep other files in this directory
        earlier = (output / PAGE).read_text("utf-8", "replace") if (output / PAGE).exists() else ""
        for name in map(unescape, re.findall('<figure id="([^"]+)">', earlier)):
            if Path(name).name == name:
                (pictures / f"{name}.png").unlink(missing_ok=True)
    pngs = {name: content for name, content in drawn.items() if name.endswith(".png")}
    _write_files("--output", pictures, pngs)
    # the height in a PNG's header, in pixels of the page
    heights = {name.removesuffix(".png"): int(int.from_bytes(png[20:24], "big") / SCALE) for name, png in pngs.items()}
    _write_files("--output", output, {PAGE: report.html(heights).encode()})
    if figures:
        _write_files("--figures", figures, drawn)
    if tables:
        files = {
            csv_files.ROUNDS: csv_files.as_csv(report.runs, csv_files.round_lines),
            csv_files.CLIENTS: csv_files.as_csv(report.runs, csv_files.client_lines),
        }
        if title:
            files[LATEX] = _latex(report.groups, title)
        _write_files("--tables", tables, {name: text.encode() for name, text in files.items()})
    return output / PAGE, pictures


def _latex(groups: Sequence[Group], title: Callable[[str], str]) -> str:
    """Return the tables of results and of differences as LaTeX, with the page's names of rows."""
    rows = [group.row for group in groups]
    header, *body = text_table(rows)
    # A sweep's runs share their group's label. The first run's name would contain its seed.
    names = []
    for group in groups:
        made = group.first.path.name
        if len(group.runs) > 1:
            made = latex.by_paper(group.label.removeprefix(f"{group.number} "), title)
        names.append(group.name or made)
    own = {"run": names, "method": [group.method for group in groups]}
    more = [key for key in own if key not in header]
    lines = [[*(own[key][k] for key in more), *line] for k, line in enumerate(body)]
    results = latex.results(
        [group.runs for group in groups], rows, latex.titled([[*more, *header], *lines], title), caption(rows)
    )
    return "\n".join([results, *(latex.tabular(*found) for found in tables.differences(groups, names))])


def reported(output: Path) -> str:
    """Return the names of the runs in a directory's report; "" if there is no report.

    Raises UserError if report.html is not a report, OSError if it cannot be read.
    """
    path = output / PAGE
    if not path.exists():
        return ""
    if found := RUNS.search(_beginning(path)):
        return unescape(found[1])
    raise UserError(key="--output", rule=f"{path} exists and is not a report of runs; choose another directory")


def _beginning(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(100_000).decode("utf-8", "replace")


@contextlib.contextmanager
def _writing(option: str, directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(key=option, rule=f"cannot write into {directory}: {error.strerror}") from None


def _write_files(option: str, directory: Path, contents: Mapping[str, bytes]) -> None:
    with _writing(option, directory):
        make_directory(directory)
        for name, content in contents.items():
            publish(directory / name, functools.partial(Path.write_bytes, data=content))


def data_of(panels: Sequence[Panel]) -> str:
    """Return the pictures' data as JSON, which may stand in a page. Each of their data is in it once."""
    datasets: dict[str, str] = {}
    specs = {}
    for panel in panels:
        datasets |= panel.spec["datasets"]
        specs[panel.name] = {**panel.spec, "datasets": list(panel.spec["datasets"]), "$schema": ""}
    return json.dumps({"datasets": datasets, "specs": specs}, ensure_ascii=False).replace("<", "\\u003c")


def library() -> str:
    """Return the program that draws pictures in a browser. It is made once, which takes a second, and kept in the cache."""
    import vl_convert

    kept = cache_directory() / f"vega-{vl_convert.__version__}.js"
    with contextlib.suppress(OSError):
        return kept.read_text("utf-8")
    made = str(vl_convert.javascript_bundle(None)).replace("</script", "<\\/script")
    with contextlib.suppress(OSError):
        make_directory(kept.parent)
        publish_text(kept, made)
    return made


class Plots:
    """A function for each picture that the report of this run has. `dir(run.plot)` lists them.

    A function returns an Altair chart, which can be changed and saved: `run.plot.accuracy().properties(title="July")`.
    `confusion` and `features` test the run's final models, and are not listed. tested: returns these models' answers.
    """

    def __init__(self, path: Path, tested: Callable[[Path], Sequence[ClientAnswers]]) -> None:
        page = Page(grouped(read_runs([path])))
        self._run, self._tested = page.runs[0], tested
        self._panels = self._named(page.panels)

    def _named(self, panels: Sequence[Panel]) -> dict[str, Panel]:
        return {panel.name.removesuffix(f"-{self._run.number}").replace("-", "_"): panel for panel in panels}

    def __getattr__(self, name: str) -> Any:
        """Return the function that draws a picture. Raises AttributeError if the run has none of this name."""
        if name in OF_MODELS and name not in self._panels:
            self._panels |= self._named([*model_pictures.of_features(self._run, self._tested(self._run.path))])
        panel = None if name.startswith("_") else self._panels.get(name)
        if panel is None:
            raise AttributeError(f"the run has no picture {name!r}, only {', '.join(self._panels)}")

        def draw() -> alt.TopLevelMixin:
            return panel.draw().add_params(*(alt.param(**setting) for setting in CONFIG["params"]))

        draw.__doc__ = f"{panel.title}. {panel.caption}"
        return draw

    def __dir__(self) -> list[str]:
        """Return the pictures' names."""
        return [*self._panels]

    def __repr__(self) -> str:
        """Return the pictures' names with their titles."""
        return "\n".join(f"{name}(): {panel.title}" for name, panel in self._panels.items())
