"""Every method with every feature, for the night: `python -m tests.matrix [--methods fedavg,fedcac] [--features cosine,half]`.

Digits, six clients, two rounds, in this process, one run after the other. A cell of the table it prints is `ok`, `refused` or what
is wrong:

- a run ends, or is refused by a UserError that names no exception; no client fails in one that ends;
- the digest is that of the method's plain run where a feature cannot change it (`same`);
- a client's exported model has the accuracy that the run recorded of it.

Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from client_app.client_app import app
from client_app.session import prepare_training
from corolla.experiments.exported import loading, predict
from corolla.experiments.exported.export import export
from fl_app import data
from fl_app.config import RunConfig, parse
from fl_app.errors import UserError
from fl_app.keys import Scalar
from fl_app.server.run_folder import RunFolder, read_metrics, read_summary
from fl_app.server_app import run
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS, METHODS
from tests.conftest import IN_TWO_ROUNDS

CLIENTS = 6
BASE: Mapping[str, Scalar] = {
    "num-server-rounds": 2,
    "num-clients": CLIENTS,
    "train-samples": 24,
    "test-samples": 10,
    "local-epochs": 1,
    "batch-size": 8,
    "learning-rate": 0.05,
    "device": "cpu",
    "collect-personal-models": True,
}
PLAIN = "plain"
# what an error says where an exception was not foreseen
EXCEPTION = re.compile(r"\b[A-Z]\w*(Error|Exception|Warning): ")
# of an accuracy: outputs of a batch of another size differ in their last bits
CLOSE = 1e-6


@dataclass(frozen=True)
class Feature:
    """Settings on top of BASE. same: they cannot change the digest."""

    settings: Mapping[str, Scalar]
    same: bool = False


FEATURES: Mapping[str, Feature] = {
    PLAIN: Feature({}),
    "again": Feature({}, same=True),
    "evaluate-every": Feature({"evaluate-every": 1}, same=True),
    "finetune": Feature({"finetune-epochs": 1}, same=True),
    "all-metrics": Feature({"metrics": "all"}, same=True),
    "checkpoints": Feature({"checkpoint-every": 1, "keep-state": True}, same=True),
    "memory-limit": Feature({"server-memory-limit": 1e-6}, same=True),
    "no-class-counts": Feature({"report-class-counts": False}, same=True),
    "half": Feature({"fraction-train": 0.5}),
    "holdout": Feature({"holdout-clients": 0.4}),
    "momentum": Feature({"momentum": 0.9, "weight-decay": 1e-3}),
    "adamw": Feature({"optimizer": "adamw", "learning-rate": 0.003}),
    "adam": Feature({"optimizer": "adam", "learning-rate": 0.003}),
    "local-steps": Feature({"local-steps": 3}),
    "step": Feature({"schedule": "step:1", "learning-rate-decay": 0.5}),
    "plateau": Feature({"schedule": "plateau:1", "learning-rate-decay": 0.5}),
    "keep-best": Feature({"keep-best": True, "validation-ratio": 0.3, "evaluate-every": 1}),
    "cosine": Feature({"schedule": "cosine"}),
    "clip-norm": Feature({"clip-norm": 0.5}),
    "bfloat16": Feature({"precision": "bfloat16"}),
    "float16": Feature({"precision": "float16"}),
    "batch-1": Feature({"batch-size": 1}),
    "cnn": Feature({"model": "cnn"}),
    "resnet8": Feature({"model": "resnet8"}),
    "group-norm": Feature({"model": "resnet8", "norm": "group"}),
    "iid": Feature({"partition": "iid"}),
    "pathological": Feature({"partition": "pathological"}),
    "median": Feature({"robust": "median"}),
    "krum": Feature({"robust": "krum"}),
    "private": Feature({"private": True, "collect-personal-models": False}),
    "dp": Feature({"dp-epsilon": 8.0}),
    "no-accuracy": Feature({"report-accuracy": False}, same=True),
    "share": Feature({"share": "*.weight"}),
    "train-weights": Feature({"train": "*.weight"}),
    "train-biases": Feature({"train": "*.bias"}),
}


class Wrong(Exception):
    """A check that failed, in words."""


def start(directory: Path, method: str, feature: str) -> tuple[RunFolder, RunConfig]:
    """Run a method with a feature. Raises UserError if it is refused, and whatever else goes wrong."""
    raw: dict[str, Scalar] = {
        **BASE,
        "method": method,
        "run-name": f"{method}-{feature}",
        "output-dir": str(directory),
        "state-dir": str(directory / "state"),
        **IN_TWO_ROUNDS.get(method, {}),
        **FEATURES[feature].settings,
    }
    config = parse(raw, METHOD_PARAMS)
    return run(InProcessGrid(app, raw, CLIENTS), config, lambda *_: None), config


def check(directory: Path, method: str, feature: str, plain: str) -> str:
    """Run a method with a feature, and return its digest. plain: that of the plain run, "" if it is not known.

    Raises UserError if it is refused, Wrong if a check fails.
    """
    folder, config = start(directory, method, feature)
    for record in read_metrics(folder.path):
        for part in (record, record.get("evaluation") or {}):
            for failure in part.get("failures", []):
                raise Wrong(f"client {failure['client']} failed: {failure['cause']}")
    digest = str(read_summary(folder.path)["digest"])
    if FEATURES[feature].same and plain and digest != plain:
        raise Wrong(f"digest {digest[:8]}, of the plain run {plain[:8]}")
    if config.collect_personal_models and config.report_accuracy:
        check_exported(folder, config, directory)
    return digest


def check_exported(folder: RunFolder, config: RunConfig, directory: Path) -> None:
    """Raise Wrong unless the first client's exported model has the accuracy that the last evaluation recorded."""
    recorded = list(read_metrics(folder.path))[-1]["evaluation"]["clients"]["0"]["accuracy"]
    file, card = export(folder.path, METHODS, 0, directory / f"{folder.path.name}.pt")
    test = data.open_client(config, 0)
    outputs, _ = predict.ask(loading.open_file(file, card, METHODS), test.x_test, card)
    _, accuracy = predict.measure(outputs, test.y_test, card)
    # in float32: a batch's other arithmetic may turn single samples
    allowed = 1 / len(test.y_test) if config.precision in ("bfloat16", "float16") else CLOSE
    if abs(accuracy - recorded) > allowed + CLOSE:
        raise Wrong(f"exported model: accuracy {accuracy:.3f}, recorded {recorded:.3f}")


