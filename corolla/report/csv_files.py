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
    evaluation = {f"evaluation-{name}": value for name, value in _numbers(measured) if name != "digest-version"}
    unseen = {f"evaluation-unseen-{name}": value for name, value in _numbers(measured.get("unseen", {}))}
    seconds = {f"seconds-{name}": value for name, value in _numbers(record.get("seconds", {}))}
    plain = {name: value for name, value in _numbers(record) if name not in _PARTS}
    counts = {"failures": len(record.get("failures", [])), "far-uploads": len(record.get("far", []))}
    return {**plain, **evaluation, **unseen, **counts, **seconds}


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
            **dict(_numbers(row)),
            **{f"evaluation-{name}": value for name, value in _numbers(evaluated.get(client_id, {}))},
            **{f"seconds-{name}": value for name, value in _numbers(row.get("seconds", {}))},
        }


def _numbers(values: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value


def as_csv(runs: Sequence[RecordedRun], lines_of: Callable[[RecordedRun], list[Line]]) -> str:
    """Return the lines of runs as CSV, with the run, its method and its seed. lines_of: `round_lines` or `client_lines`."""
    lines: list[Line] = []
    for run in runs:
        start = {"run": run.path.name, "method": run.method, "seed": run.settings.get("seed", "")}
        lines += [{**start, **line} for line in lines_of(run)]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    return csv_text([columns, *([line.get(name, "") for name in columns] for line in lines)])
