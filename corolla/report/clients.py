"""Tables of single clients: all of them in runs with few, the worst and the best in runs with many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from corolla.experiments.significance import other_samples
from corolla.report.arrays import MANY, ReportedRun, last_known
from corolla.report.groups import Group, by_client, judged_by, short
from corolla.report.recorded import class_names
from corolla.report.tables import Cell, sortable_table
from fl_app.metrics import Metric, Record

# clients in the tables of the best and the worst
ENDS = 20
# lines of all clients' tables on the page; a run without room for all its clients has only the best and the worst
MOST_LINES = 5000

# most groups whose figures before and after training have columns
MOST_WITH_MOMENTS = 3

Line = list[Cell]


def clients_section(groups: Sequence[Group]) -> str:
    """Return tables of single clients; empty if no client is known.

    Groups with at most MANY clients share tables if these clients have the same samples. Of each other group they list
    the first run's clients.
    """
    few = [group for group in groups if 0 < len(last_known(group.first)[0]) <= MANY]
    parts = [part for own in _with_the_same_samples(few) for part in _of_few(own)]
    room = MOST_LINES
    for group in groups:
        head, lines = client_lines(group.first)
        if len(lines) <= MANY:
            continue
        parts.append(_of_run(group.first, len(groups) > 1, head, lines, room))
        room -= len(lines) if len(lines) <= room else 0
    if not parts:
        return ""
    return '<h2 id="single-clients"><a href="#single-clients">Single clients</a></h2>\n' + "\n".join(parts)


def _with_the_same_samples(groups: Sequence[Group]) -> list[list[Group]]:
    """Return groups divided so that the clients of each part have the same samples, as far as the runs recorded them."""
    parts: list[list[Group]] = []
    for group in groups:
        for part in parts:
            first, own = part[0].first.clients, group.first.clients
            other_clients = first and own and first.keys() != own.keys()
            if not other_clients and not other_samples(group.runs, part[0].runs):
                part.append(group)
                break
        else:
            parts.append([group])
    return parts


def _of_few(groups: Sequence[Group]) -> list[str]:
    """Return a table per metric: each client's samples, its figures in each group, and the group that is best for it."""
    parts: list[str] = []
    for metric in dict.fromkeys(metric for group in groups for metric in group.first.metrics):
        judged = [judged_by(group, metric) for group in groups if metric in group.first.metrics]
        finals = {group.number: by_client(group)[0] for group in judged}
        if not any(finals.values()):
            continue
        ids = sorted({i for group in groups for i in (*by_client(group)[0], *finals.get(group.number, {}))}, key=int)
        unit = " (%)" if metric.ratio else ""
        columns: dict[str, Mapping[str, float]] = {}
        for group in judged:
            name = short(group.label, 30) if len(judged) > 1 else "final"
            columns[f"n {name}{unit}"] = finals[group.number]
            if len(judged) <= MOST_WITH_MOMENTS:
                start = f"{group.number} " if len(judged) > 1 else ""
                columns |= {f"n {start}{when}{unit}": _at(group, when) for when in ("before", "after")}
        head = ["client", "n train-samples", "n test-samples", *columns, *["best"] * (len(judged) > 1)]
        lines = []
        for i in ids:
            facts = groups[0].first.clients.get(i, {})
            line = [Cell(escape(groups[0].first.client_name(i)), int(i))]
            line += [_number(facts.get(name)) for name in ("train-samples", "test-samples")]
            line += [_score(metric, figures.get(i)) for figures in columns.values()]
            if len(judged) > 1:
                known = [figures[i] for figures in finals.values() if i in figures]
                best = metric.best(known) if known else None
                whose = [short(group.label, 30) for group in judged if known and finals[group.number].get(i) == best]
                line.append(Cell(escape(", ".join(whose))))
            lines.append([line])
        seeds = "; each figure is the mean over the seeds" if any(len(group.runs) > 1 for group in judged) else ""
        where = "; ".join(dict.fromkeys(by_client(group)[1] for group in judged))
        parts.append(
            f"<h3>{escape(metric.title[:1].upper() + metric.title[1:])} of each client</h3>{sortable_table(head, lines)}"
            f"<p>{escape(where)}; before, after: in the client's last round; samples: of the first run{seeds}.</p>"
        )
    return parts


