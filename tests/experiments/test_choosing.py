"""Which row of a sweep is the best, by validation or test data, and that it is said which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from corolla.experiments import compare, significance
from corolla.experiments.result_table import Row
from corolla.experiments.runs import RecordedRun
from fl_app.metrics import Metric
from fl_app.tasks import ACCURACY
from strategies import METHOD_PARAMS
from tests.conftest import Command
from tests.experiments.test_significance import write_run
from tests.facts import each_mentions, mentions

RMSE = Metric("rmse", higher_is_better=False, low=0)


def row(method: str, tau: float, final: float, validation: float | None = None, metric: Metric = ACCURACY) -> Row:
    run = RecordedRun(Path(method))
    vars(run)["settings"] = {"method": method}
    means: dict[str, Any] = {"final": (final, None)}
    if validation is not None:
        means["validation"] = (validation, None)
    return Row({"method": method, "fedcac.tau": tau}, [run], metric, means)


ROWS = [row("fedcac", 0.1, 0.9, 0.5), row("fedcac", 0.3, 0.8, 0.7), row("fedavg", 0.5, 0.7, 0.6)]


def test_the_best_is_of_validation_data_where_there_are_any() -> None:
    assert each_mentions(
        significance.best_lines(ROWS),
        ("best of fedcac", "validation accuracy", "method fedcac", "fedcac.tau 0.3 (70.00", "data 80.00"),
        ("best of all", "validation accuracy", "method fedcac", "fedcac.tau 0.3 (70.00", "data 80.00"),
        ("next row", "method fedavg", "fedcac.tau 0.5", "other data", "clients or seeds"),
        ("first row", "method fedcac", "fedcac.tau 0.1", "other data", "clients or seeds"),
    )
    assert significance.best_lines(ROWS, "test")[1:] == [
        "best of all by test accuracy: method fedcac, fedcac.tau 0.1 (90.00)",
        "compared with the next row, method fedcac, fedcac.tau 0.3: other data, clients or seeds",
        significance.ON_TEST,
    ]
    assert significance.best_lines([*ROWS, row("local", 0, 0.95)])[-1] == significance.ON_TEST
    assert significance.best_lines(ROWS[:1]) == [] == significance.best_lines([])


def test_the_lowest_is_the_best_where_low_is_good() -> None:
    rows = [row("a", 1, 3.0, 2.0, RMSE), row("a", 2, 1.0, 4.0, RMSE)]
    first, _ = significance.best_lines(rows)
    assert mentions(first, "best of all", "validation RMSE", "method a", "fedcac.tau 1 (2", "data 3")


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [([0.1, 0.11, 0.12], "better"), ([0.2, 0.01, -0.1], "not told apart"), ([0.1, 0.11], "undecided: needs 3 seeds")],
)
def test_the_best_row_is_compared_with_the_next(tmp_path: Path, gains: list[float], verdict: str) -> None:
    for seed, gain in enumerate(gains):
        write_run(tmp_path, f"local{seed}", [0.5, 0.6, 0.7], method="local", seed=seed)
        write_run(tmp_path, f"ditto{seed}", [0.5 + gain, 0.61 + gain, 0.72 + gain], method="ditto", seed=seed)
    groups = compare.group(compare.load([tmp_path], METHOD_PARAMS)[0])
    lines = significance.best_lines(compare.result_rows(groups))
    assert mentions(lines[-3], "best of all", "test accuracy", "method ditto")
    assert mentions(lines[-2], "compared", "next row", "method local", verdict)


SWEEP = """
[settings]
method = "fedavg"
num-clients = 2
num-server-rounds = 1
local-epochs = 1
train-samples = 20
test-samples = 10

[grid]
learning-rate = [0.001, 0.5]
"""


@pytest.mark.parametrize("ratio", ["0.25", "0"])
def test_a_sweep_says_which_is_best(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ratio: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.toml").write_text(SWEEP)
    words = ["sweep", "s.toml", "--in-process", "--set", f"validation-ratio={ratio}", "--set", f"data-dir={tmp_path}"]
    if ratio == "0":
        code, _, err = command(*words, "--best-by", "validation")
        assert code == 2 and mentions(err, "--best-by validation", "needs validation-ratio above 0", "which is 0 in")
        assert not (tmp_path / "runs").exists()
    code, out, err = command(*words, *(["--best-by", "validation"] if ratio != "0" else []))
    assert code == 0, err
    said, written = " ".join(out.split()), (tmp_path / "runs/s/results.md").read_text()
    by = "test" if ratio == "0" else "validation"
    assert mentions(said, "best of all", f"{by} accuracy", "learning-rate") and mentions(
        written, "best of all", f"{by} accuracy"
    )
    assert mentions(said, "next", "corolla compare runs/s #", "tested over", "runs/s #")
    assert mentions(said, "compared", "next row", "learning-rate")
    assert (mentions(said, "chosen on test", "figure is too")) == (ratio == "0")
    header = (tmp_path / "runs/s/results.csv").read_text().splitlines()[0]
    assert ("final-validation-accuracy-mean" in header) == (ratio != "0")
