"""Tables and pictures of studies/results.md, and the table of docs/results.md, made from the runs in studies/results (`make docs`).

python -m studies.results_page           # rewrite the blocks between the pages' marks, and the pictures
python -m studies.results_page NAME      # print the tables of the folder studies/results/NAME, write nothing
python -m studies.results_page print     # likewise the short tables

docs/results.md has one row per column. The page here begins with a short table per column: print and ours. A column of a
paper's table has a sweep file, sweeps/NAME.toml, and a folder with its collected runs, results/NAME. Three parts have
their own tables: the early stage of training, the logs of FedOBP's authors, and the trials of FedCAC. The page names
missing runs of a sweep with the command that makes them.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import statistics
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from PIL import Image

from corolla import presets
from corolla.experiments import compare, grouping, paper_table, sweep
from corolla.experiments.compare import PaperLine
from corolla.experiments.result_table import setting
from corolla.experiments.runs import RecordedRun
from corolla.experiments.sweep import Point
from corolla.report import all_runs as pictures
from corolla.report.arrays import read_runs
from corolla.report.charts import Panel
from corolla.report.groups import grouped
from fl_app import plugins
from fl_app.tasks import ACCURACY
from strategies import METHOD_PARAMS
from studies import differences, fashion_mnist_table

STUDIES = Path(__file__).resolve().parent
RESULTS, SWEEPS = STUDIES / "results", STUDIES / "sweeps"
DOCS = STUDIES.parent / "docs"
PAGE, SHORT = STUDIES / "results.md", DOCS / "results.md"

# by sweep: the data set that a folder of image files stands for
COLUMNS = {
    "fedobp-fashion-mnist": "fashion-mnist",
    "fedobp-fashion-mnist-drawn": "fashion-mnist",
    "fedobp-cifar10": "cifar10",
    "fedcac-cifar10-cut": "cifar10",
}
# the blocks with a short table per column, and with a row per column
PRINT, SUMMARY = "print", "summary"
CUT = "fedcac-cifar10-cut"
# runs of the cut column's own method, each with one changed setting
TRIED = f"{CUT}-tried"
EARLY = "fashion-mnist-methods"
CITED = ("cited-digits", "cited-fashion-mnist")
LOGS = "fedobp-fashion-mnist-logs"

# rounds between the columns of a table of curves
CURVES = {CUT: 10, TRIED: 20}
PICTURES = {name: DOCS / "images" / f"results-{name}.png" for name in ("fedobp-fashion-mnist", CUT)}

LOGGED = STUDIES / "fedobp_logs.toml"
# methods beside the sweep of the logs: the parts of the logs that they replay
REPLAYED = {
    "replayed:METHOD": "the logs' clients",
    "as_logged:METHOD": "the logs' clients, weights, newcomers",
}
# the method that they replay, by their key `personal`
PERSONAL = {"nothing": "fedavg", "classifier": "fedper"}
# folder of the measurements of studies/as_run.py
AS_RUN = "as-run"

# a figure is far from the published one if it exceeds both: points, and published deviations
FAR_POINTS, FAR_STD = 2.0, 2.0
BLOCK = re.compile(r"(<!-- results/(\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


# Runs -----------------------------------------------------------------------------------------------------------------


def any_made(results: Path) -> bool:
    """Return whether a folder holds finished runs."""
    return any(results.glob("*/summary.json"))


def method_of(line: PaperLine) -> str:
    """Return the name of a row's method."""
    return line.runs[0].config.method


def lines_of(name: str, results: Path) -> list[PaperLine]:
    """Return the collected runs of a sweep beside their published figures, highest published first; an empty list without runs."""
    if not any_made(results):
        return []
    runs, _ = compare.load([results], METHOD_PARAMS)
    lines = []
    for same in compare.group(runs):
        found = compare.beside(same, METHOD_PARAMS, COLUMNS[name])
        if not found:
            raise SystemExit(f"{same[0].path}: no published counterpart")
        lines.append(found[0])
    return sorted(lines, key=lambda line: -line.preset.published.mean if line.preset.published else 0.0)


def points_of(name: str, results: Path) -> list[Point]:
    """Return the runs that a sweep file defines."""
    return sweep.expand(sweep.read_sweep(SWEEPS / f"{name}.toml"), METHOD_PARAMS, results, {}, dict)


def missing(points: Sequence[Point], lines: Sequence[PaperLine]) -> list[str]:
    """Return the runs of a sweep that were not collected, as "method (seeds 0, 1)"."""
    there = {(run.config.method, run.config.seed) for line in lines for run in line.runs}
    seeds: dict[str, list[int]] = {}
    for point in points:
        config = point.parsed
        if (config.method, config.seed) not in there:
            seeds.setdefault(config.method, []).append(config.seed)
    named = []
    for method, numbers in seeds.items():
        word = "seed" if len(numbers) == 1 else "seeds"
        named.append(f"{method} ({word} {', '.join(map(str, numbers))})")
    return named


