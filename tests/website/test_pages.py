"""The site's generated pages, without building it."""

from __future__ import annotations

import hashlib
import io
import posixpath
import re
import tarfile
import urllib.request
from base64 import b64encode
from pathlib import Path
from types import SimpleNamespace

import pytest

from corolla.cli import build_command
from fl_app.errors import UserError
from fl_app.known_names import PACKAGES
from strategies import METHOD_PARAMS
from tests.facts import rejected
from website import assets, hooks, pages

METHOD_PAGES = pages.ROOT / "docs" / "methods"


def test_every_page_is_a_methods_and_the_first_one_links_to_it() -> None:
    written = {f"methods/{path.name}" for path in METHOD_PAGES.glob("*.md")}
    assert written <= set(pages.method_navigation())
    index = (METHOD_PAGES / "index.md").read_text(encoding="utf-8")
    for name in METHOD_PARAMS:
        assert f"]({pages.slug(name)}.md)" in index, name


@pytest.mark.parametrize(
    "method", [name for name in METHOD_PARAMS if (METHOD_PAGES / f"{pages.slug(name)}.md").is_file()]
)
def test_a_methods_page_has_its_sections_in_order(method: str) -> None:
    text = (METHOD_PAGES / f"{pages.slug(method)}.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    known = [heading for heading in headings if heading in pages.SECTIONS]
    assert known == [heading for heading in pages.SECTIONS if heading in known]
    assert "How it works" in known


def test_a_method_without_a_page_gets_one_from_its_docstring() -> None:
    text = pages.method_page("methods/fedcac.md", pages.docstring_page("fedcac"))
    assert text.startswith("# fedcac\n\nFedCAC") and "Wu, Liu, Niu" in text
    keys, costs, presets = (text.index(f"\n## {heading}\n") for heading in ("Parameters", "Cost", "Presets"))
    assert keys < text.index("| `fedcac.tau` | float in [0, 1] |") < costs < text.index("model; up + ⌈d/8⌉") < presets
    pages_of_methods = {page for page in pages.generated() if page.startswith("methods/")}
    assert pages_of_methods.isdisjoint(f"methods/{path.name}" for path in METHOD_PAGES.glob("*.md"))


def test_a_methods_page_gets_its_keys_and_presets() -> None:
    page = "methods/fedcac.md"
    text = pages.method_page(page, (pages.ROOT / "docs" / page).read_text(encoding="utf-8"))
    keys, deviations, presets = (text.index(f"\n## {heading}\n") for heading in ("Parameters", "Deviations", "Presets"))
    assert keys < text.index("| `fedcac.tau` | float in [0, 1] |") < deviations < presets
    assert "| `fedcac/cifar10-dirichlet-0.1` | " in text[presets:]
    costs = text.index("\n## Cost\n")
    assert (
        deviations < costs < text.index("model; up + ⌈d/8⌉") < text.index("unknown groups of similar clients") < presets
    )
    assert pages.method_page("methods/index.md", "text") == "text"


def test_a_method_without_keys_or_presets_gets_no_table_of_them() -> None:
    text = "# Local\n\n## Parameters\n\nNone.\n\n## Cost\n"
    local = pages.method_page("methods/local.md", text)
    assert "| key |" not in local and "| travels |" in local
    assert pages.method_page("methods/ifca.md", text).count("| `ifca.") > 1
    assert "## Presets" not in pages.method_page("methods/ifca.md", text)


def test_a_missing_section_for_a_table_is_added_in_its_place() -> None:
    text = "# Ditto\n\n## Equations\n\nx\n\n## Deviations\n\ny\n"
    found = re.findall(
        r"^(## .+|\| key \||\| travels \|)", pages.method_page("methods/ditto.md", text), flags=re.MULTILINE
    )
    assert found[:6] == ["## Equations", "## Parameters", "| key |", "## Deviations", "## Cost", "| travels |"]


@pytest.mark.parametrize(
    ("target", "page"),
    [
        ("README.md", "index.md"),
        ("README.md#methods", "index.md#methods"),
        ("docs/methods/fedcac.md", "methods/fedcac.md"),
        ("docs/methods/index.md#notation", "methods/index.md#notation"),
        ("docs/config.md#fedcac", "config.md#fedcac"),
        ("examples/notebook.ipynb", "guides/notebook-example.md"),
        ("CITATION.cff", "project/citation.md"),
        ("examples/cross-device.toml", "guides/cross-device-example.md"),
        ("examples/lora_tokens.py", "guides/tokens-example.md"),
        ("fl_app/transport/wire.py", None),
    ],
)
def test_a_link_in_the_repository_is_a_link_in_the_site(target: str, page: str | None) -> None:
    assert pages.page_of(target) == page


def test_every_link_leads_to_a_page_and_a_heading_of_the_site() -> None:
    docs = pages.ROOT / "docs"
    written = {path.relative_to(docs).as_posix(): path for path in docs.rglob("*") if path.is_file()}
    sources = {page: path.read_text(encoding="utf-8") for page, path in written.items() if path.suffix == ".md"}
    shown = {
        page: hooks.on_page_markdown(text, SimpleNamespace(file=SimpleNamespace(src_uri=page)), None, None)  # type: ignore[arg-type]
        for page, text in (sources | pages.generated()).items()
    }
    prose = {page: hooks.FENCED.sub("", text) for page, text in shown.items()}
    anchors = {
        page: {pages.slug(heading) for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)}
        for page, text in prose.items()
    }
    wrong = []
    for page, text in prose.items():
        for _, target, _ in hooks.LINK.findall(text):
            path, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            to = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
            if to not in shown and to not in written:
                wrong.append(f"{page}: {target}: the site has no such page")
            elif anchor and to in anchors and anchor not in anchors[to]:
                wrong.append(f"{page}: {target}: no such heading")
    assert not wrong, "\n".join(wrong)


