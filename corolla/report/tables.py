"""The report's tables and sentences: results, settings, warnings, failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from corolla.experiments import significance
from corolla.experiments.result_table import COSTS, OF_GLOBAL, UNSEEN, Mean, chosen, undefined_notes
from corolla.report.arrays import ReportedRun
from corolla.report.groups import DATA_KEYS, KEY_SETTINGS, Group, differing, given_name, short
from corolla.report.theme import looks
from fl_app.errors import counted, plain, size
from fl_app.keys import show
from fl_app.metrics import DIGEST_VERSION, SENT_DIGEST_VERSION, Metric

# most differing settings that the table of results shows
BRIEF = 2
SHOWN_FAILURES = 20
SHOWN_CLIENTS = 20
# headings of the table of results
HEADINGS = ("final", "validation", "pooled", "fine-tuned", *OF_GLOBAL, *UNSEEN, "best", "best, pooled")

# a group's rows: its own first, then those of its runs if it has several
Rows = Sequence[Sequence["Cell"]]


@dataclass(frozen=True)
class Cell:
    """A cell of a table: ready HTML, and its value for sorting."""

    html: str
    value: float | str | None = None


# Sentences ------------------------------------------------------------------------------------------------------------


def settings_sentence(runs: Sequence[ReportedRun]) -> str:
    """Return a sentence with the key settings that all runs share."""
    parts = {
        name: values.pop()
        for name in KEY_SETTINGS
        if name != "dirichlet-alpha" and len(values := {run.setting(name) for run in runs}) == 1
    }
    words = [f"{escape(name)} <b>{escape(value)}</b>" for name, value in parts.items()]
    return f"<p>{'All runs: ' if len(runs) > 1 else ''}{', '.join(words)}.</p>" if words else ""


def warnings(runs: Sequence[ReportedRun]) -> str:
    """Return warnings about unfinished runs, unreadable records, failures, and unequal conditions."""
    lines = []
    for run in runs:
        name = f"<b>{escape(short(run.label))}</b> (<code>{escape(run.path.name)}</code>)"
        last = max(run.rounds, default=0)
        if not run.finished:
            state = f"the last recorded round is {last} of {run.planned}" if last else "no round is recorded"
            lines.append(
                f"{name} is not finished: {state}. It was interrupted or is still running. This page shows the rounds recorded "
                "so far."
            )
        if run.missing:
            rounds = ", ".join(map(str, run.missing))
            lines.append(
                f"{name}: metrics.jsonl has no readable record of round {rounds}; sums of bytes, seconds and failures leave it out."
            )
        if run.coverage_note:
            lines.append(
                f"{name}: the final figures cover {run.coverage_note}; the others were away or failed in the last evaluation. "
                "Do not compare them with figures of all clients."
            )
        if run.failures:
            lines.append(f"{name}: {len(run.failures)} times a client's reply was missing or unusable; see below.")
        if far := run.far:
            senders = sorted({outlier["client"] for _, outlier in far})
            clients = ", ".join(map(run.client_name, senders[:SHOWN_CLIENTS]))
            clients += f" and {len(senders) - SHOWN_CLIENTS} more" if len(senders) > SHOWN_CLIENTS else ""
            lines.append(
                f"{name}: far uploads were used (max-update-norm = 0): {counted(len(far), 'upload')} of "
                f"{'client' if len(senders) == 1 else 'clients'} {escape(clients)}."
            )
    data = [key for key in differing(runs) if key in DATA_KEYS]
    if data:
        keys = escape(", ".join(data))
        lines.append(f"The runs have different data ({keys}): do not compare their accuracies directly.")
    return f'<div class="warn">{"".join(f"<p>{line}</p>" for line in lines)}</div>' if lines else ""


def failure_list(run: ReportedRun) -> str:
    """Return the first of the run's failures."""
    failures = run.failures
    if not failures:
        return ""
    items = [
        f"<li>round {t}: client {escape(run.client_name(str(f.get('client'))))}: {escape(plain(str(f.get('cause'))))}</li>"
        for t, f in failures[:SHOWN_FAILURES]
    ]
    more = (
        f"<p>… and {len(failures) - SHOWN_FAILURES} more in metrics.jsonl</p>" if len(failures) > SHOWN_FAILURES else ""
    )
    return f'<h3 id="failures-{run.number}">Failures</h3><ul>{"".join(items)}</ul>{more}'


# Results --------------------------------------------------------------------------------------------------------------