def outcome(directory: Path, method: str, feature: str, plain: str) -> tuple[str, str, str]:
    """Return a cell of the table, what there is to say of it, and the digest of a run that ended."""
    try:
        return "ok", "", check(directory, method, feature, plain)
    except UserError as error:
        text = " ".join(str(error).split())
        return ("WRONG" if EXCEPTION.search(text) else "refused"), text, ""
    except Wrong as error:
        return "WRONG", str(error), ""
    except Exception:
        return "WRONG", traceback.format_exc(), ""


def chosen(given: str, known: Sequence[str], what: str) -> list[str]:
    """Return the names given with commas, or all. Raises SystemExit for one that there is not."""
    names = [name.strip() for name in given.split(",") if name.strip()] or list(known)
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"--{what}: no {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def main(words: Sequence[str] | None = None) -> int:
    """Print the table and what is behind its cells; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description="every method with every feature")
    parser.add_argument("--methods", default="", help="with commas; all")
    parser.add_argument("--features", default="", help=f"with commas, of {', '.join(FEATURES)}; all")
    given = parser.parse_args(words)
    methods, features = (
        chosen(given.methods, list(METHODS), "methods"),
        chosen(given.features, list(FEATURES), "features"),
    )
    logging.disable(logging.CRITICAL)
    prepare_training(threads=1)
    width, said, wrong = max(map(len, features)) + 2, list[str](), 0
    print(" " * 12 + "".join(name.ljust(width) for name in features))
    for method in methods:
        cells, digest_of_plain = [], ""
        with tempfile.TemporaryDirectory() as directory:
            # others are compared with it
            for feature in dict.fromkeys((PLAIN, *features)):
                cell, text, digest = outcome(Path(directory), method, feature, digest_of_plain)
                digest_of_plain = digest if feature == PLAIN else digest_of_plain
                if feature in features or cell == "WRONG":
                    cells.append(cell)
                    wrong += cell == "WRONG"
                    said += [f"{method}, {feature}: {cell}: {text}"] * bool(text)
        print(method.ljust(12) + "".join(cell.ljust(width) for cell in cells), flush=True)
    print("\n".join(["", *said, "", f"{wrong} wrong of {len(methods) * len(features)}"]))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
