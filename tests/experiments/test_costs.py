"""What runs cost beside their accuracy, on records written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corolla.experiments import compare, costs
from fl_app.config import parse
from fl_app.toml import to_toml
from strategies import METHOD_PARAMS
from tests.conftest import Command
from tests.facts import mentions


def write_run(root: Path, name: str, factor: float = 1.0, clients: bool = True, **changes: Any) -> Path:
    """Write a run of three rounds of two clients, whose seconds and bytes are multiples of `factor`."""
    config = parse({"num-clients": 2, "num-server-rounds": 3} | changes, METHOD_PARAMS)
    (root / name).mkdir(parents=True)
    (root / name / "config.toml").write_text(to_toml(config.resolved))
    records = []
    for t, (seconds, evaluate) in enumerate([(9.0, 0.0), (2.0, 0.0), (13.0, 10.0)], 1):
        rows = {
            str(i): {
                "upload-bytes": factor * 1000 * (i + 1),
                "download-bytes": factor * 500,
                "seconds": {"train": factor * t, "score": 0.25 * factor},
            }
            for i in range(2)
        }
        record = {"round": t, "upload-bytes": 1, "seconds": {"round": factor * seconds, "evaluate": factor * evaluate}}
        records.append(record | ({"clients": rows} if clients else {}))
    records[-1]["evaluation"] = {"accuracy": 0.5, "clients": {}}
    (root / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    summary = {"upload-bytes": factor * 9000, "download-bytes": factor * 3000, "seconds": factor * 24}
    (root / name / "summary.json").write_text(
        json.dumps({"method": config.method, "final-accuracy": 0.5 * factor, "seed": config.seed} | summary)
    )
    return root / name


def test_the_costs_of_a_run_by_hand(tmp_path: Path) -> None:
    (run,), _ = compare.load([write_run(tmp_path, "a")], METHOD_PARAMS)
    assert costs.costs(run) == {
        # of 9, 2 and 13 - 10
        "seconds-per-round": 3.0,
        "seconds": 24.0,
        "client-train-seconds": 2.0,
        "client-score-seconds": 0.25,
        "upload-bytes-per-client": 1500.0,
        "download-bytes-per-client": 500.0,
        "upload-bytes": 9000.0,
        "download-bytes": 3000.0,
    }


def test_what_is_not_recorded_is_unknown_and_not_zero(tmp_path: Path) -> None:
    (run,), _ = compare.load([write_run(tmp_path, "a", clients=False)], METHOD_PARAMS)
    found = costs.costs(run)
    assert [name for name, value in found.items() if value is None] == [
        "client-train-seconds",
        "client-score-seconds",
        "upload-bytes-per-client",
        "download-bytes-per-client",
    ]
    table = costs.accuracy_and_costs_table([[run]])
    assert table[1][-6:] == ["–", "–", "–", "–", "9 kB", "3 kB"]


def test_the_table_has_the_mean_over_seeds(tmp_path: Path, command: Command) -> None:
    write_run(tmp_path, "a", 1.0, seed=0, method="fedavg")
    write_run(tmp_path, "b", 1.5, seed=1, method="fedavg")
    write_run(tmp_path, "c", 1000.0, seed=0, method="local")
    groups = compare.group(compare.load([tmp_path], METHOD_PARAMS)[0])
    header, first, second = costs.accuracy_and_costs_table(groups)
    told = dict(zip(header, first, strict=True))
    assert told == {
        "method": "fedavg",
        "n": "2",
        "final-accuracy": "62.50 ± 17.68",
        "s/round": "3.75 ± 1.06",
        "s in all": "30 ± 8.49",
        "s/client train": "2.5 ± 0.707",
        "s/client score": "0.312 ± 0.0884",
        "up/client": "1.88 kB",
        "down/client": "625 B",
        "up in all": "11.2 kB",
        "down in all": "3.75 kB",
    }
    assert dict(zip(header, second, strict=True))["s in all"] == "24000"

    code, out, _ = command("compare", tmp_path, "--costs")
    assert code == 0 and "11.2 kB" in out and mentions(" ".join(out.split()), "median round on", "server")
    assert "s/round" not in command("compare", tmp_path)[1]
    rows = json.loads(command("compare", tmp_path, "--costs", "--json")[1])["rows"]
    assert [[one["seconds"] for one in row["costs"]] for row in rows] == [[24.0, 36.0], [24000.0]]
    assert "costs" not in json.loads(command("compare", tmp_path, "--json")[1])["rows"][0]
    latex = command("compare", tmp_path, "--costs", "--latex")[1]
    assert r"3.75 $\pm$ 1.06" in latex and latex.count(r"\begin{tabular}") >= 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--costs", "--paper"), "--costs: not with --paper"),
        (("--costs", "--dataset", "cifar10"), "--costs: not with --paper"),
        (("--to", "80", "--paper"), "--to: not with --paper"),
        (("--costs", "--json", "--latex"), "--json and --latex exclude each other"),
    ],
)
def test_options_that_exclude_each_other(tmp_path: Path, command: Command, words: tuple[str, ...], said: str) -> None:
    # before the runs are read
    code, out, err = command("compare", tmp_path / "nowhere", *words)
    assert code == 2 and not out and said in " ".join(err.split())
