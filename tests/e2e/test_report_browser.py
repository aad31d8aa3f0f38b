"""The report in a real browser: chromium, headless, without a network."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from corolla.report import arrays
from corolla.report.groups import grouped
from corolla.report.page import write_report
from fl_app.figures import Layers
from tests.conftest import Command
from tests.e2e.browser import DARK, OPTIONS
from tests.e2e.conftest import COROLLA, settings
from tests.report.builders import many_runs
from tests.report.read import last_matrix
from tests.report.test_many_clients import many

PROBE = """<script>
const errors = [];
addEventListener("error", e => errors.push(String(e.message || e.target.src).slice(0, 200)), true);
addEventListener("unhandledrejection", e => errors.push(String(e.reason).slice(0, 200)));
</script>"""
# runs after the pictures are drawn
AFTER = """<script type="module">
await corolla.all();
// what is folded has no width
document.querySelectorAll("details").forEach(d => d.open = true);
const script = async () => { SCRIPT };
await script();
const pictures = [...document.querySelectorAll("figure")].map(figure => {
  const canvas = figure.querySelector("canvas"), context = canvas.getContext("2d");
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
  return {name: figure.id, width: canvas.clientWidth, colours: new Set(new Uint32Array(pixels.buffer)).size};
});
const found = {errors, pictures, overflow: document.documentElement.scrollWidth - innerWidth,
  resources: performance.getEntriesByType("resource").map(r => r.name.slice(0, 60)), title: document.title};
const out = document.createElement("pre");
out.id = "probe";
out.textContent = JSON.stringify(found);
document.body.append(out);
</script>"""


def look_at(page: Path, browser: str, tmp_path: Path, script: str = "", *options: str) -> tuple[dict[str, Any], str]:
    """Open a report and run a script in it; what the browser says about it, and its DOM.

    Fails unless all pictures are drawn and nothing complained.
    """
    probed = tmp_path / "probed.html"
    text = page.read_text(encoding="utf-8").replace("<head>", f"<head>{PROBE}", 1)
    # the pictures' library has this word too
    start, end = text[: text.rindex("</body>")], text[text.rindex("</body>") :]
    probed.write_text(start + AFTER.replace("SCRIPT", script) + end, encoding="utf-8")
    opened = subprocess.run(
        [browser, *OPTIONS, *options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", probed.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r'<pre id="probe">(.*?)</pre>', opened.stdout, re.S)
    assert found, f"the page did not load\n{opened.stderr[-2000:]}"
    probe: dict[str, Any] = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert probe["errors"] == []
    assert not [line for line in opened.stderr.splitlines() if "CONSOLE" in line]
    assert [r for r in probe["resources"] if not r.startswith("data:")] == []
    for picture in probe["pictures"]:
        assert picture["width"] > 200 and picture["colours"] > 16, picture
    assert probe["overflow"] <= 0, "the page is wider than the window"
    return probe, opened.stdout


@pytest.mark.e2e
def test_all_pictures_are_drawn_and_the_console_is_silent(browser: str, command: Command, tmp_path: Path) -> None:
    common = {
        "num-server-rounds": 4,
        "evaluate-every": 2,
        "train-samples": 40,
        "test-samples": 10,
        "local-epochs": 1,
        "output-dir": str(tmp_path / "runs"),
        "state-dir": str(tmp_path / "state"),
        "partition": "pathological",
    }
    for method in ("fedcac", "fedavg"):
        code, _, err = command(
            "run", "--in-process", "--clients", "8", *settings(common | {"method": method, "run-name": method})
        )
        assert code == 0, err
    (tmp_path / "runs" / "fedavg" / "summary.json").unlink()  # as if interrupted
    code, _, err = command("report", tmp_path / "runs", "--output", tmp_path / "out")
    assert code == 0, err
    probe, dom = look_at(tmp_path / "out" / "report.html", browser, tmp_path)
    pictures = list((tmp_path / "out" / "report-figures").iterdir())
    assert len(probe["pictures"]) == len(pictures) == 9
    assert probe["title"] == "2 runs: fedavg, fedcac"
    assert "is not finished" in dom


PRESS = """
document.querySelectorAll("details").forEach(d => d.open = true);
document.querySelector("button.open").click();
const press = name => [...document.querySelectorAll("th button")].find(b => b.textContent === name).click();
press("final (%)"); press("final (%)");
document.title = JSON.stringify({
  order: [...document.querySelector("table:has(tbody)").tBodies].map(b => Number(b.rows[0].cells[0].dataset.value)),
  shown: [...document.querySelectorAll("tr.single")].filter(r => r.offsetParent).length,
  background: getComputedStyle(document.querySelector("main")).backgroundColor,
  paper: corolla.views.get("accuracy").background()});
