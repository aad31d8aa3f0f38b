"""The report: its data against real runs and by hand, the page and its pictures, damaged runs; TensorBoard."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from PIL import Image

from client_app.client_app import app as client_app
from fl_app import server_app
from fl_app.config import parse
from fl_app.errors import UserError
from fl_app.report import arrays as report_runs
from fl_app.report import by_method as method_figures
from fl_app.report import comparison as comparison_figures
from fl_app.report import figures
from fl_app.report import page as report
from fl_app.server.inprocess import InProcessGrid
from fl_app.server.run_folder import client_facts, read_clients, read_metrics
from fl_app.toml import to_toml
from strategies import METHOD_PARAMS
from tests.conftest import SMALL, Run, flat

# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Callable[..., Path]:
    def start(name: str, **changes: Any) -> Path:
        own = {"output-dir": str(tmp_path_factory.mktemp("runs")), "state-dir": str(tmp_path_factory.mktemp("state"))}
        raw = SMALL | own | {"data-dir": str(data_dir), "run-name": name} | flat(changes)
        config = parse(raw, METHOD_PARAMS)
        grid = InProcessGrid(client_app, raw, config.num_clients)
        return server_app.run(grid, config, lambda what, done, total: None).path

    return start


@pytest.fixture(scope="module")
def fedcac(start: Callable[..., Path]) -> Path:
    return start(
        "fedcac-run", method="fedcac", partition="pathological", num_clients=20, train_samples=40, test_samples=10,
        num_server_rounds=8, local_epochs=3, learning_rate=0.1, evaluate_every=4, fedcac={"beta": 3},
    )  # fmt: skip


@pytest.fixture(scope="module")
def fedavg(start: Callable[..., Path]) -> Path:
    return start("fedavg-run", method="fedavg", num_server_rounds=3)


@pytest.fixture(scope="module")
def local(start: Callable[..., Path]) -> Path:
    return start("local-run", method="local", num_server_rounds=3)


def record(round: int, clients: dict[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    rows = {i: {"accuracy-after": 0.5, "seconds": {"train": 1.0, "evaluate": 0.5}, **row} for i, row in clients.items()}
    before = [row["accuracy-before"] for row in rows.values()]
    return {
        "round": round, "accuracy-before": float(np.mean(before)), "accuracy-before-pooled": float(np.mean(before)),
        "upload-bytes": 100, "download-bytes": 40, "failures": [], "seconds": {"round": 3.0, "wait": 2.0, "evaluate": 1.0},
        "clients": rows, **more,
    }  # fmt: skip


def folder(path: Path, records: list[dict[str, Any]], finished: bool = True, **config: Any) -> Path:
    """Write a run folder by hand."""
    path.mkdir(parents=True)
    raw = flat({"method": "fedavg", "num_server_rounds": len(records), **config})
    (path / "config.toml").write_text(to_toml(parse(raw, METHOD_PARAMS).resolved))
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if finished:
        (path / "summary.json").write_text(json.dumps({"rounds": len(records)}))
    return path


def write(output: Path, *paths: Path) -> tuple[str, set[str]]:
    page, pictures = report.write_report(paths, output)
    return page.read_text(encoding="utf-8"), {p.stem for p in pictures.iterdir()}


# Data -----------------------------------------------------------------------------------------------------------------


def test_clients_with_the_same_classes_have_the_highest_overlap(fedcac: Path) -> None:
    run = report_runs.read_run(fedcac)
    told, found = report_runs.class_counts(run), report_runs.overlap(run)
    assert told is not None and found is not None and told[0] == found[0] == list(range(20))
    similarity, overlap = report_runs.cosine(told[1]), found[1].copy()
    np.fill_diagonal(overlap, -1)
    np.fill_diagonal(similarity, -1)
    with_twin = [i for i in range(20) if similarity[i].max() > 0.99]
    assert len(with_twin) >= 4
    for i in with_twin:
        assert similarity[i, overlap[i].argmax()] > 0.99, f"client {i}"
    none = overlap[similarity == 0]
    assert overlap[similarity > 0.99].min() > none.max()


def test_similar_clients_are_drawn_side_by_side(fedcac: Path) -> None:
    told = report_runs.class_counts(report_runs.read_run(fedcac))
    assert told is not None
    similarity = report_runs.cosine(told[1])
    order = report_runs.by_likeness(similarity)
    assert sorted(order) == list(range(20))
    place = {client: k for k, client in enumerate(order)}
    for i, j in combinations(range(20), 2):
        if similarity[i, j] > 0.99:
            between = order[min(place[i], place[j]) : max(place[i], place[j]) + 1]
            assert all(similarity[i, k] > 0.99 for k in between)


def test_figures_of_the_table_are_those_of_the_summary(fedcac: Path, fedavg: Path) -> None:
    for path in (fedcac, fedavg):
        run, summary = report_runs.read_run(path), json.loads((path / "summary.json").read_text())
        final = run.final()
        assert final is not None and run.finished and not run.missing
        assert final[1]["accuracy"] == summary["final-accuracy"] and final[1]["digest"] == summary["digest"]
        assert run.best("accuracy-before") == summary["best-accuracy"]
        assert run.total("upload-bytes") == summary["upload-bytes"]
        assert run.seconds() == pytest.approx(summary["seconds"], abs=1e-3)
        assert len(run.failures()) == summary["failures"]


def test_class_counts_are_the_clients_training_labels(fedcac: Path) -> None:
    clients = read_clients(fedcac)
    assert sorted(clients, key=int) == [str(i) for i in range(20)]
    for facts in clients.values():
        assert sum(facts["class-counts"]) == facts["train-samples"] == 40
        assert sum(n > 0 for n in facts["class-counts"]) == 2 and facts["test-samples"] == 10


@pytest.mark.parametrize("text", ["1,2", "1,2,x", "1,-2,3", "1,,3", "1,2,3,4", "²,1,1"])
def test_malformed_class_counts_are_dropped_and_logged(text: str, caplog: pytest.LogCaptureFixture) -> None:
    properties = {"train-samples": 5, "test-samples": 2, "num-classes": 3, "class-counts": text}
    log = logging.getLogger("corolla")
    log.addHandler(caplog.handler)
    try:
        assert client_facts(7, properties) == {"train-samples": 5, "test-samples": 2}
    finally:
        log.removeHandler(caplog.handler)
    assert "client 7: class-counts must be 3 counts" in caplog.text
    assert client_facts(7, properties | {"class-counts": "1,0,4"})["class-counts"] == [1, 0, 4]


def test_curves_bytes_and_seconds_by_hand(tmp_path: Path) -> None:
    rounds = [
        record(1, {"0": {"accuracy-before": 0.1}, "1": {"accuracy-before": 0.3}}),
        record(2, {"0": {"accuracy-before": 0.5}, "1": {"accuracy-before": None}, "2": {"accuracy-before": 0.9}}
               | {"1": {"accuracy-before": 0.7}}),
    ]  # fmt: skip
    run = report_runs.read_run(folder(tmp_path / "r", rounds))
    curve = report_runs.curve(run, "accuracy-before")
    assert curve is not None
    assert curve.rounds.tolist() == [1, 2]
    assert curve.mean == pytest.approx([0.2, 0.7])
    assert curve.low == pytest.approx([0.15, 0.6]) and curve.high == pytest.approx([0.25, 0.8])
    bytes_, accuracy = report_runs.spent(run)  # round 1: its downloads; round 2: all of round 1 and its downloads
    assert bytes_.tolist() == [40, 180] and accuracy == pytest.approx([0.2, 0.7])
    assert report_runs.server_seconds(run) == {"wait": 2.0, "evaluate": 1.0}
    assert report_runs.client_seconds(run) == {"train": 1.0, "evaluate": 0.5}
    assert report_runs.curve(run, "evaluation") is None
    values, source = report_runs.final_accuracies(run)
    assert values.tolist() == [0.5, 0.7, 0.9] and "last round" in source


def test_what_methods_record_by_hand(tmp_path: Path) -> None:
    rounds = [
        record(1, {"0": {"accuracy-before": 0, "collaborators": [1, 3], "personal-parameters": {"a.weight": 0, "b.weight": 0}},
                   "1": {"accuracy-before": 0, "collaborators": [0]}},
               overlap=[[1, 0.4], [0.4, 1]], **{"macro-classes": {"a": 2, "b": 1}}),
        record(3, {"1": {"accuracy-before": 0, "collaborators": []},
                   "3": {"accuracy-before": 0, "collaborators": [1],
                         "personal-parameters": {"a.weight": 1, "a.bias": 2, "b.weight": 9}}},
               overlap=[[1, 0.6], [0.6, 1]], **{"macro-classes": {"a": 3, "b": 1}}),
    ]  # fmt: skip
    run = report_runs.read_run(folder(tmp_path / "r", rounds))
    nan = np.nan
    ids, overlap = report_runs.overlap(run) or ([], np.zeros(0))
    assert ids == [0, 1, 3]
    np.testing.assert_array_equal(overlap, [[1, 0.4, nan], [0.4, 1, 0.6], [nan, 0.6, 1]])
    ids, grid = report_runs.collaborators(run) or ([], np.zeros(0))
    assert ids == [0, 1, 3]
    np.testing.assert_array_equal(grid, [[2, nan, nan], [1, nan, 0], [nan, nan, 1]])
    names, shares = report_runs.personal_shares(run) or ([], np.zeros(0))
    assert names == ["a", "b"]
    np.testing.assert_array_equal(shares, [[nan, nan, 0.25], [nan, nan, 0.75]])
    names, clusters = report_runs.layer_values(run, "macro-classes") or ([], np.zeros(0))
    np.testing.assert_array_equal(clusters, [[2, nan, 3], [1, nan, 1]])
    assert run.missing == [2]
    assert report_runs.layer_values(run, "high-dispersion") is None


def test_runs_are_named_by_what_differs(tmp_path: Path) -> None:
    one = [record(1, {"0": {"accuracy-before": 0.5}})]
    paths = [
        folder(tmp_path / "a", one, method="fedcac", seed=1),
        folder(tmp_path / "b", one, method="fedcac", seed=1, fedcac={"tau": 0.25}),
        folder(tmp_path / "c", one, method="fedavg", seed=1, fedcac={"tau": 0.75}),
        folder(tmp_path / "d", one, method="fedavg", seed=2),
    ]
    runs = report_runs.read_runs([*paths, tmp_path / "a"])
    labels = ["1 fedcac, tau 0.5, seed 1", "2 fedcac, tau 0.25, seed 1", "3 fedavg, seed 1", "4 fedavg, seed 2"]
    assert [run.label for run in runs] == labels
    assert report_runs.differences(runs) == ["fedcac.tau", "seed"]
    assert [run.number for run in report_runs.read_runs([tmp_path])] == [1, 2, 3, 4]
    assert report_runs.read_runs(paths[:1])[0].label == "fedcac"
    assert report_runs.short("12 method, first 1, second 2", 22) == "12 method, first 1, …"
    assert len(report_runs.short("12 " + "x" * 90)) == report_runs.LABEL_LENGTH


# Page and pictures ----------------------------------------------------------------------------------------------------


def test_the_page_is_self_contained_and_every_picture_decodes(fedcac: Path, fedavg: Path, local: Path, tmp_path: Path) -> None:
    page, names = write(tmp_path, fedcac, fedavg, local)
    assert names == {
        "accuracy", "clients", "communication", "seconds", "partition-1", "partition-2", "overlap-1", "collaborators-1",
    }  # fmt: skip
    assert not re.search(r"https?:|<script|<link|@import|url\(", page)
    sources = re.findall(r'<img [^>]*src="([^"]+)"', page)
    assert len(sources) == len(names)
    for source in sources:
        head, _, data = source.partition(",")
        assert head == "data:image/png;base64"
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            assert len(np.unique(np.asarray(image.convert("L")))) > 16, "an empty picture"
    for path in (fedcac, fedavg, local):
        summary = json.loads((path / "summary.json").read_text())
        assert f"{100 * summary['final-accuracy']:.2f}" in page and summary["digest"][:8] in page
    assert "pathological" in page and "do not have the same data" in page
    assert "mean overlap is" in page and 'class="warn"' in page


def test_a_report_replaces_the_pictures_of_an_earlier_one(fedavg: Path, tmp_path: Path) -> None:
    (tmp_path / report.PICTURES).mkdir()
    (tmp_path / report.PICTURES / "overlap-1.png").write_bytes(b"of an earlier report")
    page, names = write(tmp_path, fedavg)
    assert names == {"accuracy", "clients", "communication", "seconds", "partition"}
    assert 'class="warn"' not in page and "collaborators" not in page


def test_without_class_counts_only_what_is_known_is_drawn(start: Callable[..., Path], tmp_path: Path) -> None:
    run = start("secret", method="fedcac", report_class_counts=False)
    assert all("class-counts" not in facts for facts in read_clients(run).values())
    page, names = write(tmp_path, run)
    assert "overlap-1" in names and not [name for name in names if name.startswith("partition")]
    assert "Overlap of critical parameters</h3>" in page and "cosine" not in page


def test_names_are_escaped(tmp_path: Path) -> None:
    rounds = [record(1, {"0": {"accuracy-before": 0.5}}, failures=[{"client": 3, "cause": "<script>alert(1)</script>"}])]
    page, _ = write(tmp_path, folder(tmp_path / "<b>$x_1$&", rounds, model="my_model:make"))
    assert "<script" not in page and "<b>$" not in page
    assert "&lt;b&gt;$x_1$&amp;" in page and "&lt;script&gt;alert(1)" in page and "my_model:make" in page


def test_an_interrupted_run_reports_what_there_is(
    fedcac: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (fedcac / "metrics.jsonl").read_text().splitlines()
    run = folder(tmp_path / "cut", [], finished=False, method="fedcac", num_server_rounds=8)
    (run / "metrics.jsonl").write_text("\n".join([lines[0], "{garbage", *lines[2:5], "7", lines[5][:200]]))
    monkeypatch.setattr(logging.getLogger("corolla"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="corolla"):
        assert [r["round"] for r in read_metrics(run)] == [1, 3, 4, 5]
    assert [int(n) for n in re.findall(r"line (\d+) is not a round", caplog.text)] == [2, 6, 7]
    page, names = write(tmp_path / "out", run)
    assert "is not finished: the last recorded round is 5 of 8" in page
    assert "no readable record of round 2" in page and "round 4" in page
    assert {"accuracy", "clients", "overlap-1", "collaborators-1"} <= names


@pytest.mark.parametrize("line", [
    "null", "[]", '{"round": 0}', '{"round": true}', '{"round": 2, "clients": []}', '{"round": 2, "clients": {"0": 3}}',
    '{"round": 2, "accuracy-before": "x"}', '{"round": 2, "failures": ["x"]}', '{"round": 2, "evaluation": 1}',
    '{"round": 2, "evaluation": {"clients": []}}', "\0\0", "",
])  # fmt: skip
def test_a_line_that_is_no_record_of_a_round_is_skipped(line: str, tmp_path: Path) -> None:
    run = folder(tmp_path / "r", [record(t, {"0": {"accuracy-before": 0.5}}) for t in (1, 3)], num_server_rounds=3)
    path = run / "metrics.jsonl"
    first, last = path.read_text().splitlines()
    path.write_text(f"{first}\n{line}\n{last}\n")
    assert [r["round"] for r in read_metrics(run)] == [1, 3]
    assert report_runs.read_run(run).missing == [2]
    path.write_text(f'{first}\n{{"round": 2}}\n{last}\n')  # one that lacks everything harms nobody
    page, _ = write(tmp_path / "out", run)
    assert "3" in page


def test_a_run_without_any_round_has_no_pictures_and_says_so(fedavg: Path, tmp_path: Path) -> None:
    run = folder(tmp_path / "early", [], finished=False, num_server_rounds=5)
    page, names = write(tmp_path / "out", run)
    assert "no round is recorded" in page and not names and "<img" not in page
    page, names = write(tmp_path / "out", fedavg, run)
    assert "no round is recorded" in page and "accuracy" in names


def test_paths_that_are_no_runs_are_all_named(fedavg: Path, tmp_path: Path) -> None:
    (tmp_path / "hollow").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.toml").write_text("= nothing")
    with pytest.raises(UserError) as error:
        report.write_report([fedavg, tmp_path / "gone", tmp_path / "hollow", tmp_path / "bad"], tmp_path / "out")
    for word in ("gone: this run folder does not exist", "hollow: this run folder holds no run", "bad is not a run folder"):
        assert word in str(error.value)
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output: cannot write"):
        report.write_report([fedavg], tmp_path / "file")


def many_runs(path: Path, num_runs: int, num_clients: int) -> list[Path]:
    """Runs with long names, many clients and everything methods record."""
    rng = np.random.default_rng(0)
    out = []
    for k in range(num_runs):
        method, rounds = ("fedcac", "fedavg", "local")[k % 3], []
        for t in range(1, 5):
            rows = {
                str(i): {"accuracy-before": rng.random(), "collaborators": [0] * int(rng.integers(9)),
                         "personal-parameters": {f"layer{j}.0.downsample.conv{j}.weight": j for j in range(30)}}
                for i in range(num_clients)
            }  # fmt: skip
            layers = {f"layer{j}.0.downsample.conv{j}.weight": float(rng.random()) for j in range(30)}
            more = {"high-dispersion": layers, "macro-classes": {name: 1 + t % 4 for name in layers}}
            evaluation = {"accuracy": 0.5, "clients": {i: {"accuracy": rng.random()} for i in rows}}
            overlap = rng.random((num_clients, num_clients)).tolist()
            rounds.append(record(t, rows, overlap=overlap, evaluation=evaluation, **more))
        run = folder(path / f"run-{k:02}", rounds, method=method, seed=k, model=f"a_long_module_name_{k}:factory",
                     learning_rate=0.01 * (k + 1))  # fmt: skip
        facts = {str(i): {"class-counts": rng.integers(0, 50, 10).tolist()} for i in range(num_clients)}
        (run / "clients.json").write_text(json.dumps(facts))
        out.append(run)
    return out


@pytest.mark.parametrize("letters", range(6, 41))
def test_a_legend_is_never_wider_than_the_picture(letters: int) -> None:
    drawing = figures.new_figure(4)
    axes = drawing.add_subplot()
    for k in range(14):
        axes.plot([0, 1], label=f"{k} fedavg, seed {k} and other words".ljust(letters, "m")[:letters])
    figures.legend(drawing, axes, [None] * 14)  # type: ignore[list-item]
    drawing.draw_without_rendering()
    box = drawing.legends[0].get_window_extent()
    assert drawing.bbox.x0 <= box.x0 and box.x1 <= drawing.bbox.x1


@pytest.mark.parametrize(("num_runs", "num_clients"), [(14, 40), (2, 14), (4, 20)])
def test_nothing_overlaps_with_many_runs_clients_and_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_runs: int, num_clients: int
) -> None:
    drawn: list[Figure] = []

    def keep(figure: Figure) -> bytes:
        drawn.append(figure)
        return b""

    monkeypatch.setattr(comparison_figures, "png", keep)
    monkeypatch.setattr(method_figures, "png", keep)
    runs = report_runs.read_runs(many_runs(tmp_path, num_runs, num_clients))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a layout that does not fit warns
        names = [p.name for p in comparison_figures.comparison(runs)]
        names += [p.name for p in method_figures.partitions(runs[:1])] + [p.name for p in method_figures.of_run(runs[0])]
        for figure in drawn:
            figure.draw_without_rendering()
    spread = ["accuracy-spread"] * (num_runs > 4)
    assert names == [
        "accuracy", *spread, "clients", "communication", "seconds", "partition", "overlap-1", "collaborators-1", "personal-1",
        "dispersion-1",
    ]  # fmt: skip
    for name, figure in zip(names, drawn, strict=True):
        for group in text_groups(figure):
            for text, box in group:
                assert figure.bbox.x0 - 1 <= box.x0 and box.x1 <= figure.bbox.x1 + 1, f"{name}: {text!r} is cut"
                assert figure.bbox.y0 - 1 <= box.y0 and box.y1 <= figure.bbox.y1 + 1, f"{name}: {text!r} is cut"
            for (a, first), (b, second) in combinations(group, 2):
                assert not overlapping(first, second), f"{name}: {a!r} lies on {b!r}"


def text_groups(figure: Figure) -> list[list[tuple[str, Bbox]]]:
    """All texts of the figure: its titles, axis labels and tick labels, and its legends'."""
    texts = [t for legend in figure.legends for t in legend.get_texts()]
    for axes in figure.axes:
        texts += [axes.title, axes.get_title(loc="left") and axes._left_title, axes.xaxis.label, axes.yaxis.label]  # type: ignore[attr-defined]
        texts += [t for axis in (axes.xaxis, axes.yaxis) if axes.axison for t in visible_labels(axis)]
        if legend := axes.get_legend():
            texts += legend.get_texts()
    return [[(t.get_text(), t.get_window_extent()) for t in texts if t and t.get_text().strip() and t.get_visible()]]


