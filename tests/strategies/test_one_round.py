"""examples/one_round.py: FedCAC's round with the kernels alone gives what the method gives, in at most 200 lines."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strategies import fedcac

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "one_round.py"
TEXT = EXAMPLE.read_text("utf-8")


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def test_it_needs_only_numpy_and_kernels() -> None:
    nodes = [node for node in ast.walk(ast.parse(TEXT)) if isinstance(node, ast.Import | ast.ImportFrom)]
    known = {"__future__", "dataclasses", "numpy", "numpy.typing", "strategies.kernels"}
    assert {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in nodes} == known
    assert len(TEXT.splitlines()) <= 200


@pytest.mark.parametrize("round", [1, 4, 8, 9])
def test_a_round_is_that_of_the_method(example: dict[str, Any], round: int) -> None:
    data = example["clients"](round)
    start = np.random.default_rng(round).normal(size=(len(data), example["D"])).astype(np.float32)
    models, everyone = example["one_round"](start, data, round)
    W = np.array([example["train"](w, client) for w, client in zip(start, data, strict=True)])
    bits = np.array([example["critical"](before, after) for before, after in zip(start, W, strict=True)])
    sizes = np.array([len(client.y) for client in data], float)
    mean, personalized = fedcac.personalize(W, bits, round, beta=example["BETA"], weights=sizes)
    assert (everyone == mean).all() and (models == personalized).all()


def test_it_runs() -> None:
    shown = subprocess.run(
        [sys.executable, str(EXAMPLE)], cwd=EXAMPLE.parents[1], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(shown) == 10
    own, shared = (float(part.split()[-1]) for part in shown[-1].split(","))
    assert own > shared
