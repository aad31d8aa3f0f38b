"""Which of two groups of runs is better, and what it takes to reach an accuracy, on records written by hand."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest

import corolla
from corolla.experiments import compare, costs, significance
from corolla.experiments.runs import RecordedRun
from corolla.report.page import write_report
from fl_app.config import parse
from fl_app.errors import UserError
from fl_app.metrics import Metric
from fl_app.tasks import ACCURACY
from fl_app.toml import to_toml
from strategies import METHOD_PARAMS, METHODS
from tests.conftest import Command
from tests.facts import mentions, rejected


def write_run(root: Path, name: str, final: list[float], before: list[float] | None = None, **changes: object) -> Path:
    """Write a finished run: its clients' final accuracies, and the accuracy before training of each round (10 s, 1 + 1 MB)."""
    config = parse({"num-clients": len(final), **{k.replace("_", "-"): v for k, v in changes.items()}}, METHOD_PARAMS)  # type: ignore[dict-item]
    (root / name).mkdir(parents=True)
    (root / name / "config.toml").write_text(to_toml(config.resolved))
    rounds = [
        {"round": t, "accuracy-before": a, "download-bytes": 10**6, "upload-bytes": 10**6, "seconds": {"round": 10.0}}
        for t, a in enumerate(before or [0.1], 1)
    ]
    mean = sum(final) / len(final)
    rounds[-1]["evaluation"] = {"accuracy": mean, "clients": {str(i): {"accuracy": a} for i, a in enumerate(final)}}
    (root / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, rounds)))
    (root / name / "summary.json").write_text(
        json.dumps({"method": config.method, "final-accuracy": mean, "seed": config.seed})
    )
    return root / name


def groups(root: Path) -> list[list[RecordedRun]]:
    return compare.group(compare.load([root], METHOD_PARAMS)[0])


def test_when_an_accuracy_is_reached(tmp_path: Path) -> None:
    write_run(tmp_path, "a", [0.9, 0.9], [0.1, 0.5, 0.8, 0.7])
    (run,) = groups(tmp_path)[0]
    assert costs.reached(run, 0.8) == costs.Reached(3, 5e6, 20.0)
    assert costs.reached(run, 0.05) == costs.Reached(1, 1e6, 0.0)
    # in the evaluation after the last round
    assert costs.reached(run, 0.85) == costs.Reached(4, 8e6, 40.0)
    assert costs.reached(run, 0.95) is None


def test_simulated_seconds_until_an_accuracy_is_reached(tmp_path: Path) -> None:
    """Rounds of 2 and 3 simulated seconds came before the one that began at the target."""
    path = write_run(tmp_path, "a", [0.9, 0.9], [0.1, 0.5, 0.8, 0.7])
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    timed = [record | {"virtual-seconds": t + 2} for t, record in enumerate(records)]
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, timed)))
    assert costs.reached(groups(tmp_path)[0][0], 0.8) == costs.Reached(3, 5e6, 20.0, 5.0)
    header, row = costs.costs_table(groups(tmp_path), 0.8)
    assert (header[-1], row[-1]) == ("virtual seconds", "5")


def test_rows_are_ordered_by_a_cost_of_reaching_an_accuracy(tmp_path: Path) -> None:
    """One row reaches 80 % in round 3, one in round 2 with slow rounds, one never."""
    for name, method, before, second in (
        ("a", "local", [0.1, 0.2, 0.3, 0.4], 1.0),
        ("b", "fedavg", [0.1, 0.5, 0.8, 0.7], 1.0),
        ("c", "fedper", [0.1, 0.8, 0.8, 0.7], 9.0),
    ):
        path = write_run(tmp_path, name, [0.5, 0.5], before, method=method)
        records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        timed = [record | {"virtual-seconds": second} for record in records]
        (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, timed)))
    found = groups(tmp_path)
    names = [runs[0].config.method for runs in found]

    def ordered(by: str) -> list[str]:
        return [names[place] for place in costs.order(found, 0.8, by)]

    assert ordered("rounds") == ["fedper", "fedavg", "local"] == ordered("bytes")
    assert ordered("seconds") == ["fedavg", "fedper", "local"]
    header, *rows = costs.costs_table(found, 0.8, "seconds")
    assert [row[0] for row in rows] == ["fedavg", "fedper", "local"] and [row[-1] for row in rows] == ["2", "9", "–"]
    write_run(tmp_path, "d", [0.5, 0.5], [0.1, 0.2], method="fedrep")
    with rejected(UserError, "--by seconds", "some of these", "simulated time"):
        costs.order(groups(tmp_path), 0.8, "seconds")


