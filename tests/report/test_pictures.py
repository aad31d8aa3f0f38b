"""Nothing in a picture is cut or lies on something else."""

from __future__ import annotations

import json
import math
import warnings
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from corolla.report import figures, fonts
from corolla.report.accuracy import accuracy
from corolla.report.arrays import read_runs
from corolla.report.by_kind import of_run
from corolla.report.costs import costs
from corolla.report.figures import Panel
from corolla.report.groups import grouped
from corolla.report.partitions import partitions
from corolla.report.style import DARK, LIGHT
from strategies import METHODS
from tests.report.builders import folder, many_runs, record, write


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


# letters that matplotlib's own font lacks: one font that comes with matplotlib has the first, none has the others
RARE, NOWHERE = "\U0001d5a0", "\u5317\u4eac"


def named_run(path: Path, names: list[str], classes: list[str]) -> Path:
    rows = {str(i): {"accuracy-before": 0.5, "collaborators": [0] * (i + 1)} for i in range(len(names))}
    run = folder(path, [record(t, rows) for t in (1, 2)], figures=METHODS["fedcac"].figures)
    facts = {str(i): {"name": name, "class-counts": [i + 1, 4]} for i, name in enumerate(names)}
    (run / "clients.json").write_text(json.dumps(facts))
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**about, "classes": classes}))
    return run


def drawn_words(panels: list[Panel], kind: str = "png") -> list[set[str]]:
    """Render pictures, and return the words that stand in each."""
    found = []
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("error")
        saved = Figure.savefig
        patch.setattr(Figure, "savefig", lambda self, *args, **more: found.append(self) or saved(self, *args, **more))
        for panel in panels:
            assert panel.render(kind)
    return [{text.get_text() for text in fonts.texts(picture)} for picture in found]


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_names_in_any_script_are_drawn_or_told_by_number(tmp_path: Path, kind: str) -> None:
    names = ["Zürich", "Αθήνα", "Київ", f"{RARE}-Spital", NOWHERE, "القاهرة"]
    run = named_run(tmp_path / f"run {NOWHERE}", names, [NOWHERE, f"ja {RARE}"])
    groups = grouped(read_runs([run]))
    first = groups[0].first
    shown = drawn_words([*partitions([first]), *of_run(first), *accuracy(groups)], kind)
    assert {*names} - {NOWHERE} | {"4"} <= shown[0] and NOWHERE not in shown[0]
    assert {f"ja {RARE}", "0"} <= shown[0]
    assert {*names} - {NOWHERE} | {"4"} <= shown[1]
    assert not any(letter in word for words in shown for word in words for letter in NOWHERE)


def test_long_names_are_whole_where_there_is_room_and_told_apart_where_not(tmp_path: Path) -> None:
    names = [
        "Kantonsspital Chur",
        "Universitätsspital Zürich",
        "Spital Nord-Ost Bau A und B",
        "Spital Nord-West Bau A und B",
    ]
    run = named_run(tmp_path / "run", names, ["no", "yes"])
    first = grouped(read_runs([run]))[0].first
    panels = [*partitions([first]), *of_run(first)]
    for words in drawn_words(panels):
        assert {"Kantonsspital Chur", "Universitä…al Zürich", "Spital Nord-Ost B… 2", "Spital Nord-West… 3"} <= words
    for panel in panels:
        with rc_context(LIGHT):
            drawing = panel.draw()
            drawing.draw_without_rendering()
            assert_nothing_is_cut(panel.name, drawing)


