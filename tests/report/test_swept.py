"""Pictures of a sweep: which keys are swept, what stands in lines and maps, and how axes are divided."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.lines import Line2D

from corolla.report.arrays import read_runs
from corolla.report.figures import Panel
from corolla.report.groups import grouped
from corolla.report.over_keys import swept_keys
from corolla.report.style import DARK, LIGHT
from corolla.report.swept import swept
from tests.report.builders import folder, record, write
from tests.report.test_pictures import assert_nothing_is_cut


def finished(path: Path, final: float | None, **config: Any) -> Path:
    """A run of one round with this final accuracy."""
    rows = {"0": {"accuracy-before": 0.5}}
    evaluation = {"accuracy": final, "clients": {"0": {"accuracy": final}}}
    run = folder(path, [record(1, rows, evaluation=evaluation)], **config)
    (run / "summary.json").write_text(json.dumps({"rounds": 1, "final-accuracy": final}))
    return run


def sweep(root: Path, rows: Sequence[tuple[float | None, dict[str, Any]]]) -> list[Panel]:
    for k, (final, config) in enumerate(rows):
        finished(root / f"{k:03}", final, **config)
    return list(swept(grouped(read_runs([root]))))


def main_lines(panel: Panel) -> dict[str, Line2D]:
    return {str(line.get_label()): line for line in panel.draw().axes[0].get_lines() if str(line.get_label())[0] != "_"}


def assert_drawn_whole(panel: Panel) -> None:
    for settings in (LIGHT, DARK):
        with warnings.catch_warnings(), rc_context(settings):
            warnings.simplefilter("error")
            figure = panel.draw()
            figure.draw_without_rendering()
            assert_nothing_is_cut(panel.name, figure)


def test_a_line_over_the_key_with_a_band_over_the_seeds_and_a_level_of_other_methods(tmp_path: Path) -> None:
    rows: list[tuple[float | None, dict[str, Any]]] = [
        (final, {"method": "fedcac", "fedcac": {"tau": tau}, "seed": seed})
        for tau, finals in ((0.9, (0.7, 0.9)), (0.1, (0.5, 0.6)), (0.5, (0.8, 0.8)))
        for seed, final in enumerate(finals)
    ]
    rows += [(final, {"method": "fedavg", "seed": seed}) for seed, final in enumerate((0.2, 0.4))]
    (panel,) = sweep(tmp_path, rows)
    assert (panel.name, panel.title) == ("accuracy-over-fedcac-tau", "Final accuracy over fedcac.tau")
    lines = main_lines(panel)
    assert list(lines) == ["fedcac", "fedavg"]
    np.testing.assert_allclose(lines["fedcac"].get_xydata(), [[0.1, 0.55], [0.5, 0.8], [0.9, 0.8]])
    assert lines["fedcac"].get_markevery() == 1
    assert list(lines["fedavg"].get_ydata()) == pytest.approx([0.3, 0.3])
    # sample standard deviations: 0.1 / sqrt(2), 0, 0.2 / sqrt(2); the third band is cut at 100 %
    low, high = (line.get_ydata() for line in panel.draw().axes[0].get_lines()[:2])
    std = np.array([0.1, 0, 0.2]) / 2**0.5
    np.testing.assert_allclose(low, np.array([0.55, 0.8, 0.8]) - std)
    np.testing.assert_allclose(high, np.array([0.55, 0.8, 0.8]) + std)
    axes = panel.draw().axes[0]
    assert axes.get_xscale() == "linear" and axes.get_xlabel() == "fedcac.tau"
    assert [text.get_text() for text in sorted(axes.get_xticklabels(), key=lambda t: t.get_position()[0])] == [
        "0.1",
        "0.5",
        "0.9",
    ]
    assert "Bands: ± one sample standard deviation" in panel.caption and "Horizontal lines" in panel.caption
    assert_drawn_whole(panel)
    page, names = write(tmp_path / "out", tmp_path)
    assert "accuracy-over-fedcac-tau" in names and 'alt="Final accuracy over fedcac.tau"' in page


@pytest.mark.parametrize(
    ("key", "values", "scale", "label"),
    [
        ("learning_rate", (0.001, 0.01, 0.1), "log", "learning-rate (logarithmic)"),
        ("learning_rate", (0.01, 0.02, 0.5), "linear", "learning-rate"),
        ("dp_epsilon", (0.0, 0.5, 8.0, 50.0), "symlog", "dp-epsilon (logarithmic, and linear below 0.5)"),
        ("dp_epsilon", (0.0, 2.0, 8.0), "linear", "dp-epsilon"),
        ("quantile", (0.0, 0.9, 0.99, 1.0), "function", "fedobp.quantile (logarithmic in the distance from 1)"),
        ("quantile", (0.0, 0.5, 0.9, 1.0), "linear", "fedobp.quantile"),
    ],
)
def test_an_axis_is_logarithmic_where_its_values_span_two_decades(
    tmp_path: Path, key: str, values: tuple[float, ...], scale: str, label: str
) -> None:
    own = [{"fedobp": {"quantile": value}} if key == "quantile" else {key: value} for value in values]
    (panel,) = sweep(tmp_path, [(0.5, {"method": "fedobp", **one}) for one in own])
    axes = panel.draw().axes[0]
    assert axes.get_xscale() == scale and axes.get_xlabel() == label
    places = axes.transData.transform([(value, 0.5) for value in values])[:, 0]
    assert np.all(np.diff(places) > 0) and np.isfinite(places).all()
    low, high = axes.bbox.x0, axes.bbox.x1
    assert low < places[0] and places[-1] < high
    assert ("The axis is logarithmic" in panel.caption) == (scale != "linear")
    assert_drawn_whole(panel)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    ("key", "values", "steps"),
    [
        # decades have the same length; 1 is half a decade beyond the last value
        ("fedobp.quantile", (0.9, 0.99, 0.999, 0.9999), (1, 1, 1)),
        ("fedobp.quantile", (0.0, 0.9, 0.99, 1.0), (1, 1, 0.5)),
        ("fedprox.mu", (0.001, 0.01, 0.1), (1, 1)),
        ("fedprox.mu", (0.1, 0.2, 0.5), (0.1, 0.3)),
    ],
)
def test_values_fill_the_axis_in_true_proportion_also_beside_a_level(
    tmp_path: Path, key: str, values: tuple[float, ...], steps: tuple[float, ...], beside: bool
) -> None:
    method, name = key.split(".")
    rows: list[tuple[float | None, dict[str, Any]]] = [
        (0.5 + 0.1 * seed, {"method": method, method: {name: value}, "seed": seed})
        for value in values
        for seed in (0, 1)
    ]
    if beside:
        rows += [(0.3 + 0.1 * seed, {"method": "fedavg", "seed": seed}) for seed in (0, 1)]
    (panel,) = sweep(tmp_path, rows)
    assert ("Horizontal lines" in panel.caption) == beside
    axes = panel.draw().axes[0]
    drawn = axes.get_xlim()
    points = [(value, 0.5) for value in (*values, *drawn)]
    places = axes.transAxes.inverted().transform(axes.transData.transform(points))[:, 0]
    assert places[-2:] == pytest.approx([0, 1])
    inside = places[:-2]
    assert (inside[0], inside[-1]) == pytest.approx((0.05 / 1.1, 1.05 / 1.1))
    np.testing.assert_allclose(np.diff(inside) / (inside[-1] - inside[0]), np.array(steps) / sum(steps))
    # matplotlib draws with the inverse too: the scale's functions are inverses of each other
    scale = axes.transScale
    np.testing.assert_allclose(scale.inverted().transform(scale.transform(points))[:, 0], [*values, *drawn], atol=1e-12)


def test_a_run_without_a_final_figure_is_a_gap(tmp_path: Path) -> None:
    for k, rate in enumerate((0.1, 0.2, 0.3, 0.4)):
        run = finished(tmp_path / str(k), None if k == 1 else 0.5, learning_rate=rate)
        if k == 2:
            (run / "summary.json").unlink()
    finished(tmp_path / "again", 0.6, learning_rate=0.3)
    finished(tmp_path / "more", 0.7, learning_rate=0.3)
    (panel,) = swept(grouped(read_runs([tmp_path])))
    (line,) = main_lines(panel).values()
    # 0.3: the first finished run; the unfinished one and the repetition do not count
    np.testing.assert_array_equal(line.get_ydata(), [0.5, np.nan, 0.6, 0.5])
    assert "A line has a gap" in panel.caption and panel.caption.startswith("fedavg. ")


def test_words_are_lines_and_keys_that_vary_with_them_are_not_swept(tmp_path: Path) -> None:
    rows: list[tuple[float | None, dict[str, Any]]] = []
    for partition, rate in (("iid", 0.1), ("dirichlet-client", 0.2)):
        rows += [
            (0.5, {"partition": partition, "learning_rate": rate, "batch_size": size, "augment": False})
            for size in (10, 20)
        ]
    for k, (final, config) in enumerate(rows):
        finished(tmp_path / str(k), final, **{name: value for name, value in config.items() if name != "augment"})
    groups = grouped(read_runs([tmp_path]))
    assert swept_keys(groups) == ["batch-size"]
    (panel,) = swept(groups)
    assert list(main_lines(panel)) == ["fedavg, partition iid", "fedavg, partition dirichlet-client"]
    # seeds alone, or words alone, are no sweep
    assert not sweep(tmp_path / "seeds", [(0.5, {"seed": seed}) for seed in range(3)])
    assert not sweep(tmp_path / "words", [(0.5, {"partition": name}) for name in ("iid", "dirichlet-client")])


def test_many_lines_have_small_pictures(tmp_path: Path) -> None:
    methods = ("fedavg", "fedper", "fedcac", "fedobp", "local")
    panels = sweep(
        tmp_path,
        [
            (0.1 * k + rate, {"method": method, "partition": partition, "learning_rate": rate})
            for k, method in enumerate(methods)
            for partition in ("iid", "dirichlet-client")
            for rate in (0.0001, 0.01, 0.1)
        ],
    )
    (panel,) = panels
    axes = panel.draw().axes
    assert len(axes) == 10 and all(len(one.get_lines()) == 10 for one in axes)
    assert_drawn_whole(panel)


def test_two_keys_are_a_map_per_method(tmp_path: Path) -> None:
    rows: list[tuple[float | None, dict[str, Any]]] = []
    for tau in (0.1, 0.5, 0.9):
        for rate in (0.1, 0.2):
            for seed in (0, 1):
                final = None if (tau, rate) == (0.9, 0.2) else tau * 0.5 + rate + 0.02 * seed
                rows.append((final, {"method": "fedcac", "fedcac": {"tau": tau}, "learning_rate": rate, "seed": seed}))
    rows += [(0.3 + rate, {"method": "fedavg", "learning_rate": rate}) for rate in (0.1, 0.2)]
    found = sweep(tmp_path, [row for row in rows if row[1].get("fedcac") != {"tau": 0.5} or row[1]["seed"] == 0])
    maps, lines = found
    assert maps.name == "accuracy-over-fedcac-tau-and-learning-rate" and maps.caption.startswith("fedcac. ")
    axes = maps.draw().axes[0]
    cells = np.ma.filled(axes.get_images()[0].get_array(), np.nan)
    np.testing.assert_allclose(cells, [[0.16, 0.35, 0.56], [0.26, 0.45, np.nan]])
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0.1", "0.5", "0.9"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["0.1", "0.2"]
    written = {text.get_position(): text.get_text() for text in axes.texts}
    assert written[(0, 0)] == "16.0\n± 1.4" and written[(1, 0)] == "35.0" and (2, 1) not in written
    # the other method has one key only, and the map's method no line beside it
    assert lines.name == "accuracy-over-learning-rate" and list(main_lines(lines)) == ["fedavg"]
    for panel in found:
        assert_drawn_whole(panel)


def test_keys_that_vary_one_at_a_time_have_lines_and_no_map(tmp_path: Path) -> None:
    around = [{"threshold": 0.1}, {"threshold": 0.2}, {"threshold": 0.8}, {"num-micro": 2}, {"num-micro": 8}]
    rows = [(0.5, {"method": "fedpake", "fedpake": {"threshold": 0.2, "num-micro": 4} | own}) for own in around]
    panels = sweep(tmp_path, rows)
    assert [panel.name for panel in panels] == ["accuracy-over-fedpake-threshold", "accuracy-over-fedpake-num-micro"]
    # num-micro 2 and 8 are points of the threshold 0.2 only; a lone point is no line
    assert [len(line.get_xdata()) for line in main_lines(panels[0]).values()] == [3]
    assert [len(line.get_xdata()) for line in main_lines(panels[1]).values()] == [3]


def test_several_maps_share_their_colours_and_more_keys_have_more_maps(tmp_path: Path) -> None:
    rows: list[tuple[float | None, dict[str, Any]]] = [
        (0.1 * k, {"method": "fedcac", "fedcac": {"tau": tau, "beta": beta}, "learning_rate": rate})
        for k, rate in enumerate((0.1, 0.2, 0.3, 0.4))
        for tau in (0.1, 0.5)
        for beta in (1, 50, 100)
    ]
    (panel,) = sweep(tmp_path, rows)
    assert panel.name == "accuracy-over-fedcac-beta-and-fedcac-tau"
    figure = panel.draw()
    images = [axes.get_images()[0] for axes in figure.axes if axes.get_images()]
    assert [axes.get_title() for axes in figure.axes[:4]] == [f"fedcac, learning-rate 0.{k}" for k in range(1, 5)]
    assert len(images) == 4 and all(image.get_clim() == pytest.approx((0.0, 0.3)) for image in images)
    assert_drawn_whole(panel)
