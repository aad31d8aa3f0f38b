"""Runs that differ in the seed alone are one row and one curve; names and numbers of rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corolla.experiments import compare
from corolla.experiments.grouping import by_settings, mean_std
from corolla.experiments.runs import RecordedRun
from corolla.experiments.sweep import identity
from corolla.report import groups, tables
from corolla.report.arrays import read_run, read_runs
from fl_app.config import RunConfig, parse
from fl_app.keys import specs
from strategies import METHOD_PARAMS
from tests.facts import mentions
from tests.report.builders import folder, record, write

ONE = [record(1, {"0": {"accuracy-before": 0.5}})]


def two_rounds(first: float, second: float) -> list[dict[str, Any]]:
    return [
        record(t, {"0": {"accuracy-before": a}, "1": {"accuracy-before": a + 0.2}})
        for t, a in ((1, first), (2, second))
    ]


@pytest.mark.parametrize(
    ("present", "told"),
    [
        ([4, 4, 3, 3], {3: "3 of 4 clients"}),
        ([4, 3, 4, 2], {2: "3 of 4 clients", 4: "2 of 4 clients"}),
        # rounds that close early: what is there changes from round to round
        ([4, 3, 4, 3, 4, 3, 4, 3, 4, 3, 4, 3], {}),
    ],
)
def test_rounds_from_which_on_clients_are_gone(tmp_path: Path, present: list[int], told: dict[int, str]) -> None:
    rounds = [
        record(t, {str(i): {"accuracy-before": 0.5} for i in range(count)}) for t, count in enumerate(present, start=1)
    ]
    (group,) = groups.grouped(read_runs([folder(tmp_path / "run", rounds)]))
    assert groups.departures(group) == told


def test_runs_that_differ_in_the_seed_alone_are_together() -> None:
    runs: list[dict[str, Any]] = [
        {"method": "a", "seed": 1},
        {"method": "b", "seed": 1},
        {"method": "a", "seed": 2},
        {"method": "a", "seed": 1, "x": 1.0},
        {"method": "a", "x": 1, "seed": 3},
        {"method": "a", "x": True},
    ]
    assert [[runs.index(run) for run in group] for group in by_settings(runs, lambda run: run)] == [
        [0, 2],
        [1],
        [3, 4],
        [5],
    ]


def test_a_seed_counts_once() -> None:
    runs: list[dict[str, Any]] = [{"method": "a", "seed": seed} for seed in (0, 1, 0, 0, 1, 2)]
    assert [[run["seed"] for run in group] for group in by_settings(runs, lambda run: run)] == [[0, 1, 2], [0, 1], [0]]


def test_the_deviation_is_the_sample_one() -> None:
    assert mean_std([1.0, 3.0]) == (2.0, pytest.approx(2**0.5))
    assert mean_std([4.0]) == (4.0, None)


def test_how_and_where_a_run_runs_tells_no_runs_apart(tmp_path: Path) -> None:
    elsewhere: dict[str, Any] = {}
    for key in specs(RunConfig):
        if key.about in ("running", "place"):
            other = {bool: not key.default, str: "elsewhere"}.get(key.type, 7)
            if key.choices:
                other = next(word for word in key.choices if word != key.default)
            words = {"track": "tensorboard", "callbacks": "tests.tracking.watching:Watch", "keep-uploads": "every 2"}
            elsewhere[key.name] = words.get(key.name, other)
    assert {"collect-personal-models", "keep-state", "round-timeout", "state-dir"} <= elsewhere.keys()
    here = [folder(tmp_path / "a", ONE, seed=1), folder(tmp_path / "b", ONE, seed=2, **elsewhere)]
    runs, folders = [RecordedRun(path, METHOD_PARAMS) for path in here], read_runs(here)
    assert len(compare.group(runs)) == len(groups.grouped(folders)) == 1
    assert {identity(parse({**run.config.resolved, "seed": 1}, METHOD_PARAMS)) for run in runs} == {
        identity(runs[0].config)
    }


def test_rows_are_named_by_what_differs(tmp_path: Path) -> None:
    paths = [
        folder(tmp_path / "a", ONE, method="fedcac", seed=1),
        folder(tmp_path / "b", ONE, method="fedcac", seed=1, fedcac={"tau": 0.25}),
        folder(tmp_path / "c", ONE, method="fedavg", seed=1, fedcac={"tau": 0.75}, round_timeout=7.0, run_name="x"),
    ]
    other = folder(tmp_path / "d", ONE, method="fedavg", seed=2)
    runs = read_runs([*paths, tmp_path / "a"])
    assert groups.differing(runs) == ["fedcac.tau"]
    assert [group.label for group in groups.grouped(runs)] == ["1 fedcac, tau 0.5", "2 fedcac, tau 0.25", "3 x"]
    found = groups.grouped(read_runs([tmp_path]))
    assert [group.label for group in found] == ["1 fedcac, tau 0.5", "2 fedcac, tau 0.25", "3 fedavg"]
    assert [[run.number for run in group.runs] for group in found] == [["1"], ["2"], ["3.1", "3.2"]]
    assert [run.label for run in found[2].runs] == ["3.1 x", "3.2 fedavg, seed 2"]
    apart = groups.grouped(read_runs([paths[0], other]))
    assert [group.label for group in apart] == ["1 fedcac, seed 1", "2 fedavg, seed 2"]
    assert groups.grouped(read_runs(paths[:1]))[0].label == "fedcac"
    assert groups.short("12 method, first 1, second 2", 22) == "12 method, first 1, …"
    assert len(groups.short("12 " + "x" * 90)) == groups.LABEL_LENGTH


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (["mine"], "mine"),
        (["20250101-120000-fedavg-digits-seed0"], ""),
        (["tau=0.3,seed=1-0a1b2c"], ""),
        (["fedavg-0a1b2c"], ""),
        (["mine-seed0", "mine-seed1"], "mine"),
        (["resnet18-0", "resnet18-1"], "resnet18"),
        (["tau0.5_s1", "tau0.5_s12"], "tau0.5"),
        (["one", "two"], ""),
        (["mine", ""], ""),
        (["b-10", "b-11"], "b"),
        (["seed0", "seed1"], ""),
    ],
)
def test_a_name_somebody_gave_is_told_from_one_that_was_made(names: list[str], name: str, tmp_path: Path) -> None:
    runs = [read_run(folder(tmp_path / str(k), ONE, seed=k, run_name=given)) for k, given in enumerate(names)]
    assert groups.grouped(runs)[0].name == name


def test_the_mean_over_seeds_by_hand(tmp_path: Path) -> None:
    runs = [folder(tmp_path / str(k), two_rounds(0.1 + 0.2 * k, 0.5), seed=k) for k in range(2)]
    (group,) = groups.grouped(read_runs(runs))
    curve = groups.over_seeds(group, "accuracy-before")
    assert curve is not None and curve.index.tolist() == [1, 2]
    std = np.std([0.2, 0.4], ddof=1)
    assert curve["mean"].tolist() == pytest.approx([0.3, 0.6])
    np.testing.assert_allclose(curve[["low", "high"]], [[0.3 - std, 0.3 + std], [0.6, 0.6]])
    costs = groups.over_costs(group)
    assert costs["bytes"].tolist() == [40, 180] and costs["mean"].tolist() == pytest.approx([0.3, 0.6])
    assert groups.by_client(group)[0].to_dict() == pytest.approx({0: 0.5, 1: 0.7})
    assert group.row.means["best"] == (pytest.approx(0.6), pytest.approx(0.0))


def test_a_band_stays_within_what_an_accuracy_can_be(tmp_path: Path) -> None:
    for seed, (first, second) in enumerate([(0.0, 0.8), (0.4, 0.2)]):
        folder(tmp_path / str(seed), two_rounds(first, second), method="fedavg", seed=seed)
    (group,) = groups.grouped(read_runs([tmp_path]))
    found = groups.over_seeds(group, "before")
    assert found is not None and np.allclose(found["mean"], [0.3, 0.6])
    assert np.allclose(found["low"], [0.3 - 0.08**0.5, 0.6 - 0.18**0.5]) and np.allclose(
        found["high"], [0.3 + 0.08**0.5, 1]
    )


def test_an_unfinished_run_is_a_row_of_its_own(tmp_path: Path) -> None:
    runs = [
        folder(tmp_path / str(k), two_rounds(0.1, 0.5), finished=k < 2, seed=k, num_server_rounds=2) for k in range(3)
    ]
    assert [[run.number for run in group.runs] for group in groups.grouped(read_runs(runs))] == [["1.1", "1.2"], ["2"]]


@pytest.mark.usefixtures("undrawn")
def test_seeds_are_one_row_that_opens_and_one_curve(tmp_path: Path) -> None:
    runs = [folder(tmp_path / f"mine-{k}", two_rounds(0.1 + 0.2 * k, 0.5 + 0.1 * k), seed=k) for k in range(3)]
    runs.append(folder(tmp_path / "other", two_rounds(0.2, 0.3), method="local"))
    page, names = write(tmp_path / "out", *runs)
    assert {
        "accuracy",
        "accuracy-spread",
        "accuracy-seeds",
        "clients",
        "client-by-client",
        "communication",
        "seconds",
    } == names
    assert page.partition('id="single-clients"')[0].count("<tbody>") == 2 and page.count('<tr class="single">') == 3
    assert ">3 runs</button>" in page and mentions(page, '70.00<span class="std">± 10.00</span>')
    assert mentions(page, "± one sample standard", "deviation") and "2.1" not in page


def test_few_clients_are_listed_with_their_figures_in_each_row(tmp_path: Path) -> None:
    runs = [
        folder(tmp_path / f"{method}{seed}", two_rounds(0.3, final + 0.1 * seed), method=method, seed=seed)
        for method, final in (("fedavg", 0.5), ("local", 0.4))
        for seed in range(2)
    ]
    names = {"0": {"name": "Bern", "train-samples": 90, "test-samples": 30}, "1": {"name": "Chur"}}
    (runs[0] / "clients.json").write_text(json.dumps(names))
    section = tables.clients_section(groups.grouped(read_runs(runs)))
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr[^>]*>(.*?)</tr>", section)]
    bern, chur = (row for row in rows if row)
    # final is the mean over both seeds of the last round, before training; local's is 10 points lower
    assert bern == ["Bern", "90", "30", "55.00", "55.00", "50.00", "45.00", "45.00", "50.00", "1 fedavg"]
    assert chur == ["Chur", "–", "–", "75.00", "75.00", "50.00", "65.00", "65.00", "50.00", "1 fedavg"]
    assert mentions(section, "each figure", "over the seeds")

    # runs of other clients have a table of their own, without a best row
    (runs[2] / "clients.json").write_text(json.dumps({"0": {"train-samples": 7}, "1": {}, "2": {}}))
    apart = tables.clients_section(groups.grouped(read_runs([runs[0], runs[2]])))
    assert apart.count("<table") == 2 and ">best<" not in apart

    alone = tables.clients_section(groups.grouped(read_runs(runs[:1])))
    assert "final (%)" in alone and ">best<" not in alone and not mentions(alone, "mean over", "seeds")


def test_a_client_that_no_row_has_a_figure_of(tmp_path: Path) -> None:
    def rounds() -> list[dict[str, Any]]:
        found = two_rounds(0.3, 0.5)
        for one in found:
            one["clients"]["0"]["auc-before"] = 0.7
        return found

    runs = [folder(tmp_path / method, rounds(), method=method) for method in ("fedavg", "local")]
    for path in runs:
        (path / "run.json").write_text(json.dumps({"metrics": [{"name": "accuracy"}, {"name": "auc"}]}))
    section = tables.clients_section(groups.grouped(read_runs(runs)))
    section = section[section.index("AUC of each client") :]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr[^>]*>(.*?)</tr>", section)]
    assert [row[-1] for row in rows if row] == ["1 fedavg, 2 local", ""]
