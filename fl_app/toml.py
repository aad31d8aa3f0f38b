"""Flat dotted keys, and the TOML files that have them in tables one level deep."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fl_app.errors import UserError
from fl_app.keys import Scalar


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises UserError if there is none, or it is not TOML."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(key=path, rule=error.strerror) from None
    return parse_toml(content, path)


def parse_toml(content: bytes, path: Path) -> dict[str, Any]:
    """Parse the content of a TOML file. path: its place, for errors. Raises UserError if it is not TOML."""
    try:
        return tomllib.loads(content.decode("utf-8"))
    except (RecursionError, ValueError) as error:
        raise UserError(key=path, rule=f"not valid TOML: {error}") from None


def flatten(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Turn tables into dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {name: value}
    return flat


def nest(flat: Mapping[str, Scalar]) -> dict[str, Any]:
    """Turn dotted keys into tables."""
    tables: dict[str, Any] = {}
    for name, value in flat.items():
        table, _, key = name.rpartition(".")
        (tables.setdefault(table, {}) if table else tables)[key] = value
    return tables


def value_to_toml(value: Scalar) -> str:
    """Return a value as TOML, in the form that `--set` takes: false, 0.5, "words"."""
    return to_toml({"x": value}).strip()[4:]


def to_toml(flat: Mapping[str, Scalar]) -> str:
    """Render dotted keys as TOML, those without a table first."""
    return tomli_w.dumps(nest(flat))