def test_the_interval_is_students() -> None:
    low, high = significance.interval(np.array([1.0, 2.0, 3.0])) or (0, 0)
    assert (low, high) == pytest.approx(
        (2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), rel=1e-6
    )  # t of 2 degrees of freedom
    assert significance.interval(np.array([1.0])) is None


def test_pairs_are_clients_of_the_same_seed(tmp_path: Path) -> None:
    base = {0: [0.2, 0.6], 1: [0.5, 0.1], 2: [0.3, 0.3]}
    gains = {0: [0.1, 0.2], 1: [0.15, 0.1], 2: [0.2, 0.15]}
    for seed, values in base.items():
        write_run(tmp_path, f"a{seed}", values, method="fedavg", seed=seed)
        better = [a + gain for a, gain in zip(values, gains[seed], strict=True)]
        write_run(tmp_path, f"b{seed}", better, method="local", seed=seed)
    write_run(tmp_path, "b7", [0.0, 0.0], method="local", seed=7)  # nobody to compare with
    one, other = groups(tmp_path)
    found = significance.paired(other, one)
    assert found is not None and (found.pairs, found.seeds, found.share_better) == (2, 3, 1.0)
    assert found.by_client == pytest.approx({"0": 0.15, "1": 0.15}) and found.mean == pytest.approx(0.15)
    means = np.array([0.15, 0.125, 0.175])
    assert found.over_seeds == pytest.approx(significance.interval(means))
    # both clients gain 0.15 on average: two equal pairs have no interval
    assert found.over_clients is None and found.verdict == "not told apart"
    back = significance.paired(one, other)
    assert back is not None and back.mean == pytest.approx(-0.15)
    same = significance.paired(one, one)
    assert same is not None and same.verdict == "not told apart" and same.over_clients is None and same.wilcoxon is None


HOSPITALS = {
    # gains of six hospitals, by seed: one of them gains most of the mean
    0: [0.02, 0.10, 0.03, 0.45, 0.01, 0.30],
    1: [0.04, 0.12, -0.01, 0.41, 0.02, 0.34],
    2: [0.03, 0.08, 0.01, 0.43, 0.03, 0.35],
}


def write_hospitals(root: Path, gains: dict[int, list[float]]) -> None:
    for seed, values in gains.items():
        write_run(root, f"a{seed}", [0.5] * len(values), method="fedavg", seed=seed)
        write_run(root, f"b{seed}", [0.5 + gain for gain in values], method="local", seed=seed)


def test_a_client_counts_once_however_many_seeds_there_are(tmp_path: Path) -> None:
    write_hospitals(tmp_path, HOSPITALS)
    one, other = groups(tmp_path)
    found = significance.paired(other, one)
    assert found is not None and (found.pairs, found.seeds) == (6, 3)
    averages = [0.03, 0.10, 0.01, 0.43, 0.02, 0.33]
    assert list(found.by_client.values()) == pytest.approx(averages)
    # deviation of the six averages 0.18118131; t of 5 degrees of freedom 2.570582
    half = 2.570582 * 0.18118131 / 6**0.5
    assert found.mean == pytest.approx(0.92 / 6)
    assert found.over_clients == pytest.approx((0.92 / 6 - half, 0.92 / 6 + half), rel=1e-5)
    assert found.over_clients is not None and found.over_clients[0] < 0 < found.over_clients[1]
    # eighteen values, as if a seed were another hospital, would have told them apart
    every = np.array([gain for gains in HOSPITALS.values() for gain in gains])
    as_if = significance.interval(every)
    assert as_if is not None and as_if[0] > 0
    assert found.over_seeds is not None and found.over_seeds[0] > 0 and found.verdict == "not told apart"
    # all six gain: 2 / 2^6
    assert found.wilcoxon == pytest.approx(0.03125)


