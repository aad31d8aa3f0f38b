"""All figures that a paper may mean, by hand; and the page of results, which is made of them."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks import results_page
from corolla.experiments import compare, paper_metrics
from corolla.experiments.paper_metrics import CAPTION
from corolla.presets import read_preset
from fl_app import models, plugins
from fl_app.config import parse
from fl_app.layout import Layout, Model
from strategies import METHOD_PARAMS
from tests.experiments.test_compare import lines, run_folder

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
    assert paper_metrics.figures(run) == pytest.approx(
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
    found = paper_metrics.figures_table(lines(tmp_path))
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
    assert paper_metrics.figures_table(lines(run_folder(tmp_path / "bare", "d", FASHION, {}))) == []
    run_tested(tmp_path, "d", f"{FASHION}/flute", [0.98, 0.98], finetune_epochs=0)  # another method under this name
    assert paper_metrics.figures_table(lines(tmp_path))[-1][2] == distance["before, mean"]
    run_tested(
        tmp_path, "e", f"{FASHION}/fedrep", [0.85, 0.85], finetune_epochs=0
    )  # 10.8 away: the median is not led astray
    assert paper_metrics.figures_table(lines(tmp_path))[-1][2] == "1.29 / 1.11"


def test_fedobps_figure_is_the_best_test_of_all_clients_over_all_samples(tmp_path: Path) -> None:
    (line,) = lines(run_tested(tmp_path, "a", FASHION, [0.5, 0.9, 0.7]))
    assert line.ours == (0.91, None) and line.finetuned == (pytest.approx(0.93), None)
    assert line.preset.settings["evaluate-every"] == 100
    (untested,) = lines(run_folder(tmp_path / "b", "b", FASHION, {"final-accuracy-pooled": 0.6}))
    assert untested.ours == (0.6, None)


def test_a_single_test_has_no_best(tmp_path: Path) -> None:
    _, row = paper_metrics.figures_table(lines(run_tested(tmp_path, "a", FASHION, [0.9])))
    assert row[2] == "90.00"


# The page


def test_the_page_is_what_the_runs_in_results_make_it() -> None:
    text = results_page.PAGE.read_text(encoding="utf-8")
    assert results_page.page(text, results_page.ROOT / "results") == text, "make docs"
    marks = {found[2] for found in results_page._BLOCK.finditer(text)}
    assert marks == {*results_page.COLUMNS, *results_page.OWN_TABLES}
    there = {p.name for p in (results_page.ROOT / "results").glob("*") if p.is_dir()}
    assert there <= marks, "runs that no table shows"


def test_the_pages_pictures_are_of_the_runs_in_results() -> None:
    for name, path in results_page.PICTURES.items():
        panel = results_page.over_rounds(name, results_page.ROOT / "results" / name)
        assert path.exists() == bool(panel), "make docs"
        if panel:  # other versions of the libraries draw a letter otherwise, not a curve
            files = (BytesIO(results_page.small(panel)), path)
            drawn, kept = (np.asarray(Image.open(file).convert("L"), np.float64) for file in files)
            assert drawn.shape == kept.shape and np.abs(drawn - kept).mean() < 0.5, f"{path.name}: make docs"


def test_every_figure_that_is_far_from_its_paper_is_explained() -> None:
    text = results_page.PAGE.read_text(encoding="utf-8")
    for name in results_page.COLUMNS:
        own = text.partition(f"<!-- results/{name} -->")[2].partition("\n## ")[0].partition("<!-- end -->")[2]
        for line in results_page.lines_of(name, results_page.ROOT / "results" / name):
            assert not results_page.far(line) or f"**{line.runs[0].config.method}" in own, (
                f"{name}: say why of {line.preset.name}"
            )


def test_a_block_has_what_was_run_what_is_far_and_what_is_left(tmp_path: Path) -> None:
    empty = results_page.block("fedobp-fashion-mnist", tmp_path).strip()
    assert empty.startswith(
        "None of its 19 runs has been made yet: `corolla sweep sweeps/fedobp-fashion-mnist.toml --in-process`"
    )
    tuned = {"finetune_epochs": 5, "evaluate_every": 100}
    run_tested(tmp_path, "a", FASHION, [0.95, 0.958], **tuned)
    run_tested(tmp_path, "b", f"{FASHION}/local", [0.90, 0.88], local_epochs=3, **tuned)
    text = results_page.block("fedobp-fashion-mnist", tmp_path)
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == [
        "| method",
        "| fedobp",
        "| local\\*",
        "| distance",
    ]  # 96.80 for 96.89; 89.00 for 94.93
    assert rows[1][-3:] == ["1", "400", "6.0 |"] and rows[1][2] == "95.80 / 95.80"
    assert "- local, settings that differ: local-epochs 3 (paper: 5)" in text and CAPTION[1:] in text
    left = text.partition("Not run yet: ")[2]
    assert (
        left.startswith("fedavg (seeds 0, 1, 2), ") and "fedper (seed 0), " in left and "fedobp (seeds 1, 2), " in left
    )
    assert "distance" not in results_page.block("fedobp-cifar10", tmp_path / "nothing") and "†" not in text
    run_tested(tmp_path, "c", f"{FASHION}/flute", [0.95, 0.95], **tuned)
    text = results_page.block("fedobp-fashion-mnist", tmp_path)
    assert (
        "\n| flute†\\* | 88.56 ± 0.00 | 95.00 / 95.00 |" in text and "\n†: the paper's row is of another method" in text
    )


def run_with_curve(
    directory: Path, name: str, preset: str, shift: float = 0.0, rounds: int = 20, **changes: Any
) -> None:
    """A finished run whose accuracy rises by a point a round before training, by two after it, and falls in round 19."""
    path = run_tested(directory, name, preset, [0.5], num_server_rounds=rounds, **changes)
    shares = {t: t - 10 if t == 19 else t for t in range(1, rounds + 1)}
    records = [
        {"round": t, "seconds": {"round": 1}, "accuracy-before": share / 100 + shift, "accuracy-after": share / 50}
        for t, share in shares.items()
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_curves_stand_beside_each_other(tmp_path: Path) -> None:
    for seed, shift in enumerate((0.0, 0.02)):
        run_with_curve(tmp_path, f"s{seed}", "fedcac/cifar10-dirichlet-0.1/fedper", shift, seed=seed)
    text = results_page.block("fedcac-cifar10-cut", tmp_path).splitlines()
    at = text.index("| method | round 10 | round 20 | best |")
    assert text[at - 1 : at + 5] == [
        "",
        "| method | round 10 | round 20 | best |",
        "|---|---|---|---|",
        "| fedper | 11.0 / 20.0 | 21.0 / 40.0 | 21.0 / 40.0 |",
        "",
        "Before / after training, mean over the round's clients.",
    ]


def test_what_was_tried_stands_beside_the_run_it_was_changed_in(tmp_path: Path) -> None:
    column, tried = tmp_path / "fedcac-cifar10-cut", tmp_path / "fedcac-cifar10-cut-tried"
    own = "fedcac/cifar10-dirichlet-0.1"
    run_with_curve(column, "fedper", f"{own}/fedper")
    run_with_curve(column, "fedcac", own, rounds=30, **{"fedcac.beta": 12})
    assert results_page.block(tried.name, tried) == "\n\n3 of 3 runs are not made yet.\n"
    run_with_curve(tried, "beta", own, 0.1, rounds=40)
    run_with_curve(tried, "momentum", own, 0.2, rounds=19, momentum=0.0, **{"fedcac.beta": 12})
    assert results_page.block(tried.name, tried).splitlines() == [
        "",
        "| run | round 20 | round 40 | best |",
        "|---|---|---|---|",
        "| as above | 20.0 / 40.0 |  | 30.0 / 60.0 |",
        "| fedcac.beta 100 | 30.0 / 40.0 | 50.0 / 80.0 | 50.0 / 80.0 |",
        "| momentum 0 |  |  | 38.0 / 36.0 |",
        "",
        "Before / after training, mean over the round's clients.",
        "",
        "",
        "1 of 3 runs are not made yet.",
    ]


def test_rows_as_their_code_runs_them_stand_below_the_table(tmp_path: Path) -> None:
    assert results_page.as_run(tmp_path) == []
    (tmp_path / "as-run").mkdir()
    tests = {"100": {"accuracy": 0.885, "accuracy-pooled": 0.89}, "200": {"accuracy": 0.88, "accuracy-pooled": 0.875}}
    for row in ("flute", "apfl"):
        made = {"preset": f"{FASHION}/{row}", "seed": 1, "tests": tests}
        (tmp_path / "as-run" / f"{row},seed=1.json").write_text(json.dumps(made))
    run_tested(tmp_path, "a", FASHION, [0.95, 0.958])
    text = results_page.block("fedobp-fashion-mnist", tmp_path).splitlines()
    rows = [line for line in text if line.startswith(("| apfl", "| flute"))]
    assert rows[0] == "| apfl | 89.37 ± 0.51 | 88.00 / 88.50 | 87.50 / 89.00 | 1 | 100, 200 |" and len(rows) == 2
    assert (
        text[text.index(rows[0]) - 2].startswith("| method, as its code runs it |")
        and text[text.index(rows[0]) - 3] == ""
    )


def test_what_differs_of_all_methods_is_said_once(tmp_path: Path) -> None:
    common = {"partition": "dirichlet-fl-bench", "partition_seed": 42}
    run_tested(tmp_path, "a", FASHION, [0.95, 0.958], **common)
    run_tested(tmp_path, "b", f"{FASHION}/local", [0.90, 0.88], local_epochs=3, **common)
    text = results_page.block("fedobp-fashion-mnist", tmp_path).splitlines()
    assert [line for line in text if "settings that differ" in line] == [
        "- all, settings that differ: partition dirichlet-fl-bench (paper: dirichlet)",
        "- local, settings that differ: local-epochs 3 (paper: 5)",
    ]


def test_a_note_says_which_methods_it_is_about(tmp_path: Path) -> None:
    for method in ("local", "fedper", "fedrep"):
        run_tested(tmp_path, method, f"{FASHION}/{method}", [0.9])
    found = list(results_page.notes(results_page.lines_of("fedobp-fashion-mnist", tmp_path)))
    assert found[0].startswith("- a quarter of each client's samples is its test set")
    assert found[-1].startswith("- fedper, fedrep: its code base, FL-bench, averages what is personal too")
    assert len(set(found)) == len(found)


def test_our_tests_stand_beside_the_logged_ones(tmp_path: Path) -> None:
    tests = [
        {"round": t, "evaluation": {"accuracy-pooled": 0.9 + t / 10000, "loss-pooled": 0.25}}
        for t in (100, 200, 300, 400)
    ]
    before = {1: 0.2626, 300: 0.5, 301: 0.9, 400: 0.8}
    rounds = {t: {"round": t, "accuracy-before-pooled": share} for t, share in before.items()}
    records = {record["round"]: {**rounds.get(record["round"], {}), **record} for record in [*rounds.values(), *tests]}
    runs: dict[str, dict[str, Any]] = {
        "a": {"momentum": 0.7},
        "b": {"method": "replayed:METHOD", "replayed.personal": "classifier"},
        "c": {"method": "as_logged:METHOD", "momentum": 0.7},
    }
    for name, changes in runs.items():
        path = run_folder(tmp_path, name, f"{FASHION}/local", {}, **changes)
        (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for _, record in sorted(records.items())))
    text = results_page.block(results_page.LOGS, tmp_path)
    assert [line for line in text.splitlines() if line.startswith("| ")] == [
        "| method | our momentum | after round | logged: accuracy, loss | ours |",
        "| --- | --- | --- | --- | --- |",
        "| local | 0.7 | 100 | 94.78, 0.2038 | 91.00, 0.2500 |",
        "| local | 0.7 | 200 | 94.98, 0.2579 | 92.00, 0.2500 |",
        "| local | 0.7 | 300 | 95.04, 0.2896 | 93.00, 0.2500 |",
        "| local | 0.7 | 400 | 95.06, 0.3089 | 94.00, 0.2500 |",
        "| fedper, the logs' clients | 0 | 100 | 96.42, 0.1146 | 91.00, 0.2500 |",
        "| fedper, the logs' clients | 0 | 200 | 96.44, 0.1564 | 92.00, 0.2500 |",
        "| fedper, the logs' clients | 0 | 300 | 96.55, 0.1836 | 93.00, 0.2500 |",
        "| fedper, the logs' clients | 0 | 400 | 96.57, 0.1989 | 94.00, 0.2500 |",
        "| fedper, the logs' clients | 0 | 301 to 400 | 96.45 | 85.00 |",
        "| fedavg, the logs' clients, weights, newcomers | 0.7 | 1, before | 26.19 | 26.26 |",
        "| fedavg, the logs' clients, weights, newcomers | 0.7 | 100 | 84.89, 0.4286 | 91.00, 0.2500 |",
        "| fedavg, the logs' clients, weights, newcomers | 0.7 | 200 | 85.24, 0.5082 | 92.00, 0.2500 |",
        "| fedavg, the logs' clients, weights, newcomers | 0.7 | 300 | 88.06, 0.4294 | 93.00, 0.2500 |",
        "| fedavg, the logs' clients, weights, newcomers | 0.7 | 400 | 88.03, 0.4517 | 94.00, 0.2500 |",
        "| fedavg, the logs' clients, weights, newcomers | 0.7 | 301 to 400 | 87.85 | 85.00 |",
    ]
    assert "3 of 6 runs are not made yet." in text


def test_the_replayed_clients_are_those_of_the_logs() -> None:
    """Two rounds of the log of FedAvg."""
    plugins.look_in(results_page.ROOT / "sweeps")
    settings = read_preset(f"{FASHION}/fedper") | {"method": "replayed:METHOD"}
    method = plugins.load("method", "replayed:METHOD")
    config = parse(settings, METHOD_PARAMS)
    strategy, server, everybody = method.strategy, SimpleNamespace(config=config), list(range(100))
    layout = Layout.of(models.build("cnn", in_channels=1, num_classes=10, image_size=28))
    own = parse(settings | {"replayed.personal": "classifier"}, METHOD_PARAMS)
    assert (
        method.travelling(config, layout) == layout.names
        and method.travelling(own, layout) == layout.names - layout.classifier
    )
    assert strategy.sample(server, everybody, 10) == [20, 21, 31, 34, 48, 59, 68, 77, 81, 93]
    assert strategy.sample(server, everybody, 100) == [15, 28, 31, 53, 71, 76, 77, 79, 97, 99]


def test_newcomers_as_logged_have_what_they_receive_and_later_their_own_classifier() -> None:
    plugins.look_in(results_page.ROOT / "sweeps")
    method = plugins.load("method", "as_logged:METHOD")
    layout = Layout.of(models.build("cnn", in_channels=1, num_classes=10, image_size=28))
    received, trained = (
        Model(np.full(layout.d, value, np.float32), np.zeros(layout.b, np.float32)) for value in (1, 2)
    )
    own = layout.indices(layout.classifier)
    for personal, start in (("classifier", np.where(own, 2, 1)), ("nothing", np.ones(layout.d))):
        params = SimpleNamespace(personal=personal)
        trainer = SimpleNamespace(train=lambda start: trained)
        ctx = SimpleNamespace(round=1, params=params, layout=layout, trainer=trainer)
        state, update = SimpleNamespace(arrays={}), method.local_update()
        first = layout.tensors(update.merge(received, state, ctx))
        assert (
            np.abs(first["fc1.weight"]).max() <= 1 / 32 and first["conv2.bias"].std() > 0
        )  # torch's own initial weights
        ctx.round = 2
        assert update.merge(received, state, ctx) is received
        assert update.train(received, state, ctx) is trained
        np.testing.assert_array_equal(update.merge(received, state, ctx).params, start)
