"""Nothing in a picture is cut or lies on something else."""

from __future__ import annotations

import warnings
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from fl_app.report import by_kind, comparison, figures, partitions
from fl_app.report.arrays import read_runs
from tests.report.builders import many_runs


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

    for module in (comparison, partitions, by_kind):
        monkeypatch.setattr(module, "png", keep)
    runs = read_runs(many_runs(tmp_path, num_runs, num_clients))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a layout that does not fit warns
        names = [p.name for p in comparison.comparison(runs)]
        names += [p.name for p in partitions.partitions(runs[:1])] + [p.name for p in by_kind.of_run(runs[0])]
        for figure in drawn:
            figure.draw_without_rendering()
    spread = ["accuracy-spread"] * (num_runs > 4)
    assert names == [
        "accuracy", *spread, "clients", "communication", "seconds", "partition", "overlap-1", "collaborators-1", "personal-1",
        "dispersion-1", "density-1", "alpha-1", "cluster-1",
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
