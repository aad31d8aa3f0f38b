"""Writes the tables and pictures of docs/results.md, between its marks, from the runs in results/ (`make docs`).

python -m benchmarks.results_page [NAME]    # with a NAME, of a folder in results/: print its tables, write nothing

A column of a paper's table is a sweep file, sweeps/NAME.toml, and what was collected of its runs, results/NAME; tables of their own
have the early stage of training and the logs of FedOBP's authors. What of a sweep is not there is named, with the command that runs
it.
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

from benchmarks import differences, fashion_mnist_table
from corolla import presets
from corolla.experiments import compare, grouping, paper_metrics, sweep
from corolla.experiments.compare import Line
from corolla.experiments.runs import RecordedRun
from corolla.experiments.sweep import Point
from corolla.experiments.table import setting
from corolla.report import accuracy as pictures
from corolla.report.arrays import read_runs
from corolla.report.figures import Panel
from corolla.report.groups import grouped
from fl_app import plugins
from fl_app.tasks import ACCURACY
from strategies import METHOD_PARAMS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results.md"
COLUMNS = {  # by sweep, and what a data set of image files counts as
    "fedobp-fashion-mnist": "fashion-mnist",
    "fedobp-fashion-mnist-drawn": "fashion-mnist",
    "fedobp-cifar10": "cifar10",
    "fedcac-cifar10-cut": "cifar10",
}
CUT = "fedcac-cifar10-cut"
TRIED = f"{CUT}-tried"  # the run of the column's own method, with one thing changed
CURVES = {CUT: 10, TRIED: 20}  # curves beside each other, and every how many rounds
PICTURES = {
    name: ROOT / "docs" / "images" / f"results-{name}.png" for name in ("fedobp-fashion-mnist", "fedcac-cifar10-cut")
}
EARLY = "fashion-mnist-methods"
LOGS = "fedobp-fashion-mnist-logs"
LOGGED = ROOT / "benchmarks" / "fedobp_logs.toml"
REPLAYED = {  # methods of the user's own, beside the sweep: what of the logs they have
    "replayed:METHOD": "the logs' clients",
    "as_logged:METHOD": "the logs' clients, weights, newcomers",
}
PERSONAL = {"nothing": "fedavg", "classifier": "fedper"}  # their key `personal`: which method that is
AS_RUN = "as-run"  # folder of a column's rows by benchmarks/as_run.py
FAR_POINTS, FAR_STD = 2.0, 2.0  # a figure is far from the published one if it is by more than both
_BLOCK = re.compile(r"(<!-- results/(\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def far(line: Line) -> bool:
    """Tell whether our figure is so far from the published one that the page must say why."""
    published = line.preset.published
    if published is None or line.ours is None:
        return False
    away = abs(100 * line.ours[0] - published.mean)
    return away > FAR_POINTS and away > FAR_STD * (published.std or 0.0)


def lines_of(name: str, results: Path) -> list[Line]:
    """Return the collected runs of a sweep beside their published figures, highest published first; none if there are none."""
    if not any(results.glob("*/summary.json")):
        return []
    groups = compare.group(compare.load([results], METHOD_PARAMS)[0])
    lines = []
    for runs in groups:
        found = compare.beside(runs, METHOD_PARAMS, COLUMNS[name])
        if not found:
            raise SystemExit(f"{runs[0].path}: no published counterpart")
        lines += found[:1]
    return sorted(lines, key=lambda line: -line.preset.published.mean if line.preset.published else 0.0)


def missing(points: Sequence[Point], lines: Sequence[Line]) -> list[str]:
    """Name the runs of a sweep that were not collected."""
    there = {(run.config.method, run.config.seed) for line in lines for run in line.runs}
    seeds: dict[str, list[int]] = {}
    for config in (point.parsed for point in points):
        if (config.method, config.seed) not in there:
            seeds.setdefault(config.method, []).append(config.seed)
    return [
        f"{method} ({'seed' if len(of) == 1 else 'seeds'} {', '.join(map(str, of))})" for method, of in seeds.items()
    ]


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the lines of a column's table: the candidates, then what they cost."""
    header, *rows = paper_metrics.figures_table(lines)
    away = rows[len(lines) :]
    yield f"| method | {' | '.join(header[1:])} | seeds | rounds | s a round |"
    yield "|" + "---|" * (len(header) + 3)
    for line, row in zip(lines, rows, strict=False):
        seconds = [r["seconds"]["round"] for run in line.runs for r in run.rounds.values()]
        config = line.runs[0].config
        name = config.method + "†" * bool(line.preset.ran) + "\\*" * far(line)
        cells = [name, *row[1:], str(len(line.runs)), str(config.num_server_rounds)]
        yield f"| {' | '.join(cells)} | {statistics.median(seconds):.1f} |"
    for row in away:
        yield f"| {' | '.join(row)} | | | |"


