"""Comparison with the papers: which preset a run is put beside, our figure, and the settings that differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from corolla import presets
from corolla.experiments import compare, paper_table, result_table, sweep
from corolla.experiments.sweep import Point
from corolla.report.arrays import read_runs
from corolla.report.groups import grouped
from fl_app.config import parse
from fl_app.errors import UserError
from fl_app.toml import to_toml
from strategies import METHOD_PARAMS
from tests.conftest import Command
from tests.facts import each_mentions, mentions, rejected


def run_folder(
    root: Path, name: str, preset: str, summary: dict[str, Any], rounds: Sequence[float] = (), **changes: Any
) -> Path:
    """Write a finished run's folder without running it."""
    raw = presets.read_preset(preset) | {k.replace("_", "-"): v for k, v in changes.items()}
    config = parse(raw, METHOD_PARAMS)
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(config.resolved))
    figures = {
        "final-accuracy": 0.5,
        "final-accuracy-pooled": 0.5,
        "final-accuracy-finetuned": None,
        "best-accuracy": 0.5,
    }
    (folder / "summary.json").write_text(json.dumps({"method": config.method} | figures | summary))
    lines = [json.dumps({"round": t, "accuracy-before-pooled": a}) for t, a in enumerate(rounds, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def lines(*paths: Path, dataset: str = "") -> list[compare.PaperLine]:
    runs, _ = compare.load(paths, METHOD_PARAMS)
    return [line for group in compare.group(runs) for line in compare.beside(group, METHOD_PARAMS, dataset)]


def test_a_run_of_a_preset_is_put_beside_it_without_differences(tmp_path: Path) -> None:
    for seed, best in ((0, 0.86), (1, 0.88)):
        run_folder(
            tmp_path, f"s{seed}", "fedcac/cifar10-dirichlet-0.1", {"best-accuracy": best}, seed=seed, data_dir="/d"
        )
    (line,) = lines(tmp_path)
    assert line.preset.name == "fedcac/cifar10-dirichlet-0.1" and line.differences == []
    assert line.ours == pytest.approx((0.87, 0.02 / 2**0.5))
    (column,) = paper_table.columns([line])
    assert mentions(column.title, "FedCAC (Wu", "ICCV 2023", "Table 2", "CIFAR-10", "alpha = 0.1")
    assert column.table == [
        ["method", "print", "ours", "difference", "same method"],
        ["fedcac", "86.82 ± 1.18", "87.00 ± 1.41", "+0.18", "yes"],
    ]
    # with --json: numbers, in per cent
    told = paper_table.as_told(line)
    assert told == {
        "preset": "fedcac/cifar10-dirichlet-0.1",
        "paper": "FedCAC (Wu et al., ICCV 2023)",
        "table": "Table 2",
        "column": "fedcac/cifar10-dirichlet-0.1",
        "method": "fedcac",
        "scale": "full",
        "n": 2,
        "ours": pytest.approx(87.0),
        "ours-std": pytest.approx(2**0.5),
        "published": 86.82,
        "published-std": 1.18,
        "difference": pytest.approx(0.18),
        "ours, fine-tuned": None,
        "ours, fine-tuned-std": None,
        "same-method": True,
        "notes": [note.removeprefix("all rows: ") for note in column.notes],
    }
    assert each_mentions(
        column.notes[:2],
        ("all rows", "2 seeds", "print the mean", "5 runs"),
        ("all rows", "best-accuracy", "highest mean", "round's clients"),
    )


def test_a_run_given_twice_is_no_second_seed(tmp_path: Path, command: Command) -> None:
    for name, seed in (("a", 0), ("b", 1), ("c", 1)):
        run_folder(tmp_path, name, "fedcac/cifar10-dirichlet-0.1", {"best-accuracy": 0.8 + seed / 10}, seed=seed)
    assert [(len(line.runs), line.ours) for line in lines(tmp_path)] == [
        (2, pytest.approx((0.85, 0.1 / 2**0.5))),
        (1, (0.9, None)),
    ]
    said = command("compare", tmp_path)[2]
    assert mentions(said, f"{tmp_path / 'c'} repeats", f"seed of {tmp_path / 'b'}") and said.count("repeats") == 1


def test_how_often_a_run_is_tested_counts_where_its_best_test_does(tmp_path: Path) -> None:
    tests = [{"round": t, "evaluation": {"accuracy-pooled": t / 10, "clients": {}}} for t in range(1, 9)]
    for name, preset, every in (("a", "fedobp/cifar10-dirichlet-0.1", 50), ("b", "fedcac/cifar10-dirichlet-0.1", 50)):
        path = run_folder(tmp_path, name, preset, {}, evaluate_every=every)
        (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, tests)))
    best, last = lines(tmp_path)
    assert best.ours == (0.8, None) and best.differences == [("evaluate-every", 50, 100)]
    assert "; tests: 8" in " ".join(paper_table.in_full(best))
    assert last.differences == [] and "; tests:" not in " ".join(paper_table.in_full(last))


