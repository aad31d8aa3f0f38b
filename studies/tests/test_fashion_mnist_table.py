"""The early stage's table: the runs of a row, and the names of rows."""

from __future__ import annotations

from pathlib import Path

from corolla import presets
from studies import fashion_mnist_table
from tests.experiments.test_compare import runs_of_three_settings


def test_runs_that_differ_in_the_seed_alone_are_one_row(tmp_path: Path) -> None:
    runs_of_three_settings(tmp_path)
    shown = [line.split("|")[1:] for line in fashion_mnist_table.lines([tmp_path])[2:]]
    own = presets.read_preset("fedpake/cifar10-dirichlet-0.1")
    usual, tuned_by = own.get("fedpake.divisor", "found"), own.get("finetune-epochs", 0)
    assert {(cells[0].strip(), cells[-2].strip()) for cells in shown} == {
        (f"fedpake ({tuned_by}, {usual})", "4"),
        (f"fedpake ({tuned_by}, limit)", "2"),
        (f"fedpake (3, {usual})", "1"),
    }
