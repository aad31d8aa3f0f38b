"""The report's tables and sentences: results, settings, warnings, differences, single clients. `parts.html` has their form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
import pandas

from corolla.experiments import significance
from corolla.experiments.result_table import COSTS, OF_GLOBAL, UNSEEN, chosen, undefined_notes
from corolla.report.arrays import MANY, ReportedRun, class_names, last_known
from corolla.report.groups import (
    DATA_KEYS,
    KEY_SETTINGS,
    Group,
    by_client,
    differing,
    given_name,
    judged_by,
    short,
)
from corolla.report.theme import Look, looks
from fl_app.errors import counted, plain, size
from fl_app.keys import show
from fl_app.metrics import DIGEST_VERSION, SENT_DIGEST_VERSION, Metric
from fl_app.server import client_rows

PICTURES = "report-figures"
# most differing settings that the table of results shows
BRIEF = 2
# headings of the table of results
HEADINGS = ("final", "validation", "pooled", "fine-tuned", *OF_GLOBAL, *UNSEEN, "best", "best, pooled")
# clients in the tables of the best and the worst
ENDS = 20
# lines of all clients' tables on the page; a run without room for all its clients has only the best and the worst
MOST_LINES = 5000
# headings of a client's samples
SAMPLES = ("n train-samples", "n test-samples")
# most groups whose figures before and after training have columns
MOST_WITH_MOMENTS = 3

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
)
TEMPLATES.globals.update(
    short=short,
    plain=plain,
    counted=counted,
    chosen=chosen,
    undefined_notes=undefined_notes,
    sent_version=SENT_DIGEST_VERSION,
    show=show,
    size=size,
    costs=list(COSTS),
    given_name=given_name,
    alone=lambda run: Group((run,)),
    version=DIGEST_VERSION,
    ends=ENDS,
    most_failures=20,
    most_clients=20,
    pictures=PICTURES,
)
PARTS: Any = TEMPLATES.get_template("parts.html").module


class Cell(NamedTuple):
    """A cell of a table: its content, a text or ready HTML, and its value for sorting."""

    content: str
    value: float | str | None = None


Line = list[Cell]


def shared_settings(runs: Sequence[ReportedRun]) -> dict[str, str]:
    """Return the key settings that all runs share, as text."""
    values = {name: {run.setting(name) for run in runs} for name in KEY_SETTINGS if name != "dirichlet-alpha"}
    return {name: found.pop() for name, found in values.items() if len(found) == 1}


def warnings(runs: Sequence[ReportedRun]) -> str:
    """Return warnings about unfinished runs, unreadable records, failures, and unequal conditions."""
    return str(PARTS.warnings(runs, [key for key in differing(runs) if key in DATA_KEYS]))


# Results --------------------------------------------------------------------------------------------------------------


def results_table(groups: Sequence[Group]) -> str:
    """Return the table of results: one row per group, which unfolds into the rows of its runs."""
    runs = [run for group in groups for run in group.runs]
    known = {heading for group in groups for heading in group.row.means}
    always = {"final", "pooled", "best", "best, pooled"}
    shown = {
        "groups": groups,
        "headings": [heading for heading in HEADINGS if heading in known | always],
        "others": columns_of_others(groups),
        "metrics": list(dict.fromkeys(group.first.headline for group in groups)),
        "brief": 0 < len({key for group in groups for key in group.settings}) <= BRIEF,
        "seeds": len(runs) > len(groups),
        "swatches": swatches(groups),
    }
    return str(PARTS.results(shown, runs))


def columns_of_others(groups: Sequence[Group]) -> dict[str, Metric]:
    """Return the figures, in any group, of metrics other than the headline, by their names in summary.json."""
    found: dict[str, Metric] = {}
    for row in (group.row for group in groups):
        found |= {name: metric for name, metric in row.names.items() if name in row.of_others}
    return found


def settings_table(groups: Sequence[Group]) -> str:
    """Return the table of keys in which the groups differ; empty if the table of results shows them."""
    keys = list(dict.fromkeys(key for group in groups for key in group.settings))
    return str(PARTS.settings(groups, keys, swatches(groups))) if len(keys) > BRIEF else ""


def of_groups(groups: Sequence[Group]) -> str:
    """Return the tables of results, of settings, and of each row's paired differences from the first."""
    paired = PARTS.differences(differences(groups, [short(group.label) for group in groups]))
    return "\n".join(filter(None, (results_table(groups), settings_table(groups), str(paired))))


