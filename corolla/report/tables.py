"""The report's tables and sentences: results, settings, warnings, differences, single clients. `parts.html` has their form."""

from __future__ import annotations

import math
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
from corolla.report.charts import sentences
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
    brief=BRIEF,
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
    # figures of metrics other than the headline, by their names in summary.json
    others: dict[str, Metric] = {}
    for row in (group.row for group in groups):
        others |= {name: metric for name, metric in row.names.items() if name in row.of_others}
    always = {"final", "pooled", "best", "best, pooled"}
    shown = {
        "groups": groups,
        "headings": [heading for heading in HEADINGS if heading in known | always],
        "others": others,
        "metrics": list(dict.fromkeys(group.first.headline for group in groups)),
        "brief": 0 < len({key for group in groups for key in group.settings}) <= BRIEF,
        "seeds": len(runs) > len(groups),
        "swatches": swatches(groups),
    }
    return str(PARTS.results(shown, runs))


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
    counts = {group.number: len(last_known(group.first)[0]) for group in groups}
    parts, room = [], MOST_LINES
    for same in _with_the_same_samples([group for group in groups if 0 < counts[group.number] <= MANY]):
        for metric in dict.fromkeys(metric for group in same for metric in group.first.metrics):
            parts.append(client_table(same, metric))
    for group in groups:
        if counts[group.number] > MANY:
            own = replace(group, runs=group.runs[:1])
            table = client_table([own], own.first.headline, few=False)
            title = short(own.first.label, 60) * (len(groups) > 1)
            parts.append(replace(table, title=title, whole=len(table.lines) <= room))
            room -= len(table.lines) * parts[-1].whole
    return str(PARTS.clients([part for part in parts if part.lines]))


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


def client_table(groups: Sequence[Group], metric: Metric, few: bool = True) -> ClientTable:
    """Return clients with their samples, their figures in each group, and the group that is best for them.

    few: whether they are in the order of their ids, else the worst come first.
    """
    judged = [judged_by(group, metric) for group in groups if metric in group.first.metrics]
    run, several = judged[0].first, len(judged) > 1
    names, sources, tables = [], [], []
    for group in judged:
        final, source = by_client(group)
        names.append(short(group.label, 30) if several else "final")
        sources.append(source)
        tables.append(final.rename(names[-1]))
        if len(judged) <= MOST_WITH_MOMENTS:
            moments = pandas.concat([participation(run) for run in group.runs]).groupby(level=0).mean()
            tables.append(moments.drop(columns="rounds").add_prefix(f"{group.number} ") if several else moments)
    known = pandas.concat([by_client(group)[0] for group in (*groups, *judged)]).index.unique().sort_values()
    figures = pandas.concat(tables, axis=1).reindex(known).fillna({"rounds": 0})
    finals = figures[names]
    best = finals.max(axis=1) if metric.higher_is_better else finals.min(axis=1)
    order = "" if few else f"Sorted by {metric.title}: "
    if not few:
        # at equal values, the client with the worse metric after training comes first
        sorting: Any = {"ascending": metric.higher_is_better, "kind": "stable", "na_position": "first"}
        figures = figures.sort_values(["final", "after"], **sorting)
    counted = [own["class-counts"] for own in run.clients.values() if own.get("class-counts")]
    classes = class_names(run, max(map(len, counted), default=0))
    lines = []
    for i, values in zip(figures.index, figures.to_dict("records"), strict=True):
        own = run.clients.get(str(i), {})
        line = [Cell(run.client_name(i), i), *(_number(own.get(name.removeprefix("n "))) for name in SAMPLES)]
        if counted:
            line += _classes(own.get("class-counts"), classes)
        line += [_number(v) if name == "rounds" else _score(metric, v) for name, v in values.items()]
        winners = [name for name in names if values[name] == best[i]] if several else []
        lines.append(line + [Cell(", ".join(winners))] * several)
    unit = " (%)" * metric.ratio
    head = ["client", *SAMPLES, *["n classes", "mostly"] * bool(counted)]
    head += [f"n {name}{unit * (name != 'rounds')}" for name in figures] + ["best"] * several
    text = sentences(
        f"{order}{'; '.join(dict.fromkeys(sources))}; before, after: in the client's last round; samples: of the first run"
        f"{'; each figure is the mean over the seeds' * any(len(group.runs) > 1 for group in judged)}.",
        "mostly: the most frequent class of the training samples." * bool(counted),
    )
    return ClientTable(
        f"{metric.title[:1].upper()}{metric.title[1:]} of each client",
        text,
        head,
        lines if finals.notna().any(axis=None) else [],
        few,
    )


def participation(run: ReportedRun) -> Any:
    """Return by client id: its number of rounds, and its headline metric before and after training in the last of these."""
    tables = [pandas.DataFrame(columns=["before", "after"], dtype=np.float64)]
    for record in run.rounds.values():
        tables.append(pandas.DataFrame({when: run.numbers(record, when) for when in ("before", "after")}))
    every = pandas.concat(tables[1:] or tables)
    last = every[~every.index.duplicated(keep="last")]
    return last.assign(rounds=every.index.value_counts())


def _score(metric: Metric, value: float) -> Cell:
    return Cell("–") if math.isnan(value) else Cell(metric.text(value), float(f"{value:.6g}"))


def _number(value: Any) -> Cell:
    return Cell("–") if value is None else Cell(str(int(value)), int(value))


def _classes(counts: Sequence[int] | None, names: Sequence[str]) -> Line:
    """Return a client's number of classes with samples, and its most frequent class."""
    if not counts:
        return [Cell("–"), Cell("–")]
    most = counts.index(max(counts))
    return [_number(len(counts) - counts.count(0)), Cell(names[most] if names else str(most), most)]
