"""The figures of a private round's costs in studies/privacy.md are those that its command measures."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.privacy import by_clients
from fl_app.layout import Model

PAGE = Path(__file__).parents[2] / "studies" / "privacy.md"
D = 1_244_404


def published(n: int) -> list[float]:
    (row,) = [
        line for line in PAGE.read_text().splitlines() if line.startswith(f"| {n:,} | ") and line.count("|") == 12
    ]
    return [float(cell.replace(",", "")) for cell in row.strip("| ").split(" | ")[1:]]


def test_costs_are_those_that_the_page_has() -> None:
    found = list(by_clients(10, Model(np.full(D, 0.01, np.float32), np.zeros(0, np.float32))).values())
    told = published(10)
    assert len(found) == len(told) == 10
    for name, value, figure in zip(range(10), found, told, strict=True):
        # seconds are of a machine, and another one may be faster; bytes are of the protocol
        low, high = (0, 4) if name < 5 else (0.99, 1.01)
        assert low * figure <= value <= high * figure, (name, value, figure)
    # a round's bytes beside those of a plain one
    assert told[6] / told[7] < 2.001 and told[5] + told[8] < 0.001 * told[7]


def test_costs_of_more_clients_grow_as_their_number() -> None:
    ten, hundred, thousand = map(published, (10, 100, 1000))
    for few, more in ((ten, hundred), (hundred, thousand)):
        assert all(a <= b <= 15 * a for a, b in zip(few, more, strict=True))
