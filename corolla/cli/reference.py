"""Reference pages generated from declarations in the code (`corolla reference`).

These are docs/config.md, the defaults in pyproject.toml, the tables of methods in README.md and docs/methods/, the table of a
site's rules in docs/deployment.md, the table of all that leaves a site in fl_app/transport/entries.md, and the methods
for apps of others in docs/flower-app.md.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import tomli_w

from deploy.site import Site
from fl_app.config import RunConfig, earlier_keys
from fl_app.errors import UserError
from fl_app.keys import KeySpec, Scalar, specs
from fl_app.toml import nest, value_to_toml
from fl_app.transport import outgoing
from strategies.method_tables import absent_table, methods_table, names_table

_INTRO = """# Run configuration

All keys of a run, for `corolla run --set key=value` and Flower's `--run-config`; each method's own are in its table.
`make docs` writes this page from the declarations in the code.
"""
_SAME_RUN = """These keys do not change a run's results: {running}.
To a sweep, runs that differ only in these keys are the same run. A run can be resumed with other values of them, and with
more rounds ({extending}). Its number of rounds is fixed if one of these keys is in use: {spanning}.
"""
_EARLIER = """Earlier names, valid for one release: {keys}. Earlier values: {values}.
"""
_BEGIN, _END = "[tool.flwr.app.config]\n", "\n[tool.ruff]"


def all_specs(methods: Mapping[str, type]) -> dict[str, list[KeySpec]]:
    """Return declared keys by table; "" is the top level."""
    return {"": specs(RunConfig)} | {name: specs(cls, name) for name, cls in methods.items()}


def defaults(methods: Mapping[str, type]) -> dict[str, Scalar]:
    """Return the default of every key, flat."""
    return {spec.name: spec.default for group in all_specs(methods).values() for spec in group}


def config_page(methods: Mapping[str, type]) -> str:
    """Return docs/config.md."""
    declared = [spec for group in all_specs(methods).values() for spec in group]
    running = ", ".join(f"`{spec.name}`" for spec in declared if not spec.tells_runs_apart)
    keys = ", ".join(f"`{before}` (now `{now}`)" for before, now in earlier_keys.KEYS.items())
    values = ", ".join(
        f"`{key} = {before}` (now `{now}`)" for key, one in earlier_keys.VALUES.items() for before, now in one.items()
    )
    same = _SAME_RUN.format(
        running=running,
        extending=", ".join(f"`{spec.name}`" for spec in declared if spec.extends),
        spanning=", ".join(f"`{spec.name}`" for spec in declared if spec.schedule_dependent),
    )
    parts = [_INTRO, same, _EARLIER.format(keys=keys, values=values)]
    tables = all_specs(methods)
    named = Counter(_unnamed(spec) for group in tables.values() for spec in group)
    common = {_unnamed(spec): spec for group in tables.values() for spec in group if named[_unnamed(spec)] > 2}
    for table, group in tables.items():
        own = [spec for spec in group if _unnamed(spec) not in common]
        if own:
            parts.append(f"## {table or 'All runs'}\n\n{key_table(own)}\n")
    for unnamed, spec in common.items():
        users = ", ".join(name for name, group in tables.items() if unnamed in map(_unnamed, group))
        parts.append(f"## Several methods\n\n{users}:\n\n{key_table([replace(spec, name=f'METHOD.{unnamed[0]}')])}\n")
    return "\n".join(parts)


def _unnamed(spec: KeySpec) -> tuple[str, str, Scalar, str]:
    """Return what a key's row tells without its method's name: key, range, default, meaning."""
    return spec.name.rpartition(".")[2], spec.range, spec.default, spec.doc


def key_table(declared: Sequence[KeySpec]) -> str:
    """Return a Markdown table of keys: type and range, default, meaning."""
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for spec in declared:
        default = f"`{value_to_toml(spec.default)}`"
        rows.append(f"| `{spec.name}` | {_value(spec)} | {default} | {escape(spec.doc)} |")
    return "\n".join(rows)


def _value(spec: KeySpec) -> str:
    """Return the choices of a key, else its type and range."""
    if spec.choices:
        return spec.range
    return f"{spec.type.__name__} {spec.rule or ''}".rstrip()


def escape(text: str) -> str:
    """Escape the bars in a table cell."""
    return text.replace("|", r"\|")


def pyproject_with_defaults(text: str, methods: Mapping[str, type]) -> str:
    """Return pyproject.toml with the run config's defaults filled in."""
    head, rest = text.split(_BEGIN, 1)
    tables = tomli_w.dumps({"tool": {"flwr": {"app": {"config": nest(defaults(methods))}}}})
    return head + tables + _END + rest.split(_END, 1)[1]


def site_table() -> str:
    """Return a Markdown table of the keys of `site.toml`."""
    rows = ["| key | meaning; an absent rule allows everything |", "|---|---|"]
    return "\n".join(rows + [f"| `{spec.name}` | {escape(spec.doc)} |" for spec in specs(Site)])


def pages_with_tables(root: Path) -> dict[Path, str]:
    """Return the pages that have tables of methods or of a site's rules, with these tables, by path."""
    from corolla.flower import abilities

    docs = root / "docs" / "methods"
    pages = {root / "README.md": {"Methods": names_table("`{}`")}}
    pages[root / "docs" / "deployment.md"] = {"What a site decides": site_table()}
    pages[root / "fl_app" / "transport" / "entries.md"] = {"Entries that leave a site": "\n".join(outgoing.table())}
    pages[root / "docs" / "flower-app.md"] = {"Methods": abilities.table()}
    pages[docs / "index.md"] = {"Methods": names_table("[{0}]({0}.md)"), "Side by side": methods_table()}
    pages[docs / "index.md"]["Cited, and not here"] = absent_table()
    found = {}
    for path, tables in pages.items():
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            for heading, table in tables.items():
                text = with_table(text, heading, table)
            found[path] = text
    return found


def with_table(text: str, heading: str, table: str) -> str:
    """Return a page with another first table below a heading. Raises ValueError if there is none."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(?:.*?\n)??\n(?=\|)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"no table below {heading!r}")
    after = itertools.dropwhile(lambda line: line.startswith("|"), text[found.end() :].splitlines(keepends=True))
    return f"{text[: found.end()]}{table}\n{''.join(after)}"


def write(root: Path, methods: Mapping[str, type]) -> None:
    """Update these files under a clone's root. An unchanged file keeps its modification time, which `make` uses.

    Raises UserError for a directory that is not a clone of Corolla.
    """
    pyproject, page = root / "pyproject.toml", root / "docs" / "config.md"
    text = pyproject.read_text(encoding="utf-8") if pyproject.is_file() else ""
    if _BEGIN not in text or not page.parent.is_dir():
        raise UserError(
            key="ROOT",
            rule=f"must be a clone of Corolla, with docs/ and Corolla's pyproject.toml, got {root.resolve()}",
        )
    pages = {page: config_page(methods), pyproject: pyproject_with_defaults(text, methods)} | pages_with_tables(root)
    for path, text in pages.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
