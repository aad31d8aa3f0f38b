"""The report's tables and sentences: results, settings, warnings, failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from corolla.experiments.table import COSTS, UNSEEN, Mean, size
from corolla.report.arrays import ReportedRun
from corolla.report.figures import styled
from corolla.report.groups import DATA_KEYS, KEY_SETTINGS, Group, differing, given_name, short
from fl_app.errors import plain
from fl_app.keys import show
from fl_app.metrics import DIGEST_VERSION, Metric

# so many settings that differ have a place in the table of results
BRIEF = 2
SHOWN_FAILURES = 20
HEADINGS = ("final", "pooled", "fine-tuned", *UNSEEN, "best", "best, pooled")  # of the table of results

# A group's rows: its own first, then those of its runs if it has several.
Rows = Sequence[Sequence["Cell"]]


@dataclass(frozen=True)
class Cell:
    """A cell of a table: ready HTML, and what it is sorted by."""

    html: str
    value: float | str | None = None


# Sentences ------------------------------------------------------------------------------------------------------------


def settings_sentence(runs: Sequence[ReportedRun]) -> str:
    """Return the key settings that all runs have in common."""
    parts = {
        name: values.pop()
        for name in KEY_SETTINGS
        if name != "dirichlet-alpha" and len(values := {run.setting(name) for run in runs}) == 1
    }
    words = [f"{escape(name)} <b>{escape(value)}</b>" for name, value in parts.items()]
    return f"<p>{'All runs: ' if len(runs) > 1 else ''}{', '.join(words)}.</p>" if words else ""


def warnings(runs: Sequence[ReportedRun]) -> str:
    """Say what is not as a reader would expect: unfinished runs, unreadable records, failures, unequal conditions."""
    lines = []
    for run in runs:
        name = f"<b>{escape(short(run.label))}</b> (<code>{escape(run.path.name)}</code>)"
        last = max(run.rounds, default=0)
        if not run.finished:
            state = f"the last recorded round is {last} of {run.planned}" if last else "no round is recorded"
            lines.append(
                f"{name} is not finished: {state}. It was interrupted or is still running; shown is what there is."
            )
        if run.missing:
            rounds = ", ".join(map(str, run.missing))
            lines.append(
                f"{name}: metrics.jsonl has no readable record of round {rounds}; sums of bytes, seconds and failures lack it."
            )
        if run.coverage_note:
            lines.append(
                f"{name}: the final figures are of {run.coverage_note}: the others were away or failed in the last evaluation. "
                "They do not compare with figures of all clients."
            )
        if run.failures:
            lines.append(f"{name}: {len(run.failures)} times a client's reply was missing or unusable; see below.")
        if far := run.far:
            clients = ", ".join(map(str, sorted({outlier["client"] for _, outlier in far})))
            lines.append(
                f"{name}: {len(far)} uploads were used though they lay far from the others' (max-update-norm = 0), of clients "
                f"{escape(plain(clients))}."
            )
    data = [key for key in differing(runs) if key in DATA_KEYS]
    if data:
        keys = escape(", ".join(data))
        lines.append(f"The runs do not have the same data ({keys}): their accuracies do not compare directly.")
    return f'<div class="warn">{"".join(f"<p>{line}</p>" for line in lines)}</div>' if lines else ""


def failure_list(run: ReportedRun) -> str:
    """Return the run's failures, the first ones."""
    failures = run.failures
    if not failures:
        return ""
    items = [
        f"<li>round {t}: client {escape(plain(str(f.get('client'))))}: {escape(plain(str(f.get('cause'))))}</li>"
        for t, f in failures[:SHOWN_FAILURES]
    ]
    more = (
        f"<p>… and {len(failures) - SHOWN_FAILURES} more in metrics.jsonl</p>" if len(failures) > SHOWN_FAILURES else ""
    )
    return f'<h3 id="failures-{run.number}">Failures</h3><ul>{"".join(items)}</ul>{more}'


# Results --------------------------------------------------------------------------------------------------------------


def results_table(groups: Sequence[Group]) -> str:
    """Return the table of results: a row per group, which opens to those of its runs."""
    metrics = list(dict.fromkeys(group.first.headline for group in groups))
    known = {heading for group in groups for heading in group.row.means}
    headings = [h for h in HEADINGS if h in known or h not in ("fine-tuned", *UNSEEN)]
    unit = " (%)" if metrics[0].ratio and len(metrics) == 1 else ""
    brief = 0 < len({key for group in groups for key in group.settings}) <= BRIEF
    seeds = any(len(group.runs) > 1 for group in groups)
    head = [
        "run",
        "method",
        *["settings that differ"] * brief,
        *["n seeds"] * seeds,
        *(f"n {heading}{unit}" for heading in headings),
        *(f"n {heading}" for heading in COSTS),
        "n rounds",
        "n failures",
        "digest",
    ]
    rows = [_group_rows(groups, group, headings, brief, seeds) for group in groups]
    everybody = "all clients"
    if any(run.has_unseen for group in groups for run in group.runs):
        everybody += " that train (unseen: over those that never do)"
    text = (
        f"{_headings(metrics)} on test data. final: mean over {everybody}, each on its own test data, after the last round; "
        "pooled: over all samples; best: best mean over rounds, before local training, so it can be below final. upload, "
        "download: all clients together. digest: its first 8 digits; equal digests mean the same final models, bit for bit."
    )
    if any(run.finished and run.outcome["digest-version"] == 1 for group in groups for run in group.runs):
        text += " Digests of version 1 leave BatchNorm statistics out, and are not comparable with others."
    if seeds:
        text += " Runs that differ in the seed alone are one row, mean ± sample standard deviation; bytes and seconds are means."
    return f'<h2 id="results"><a href="#results">Results</a></h2>{sortable_table(head, rows)}<p>{text}</p>'