def test_differing_settings_are_listed_and_the_nearest_preset_is_chosen(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"momentum": 0.5, "num_server_rounds": 60, "fedcac.non-critical": "as-critical"}
    path = run_folder(tmp_path, "a", "fedcac/cifar10-dirichlet-0.1", {}, **changes, test_ratio=0.5)
    (line,) = lines(path)
    # Table 3, not Table 2; test-ratio does not apply
    assert line.preset.name == "fedcac/cifar10-dirichlet-0.1/as-critical"
    assert {d[0]: d[1:] for d in line.differences} == {"num-server-rounds": (60, 500), "momentum": (0.5, 0.9)}
    assert "60 rounds, in print 500" in paper_table.reasons(line) and paper_table.is_cut(line)
    assert "momentum 0.5 (paper: 0.9)" in paper_table.details(line)


def test_one_method_and_partition_in_two_papers(tmp_path: Path) -> None:
    """FedAvg on CIFAR-10, dirichlet 0.1 is in FedPake's tables (20, 50, 50 clients, ...) and in FedOBP's (100, cnn)."""
    path = run_folder(
        tmp_path, "a", "fedobp/cifar10-dirichlet-0.1/fedavg", {"final-accuracy-pooled": 0.6}, local_epochs=3
    )
    (line,) = lines(path)
    assert line.preset.name == "fedobp/cifar10-dirichlet-0.1/fedavg"
    assert line.ours == (0.6, None) and [d[0] for d in line.differences] == ["local-epochs"]


def test_every_cell_of_fedobps_table_8_is_beside_its_run(tmp_path: Path) -> None:
    plan = sweep.read_sweep(sweep.bundled()["fedobp-table8"])
    points = sweep.expand(plan, METHOD_PARAMS, tmp_path, {}, dict)
    cells = [str(point.varying["preset"]) for point in points]
    for cell in cells:
        (line,) = lines(run_folder(tmp_path, cell, cell, {}))
        assert line.preset.name == cell and line.differences == []
    assert len(cells) == 32


def test_what_is_so_of_all_rows_is_said_once(tmp_path: Path) -> None:
    for name in ("fedper", "fedrep"):
        run_folder(tmp_path, name, f"fedobp/cifar10-dirichlet-0.1/{name}", {"final-accuracy-pooled": 0.6}, momentum=0.5)
    run_folder(tmp_path, "b", "fedobp/cifar10-dirichlet-0.1/fedavg", {"final-accuracy-pooled": 0.6}, momentum=0.5)
    (column,) = paper_table.columns(lines(tmp_path))
    assert (
        mentions(column.notes, "all rows", "momentum 0.5 (paper: 0)")
        and sum("momentum 0.5" in x for x in column.notes) == 1
    )
    # highest print first
    assert [row[0] for row in column.table[1:]] == ["fedper", "fedrep", "fedavg"]
    assert [row[4] for row in column.table[1:]] == ["yes [1]", "yes [1]", "yes"]
    assert mentions(column.notes[-1], "[1] its code base", "FL-bench", "averages what", "personal too")
    (alone,) = paper_table.columns(lines(tmp_path / "b"))
    assert alone.notes == column.notes[:-1]