def differences(groups: Sequence[Group], names: Sequence[str]) -> list[tuple[list[list[str]], str]]:
    """Return the tables of the finished rows' differences, over clients and for each client, each with its caption."""
    named, finished = [["run"]], []
    for group, name in zip(groups, names, strict=True):
        if all(run.finished for run in group.runs):
            finished.append(group.runs)
            named.append([name])
    return significance.tables(finished, named=named) if len(finished) > 1 else []


def swatches(groups: Sequence[Group]) -> dict[int, Look]:
    """Return each group's look in the pictures by its number; {} for a single group."""
    if len(groups) < 2:
        return {}
    return dict(zip((group.number for group in groups), looks([group.method for group in groups]), strict=True))


# Single clients -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClientTable:
    """Clients' lines. few: whether all of them are shown. whole: whether the page has room for a table of all."""

    title: str
    text: str
    head: Sequence[str]
    lines: Sequence[Line]
    few: bool = True
    whole: bool = True


def clients_section(groups: Sequence[Group]) -> str:
    """Return tables of single clients; empty if no client is known. They list all clients, or the worst and the best.

    Groups with at most MANY clients share tables if these clients have the same samples. Of each other group they list
    the first run's clients.
    """
    few = [group for group in groups if 0 < len(last_known(group.first)[0]) <= MANY]
    parts = [part for own in _with_the_same_samples(few) for part in _of_few(own)]
    room = MOST_LINES
    for group in groups:
        if len(last_known(group.first)[0]) > MANY:
            table = _of_run(group.first, len(groups) > 1)
            parts.append(replace(table, whole=len(table.lines) <= room))
            room -= len(table.lines) * parts[-1].whole
    return str(PARTS.clients(parts))


def _with_the_same_samples(groups: Sequence[Group]) -> list[list[Group]]:
    """Return groups divided so that the clients of each part have the same samples, as far as the runs recorded them."""
    parts: list[list[Group]] = []
    for group in groups:
        for part in parts:
            first, own = part[0].first.clients, group.first.clients
            other_clients = first and own and first.keys() != own.keys()
            if not other_clients and not significance.other_samples(group.runs, part[0].runs):
                part.append(group)
                break
        else:
            parts.append([group])
    return parts


def _of_few(groups: Sequence[Group]) -> list[ClientTable]:
    """Return a table per metric: each client's samples, its figures in each group, and the group that is best for it."""
    run, tables = groups[0].first, []
    for metric in dict.fromkeys(metric for group in groups for metric in group.first.metrics):
        judged = [judged_by(group, metric) for group in groups if metric in group.first.metrics]
        several = len(judged) > 1
        unit, names, sources, columns = " (%)" * metric.ratio, [], [], {}
        for group in judged:
            name = short(group.label, 30) if several else "final"
            names.append(name)
            columns[name], source = by_client(group)
            sources.append(source)
            for when in ("before", "after") if len(judged) <= MOST_WITH_MOMENTS else ():
                moments = [participation(run)[when].dropna() for run in group.runs]
                columns[f"{group.number} " * several + when] = pandas.concat(moments).groupby(level=0).mean()
        if not sum(len(columns[name]) for name in names):
            continue
        every = pandas.concat([*columns.values(), *(by_client(group)[0] for group in groups)]).index.unique()
        figures = pandas.DataFrame(columns, sorted(every, key=int))
        finals = figures[names]
        best = finals.max(axis=1) if metric.higher_is_better else finals.min(axis=1)
        lines = []
        for i, values in figures.iterrows():
            winners = Cell(", ".join(finals.columns[finals.loc[i] == best[i]]))
            scores = [_score(metric, value) for value in values]
            lines.append([*_client(run, i), *_samples(run, i), *scores, *[winners] * several])
        head = ["client", *SAMPLES, *(f"n {name}{unit}" for name in columns)]
        seeds = "; each figure is the mean over the seeds" * any(len(group.runs) > 1 for group in judged)
        where = "; ".join(dict.fromkeys(sources))
        text = f"{where}; before, after: in the client's last round; samples: of the first run{seeds}."
        tables.append(
            ClientTable(
                f"{metric.title[:1].upper()}{metric.title[1:]} of each client", text, head + ["best"] * several, lines
            )
        )
    return tables


