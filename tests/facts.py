"""Errors and texts by what they are about: names, numbers and the words that tell one rule from another."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

import pytest

from fl_app.errors import UserError

_ANY = object()


def mentions(text: str | Iterable[object], *facts: object) -> bool:
    """Return whether one line has all facts, in this order. text: lines, or a text of lines."""
    lines = text.splitlines() if isinstance(text, str) else [str(line) for line in text]
    pattern = re.compile(".*".join(re.escape(_words(fact)) for fact in facts))
    return any(pattern.search(_words(line)) for line in lines)


def _words(text: object) -> str:
    return " ".join(str(text).split())


def each_mentions(lines: Iterable[object], *facts: tuple[object, ...]) -> bool:
    """Return whether there are as many lines as tuples of facts, and each line has its facts, in this order."""
    found = [str(line) for line in lines]
    return len(found) == len(facts) and all(mentions([line], *of) for line, of in zip(found, facts, strict=True))


@contextmanager
def rejected(
    kind: type[BaseException], key: object, *rule: object, value: Any = _ANY
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error of this kind, key, rule and value.

    key: the error's, or the name of the file that is the error's key; "" for errors without one; None for any.
    rule: what the error's rule has, in this order. value: the error's, if it is compared.
    """
    with pytest.raises(kind) as info:
        yield info
    found = getattr(info.value, "problems", ()) or (info.value,)
    assert any(_is_about(error, key if key is None else str(key), rule, value) for error in found), [
        (str(e), vars(e)) for e in found
    ]


def _is_about(error: BaseException, key: str | None, rule: tuple[object, ...], value: Any) -> bool:
    own = error.key if isinstance(error, UserError) else ""
    return (
        key in (None, own, PurePath(own).name)
        and mentions([str(error).removeprefix(f"{own}: ")], *rule)
        and (value is _ANY or getattr(error, "value", None) == value)
    )