def _at(group: Group, when: str) -> dict[str, float]:
    """Return each client's headline metric in its last round, `before` or `after` training, as the mean over its seeds."""

    def of(run: ReportedRun) -> tuple[dict[str, float], str]:
        latest = _participation(run)[1]
        return {i: value for i, row in latest.items() if (value := row.get(run.key(when))) is not None}, ""

    return by_client(group, of)[0]


def _of_run(run: ReportedRun, several: bool, head: Sequence[str], lines: Sequence[Line], room: int) -> str:
    """Return a run's tables. room: number of lines left on the page for all of its clients."""

    def folded(title: str, lines: Sequence[Line], is_open: bool = False) -> str:
        table = sortable_table(head, [[line] for line in lines])
        return f'<details class="folded"{" open" if is_open else ""}><summary>{title}</summary>{table}</details>'

    where = last_known(run)[1]
    title = f"<h3>{escape(short(run.label, 60))}</h3>" if several else ""
    text = (
        f"<p>Clients that train, sorted by {escape(run.headline.title)} ({escape(where)}). before, after: in the client's last "
        "round; mostly: the most frequent class of its training samples.</p>"
    )
    parts = [title, text, folded(f"The {ENDS} worst", lines[:ENDS], is_open=True)]
    parts.append(folded(f"The {ENDS} best", lines[: -ENDS - 1 : -1], is_open=True))
    if len(lines) <= room:
        parts.append(folded(f"All {len(lines):,}", lines))
    else:
        parts.append(f"<p>All {len(lines):,} are in clients.csv: <code>corolla report --tables DIR</code>.</p>")
    return "\n".join(part for part in parts if part)


def client_lines(run: ReportedRun) -> tuple[list[str], list[Line]]:
    """Return the headings, and the lines of the clients with a known headline metric, worst first."""
    known, _ = last_known(run)
    rounds, latest = _participation(run)
    metric, (before, after) = run.headline, (run.key("before"), run.key("after"))
    unit = " (%)" if metric.ratio else ""
    names = class_names(run, max((len(facts.get("class-counts") or ()) for facts in run.clients.values()), default=0))
    counted = any(facts.get("class-counts") for facts in run.clients.values())
    head = [
        "client",
        f"n final{unit}",
        f"n before{unit}",
        f"n after{unit}",
        "n rounds",
        "n train-samples",
        "n test-samples",
    ]
    head += ["n classes", "mostly"] * counted

    lines = []
    sign = 1 if metric.higher_is_better else -1

    def place(i: str) -> tuple[float, float, int]:
        # at equal values, the client with the worse metric after training comes first
        return sign * known[i], sign * (latest.get(i, {}).get(after) or 0.0), int(i)

    for i in sorted(known, key=place):
        facts, row = run.clients.get(i, {}), latest.get(i, {})
        line = [
            Cell(escape(run.client_name(i)), int(i)),
            *(_score(metric, value) for value in (known[i], row.get(before), row.get(after))),
            *(_number(value) for value in (rounds.get(i, 0), facts.get("train-samples"), facts.get("test-samples"))),
        ]
        lines.append(line + (_classes(facts, names) if counted else []))
    return head, lines


def _participation(run: ReportedRun) -> tuple[dict[str, int], dict[str, Record]]:
    """Return each client's number of rounds, and its record in the last of these, both by id."""
    rounds: dict[str, int] = {}
    latest: dict[str, Record] = {}
    for record in run.rounds.values():
        table = record.get("clients", {})
        latest |= table
        for i in table:
            rounds[i] = rounds.get(i, 0) + 1
    return rounds, latest


def _score(metric: Metric, value: Any) -> Cell:
    return Cell("–") if value is None else Cell(metric.text(value), float(f"{value:.6g}"))


def _number(value: Any) -> Cell:
    return Cell("–") if value is None else Cell(str(value), value)


def _classes(facts: Mapping[str, Any], names: Sequence[str]) -> Line:
    """Return a client's number of classes with samples, and its most frequent class."""
    counts = facts.get("class-counts")
    if not counts:
        return [Cell("–"), Cell("–")]
    most = counts.index(max(counts))
    return [_number(sum(count > 0 for count in counts)), Cell(escape(names[most] if names else str(most)), most)]
