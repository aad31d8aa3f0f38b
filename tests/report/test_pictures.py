"""Pictures: what Vega-Lite is told, names in any script, and what is drawn of clients that never train."""

from __future__ import annotations

import json
import math
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from corolla.report.all_runs import accuracy, costs, losses
from corolla.report.arrays import read_runs
from corolla.report.by_kind import of_run
from corolla.report.charts import Panel
from corolla.report.groups import grouped
from corolla.report.heat_maps import partitions
from strategies import METHODS
from tests.facts import each_mentions, mentions
from tests.report.builders import folder, many_runs, record, write
from tests.report.read import encoding, frame_with, frames_of, words

NOWHERE = "\u5317\u4eac"


def named_run(path: Path, names: list[str], classes: list[str]) -> Path:
    rows = {str(i): {"accuracy-before": 0.5, "collaborators": [0] * (i + 1)} for i in range(len(names))}
    run = folder(path, [record(t, rows) for t in (1, 2)], figures=METHODS["fedcac"].figures)
    facts = {str(i): {"name": name, "class-counts": [i + 1, 4]} for i, name in enumerate(names)}
    (run / "clients.json").write_text(json.dumps(facts))
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**about, "classes": classes}))
    return run


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_names_in_any_script_are_drawn(tmp_path: Path, kind: str) -> None:
    names = ["Zürich", "Αθήνα", "Київ", '<b>"$x_1$"', NOWHERE, "القاهرة", "a,b", "=1+2"]
    run = named_run(tmp_path / f"run {NOWHERE}", names, [NOWHERE, "ja & nein"])
    groups = grouped(read_runs([run]))
    first = groups[0].first
    partition, *others = [*partitions([first]), *of_run(first), *accuracy(groups)]
    for panel in (partition, *others):
        assert panel.render(kind).startswith({"png": b"\x89PNG", "svg": b"<svg", "pdf": b"%PDF"}[kind])
    drawn = unescape(words(partition))
    assert all(f">{name}<" in drawn for name in (*names, NOWHERE, "ja & nein"))
    assert set(frame_with(partition, "client")["client"]) == {*names}


def test_long_names_are_whole_where_there_is_room_and_told_apart_where_not(tmp_path: Path) -> None:
    names = [
        "Kantonsspital Chur",
        "Universitätsspital Zürich",
        "Spital Nord-Ost Bau A und B",
        "Spital Nord-West Bau A und B",
    ]
    run = named_run(tmp_path / "run", names, ["no", "yes"])
    first = grouped(read_runs([run]))[0].first
    shown = {"Kantonsspital Chur", "Universitä…al Zürich", "Spital Nord-Ost B… 2", "Spital Nord-West… 3"}
    for panel in [*partitions([first]), *of_run(first)]:
        assert set(frame_with(panel, "client")["client"]) == shown


@pytest.mark.parametrize(
    ("num_runs", "num_clients", "seeds"),
    [(2, 4, 2), *(pytest.param(*sizes, marks=pytest.mark.nightly) for sizes in ((2, 14, 1), (1, 14, 2), (5, 20, 2)))],
)
def test_every_picture_is_valid_and_has_its_place(tmp_path: Path, num_runs: int, num_clients: int, seeds: int) -> None:
    groups = grouped(read_runs(many_runs(tmp_path, num_runs, num_clients, seeds)))
    assert [len(group.runs) for group in groups] == [seeds] * num_runs
    run = groups[0].first
    panels = [*accuracy(groups), *costs(groups), *partitions([run]), *of_run(run)]
    spread = ["accuracy-spread"] * (num_runs > 4 or seeds > 1) + ["accuracy-seeds"] * (seeds > 1)
    own = ("overlap", "collaborators", "personal", "dispersion", "density", "alpha", "cluster")
    assert [panel.name.removesuffix("-1") for panel in panels if panel.name != "partition-1"] == [
        "accuracy",
        *spread,
        "clients",
        *["client-by-client"] * (num_runs > 1),
        "communication",
        "seconds",
        "partition",
        *(f"{name}{'-1' if seeds > 1 else ''}" for name in own),
    ]
    for panel in panels:
        # against Vega-Lite's schema
        assert panel.draw().to_dict()["$schema"]
        assert_drawn_within(panel)


def assert_drawn_within(panel: Panel) -> None:
    """Something is drawn, and the picture is no wider than the page."""
    width = float(re.findall(r'<svg[^>]* width="([\d.]+)"', panel.svg)[0])
    assert 200 < width <= 1104 and panel.svg.count("<path") > 3, panel.name
    assert not re.search("NaN|undefined", panel.svg), panel.name