def is_far(line: PaperLine) -> bool:
    """Return whether our figure is so far from the published one that the page must explain it."""
    published = line.preset.published
    if published is None or line.ours is None:
        return False
    distance = abs(100 * line.ours[0] - published.mean)
    return distance > FAR_POINTS and distance > FAR_STD * (published.std or 0.0)


# Tables ---------------------------------------------------------------------------------------------------------------


def row(cells: Iterable[str]) -> str:
    """Return a table's row in Markdown."""
    return f"| {' | '.join(cells)} |"


def rule(columns: int) -> str:
    """Return the line below a table's header in Markdown."""
    return "|" + "---|" * columns


def print_block(text: str, results: Path) -> str:
    """Return the text between the marks of PRINT: print and ours of every column, under a link to the column's section.

    text: the page. results: the parent of the columns' folders.
    """
    block = [""]
    for name in COLUMNS:
        for column in paper_table.columns(lines_of(name, results / name), paper_table.reasons):
            section = section_of(text, name)
            header, *rows = column.table
            block += [f"**[{section}](#{anchor(section)})**: {column.title}", "", row(header), rule(len(header))]
            block += [*map(row, rows), "", *(f"- {note}" for note in column.notes), ""]
    return "\n".join(block)


def summary_block(text: str, results: Path) -> str:
    """Return the text between the marks of SUMMARY: a row per column, with a link to its section in the long page.

    text: the long page. results: the parent of the columns' folders.
    """
    header = ("column", "rounds, in print", "same method: rows", "ours - print", "another method: rows", "ours - print")
    block = ["", row(header), rule(len(header))]
    for name in COLUMNS:
        for column in paper_table.columns(lines := lines_of(name, results / name), paper_table.reasons):
            section = section_of(text, name)
            same, others = ([r for r in column.table[1:] if r[4].startswith(word)] for word in ("yes", "no"))
            rounds, of = lines[0].runs[0].config.num_server_rounds, lines[0].preset.settings["num-server-rounds"]
            cells = [f"[{section}](../studies/results.md#{anchor(section)})", f"{rounds}, {of}"]
            for found in (same, others):
                differences = sorted((r[3] for r in found), key=float)
                cells += [str(len(found)), f"{differences[0]} to {differences[-1]}" if found else ""]
            block.append(row(cells))
    return "\n".join([*block, ""])


def section_of(text: str, name: str) -> str:
    """Return the heading of the section that has a name's mark."""
    above, _, _ = text.partition(f"<!-- results/{name} -->")
    return str(re.findall(r"^##+ (.+)$", above, re.MULTILINE)[-1])


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def column_table(lines: Sequence[PaperLine]) -> Iterator[str]:
    """Yield the lines of a column's table: every figure that may be the paper's, then seeds, rounds and seconds."""
    header, *rows = paper_table.figures_table(lines)
    yield row(["method", *header[1:], "seeds", "rounds", "s a round"])
    yield rule(len(header) + 3)
    for line, figures in zip(lines, rows, strict=False):
        seconds = [record["seconds"]["round"] for run in line.runs for record in run.rounds.values()]
        name = method_of(line)
        if line.preset.ran:
            name += "†"
        if is_far(line):
            name += "\\*"
        rounds = line.runs[0].config.num_server_rounds
        yield row([name, *figures[1:], str(len(line.runs)), str(rounds), f"{statistics.median(seconds):.1f}"])
    for distances in rows[len(lines) :]:
        yield f"{row(distances)} | | |"


def curves(heading: str, rows: Sequence[tuple[str, Sequence[RecordedRun]]], every: int) -> Iterator[str]:
    """Yield a table of accuracies before / after training, mean over a round's clients, then over seeds.

    heading: of the rows' names. rows: names and runs. every: rounds between two columns, up to a run's last round. The
    last column is the best of all rounds, separately before and after training.
    """
    longest = max(runs[0].config.num_server_rounds for _, runs in rows)
    rounds = range(every, longest + 1, every)
    yield row([heading, *(f"round {t}" for t in rounds), "best"])
    yield rule(len(rounds) + 2)
    for name, runs in rows:
        before, after = curve(runs, "accuracy-before"), curve(runs, "accuracy-after")
        cells = [f"{before[t - 1]:.1f} / {after[t - 1]:.1f}" if t <= len(before) else "" for t in rounds]
        yield row([name, *cells, f"{max(before):.1f} / {max(after):.1f}"])
    yield from ("", "Before / after training, mean over the round's clients.", "")