def curves(what: str, rows: Sequence[tuple[str, Sequence[RecordedRun]]], every: int) -> Iterator[str]:
    """Yield a table of accuracies before / after training, mean over a round's clients, then over seeds.

    what: heads the rows' names; rows: names and runs; every how many rounds, up to a run's last. best: of all its rounds, before
    and after each its own.
    """
    ends = [runs[0].config.num_server_rounds for _, runs in rows]
    rounds = range(every, max(ends) + 1, every)
    yield from (f"| {what} | {' | '.join(f'round {t}' for t in rounds)} | best |", "|---" * (len(rounds) + 2) + "|")
    for (name, runs), end in zip(rows, ends, strict=True):
        means = [
            [statistics.mean(100 * run.rounds[t][f"accuracy-{when}"] for run in runs) for t in range(1, end + 1)]
            for when in ("before", "after")
        ]
        shown = [*([of[t - 1] for of in means] for t in rounds if t <= end), [max(of) for of in means]]
        *cells, best = (f"{before:.1f} / {after:.1f}" for before, after in shown)
        yield f"| {' | '.join([name, *cells, *[''] * (len(rounds) - len(cells)), best])} |"
    yield from ("", "Before / after training, mean over the round's clients.", "")


def tried(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the table of runs in some folders beside the run that each of them has one thing different from."""
    runs = compare.load(paths, METHOD_PARAMS)[0]
    column = [path.parent / CUT for path in paths]
    base = next(run for run in compare.load(column, METHOD_PARAMS)[0] if run.config.method == runs[0].config.method)
    rows = [("as above", [base])]
    for run in runs:
        pair = (grouping.settings(one.config.resolved) for one in (run, base))
        changed = [d for d in compare.differences(*pair) if d[0] != "num-server-rounds"]
        rows.append((", ".join(f"{key} {setting(mine)}" for key, mine, _ in changed), [run]))
    yield from curves("run", rows, CURVES[TRIED])


def over_rounds(name: str, results: Path) -> Panel | None:
    """Return `corolla report`'s picture of a column's accuracy over rounds, if the page has one and runs are there."""
    if name not in PICTURES or not any(results.glob("*/summary.json")):
        return None
    return next(
        (panel for panel in pictures.accuracy(grouped(read_runs([results]))) if panel.name == ACCURACY.name), None
    )


def small(panel: Panel) -> bytes:
    """Return a picture as a PNG of few colours, a quarter of the bytes."""
    out = io.BytesIO()
    Image.open(io.BytesIO(panel.render())).convert("RGB").quantize(64).save(out, "PNG", optimize=True)
    return out.getvalue()


def as_run(results: Path) -> list[str]:
    """Return the lines of the table of benchmarks/as_run.py's rows, none if there are none."""
    rows = []
    for path in sorted(results.glob(f"{AS_RUN}/*.json")):
        row = json.loads(path.read_text(encoding="utf-8"))
        published = presets.all_presets()[row["preset"]].published
        tests = list(row["tests"].values())
        pairs = ([100 * test[name] for test in tests] for name in ("accuracy", "accuracy-pooled"))
        figures = (f"{values[-1]:.2f} / {max(values):.2f}" for values in pairs)
        cells = [row["preset"].rpartition("/")[2], str(published), *figures, str(row["seed"]), ", ".join(row["tests"])]
        rows.append(f"| {' | '.join(cells)} |")
    if not rows:
        return []
    head = "| method, as its code runs it | published | before, mean | before, pooled | seed | tests after rounds |"
    made = "Made by `python -m benchmarks.as_run`, which says what sets them apart."
    return ["", head, "|---" * 6 + "|", *rows, "", made]


def beside_the_logs(paths: Sequence[Path]) -> list[str]:
    """Return the lines of the table of what FedOBP's authors logged and what our runs in some folders have."""
    logs = tomllib.loads(LOGGED.read_text(encoding="utf-8"))
    rows = []
    for run in compare.load(paths, METHOD_PARAMS)[0]:
        config, rounds = run.config, run.rounds
        replayed = REPLAYED.get(config.method)
        name = PERSONAL[config.params.personal] if replayed else config.method
        who = [f"{name}, {replayed}" if replayed else name, f"{config.momentum:g}"]
        if config.method == "as_logged:METHOD":
            first = f"{100 * rounds[1]['accuracy-before-pooled']:.2f}"
            rows.append([*who, "1, before", f"{logs['first-round']:.2f}", first])
        for round, accuracy, loss in logs["tests"][name]:
            ours = run.evaluations[round]
            pair = f"{100 * ours['accuracy-pooled']:.2f}, {ours['loss-pooled']:.4f}"
            rows.append([*who, str(round), f"{accuracy:.2f}, {loss:.4f}", pair])
        if replayed:
            last = statistics.mean(100 * record["accuracy-before-pooled"] for t, record in rounds.items() if t > 300)
            rows.append([*who, "301 to 400", f"{logs['last-100-rounds'][name]:.2f}", f"{last:.2f}"])
    head = ["method", "our momentum", "after round", "logged: accuracy, loss", "ours"]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def own_table(name: str, results: Path) -> str:
    """Return what stands between the marks of a table of its own, of the early stage or the logs."""
    plugins.look_in(ROOT / "sweeps")  # the methods of REPLAYED
    there = len(list(results.glob("*/summary.json")))
    points = sweep.expand(sweep.read_sweep(ROOT / "sweeps" / f"{name}.toml"), METHOD_PARAMS, results, {}, dict)
    text = ["", *(OWN_TABLES[name]([results]) if there else []), ""]
    if left := len(points) - there:
        text += [f"{left} of {len(points)} runs are not made yet.", ""]
    return "\n".join(text)


OWN_TABLES: Mapping[str, Callable[[Sequence[Path]], Iterable[str]]] = {
    EARLY: fashion_mnist_table.lines,
    LOGS: beside_the_logs,
    TRIED: tried,
}


def settings_that_differ(lines: Sequence[Line]) -> Iterator[str]:
    """Yield what differs from the paper's settings, what does of all methods first; not what has no meaning in our runs."""
    found = [{(key, mine, theirs) for key, mine, theirs in line.differences if mine is not None} for line in lines]
    common = found[0].intersection(*found)
    of_whom = [("all" if len(lines) > 1 else lines[0].runs[0].config.method, common)]
    of_whom += [(line.runs[0].config.method, its - common) for line, its in zip(lines, found, strict=True)]
    for whose, keys in of_whom:
        if keys:
            pairs = (f"{key} {setting(mine)} (paper: {setting(theirs)})" for key, mine, theirs in sorted(keys))
            yield f"- {whose}, settings that differ: {', '.join(pairs)}"


def notes(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the presets' notes, each once, after the methods it is about if it is not about all of them."""
    about: dict[str, list[str]] = {}
    for line in lines:
        for note in line.preset.notes:
            about.setdefault(note, []).append(line.runs[0].config.method)
    for note, methods in about.items():
        yield f"- {note}" if len(methods) == len(lines) else f"- {', '.join(methods)}: {note}"


def block(name: str, results: Path) -> str:
    """Return what stands between a column's marks."""
    if name in OWN_TABLES:
        return own_table(name, results)
    points = sweep.expand(sweep.read_sweep(ROOT / "sweeps" / f"{name}.toml"), METHOD_PARAMS, results, {}, dict)
    lines = lines_of(name, results)
    command = f"`corolla sweep sweeps/{name}.toml --in-process"
    after = f"then `corolla runs runs/{name} --collect results/{name}` and `make docs`"
    left = missing(points, lines)
    text = [""]
    if lines:
        text += [
            *table(lines),
            "",
            f"{paper_metrics.CAPTION[0].upper()}{paper_metrics.CAPTION[1:]}. Seconds: the median round's.",
            "",
        ]
        if any(line.preset.ran for line in lines):
            text += ["†: the paper's row is of another method than it says ([why](#rows-of-other-methods)).", ""]
        if any(far(line) for line in lines):
            how = f"more than {FAR_STD:g} published deviations and {FAR_POINTS:g} points away"
            text += [f"\\*: `{lines[0].preset.metric}` is {how}.", ""]
        if name in CURVES:
            text += curves("method", [(line.runs[0].config.method, line.runs) for line in lines], CURVES[name])
        if panel := over_rounds(name, results):
            text += [f"![{panel.title}, {len(lines)} methods](images/{PICTURES[name].name})", "", panel.caption, ""]
        text += [*differences.table(lines)] if len(lines) > 1 else []
        text += settings_that_differ(lines)
        text += [*notes(lines), *as_run(results), ""]
    if left and lines:
        text += [
            f"Not run yet: {', '.join(left)}. {command} --only RUN` makes one (`--dry-run` lists them), {after}.",
            "",
        ]
    elif left:
        text += [f"None of its {len(points)} runs has been made yet: {command}`, {after}.", ""]
    return "\n".join(text)


def page(text: str, results: Path) -> str:
    """Return the page with its blocks made anew."""
    return _BLOCK.sub(lambda found: f"{found[1]}{block(found[2], results / found[2])}{found[3]}", text)


def main() -> None:
    """Rewrite docs/results.md and its pictures, or print one column's tables."""
    text, results = PAGE.read_text(encoding="utf-8"), ROOT / "results"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=(*COLUMNS, *OWN_TABLES))
    if name := parser.parse_args().name:
        print(block(name, results / name))
        return
    if (new := page(text, results)) != text:
        PAGE.write_text(new, encoding="utf-8")
    for name, path in PICTURES.items():
        if panel := over_rounds(name, results / name):
            path.write_bytes(small(panel))


if __name__ == "__main__":
    main()
