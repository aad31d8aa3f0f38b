"""The path of one round through the files: the functions that an in-process FedAvg round with two clients calls.

python -m benchmarks.round_trace [--path]

The script counts Python's calls of functions in `fl_app`, `strategies`, `client_app`, `deploy` and `corolla`.
Comprehensions, lambdas and generators count too (a generator counts each time it resumes); returns do not. A change of
file is a call of a function in another file than the previous call's.

`round` is the first of two rounds, from its first call to its line in the log. `server` is the same without the
clients' part, from the message to the upload. `run` is a whole run of one round, from its start to its summary. All are
measured in a process that has done the same once before, so that nothing is imported or prepared in between. Each
client trains on one batch. Versions of Python differ in their calls of comprehensions, so compare numbers only under
one version.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from client_app.client_app import app
from fl_app.config import parse
from fl_app.keys import Scalar
from fl_app.server.inprocess import InProcessGrid
from fl_app.server_app import run
from strategies import METHOD_PARAMS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fl_app", "strategies", "client_app", "deploy", "corolla")
CLIENTS = 2
FIRST = ("Rounds.train", "Rounds.train_round")
LAST = "round_line"
CLIENT_BEGINS, CLIENT_ENDS = "client_fn", "encode_upload"


class Call(NamedTuple):
    """A call: the file, relative to the repository's root, and the function's qualified name."""

    file: str
    function: str


@contextmanager
def traced() -> Iterator[list[Call]]:
    """Yield the list of calls that this thread makes inside, in order."""
    calls: list[Call] = []
    known: dict[CodeType, Call | None] = {}

    def place(code: CodeType) -> Call | None:
        path = Path(code.co_filename)
        if not path.is_relative_to(ROOT):
            return None
        file = path.relative_to(ROOT)
        return Call(file.as_posix(), code.co_qualname) if file.parts[0] in PACKAGES else None

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in known:
            known[code] = place(code)
        if (call := known[code]) is not None:
            calls.append(call)

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def calls_of(directory: Path, rounds: int, name: str) -> list[Call]:
    """Return the calls of a run with this many rounds, without those that end the tracing."""
    raw: dict[str, Scalar] = {
        "method": "fedavg",
        "model": "mlp",
        "num-clients": CLIENTS,
        "num-server-rounds": rounds,
        "train-samples": 24,
        "test-samples": 12,
        "batch-size": 24,
        "local-epochs": 1,
        "device": "cpu",
        "run-name": name,
        "output-dir": str(directory),
        "state-dir": str(directory / "state"),
    }
    with traced() as calls:
        run(InProcessGrid(app, raw, CLIENTS), parse(raw, METHOD_PARAMS), lambda *_: None)
    return calls


def first_round(calls: Sequence[Call]) -> Sequence[Call]:
    """Return the part of a run's calls that belongs to its first round."""
    names = [call.function for call in calls]
    start = next(k for k, name in enumerate(names) if name in FIRST)
    return calls[start : names.index(LAST)]


def without_clients(calls: Sequence[Call]) -> list[Call]:
    """Return a round's calls without those of clients."""
    kept, inside = [], False
    for call in calls:
        inside = inside or call.function == CLIENT_BEGINS
        if not inside:
            kept.append(call)
        inside = inside and call.function != CLIENT_ENDS
    return kept


def counted(calls: Sequence[Call]) -> str:
    """Return the numbers of files, functions and changes of file, as text."""
    files, functions = len({call.file for call in calls}), len(set(calls))
    changes = sum(before.file != after.file for before, after in pairwise(calls))
    return f"{files} files, {functions} functions, {changes} changes of file"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", action="store_true", help="print the round's way, a line for every file it comes to")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as directory:
        calls_of(Path(directory), 2, "before")
        one_round = first_round(calls_of(Path(directory), 2, "two-rounds"))
        whole = calls_of(Path(directory), 1, "one-round")
    print(f"round: {counted(one_round)}")
    print(f"server: {counted(without_clients(one_round))}")
    print(f"run: {counted(whole)}")
    if options.path:
        for file, visit in groupby(one_round, key=lambda call: call.file):
            names = dict.fromkeys(call.function.replace(".<locals>", "") for call in visit)
            print(f"{file}: {', '.join(names)}")


if __name__ == "__main__":
    main()