def curve(runs: Sequence[RecordedRun], figure: str) -> list[float]:
    """Return a figure of each round in per cent, mean over the runs. All runs have the same number of rounds."""
    rounds = range(1, runs[0].config.num_server_rounds + 1)
    return [statistics.mean(100 * run.rounds[t][figure] for run in runs) for t in rounds]


def trials_table(results: Path) -> Iterator[str]:
    """Yield the table of trials. Each changes one setting of the base run, which is in the folder CUT beside theirs."""
    trials, _ = compare.load([results], METHOD_PARAMS)
    column, _ = compare.load([results.parent / CUT], METHOD_PARAMS)
    base = next(run for run in column if run.config.method == trials[0].config.method)
    own = grouping.settings(base.config.resolved)
    rows = [("as above", [base])]
    for trial in trials:
        changed = grouping.differing_values(grouping.settings(trial.config.resolved), own)
        # the number of rounds is not the changed setting
        names = [f"{key} {setting(value)}" for key, value, _ in changed if key != "num-server-rounds"]
        rows.append((", ".join(names), [trial]))
    yield from curves("run", rows, CURVES[TRIED])


def as_run_table(results: Path) -> list[str]:
    """Return the lines of the table of studies/as_run.py's measurements; an empty list without measurements."""
    rows = []
    for path in sorted(results.glob(f"{AS_RUN}/*.json")):
        made = json.loads(path.read_text(encoding="utf-8"))
        published = presets.all_presets()[made["preset"]].published
        figures = []
        for name in ("accuracy", "accuracy-pooled"):
            values = [100 * test[name] for test in made["tests"].values()]
            figures.append(f"{values[-1]:.2f} / {max(values):.2f}")
        method = made["preset"].rpartition("/")[2]
        rows.append(row([method, str(published), *figures, str(made["seed"]), ", ".join(made["tests"])]))
    if not rows:
        return []
    head = ("method, as its code runs it", "published", "before, mean", "before, pooled", "seed", "tests after rounds")
    note = "Made by `python -m studies.as_run`. Its docstring describes the differences."
    return ["", row(head), rule(len(head)), *rows, "", note]


def logs_table(results: Path) -> Iterator[str]:
    """Yield the table of the figures that FedOBP's authors logged, beside ours after the same rounds."""
    head = ["method", "our momentum", "after round", "logged: accuracy, loss", "ours"]
    yield row(head)
    yield row(["---"] * len(head))
    logs = tomllib.loads(LOGGED.read_text(encoding="utf-8"))
    for run in compare.load([results], METHOD_PARAMS)[0]:
        config, rounds = run.config, run.rounds
        replayed = REPLAYED.get(config.method)
        method = PERSONAL[config.params.personal] if replayed else config.method
        about = [f"{method}, {replayed}" if replayed else method, f"{config.momentum:g}"]
        if config.method == "as_logged:METHOD":
            first = 100 * rounds[1]["accuracy-before-pooled"]
            yield row([*about, "1, before", f"{logs['first-round']:.2f}", f"{first:.2f}"])
        for round, accuracy, loss in logs["tests"][method]:
            ours = run.evaluations[round]
            pair = f"{100 * ours['accuracy-pooled']:.2f}, {ours['loss-pooled']:.4f}"
            yield row([*about, str(round), f"{accuracy:.2f}, {loss:.4f}", pair])
        if replayed:
            last = statistics.mean(100 * record["accuracy-before-pooled"] for t, record in rounds.items() if t > 300)
            yield row([*about, "301 to 400", f"{logs['last-100-rounds'][method]:.2f}", f"{last:.2f}"])


# Notes below a table --------------------------------------------------------------------------------------------------


def settings_that_differ(lines: Sequence[PaperLine]) -> Iterator[str]:
    """Yield the settings that differ from the paper's: first those of all methods, then each method's own.

    Settings without a meaning in our runs are left out.
    """
    found = [{(key, mine, theirs) for key, mine, theirs in line.differences if mine is not None} for line in lines]
    common = found[0].intersection(*found)
    differing = [("all" if len(lines) > 1 else method_of(lines[0]), common)]
    differing += [(method_of(line), own - common) for line, own in zip(lines, found, strict=True)]
    for name, settings in differing:
        words = []
        for key, mine, theirs in sorted(settings):
            words.append(f"{key} {setting(mine)} (paper: {setting(theirs)})")
        if words:
            yield f"- {name}, settings that differ: {', '.join(words)}"


def notes(lines: Sequence[PaperLine]) -> Iterator[str]:
    """Yield each note of the presets once. A note that is not about all methods begins with their names."""
    about: dict[str, list[str]] = {}
    for line in lines:
        for note in line.preset.notes:
            about.setdefault(note, []).append(method_of(line))
    for note, methods in about.items():
        yield f"- {note}" if len(methods) == len(lines) else f"- {', '.join(methods)}: {note}"