def test_a_row_of_another_method_says_no_and_which(tmp_path: Path) -> None:
    name = "fedobp/cifar10-dirichlet-0.1/flute"
    (line,) = lines(run_folder(tmp_path, "a", name, {"final-accuracy-pooled": 0.6}, local_epochs=3))
    assert not paper_table.is_same_method(line) and paper_table.as_told(line)["same-method"] is False
    (column,) = paper_table.columns([line], paper_table.reasons)
    assert column.table[1][4] == "no" and each_mentions(
        column.notes,
        ("all rows", "authors ran another", "method under", "features are detached", "body never trains"),
        ("all rows", "1 seed", "print the mean", "4 runs"),
    )
    # once, not as the preset's note too
    assert sum("features are detached" in text for text in paper_table.in_full(line)) == 1


def test_the_fine_tuned_figure_is_pooled_where_the_papers_is(tmp_path: Path) -> None:
    tuned = {"final-accuracy-finetuned": 0.7, "final-accuracy-finetuned-pooled": 0.8}
    for name, value in (("fedobp/cifar10-dirichlet-0.1/fedavg", 0.8), ("fedcac/cifar10-dirichlet-0.1", 0.7)):
        (line,) = lines(run_folder(tmp_path, name, name, tuned))
        assert line.finetuned == (value, None)
    (line,) = lines(
        run_folder(tmp_path, "older", "fedobp/cifar10-dirichlet-0.1/fedavg", {"final-accuracy-finetuned": 0.7})
    )
    assert line.finetuned is None


def test_fedpakes_figure_is_the_mean_of_the_last_ten_rounds(tmp_path: Path) -> None:
    rounds = [0.1] * 5 + [0.2 + 0.01 * k for k in range(10)]
    path = run_folder(tmp_path, "a", "fedpake/cifar100-dirichlet-0.1/fedavg", {"final-accuracy-pooled": 0.9}, rounds)
    (line,) = lines(path)
    assert line.ours is not None and line.ours[0] == pytest.approx(0.245)
    assert str(line.preset.published) == "33.57 ± 0.09"


def test_dittos_figure_is_of_the_global_model_in_the_last_ten_tests(tmp_path: Path) -> None:
    path = run_folder(tmp_path, "a", "fedpake/cifar10-dirichlet-0.1/ditto", {})
    (line,) = lines(path)
    assert line.ours is None
    tests = [0.1] * 5 + [0.2 + 0.01 * k for k in range(10)]
    records = [{"round": t, "evaluation": {"accuracy-global-pooled": a}} for t, a in enumerate(tests, 1)]
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    (line,) = lines(path)
    assert line.ours is not None and line.ours[0] == pytest.approx(0.245) and line.differences == []
    assert any("tests: 15" in words for words in paper_table.details(line))
    (line,) = lines(run_folder(tmp_path, "b", "fedpake/cifar10-dirichlet-0.1/ditto", {}, evaluate_every=50))
    assert list(line.differences) == [("evaluate-every", 50, 1)]


def test_the_ablation_is_put_beside_table_4(tmp_path: Path) -> None:
    rounds = [0.2] * 10
    name = "fedpake/cifar10-dirichlet-0.1-ablation"
    (line,) = lines(run_folder(tmp_path, "micro", f"{name}/random-micro", {}, rounds))
    assert (line.preset.name, str(line.preset.published)) == (f"{name}/random-micro", "14.86")
    assert line.ours is not None and line.ours[0] == pytest.approx(0.2) and line.differences == []
    # the whole method is in Table 1 too
    assert {line.preset.name for line in lines(run_folder(tmp_path, "own", name, {}, rounds))} == {
        name,
        "fedpake/cifar10-dirichlet-0.1",
    }


