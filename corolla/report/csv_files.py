"""The report's numbers as CSV: one line per run and round, and one per run, round and client. Nothing is rounded.

Metrics are ratios, and traffic is in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from corolla.experiments.result_table import csv_text
from corolla.experiments.runs import RecordedRun
from fl_app.metrics import Record
from fl_app.server.run_folder import NAME

ROUNDS, CLIENTS = "rounds.csv", "clients.csv"
# parts of a round's record with a format of their own
_PARTS = ("round", "clients", "evaluation", "failures", "seconds")

Line = dict[str, object]


def round_lines(run: RecordedRun) -> list[Line]:
    """Return the numbers that each round of a run recorded, by name, with `round`."""
    return [{"round": t, **_round(record)} for t, record in run.rounds.items()]


def client_lines(run: RecordedRun) -> list[Line]:
    """Return the numbers that each round recorded per client, by name, with `round`, `client` and its `name`."""
    return [{"round": t, **line} for t, record in run.rounds.items() for line in _clients(run, record)]


def _round(record: Record) -> Line:
    measured = record.get("evaluation") or {}
    return {
        **_numbers(record, but=_PARTS),
        **_numbers(measured, "evaluation-", but=("digest-version",)),
        **_numbers(measured.get("unseen", {}), "evaluation-unseen-"),
        "failures": len(record.get("failures", [])),
        "far-uploads": len(record.get("far", [])),
        **_numbers(record.get("seconds", {}), "seconds-"),
    }


def _clients(run: RecordedRun, record: Record) -> Iterator[Line]:
    trained, measured = record.get("clients", {}), record.get("evaluation") or {}
    evaluated, unseen = measured.get("clients", {}), measured.get("unseen", {}).get("ids", [])
    for client_id in sorted({*trained, *evaluated}, key=int):
        row, facts = trained.get(client_id, {}), run.clients.get(client_id, {})
        named = {"name": run.client_name(client_id)} if NAME in facts else {}
        yield {
            "client": int(client_id),
            **named,
            "unseen": int(client_id) in unseen,
            **{name: facts.get(name) for name in ("train-samples", "test-samples")},
            **_numbers(row),
            **_numbers(evaluated.get(client_id, {}), "evaluation-"),
            **_numbers(row.get("seconds", {}), "seconds-"),
        }


def _numbers(values: Mapping[str, object], before: str = "", but: Sequence[str] = ()) -> Line:
    """Return the numbers of a table. before: what their names begin with in the file. but: names that are left out."""
    kept = {name: value for name, value in values.items() if name not in but and not isinstance(value, bool)}
    return {f"{before}{name}": value for name, value in kept.items() if isinstance(value, (int, float))}


def as_csv(runs: Sequence[RecordedRun], lines_of: Callable[[RecordedRun], list[Line]]) -> str:
    """Return the lines of runs as CSV, with the run, its method and its seed. lines_of: `round_lines` or `client_lines`."""
    lines: list[Line] = []
    for run in runs:
        start = {"run": run.path.name, "method": run.method, "seed": run.settings.get("seed", "")}
        lines += [{**start, **line} for line in lines_of(run)]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    return csv_text([columns, *([line.get(name, "") for name in columns] for line in lines)])
