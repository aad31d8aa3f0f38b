"""The uploads that `max-update-norm = 3` would drop without a Byzantine client: methods x partitions x participation x optimizers.

`python -m benchmarks.honest [METHOD ...]` trains on digits in one process, 10 clients, 4 rounds, all other keys at
their defaults. These report far uploads and use them. For each method the script prints the number of uploads that
would have been dropped, with the settings of each one. The last line sums up. --rounds: rounds per run.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from client_app.client_app import app
from fl_app.config import parse
from fl_app.errors import UserError
from fl_app.keys import Scalar
from fl_app.server.run_folder import read_metrics
from fl_app.server_app import run
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS, METHODS

CLIENTS, ROUNDS = 10, 4
PARTITIONS: dict[str, dict[str, Scalar]] = {
    "iid": {"partition": "iid"},
    "dirichlet 0.1": {"partition": "dirichlet", "dirichlet-alpha": 0.1, "min-samples": 1},
    "dirichlet 0.01": {"partition": "dirichlet", "dirichlet-alpha": 0.01, "min-samples": 1},
}
PARTICIPATION: dict[str, dict[str, Scalar]] = {"all": {}, "half": {"fraction-train": 0.5}}
OPTIMIZERS: dict[str, dict[str, Scalar]] = {
    "sgd": {"optimizer": "sgd"},
    "adamw": {"optimizer": "adamw", "learning-rate": 0.001},
}


@dataclass(frozen=True)
class Measured:
    """The uploads of one run.

    uploads: their number. far: descriptions of those far from the others. refused: the reason why the run was refused.
    """

    uploads: int = 0
    far: tuple[str, ...] = ()
    refused: str = ""


def settings(rounds: int) -> Iterator[tuple[str, dict[str, Scalar]]]:
    """Yield all runs of a method: name and settings."""
    for names in itertools.product(PARTITIONS, PARTICIPATION, OPTIMIZERS):
        partition, participation, optimizer = names
        own = {**PARTITIONS[partition], **PARTICIPATION[participation], **OPTIMIZERS[optimizer]}
        yield ", ".join(names), {**own, "num-server-rounds": rounds, "evaluate-every": 0}


def measure(method: str, own: dict[str, Scalar]) -> Measured:
    """Run one setting of a method."""
    with tempfile.TemporaryDirectory() as directory:
        raw: dict[str, Scalar] = {
            "method": method,
            "num-clients": CLIENTS,
            "train-samples": 0,
            "test-samples": 0,
            "device": "cpu",
            "run-name": "run",
            "output-dir": directory,
            "state-dir": f"{directory}/state",
            "fedconcat.encoder-rounds": 2,
            **own,
        }
        try:
            run(InProcessGrid(app, raw, CLIENTS), parse(raw, METHOD_PARAMS), lambda *_: None)
        except UserError as error:
            return Measured(refused=" ".join(str(error).split()))
        records = list(read_metrics(Path(directory) / "run"))
    far = tuple(
        f"round {record['round']}, client {each['client']}: {each['cause']}"
        for record in records
        for each in record.get("far", [])
    )
    return Measured(sum(len(record["clients"]) for record in records), far)


def main(arguments: Sequence[str]) -> None:
    """Print the results, method by method."""
    parser = argparse.ArgumentParser(description="Honest uploads that lie far from the others.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("methods", nargs="*", metavar="METHOD", default=list(METHODS))
    asked = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    uploads = far = 0
    for method in asked.methods:
        found = {name: measure(method, own) for name, own in settings(asked.rounds)}
        mine = sum(each.uploads for each in found.values())
        beyond = sum(len(each.far) for each in found.values())
        print(f"{method}: {beyond} of {mine}", flush=True)
        for name, each in found.items():
            for line in [f"not run: {each.refused}"] * bool(each.refused) + list(each.far):
                print(f"  {name}: {line}", flush=True)
        uploads, far = uploads + mine, far + beyond
    print(f"all: {far} of {uploads}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
