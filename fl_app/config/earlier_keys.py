"""Earlier names of run-config keys and of their values, accepted for one release."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("corolla")

KEYS = {"robust-liars": "byzantine-ratio", "private-absent": "private-left-out"}
"""Current name of a key, by its earlier name."""
VALUES: Mapping[str, Mapping[str, str]] = {
    "discover": {"drawn": "sampled"},
    "private-left-out": {"alone": "client", "company": "group"},
}
"""Current values of a key by their earlier ones, by the key's current name."""


def current(given: Mapping[str, Any], warn: bool = False) -> dict[str, Any]:
    """Return a flat config with the current names of keys and values. A value may be a list of values, or a site's
    bound.

    If a key is given under both names, both stay, and the parser refuses the earlier one. warn: log a line for each
    earlier name of a key, once per process.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        key = KEYS.get(name, name)
        if key != name and key in given:
            key = name
        elif key != name and warn:
            _warn(name)
        found[key] = current_value(key, value)
    return found


def current_value(key: str, value: Any) -> Any:
    """Return a value of a key under its current name; in a list or a site's bound, each value."""
    if isinstance(value, dict):
        return {word: current_value(key, one) for word, one in value.items()}
    if isinstance(value, list):
        return [current_value(key, one) for one in value]
    return VALUES.get(key, {}).get(value, value) if isinstance(value, str) else value


@functools.cache
def _warn(name: str) -> None:
    log.warning("%s: the earlier name of the key %s, valid for one release", name, KEYS[name])