def test_a_slider_goes_through_the_rounds_and_clients_can_be_ordered_by_either(fedcac: Path) -> None:
    (panel,) = [one for one in of_run(grouped(read_runs([fedcac]))[0].first) if one.name == "overlap-1"]
    (shown,) = [param for param in panel.spec["params"] if param["name"] == "shown"]
    assert shown["value"] == 8 and shown["bind"] == {"input": "range", "min": 1, "max": 8, "step": 1, "name": "round "}
    overlap = frame_with(panel, "round", "value")
    assert sorted(set(overlap["round"])) == list(range(1, 9)) and len(overlap) <= 8 * 20 * 19
    assert panel.switch is not None and list(panel.switch)[:2] == ["order by data", "order by overlap"]
    orders = [change["client"]["sort"] for change in panel.switch.values()]
    assert all(sorted(map(int, order)) == list(range(20)) for order in orders)
    assert encoding(panel, "y")["sort"] == orders[0]


def test_a_mark_tells_whose_it_is(fedcac: Path) -> None:
    panels = {panel.name: panel for panel in accuracy(grouped(read_runs([fedcac])))}
    frame = frames_of(panels["clients"])[0]
    assert {"run", "client", "samples", "classes", "mean"} <= {*frame.columns}
    assert set(frame["samples"]) == {40} and frame["classes"].str.fullmatch(r"\d 20, \d 20").all()
    told = {tip["field"] for tip in encoding(panels["clients"], "tooltip")}
    assert told == {"run", "client", "samples", "classes", "mean"}
    told = {tip["field"] for tip in encoding(panels["accuracy"], "tooltip")}
    assert told == {"run", "round", "bytes", "seconds", "mean", "low", "high"}


@pytest.mark.parametrize("logarithmic", [False, True])
def test_a_run_that_sends_nothing_is_a_line_over_all_bytes_of_the_others(tmp_path: Path, logarithmic: bool) -> None:
    def rounds(nbytes: int) -> list[dict[str, Any]]:
        sizes = {"upload-bytes": nbytes, "download-bytes": nbytes}
        return [record(t, {"0": {"accuracy-before": 0.1 * t}}, **sizes) for t in (1, 2, 3)]

    sent = {"fedavg": 1000, "fedper": 1 if logarithmic else 900, "local": 0}
    paths = [folder(tmp_path / method, rounds(nbytes), method=method) for method, nbytes in sent.items()]
    (panel,) = [one for one in costs(grouped(read_runs(paths))) if one.name == "communication"]
    frame = frames_of(panel)[0]
    lines = {run: line[["x", "mean"]].to_numpy().T.tolist() for run, line in frame.groupby("run", sort=False)}
    assert each_mentions(list(lines), ("1 fedavg",), ("2 fedper",), ("3 local (sends no", "parameters"))
    across, up = lines["3 local (sends no parameters)"]
    assert across[1] == frame["x"].max() and up == pytest.approx([0.3, 0.3])
    # a logarithmic axis begins with the first bytes of all
    assert across[0] == int(logarithmic) and frame["x"].min() == across[0]
    assert encoding(panel, "x")["scale"]["type"] == ("log" if logarithmic else "linear")
    assert ("logarithmic" in encoding(panel, "x")["title"]) == logarithmic
    assert_drawn_within(panel)


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


def ends(panel: Panel, part: str) -> list[float]:
    """The last values of the lines in a part of a picture."""
    frame = frames_of(panel)[0].dropna(subset=["mean"])
    lines = frame[frame["part"] == part].groupby("run", sort=False)
    return [float(line["mean"].iloc[-1]) for _, line in lines]


@pytest.mark.usefixtures("undrawn")
def test_clients_that_never_train_are_drawn_apart_and_the_table_says_the_same(tmp_path: Path) -> None:
    paths = [held_out(tmp_path / "held", [3, 4])]
    groups = grouped(read_runs(paths))
    found = {panel.name: panel for panel in accuracy(groups)}
    assert ends(found["accuracy"], "Own models of clients that train") == pytest.approx([0.78])
    assert ends(found["accuracy"], "Clients that never train") == pytest.approx([0.18])
    means = groups[0].row.means
    assert (means["final"][0], means["unseen"][0]) == pytest.approx((0.78, 0.18))
    for name, values in (("clients", [0.68, 0.73, 0.93]), ("unseen-accuracy", [0.13, 0.23])):
        assert frames_of(found[name])[0]["mean"].tolist() == pytest.approx(values)
    assert mentions(found["accuracy"].caption, "mean over all", "these", "clients that never")
    assert mentions(found["clients"].title, "Final accuracy", "client that trains")
    assert mentions(found["clients"].caption, "Measured", "all clients", "after round 3")
    assert mentions(found["unseen-accuracy"].title, "Final accuracy", "client that never", "trains")
    page, pictures = write(tmp_path / "out", *paths)
    assert "unseen-accuracy" in pictures and mentions(page, "mean over", "over those")
    for panel in found.values():
        assert_drawn_within(panel)


