"""The documentation's site: built strictly, every link followed, and looked at in a real browser from the disk."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from tests.e2e.browser import DARK, OPTIONS

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.e2e, pytest.mark.long]

LOOK = """<script>
const errors = [];
addEventListener("error", e => errors.push(String(e.message || e.target.src || e.target.href)), true);
addEventListener("load", () => setTimeout(() => {
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify({errors,
    requests: performance.getEntriesByType("resource").map(r => r.name),
    overflow: document.documentElement.scrollWidth - innerWidth,
    scheme: document.body.dataset.mdColorScheme,
    search: getComputedStyle(document.querySelector(".md-header")).display !== "none"
      && [...document.querySelectorAll("label[for=__search], .md-search__form")].some(e => e.offsetParent),
    formulas: document.querySelectorAll(".katex").length,
    wrong: [...document.querySelectorAll(".katex-error")].map(e => `${e.closest("[data-page]")?.dataset.page}: ${e.title}`),
    results: document.querySelectorAll(".md-search-result__item").length});
  document.body.append(out);
}, 6000));
</script>"""


class Links(HTMLParser):
    """What a page refers to, and the anchors it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(directory)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert built.returncode == 0, built.stderr[-4000:]
    return directory


def test_every_link_and_anchor_is_there(site: Path) -> None:
    pages = {page: Links(page) for page in site.rglob("*.html")}
    assert len(pages) > 50
    wrong = []
    for page, links in pages.items():
        for target in links.targets:
            address, anchor = urldefrag(target)
            if urlsplit(address).scheme or page.name == "404.html":
                continue
            to = (page.parent / unquote(address)).resolve() if address else page
            # the theme links to the top of a page that it makes itself
            if anchor and to in pages and unquote(anchor) not in {*pages[to].anchors, "__skip"}:
                wrong.append(f"{page.relative_to(site)}: {target}: no such anchor")
            elif not to.exists():
                wrong.append(f"{page.relative_to(site)}: {target}: no such file")
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize(
    "name", ["index", "config", "results", "methods/fedcac", "gallery/index", "reference/write-a-method"]
)
@pytest.mark.parametrize("size", ["1280,1000", "390,844"])
def test_a_page_is_whole_without_a_network(
    site: Path,
    browser: str,
    tmp_path: Path,
    name: str,
    size: str,
) -> None:
    dark = size == "390,844"
    found = look_at(site / f"{name}.html", browser, tmp_path, f"--window-size={size}", *([DARK] if dark else []))
    assert found["errors"] == []
    assert not [request for request in found["requests"] if not request.startswith(("file:", "data:", "blob:"))]
    assert found["overflow"] <= 0, "the page is wider than the window"
    assert found["scheme"] == ("slate" if dark else "default")
    assert found["search"], "no search to be seen"


def test_the_search_finds_a_key_and_a_formula_is_drawn(site: Path, browser: str, tmp_path: Path) -> None:
    page = site / "index.html"
    formula = page.with_name("formula.html")
    text = page.read_text(encoding="utf-8").replace(
        "<article", r'<p class="arithmatex">\(w_i \odot M_i\)</p><article', 1
    )
    formula.write_text(text, encoding="utf-8")
    try:
        found = look_at(formula, browser, tmp_path, query="max-update-norm")
    finally:
        formula.unlink()
    assert found["errors"] == []
    assert found["formulas"] == 1
    assert found["results"] > 0


FORMULA = re.compile(r'<(span|div) class="arithmatex">.*?</\1>', re.DOTALL)


def test_every_formula_of_the_methods_is_drawn(site: Path, browser: str, tmp_path: Path) -> None:
    """All pages' formulas are put into one page, so that the browser starts once."""
    shown = []
    for page in sorted((site / "methods").glob("*.html")):
        article = re.search(r"<article.*?</article>", page.read_text(encoding="utf-8"), re.DOTALL)
        assert article
        formulas = [match[0] for match in FORMULA.finditer(article[0])]
        source = ROOT / "docs" / "methods" / f"{page.stem}.md"
        assert bool(formulas) == ("$" in source.read_text(encoding="utf-8")), page.name
        left = re.sub(r"<code.*?</code>", "", FORMULA.sub("", article[0]), flags=re.DOTALL)
        assert "$" not in left, f"{page.name}: a formula that Markdown does not see"
        shown.append(f'<div data-page="{page.name}">{"".join(formulas)}</div>')
    text = (site / "methods" / "fedcac.html").read_text(encoding="utf-8")
    together = site / "methods" / "formulas.html"
    before, after = re.split(r"<article.*?</article>", text, maxsplit=1, flags=re.DOTALL)
    together.write_text(f"{before}<article>{''.join(shown)}</article>{after}", encoding="utf-8")
    try:
        found = look_at(together, browser, tmp_path)
    finally:
        together.unlink()
    assert found["wrong"] == []
    assert found["formulas"] == sum(len(FORMULA.findall(text)) for text in shown) > 500


def look_at(page: Path, browser: str, tmp_path: Path, *options: str, query: str = "") -> dict[str, Any]:
    """Open a copy of a page beside it, so that its links hold, and return what the browser has to say about it."""
    probed = page.with_name(f"probed-{page.name}")
    probed.write_text(page.read_text(encoding="utf-8").replace("<head>", f"<head>{LOOK}", 1), encoding="utf-8")
    address = probed.as_uri() + (f"?q={query}" if query else "")
    command = [browser, *OPTIONS, *options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", address]
    try:
        opened = subprocess.run(command, capture_output=True, text=True, timeout=120)
    finally:
        probed.unlink()
    found = re.search(r'<pre id="probe">(.*?)</pre>', opened.stdout, re.DOTALL)
    assert found, f"the page did not load\n{opened.stderr[-2000:]}"
    probe: dict[str, Any] = json.loads(html.unescape(found[1]))
    return probe