def test_clients_that_all_gain_alike_are_better(tmp_path: Path) -> None:
    gains = {seed: [0.1 + 0.01 * i + 0.001 * seed for i in range(6)] for seed in range(3)}
    write_hospitals(tmp_path, gains)
    one, other = groups(tmp_path)
    found, back = significance.paired(other, one), significance.paired(one, other)
    assert found is not None and found.verdict == "better" and back is not None and back.verdict == "worse"


def test_a_client_that_some_seeds_lack_is_averaged_over_the_others(tmp_path: Path) -> None:
    write_run(tmp_path, "a0", [0.5, 0.5], method="fedavg", seed=0)
    write_run(tmp_path, "b0", [0.6, 0.9], method="local", seed=0)
    write_run(tmp_path, "a1", [0.5], method="fedavg", seed=1, num_clients=2)
    write_run(tmp_path, "b1", [0.8], method="local", seed=1, num_clients=2)
    one, other = groups(tmp_path)
    found = significance.paired(other, one)
    assert found is not None and found.by_client == pytest.approx({"0": 0.2, "1": 0.4})
    assert found.mean == pytest.approx(0.3) and found.seeds == 2


def test_the_effect_of_each_client_is_listed(tmp_path: Path) -> None:
    write_hospitals(tmp_path, HOSPITALS)
    lines = significance.clients_table(groups(tmp_path))
    assert lines[0] == ["client", "local"] and lines[1] == ["0", "+3.00"] and lines[4] == ["3", "+43.00"]
    assert len(lines) == 7
    assert significance.clients_table(groups(tmp_path), most=2)[-1] == ["… 4 more", "…"]


def test_a_row_of_seeds_is_not_named_after_the_first_of_them(tmp_path: Path) -> None:
    """A sweep names each run after its seed too; results.tex has the seeds in one row."""
    for method, seed, made in (("fedavg", 0, "765715"), ("fedavg", 1, "0fa14d"), ("local", 0, "a1360a")):
        name = f"{method},seed={seed}-{made}"
        write_run(tmp_path / "runs", name, [0.5, 0.6], method=method, seed=seed, run_name=name)
    write_report([tmp_path / "runs"], tmp_path, {}, tables=tmp_path / "tables", title=METHODS.title)
    text = (tmp_path / "tables" / "results.tex").read_text()
    assert "FedAvg & FedAvg & 2 &" in text and "local,seed=0-a1360a & Local & 1 &" in text


def test_clients_are_listed_by_their_names_where_all_runs_have_the_same(tmp_path: Path) -> None:
    write_hospitals(tmp_path, HOSPITALS)
    for run in tmp_path.iterdir():
        (run / "clients.json").write_text(json.dumps({"0": {"name": "Basel"}, "1": {"name": run.name}}))
    lines = significance.clients_table(groups(tmp_path))
    assert [client for client, _ in lines] == ["client", "Basel", "1", "2", "3", "4", "5"]
    frame = corolla.compare(tmp_path)
    assert frame["client-names"][1] == {0: "Basel"} and list(frame["by-client"][1]) == [0, 1, 2, 3, 4, 5]
    for run in tmp_path.iterdir():
        (run / "clients.json").unlink()
    assert "client-names" not in corolla.compare(tmp_path).columns