def test_fedbabus_figure_is_the_fine_tuned_one(tmp_path: Path) -> None:
    tuned = {"final-accuracy-pooled": 0.3, "final-accuracy-finetuned-pooled": 0.8}
    (line,) = lines(run_folder(tmp_path, "a", "fedpake/cifar10-dirichlet-0.1/fedbabu", tuned))
    assert line.ours == (0.8, None)
    (line,) = lines(
        run_folder(tmp_path, "older", "fedpake/cifar10-dirichlet-0.1/fedbabu", {"final-accuracy-pooled": 0.3})
    )
    assert line.ours is None


def test_small_runs_find_their_preset_and_say_what_they_are(tmp_path: Path) -> None:
    name = "fedobp/cifar10-dirichlet-0.1/fedavg"
    small = presets.small(parse(presets.read_preset(name), METHOD_PARAMS))
    (line,) = lines(run_folder(tmp_path, "a", name, {}, **small))
    assert line.preset.name == name
    text = paper_table.in_full(line)
    assert any(mentions(words, "--scale small", "not comparable") for words in text) and paper_table.is_cut(line)
    assert "20 rounds, in print 400" in text
    assert any(mentions(words, "partition dirichlet-client (paper", "dirichlet") for words in text)
    assert mentions(text, "test-samples 40 (the key", "has no effect", "paper's setting")
    # a note on a key that does not act in the run
    quarter = "a quarter of each client's samples is its test set, as in the authors' logs; the text has an even split"
    assert quarter in line.preset.notes and quarter not in text
    (full,) = lines(run_folder(tmp_path, "full", name, {}))
    assert quarter in paper_table.in_full(full)
    (other,) = lines(run_folder(tmp_path, "other", name, {}, **{"test-ratio": 0.5}))
    assert quarter not in paper_table.in_full(other) and "test-ratio 0.5 (paper: 0.25)" in paper_table.in_full(other)


def test_another_split_or_data_set_has_no_counterpart(tmp_path: Path) -> None:
    name = "fedcac/cifar10-dirichlet-0.1"
    assert lines(run_folder(tmp_path, "alpha", name, {}, dirichlet_alpha=0.3)) == []
    assert lines(run_folder(tmp_path, "iid", name, {}, partition="iid")) == []
    folder = run_folder(tmp_path, "folder", name, {}, dataset="folder:/cifar10")
    assert lines(folder) == []
    (line,) = lines(folder, dataset="cifar10")
    assert list(line.differences) == [("dataset", "folder:/cifar10", "cifar10")]


def test_paths_that_are_no_runs_are_refused(tmp_path: Path) -> None:
    with rejected(UserError, "", "run folder", "no run"):
        compare.load([tmp_path], METHOD_PARAMS)
    folder = run_folder(tmp_path, "a", "fedcac/cifar10-dirichlet-0.1", {})
    (folder / "summary.json").unlink()
    with pytest.raises(UserError, match="no finished run"):
        compare.load([tmp_path], METHOD_PARAMS)
    (folder / "summary.json").write_text('{"rounds": 3, ')
    with rejected(UserError, "", "a/summary.json cannot be", "read"):
        compare.load([tmp_path], METHOD_PARAMS)


