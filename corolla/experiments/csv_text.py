"""Tables as CSV, for people who open them in a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

# with these a spreadsheet's formula begins
_FORMULA = ("=", "+", "-", "@", "\t")


def csv_text(lines: Iterable[Sequence[object]]) -> str:
    """Return lines of cells as CSV. A text that would be a formula gets an apostrophe before it: clients wrote some."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_cell(value) for value in line] for line in lines)
    return text.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, str):
        # csv leaves it without quotes, and readers end a row there
        value = value.replace("\r", "")
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value
