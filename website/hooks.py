"""MkDocs hooks of the site: generated pages, included browser files, and links that fit the site's pages."""

from __future__ import annotations

import posixpath
import re
from pathlib import PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from website import assets, pages

FENCED = re.compile(r"^(?:```.*?^```|~~~.*?^~~~)", re.DOTALL | re.MULTILINE)
_HELPER = "https://unpkg.com/iframe-worker/shim"
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the methods' pages, in the registry's order, to the navigation after the guides."""
    assert config.nav is not None
    place = next(i for i, entry in enumerate(config.nav) if isinstance(entry, dict) and "Guides" in entry)
    config.nav.insert(place + 1, {"Methods": pages.method_navigation()})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and the browser files."""
    for path, text in pages.generated().items():
        files.append(File.generated(config, path, content=text))
    for path, content in assets.files().items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Add a method's generated tables, and change links that fit the repository to links that fit the site.

    A link to a file that the site does not have stays as it is.
    """
    here = page.file.src_uri
    markdown = pages.method_page(here, markdown)
    source = pages.source_of(here)
    beside = PurePosixPath(source).parent

    def fit(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        if re.match(r"[a-z]+:", target):
            return match[0]
        path, hash_, anchor = target.partition("#")
        named = posixpath.normpath(str(beside / path)) if path else source
        found = pages.page_of(named + hash_ + anchor)
        if found is None:
            return match[0]
        to, hash_, anchor = found.partition("#")
        return f"{before}{posixpath.relpath(to, posixpath.dirname(here) or '.')}{hash_}{anchor}{after}"

    def outside_code(text: str) -> str:
        return LINK.sub(fit, text)

    parts, last = [], 0
    for block in FENCED.finditer(markdown):
        parts += [outside_code(markdown[last : block.start()]), block[0]]
        last = block.end()
    return "".join([*parts, outside_code(markdown[last:])])


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Load the search's helper from the site itself. The theme would load it from another host."""
    here = posixpath.relpath("assets/iframe-worker/index.js", posixpath.dirname(page.file.dest_uri) or ".")
    return output.replace(_HELPER, here)