def accuracy_picture(name: str, results: Path) -> Panel | None:
    """Return `corolla report`'s picture of a column's accuracy over rounds; None if the page has none or no runs exist."""
    if name not in PICTURES or not any_made(results):
        return None
    panels = pictures.accuracy(grouped(read_runs([results])))
    return next((panel for panel in panels if panel.name == ACCURACY.name), None)


def small_png(panel: Panel) -> bytes:
    """Return a picture as a PNG of 64 colours, a quarter of the bytes."""
    out = io.BytesIO()
    Image.open(io.BytesIO(panel.render())).convert("RGB").quantize(64).save(out, "PNG", optimize=True)
    return out.getvalue()


# The page -------------------------------------------------------------------------------------------------------------


def early_table(results: Path) -> Iterable[str]:
    """Return the table of runs at an early stage of training."""
    return fashion_mnist_table.lines([results])


OWN_TABLES: Mapping[str, Callable[[Path], Iterable[str]]] = {
    **dict.fromkeys((EARLY, *CITED), early_table),
    LOGS: logs_table,
    TRIED: trials_table,
}


def own_block(name: str, results: Path) -> str:
    """Return the text between the marks of a table of OWN_TABLES."""
    # for the methods of REPLAYED
    plugins.reset(SWEEPS)
    made, asked = len(list(results.glob("*/summary.json"))), len(points_of(name, results))
    text = ["", *(OWN_TABLES[name](results) if made else []), ""]
    if made < asked:
        text += [f"{asked - made} of {asked} runs are not made yet.", ""]
    return "\n".join(text)


def column_block(name: str, results: Path) -> str:
    """Return the text between the marks of a column of COLUMNS."""
    points, lines = points_of(name, results), lines_of(name, results)
    command = f"`corolla sweep studies/sweeps/{name}.toml --in-process"
    after = f"then `corolla runs runs/{name} --collect studies/results/{name}` and `make docs`"
    text = ["", *(made_block(name, results, lines) if lines else [])]
    left = missing(points, lines)
    if left and lines:
        text.append(
            f"Not run yet: {', '.join(left)}. {command} --only RUN` makes one (`--dry-run` lists them), {after}."
        )
        text.append("")
    elif left:
        text += [f"None of its {len(points)} runs has been made yet: {command}`, {after}.", ""]
    return "\n".join(text)


def made_block(name: str, results: Path, lines: Sequence[PaperLine]) -> Iterator[str]:
    """Yield a column's tables, its picture and its notes."""
    yield from column_table(lines)
    caption = paper_table.CAPTION
    yield from ("", f"{caption[0].upper()}{caption[1:]}. Seconds: median over the rounds.", "")
    if any(line.preset.ran for line in lines):
        yield from ("†: the paper's row is of another method than its name ([why](#rows-of-other-methods)).", "")
    if any(is_far(line) for line in lines):
        how = f"more than {FAR_STD:g} published deviations and {FAR_POINTS:g} points away"
        yield from (f"\\*: `{lines[0].preset.metric}` is {how}.", "")
    if name in CURVES:
        yield from curves("method", [(method_of(line), line.runs) for line in lines], CURVES[name])
    if panel := accuracy_picture(name, results):
        yield from (
            f"![{panel.title}, {len(lines)} methods](../docs/images/{PICTURES[name].name})",
            "",
            panel.caption,
            "",
        )
    if len(lines) > 1:
        yield from differences.differences_table(lines)
    yield from settings_that_differ(lines)
    yield from notes(lines)
    yield from as_run_table(results)
    yield ""


def block(name: str, results: Path) -> str:
    """Return the text between the marks of a name."""
    return own_block(name, results) if name in OWN_TABLES else column_block(name, results)


def page(text: str, results: Path, long: str = "") -> str:
    """Return a page with new blocks. long: the text of the page with the sections, where it is another one."""

    def made(found: re.Match[str]) -> str:
        start, name, end = found.groups()
        over_all = {PRINT: print_block, SUMMARY: summary_block}.get(name)
        return start + (over_all(long or text, results) if over_all else block(name, results / name)) + end

    return BLOCK.sub(made, text)


def main() -> None:
    """Rewrite both pages and the pictures, or print one column's tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=(PRINT, *COLUMNS, *OWN_TABLES))
    text = PAGE.read_text(encoding="utf-8")
    if name := parser.parse_args().name:
        print(print_block(text, RESULTS) if name == PRINT else block(name, RESULTS / name))
        return
    for path in (PAGE, SHORT):
        old = path.read_text(encoding="utf-8")
        if (new := page(old, RESULTS, text)) != old:
            path.write_text(new, encoding="utf-8")
    for name, path in PICTURES.items():
        if panel := accuracy_picture(name, RESULTS / name):
            path.write_bytes(small_png(panel))


if __name__ == "__main__":
    main()