def test_clients_of_two_rows_stand_beside_each_other(tmp_path: Path) -> None:
    def run(name: str, values: dict[str, float], **settings: Any) -> Path:
        rows = {i: {"accuracy-before": value, "accuracy-after": value} for i, value in values.items()}
        return folder(tmp_path / name, [record(1, rows)], num_clients=4, **settings)

    one = run("one", {"0": 0.5, "1": 0.75, "2": 1.0})
    two = run("two", {"1": 0.25, "2": 0.5, "3": 0.5}, method="local")
    panel = next(p for p in accuracy(grouped(read_runs([one, two]))) if p.name == "client-by-client")
    (frame,) = frames_of(panel)
    assert frame[["client", "reference", "mean"]].to_numpy().tolist() == [[1, 0.75, 0.25], [2, 1.0, 0.5]]
    assert encoding(panel, "x")["scale"]["domain"] == encoding(panel, "y")["scale"]["domain"]
    assert "client-by-client" not in [p.name for p in accuracy(grouped(read_runs([one])))]


@pytest.mark.parametrize("sampled", [False, True])
def test_a_curve_shows_when_a_client_left(tmp_path: Path, sampled: bool) -> None:
    rows = {str(k): {"accuracy-before": 0.5 + k / 10} for k in range(3)}
    records = [record(t, rows if t < 3 else {"0": rows["0"], "1": rows["1"]}) for t in (1, 2, 3, 4)]
    path = folder(tmp_path / "july", records, num_clients=3, fraction_train=0.9 if sampled else 1.0)
    groups = grouped(read_runs([path]))
    panel = next(panel for panel in accuracy(groups) if panel.name == "accuracy")
    (frame,) = frames_of(panel)
    marks = [] if "left" not in frame else frame[frame["left"].notna()]["round"].tolist()
    assert marks == ([] if sampled else [3] * frame["part"].nunique())
    assert (mentions(panel.caption, "2 of 3", "round 3")) == (not sampled)


def test_seeds_and_runs_without_such_clients_beside_them(tmp_path: Path) -> None:
    held = [held_out(tmp_path / "a", [3, 4]), held_out(tmp_path / "b", [2, 4])]
    config = held[1] / "config.toml"
    config.write_text(config.read_text().replace("seed = 0", "seed = 1", 1))
    groups = grouped(read_runs([*held, held_out(tmp_path / "all", [])]))
    assert [len(group.runs) for group in groups] == [2, 1]
    found = {panel.name: panel for panel in accuracy(groups)}
    # means of the seeds: (0.78 + 0.63) / 2 and (0.18 + 0.405) / 2; all five: 0.54
    assert ends(found["accuracy"], "Own models of clients that train") == pytest.approx([0.705, 0.54])
    assert ends(found["accuracy"], "Clients that never train") == pytest.approx([0.2925])
    # client 4 in both seeds, client 3 in the first, client 2 in the second
    assert frames_of(found["unseen-accuracy"])[0]["mean"].tolist() == pytest.approx([0.13, 0.23, 0.68])


def test_without_such_clients_nothing_is_said_of_them(tmp_path: Path) -> None:
    groups = grouped(read_runs([held_out(tmp_path / "all", [])]))
    found = {panel.name: panel for panel in accuracy(groups)}
    assert "unseen-accuracy" not in found
    assert mentions(frames_of(found["accuracy"])[0]["part"].tolist()[-1], "All clients' own", "models")
    assert mentions(found["clients"].title, "Final accuracy", "each client")
    assert not any("never" in panel.caption for panel in found.values())
    assert mentions(found["accuracy"].caption, "All clients'", "models (right)", "mean over all")


def test_long_runs_are_drawn_as_running_means_without_their_first_rounds(tmp_path: Path) -> None:
    def accuracies(last: int, start: float) -> list[dict[str, Any]]:
        shares = (start + (0.9 - start) * min(1, 40 * t / last) + 0.02 * math.sin(t / 20) for t in range(last))
        rows = ({"accuracy-before": share, "accuracy-after": share} for share in shares)
        return [record(t, {"0": row, "1": row}) for t, row in enumerate(rows, start=1)]

    runs = {"long": accuracies(400, 0.1), "flat": accuracies(400, 0.89), "short": accuracies(60, 0.1)}
    said, limits, files = {}, {}, {}
    for name, records in runs.items():
        found = {panel.name: panel for panel in accuracy(grouped(read_runs([folder(tmp_path / name, records)])))}
        files[name] = words(found["accuracy"])
        said[name], limits[name] = found["accuracy"].caption, encoding(found["accuracy"], "y")["scale"].get("domain")
    assert mentions(said["long"], "running means of 11", "first rounds", "outside the picture")
    assert mentions(said["flat"], "running means of 11", "rounds") and "running" not in said["short"]
    assert 0.87 < limits["long"][0] < 0.88 and 0.92 < limits["long"][1] < 0.93
    assert limits["flat"] is limits["short"] is None
    # a file cuts off what its axis leaves out, and describes its axes, not every mark
    assert ["clip-path" in files[name] for name in runs] == [True, False, False]
    assert all("X-axis titled" in file and "line mark" not in file for file in files.values())


def test_losses_of_many_runs_are_valid(tmp_path: Path) -> None:
    rows = {"0": {"accuracy-before": 0.5, "loss": 2.0}}
    (panel,) = losses(grouped(read_runs([folder(tmp_path / "run", [record(1, rows), record(2, rows)])])))
    assert panel.draw().to_dict()["$schema"]
