"""The picture of a run whose rounds may close early: who worked when, and for which round (arrivals.jsonl)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas

from corolla.report import charts
from corolla.report.arrays import ReportedRun
from corolla.report.charts import IN_TIME, LATE, LOST, WORKING, Chart
from corolla.report.pictures import Panel
from corolla.report.recorded import client_labels
from fl_app.errors import UserError
from fl_app.server import arrivals

# The picture shows the first rounds and clients: more have no room.
MOST_ROUNDS, MOST_CLIENTS = 20, 60


@dataclass(frozen=True)
class Span:
    """A client's work on a round: its seconds since the run's start, and what became of it."""

    client: int
    begins: float
    ends: float
    became: str


def of_waiting(run: ReportedRun) -> Iterator[Panel]:
    """Yield the picture of a run that recorded arrivals."""
    try:
        lines = arrivals.read(run.path)
    except UserError:
        return
    found, closes = spans(lines[:MOST_ROUNDS])
    if not found or not (every := sum(len(line["ends"]) for line in lines)):
        return
    lost = sum(end["fate"] != arrivals.USED for line in lines for end in line["ends"])
    yield Panel(
        f"waiting-{run.number.replace('.', '-')}",
        "Who worked when",
        f"A bar is a client's work on a round, from its download to its upload; a vertical line is the close of a round. "
        f"The first {len(closes)} rounds. In all {len(lines)} rounds {lost} of {every} works ({100 * lost / every:.0f} %) were "
        "thrown away or failed.",
        lambda: _gantt(run, found, closes),
    )


def spans(lines: Sequence[arrivals.Line]) -> tuple[list[Span], list[float]]:
    """Return the works of rounds, and the second at which each round closed. lines: those of arrivals.jsonl, in order."""
    closes = np.cumsum([float(line["seconds"]) for line in lines]).tolist()
    began = {int(line["round"]): end - float(line["seconds"]) for line, end in zip(lines, closes, strict=True)}
    working = {(int(i), int(line["round"])): began[int(line["round"])] for line in lines for i in line["asked"]}
    found = []
    for line in lines:
        for end in line["ends"]:
            client, work = int(end["client"]), int(line["round"]) - int(end["age"])
            begins = working.pop((client, work), None)
            if begins is None:
                continue
            became = LOST if end["fate"] != arrivals.USED else LATE if end["age"] else IN_TIME
            found.append(Span(client, begins, began[int(line["round"])] + float(end["second"]), became))
    found += [Span(client, begins, closes[-1], WORKING) for (client, _), begins in working.items()]
    return sorted(found, key=lambda span: (span.client, span.begins)), closes


def _gantt(run: ReportedRun, found: list[Span], closes: list[float]) -> Chart:
    clients = sorted({span.client for span in found})[:MOST_CLIENTS]
    labels = dict(zip(clients, client_labels(run, clients), strict=True))
    rows = [{**dataclasses.asdict(span), "client": labels[span.client]} for span in found if span.client in labels]
    return charts.spans(pandas.DataFrame(rows), pandas.DataFrame({"second": closes}))