def _headings(metrics: Sequence[Metric]) -> str:
    names = [metric.title[:1].upper() + metric.title[1:] for metric in metrics]
    return f"{', '.join(names)}{' (ratios in per cent)' if len(metrics) > 1 else ''}"


def _group_rows(groups: Sequence[Group], group: Group, headings: Sequence[str], brief: bool, seeds: bool) -> Rows:
    settings = ", ".join(f"{key} = {show(value)}" for key, value in group.settings.items())
    number = f"{group.number} " if len(groups) > 1 else ""
    name = group.first.path.name if len(group.runs) == 1 else group.name or group.method
    opener = f' <button type="button" class="open" aria-expanded="false">{len(group.runs)} runs</button>'
    own = [
        Cell(f"{swatch(groups, group)}{number}{escape(name)}{opener if len(group.runs) > 1 else ''}", group.number),
        Cell(escape(group.method), group.method),
        *[Cell(escape(settings) or "–", settings)] * brief,
        *[Cell(str(len(group.runs)), len(group.runs))] * seeds,
    ]
    rows = [[*own, *_outcome_cells(group, headings)]]
    for run in group.runs if len(group.runs) > 1 else ():
        seed = f"seed {show(run.settings.get('seed', '?'))}"
        start = [
            Cell(f"{run.number} {escape(run.path.name)}"),
            Cell(escape(seed)),
            *[Cell("")] * brief,
            *[Cell("")] * seeds,
        ]
        rows.append([*start, *_outcome_cells(Group((run,)), headings)])
    return rows


def _outcome_cells(group: Group, headings: Sequence[str]) -> list[Cell]:
    run, several, means = group.first, len(group.runs) > 1, group.row.means
    last = run.last_evaluation
    note = f'<br><span class="mark">round {last[0]}</span>' if last and not run.finished else ""
    digest = str((run.outcome["digest"] if run.finished and not several else None) or "")
    version = run.outcome["digest-version"]
    mark = f" (version {version})" if digest and version != DIGEST_VERSION else ""
    rounds = Cell(str(len(run.rounds)), len(run.rounds))
    if not run.finished:
        rounds = Cell(
            f'<span class="mark" title="not finished">{len(run.rounds)} of {run.planned}</span>', len(run.rounds)
        )
    cells = []
    for heading in headings:
        of_evaluation = not heading.startswith("best")
        cells.append(_mean_cell(means.get(heading), run.headline.text, note if of_evaluation else ""))
    for heading in COSTS:
        text = seconds_text if heading == "seconds" else size
        cells.append(_mean_cell(means.get(heading), text, spread=False))
    failures = sum(len(r.failures) for r in group.runs)
    code = "" if several else f'<code title="{escape(digest)}">{escape(digest[:8]) or "–"}</code>{mark}'
    return [*cells, rounds, Cell(str(failures), failures), Cell(code, digest)]


def seconds_text(value: float) -> str:
    """Format seconds."""
    return f"{value:.1f}"


def _mean_cell(found: Mean | None, text: Callable[[float], str], note: str = "", spread: bool = True) -> Cell:
    if found is None:
        return Cell("–" + note)
    mean, std = found
    deviation = f'<span class="std">± {text(std)}</span>' if spread and std is not None else ""
    return Cell(text(mean) + deviation + note, mean)


def settings_table(groups: Sequence[Group]) -> str:
    """Return the keys in which the groups differ, if they are too many for the table of results."""
    keys = list(dict.fromkeys(key for group in groups for key in group.settings))
    if len(keys) <= BRIEF:
        return ""
    rows = []
    for group in groups:
        name = group.name or group.method if len(group.runs) > 1 else given_name(group.first) or group.method
        cells = [Cell(f"{swatch(groups, group)}{group.number} {escape(name)}", group.number)]
        for key in keys:
            value = group.settings.get(key)
            cells.append(Cell("–") if value is None else Cell(escape(show(value)), show(value)))
        rows.append([cells])
    title = '<h2 id="settings"><a href="#settings">Settings in which the runs differ</a></h2>'
    return f"{title}{sortable_table(['run', *keys], rows)}"


def sortable_table(head: Sequence[str], groups: Sequence[Rows]) -> str:
    """Return a table that can be sorted. head: names of the columns, those of numbers after "n "."""
    kinds = ["n" if name.startswith("n ") else "name" if k == 0 else "" for k, name in enumerate(head)]
    top = "".join(
        f'<th class="{kind}"><button type="button">{escape(name.removeprefix("n "))}</button></th>'
        for kind, name in zip(kinds, head, strict=True)
    )
    bodies = []
    for rows in groups:
        lines = [_row(kinds, row, "single" if k else "") for k, row in enumerate(rows)]
        bodies.append("<tbody>" + "\n".join(lines) + "</tbody>")
    body = "\n".join(bodies)
    return f'<div class="scroll"><table class="sortable"><thead><tr>{top}</tr></thead>\n{body}</table></div>'


def _row(kinds: Sequence[str], row: Sequence[Cell], kind: str) -> str:
    cells = []
    for name, cell in zip(kinds, row, strict=True):
        value = "" if cell.value is None else f' data-value="{escape(str(cell.value))}"'
        cells.append(f'<td class="{name}"{value}>{cell.html}</td>')
    return f'<tr class="{kind}">' + "".join(cells) + "</tr>"


def swatch(groups: Sequence[Group], group: Group) -> str:
    """Return the group's colour in the pictures."""
    if len(groups) < 2:
        return ""
    look = styled(groups)[group.number]
    return f'<span class="swatch" style="--light:{look.on(dark=False)};--dark:{look.on(dark=True)}"></span>'
