"""The page of results: the committed page is that of the collected runs, and its tables equal hand-made ones."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from corolla.experiments import paper_table
from corolla.experiments.paper_table import CAPTION
from fl_app import plugins
from studies import results_page
from studies.results_page import RESULTS, SWEEPS
from tests.experiments.test_compare import FASHION, run_folder, run_tested


@pytest.fixture(autouse=True, scope="module")
def read_once() -> Iterator[None]:
    """Read the collected runs once for all tests."""
    read = results_page.lines_of
    kept = functools.cache(read)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            results_page, "lines_of", lambda name, path: (kept if path.parent == RESULTS else read)(name, path)
        )
        yield


def test_the_page_is_what_the_collected_runs_make_it() -> None:
    text = results_page.PAGE.read_text(encoding="utf-8")
    assert results_page.page(text, RESULTS) == text, "make docs"
    short = results_page.SHORT.read_text(encoding="utf-8")
    assert results_page.page(short, RESULTS, text) == short, "make docs"
    marks = {found[2] for found in results_page.BLOCK.finditer(text)}
    assert marks == {results_page.PRINT, *results_page.COLUMNS, *results_page.OWN_TABLES}
    there = {p.name for p in (RESULTS).glob("*") if p.is_dir()}
    assert there <= marks, "runs that no table shows"


def test_the_page_begins_with_print_and_ours_of_every_column() -> None:
    text = results_page.PAGE.read_text(encoding="utf-8")
    assert min(text.index(found[0]) for found in results_page.BLOCK.finditer(text)) == text.index(
        "<!-- results/print -->"
    )
    first = text.partition("<!-- results/print -->")[2].partition("<!-- end -->")[0]
    headings = re.findall(r"^\*\*\[(.+)\]\(#(.+)\)\*\*", first, re.MULTILINE)
    made = [name for name in results_page.COLUMNS if results_page.any_made(RESULTS / name)]
    assert headings == [
        (section, results_page.anchor(section)) for section in (results_page.section_of(text, name) for name in made)
    ]
    rows = [line.strip("| ").split(" | ") for line in first.splitlines() if line.startswith("| ")]
    heads = [row for row in rows if row[0] == "method"]
    assert heads == [["method", "print", "ours", "difference", "same method"]] * len(made)
    for row in rows:
        if row[0] != "method":
            printed, ours = (float(cell.partition(" ")[0]) for cell in row[1:3])
            # the three are rounded separately
            assert abs(ours - printed - float(row[3])) < 0.011, row
    assert sum(row[4].startswith("no") for row in rows) == 6 and sum(", cut" in row[4] for row in rows) == 4


def test_the_short_page_says_of_columns_what_their_rows_show() -> None:
    def differences(name: str) -> list[float]:
        columns = paper_table.columns(results_page.lines_of(name, RESULTS / name), paper_table.reasons)
        return [float(row[3]) for column in columns for row in column.table[1:] if row[4].startswith("yes")]

    text = results_page.SHORT.read_text(encoding="utf-8")
    assert "All rows of the same method are slightly below print. FLOCO misses more" in " ".join(text.split())
    found = sorted(differences("fedobp-fashion-mnist"))
    assert found[-1] < 0 and found[1] > -1 > found[0]
    assert "within one point of print" in text and max(map(abs, differences("fedobp-cifar10"))) < 1
    # figures stand in the table alone, which is made from the runs
    assert not re.search(r"\d\.\d", results_page.BLOCK.sub("", text))


def test_a_short_table_says_why_a_row_is_not_prints(tmp_path: Path) -> None:
    column = tmp_path / "fedobp-fashion-mnist"
    for seed in range(4):
        run_tested(column, f"s{seed}", FASHION, [0.9588], evaluate_every=100, seed=seed)
    run_tested(column, "b", f"{FASHION}/flute", [0.95], evaluate_every=100)
    run_tested(column, "c", f"{FASHION}/local", [0.94], evaluate_every=100, num_server_rounds=200, momentum=0.5)
    text = "## A: 0.1\n<!-- results/fedobp-fashion-mnist -->\n<!-- end -->\n"
    assert results_page.print_block(text, tmp_path).splitlines() == [
        "",
        "**[A: 0.1](#a-01)**: FedOBP (anonymous authors, under review), Table 6: FMNIST, Dir(0.1)",
        "",
        "| method | print | ours | difference | same method |",
        "|---|---|---|---|---|",
        "| fedobp | 96.89 ± 0.03 | 96.88 ± 0.00 | -0.01 | yes |",
        "| local | 94.93 ± 0.08 | 95.00 | +0.07 | yes, cut [1, 2] |",
        "| flute | 88.56 ± 0.00 | 96.00 | +7.44 | no [2, 3] |",
        "",
        "- [1] 200 rounds, in print 400",
        "- [2] 1 seed, in print the mean of 4 runs",
        "- [3] the authors ran another method under this name: features are detached, so that the body never trains",
    ]


@pytest.mark.nightly
def test_the_pages_pictures_are_of_the_collected_runs() -> None:
    for name, path in results_page.PICTURES.items():
        panel = results_page.accuracy_picture(name, RESULTS / name)
        assert path.exists() == bool(panel), "make docs"
        # other versions of the libraries draw a letter otherwise, not a curve
        if panel:
            files = (BytesIO(results_page.small_png(panel)), path)
            drawn, kept = (np.asarray(Image.open(file).convert("L"), np.float64) for file in files)
            assert drawn.shape == kept.shape and np.abs(drawn - kept).mean() < 0.5, f"{path.name}: make docs"


def test_every_figure_that_is_far_from_its_paper_is_explained() -> None:
    text = results_page.PAGE.read_text(encoding="utf-8")
    for name in results_page.COLUMNS:
        own = text.partition(f"<!-- results/{name} -->")[2].partition("\n## ")[0].partition("<!-- end -->")[2]
        for line in results_page.lines_of(name, RESULTS / name):
            assert not results_page.is_far(line) or f"**{line.runs[0].config.method}" in own, (
                f"{name}: say why of {line.preset.name}"
            )


def test_a_block_has_what_was_run_what_is_far_and_what_is_left(tmp_path: Path) -> None:
    empty = results_page.block("fedobp-fashion-mnist", tmp_path).strip()
    assert empty.startswith(
        "None of its 19 runs has been made yet: `corolla sweep studies/sweeps/fedobp-fashion-mnist.toml --in-process`"
    )
    tuned = {"finetune_epochs": 5, "evaluate_every": 100}
    run_tested(tmp_path, "a", FASHION, [0.95, 0.958], **tuned)
    run_tested(tmp_path, "b", f"{FASHION}/local", [0.90, 0.88], local_epochs=3, **tuned)
    text = results_page.block("fedobp-fashion-mnist", tmp_path)
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    # 96.80 for 96.89; 89.00 for 94.93
    assert [row[0] for row in rows] == [
        "| method",
        "| fedobp",
        "| local\\*",
        "| distance",
    ]
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
    """Write a finished run with a curve.

    Its accuracy rises by a point a round before training, by two after it, and falls in round 19.
    """
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
    assert results_page.as_run_table(tmp_path) == []
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
    plugins.reset(SWEEPS)
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
