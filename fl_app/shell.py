"""Words of shell scripts that other people run: quoted, except for the variables that a script sets itself."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping

# No path, name or setting contains this character.
MARK = "\x01"


def variable(name: str) -> str:
    """Return the placeholder, inside a word, for the value of a script's own variable."""
    return f"{MARK}{name}{MARK}"


def word(text: str) -> str:
    """Quote a word."""
    pieces = re.split(f"{MARK}(\\w+){MARK}", text)
    if len(pieces) == 1:
        return shlex.quote(text)
    return "".join(f'"${{{piece}}}"' if k % 2 else shlex.quote(piece) * bool(piece) for k, piece in enumerate(pieces))


def line(words: Iterable[str], environment: Mapping[str, str] | None = None) -> str:
    """Quote a command. environment: variables to start it with, beside those of the script."""
    given = [f"{name}={word(value)}" for name, value in (environment or {}).items()]
    return " ".join([*(["env", *given] if given else []), *map(word, words)])
