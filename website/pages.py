"""Pages of the site that are generated from the README and from declarations in the code."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import click

from corolla.cli import build_command
from corolla.cli.reference import escape, key_table
from corolla.presets import Preset, all_presets
from fl_app.keys import specs
from fl_app.known_names import PACKAGES
from strategies import METHOD_PARAMS, METHODS
from strategies.method_tables import cost_table

ROOT = Path(__file__).resolve().parent.parent

SOURCES: Mapping[str, str] = {
    "index.md": "README.md",
    "project/contributing.md": "CONTRIBUTING.md",
    "project/security-policy.md": "SECURITY.md",
    "project/changelog.md": "CHANGELOG.md",
    "project/studies.md": "studies/README.md",
    "results-in-full.md": "studies/results.md",
    "attacks-measured.md": "studies/attacks.md",
    "privacy-measured.md": "studies/privacy.md",
    "benchmarks-measured.md": "benchmarks/README.md",
    "reference/attacks.md": "tests/hostile/attacks.md",
    "reference/entries.md": "fl_app/transport/entries.md",
    "project/citation.md": "CITATION.cff",
    "guides/notebook-example.md": "examples/notebook.ipynb",
    "guides/cross-device-example.md": "examples/cross-device.toml",
    "guides/slow-clients-example.md": "examples/slow-clients.toml",
    "guides/tokens-example.md": "examples/lora_tokens.py",
    "gallery/label-skew.md": "examples/label_skew.py",
    "gallery/hospitals.md": "examples/hospitals.py",
    "gallery/masks.md": "examples/masks.py",
    "gallery/private.md": "examples/private.py",
    "gallery/pictures.md": "examples/pictures.py",
}
"""By page, the file outside docs/ with its text: a path from the root."""

API = {
    "Run and read": ("corolla", ("run", "load", "compare", "Run", "RunFailed", "UserError")),
    "Write a method": ("strategies.base", ()),
    "Server half": ("strategies.base.server_half", ("ServerHalf",)),
    "Test a method": ("corolla.testing", ()),
}
"""By title, the pages of the Python API: the module, and the names shown; () shows all that the module exports."""


SECTIONS = ("How it works", "Equations", "Parameters", "Deviations", "Limits", "Cost")
"""The sections of a method's page, in order. The site adds those with tables; others may be missing."""

LANGUAGES = {".cff": "yaml", ".toml": "toml", ".py": "python"}
"""By suffix, the language of files that a page shows unchanged."""


def generated() -> dict[str, str]:
    """Return the Markdown of each generated page by its path below the site's root."""
    pages = {page: _text(ROOT / source) for page, source in SOURCES.items()}
    pages["reference/cli.md"] = cli_page()
    pages["reference/files.md"] = files_page()
    pages |= {
        f"methods/{slug(name)}.md": docstring_page(name)
        for name in METHOD_PARAMS
        if not (ROOT / "docs" / "methods" / f"{slug(name)}.md").exists()
    }
    return pages | api_pages()


def docstring_page(method: str) -> str:
    """Return the page of a method that docs/methods/ has none for: its module's docstring."""
    return f"# {method}\n\n{METHODS.doc(method)}\n"