"""


@pytest.fixture(scope="module")
def six_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path]:
    """Three methods with two seeds each, and their report."""
    directory = tmp_path_factory.mktemp("six")
    runs = many_runs(directory / "runs", num_runs=3, num_clients=6, seeds=2)
    return runs, write_report(runs, directory)[0]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("options", "dark"),
    [
        ([], False),
        ([DARK], True),
        (["--window-size=500,900"], False),
    ],
)
def test_tables_sort_and_open_on_light_dark_and_small_screens(
    options: list[str], dark: bool, browser: str, tmp_path: Path, six_runs: tuple[list[Path], Path]
) -> None:
    runs, page = six_runs
    probe, _ = look_at(page, browser, tmp_path, PRESS, *options)
    found = json.loads(probe["title"])
    final = [arrays.read_run(path).outcome["final-accuracy"] for path in runs]
    finals = [np.mean(final[k : k + 2]) for k in (0, 2, 4)]
    assert found["order"] == [int(k) + 1 for k in np.argsort(finals, kind="stable")]
    assert found["shown"] == 2, "the runs of one row"
    assert found["background"] == ("rgb(23, 24, 26)" if dark else "rgb(255, 255, 255)")
    assert found["paper"] == ("#17181a" if dark else "#ffffff")
    room = 500 if options and not dark else 1104
    assert all(
        picture["width"] < room for picture in probe["pictures"] if picture["name"] in ("accuracy", "clients", "loss")
    )


ASK = """
const view = name => corolla.views.get(name), drawn = name => view(name).toCanvas().then(c => c.toDataURL());
const [before, other] = [await drawn("overlap-1-1"), await drawn("clients")];
corolla.set("client", "3");
const field = document.getElementById("tool-client");
const chosen = [await drawn("overlap-1-1") !== before, await drawn("clients") !== other, field.value];
corolla.set("client", "");
const back = await drawn("overlap-1-1") === before;
const figure = document.getElementById("overlap-1-1");
const slider = figure.querySelector("input[type=range]");
slider.value = slider.min;
slider.dispatchEvent(new Event("input"));
await view("overlap-1-1").runAsync();
const moved = await drawn("overlap-1-1") !== before;
const select = figure.querySelector("select");
await corolla.show(figure, select.options[1].value);
const sorted = await drawn("overlap-1-1") !== before;
const curves = document.getElementById("accuracy"), over = {};
for (const choice of curves.querySelector("select").options) {
  await corolla.show(curves, choice.value);
  over[choice.value] = await drawn("accuracy");
}
document.getElementById("tool-paper").click();
await view("clients").runAsync();
const turned = [view("clients").background(), getComputedStyle(document.querySelector("main")).backgroundColor];
let saved = null;
HTMLAnchorElement.prototype.click = function () { saved = this; };
document.querySelector("#clients .actions button").click();
// a reader can move the axes, so lines end where the picture ends
const cut = (await view("accuracy").toSVG()).includes("clip-path");
document.title = JSON.stringify({chosen, back, moved, sorted, turned, cut,
  over: [Object.keys(over), new Set(Object.values(over)).size], saved: [saved.download, saved.href.slice(0, 5)]});