@pytest.mark.parametrize(
    ("num_runs", "num_clients", "seeds"),
    [
        (2, 14, 1),
        (4, 20, 1),
        (1, 14, 2),
        pytest.param(2, 20, 3, marks=pytest.mark.long),
        pytest.param(14, 40, 1, marks=pytest.mark.nightly),
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


HELD = {"0": 0.9, "1": 0.7, "2": 0.65, "3": 0.2, "4": 0.1}


def held_out(path: Path, unseen: list[int]) -> Path:
    """A run of three evaluations of five clients, better by 0.01 every round, of which some never train."""
    records = []
    for t in range(1, 4):
        rows = {i: {"accuracy": share + 0.01 * t} for i, share in HELD.items()}
        trained = {i: {"accuracy-before": row["accuracy"]} for i, row in rows.items() if int(i) not in unseen}
        evaluation: dict[str, Any] = {"clients": rows}
        for of, part in ((evaluation, trained), (apart := {"ids": unseen}, [str(i) for i in unseen])):
            of["accuracy"] = sum(rows[i]["accuracy"] for i in part) / len(part) if part else None
        records.append(record(t, trained, evaluation=evaluation | ({"unseen": apart} if unseen else {})))
    path = folder(path, records, num_clients=5, holdout_clients=0.4 if unseen else 0.0)
    means = [records[-1]["evaluation"]["accuracy"], apart["accuracy"]]
    final = {"final-accuracy": means[0]} | ({"unseen-accuracy": means[1]} if unseen else {})
    (path / "summary.json").write_text(json.dumps({"rounds": 3} | final))
    return path


def test_clients_that_never_train_are_drawn_apart_and_the_table_says_the_same(tmp_path: Path) -> None:
    paths = [held_out(tmp_path / "held", [3, 4])]
    groups = grouped(read_runs(paths))
    found = {panel.name: panel for panel in accuracy(groups)}
    sides = {axes.get_title().replace("\n", " "): axes for axes in found["accuracy"].draw().axes}
    ends = {title: float(axes.get_lines()[-1].get_ydata()[-1]) for title, axes in sides.items()}
    assert ends["Own models of clients that train"] == pytest.approx(0.78)
    assert ends["Clients that never train"] == pytest.approx(0.18)
    means = groups[0].row.means
    assert (means["final"][0], means["unseen"][0]) == pytest.approx((0.78, 0.18))
    for name, values in (("clients", [0.68, 0.73, 0.93]), ("unseen-accuracy", [0.13, 0.23])):
        (line,) = found[name].draw().axes[0].get_lines()
        assert list(line.get_ydata()) == pytest.approx(values)
    assert "mean over all of these; clients that never train are on the right" in found["accuracy"].caption
    assert found["clients"].title == "Final accuracy of each client that trains"
    assert found["clients"].caption.endswith("Measured: all clients that train, after round 3.")
    assert found["unseen-accuracy"].title == "Final accuracy of each client that never trains"
    page, pictures = write(tmp_path / "out", *paths)
    assert "unseen-accuracy" in pictures and "final: mean over all clients that train (unseen: over those" in page
    for panel in found.values():
        figure = panel.draw()
        figure.draw_without_rendering()
        assert_nothing_is_cut(panel.name, figure)


def test_seeds_and_runs_without_such_clients_beside_them(tmp_path: Path) -> None:
    held = [held_out(tmp_path / "a", [3, 4]), held_out(tmp_path / "b", [2, 4])]
    config = held[1] / "config.toml"
    config.write_text(config.read_text().replace("seed = 0", "seed = 1", 1))
    groups = grouped(read_runs([*held, held_out(tmp_path / "all", [])]))
    assert [len(group.runs) for group in groups] == [2, 1]
    found = {panel.name: panel for panel in accuracy(groups)}
    sides = {axes.get_title().replace("\n", " "): axes for axes in found["accuracy"].draw().axes}

    def ends(title: str) -> list[float]:
        return [
            float(line.get_ydata()[-1])
            for line in sides[title].get_lines()
            if len(line.get_ydata()) and line.get_label()[0] != "_"
        ]

    # means of the seeds: (0.78 + 0.63) / 2 and (0.18 + 0.405) / 2; all five: 0.54
    assert ends("Own models of clients that train") == pytest.approx([0.705, 0.54])
    assert ends("Clients that never train") == pytest.approx([0.2925])
    (line,) = found["unseen-accuracy"].draw().axes[0].get_lines()
    # client 4 in both seeds, client 3 in the first, client 2 in the second
    assert list(line.get_ydata()) == pytest.approx([0.13, 0.23, 0.68])


def test_without_such_clients_nothing_is_said_of_them(tmp_path: Path) -> None:
    groups = grouped(read_runs([held_out(tmp_path / "all", [])]))
    found = {panel.name: panel for panel in accuracy(groups)}
    assert "unseen-accuracy" not in found
    assert [axes.get_title() for axes in found["accuracy"].draw().axes][-1] == "All clients' own models"
    assert found["clients"].title == "Final accuracy of each client"
    assert not any("never" in panel.caption for panel in found.values())
    assert "All clients' own models (right): mean over all clients." in found["accuracy"].caption


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
