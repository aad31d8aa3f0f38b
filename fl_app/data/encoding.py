"""The encoding of a table's column as features.

It is stored as JSON, so that new rows are encoded as the training rows were.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

KINDS = NUMBER, BOOLEAN, DATE, WORDS = "number", "boolean", "date", "words"


@dataclass(frozen=True)
class Encoding:
    """One column's encoding; fl_app/data/columns.py makes and applies it.

    column: its name. kind: NUMBER, BOOLEAN (0 and 1) and DATE (days since 1970-01-01) give one feature. WORDS gives a
    feature of 0 and 1 for each of `words`, in their order; all are 0 where a word is missing. fill: the value for a
    missing number. With it, a second feature is 1 where a number is missing, 0 elsewhere. None: no number may be
    missing. own_fill: whether `fill` is a site's own median, which never leaves the site. Elsewhere `fill` is then
    None, but the features are the same.
    """

    column: str
    kind: str
    words: tuple[str, ...] = ()
    fill: float | None = None
    own_fill: bool = False

    @property
    def names(self) -> list[str]:
        """Names of the column's features, in order."""
        if self.kind == WORDS:
            return [f"{self.column}={word}" for word in self.words]
        has_indicator = self.fill is not None or self.own_fill
        return [self.column, f"{self.column} missing"] if has_indicator else [self.column]

    def of_features(self, names: Sequence[str]) -> Self:
        """Return the encoding with those of its words alone whose features are among `names`, in their order."""
        words = {f"{self.column}={word}": word for word in self.words}
        return dataclasses.replace(self, words=tuple(words[name] for name in names if name in words))

    @property
    def as_told(self) -> Self:
        """The encoding without a site's own median, which other parties must not see."""
        return dataclasses.replace(self, fill=None) if self.own_fill else self

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Return the encoding from the dict of `dataclasses.asdict`, after JSON turned its tuples into lists.

        Raises TypeError, ValueError or AttributeError for anything else.
        """
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        found = cls(**plain)
        texts = isinstance(found.words, tuple) and all(isinstance(text, str) for text in (found.column, *found.words))
        fills = found.fill is None or (type(found.fill) in (int, float) and math.isfinite(found.fill))
        if not texts or not fills or found.kind not in KINDS or type(found.own_fill) is not bool:
            raise ValueError(f"no column has the encoding {fields!r:.200}")
        return found
