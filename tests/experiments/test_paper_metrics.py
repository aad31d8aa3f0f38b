"""All figures that a paper may mean, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corolla.experiments import compare, paper_table
from strategies import METHOD_PARAMS
from tests.experiments.test_compare import lines, run_folder

FASHION = "fedobp/fashion-mnist-dirichlet-0.1"


def run_tested(root: Path, name: str, preset: str, values: list[float], **changes: Any) -> Path:
    """Write a run whose tests after rounds 2, 4, ... have these means; pooled a point, fine-tuned two more."""
    path = run_folder(root, name, preset, {"final-accuracy-pooled": values[-1] + 0.01}, **changes)
    records: list[dict[str, Any]] = []
    for k, value in enumerate(values):
        records.append(
            {"round": 2 * k + 1, "accuracy-after": 0.6, "accuracy-after-pooled": None, "seconds": {"round": 5.0}}
        )
        tests = {"accuracy": value, "accuracy-pooled": value + 0.01, "accuracy-finetuned": value + 0.02}
        tests |= {"accuracy-finetuned-pooled": value + 0.03}
        more = {"accuracy-after": 0.8, "accuracy-after-pooled": 0.7, "seconds": {"round": 7.0}}
        records.append({"round": 2 * k + 2, **more, "evaluation": {**tests, "clients": {}}})
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_last_and_best_of_the_tests_mean_and_pooled_before_and_fine_tuned(tmp_path: Path) -> None:
    (run,) = compare.load([run_tested(tmp_path, "a", FASHION, [0.5, 0.9, 0.7])], METHOD_PARAMS)[0]
    assert list(run.evaluations) == [2, 4, 6]
    assert paper_table.figures(run) == pytest.approx(
        {
            "before, mean, last": 0.7,
            "before, mean, best": 0.9,
            "before, pooled, last": 0.71,
            "before, pooled, best": 0.91,
            "fine-tuned, mean, last": 0.72,
            "fine-tuned, mean, best": 0.92,
            "fine-tuned, pooled, last": 0.73,
            "fine-tuned, pooled, best": 0.93,
            "trained, mean": 0.7,
            "trained, pooled": 0.7,
        }
    )


def test_the_table_has_seeds_together_and_the_distances_from_the_papers_figures(tmp_path: Path) -> None:
    run_tested(tmp_path, "a", FASHION, [0.95, 0.97])
    run_tested(tmp_path, "b", FASHION, [0.97, 0.99], seed=1)
    run_tested(tmp_path, "c", f"{FASHION}/fedavg", [0.88, 0.86], finetune_epochs=0)
    found = paper_table.figures_table(lines(tmp_path))
    header, obp, fedavg, distance = (dict(zip(found[0], line, strict=True)) for line in found)
    assert list(header) == [
        "preset",
        "published",
        "before, mean",
        "before, pooled",
        "fine-tuned, mean",
        "fine-tuned, pooled",
        "trained, mean",
        "trained, pooled",
    ]
    assert obp["published"] == "96.89 ± 0.03" and obp["before, mean"] == "98.00 ± 1.41 / 98.00 ± 1.41"
    assert fedavg["published"] == "87.29 ± 0.45" and fedavg["before, mean"] == "86.00 / 88.00"
    assert distance["before, mean"] == f"{(1.11 + 1.29) / 2:.2f} / {(1.11 + 0.71) / 2:.2f}"
    assert paper_table.figures_table(lines(run_folder(tmp_path / "bare", "d", FASHION, {}))) == []
    # another method under this name
    run_tested(tmp_path, "d", f"{FASHION}/flute", [0.98, 0.98], finetune_epochs=0)
    assert paper_table.figures_table(lines(tmp_path))[-1][2] == distance["before, mean"]
    # 10.8 away: the median is not led astray
    run_tested(tmp_path, "e", f"{FASHION}/fedrep", [0.85, 0.85], finetune_epochs=0)
    assert paper_table.figures_table(lines(tmp_path))[-1][2] == "1.29 / 1.11"


def test_fedobps_figure_is_the_best_test_of_all_clients_over_all_samples(tmp_path: Path) -> None:
    (line,) = lines(run_tested(tmp_path, "a", FASHION, [0.5, 0.9, 0.7]))
    assert line.ours == (0.91, None) and line.finetuned == (pytest.approx(0.93), None)
    assert line.preset.settings["evaluate-every"] == 100
    (untested,) = lines(run_folder(tmp_path / "b", "b", FASHION, {"final-accuracy-pooled": 0.6}))
    assert untested.ours == (0.6, None)


def test_a_single_test_has_no_best(tmp_path: Path) -> None:
    _, row = paper_table.figures_table(lines(run_tested(tmp_path, "a", FASHION, [0.9])))
    assert row[2] == "90.00"
