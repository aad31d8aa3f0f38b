"""Fonts for names in any script: each picture uses the first installed fonts that have its letters.

matplotlib's own font has Latin, Greek, Cyrillic and a few more scripts. Missing letters are searched in this machine's
fonts. A name with letters that no font has is not drawn: pictures show its number.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.text import Text

DEFAULT = "sans-serif"
PLACEHOLDERS = "Last Resort"
"""Prefix of fonts that draw a box for every letter."""
UNKNOWN = "?"
"""Replaces a letter that no font has, in texts without a number."""


def families(text: str) -> list[str]:
    """Return the fonts to draw a text with: DEFAULT, then as few others as have its remaining letters."""
    found = [DEFAULT]
    for letter in sorted(_lacking(text)):
        if not any(ord(letter) in _letters(family) for family in found):
            found += [family for family in [_with(letter)] if family]
    return found


def drawable(text: str) -> bool:
    """Return whether installed fonts have all letters of a text."""
    return not _unknown(text)


def texts(figure: Figure) -> Iterable[Text]:
    """Yield the texts of a figure, including tick labels, which matplotlib creates on request."""
    for axes in figure.axes:
        axes.get_xticklabels()
        axes.get_yticklabels()
    for found in figure.findobj(Text):
        assert isinstance(found, Text)
        yield found


def replace_unknown(figure: Figure) -> None:
    """Replace letters that no font has in a figure's texts by UNKNOWN."""
    for text in texts(figure):
        if unknown := _unknown(text.get_text()):
            text.set_text("".join(UNKNOWN if letter in unknown else letter for letter in text.get_text()))


def _lacking(text: str) -> set[str]:
    return {letter for letter in text if ord(letter) >= 0x20 and ord(letter) not in _letters(DEFAULT)}


def _unknown(text: str) -> set[str]:
    return {letter for letter in _lacking(text) if not _with(letter)}


@lru_cache(maxsize=4096)
def _with(letter: str) -> str:
    """Return the first family, by name, that has a letter; empty if none has."""
    return next((name for name in sorted(_upright()) if ord(letter) in _letters(name)), "")


@lru_cache(maxsize=1)
def _upright() -> dict[str, str]:
    """Return the files of installed fonts that are neither slanted nor bold, by family."""
    of_weight = {400, "normal", "regular", "book"}
    return {
        font.name: font.fname
        for font in fontManager.ttflist
        if font.style == "normal" and font.weight in of_weight and not font.name.startswith(PLACEHOLDERS)
    }


@lru_cache(maxsize=1024)
def _letters(family: str) -> frozenset[int]:
    """Return the letters of a family; none if its file cannot be read."""
    path = findfont(FontProperties(family=[family])) if family == DEFAULT else _upright()[family]
    try:
        return frozenset(get_font(path).get_charmap())
    except (OSError, RuntimeError, ValueError):
        return frozenset()
