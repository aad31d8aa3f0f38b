"""The picture of who worked when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corolla.report.arrays import read_runs
from corolla.report.by_kind import spans
from corolla.report.charts import IN_TIME, LATE, LOST, WORKING
from corolla.report.groups import grouped, over_costs
from fl_app.server import arrivals
from tests.facts import mentions
from tests.report.builders import folder, record, write


def end(client: int, second: float, age: int = 0, fate: str = "used") -> dict[str, Any]:
    return {"client": client, "age": age, "second": second, "fate": fate}


LINES: list[dict[str, Any]] = [
    {"round": 1, "asked": [0, 1, 2], "away": [], "seconds": 2.0, "ends": [end(0, 1.0), end(1, 2.0)]},
    {"round": 2, "asked": [0, 1], "away": [], "seconds": 3.0, "ends": [end(0, 1.5), end(2, 0.5, 1)]},
    {"round": 3, "asked": [0, 2], "away": [], "seconds": 1.0, "ends": [end(1, 0.5, 1, "thrown-away"), end(0, 1.0)]},
]


def test_the_seconds_of_works() -> None:
    found, closes = spans(LINES)
    assert closes == [2.0, 5.0, 6.0]
    assert found == [
        (0, 0.0, 1.0, IN_TIME),
        (0, 2.0, 3.5, IN_TIME),
        (0, 5.0, 6.0, IN_TIME),
        (1, 0.0, 2.0, IN_TIME),
        (1, 2.0, 5.5, LOST),
        (2, 0.0, 2.5, LATE),
        (2, 5.0, 6.0, WORKING),
    ]


@pytest.mark.usefixtures("undrawn")
def test_a_report_has_the_picture_of_a_run_with_arrivals(tmp_path: Path) -> None:
    records = [record(t, {"0": {"accuracy-before": 0.5}}) for t in (1, 2, 3)]
    timed = folder(tmp_path / "timed", [line | {"virtual-seconds": t} for t, line in enumerate(records, 2)])
    (timed / arrivals.FILE).write_text("".join(json.dumps(line) + "\n" for line in LINES))
    page, pictures = write(tmp_path / "report", timed)
    assert {"waiting-1", "virtual-seconds"} <= pictures
    costs = over_costs(grouped(read_runs([timed]))[0])
    assert costs["paced"].tolist() == [0, 2, 5] and costs["mean"].tolist() == [0.5] * 3
    assert mentions(page, "1 of 6 works (17 %)", "thrown away", "failed")
