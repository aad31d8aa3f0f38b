"""Reference pages generated from declarations in the code (`corolla reference`).

These are docs/config.md, the defaults in pyproject.toml, the tables of methods in README.md and docs/methods/, the table of a
site's rules in docs/deployment.md, the table of all that leaves a site in fl_app/transport/entries.md, and the methods
for apps of others in docs/flower-app.md.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
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

All keys of a run, for `corolla run --set key=value` and Flower's `--run-config`. The tables show the type of each value.
`0` and `""` mean "not set" where the text says so. A method's own parameters are in its table. `make docs` writes this page
from the declarations in the code, and a test keeps both equal.
"""
_SAME_RUN = """These keys set how a run executes and where its files are. They do not change its results:
{running}.
To a sweep, runs that differ only in these keys are the same run. A run can be resumed with other values of them, and with more
rounds ({extending}). Its number of rounds is fixed if one of the following keys is in use, because they depend on it: {spanning}.
"""
_EARLIER = """These earlier names of keys are valid for one release: {keys}. So are these values: {values}.
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
    extending = ", ".join(f"`{spec.name}`" for spec in declared if spec.extends)
    spanning = ", ".join(f"`{spec.name}`" for spec in declared if spec.schedule_dependent)
    keys = ", ".join(f"`{before}` (now `{now}`)" for before, now in earlier_keys.KEYS.items())
    values = ", ".join(
        f"`{key} = {before}` (now `{now}`)" for key, one in earlier_keys.VALUES.items() for before, now in one.items()
    )
    same = _SAME_RUN.format(running=running, extending=extending, spanning=spanning)
    parts = [_INTRO, same, _EARLIER.format(keys=keys, values=values)]
    for table, group in all_specs(methods).items():
        if not group:
            continue
        parts.append(f"## {table or 'All runs'}\n\n{key_table(group)}\n")
    return "\n".join(parts)


def key_table(declared: Sequence[KeySpec]) -> str:
    """Return a Markdown table of keys: type, range, default, meaning."""
    rows = ["| key | type | range | default | meaning |", "|---|---|---|---|---|"]
    for spec in declared:
        name, value = spec.type.__name__, f"`{value_to_toml(spec.default)}`"
        rows.append(f"| `{spec.name}` | {name} | {spec.range} | {value} | {escape(spec.doc)} |")
    return "\n".join(rows)


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
    rest = text[found.end() :].splitlines(keepends=True)
    after = itertools.dropwhile(lambda line: line.startswith("|"), rest)
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
