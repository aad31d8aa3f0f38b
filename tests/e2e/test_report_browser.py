"""The report in a real browser: chromium, headless, without a network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import corolla, settings

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr", "--window-size=1280,1000", "--virtual-time-budget=20000",
]  # fmt: skip
PROBE = """<script>
const errors = [];
addEventListener("error", e => errors.push(String(e.message || e.target.src).slice(0, 200)), true);
addEventListener("load", () => {
  const images = [...document.images].map(i => ({
    complete: i.complete, width: i.naturalWidth, height: i.naturalHeight,
    shape: i.naturalWidth / i.naturalHeight / (i.clientWidth / i.clientHeight), shown: i.clientWidth, alt: i.alt}));
  const found = {errors, images, overflow: document.documentElement.scrollWidth - innerWidth,
    resources: performance.getEntriesByType("resource").map(r => r.name.slice(0, 60)), title: document.title};
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
});
</script>"""


@pytest.fixture(scope="module")
def browser() -> str:
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    pytest.skip(f"NO BROWSER: none of {', '.join(BROWSERS)} is installed, so the report was not opened in one")


@pytest.mark.e2e
def test_all_images_decode_and_the_console_is_silent(browser: str, tmp_path: Path) -> None:
    common = {
        "num-server-rounds": 4, "evaluate-every": 2, "train-samples": 40, "test-samples": 10, "local-epochs": 1,
        "output-dir": str(tmp_path / "runs"), "state-dir": str(tmp_path / "state"), "partition": "pathological",
    }  # fmt: skip
    for method in ("fedcac", "fedavg"):
        done = corolla("run", "--in-process", "--clients", "8", *settings(common | {"method": method, "run-name": method}))
        assert done.returncode == 0, done.stderr
    (tmp_path / "runs" / "fedavg" / "summary.json").unlink()  # as if interrupted
    done = corolla("report", str(tmp_path / "runs"), "--output", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    (tmp_path / "probed.html").write_text(page.replace("<head>", f"<head>{PROBE}"), encoding="utf-8")

    opened = subprocess.run(
        [browser, *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", (tmp_path / "probed.html").as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = re.search(r'<pre id="probe">(.*?)</pre>', opened.stdout, re.S)
    assert found, f"the page did not load\n{opened.stderr[-2000:]}"
    probe = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert probe["errors"] == []
    assert not [line for line in opened.stderr.splitlines() if "CONSOLE" in line]
    assert [r for r in probe["resources"] if not r.startswith("data:")] == []
    pictures = list((tmp_path / "out" / "report-figures").iterdir())
    assert len(probe["images"]) == len(pictures) == 7
    for image in probe["images"]:
        assert image["complete"] and image["width"] > 0 and image["height"] > 0, image
        assert image["alt"] and image["shown"] > 300 and abs(image["shape"] - 1) < 0.02, image
    assert probe["overflow"] <= 0, "the page is wider than the window"
    assert probe["title"] == "2 runs: fedavg, fedcac"
    assert "is not finished" in opened.stdout