def results_table(groups: Sequence[Group]) -> str:
    """Return the table of results: one row per group, which unfolds into the rows of its runs."""
    metrics = list(dict.fromkeys(group.first.headline for group in groups))
    known = {heading for group in groups for heading in group.row.means}
    headings = [h for h in HEADINGS if h in known or h not in ("validation", "fine-tuned", *OF_GLOBAL, *UNSEEN)]
    others = columns_of_others(groups)
    unit = " (%)" if metrics[0].ratio and len(metrics) == 1 else ""
    brief = 0 < len({key for group in groups for key in group.settings}) <= BRIEF
    seeds = any(len(group.runs) > 1 for group in groups)
    head = [
        "run",
        "method",
        *["settings that differ"] * brief,
        *["n seeds"] * seeds,
        *(f"n {heading}{unit}" for heading in headings),
        *(f"n {name}{' (%)' if metric.ratio else ''}" for name, metric in others.items()),
        *(f"n {heading}" for heading in COSTS),
        "n rounds",
        "n failures",
        "digest",
    ]
    rows = [_group_rows(groups, group, headings, others, brief, seeds) for group in groups]
    everybody = "all clients"
    if any(run.has_unseen for group in groups for run in group.runs):
        everybody += " that train (unseen: over those that never do)"
    text = (
        f"{_headings(metrics)} on test data. final: mean over {everybody}, each on its own test data, after the last round; "
        "pooled: over all samples; best: best mean over a round's clients, before local training, so it can be below final, "
        f"{chosen([run for group in groups for run in group.runs])}. upload, "
        "download: all clients together. digest: its first 8 digits; equal digests mean the same final models, bit for bit."
    )
    if "global" in headings:
        text += " global: the global model in place of the clients' personal ones, after the last round."
    text += "".join(f" {escape(note)}." for note in undefined_notes(run for group in groups for run in group.runs))
    if any(run.finished and run.outcome["digest-version"] == 1 for group in groups for run in group.runs):
        text += " Digests of version 1 do not cover BatchNorm statistics, and are not comparable with others."
    if any(
        run.finished and run.outcome["digest-version"] == SENT_DIGEST_VERSION for group in groups for run in group.runs
    ):
        text += " Digests of version 3 are of the models that the server sent: clients hide the hashes of theirs."
    if seeds:
        text += " Runs that differ only in the seed share a row: mean ± sample standard deviation; bytes and seconds are means."
    return f'<h2 id="results"><a href="#results">Results</a></h2>{sortable_table(head, rows)}<p>{text}</p>'


def _headings(metrics: Sequence[Metric]) -> str:
    names = [metric.title[:1].upper() + metric.title[1:] for metric in metrics]
    return f"{', '.join(names)}{' (ratios in per cent)' if len(metrics) > 1 else ''}"


def columns_of_others(groups: Sequence[Group]) -> dict[str, Metric]:
    """Return the figures, in any group, of metrics other than the headline, by their names in summary.json."""
    found: dict[str, Metric] = {}
    for row in (group.row for group in groups):
        for name, metric in row.names.items():
            if metric != row.headline and name in row.of_others:
                found[name] = metric
    return found


def _group_rows(
    groups: Sequence[Group],
    group: Group,
    headings: Sequence[str],
    others: Mapping[str, Metric],
    brief: bool,
    seeds: bool,
) -> Rows:
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
    rows = [[*own, *_outcome_cells(group, headings, others)]]
    for run in group.runs if len(group.runs) > 1 else ():
        seed = f"seed {show(run.settings.get('seed', '?'))}"
        start = [
            Cell(f"{run.number} {escape(run.path.name)}"),
            Cell(escape(seed)),
            *[Cell("")] * brief,
            *[Cell("")] * seeds,
        ]
        rows.append([*start, *_outcome_cells(Group((run,)), headings, others)])
    return rows


def _outcome_cells(group: Group, headings: Sequence[str], others: Mapping[str, Metric]) -> list[Cell]:
    row = group.row
    run, several, means = group.first, len(group.runs) > 1, row.means
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
    for name, metric in others.items():
        of_clients = row.covered_note(metric) if name in row.of_others and name.startswith("final-") else ""
        mark = f'<br><span class="mark">{of_clients}</span>' if of_clients else ""
        cells.append(_mean_cell(row.of_others.get(name), metric.text, note + mark))
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
    """Return the table of keys in which the groups differ; empty if the table of results shows them."""
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


def differences_section(groups: Sequence[Group]) -> str:
    """Return the paired differences of each row from the first, over clients and for each client; empty if there are none."""
    parts = [
        f"{_plain_table(lines)}\n<p>{escape('; '.join(caption.splitlines()))}.</p>"
        for lines, caption in differences(groups, [short(group.label) for group in groups])
    ]
    if not parts:
        return ""
    title = '<h2 id="differences"><a href="#differences">Differences from the first run</a></h2>'
    clients = (f'<details class="folded"><summary>Client by client</summary>{part}</details>' for part in parts[1:])
    return "\n".join([title, parts[0], *clients])


def differences(groups: Sequence[Group], names: Sequence[str]) -> list[tuple[list[list[str]], str]]:
    """Return the tables of the finished rows' differences, over clients and for each client, each with its caption."""
    finished = [
        (group.runs, [name])
        for group, name in zip(groups, names, strict=True)
        if all(run.finished for run in group.runs)
    ]
    named = [["run"], *(name for _, name in finished)]
    return significance.tables([runs for runs, _ in finished], named=named) if len(finished) > 1 else []


def _plain_table(lines: Sequence[Sequence[str]]) -> str:
    header, *body = lines
    return sortable_table(header, [[[Cell(escape(cell), cell) for cell in line]] for line in body])


def sortable_table(head: Sequence[str], groups: Sequence[Rows]) -> str:
    """Return a table that can be sorted. head: names of the columns; those with numbers begin with "n "."""
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
    look = looks([each.method for each in groups])[groups.index(group)]
    return f'<span class="swatch" style="--light:{look.on(dark=False)};--dark:{look.on(dark=True)}"></span>'
