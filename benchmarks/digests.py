"""Digests of short runs, every method x {mlp, resnet8} x {all, half of the clients}; a refactoring must keep them.

`python -m benchmarks.digests [--version 1] [METHOD ...]` prints the digest's version, then a line per run: three rounds
in process, all method parameters at their defaults except FedConcat's phases. Two trees compute the same if they print
the same on one machine. A tree that prints no version prints version 1, of parameters alone. `--version 1` makes other
trees print that, too.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from client_app.client_app import app
from fl_app.config import parse
from fl_app.errors import UserError
from fl_app.keys import Scalar
from fl_app.metrics import DIGEST_VERSION
from fl_app.server import record as records
from fl_app.server.run_folder import read_metrics
from fl_app.server_app import run
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS, METHODS

CLIENTS = 4
MODELS = ("mlp", "resnet8")
FRACTIONS = (1.0, 0.5)


def digest(directory: Path, method: str, model: str, fraction: float, version: int = DIGEST_VERSION) -> str:
    """Return the digest of three rounds with `CLIENTS` clients, a `fraction` of them in every round.

    version: the digest's version.
    """
    raw: dict[str, Scalar] = {
        "method": method,
        "model": model,
        "fraction-train": fraction,
        "num-server-rounds": 3,
        "num-clients": CLIENTS,
        "train-samples": 24,
        "test-samples": 12,
        "local-epochs": 2,
        "batch-size": 8,
        "learning-rate": 0.05,
        "momentum": 0.5,
        "device": "cpu",
        "run-name": f"{method}-{model}-{fraction}",
        "output-dir": str(directory),
        "state-dir": str(directory / "state"),
        "fedconcat.encoder-rounds": 1,
    }
    folder = run(InProcessGrid(app, raw, CLIENTS), parse(raw, METHOD_PARAMS), lambda *_: None)
    *_, last = read_metrics(folder.path)
    return records.digest(last["evaluation"]["clients"].values(), version)


def main(arguments: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Digests of short runs.")
    parser.add_argument("--version", type=int, choices=range(1, DIGEST_VERSION + 1), default=DIGEST_VERSION)
    parser.add_argument("methods", nargs="*", metavar="METHOD", default=list(METHODS))
    asked = parser.parse_args(arguments)
    version = asked.version
    print(f"digest-version = {version}", flush=True)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as directory:
        for method in asked.methods:
            for model in MODELS:
                for fraction in FRACTIONS:
                    try:
                        found = digest(Path(directory), method, model, fraction, version)
                    except UserError as error:
                        found = f"refused: {error}"
                    print(f"{method:10} {model:8} {fraction:4}  {found}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
