"""The reference that is generated from the declared keys: docs/config.md and the defaults in pyproject.toml."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import tomli_w

from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.keys import KeySpec, Scalar, specs
from fl_app.toml import nest, value_to_toml

_INTRO = """# Run configuration

Every key of a run, as `corolla run --set key=value` and Flower's `--run-config` take it. Values have the type shown; `0`
and `""` mean "not set" where the text says so. A method's own parameters stand in its table. This page is written by
`make docs` from the declarations in the code; a test keeps the two equal.
"""
_SAME_RUN = """How a run runs and where its files lie does not change what comes out:
{running}.
Runs that differ in nothing else are the same to a sweep. A run may be resumed with other values of these, and with more rounds
({extending}). It keeps its number of rounds if one of these keys, which depend on it, is in use: {spanning}.
"""
_BEGIN, _END = "[tool.flwr.app.config]\n", "\n[tool.ruff]"


def all_specs(methods: Mapping[str, type]) -> dict[str, list[KeySpec]]:
    """Declared keys by table; "" is the top level."""
    return {"": specs(RunConfig)} | {name: specs(cls, name) for name, cls in methods.items()}


def defaults(methods: Mapping[str, type]) -> dict[str, Scalar]:
    """Return the default of every key, flat."""
    return {spec.name: spec.default for group in all_specs(methods).values() for spec in group}


def config_page(methods: Mapping[str, type]) -> str:
    """Return docs/config.md."""
    declared = [spec for group in all_specs(methods).values() for spec in group]
    running = ", ".join(f"`{spec.name}`" for spec in declared if not spec.tells_runs_apart)
    extending = ", ".join(f"`{spec.name}`" for spec in declared if spec.extends)
    spanning = ", ".join(f"`{spec.name}`" for spec in declared if spec.spans_run)
    parts = [_INTRO, _SAME_RUN.format(running=running, extending=extending, spanning=spanning)]
    for table, group in all_specs(methods).items():
        if not group:
            continue
        parts.append(f"## {table or 'All runs'}\n\n| key | type | range | default | meaning |\n|---|---|---|---|---|")
        for spec in group:
            name, value = spec.type.__name__, f"`{value_to_toml(spec.default)}`"
            parts.append(f"| `{spec.name}` | {name} | {spec.range} | {value} | {escape(spec.doc)} |")
        parts.append("")
    return "\n".join(parts)


def escape(text: str) -> str:
    """Keep a table cell's bars from ending it."""
    return text.replace("|", r"\|")


def pyproject_with_defaults(text: str, methods: Mapping[str, type]) -> str:
    """Return pyproject.toml with the run config's defaults filled in."""
    head, rest = text.split(_BEGIN, 1)
    tables = tomli_w.dumps({"tool": {"flwr": {"app": {"config": nest(defaults(methods))}}}})
    return head + tables + _END + rest.split(_END, 1)[1]


def write(root: Path, methods: Mapping[str, type]) -> None:
    """Bring both files under a clone's root up to date; one that is keeps its time, by which `make` decides what to do.

    Raises UserError for a directory that is no clone of Corolla.
    """
    pyproject, page = root / "pyproject.toml", root / "docs" / "config.md"
    text = pyproject.read_text(encoding="utf-8") if pyproject.is_file() else ""
    if _BEGIN not in text or not page.parent.is_dir():
        raise UserError(
            f"ROOT: must be a clone of Corolla, with docs/ and Corolla's pyproject.toml, got {root.resolve()}"
        )
    pages = {page: config_page(methods), pyproject: pyproject_with_defaults(text, methods)}
    for path, text in pages.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
