"""The page and the files beside it."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from markupsafe import escape
from PIL import Image

from corolla.report import page as report
from corolla.report.arrays import class_names, read_run
from corolla.report.by_kind import of_run
from corolla.report.heat_maps import partitions
from corolla.report.tables import PICTURES
from fl_app import progress
from fl_app.errors import UserError
from fl_app.server.run_folder import class_names_of, read_about, read_clients
from strategies.base import OWN_MODEL
from tests.conftest import Command
from tests.data.test_data_folder import write_folder
from tests.facts import mentions, rejected
from tests.report.builders import folder, record, write
from tests.report.read import encoding, frame_with


def test_the_page_is_self_contained_and_every_picture_decodes(
    fedcac: Path, fedavg: Path, local: Path, tmp_path: Path
) -> None:
    page, names = write(tmp_path, fedcac, fedavg, local)
    assert names == {
        "accuracy",
        "loss",
        "clients",
        "client-by-client",
        "communication",
        "seconds",
        "partition-1",
        "partition-2",
        "overlap-1",
        "collaborators-1",
    }
    own = page.partition('<script type="application/json"')[0]
    assert not re.search(r"https?:|<script [^>]*src|<link|@import|url\(|<img", own)
    assert "default-src 'none'" in own and page.count("</script>") == 4
    told = json.loads(re.findall(r'id="pictures-data">(.*?)</script>', page)[0])
    assert set(told["specs"]) == names == set(re.findall('<figure id="([^"]+)">', page))
    assert set(told["datasets"]) == {key for spec in told["specs"].values() for key in spec["datasets"]}
    for name in names:
        with Image.open(tmp_path / PICTURES / f"{name}.png") as image:
            assert len(np.unique(np.asarray(image.convert("L")))) > 16, "an empty picture"
    for path in (fedcac, fedavg, local):
        summary = json.loads((path / "summary.json").read_text())
        assert f"{100 * summary['final-accuracy']:.2f}" in page and summary["digest"][:8] in page
    assert "pathological" in page and "have different data" in page
    assert "Mean overlap: " in page and 'class="warn"' in page


@pytest.mark.usefixtures("undrawn")
def test_a_report_replaces_the_pictures_of_an_earlier_one_and_nothing_else(
    fedcac: Path, fedavg: Path, tmp_path: Path
) -> None:
    assert "overlap-1" in write(tmp_path, fedcac)[1]
    (tmp_path / PICTURES / "logo.png").write_bytes(b"somebody's")
    page, names = write(tmp_path, fedavg)
    assert names == {"accuracy", "loss", "clients", "communication", "seconds", "partition", "logo"}
    assert 'class="warn"' not in page and "collaborators" not in page


@pytest.mark.usefixtures("undrawn")
def test_the_drawing_says_how_far_it_is_and_standard_output_has_the_paths_alone(
    fedavg: Path, tmp_path: Path, command: Command
) -> None:
    code, out, err = command("report", fedavg, "--output", tmp_path / "one", "--figures", tmp_path / "figures")
    assert code == 0 and out == f"{tmp_path}/one/report.html\n{tmp_path}/one/report-figures\n"
    # six of them, as PNG, SVG and PDF
    assert "drawing pictures: 0/18" in err
    names = [path.stem for path in (tmp_path / "one" / "report-figures").iterdir()]
    every = {f"{name}.{kind}" for name in names for kind in ("png", "svg", "pdf")}
    assert {path.name for path in (tmp_path / "figures").iterdir()} == every
    told: list[tuple[str, int, int]] = []
    with progress.listening(lambda *what: told.append(what)):
        write(tmp_path / "two", fedavg)
    assert told == [("drawing pictures", done, 6) for done in range(6)]


@pytest.mark.usefixtures("undrawn")
def test_only_a_report_is_replaced_and_one_of_other_runs_is_named(
    fedavg: Path, local: Path, tmp_path: Path, command: Command
) -> None:
    def corolla(*words: str) -> tuple[int, str]:
        code, out, err = command("report", *words, "--output", tmp_path / "out", "--tables", tmp_path / "out")
        return code, out + " ".join(err.split())

    for runs, said in (([fedavg], False), ([fedavg, local], True)):
        code, out = corolla(*map(str, runs))
        assert code == 0 and (mentions(out, "replaces the report", "fedavg-run")) == said, out
    page, table = tmp_path / "out" / report.PAGE, tmp_path / "out" / "rounds.csv"
    assert mentions(corolla(str(fedavg))[1], "replaces the report", "fedavg-run, local-run")
    for file, content in ((page, "<!doctype html>\n<html>my own"), (table, "a,b\n1,2\n")):
        before = file.read_text()
        file.write_text(content)
        code, out = corolla(str(fedavg))
        assert code == 2 and mentions(out, f"{file.name} exists", "not a report") and file.read_text() == content
        file.write_text(before)
    code, out = corolla(str(fedavg))
    assert code == 0 and "in place of" not in out, out


@pytest.mark.usefixtures("undrawn")
def test_without_class_counts_only_what_is_known_is_drawn(start: Callable[..., Path], tmp_path: Path) -> None:
    run = start("secret", method="fedcac", report_class_counts=False)
    assert all("class-counts" not in facts for facts in read_clients(run).values())
    page, names = write(tmp_path, run)
    assert "overlap-1" in names and not [name for name in names if name.startswith("partition")]
    assert mentions(page, "Overlap of critical", "parameters</a></h3>") and "cosine" not in page


def test_the_program_that_draws_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = report.library()
    (kept,) = (tmp_path / "cache" / "corolla").iterdir()
    assert kept.read_text("utf-8") == made
    with monkeypatch.context() as without:
        without.delattr("vl_convert.javascript_bundle")
        assert report.library() == made
    # a cache that cannot be written costs time, and no more
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert report.library() == made


def test_names_are_escaped(tmp_path: Path) -> None:
    failure = {"client": 3, "cause": "<script>alert(1)</script>\x1b[2J\x9bm"}
    rounds = [record(1, {"0": {"accuracy-before": 0.5}}, failures=[failure])]
    page, _ = write(tmp_path, folder(tmp_path / "<b>$x_1$&", rounds, model="my_model:make"))
    assert "<script>alert" not in page and "<b>$" not in page
    assert "\x1b" not in page and "\x9b" not in page
    assert "&lt;b&gt;$x_1$&amp;" in page and mentions(page, "&lt;script&gt;alert(1)") and "my_model:make" in page


def test_a_report_leaves_altair_as_it_is_and_needs_no_torch(fedavg: Path, tmp_path: Path) -> None:
    code = (
        "import sys, altair\nfrom pathlib import Path\nbefore = altair.theme.active, altair.data_transformers.active\n"
        "from corolla.report.charts import Panel\nPanel.render = lambda panel, kind='png': b''\n"
        "from corolla.report.page import write_report\nwrite_report([Path(sys.argv[1])], Path(sys.argv[2]))\n"
        "assert (altair.theme.active, altair.data_transformers.active) == before\n"
        "assert not {'torch', 'matplotlib'} & {*sys.modules}\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(fedavg), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("undrawn")
def test_the_command_writes_into_the_current_directory(
    fedavg: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = command("report", fedavg)
    assert code == 0 and out.split() == ["report.html", "report-figures"], err
    assert {p.name for p in tmp_path.iterdir()} == {"report.html", "report-figures"}
    code, _, err = command("report", "nowhere")
    assert code == 2 and mentions(err, "nowhere", "no such file", "directory")


@pytest.mark.usefixtures("undrawn")
def test_a_report_needs_no_code_of_the_method(fedcac: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(fedcac, copy)
    config = copy / "config.toml"
    config.write_text(config.read_text().replace('method = "fedcac"', 'method = "a-stranger"'))
    page, names = write(tmp_path / "out", copy)
    assert {"overlap-1", "collaborators-1"} <= names and "One run: a-stranger" in page


@pytest.mark.usefixtures("undrawn")
def test_what_was_tested_instead_of_the_received_model_is_said(
    start: Callable[..., Path], fedavg: Path, tmp_path: Path
) -> None:
    page, _ = write(tmp_path / "one", fedavg)
    assert "is an exception" not in page
    ditto = start("ditto-run", method="ditto", num_server_rounds=1)
    page, _ = write(tmp_path / "two", fedavg, ditto)
    assert mentions(page, "ditto", "exception", str(escape(OWN_MODEL)))


@pytest.mark.usefixtures("undrawn")
def test_every_link_of_the_page_leads_somewhere(fedcac: Path, fedavg: Path, tmp_path: Path) -> None:
    page, names = write(tmp_path, fedcac, fedavg)
    anchors = re.findall(r' id="([^"]+)"', page)
    assert len(anchors) == len(set(anchors))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(anchors)
    assert {*names, "results", "pictures", "run-1"} <= set(anchors)


@pytest.mark.nightly
def test_every_picture_comes_as_png_svg_and_pdf_too(fedavg: Path, tmp_path: Path) -> None:
    contents = []
    for k in range(2):
        report.write_report([fedavg], tmp_path / "out", figures=tmp_path / f"figures{k}")
        contents.append({p.name: p.read_bytes() for p in (tmp_path / f"figures{k}").iterdir()})
    # what writes PDF numbers a file's parts as it likes
    first, second = ({name: content for name, content in of.items() if ".pdf" not in name} for of in contents)
    assert first == second
    names = {p.stem for p in (tmp_path / "out" / PICTURES).iterdir()}
    assert set(contents[0]) == {f"{name}.{kind}" for name in names for kind in ("png", "svg", "pdf")}
    for name, content in contents[0].items():
        assert content.startswith({"png": b"\x89PNG", "svg": b"<svg", "pdf": b"%PDF"}[name.rpartition(".")[2]])
    (tmp_path / "file").write_text("")
    with rejected(UserError, "--figures", "cannot write"):
        report.write_report([fedavg], tmp_path / "out", figures=tmp_path / "file")


@pytest.mark.usefixtures("undrawn")
def test_the_numbers_come_as_csv(fedcac: Path, fedavg: Path, tmp_path: Path) -> None:
    report.write_report([fedcac, fedavg], tmp_path / "out", tables=tmp_path / "tables")
    rounds = list(csv.DictReader((tmp_path / "tables" / "rounds.csv").open()))
    clients = list(csv.DictReader((tmp_path / "tables" / "clients.csv").open()))
    assert len(rounds) == 8 + 3 and len(clients) == 20 * 8 + 3 * 3
    for path in (fedcac, fedavg):
        summary = json.loads((path / "summary.json").read_text())
        own = [row for row in rounds if row["run"] == path.name]
        assert float(own[-1]["evaluation-accuracy"]) == summary["final-accuracy"]
        assert sum(int(row["upload-bytes"]) for row in own) == summary["upload-bytes"]
        last = [row for row in clients if row["run"] == path.name and row["round"] == own[-1]["round"]]
        assert np.mean([float(row["evaluation-accuracy"]) for row in last]) == pytest.approx(summary["final-accuracy"])
    assert {row["train-samples"] for row in clients if row["run"] == fedcac.name} == {"40"}


def test_classes_have_their_names(start: Callable[..., Path], tmp_path: Path) -> None:
    run = start("named", num_server_rounds=1)
    assert read_about(run)["classes"] == [str(k) for k in range(10)]
    assert read_run(run).classes == tuple("0123456789")
    secret = start("unnamed", num_server_rounds=1, report_class_counts=False)
    assert not read_about(secret).get("classes") and class_names(read_run(secret), 10) == ()


def test_pictures_have_the_names_of_a_folders_classes(start: Callable[..., Path], tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {"dog": 9, "cat": 6})
    run = start(
        "animals",
        method="fedcac",
        dataset=f"folder:{folder}",
        partition="iid",
        train_samples=0,
        test_samples=0,
        num_server_rounds=1,
    )
    (partition,) = partitions([read_run(run)])
    up = encoding(partition, "y")
    assert up["title"] == "class" and up["sort"] == ["dog", "cat"]
    overlap = next(panel for panel in of_run(read_run(run)) if panel.name == "overlap-1")
    assert set(frame_with(overlap, "class")["class"]) == {"cat", "dog"}


@pytest.mark.parametrize("text", ["", "{", "[]", '["a"]', '["a", 2]', "null", '"ab"', '{"a": 1, "b": 2}'])
def test_malformed_names_of_classes_are_dropped(text: str) -> None:
    assert class_names_of({"class-names": text, "num-classes": 2}) == []
    assert class_names_of({"class-names": '["a", "b, c"]', "num-classes": 2}) == ["a", "b, c"]
