"""CSV files in which no client's text is a formula."""

from __future__ import annotations

import csv

from corolla.experiments.result_table import csv_text


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