def test_several_comparisons_are_corrected_together(tmp_path: Path) -> None:
    """Holm's p: the least of three times 3, the next times 2, the last as it is, and none below the one before."""
    assert significance.holm([0.02, None, 0.03, 0.01]) == [0.04, None, 0.04, 0.03]
    assert (
        significance.holm([0.5, 0.6]) == [1.0, 1.0]
        and significance.holm([0.04]) == [0.04]
        and significance.holm([]) == []
    )
    # p of Student's test over clients is .025: alone a verdict, beside two other tests none. Equal differences have no test.
    gains: dict[str, list[float]] = {
        "local": [0.004, 0.02, 0.01, 0.03, 0.001, 0.02],
        "fedper": [0.01, -0.01] * 3,
        "fedrep": [0.02, -0.03] * 3,
        "fedbn": [0] * 6,
    }
    for seed in range(3):
        write_run(tmp_path, f"a{seed}", [0.5] * 6, method="fedavg", seed=seed)
        for method, values in gains.items():
            more = [0.5 + gain + 0.0001 * seed for gain in values]
            write_run(tmp_path, f"{method}{seed}", more, method=method, seed=seed)
    one, *rest = compare.with_reference(groups(tmp_path), "fedavg")
    other = rest.pop([runs[0].method for runs in rest].index("local"))
    alone = significance.compared([one, other])[1]
    among = significance.compared([one, other, *rest])[1]
    assert alone is not None and among is not None and alone.by_client == among.by_client
    assert (
        alone.clients_p == pytest.approx(0.0248, abs=1e-3)
        and alone.holm == alone.wilcoxon
        and alone.verdict == "better"
    )
    assert among.clients_p == pytest.approx(3 * alone.clients_p) and among.verdict.startswith("not told apart")
    header = significance.differences_table([one, other, *rest])[0]
    assert (
        header[header.index("Wilcoxon") + 1] == "Holm" and "Holm" not in significance.differences_table([one, other])[0]
    )
    caption = significance.caption([one, other, *rest])
    assert ("\nn: " in caption) == any(
        "(n = " in one.verdict for one in significance.compared([one, other, *rest]) if one
    )
    assert "\nn: " not in significance.caption([one, other])
    assert "Holm" in caption and "Holm" not in significance.caption([one, other])


def test_rows_are_compared_within_their_data(tmp_path: Path) -> None:
    for alpha in (0.1, 1.0):
        for method, gain in (("fedavg", 0.0), ("local", 0.1), ("fedper", 0.2)):
            for seed in range(3):
                final = [alpha / 2 + gain + 0.01 * i + 0.001 * seed * gain for i in range(4)]
                keys = {"partition": "dirichlet", "dirichlet_alpha": alpha, "method": method, "seed": seed}
                write_run(tmp_path, f"{method}{alpha}{seed}", final, **keys)
    found = compare.with_reference(groups(tmp_path), "local")
    assert [(runs[0].method, runs[0].config.dirichlet_alpha) for runs in found] == [
        (method, alpha) for alpha in (0.1, 1.0) for method in ("local", "fedavg", "fedper")
    ]
    assert compare.references(found) == [0, 0, 0, 3, 3, 3]
    means = [one and round(one.mean, 2) for one in significance.compared(found)]
    assert means == [None, -0.1, 0.1, None, -0.1, 0.1]
    assert [line[-1] for line in significance.differences_table(found)[1:]].count("(first)") == 2
    # one row is named: where the data differ, that of the same settings stands for it
    assert [runs[0].method for runs in compare.with_reference(groups(tmp_path), "fedper1.01")[::3]] == [
        "fedper",
        "fedper",
    ]
    lines = significance.best_lines(compare.result_rows(found), "test")
    best = [line for line in lines if "best of all" in line]
    assert len(best) == 2 and all(line.startswith("dirichlet-alpha") and "fedper" in line for line in best)


def test_two_pairs_that_differ_equally_decide_nothing(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path, f"a{seed}", [0.5], method="fedavg", seed=seed)
        write_run(tmp_path, f"b{seed}", [0.6], method="local", seed=seed)
    one, other = groups(tmp_path)
    found = significance.paired(other, one)
    assert found is not None and (found.pairs, found.seeds, found.over_clients) == (1, 2, None)
    assert found.mean == pytest.approx(0.1) and found.verdict == "undecided: needs 3 seeds"


@pytest.mark.parametrize(
    ("means", "needed"),
    [
        # means of 2, 1, 101 and 0.0003 deviations; t(2) / sqrt(3) = 2.48, t(3) / sqrt(4) = 1.59, t(6) / sqrt(7) = 0.92
        ([1.0, 2.0, 3.0], 4),
        ([0.0, 1.0, 2.0], 7),
        ([10.0, 10.1, 10.2], 3),
        ([-10.0, -10.1, -10.2], 3),
        ([-1.0, 0.0, 1.001], None),
        ([1.0, 1.0, 1.0], None),
        ([0.0, 0.0, 0.0], None),
    ],
)
def test_the_seeds_that_would_decide(means: list[float], needed: int | None) -> None:
    assert significance.seeds_needed(np.array(means)) == needed