def _of_run(run: ReportedRun, several: bool) -> ClientTable:
    """Return a run's clients, worst first."""
    text = (
        f"Clients that train, sorted by {run.headline.title} ({last_known(run)[1]}). before, after: in the client's last round; "
        "mostly: the most frequent class of its training samples."
    )
    return ClientTable(short(run.label, 60) * several, text, *client_lines(run), few=False)


def client_lines(run: ReportedRun) -> tuple[list[str], list[Line]]:
    """Return the headings, and the lines of the clients with a known headline metric, worst first."""
    metric = run.headline
    counted = {i: own["class-counts"] for i, own in run.clients.items() if own.get("class-counts")}
    names = class_names(run, max(map(len, counted.values()), default=0))
    known = pandas.DataFrame({"final": last_known(run)[0]}).join(participation(run))
    known.index = known.index.astype(int)
    # at equal values, the client with the worse metric after training comes first
    known = known.sort_index().fillna({"rounds": 0}).astype({"rounds": int})
    known = known.sort_values(["final", "after"], ascending=metric.higher_is_better, kind="stable", na_position="first")
    moments, lines = ("final", "before", "after"), []
    for i, row in zip(map(str, known.index), known.to_dict("records"), strict=True):
        scores = [_score(metric, row[moment]) for moment in moments]
        classes = _classes(counted.get(i), names) if counted else []
        lines.append([*_client(run, i), *scores, _number(row["rounds"]), *_samples(run, i), *classes])
    head = ["client", *(f"n {moment}{' (%)' * metric.ratio}" for moment in moments), "n rounds", *SAMPLES]
    return head + ["n classes", "mostly"] * bool(counted), lines


def _client(run: ReportedRun, client_id: str) -> Line:
    return [Cell(run.client_name(client_id), int(client_id))]


def _samples(run: ReportedRun, client_id: str) -> Line:
    return [_number(run.clients.get(client_id, {}).get(name.removeprefix("n "))) for name in SAMPLES]


def participation(run: ReportedRun) -> Any:
    """Return by client id: its number of rounds, and its headline metric before and after training in the last of these."""
    tables = [pandas.DataFrame(columns=["before", "after"], dtype=np.float64)]
    for record in run.rounds.values():
        rows = record.get("clients", {})
        own = {when: client_rows.numbers(rows, run.key(when)) for when in ("before", "after")}
        tables.append(pandas.DataFrame(own, client_rows.ids(rows).astype(str)))
    every = pandas.concat(tables[1:] or tables)
    last = every[~every.index.duplicated(keep="last")]
    return last.assign(rounds=every.index.value_counts())


def _score(metric: Metric, value: Any) -> Cell:
    return Cell("–") if value is None or value != value else Cell(metric.text(value), float(f"{value:.6g}"))


def _number(value: Any) -> Cell:
    return Cell("–") if value is None else Cell(str(value), value)


def _classes(counts: Sequence[int] | None, names: Sequence[str]) -> Line:
    """Return a client's number of classes with samples, and its most frequent class."""
    if not counts:
        return [Cell("–"), Cell("–")]
    most = counts.index(max(counts))
    return [_number(len(counts) - counts.count(0)), Cell(names[most] if names else str(most), most)]
