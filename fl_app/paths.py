"""Paths in a run's configuration. The keys that name one are declared so (`path` of `fl_app.keys.key`); no other does."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_app.config import RunConfig
from fl_app.keys import KeySpec, specs
from fl_app.sources import path_in


@functools.cache
def path_keys() -> Mapping[str, KeySpec]:
    """Return the keys whose value names a file or a directory."""
    return {spec.name: spec for spec in specs(RunConfig) if spec.path}


def path_of(key: str, value: object) -> str:
    """Return the path in a key's value, "" if it has none."""
    if not isinstance(value, str) or (spec := path_keys().get(key)) is None or spec.path is None:
        return ""
    return path_in(key, value) if spec.path.after_word else value


def anchored(config: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return a flat config with absolute paths. directory: the base of relative paths; ~ is the user's home."""
    out = dict(config)
    for key, value in config.items():
        if path := path_of(key, value):
            out[key] = value.removesuffix(path) + str((directory / Path(path).expanduser()).resolve())
    return out