def test_a_verdict_says_how_many_seeds_would_decide() -> None:
    clients = {str(i): 0.01 for i in range(9)}
    undecided = significance.Comparison(ACCURACY, clients, 3, (0.001, 0.02), (-0.01, 0.03), None, 12)
    assert undecided.verdict == "not told apart (n = 12)"
    assert replace(undecided, over_seeds=(0.005, 0.015)).verdict == "better"
    assert replace(undecided, over_seeds=(-0.015, -0.005), seeds_needed=None).verdict == "not told apart"
    # further seeds are no further clients
    assert replace(undecided, over_clients=(-0.001, 0.02)).verdict == "not told apart"
    assert replace(undecided, over_clients=None, over_seeds=(0.005, 0.015)).verdict == "not told apart"
    rmse = replace(undecided, metric=Metric("rmse", higher_is_better=False), over_seeds=(0.005, 0.015))
    assert rmse.verdict == "worse"


def test_clients_that_never_train_are_not_paired(tmp_path: Path) -> None:
    for method, final in (("fedavg", [0.2, 0.6, 0.9]), ("local", [0.3, 0.7, 0.1])):
        write_run(tmp_path, method, final, method=method, holdout_clients=0.3)
        records = (tmp_path / method / "metrics.jsonl").read_text()
        apart = json.dumps({"accuracy": final[2], "ids": [2]})
        (tmp_path / method / "metrics.jsonl").write_text(
            records.replace('"clients":', f'"unseen": {apart}, "clients":')
        )
    one, other = groups(tmp_path)
    found = significance.paired(other, one)
    assert found is not None and found.pairs == 2 and found.mean == pytest.approx(0.1) and found.share_better == 1.0


def test_clients_with_other_data_are_not_paired(tmp_path: Path) -> None:
    write_run(tmp_path, "a", [0.2, 0.6], method="fedavg")
    write_run(tmp_path, "b", [0.2, 0.6], method="fedavg", dirichlet_alpha=0.5)
    # which this partition does not have
    write_run(tmp_path, "c", [0.2, 0.6], method="local", classes_per_client=3)
    one, other, third = groups(tmp_path)
    assert significance.paired(other, one) is None and significance.paired(third, one) is not None
    assert mentions(significance.differences_table(groups(tmp_path))[2][-1], "other data", "clients or seeds")
    assert significance.differences_table([one]) == [] and significance.differences_table([one, other]) == []


def test_the_command(tmp_path: Path, command: Command) -> None:
    for seed, up in ((0, 0.0), (1, 0.01)):
        write_run(tmp_path, f"a{seed}", [0.5 + up, 0.6, 0.7], [0.1, 0.2], method="fedavg", seed=seed)
        write_run(tmp_path, f"b{seed}", [0.7, 0.8 + up, 0.95], [0.1, 0.85 - 10 * up], method="local", seed=seed)
    code, out, _ = command("compare", tmp_path, "--to", "0.8")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["fedavg", "0", "of", "2", "–", "–", "–"] in lines
    assert ["local", "2", "of", "2", "2", "±", "0", "3.5", "±", "0.71", "15", "±", "7.1"] in lines
    assert "reached accuracy ≥ 80 %" in out and mentions(out, "client's final", "per cent", "minus")
    (row,) = [line for line in lines if line[-4:] == ["undecided:", "needs", "3", "seeds"]]
    assert row[:4] == ["local", "3", "2", "+21.67"]
    assert ["0", "+19.50"] in lines and significance.BY_CLIENT in out
    # as the tables beside it have it, in per cent
    assert command("compare", tmp_path, "--to", "80")[1] == out
    assert mentions(command("compare", tmp_path / "a0")[1], "no table", "differences", "only one row")


