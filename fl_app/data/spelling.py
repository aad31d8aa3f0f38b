"""Names that look alike to a person and differ to a program: classes, clients, columns, words of a category."""

from __future__ import annotations

import contextlib
import unicodedata
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation

from fl_app.errors import listed

# letters of other alphabets that have the shape of a Latin one, in both cases
_CYRILLIC = "АВЕЅІЈКМНОРСТУХаеѕіјорсухԁһԛԝ", "ABESIJKMHOPCTYXaesijopcyxdhqw"
_GREEK = "ΑΒΕΖΗΙΚΜΝΟΡΤΥΧονϲϳ", "ABEZHIKMNOPTYXovcj"
_QUOTES = "\u2018\u2019\u02bc\u02b9\u2032\u00b4`\u201c\u201d\u2033", "'''''''\"\"\""
_SHAPES = str.maketrans(*map("".join, zip(_CYRILLIC, _GREEK, _QUOTES, strict=True)))
_DASHES = "\u2212\u2043\u02d7"  # beside Unicode's category of dashes


def spellings(name: str, words: Iterable[str], kind: str) -> list[str]:
    """Return a line naming words that look alike; none if no words do.

    Such words differ only in case, blanks, a number's notation, invisible signs, the form of dashes and quotes, or in
    the code of letters that have one shape. kind: the kind of thing that each spelling counts as: "class", "client",
    "word" or "column".
    """
    alike: dict[Decimal | str, list[str]] = {}
    for text in sorted(set(words)):
        alike.setdefault(_shape(text), []).append(text)
    found = [_told(group) for group in alike.values() if len(group) > 1]
    return (
        [f"{name}: each spelling counts as a separate {kind}: {listed(found)}; use one spelling for one meaning"]
        if found
        else []
    )


def _told(group: list[str]) -> str:
    # codes in place of letters where a person would see the same text twice
    shown = repr if len({text.casefold() for text in group}) == 1 else ascii
    return " and ".join(map(shown, group))


def _shape(text: str) -> Decimal | str:
    """Return the name as a person sees it: a number, or letters without case, blanks in excess and invisible signs."""
    # Decimal is exact: float would take long numbers for one
    with contextlib.suppress(InvalidOperation):
        if (number := Decimal(text)).is_finite():
            return number
    seen = "".join(
        "-" if unicodedata.category(sign) == "Pd" or sign in _DASHES else sign
        # NFKC after translate: it would change some quotes
        for sign in unicodedata.normalize("NFKC", text.translate(_SHAPES)).translate(_SHAPES)
        if unicodedata.category(sign) != "Cf" and not "\ufe00" <= sign <= "\ufe0f"
    )
    return unicodedata.normalize("NFKC", " ".join(seen.split()).casefold())
