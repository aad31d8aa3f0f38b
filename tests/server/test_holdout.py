"""Clients that never train: drawn by the seed, left out of every round, told of apart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from corolla.report import arrays
from corolla.report.arrays import read_run, read_runs
from corolla.report.csv_files import client_lines, round_lines
from fl_app.server.run_folder import read_metrics, read_summary
from strategies import METHODS
from tests.conftest import IN_TWO_ROUNDS, Run, config
from tests.report.builders import write
from tests.report.conftest import undrawn as undrawn

# a global model, a head of the clients' own, none of both, several
QUICK = (
    "fedavg",
    "fedcac",
    "feddac",
    "fedper",
    "ifca",
)


def test_who_is_unseen() -> None:
    assert config(num_clients=10).unseen == frozenset()
    some = config(num_clients=10, holdout_clients=0.2).unseen
    assert len(some) == 2 and some <= set(range(10)) and some == config(num_clients=10, holdout_clients=0.2).unseen
    assert len(config(num_clients=3, holdout_clients=0.01).unseen) == 1
    assert len(config(num_clients=2, holdout_clients=0.9).unseen) == 1
    assert [config(num_clients=10, holdout_clients=h).num_training for h in (0.0, 0.2)] == [10, 8]


@pytest.mark.parametrize(
    "method", [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in METHODS]
)
def test_a_run_with_unseen_clients(run: Run, method: str) -> None:
    folder = run(method=method, num_clients=4, holdout_clients=0.25, finetune_epochs=1, **IN_TWO_ROUNDS.get(method, {}))
    (unseen,) = config(num_clients=4, holdout_clients=0.25).unseen
    rounds, summary = list(read_metrics(folder.path)), read_summary(folder.path)
    assert all(set(r["clients"]) == {str(i) for i in range(4) if i != unseen} for r in rounds)
    evaluation = rounds[-1]["evaluation"]
    rows = evaluation["clients"]
    seen = [row["accuracy"] for i, row in rows.items() if i != str(unseen)]
    assert evaluation["accuracy"] == pytest.approx(sum(seen) / 3) == summary["final-accuracy"]
    apart = rows[str(unseen)]
    assert evaluation["unseen"]["ids"] == [unseen] and summary["unseen-accuracy"] == apart["accuracy"]
    assert summary["unseen-accuracy-finetuned"] == apart["accuracy-finetuned"] and summary["digest"]
    last = round_lines(read_run(folder.path))[-1]
    assert (
        last["evaluation-unseen-accuracy"] == apart["accuracy"]
        and last["evaluation-accuracy"] == evaluation["accuracy"]
    )
    marked = [(line["client"], line["unseen"]) for line in client_lines(read_run(folder.path)) if line["round"] == 2]
    assert marked == [(i, i == unseen) for i in range(4)]


@pytest.mark.usefixtures("undrawn")
def test_the_report_has_one_column_of_them(run: Run, tmp_path: Path) -> None:
    runs = [run(num_clients=4, holdout_clients=held, run_name=f"{held}").path for held in (0.25, 0.0)]
    page, _ = write(tmp_path / "out", *runs)
    results = page[page.index('id="results"') :]
    table = results[: results.index("</table>")]
    heads, *rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr.*?</tr>", table)]
    heads = [re.sub("<[^>]*>", "", head) for head in heads]
    assert [head for head in heads if head.startswith("unseen")] == ["unseen (%)"]
    place = heads.index("unseen (%)")
    for path in runs:
        (reported,) = read_runs([path])
        curve = arrays.curve([reported], "evaluation")
        assert curve is not None and curve["mean"].iloc[-1] == pytest.approx(read_summary(path)["final-accuracy"])
        assert arrays.last_known(reported)[0].mean() == pytest.approx(read_summary(path)["final-accuracy"])
    assert [row[place] for row in rows] == [f"{100 * read_summary(runs[0])['unseen-accuracy']:.2f}", "–"]
