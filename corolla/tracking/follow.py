"""`python -m corolla.tracking.follow TRACKER RUN AFTER SECONDS`: feeds one tracker, or one callback, from a run folder.

With TRACKER alone it checks, before a run, whether the tracker can work here.

It reads the rounds after round AFTER as they are written. When standard input ends, the run has ended: the process
passes on the remaining data and exits. An alarm ends it if one step takes longer than SECONDS. On standard output it
writes lines of JSON: `{}` while it is alive, lines that a callback prints, and the error that ended it.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from corolla.experiments.runs import RecordedRun
from fl_app import plugins
from fl_app.debugging import at, printed_lines
from fl_app.errors import describe
from fl_app.keys import Scalar, own
from fl_app.metrics import Metric, tracked_names
from fl_app.server import client_rows, matrices
from fl_app.server.run_folder import CLIENTS, CONFIG, METRICS, MODELS, RUN, SUMMARY, new_records

_POLL = 0.3
FILES = (CONFIG, METRICS, CLIENTS, RUN, SUMMARY)
# pattern of the files in each folder of a run
FOLDERS = {MODELS: "*.safetensors", matrices.DIRECTORY: "*.npz", client_rows.DIRECTORY: "*.parquet"}


class Follows:
    """One tracker's run, in a module with the tracker's name. It is opened with the run and its last tracked round."""

    def round(self, number: int, values: Mapping[str, Any]) -> None:
        """Track a round's metrics. A callback gets the round's record instead."""

    def file(self, path: Path) -> None:
        """Track a file of the run folder. Without this, files stay there alone."""

    def end(self, summary: Mapping[str, Scalar] | None) -> None:
        """Save everything. summary: of a finished run; None for an interrupted one."""


class Callback(Follows):
    """The user's own object as a store; each of its hooks is called if it is there. out: gets the lines that it prints."""

    def __init__(self, run: RecordedRun, reference: str, out: TextIO) -> None:
        self._printed = lambda line: print(json.dumps({"printed": line}), file=out)
        with printed_lines(self._printed):
            own = plugins.load("callbacks", reference)
            self._own = own() if isinstance(own, type) else own
        self._call("on_run_start", run.path)

    def _call(self, hook: str, value: object) -> None:
        if (function := getattr(self._own, hook, None)) is not None:
            with printed_lines(self._printed):
                function(value)

    def round(self, number: int, values: Mapping[str, Any]) -> None:
        """Pass on a round's record."""
        self._call("on_round_end", values)

    def end(self, summary: Mapping[str, Scalar] | None) -> None:
        """Pass on the summary."""
        self._call("on_run_end", summary)


def main() -> None:
    """Follow a run until it has ended; without a run, check the tracker."""
    name, *rest = sys.argv[1:]
    os.umask(0o077)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    # Send everything that packages print to standard error: standard output is the protocol.
    os.dup2(2, 1)
    try:
        if rest:
            follow(name, Path(rest[0]), int(rest[1]), float(rest[2]), out)
        else:
            # the import alone may fail
            getattr(_module(name), "check", lambda: None)()
    except Exception as error:
        print(json.dumps({"error": describe(error).splitlines()[0] + at(error)}), file=out)
    if rest:
        # limit the time of the packages' exit handlers
        signal.setitimer(signal.ITIMER_REAL, float(rest[2]))


def _module(name: str) -> Any:
    """Return the module of a tracker: its Store and, where it needs anything but its package, `check`, which raises errors."""
    return importlib.import_module(f"corolla.tracking.to_{name}")


def follow(name: str, path: Path, after: int, seconds: float, out: TextIO) -> None:
    """Feed a tracker, or a callback, until the run has ended. after: the last round that it has. out: gets signs of life."""
    ended = False

    def step() -> None:
        print("{}", file=out)
        if ended:
            signal.setitimer(signal.ITIMER_REAL, seconds)

    callback = plugins.is_reference(name)
    run, last = RecordedRun(path), after
    store: Follows = Callback(run, name, out) if callback else _module(name).Store(run, after)
    position = 0
    while not ended:
        # Nothing is ever written to stdin: it becomes readable when the run's process closes it.
        ended = bool(select.select([sys.stdin], [], [], _POLL)[0])
        step()
        for record in new_records(path / METRICS, position):
            position = record.pop("position")
            if record["round"] > last:
                last = record["round"]
                store.round(last, record if callback else scalars(record, run.metrics))
                step()
    inside = [file for folder, pattern in FOLDERS.items() for file in sorted((path / folder).glob(pattern))]
    for file in [path / name for name in FILES] + inside:
        if file.is_file():
            store.file(file)
            step()
    store.end(run.summary if run.finished else None)


# numbers in an evaluation that are not metrics
BOOKKEEPING = ("digest-version", "evaluated", "expected")


def settings(run: RecordedRun) -> dict[str, Scalar]:
    """Return the resolved keys that apply to a run."""
    return own(run.settings, str(run.settings.get("method")))


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries of a table with numeric values."""
    return {name: v for name, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def scalars(record: Mapping[str, Any], measured: Sequence[Metric]) -> dict[str, float]:
    """Return all numbers of a round's record about all clients, by the name they are tracked with.

    Names: <headline>/..., loss/..., bytes/..., seconds/<phase>, failures; all-clients/... for an evaluation, unseen/...
    for clients that never train, method/... for the method's own. measured: the run's metrics, the headline first.
    """
    name, evaluation, known = measured[0].name, record.get("evaluation", {}), tracked_names(measured)
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
