"""Tables of single clients, for runs with many: the worst and the best, and all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from corolla.report.arrays import MANY, ReportedRun, last_known
from corolla.report.groups import Group, short
from corolla.report.recorded import class_names
from corolla.report.tables import Cell, sortable_table
from fl_app.errors import plain
from fl_app.metrics import Record

# clients in the tables of the best and the worst
ENDS = 20
# lines of all clients' tables on the page; a run without room for all its clients has only the best and the worst
MOST_LINES = 5000

Line = list[Cell]


def clients_section(groups: Sequence[Group]) -> str:
    """Return tables of the clients of each group's first run with more than MANY clients; empty if there is none."""
    parts: list[str] = []
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

    def score(value: Any) -> Cell:
        return Cell("–") if value is None else Cell(metric.text(value), float(f"{value:.6g}"))

    lines = []
    sign = 1 if metric.higher_is_better else -1

    def place(i: str) -> tuple[float, float, int]:
        # at equal values, the client with the worse metric after training comes first
        return sign * known[i], sign * (latest.get(i, {}).get(after) or 0.0), int(i)

    for i in sorted(known, key=place):
        facts, row = run.clients.get(i, {}), latest.get(i, {})
        line = [
            Cell(escape(plain(run.client_name(i))), int(i)),
            *(score(value) for value in (known[i], row.get(before), row.get(after))),
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


def _number(value: Any) -> Cell:
    return Cell("–") if value is None else Cell(str(value), value)


def _classes(facts: Mapping[str, Any], names: Sequence[str]) -> Line:
    """Return a client's number of classes with samples, and its most frequent class."""
    counts = facts.get("class-counts")
    if not counts:
        return [Cell("–"), Cell("–")]
    most = counts.index(max(counts))
    return [_number(sum(count > 0 for count in counts)), Cell(escape(names[most] if names else str(most)), most)]
