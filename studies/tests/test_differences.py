"""The table of differences over all test samples, and its intervals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from corolla.experiments import compare
from strategies import METHOD_PARAMS
from studies import differences
from tests.experiments.test_compare import lines, run_folder

FASHION = "fedobp/fashion-mnist-dirichlet-0.1"


def test_the_difference_is_of_all_samples_and_its_interval_that_of_other_clients() -> None:
    draw = np.random.default_rng(0)
    sizes = draw.integers(10, 900, 100)
    theirs = {str(i): (float(round(0.9 * size)), int(size)) for i, size in enumerate(sizes)}
    ours = {i: (right + float(draw.integers(-5, 12)), size) for i, (right, size) in theirs.items()}
    mean, half = differences.difference([(ours, theirs)])
    gains = np.array([ours[i][0] - theirs[i][0] for i in ours])
    assert mean == pytest.approx(gains.sum() / sizes.sum())
    chosen = draw.integers(0, 100, (20_000, 100))
    resampled = gains[chosen].sum(axis=1) / sizes[chosen].sum(axis=1)
    assert half == pytest.approx(1.98 * resampled.std(), rel=0.05)
    again = differences.difference([(ours, theirs), (ours, theirs)])
    # the same clients twice count once
    assert again == pytest.approx((mean, half))


def test_tests_of_other_samples_are_not_compared() -> None:
    with pytest.raises(ValueError, match="same samples"):
        differences.difference([({"0": (9.0, 10)}, {"0": (9.0, 11)})])
    assert np.isnan(differences.difference([({"0": (9.0, 10)}, {"0": (8.0, 10)})])[1])


def one_test(
    root: Path, name: str, preset: str, right: list[tuple[int, int]], tuned: bool = True, seed: int = 0
) -> Path:
    """Write a run with one test per entry of `right`.

    An entry is the two clients' right answers before fine-tuning, out of 10 and out of 30. After fine-tuning each has
    two more.
    """
    path = run_folder(root, name, preset, {"final-accuracy-pooled": 0.5}, seed=seed)
    records = []
    for t, pair in enumerate(right, start=1):
        rows = {
            str(i): {"accuracy": r / n, "test-samples": n} for i, (r, n) in enumerate(zip(pair, (10, 30), strict=True))
        }
        evaluation = {"accuracy-pooled": sum(pair) / 40, "accuracy-finetuned-pooled": None, "clients": rows}
        if tuned:
            evaluation["accuracy-finetuned-pooled"] = (sum(pair) + 4) / 40
            for row in rows.values():
                row["accuracy-finetuned"] = row["accuracy"] + 2 / row["test-samples"]
        records.append({"round": t, "seconds": {"round": 1.0}, "evaluation": evaluation})
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_best_tests_are_compared_with_the_first_rows(tmp_path: Path) -> None:
    one_test(tmp_path, "a", FASHION, [(5, 15), (8, 20)])
    one_test(tmp_path, "b", f"{FASHION}/fedavg", [(6, 18), (1, 1)])
    one_test(tmp_path, "c", f"{FASHION}/local", [(9, 21)], seed=7)
    ordered = sorted(lines(tmp_path), key=lambda line: ("fedobp", "fedavg", "local").index(line.runs[0].config.method))
    header, _, *rows = differences.differences_table(ordered)
    assert header == "| method | before: from fedobp before | fine-tuned: from fedobp before |"
    # t of 1; -4 of 40, so -0.1; clients of 10 and 30
    half = 100 * 12.7062 * np.std([-2 + 1, -2 + 3], ddof=1) / 20 / 2**0.5
    assert rows[0] == f"| fedobp | – | +10.00 ± {half:.2f} |"
    # another seed, hence nothing to compare
    assert rows[1] == "| local | n/a | n/a |"
    assert rows[2] == f"| fedavg | -10.00 ± {half:.2f} | +0.00 ± 0.00 |"
    assert rows[3:5] == ["", rows[4]] and "over all 40 test samples" in rows[4] and "the 2 clients" in rows[4]


def test_without_fine_tuning_there_is_one_column_and_without_tests_no_table(tmp_path: Path) -> None:
    one_test(tmp_path, "a", FASHION, [(5, 15)], tuned=False)
    one_test(tmp_path, "b", f"{FASHION}/fedavg", [(5, 15)], tuned=False)
    assert next(iter(differences.differences_table(lines(tmp_path)))) == "| method | before: from fedobp before |"
    run_folder(tmp_path / "bare", "c", FASHION, {})
    assert (
        list(
            differences.differences_table(
                compare.beside(compare.load([tmp_path / "bare"], METHOD_PARAMS)[0], METHOD_PARAMS)
            )
        )
        == []
    )