def runs_of_three_settings(root: Path) -> None:
    """Write runs 0 to 3 of one setting, 4 and 5 of a second, 6 of a third; what else differs changes no result."""
    changes: list[dict[str, Any]] = [
        {},
        {"seed": 1, "data_dir": "/elsewhere", "run_name": "x", "round_timeout": 5.0},
        {"seed": 2, "fedcac.tau": 0.25},
        {"seed": 3, "classes_per_client": 5},
        {"fedpake.divisor": "limit"},
        {"seed": 1, "fedpake.divisor": "limit"},
        {"finetune_epochs": 3},
    ]
    tuned = {"final-accuracy-finetuned": 0.5}
    before = {f"accuracy-{when}": 0.5 for when in ("before", "after")}
    for k, each in enumerate(changes):
        path = run_folder(root, str(k), "fedpake/cifar10-dirichlet-0.1", tuned, **each)
        (path / "metrics.jsonl").write_text(json.dumps({"round": 1, "clients": {}, **before}))


def test_every_table_puts_the_same_runs_together(tmp_path: Path) -> None:
    """Report, compare and sweep: one rule, whatever says where or how a run ran."""
    runs_of_three_settings(tmp_path)
    runs, _ = compare.load([tmp_path], METHOD_PARAMS)
    together = [["0", "1", "2", "3"], ["4", "5"], ["6"]]
    assert [[run.path.name for run in group] for group in compare.group(runs)] == together
    assert [[run.path.name for run in group.runs] for group in grouped(read_runs([tmp_path]))] == together
    points = [Point(run.path.name, {"seed": run.config.seed}, {}, run.config) for run in runs]
    rows = result_table.sweep_rows(points, {sweep.identity(run.config): run for run in runs})
    assert [len(row.runs) for row in rows] == [4, 2, 1]


def test_nothing_is_printed_before_a_target_that_cannot_be_is_refused(tmp_path: Path, command: Command) -> None:
    run_folder(tmp_path, "a", "demo", {"best-accuracy": 0.4})
    for target in ("500", "-1", "nan"):
        _, out, err = command("compare", tmp_path, "--to", target)
        assert not out and mentions(err, "--to", "accuracy is in [0, 1]", "up to 100", "per cent", f"got {target}")


def test_a_file_of_ones_own_is_told_only_where_it_tells_rows_apart(tmp_path: Path) -> None:
    for name, changes in {"a": {"plugins": "m.py:1"}, "b": {"method": "fedavg"}}.items():
        run_folder(tmp_path, name, "demo", {}, **changes)
    found = compare.varying(compare.group(compare.load([tmp_path], METHOD_PARAMS)[0]))
    assert [list(row) for row in found] == [["method"], ["method"]]
    run_folder(tmp_path, "c", "demo", {}, plugins="m.py:2")
    found = compare.varying(compare.group(compare.load([tmp_path], METHOD_PARAMS)[0]))
    assert [row["plugins"] for row in found] == ["m.py:1", "", "m.py:2"]


