"""`python -m corolla.tracking.follow RUN TRACKER AFTER SECONDS`: feeds one tracker from a run folder.

It reads rounds after round AFTER as they are written. When standard input ends the run has ended: it hands over what is left and
ends, or is ended by its own alarm if one thing takes longer than SECONDS. On standard output it says, in lines of JSON, that it is
alive, and the error that ended it.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from corolla.experiments.runs import RecordedRun
from fl_app.errors import describe
from fl_app.keys import Scalar, own
from fl_app.metrics import Metric, Record, tracked_names
from fl_app.server.run_folder import CLIENTS, CONFIG, METRICS, MODELS, RUN, SUMMARY

_POLL = 0.3
FILES = (CONFIG, METRICS, CLIENTS, RUN, SUMMARY)


class Store(Protocol):
    """One tracker's run: opened with the run folder and the round it has had, in a module of the tracker's name."""

    def round(self, number: int, values: Mapping[str, float]) -> None:
        """Take a round's metrics."""

    def file(self, path: Path) -> None:
        """Take a file of the run folder."""

    def end(self, summary: Mapping[str, Scalar] | None) -> None:
        """Take the summary of a finished run, None of one that was interrupted, and make everything last."""


def main() -> None:
    """Follow a run until it has ended."""
    path, name, after, seconds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    os.umask(0o077)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    # Anything packages print goes to standard error: standard output is the protocol.
    os.dup2(2, 1)
    ended = False

    def step() -> None:
        print("{}", file=out)
        if ended:
            signal.setitimer(signal.ITIMER_REAL, seconds)

    try:
        run, last = RecordedRun(path), after
        store: Store = importlib.import_module(f"corolla.tracking.to_{name}").Store(run, after)
        position = 0
        while not ended:
            # Nothing is ever written to stdin: it becomes readable when the run's process closes it.
            ended = bool(select.select([sys.stdin], [], [], _POLL)[0])
            step()
            for record in new_records(path / METRICS, position):
                position = record.pop("position")
                if record["round"] > last:
                    last = record["round"]
                    store.round(last, scalars(record, run.headline))
                    step()
        for file in [path / name for name in FILES] + sorted((path / MODELS).glob("*.safetensors")):
            if file.is_file():
                store.file(file)
                step()
        store.end(run.summary if run.finished else None)
    except Exception as error:
        print(json.dumps({"error": describe(error).splitlines()[0]}), file=out)
    # for what packages do when a process ends
    signal.setitimer(signal.ITIMER_REAL, seconds)


# numbers of an evaluation that are no metrics
BOOKKEEPING = ("digest-version", "evaluated", "expected")


def new_records(path: Path, position: int) -> Iterator[Record]:
    """Yield the whole lines of metrics.jsonl from a position on; `position` in a record is where the next one begins."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(position)
        for line in file:
            if not line.endswith(b"\n"):
                return
            position += len(line)
            yield {**json.loads(line), "position": position}


def settings(run: RecordedRun) -> dict[str, Scalar]:
    """The keys that bear on a run, as it resolved them."""
    return own(run.settings, str(run.settings.get("method")))


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Those of a table's values that are numbers."""
    return {name: v for name, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def scalars(record: Mapping[str, Any], metric: Metric) -> dict[str, float]:
    """Everything that a round's record says of all clients and that is a number, by the name it is tracked with.

    <headline>/..., loss/..., bytes/..., seconds/<phase>, failures; all-clients/... of an evaluation, unseen/... of those who never
    train, method/... of the method's own.
    """
    name, evaluation, known = metric.name, record.get("evaluation", {}), tracked_names(metric)
    found = {
        known.get(key, f"method/{key}"): value
        for key, value in numbers(record).items()
        if key not in ("round", "position")
    }
    found |= {f"seconds/{phase}": value for phase, value in numbers(record.get("seconds", {})).items()}
    found["failures"] = len(record.get("failures", []))
    for key, value in numbers(evaluation).items():
        if key in BOOKKEEPING:
            continue
        at_home = key == name or key.startswith(f"{name}-")
        found[f"{name}/all-clients{key.removeprefix(name)}" if at_home else f"all-clients/{key}"] = value
    return found | {f"unseen/{key}": value for key, value in numbers(evaluation.get("unseen", {})).items()}


if __name__ == "__main__":
    main()
