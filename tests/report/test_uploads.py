"""Pictures of kept uploads: their numbers by hand, and which are drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from corolla.report import model_pictures as models
from corolla.report.arrays import read_run
from corolla.report.groups import grouped, spaced
from corolla.report.model_pictures import of_all_uploads, of_uploads, spreads_of
from fl_app.layout import Layout, Model, packed
from fl_app.server import kept_uploads
from fl_app.server.kept_uploads import KeptUploads
from tests.conftest import f32
from tests.facts import mentions
from tests.report.builders import folder, record, write
from tests.report.read import frame_with, frames_of, marks
from tests.report.test_pictures import assert_drawn_within

# a layer of two parameters, and a classifier of two outputs by two inputs
LAYOUT = Layout(packed([("a", (2,)), ("c.weight", (2, 2))]), (), frozenset(["c.weight"]))
SENT = [1, 0, 1, 1, 1, 1]
ROWS = [[2, 0, 1, 1, 1, 3], [1, 1, 1, 1, 1, 1], [0, 0, 1, 2, 1, 1]]


def save(run: Path, round: int, rows: Sequence[Sequence[float]], ids: Sequence[int], layout: Layout = LAYOUT) -> None:
    W = np.array(rows, np.float32)
    stacks = W, np.zeros((len(W), 0), np.float32), None
    sent = Model(f32(*SENT), f32())
    kept_uploads.save(run, round, layout, list(ids), np.ones(len(W)), stacks, lambda i: sent)


def kept(run: Path, rows: Sequence[Sequence[float]] = ROWS, ids: Sequence[int] = (5, 3, 9)) -> KeptUploads:
    save(run, 1, rows, ids)
    found = kept_uploads.read(run, 1)
    assert found is not None
    return found


@pytest.mark.parametrize("block", [4_000_000, 3])
def test_angles_and_deviations_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(models, "_BLOCK", block)
    found = models.spread(kept(tmp_path))
    assert set(found["round"]) == {1} and found["layer"].tolist() == ["a", "c.weight", models.MODEL]
    # updates of a: (1, 0), (0, 1), (-1, 0): 90, 180 and 90 degrees. Of c: (0, 0, 0, 2), nothing, (0, 1, 0, 0): 90 degrees
    # of all: (1,0,0,0,0,2), (0,1,0,0,0,0), (-1,0,0,1,0,0): 90, 90 and the angle of cosine -1 / sqrt(5 * 2)
    whole = (90 + 90 + math.degrees(math.acos(-1 / math.sqrt(10)))) / 3
    np.testing.assert_allclose(found["angle"], [120, 90, whole], rtol=1e-12)
    # a: 2, 1, 0 about 1: squares 1, 0, 1; 0, 1, 0 about 1/3: 1/9, 4/9, 1/9. c: 1, 1, 2: 6/9; 3, 1, 1 about 5/3: 24/9
    a, c = (2 + 6 / 9) / 3, (6 / 9 + 24 / 9) / 3
    np.testing.assert_allclose(found["deviation"], [a / 2, c / 4, (a + c) / 6], rtol=1e-12)
    np.testing.assert_allclose(found["largest"], [1, (3 - 5 / 3) ** 2, (3 - 5 / 3) ** 2], rtol=1e-12)


def test_no_angle_without_two_updates() -> None:
    assert math.isnan(models.mean_angle(np.diag([4.0, 0.0])))
    assert models.mean_angle(np.array([[4.0, 6.0], [6.0, 9.0]])) == 0
    assert models.mean_angle(np.array([[4.0, -6.0], [-6.0, 9.0]])) == 180


def test_sensitivities_of_the_classifier_by_hand(tmp_path: Path) -> None:
    found = models.sensitivity(kept(tmp_path), 2)
    assert found is not None and found[0] == [3, 5]
    # client 5 moved one weight from 1 to 3: |(3 - 1) * 3|
    assert found[1].tolist() == [[[0, 0], [0, 0]], [[0, 0], [0, 6]]]


def test_no_sensitivity_without_a_classifier(tmp_path: Path) -> None:
    save(tmp_path, 1, ROWS, (5, 3, 9), Layout(LAYOUT.params, ()))
    found = kept_uploads.read(tmp_path, 1)
    assert found is not None and models.sensitivity(found, 2) is None


@pytest.mark.parametrize("block", [4_000_000, 3])
def test_parameters_of_largest_and_smallest_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(models, "_BLOCK", block)
    path = folder(tmp_path / "run", [record(1, {"5": {"accuracy-before": 0.5}})])
    # standard deviations: sqrt(2/3), sqrt(2)/3, 0, sqrt(2)/3, 0, sqrt(8)/3
    found = models.extreme_values(read_run(path), kept(path), 2)
    assert [name for name, _ in found] == ["c.weight[1, 1]", "a[0]", "a[1]", "c.weight[0, 1]"]
    _, most = found[0]
    assert most["values"].tolist() == [3, 1, 1] and most["sent"] == 1 and math.isnan(most["after"])
    # the next round was sent SENT: this is what the uploads became
    save(path, 2, ROWS, (5, 3, 9))
    name, most = models.extreme_values(read_run(path), kept(path), 1)[0]
    assert (name, most["after"]) == ("c.weight[1, 1]", 1)


@pytest.mark.parametrize("block", [4_000_000, 3])
def test_coordinates_keep_the_distances_of_deviations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(models, "_BLOCK", block)
    save(tmp_path, 1, ROWS, (5, 3, 9))
    save(tmp_path, 2, ROWS[:2], (5, 3))
    files = [kept_uploads.read(tmp_path, t) for t in (1, 2)]
    whose, got = models.relative([each for each in files if each is not None])
    assert whose.to_numpy().tolist() == [[1, 5], [1, 3], [1, 9], [2, 5], [2, 3]]
    exact = [np.array(rows, float) - np.mean(rows, axis=0) for rows in (ROWS, ROWS[:2])]
    expected = np.concatenate(exact)
    np.testing.assert_allclose(got @ got.T, expected @ expected.T, atol=1e-9)


def test_maps_are_the_same_again_and_small_ones_have_no_t_sne() -> None:
    points = np.random.default_rng(0).normal(size=(12, 5)) * [9, 3, 1, 1, 1]
    first, second = models.maps(points), models.maps(points)
    assert first[1] is not None and second[1] is not None
    np.testing.assert_array_equal(first[1], second[1])
    # the first axis has the largest variance of all directions
    covariance = np.linalg.eigvalsh(np.cov(points.T))[::-1]
    np.testing.assert_allclose(first[0].var(axis=0, ddof=1), covariance[:2])
    assert models.maps(points[:4])[1] is None and models.maps(np.zeros((6, 6)))[1] is None


def test_a_sample_of_many_clients() -> None:
    assert spaced(3, 200).tolist() == [0, 1, 2] and spaced(9, 3).tolist() == [0, 4, 8]


# Pictures ---------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("undrawn")
def test_a_report_draws_kept_uploads(tmp_path: Path, start: Callable[..., Path]) -> None:
    settings = {"num_clients": 6, "keep_uploads": "every 2", "num_server_rounds": 3}
    paths = [start(f"kept-{method}", method=method, **settings) for method in ("fedavg", "fedcac")]
    page, pictures = write(tmp_path, *paths)
    own = ("angles", "deviations", "sensitivity", "values", "map")
    assert {"uploads", *(f"upload-{name}-{k}" for name in own for k in (1, 2))} <= pictures
    assert mentions(page, "Sensitivity", "classifier&#39;s", "round 3")
    single, pictures = write(tmp_path / "single", paths[0])
    assert "uploads" not in pictures and "upload-map-1" in pictures


def wide(path: Path, layers: int, clients: int) -> Path:
    """A run whose model has many layers with long names, and a classifier of many inputs."""
    names = [f"layer{k}.0.downsample.conv{k}.weight" for k in range(layers - 1)]
    shapes = [(3, 2)] * (layers - 1) + [(10, 300)]
    layout = Layout(packed(zip([*names, "fc.weight"], shapes, strict=True)), (), frozenset(["fc.weight"]))
    run = folder(path, [record(t, {"0": {"accuracy-before": 0.5}}) for t in (1, 2, 3)])
    facts = {str(i): {"class-counts": [(i + k) % 10 for k in range(10)]} for i in range(clients)}
    (run / "clients.json").write_text(json.dumps(facts))
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(
        json.dumps({**about, "classes": [f"a class with a long name {k}" for k in range(10)]})
    )
    rng = np.random.default_rng(0)
    for t in (1, 2, 3):
        W = rng.normal(size=(clients, layout.d)).astype(np.float32)
        sent = Model(np.zeros(layout.d, np.float32), f32())
        stacks = W, np.zeros((clients, 0), np.float32), None
        kept_uploads.save(run, t, layout, list(range(clients)), np.ones(clients), stacks, lambda i, s=sent: s)
    return run


def test_every_class_of_a_map_has_its_own_colour(tmp_path: Path) -> None:
    run = read_run(wide(tmp_path / "run", layers=3, clients=20))
    (panel,) = [one for one in of_uploads(run, spreads_of(run)) if one.name.startswith("upload-map")]
    assert frame_with(panel, "class")["class"].nunique() == 10
    scales = [encoding["color"]["scale"] for encoding in marks(panel, "point")]
    assert len(scales) == 2 and scales[0] == scales[1] and len(scales[0]["domain"]) == 10


def test_the_lines_of_the_comparison_are_told_apart(tmp_path: Path) -> None:
    groups = grouped([read_run(wide(tmp_path / name, layers=3, clients=3)) for name in ("a", "b")])
    spreads = {run.number: spreads_of(run) for group in groups for run in group.runs}
    (panel,) = of_all_uploads(groups, spreads)
    titles = [encoding["y"]["title"] for encoding in marks(panel, "line")]
    assert titles == ["mean angle (degrees)", "mean squared deviation", "largest squared deviation"]
    assert all(frame["run"].nunique() == 2 for frame in frames_of(panel))


def test_the_comparison_leaves_out_a_row_whose_seeds_keep_no_round_in_common(tmp_path: Path) -> None:
    groups = grouped([read_run(wide(tmp_path / name, layers=3, clients=3)) for name in ("a", "b")])
    first, second = (group.first.number for group in groups)
    every = spreads_of(groups[0].first)
    (panel,) = of_all_uploads(groups, {first: every, second: every[every["round"] < 2]})
    frame = frames_of(panel)[0]
    assert frame.groupby("run", sort=False).size().tolist() == [3, 1]
    twice = replace(groups[1], runs=(groups[0].first, groups[1].first))
    (panel,) = of_all_uploads([groups[0], twice], {first: every[every["round"] > 1], second: every[every["round"] < 2]})
    assert frames_of(panel)[0]["run"].unique().tolist() == ["1 fedavg"]
    assert not list(
        of_all_uploads([twice, twice], {first: every[every["round"] > 1], second: every[every["round"] < 2]})
    )


@pytest.mark.parametrize(
    ("layers", "clients"), [(3, 2), pytest.param(30, 20, marks=pytest.mark.nightly)], ids=["few", "many"]
)
def test_every_picture_is_valid_and_has_its_place(tmp_path: Path, layers: int, clients: int) -> None:
    paths = [wide(tmp_path / name, layers, clients) for name in ("a", "b")]
    groups = grouped([read_run(path) for path in paths])
    runs = [run for group in groups for run in group.runs]
    spreads = {run.number: spreads_of(run) for run in runs}
    panels = [*of_all_uploads(groups, spreads), *of_uploads(runs[0], spreads[runs[0].number])]
    assert len(panels) >= 5
    for panel in panels:
        assert panel.draw().to_dict()["$schema"]
        assert_drawn_within(panel)
