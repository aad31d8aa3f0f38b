"""The path of one round through the files: the functions that an in-process round with two clients calls.

python -m benchmarks.round_trace [--path METHOD]

The script prints the table of docs/architecture.md. It counts Python's calls of functions in `fl_app`, `strategies`,
`client_app`, `deploy` and `corolla`. Comprehensions, lambdas and generators count too (a generator counts each time it
resumes); returns do not. A change of file is a call of a function in another file than the previous call's. A file sees
`config` if it has a variable, argument or attribute of this name.

`round` is the first of two rounds, from its first call to its line in the log. `server` is the same without the
clients' part, from a client's entry point to its reply. `run` is a whole run of one round, from its start to its
summary. All are measured in a process that has done the same once before, so that nothing is imported or prepared in
between. Each client trains on one batch. Versions of Python differ in their calls of comprehensions, so compare numbers
only under one version.
"""

from __future__ import annotations

import argparse
import ast
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby, pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from client_app.client_app import app
from fl_app.config import parse
from fl_app.keys import Scalar
from fl_app.server_app import run
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fl_app", "strategies", "client_app", "deploy", "corolla")
METHODS = ("fedavg", "fedcac")
CLIENTS = 2
FIRST = "Rounds.attempts"
LAST = "Round.of"
CLIENT = "client_app/client_app.py"
CONFIG = "config"


class Call(NamedTuple):
    """A call: the file, relative to the repository's root, and the function's qualified name.

    by_client: whether a client's turn makes the call.
    """

    file: str
    function: str
    by_client: bool


class Counts(NamedTuple):
    """The numbers of files, functions, changes of file, and files that see `config`."""

    files: int
    functions: int
    changes: int
    configured: int


@contextmanager
def traced() -> Iterator[list[Call]]:
    """Yield the list of calls that this thread makes inside, in order."""
    calls: list[Call] = []
    known: dict[CodeType, Call | None] = {}
    # the frame of a client's entry point, during its turn
    turn: FrameType | None = None

    def place(code: CodeType) -> Call | None:
        path = Path(code.co_filename)
        if not path.is_relative_to(ROOT):
            return None
        file = path.relative_to(ROOT)
        return Call(file.as_posix(), code.co_qualname, False) if file.parts[0] in PACKAGES else None

    def note(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal turn
        if event == "return" and frame is turn:
            turn = None
        if event != "call":
            return
        code = frame.f_code
        if code not in known:
            known[code] = place(code)
        if (call := known[code]) is not None:
            if turn is None and call.file == CLIENT:
                turn = frame
            calls.append(call._replace(by_client=turn is not None))

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def calls_of(method: str, directory: Path, rounds: int, name: str) -> list[Call]:
    """Return the calls of a run with this many rounds, without those that end the tracing."""
    raw: dict[str, Scalar] = {
        "method": method,
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
    return calls[names.index(FIRST) : names.index(LAST)]


def without_clients(calls: Sequence[Call]) -> list[Call]:
    """Return a round's calls without those of clients."""
    return [call for call in calls if not call.by_client]


def sees_config(text: str) -> bool:
    """Return whether a file with this text has a variable, argument or attribute `config`."""
    return any(
        CONFIG in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "arg", ""))
        for node in ast.walk(ast.parse(text))
    )


def counted(calls: Sequence[Call]) -> Counts:
    """Return the numbers of a sequence of calls."""
    return Counts(
        len({call.file for call in calls}),
        len({(call.file, call.function) for call in calls}),
        sum(before.file != after.file for before, after in pairwise(calls)),
        sum(sees_config((ROOT / file).read_text("utf-8")) for file in {call.file for call in calls}),
    )


def measured(method: str) -> tuple[Sequence[Call], dict[str, Counts]]:
    """Return the calls of a method's round, and the numbers of the round, its server's part, and a whole run."""
    with tempfile.TemporaryDirectory() as directory:
        calls_of(method, Path(directory), 2, "before")
        one_round = first_round(calls_of(method, Path(directory), 2, "two-rounds"))
        whole = calls_of(method, Path(directory), 1, "one-round")
    parts = {"round": one_round, "server": without_clients(one_round), "run": whole}
    return one_round, {part: counted(calls) for part, calls in parts.items()}


def table(found: Mapping[str, Mapping[str, Counts]]) -> list[str]:
    """Return the lines of a Markdown table. found: the numbers by method and part."""
    lines = [
        "| method | part | files | functions | changes of file | files that see `config` |",
        "|---|---|---|---|---|---|",
    ]
    for method, parts in found.items():
        lines += [f"| {method} | {part} | {' | '.join(map(str, counts))} |" for part, counts in parts.items()]
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--path", metavar="METHOD", help="print the way of a method's round, a line per file it comes to"
    )
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if not options.path:
        print("\n".join(table({method: measured(method)[1] for method in METHODS})))
        return
    for file, visit in groupby(measured(options.path)[0], key=lambda call: call.file):
        names = dict.fromkeys(call.function.replace(".<locals>", "") for call in visit)
        print(f"{file}: {', '.join(names)}")


if __name__ == "__main__":
    main()