def _text(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return notebook_page(text)
    if path.suffix == ".md":
        return text
    return f"# {path.name}\n\n```{LANGUAGES[path.suffix]}\n{text.rstrip()}\n```\n"


def slug(heading: str) -> str:
    """Return a heading's anchor, as GitHub and the site form it."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def method_navigation() -> list[str]:
    """Return the pages about methods in the registry's order, with the overview first."""
    return ["methods/index.md", *(f"methods/{slug(name)}.md" for name in METHOD_PARAMS)]


def method_page(page: str, text: str) -> str:
    """Return a method page's text with the tables that the code declares. Other pages' text is unchanged.

    The table of keys is in the section "Parameters", that of costs in the section "Cost"; the table of presets is at the
    end. A section that the page lacks is added in its place (SECTIONS).
    """
    method = next((name for name in METHOD_PARAMS if page == f"methods/{slug(name)}.md"), None)
    if method is None:
        return text
    declared = specs(METHOD_PARAMS[method], method)
    for title, table in (("Parameters", key_table(declared) if declared else ""), ("Cost", cost_table(method))):
        if table:
            text = _below(text, title, table)
    cells = [preset for preset in all_presets().values() if preset.settings.get("method") == method]
    return f"{text.rstrip()}\n\n## Presets\n\n{preset_table(cells)}\n" if cells else text


def _below(text: str, title: str, table: str) -> str:
    """Return a method page's text with a table as the first content of a section, which is added if there is none."""
    heading = f"\n## {title}\n"
    if heading not in text:
        later = SECTIONS[SECTIONS.index(title) + 1 :]
        place = min((text.find(f"\n## {name}\n") for name in later if f"\n## {name}\n" in text), default=len(text))
        text = f"{text[:place]}{heading}{text[place:]}"
    return text.replace(heading, f"{heading}\n{table}\n", 1)


def preset_table(presets: Iterable[Preset]) -> str:
    """Return a Markdown table of presets: name, the paper's figure in per cent, and its place in the paper."""
    rows = ["| preset | published, % | source |", "|---|---|---|"]
    rows += [f"| `{preset.name}` | {preset.published or '–'} | {escape(preset.source)} |" for preset in presets]
    return "\n".join(rows)


def cli_page() -> str:
    """Return the page of all commands: usage, arguments and options, from the command line's own declarations."""
    parts = ["# Commands\n", "`corolla COMMAND -h` shows the same on a terminal.\n"]
    parts += [_command_section(path, command) for path, command in _commands(build_command(), ("corolla",))]
    return "\n".join(parts)


def _commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    if command.invoke_without_command:
        yield path, command
    for name, below in command.commands.items():
        if not below.hidden:
            yield from _commands(below, (*path, name))


def _command_section(path: tuple[str, ...], command: click.Command) -> str:
    """Return a command's section, without the escapes that `build_command` adds for Rich."""
    context = click.Context(command, info_name=" ".join(path))
    lines = [f"## {' '.join(path)}\n", _plain(command.help or "") + "\n"]
    lines.append(f"```\n{' '.join([*path, *command.collect_usage_pieces(context)])}\n```\n")
    rows = []
    for parameter in command.get_params(context):
        if getattr(parameter, "hidden", False):
            continue
        shown = parameter.get_help_record(context) or (parameter.human_readable_name, getattr(parameter, "help", ""))
        name, text = (_plain(word or "").replace("|", r"\|") for word in shown)
        rows.append(f"| `{name}` | {' '.join(text.split())} |")
    if rows:
        lines.append("| argument or option | meaning |\n|---|---|\n" + "\n".join(rows) + "\n")
    if command.epilog:
        lines.append(_plain(command.epilog) + "\n")
    return "\n".join(lines)


def _plain(text: str) -> str:
    return text.replace("\\[", "[").replace("\b\n", "").replace("\f", "")


def files_page() -> str:
    """Return the page of all source files, with the first line of each file's docstring."""
    parts = [
        "# Source files\n",
        "The first line of each file, by package. [Architecture](../architecture.md) explains the whole.\n",
    ]
    for package in PACKAGES:
        rows = []
        for path in sorted((ROOT / package).rglob("*.py")):
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            name = path.relative_to(ROOT / package).as_posix()
            rows.append(f"| `{name}` | {escape(text.partition(chr(10))[0])} |")
        parts.append(f"## {package}\n\n| file | content |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def api_pages() -> dict[str, str]:
    """Return a page for each part of the Python API, in the form that mkdocstrings reads."""
    pages = {}
    for title, (module, names) in API.items():
        options = "    options:\n      show_root_heading: false\n      show_root_toc_entry: false\n"
        if names:
            options += "      members:\n" + "".join(f"        - {name}\n" for name in names)
        pages[f"reference/{slug(title)}.md"] = f"# {title}\n\n::: {module}\n{options}"
    return pages


def notebook_page(notebook: str) -> str:
    """Return the cells of a Jupyter notebook's JSON as a page: text unchanged, code in blocks, no outputs."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
    return "\n\n".join(parts) + "\n"


def page_of(target: str) -> str | None:
    """Return the site's page, with its anchor, for a link to a path from the repository's root.

    Return None if there is no page.
    """
    path, _, anchor = target.partition("#")
    by_source = {source: page for page, source in SOURCES.items()}
    tail = f"#{anchor}" if anchor else ""
    if path in by_source:
        return by_source[path] + tail
    if not path.startswith("docs/"):
        return None
    return path.removeprefix("docs/") + tail


def source_of(page: str) -> str:
    """Return the path, from the repository's root, of the file with a page's text. Links are relative to it."""
    return SOURCES.get(page, f"docs/{page}")


def anchor(heading: str, separator: str) -> str:
    """Return `slug` of a heading, in the form that Markdown's table of contents calls."""
    return slug(heading)