"""


@pytest.mark.e2e
def test_a_reader_asks_the_pictures(browser: str, tmp_path: Path, six_runs: tuple[list[Path], Path]) -> None:
    found = json.loads(look_at(six_runs[1], browser, tmp_path, ASK)[0]["title"])
    assert found == {
        "chosen": [True, True, "3"],
        "back": True,
        "moved": True,
        "sorted": True,
        "over": [["over rounds", "over bytes", "over seconds"], 3],
        "turned": ["#17181a", "rgb(23, 24, 26)"],
        "cut": True,
        "saved": ["clients.csv", "blob:"],
    }


FILTER = """
document.querySelectorAll("details").forEach(d => d.open = true);
const all = [...document.querySelectorAll("details")].find(d => d.querySelector("summary").textContent === "All 300");
const input = all.querySelector("input");
const shown = text => {
  input.value = text;
  input.dispatchEvent(new Event("input"));
  const rows = [...all.querySelectorAll("tbody")].filter(b => b.offsetParent);
  return [rows.length, rows[0]?.rows[0].cells[0].textContent ?? "", all.querySelector("[role=status]").textContent];
};
const found = [shown("final<10"), shown("final>90 mostly=3"), shown("nobody"), shown("client=42"), shown("99.67"), shown("")];
const press = name => [...all.querySelectorAll("th button")].find(b => b.textContent === name).click();
press("final (%)");
document.title = JSON.stringify({found, first: all.querySelector("tbody").rows[0].cells[0].textContent,
  filters: document.querySelectorAll(".filter input").length});
"""


@pytest.mark.e2e
def test_the_table_of_many_clients_is_filtered_and_sorted(browser: str, tmp_path: Path) -> None:
    page, _ = write_report([many(tmp_path / "run", 300)], tmp_path / "out")
    told = json.loads(look_at(page, browser, tmp_path, FILTER)[0]["title"])
    # client i has the accuracy i / 300 and data of class i % 4
    assert told["found"] == [
        [30, "0", "30 of 300 rows"],
        [8, "271", "8 of 300 rows"],
        [0, "", "0 of 300 rows"],
        [1, "42", "1 of 300 rows"],
        [1, "299", "1 of 300 rows"],
        [300, "0", ""],
    ]
    assert told["first"] == "299" and told["filters"] == 1


METHODS = ("fedavg", "local", "fedper", "fedcac", "fedobp")
SWEEP = Path(__file__).parents[2] / "sweeps" / "digits.toml"


@pytest.mark.e2e
@pytest.mark.nightly
# half a minute on an idle machine
@pytest.mark.timeout(900)
def test_a_sweep_killed_and_started_again_gives_a_report_with_data_in_every_panel(
    browser: str, command: Command, tmp_path: Path
) -> None:
    values = {
        "num-server-rounds": 6,
        "evaluate-every": 3,
        "partition": "pathological",
        "train-samples": 60,
        "test-samples": 20,
        "local-epochs": 3,
        "fedobp.quantile": 0.99,
        "data-dir": str(tmp_path / "data"),
        "state-dir": str(tmp_path / "state"),
    }
    directory = tmp_path / "runs"
    words = ["sweep", str(SWEEP), "--in-process", "--output-dir", str(directory), *settings(values)]
    kill_in_the_middle([COROLLA, *words], directory, finished=4)
    before = stamps(directory)
    interrupted = {p.parent.name for p in directory.glob("*/config.toml")} - set(before)
    assert 4 <= len(before) < 10 and len(interrupted) == 1

    code, out, err = command(*words)
    assert code == 0, err
    assert f"10 runs, {len(before)} finished before, {10 - len(before)} to do" in out
    after = stamps(directory)
    assert len(after) == 10 and before.items() <= after.items(), "a finished run was repeated"
    assert f"resumes {directory / interrupted.pop()} after round " in out and not (directory / "unfinished").exists()
    assert command(*words)[1].startswith("10 runs, 10 finished before, 0 to do") and stamps(directory) == after

    code, _, err = command("report", directory, "--output", tmp_path / "out")
    assert code == 0, err
    groups = grouped(arrays.read_runs([directory]))
    runs = [run for group in groups for run in group.runs]
    assert [len(group.runs) for group in groups] == [2] * 5
    assert sorted(run.method for run in runs) == sorted(METHODS * 2)
    own = {"fedcac": ("overlap", "collaborators"), "fedobp": ("personal",)}
    names = {
        "accuracy",
        "accuracy-spread",
        "accuracy-seeds",
        "loss",
        "clients",
        "client-by-client",
        "communication",
        "seconds",
        "partition-1",
        "partition-2",
    }
    names |= {f"{name}-{run.number.replace('.', '-')}" for run in runs for name in own.get(run.method, ())}
    pictures = {p.stem: p for p in (tmp_path / "out" / "report-figures").iterdir()}
    assert set(pictures) == names
    for path in pictures.values():
        with Image.open(path) as image:
            assert len(np.unique(np.asarray(image.convert("L")))) > 16, f"{path.name} is empty"
    for run in runs:
        assert_every_panel_has_data(run)
    probe, _ = look_at(tmp_path / "out" / "report.html", browser, tmp_path)
    assert len(probe["pictures"]) == len(names) and probe["title"].startswith("10 runs: ")


def stamps(directory: Path) -> dict[str, tuple[int, int]]:
    return {p.parent.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in directory.glob("*/summary.json")}


def kill_in_the_middle(command: list[str], directory: Path, finished: int) -> None:
    """Start a sweep, and SIGKILL it inside a run once so many are finished."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline and process.poll() is None:
        begun = {p.parent.name for p in directory.glob("*/metrics.jsonl")}
        if len(stamps(directory)) >= finished and begun - set(stamps(directory)):
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()