def test_every_command_and_option_is_on_the_page_of_commands() -> None:
    page = pages.cli_page()
    assert r"\[" not in page
    for name, command in build_command().commands.items():  # type: ignore[attr-defined]
        if command.hidden:
            assert f"## corolla {name}\n" not in page
        else:
            assert f"## corolla {name}" in page
    for option in ("--clients-at-once K", "--set KEY=VALUE", "--superlink NAME"):
        assert f"| `{option}` |" in page


def test_a_notebooks_cells_become_text_and_code() -> None:
    page = pages.generated()["guides/notebook-example.md"]
    assert page.startswith("# ") and "```python\nfrom corolla import" in page


def test_every_source_file_is_listed() -> None:
    page = pages.files_page()
    for package in ("fl_app", "strategies", "client_app", "deploy", "corolla"):
        assert f"## {package}\n" in page
    assert "| `transport/client_registry.py` | " in page
    files = [path for package in PACKAGES for path in (pages.ROOT / package).rglob("*.py")]
    assert page.count("\n| `") == len(files)


def test_the_readmes_table_has_every_method() -> None:
    text = (pages.ROOT / "README.md").read_text(encoding="utf-8")
    table = text.partition("## Methods\n")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert sorted(re.findall(r"`([a-z-]+)`", "".join(rows))) == sorted(METHOD_PARAMS)


def archive(**files: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as out:
        for name, content in files.items():
            member = tarfile.TarInfo(name.replace("__", "/"))
            member.size = len(content)
            out.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def test_an_archive_is_checked_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = archive(package__dist__a=b"yes", package__dist__b=b"no")
    digest = b64encode(hashlib.sha512(content).digest()).decode()
    package = assets.Package("thing", "1.0", digest, "package/dist/", lambda name: name == "a")
    asked: list[str] = []

    def registry(address: str, timeout: float) -> io.BytesIO:
        asked.append(address)
        return io.BytesIO(content)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(urllib.request, "urlopen", registry)
    monkeypatch.setattr(assets, "PACKAGES", (package,))
    assert assets.files() == assets.files() == {"assets/thing/a": b"yes"}
    assert asked == ["https://registry.npmjs.org/thing/-/thing-1.0.tgz"], "the second time from the cache"

    (tmp_path / "corolla" / "thing-1.0.tgz").write_bytes(b"damaged")
    assert assets.files() == {"assets/thing/a": b"yes"}, "a damaged archive in the cache is fetched again"

    other = assets.Package("thing", "2.0", "another hash", "package/dist/", package.wanted)
    monkeypatch.setattr(assets, "PACKAGES", (other,))
    with pytest.raises(UserError, match="another SHA-512"):
        assets.files()
    assert not (tmp_path / "corolla" / "thing-2.0.tgz").exists()


def test_without_a_network_the_address_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unreachable(address: str, timeout: float) -> None:
        raise OSError("no route to host")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    with rejected(UserError, "", "katex-", "no route", "host"):
        assets.files()