def test_a_row_is_the_reference_by_its_method_its_values_or_its_runs(tmp_path: Path, command: Command) -> None:
    for name, settings in {
        "a": {"method": "fedavg"},
        "b": {"method": "local"},
        "c": {"method": "fedcac", "fedcac.tau": 0.1},
        "d": {"method": "fedcac", "fedcac.tau": 0.3},
    }.items():
        write_run(tmp_path, name, [0.5, 0.6, 0.7], **settings)

    def first(reference: str) -> list[str]:
        code, out, err = command("compare", tmp_path, "--reference", reference)
        assert code == 0, err
        return out.splitlines()[1].split()[:2]

    assert first("local") == first("b") == first(str(tmp_path / "b")) == first("local, –") == ["local", "–"]
    assert first("b/") == first(f"{tmp_path}/b/") == ["local", "–"]
    assert first("fedcac, 0.3") == first("d") == ["fedcac", "0.3"]
    frame = corolla.compare(tmp_path, reference="d")
    assert list(frame["fedcac.tau"].fillna(0)) == [0.3, 0, 0, 0.1] and frame["verdict"][0] == "(first)"

    rows = "the rows are: fedavg, – (a); local, – (b); fedcac, 0.1 (c); fedcac, 0.3 (d)"
    for reference, why in {"locl": "no row has this name", "fedcac": "names 2 of the rows"}.items():
        code, _, err = command("compare", tmp_path, "--reference", reference)
        assert code == 2 and f"--reference {reference}: {why}" in err and rows in err
        with pytest.raises(UserError, match=f"^reference {reference}: {why}"):
            corolla.compare(tmp_path, reference=reference)
    code, _, err = command("compare", tmp_path, "--reference", "local", "--paper")
    assert code == 2 and mentions(err, "--reference local", "not with --paper")


def test_printed_rows_have_only_columns_with_values(tmp_path: Path) -> None:
    for name, method in (("a", "fedavg"), ("b", "local")):
        write_run(tmp_path, name, [0.5, 0.6, 0.7], method=method)
    frame = corolla.compare(tmp_path)
    assert frame["low-over-seeds"].isna().all() and "low-over-seeds" in frame.columns
    *table, without, last = repr(frame).splitlines()
    assert any(line.startswith("final-accuracy ") for line in table) and all(len(line) <= 80 for line in table)
    assert not any("final-accuracy-std" in line or "-over-seeds" in line or "{" in line for line in table)
    assert mentions(without, "no values", "final-accuracy-std", "high", "wilcoxon", "low-over-seeds", "high-over-seeds")
    assert mentions(last, "by client", "not shown", "by-client")
    assert "final-accuracy-std</th>" not in frame._repr_html_() and without in frame._repr_html_()
    pandas.testing.assert_frame_equal(pickle.loads(pickle.dumps(frame)), frame)
    assert "no values" not in repr(frame[["method", "n"]])


def test_a_metric_whose_low_values_are_good(tmp_path: Path, command: Command) -> None:
    for name, method, final in (("a", "fedavg", [2.0, 3.0, 2.5]), ("b", "local", [1.0, 2.1, 1.4])):
        folder = write_run(tmp_path, name, final, method=method)
        (folder / "run.json").write_text(
            json.dumps({"metrics": [{"name": "rmse", "higher_is_better": False, "low": 0.0}]})
        )
        text = (folder / "metrics.jsonl").read_text()
        (folder / "metrics.jsonl").write_text(text.replace('"accuracy', '"rmse'))
    one, other = groups(tmp_path)
    assert costs.reached(other[0], 1.6) == costs.Reached(1, 1e6, 0.0)  # 0.1 before round 1
    found = significance.paired(other, one)
    assert (
        found is not None
        and found.mean == pytest.approx(-1.0)
        and found.share_better == 1
        and found.verdict == "undecided: needs 3 seeds"
    )
    assert significance.differences_table([one, other])[2][3] == "-1"
    out = command("compare", tmp_path, "--to", "1.6")[1]
    assert (
        "accurac" not in out
        and "reached rmse ≤ 1.6" in out
        and mentions(out, "client's final", "(lower is better)", "minus")
    )