def assert_every_panel_has_data(run: arrays.ReportedRun) -> None:
    assert run.finished and list(run.rounds) == list(range(1, 7))
    for name, points in (("accuracy-before", 6), ("accuracy-after", 6), ("evaluation", 2)):
        curve = arrays.curve([run], name)
        assert curve is not None and len(curve) == points and (curve["low"] <= curve["high"]).all(), run.path.name
    assert len(arrays.last_known(run)[0]) == 10
    assert sum(arrays.server_seconds(run).values()) > 0 and sum(arrays.client_seconds(run).values()) > 0
    sent = arrays.until(run)["bytes"]
    assert len(sent) == 6 and (np.diff(sent) > 0).all() == (run.method != "local")
    told = arrays.class_counts(run)
    assert told is not None and told[1].sum() == 10 * 60
    if run.method == "fedcac":
        assert_masks_tell_whose_data_is_alike(run, told[1])
    if run.method == "fedobp":
        shares = arrays.layers(run, Layers("personal-parameters", "", shares=True))
        assert shares is not None and np.allclose(np.nansum(shares[1][:, 1:], axis=0), 1)


def assert_masks_tell_whose_data_is_alike(run: arrays.ReportedRun, counts: Any) -> None:
    """Clients with the same classes overlap most, those without a common one least."""
    ids, overlap = last_matrix(run, "overlap") or ([], np.zeros(0))
    collaborators = arrays.scalars(run, "collaborators")
    assert ids == list(range(10)) and collaborators is not None and collaborators[1][:, 0].max() > 0
    common = (counts[:, None, :] * counts[None, :, :] > 0).sum(axis=2)
    pairs = np.triu(np.ones((10, 10), bool), 1)
    means = {n: overlap[pairs & (common == n)].mean() for n in (0, 1, 2) if (pairs & (common == n)).any()}
    assert len(means) > 1 and list(means.values()) == sorted(means.values()), means