def test_the_command(tmp_path: Path, command: Command) -> None:
    run_folder(tmp_path, "a", "fedcac/cifar10-pathological-2", {"best-accuracy": 0.9, "final-accuracy-finetuned": 0.91})
    run_folder(tmp_path, "b", "fedcac/cifar10-pathological-2/fedavg", {"best-accuracy": 0.5}, momentum=0.5)
    run_folder(tmp_path, "c", "demo", {"best-accuracy": 0.4})
    unfinished = run_folder(tmp_path, "d", "demo", {})
    (unfinished / "summary.json").unlink()

    def invoke(*words: str, code: int = 0) -> tuple[str, str]:
        found, out, err = command("compare", *words)
        assert found == code
        return out, err

    out, err = invoke(str(tmp_path), "--paper")
    title = "FedCAC (Wu et al., ICCV 2023), Table 1: CIFAR-10"
    head, *rest = out.partition(f"\n{title}\n")[2].splitlines()
    assert head.split() == ["method", "print", "ours", "difference", "same", "method"]
    assert [line.split() for line in rest[:2]] == [
        ["fedcac", "89.77", "±", "1.14", "90.00", "+0.23", "yes"],
        ["fedavg", "54.33", "±", "3.03", "50.00", "-4.33", "yes", "[1]"],
    ]
    # the table and its notes are the end
    assert rest[-1] == "[1] momentum 0.5 (paper: 0.9)" and all(x.startswith(("all rows: ", "[")) for x in rest[3:])
    assert mentions(out, "no published counterpart", f"{tmp_path / 'c'} (fedcac, digits, dirichlet 0.1)")
    assert f"skipped, not finished: {unfinished}" in err and "--dataset NAME" not in out
    own = run_folder(tmp_path / "own", "e", "fedcac/cifar10-pathological-2", {}, dataset="folder:mine")
    out, _ = invoke(str(own), "--paper", code=1)
    assert f"no published counterpart: {own} " in out and mentions(
        out, "--dataset NAME", "e.g", "cifar10", "compares your", "paper's"
    )
    out, _ = invoke(str(own), "--paper", "--dataset", "cifar10")
    assert "no published counterpart" not in out and "--dataset NAME" not in out
    shapes = run_folder(tmp_path / "own", "f", "fedcac/cifar10-pathological-2", {}, dataset="fashion-mnist")
    out, _ = invoke(str(own), str(shapes), "--paper", "--dataset", "cifar10")
    assert (
        mentions(out, "no published counterpart", f"{shapes} (fedcac, fashion-mnist")
        and f"counterpart: {own}" not in out
    )
    assert invoke(str(own), str(shapes), "--dataset", "cifar10")[0] == out
    for words in (("--paper", "--dataset", "cifar-10"), ("--dataset", "cifar-10")):
        _, err = invoke(str(own), *words, code=2)
        assert mentions(" ".join(err.split()), f"--dataset {words[-1]}", "with --paper", "name the data")
    out, _ = invoke(str(tmp_path))
    header, *rows = out.splitlines()
    assert header.split()[:3] == ["method", "num-server-rounds", "num-clients"]
    (told,) = [row for row in rows if row.startswith("accuracies in per cent,")]
    assert rows.index(told) == 3
    assert mentions(rows[-1], "no table", "no other row", "shares data", "clients and seeds")


@pytest.mark.parametrize(
    ("schedule", "every", "tested", "planned"),
    [
        ("cosine", 0, (4, 8), "4, 8"),
        ("cosine", 3, (3, 4, 6, 8), "4, 8"),
        ("cosine", 0, (2, 4, 8), "2, 4, 8"),
        ("cosine", 0, (8,), "straight"),
        ("cosine", 4, (4, 8), "straight"),
        ("constant", 0, (4, 8), None),
    ],
)
def test_a_schedule_that_was_stretched_is_no_repetition_of_a_straight_one(
    tmp_path: Path, schedule: str, every: int, tested: tuple[int, ...], planned: str | None
) -> None:
    """Earlier versions continued such runs; both have the same config."""

    def folder(name: str, seed: int, tests: tuple[int, ...]) -> None:
        changes = {"seed": seed, "num_server_rounds": 8, "schedule": schedule, "evaluate_every": every}
        path = run_folder(tmp_path, name, "fedcac/cifar10-dirichlet-0.1", {}, **changes)
        records = [{"round": t} | ({"evaluation": {"clients": {}}} if t in tests else {}) for t in range(1, 9)]
        (path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))

    folder("resumed", 0, tested)
    folder("straight", 1, tuple(t for t in range(1, 9) if t == 8 or (every and t % every == 0)))
    runs, _ = compare.load([tmp_path], METHOD_PARAMS)
    assert [run.continued.get("schedule-rounds") for run in runs] == [planned, planned and "straight"]
    groups, reported = compare.group(runs), grouped(read_runs([tmp_path]))
    if planned in (None, "straight"):
        assert len(groups) == len(reported) == 1
    else:
        assert [one["schedule-rounds"] for one in compare.varying(groups)] == [planned, "straight"]
        assert [one.settings["schedule-rounds"] for one in reported] == [planned, "straight"]


# All figures that a paper may mean, by hand ---------------------------------------------------------------------------

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
