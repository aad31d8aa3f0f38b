"""The picture of a run whose rounds may close early: who worked when, and for which round (arrivals.jsonl)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from corolla.report.arrays import ReportedRun
from corolla.report.figures import Panel, new_figure, thinned
from corolla.report.recorded import client_labels
from corolla.report.style import COLOURS, HATCHES, paper, shown, tone
from fl_app.errors import UserError
from fl_app.server import arrivals

# The picture shows the first rounds and clients: more have no room.
MOST_ROUNDS, MOST_CLIENTS = 20, 60
IN_TIME, LATE, LOST, WORKING = "used in time", "used late", "thrown away or failed", "still working"


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


def _gantt(run: ReportedRun, found: list[Span], closes: list[float]) -> Figure:
    clients = sorted({span.client for span in found})[:MOST_CLIENTS]
    place = {client: row for row, client in enumerate(clients)}
    height = max(1.2, min(0.26 * len(clients), 8.0))
    figure = new_figure(height + 1.1)
    axes = figure.add_subplot()
    for k, became in enumerate((IN_TIME, LATE, LOST, WORKING)):
        own = [span for span in found if span.became == became and span.client in place]
        if own:
            axes.barh(
                [place[span.client] for span in own],
                [span.ends - span.begins for span in own],
                left=[span.begins for span in own],
                height=0.72,
                label=became,
                color=shown(COLOURS[k + 1]),
                hatch=HATCHES[k],
                alpha=0.75,
                edgecolor=paper(),
                linewidth=0.6,
            )
    for second in closes:
        axes.axvline(second, color=tone(0.35), linewidth=0.8)
    labels = client_labels(run, clients)
    rows = thinned(len(clients), height, 0.17)
    axes.set_yticks(rows, [labels[row] for row in rows])
    axes.set_ylim(len(clients) - 0.4, -0.6)
    axes.set_xlim(0, closes[-1])
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("seconds since the run began")
    axes.set_ylabel("client")
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, handlelength=2.6, fontsize=9.5
    )
    return figure
