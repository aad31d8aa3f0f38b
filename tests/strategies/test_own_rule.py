"""A new rule for means is one file and one name: two are added to a copy of Corolla, and warnings and errors are right."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.facts import mentions

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("fl_app", "strategies", "client_app", "deploy", "corolla")

RULE = """
from strategies.kernels.averages import ByColumn
from strategies.kernels.trimming import trimmed

RULE = ByColumn(lambda block, rows, num_byzantine: trimmed(block, rows, {cut}), counts_byzantine={counts})
"""
NAME = '"geometric-median"]'
DRIVER = """
import contextlib, io, json
import numpy as np
from corolla.api.checks import warn_of_settings
from fl_app.config import parse
from strategies import METHOD_PARAMS, METHODS
from strategies.kernels.robust import Averaging

said = {}
for rule in ("of-two-sides", "by-byzantine"):
    raw = {"method": "fedavg", "dataset": "digits", "num-clients": 5, "robust": rule, "byzantine-ratio": 0.4}
    config = parse(raw, METHOD_PARAMS)
    METHODS["fedavg"].check(config)
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        warn_of_settings([], [(config, {"robust", "byzantine-ratio"})])
    rows = np.arange(5, dtype=np.float32)[:, None] ** 2
    said[rule] = (" ".join(shown.getvalue().split()), float(Averaging(rule, 0.4).mean(rows)[0]))
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of Corolla with two more rules."""
    root = tmp_path_factory.mktemp("clone")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    folder = root / "strategies" / "kernels" / "averages"
    (folder / "of_two_sides.py").write_text(RULE.format(cut=1, counts=False))
    (folder / "by_byzantine.py").write_text(RULE.format(cut="num_byzantine", counts=True))
    names = root / "fl_app" / "known_names.py"
    text = names.read_text()
    assert text.count(NAME) == 1
    names.write_text(text.replace(NAME, '"geometric-median", "of-two-sides", "by-byzantine"]'))
    return root


def test_a_new_rule_averages_and_no_warning_of_it_is_false(clone: Path, tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(clone)!r})\n{DRIVER}"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    # of 0, 1, 4, 9 and 16: without one value of each side, and without two
    assert said["by-byzantine"] == ["", 4]
    warned, mean = said["of-two-sides"]
    assert mentions(warned, "byzantine-ratio has no", "effect", "= of-two-sides") and mean == pytest.approx(14 / 3)