def visible_labels(axis: Any) -> list[Any]:
    low, high = sorted(axis.get_view_interval())
    inside = [tick for tick in axis.get_major_ticks() if low - 1e-9 <= tick.get_loc() <= high + 1e-9]
    return [tick.label1 for tick in inside if tick.label1.get_visible()] + [t.label2 for t in inside if t.label2.get_visible()]


def overlapping(a: Bbox, b: Bbox, slack: float = 1.0) -> bool:
    both = Bbox.intersection(a, b)
    return both is not None and both.width > slack and both.height > slack


def test_no_global_state_of_matplotlib_is_touched(fedavg: Path, tmp_path: Path) -> None:
    code = (
        "import sys, matplotlib\nfrom pathlib import Path\nbefore = matplotlib.rcParams.copy()\n"
        "from fl_app.report.page import write_report\nwrite_report([Path(sys.argv[1])], Path(sys.argv[2]))\n"
        "assert 'matplotlib.pyplot' not in sys.modules, 'pyplot'\nassert matplotlib.rcParams.copy() == before, 'rcParams'\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(fedavg), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_command_writes_into_the_current_directory(fedavg: Path, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "corolla"), "report"]
    done = subprocess.run([*command, str(fedavg)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split() == ["report.html", "report-figures"], done.stderr
    assert {p.name for p in tmp_path.iterdir()} == {"report.html", "report-figures"}
    done = subprocess.run([*command, "nowhere"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "nowhere: this run folder does not exist" in done.stderr


# TensorBoard ----------------------------------------------------------------------------------------------------------


def test_tensorboard_events_hold_every_round(start: Callable[..., Path]) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = start("events", tensorboard=True, num_server_rounds=3)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    rounds = list(read_metrics(run))
    for tag, value in (
        ("accuracy/before-training", lambda r: r["accuracy-before"]),
        ("accuracy/after-training", lambda r: r["accuracy-after"]),
        ("loss/training", lambda r: r["loss"]), ("bytes/upload", lambda r: r["upload-bytes"]),
        ("seconds/round", lambda r: r["seconds"]["round"]), ("failures", lambda r: len(r["failures"])),
    ):  # fmt: skip
        scalars = events.Scalars(tag)
        assert [s.step for s in scalars] == [1, 2, 3]
        assert [s.value for s in scalars] == pytest.approx([value(r) for r in rounds], rel=1e-5)
    assert [s.step for s in events.Scalars("accuracy/all-clients")] == [3]


def test_tensorboard_that_is_missing_is_said_before_the_run_starts(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "tensorboard" else find(name, *rest))
    with pytest.raises(UserError, match="tensorboard: the package tensorboard is not installed"):
        run(tensorboard=True)
    assert not (tmp_path / "runs").exists()
