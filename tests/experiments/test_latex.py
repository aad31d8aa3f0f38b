"""Tables for papers, and CSV files in which no client's text is a formula."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from corolla.experiments.result_table import csv_text
from strategies import METHODS
from tests.conftest import Command
from tests.experiments.test_significance import write_run
from tests.report.conftest import undrawn as undrawn

GAINS = {"fedavg": 0.0, "perfedavg": -0.1, "lg-fedavg": 0.1, "fedcac": 0.2}


def write_all(root: Path, alphas: tuple[float, ...] = (0.1,), seeds: int = 3) -> None:
    for alpha in alphas:
        for method, gain in GAINS.items():
            for seed in range(seeds):
                # no two differences of clients, or of seeds, are equal
                final = [0.4 + gain * (1 + 0.01 * i + 0.02 * seed) for i in range(5)]
                keys = {"partition": "dirichlet", "dirichlet_alpha": alpha, "method": method, "seed": seed}
                write_run(root, f"{method}{alpha}{seed}", final, **keys)


def final_figures(latex: str) -> list[tuple[str, str]]:
    """Return (method, final figure) of each row of the first table."""
    lines = [line.removesuffix(r" \\").split(" & ") for line in latex.partition(r"\bottomrule")[0].splitlines()]
    header = next(line for line in lines if "method" in line)
    method, final = header.index("method"), next(k for k, name in enumerate(header) if name.startswith("final-"))
    return [(line[method], line[final]) for line in lines if len(line) == len(header) and line != header]


def test_every_method_has_its_papers_name() -> None:
    assert [re.sub("[^a-z]", "", METHODS.title(name).lower()) for name in METHODS] == [
        name.replace("-", "") for name in METHODS
    ]
    assert METHODS.title("perfedavg") == "Per-FedAvg" and METHODS.title("my_file:METHOD") == "my_file:METHOD"


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("whence", ["compare", "report"])
def test_best_second_and_significance_are_marked(tmp_path: Path, command: Command, whence: str) -> None:
    write_all(tmp_path / "runs")
    if whence == "compare":
        code, text, err = command("compare", tmp_path / "runs", "--reference", "fedavg", "--latex")
    else:
        code, _, err = command("report", tmp_path / "runs", "--output", tmp_path, "--tables", tmp_path, "--latex")
        text = (tmp_path / "results.tex").read_text()
    assert code == 0, err
    final = dict(final_figures(text))
    assert final.keys() == {METHODS.title(name) for name in GAINS}
    assert final["FedCAC"].startswith(r"\textbf{") and final["LG-FedAvg"].startswith(r"\underline{")
    assert not re.match(r"\\(textbf|underline)", final["FedAvg"] + final["Per-FedAvg"])
    # all differ from FedAvg, and three of them from the report's first row
    assert sum(cell.endswith("$^{*}$") for cell in final.values()) >= 3
    # the differences follow, and the marks are explained
    assert text.count(r"\toprule") == 3 and "bold" in text and "Wilcoxon" in text


def test_marks_are_of_rows_with_the_same_data(tmp_path: Path, command: Command) -> None:
    write_all(tmp_path, (0.1, 1.0), seeds=1)
    _, text, _ = command("compare", tmp_path, "--latex")
    best = [method for method, cell in final_figures(text) if r"\textbf" in cell]
    second = [method for method, cell in final_figures(text) if r"\underline" in cell]
    assert best == ["FedCAC"] * 2 and second == ["LG-FedAvg"] * 2
    # one seed decides nothing
    assert "$^{*}$" not in text


def test_lower_is_better_for_an_error_and_equal_figures_share_a_mark(tmp_path: Path, command: Command) -> None:
    for method, value in (("fedavg", 3.0), ("local", 1.0), ("fedper", 1.00000001), ("fedbn", 2.0)):
        folder = write_run(tmp_path, method, [value], method=method, task="regression", partition="iid")
        for file in ("metrics.jsonl", "summary.json"):
            (folder / file).write_text((folder / file).read_text().replace("accuracy", "rmse"))
        metric = {"name": "rmse", "higher_is_better": False, "low": 0.0}
        (folder / "run.json").write_text(json.dumps({"metrics": [metric]}))
    code, text, err = command("compare", tmp_path, "--latex")
    assert code == 0, err
    looks = {method: cell[:5] for method, cell in final_figures(text)}
    assert looks["Local"] == looks["FedPer"] == r"\text" and looks["FedBN"] == r"\unde" and looks["FedAvg"][0].isdigit()


def test_rows_that_are_alone_have_no_mark(tmp_path: Path, command: Command) -> None:
    write_run(tmp_path, "a", [0.5, 0.6], method="fedavg")
    _, text, _ = command("compare", tmp_path, "--latex")
    assert r"\textbf" not in text and "bold" not in text


# CSV files in which no client's text is a formula ---------------------------------------------------------------------


def test_a_formula_is_a_text_and_a_number_stays_a_number() -> None:
    cells = [
        "=cmd|'/C calc'!A0",
        "+1+1",
        "-2+3",
        "@SUM(A1)",
        "\t=1",
        "\r=1",
        "a=b",
        "-1.5",
        "+2",
        "1e-3",
        "",
        'a,"b"\n',
    ]
    escaped = [f"'{cell.lstrip()}" if cell == "\r=1" else f"'{cell}" for cell in cells[:6]] + cells[6:]
    text = csv_text([cells, [-1.5, None, True, 7]])
    assert list(csv.reader(text.splitlines(keepends=True))) == [escaped, ["-1.5", "", "True", "7"]]
