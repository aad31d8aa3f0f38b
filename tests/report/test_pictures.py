"""Nothing in a picture is cut or lies on something else."""

from __future__ import annotations

import math
import warnings
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from corolla.report import figures
from corolla.report.accuracy import accuracy
from corolla.report.arrays import read_runs
from corolla.report.by_kind import of_run
from corolla.report.costs import costs
from corolla.report.groups import grouped
from corolla.report.partitions import partitions
from corolla.report.style import DARK, LIGHT
from tests.report.builders import folder, many_runs, record


@pytest.mark.parametrize("letters", range(6, 41))
def test_a_legend_is_never_wider_than_the_picture(letters: int) -> None:
    drawing = figures.new_figure(4)
    axes = drawing.add_subplot()
    for k in range(14):
        axes.plot([0, 1], label=f"{k} fedavg, seed {k} and other words".ljust(letters, "m")[:letters])
    figures.legend(drawing, axes)
    drawing.draw_without_rendering()
    box = drawing.legends[0].get_window_extent()
    assert drawing.bbox.x0 <= box.x0 and box.x1 <= drawing.bbox.x1


@pytest.mark.parametrize(
    ("num_runs", "num_clients", "seeds"),
    [
        (2, 14, 1),
        (4, 20, 1),
        (1, 14, 2),
        *(pytest.param(*numbers, marks=pytest.mark.long) for numbers in ((14, 40, 1), (2, 20, 3))),
    ],
)
def test_nothing_overlaps_with_many_runs_clients_and_layers(
    tmp_path: Path, num_runs: int, num_clients: int, seeds: int
) -> None:
    groups = grouped(read_runs(many_runs(tmp_path, num_runs, num_clients, seeds)))
    assert [len(group.runs) for group in groups] == [seeds] * num_runs
    run = groups[0].first
    panels = [*accuracy(groups), *costs(groups), *partitions([run]), *of_run(run)]
    spread = ["accuracy-spread"] * (num_runs > 4 or seeds > 1) + ["accuracy-seeds"] * (seeds > 1)
    assert [panel.name.removesuffix("-1") for panel in panels if panel.name != "partition-1"] == [
        "accuracy",
        *spread,
        "clients",
        "communication",
        "seconds",
        "partition",
        *(
            f"{name}{'-1' if seeds > 1 else ''}"
            for name in (
                "overlap",
                "collaborators",
                "personal",
                "dispersion",
                "density",
                "alpha",
                "cluster",
            )
        ),
    ]
    for panel in panels:
        for settings in (LIGHT, DARK) if num_runs == 2 else (LIGHT,):
            with warnings.catch_warnings(), rc_context(settings):
                # a layout that does not fit warns
                warnings.simplefilter("error")
                figure = panel.draw()
                figure.draw_without_rendering()
                assert_nothing_is_cut(panel.name, figure)


def test_long_runs_are_drawn_as_running_means_without_their_first_rounds(tmp_path: Path) -> None:
    def accuracies(last: int, start: float) -> list[dict[str, Any]]:
        shares = (start + (0.9 - start) * min(1, 40 * t / last) + 0.02 * math.sin(t / 20) for t in range(last))
        rows = ({"accuracy-before": share, "accuracy-after": share} for share in shares)
        return [record(t, {"0": row, "1": row}) for t, row in enumerate(rows, start=1)]

    runs = {"long": accuracies(400, 0.1), "flat": accuracies(400, 0.89), "short": accuracies(60, 0.1)}
    said, limits = {}, {}
    for name, records in runs.items():
        found = {panel.name: panel for panel in accuracy(grouped(read_runs([folder(tmp_path / name, records)])))}
        said[name], limits[name] = found["accuracy"].caption, found["accuracy"].draw().axes[0].get_ylim()
    assert said["long"].endswith("running means of 11 rounds. The first rounds lie outside the picture.")
    assert said["flat"].endswith("running means of 11 rounds.") and "running" not in said["short"]
    assert 0.87 < limits["long"][0] < 0.88 and 0.92 < limits["long"][1] < 0.93
    assert limits["flat"] == pytest.approx(limits["long"], abs=0.002) and limits["short"][0] < 0.1


def assert_nothing_is_cut(name: str, figure: Figure) -> None:
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
    return [tick.label1 for tick in inside if tick.label1.get_visible()] + [
        t.label2 for t in inside if t.label2.get_visible()
    ]


def overlapping(a: Bbox, b: Bbox, slack: float = 1.0) -> bool:
    both = Bbox.intersection(a, b)
    return both is not None and both.width > slack and both.height > slack
