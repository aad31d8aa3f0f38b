"""Pictures of a sweep: which keys are swept, what stands in lines and maps, and how axes are divided."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pandas
import pytest

from corolla.report.arrays import read_runs
from corolla.report.charts import Axis, Panel
from corolla.report.groups import grouped
from corolla.report.swept import placed, swept, swept_keys
from tests.facts import mentions
from tests.report.builders import folder, record, write
from tests.report.read import encoding, frame_with, frames_of, marks, parts
from tests.report.test_pictures import assert_drawn_within


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


def main_lines(panel: Panel) -> dict[str, pandas.DataFrame]:
    return {str(name): line for name, line in frames_of(panel)[-1].groupby("run", sort=False)}


def assert_drawn_whole(panel: Panel) -> None:
    assert panel.draw().to_dict()["$schema"]
    assert_drawn_within(panel)


@pytest.mark.usefixtures("undrawn")
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
    np.testing.assert_allclose(lines["fedcac"][["x", "mean"]], [[0.1, 0.55], [0.5, 0.8], [0.9, 0.8]])
    assert set(lines["fedcac"]["mark"]) == {1}
    assert lines["fedavg"]["mean"].tolist() == pytest.approx([0.3, 0.3])
    # sample standard deviations: 0.1 / sqrt(2), 0, 0.2 / sqrt(2); the third band is cut at 100 %
    std = np.array([0.1, 0, 0.2]) / 2**0.5
    np.testing.assert_allclose(lines["fedcac"]["low"], np.array([0.55, 0.8, 0.8]) - std, rtol=1e-5)
    np.testing.assert_allclose(lines["fedcac"]["high"], np.minimum(np.array([0.55, 0.8, 0.8]) + std, 1), rtol=1e-5)
    across = encoding(panel, "x")
    assert across["title"] == "fedcac.tau" and across["axis"]["values"] == [0.1, 0.5, 0.9]
    assert '"0.1": "0.1", "0.5": "0.5", "0.9": "0.9"' in across["axis"]["labelExpr"]
    assert (
        mentions(panel.caption, "Bands", "± one sample standard", "deviation") and "Horizontal lines" in panel.caption
    )
    assert_drawn_whole(panel)
    page, names = write(tmp_path / "out", tmp_path)
    assert "accuracy-over-fedcac-tau" in names and mentions(page, 'aria-label="Final accuracy over', 'fedcac.tau"')


@pytest.mark.parametrize(
    ("key", "values", "steps", "label"),
    [
        # decades have the same length; 0 lies one before the smallest other value, 1 half a decade beyond the last
        ("learning_rate", (0.001, 0.01, 0.1), (1, 1), "learning-rate (logarithmic)"),
        ("learning_rate", (0.01, 0.02, 0.5), (0.01, 0.48), "learning-rate"),
        ("dp_epsilon", (0.0, 0.5, 5.0, 50.0), (1, 1, 1), "dp-epsilon (logarithmic, and linear below 0.5)"),
        (
            "dp_epsilon",
            (0.0, 0.5, 8.0, 50.0),
            (1, np.log10(16), np.log10(6.25)),
            "dp-epsilon (logarithmic, and linear below 0.5)",
        ),
        ("dp_epsilon", (0.0, 2.0, 8.0), (2, 6), "dp-epsilon"),
        ("quantile", (0.0, 0.9, 0.99, 1.0), (1, 1, 0.5), "fedobp.quantile (logarithmic in the distance from 1)"),
        ("quantile", (0.9, 0.99, 0.999, 0.9999), (1, 1, 1), "fedobp.quantile (logarithmic in the distance from 1)"),
        ("quantile", (0.0, 0.5, 0.9, 1.0), (0.5, 0.4, 0.1), "fedobp.quantile"),
    ],
)
@pytest.mark.parametrize("beside", [False, True])
def test_an_axis_is_logarithmic_where_its_values_span_two_decades(
    tmp_path: Path, key: str, values: tuple[float, ...], steps: tuple[float, ...], label: str, beside: bool
) -> None:
    own = [{"fedobp": {"quantile": value}} if key == "quantile" else {key: value} for value in values]
    rows: list[tuple[float | None, dict[str, Any]]] = [(0.5, {"method": "fedobp", **one}) for one in own]
    if beside and key == "quantile":
        rows.append((0.3, {"method": "fedavg"}))
    (panel,) = sweep(tmp_path, rows)
    places, _ = placed(values)
    np.testing.assert_allclose(np.diff(places), steps)
    across = encoding(panel, "x")
    assert across["title"] == label and np.allclose(across["axis"]["values"], places)
    low, high = across["scale"]["domain"]
    first, *_, last = places
    assert (low, high) == pytest.approx((first - 0.05 * (last - first), last + 0.05 * (last - first)))
    assert (mentions(panel.caption, "axis is logarithmic")) == ("logarithmic" in label)
    assert ("Horizontal lines" in panel.caption) == (beside and key == "quantile")
    assert_drawn_whole(panel)


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
    np.testing.assert_array_equal(line["mean"], [0.5, np.nan, 0.6, 0.5])
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
    frame = frame_with(panel, "part")
    assert frame["part"].nunique() == 10 and frame["run"].nunique() == 10
    # behind each stand all, in grey
    assert frame_with(panel, "other")["other"].nunique() == 10
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
    cells = {(row.across, row.up): row for row in frames_of(maps)[0].itertuples()}
    assert {at: row.value for at, row in cells.items()} == pytest.approx(
        {(0.1, 0.1): 0.16, (0.5, 0.1): 0.35, (0.9, 0.1): 0.56, (0.1, 0.2): 0.26, (0.5, 0.2): 0.45}
    )
    assert encoding(maps, "x")["sort"] == ["0.1", "0.5", "0.9"] and encoding(maps, "y")["sort"] == ["0.2", "0.1"]
    assert cells[0.1, 0.1].text == "16.0\n± 1.4" and float(cells[0.5, 0.1].text) == 35
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
    assert [len(line) for line in main_lines(panels[0]).values()] == [3]
    assert [len(line) for line in main_lines(panels[1]).values()] == [3]


def test_several_maps_share_their_colours_and_more_keys_have_more_maps(tmp_path: Path) -> None:
    rows: list[tuple[float | None, dict[str, Any]]] = [
        (0.1 * k, {"method": "fedcac", "fedcac": {"tau": tau, "beta": beta}, "learning_rate": rate})
        for k, rate in enumerate((0.1, 0.2, 0.3, 0.4))
        for tau in (0.1, 0.5)
        for beta in (1, 50, 100)
    ]
    (panel,) = sweep(tmp_path, rows)
    assert panel.name == "accuracy-over-fedcac-beta-and-fedcac-tau"
    titles = [part["title"] for part in parts(panel.spec) if "title" in part and "layer" in part]
    assert titles == [f"fedcac, learning-rate 0.{k}" for k in range(1, 5)]
    limits = [encoding["color"]["scale"]["domain"] for encoding in marks(panel, "rect")]
    assert len(limits) == 4 and all(found == pytest.approx([0.0, 0.3]) for found in limits)
    assert_drawn_whole(panel)


def test_texts_of_an_axis_are_no_code() -> None:
    texts = ("it's", '"} + alert(1) + {"', "a\\b")
    axis = Axis("classes", places=tuple(enumerate(texts))).on(alt.X, "x").to_dict()["axis"]
    made, _, rest = axis["labelExpr"].rpartition("[")
    assert rest == "datum.value]" and json.loads(made) == {str(k): text for k, text in enumerate(texts)}
