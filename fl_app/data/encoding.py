"""The encoding of a table's column as features.

It is stored as JSON, so that new rows are encoded as the training rows were.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

# digits of a hash that tell tokenizers apart
_DIGITS = 12
KINDS = NUMBER, BOOLEAN, DATE, WORDS, TEXT = "number", "boolean", "date", "words", "text"


@dataclass(frozen=True)
class Encoding:
    """One column's encoding; fl_app/data/columns.py makes and applies it.

    column: its name. kind: NUMBER, BOOLEAN (0 and 1) and DATE (days since 1970-01-01) give one feature. WORDS gives a
    feature of 0 and 1 for each of `words`, in their order; all are 0 where a word is missing. fill: the value for a
    missing number. With it, a second feature is 1 where a number is missing, 0 elsewhere. None: no number may be
    missing. own_fill: whether `fill` is a site's own median, which never leaves the site. Elsewhere `fill` is then
    None, but the features are the same.

    TEXT gives one feature of `length` token ids. tokenizer: the content of a tokenizer.json that makes them; "": they are
    the numbers of `words`, by the rules of fl_app/data/text.py. padding: the id after a text's end. The feature's name has a
    hash of these, because one id means different words by different tokenizers.
    """

    column: str
    kind: str
    words: tuple[str, ...] = ()
    fill: float | None = None
    own_fill: bool = False
    tokenizer: str = ""
    length: int = 0
    padding: int = 0

    @property
    def names(self) -> list[str]:
        """Names of the column's features, in order."""
        if self.kind == WORDS:
            return [f"{self.column}={word}" for word in self.words]
        if self.kind == TEXT:
            return [f"{self.column} (tokens {_hash(self.tokenizer, self.words, self.length, self.padding)})"]
        has_indicator = self.fill is not None or self.own_fill
        return [self.column, f"{self.column} missing"] if has_indicator else [self.column]

    def of_features(self, names: Sequence[str]) -> Self:
        """Return the encoding with those of its words alone whose features are among `names`, in their order."""
        if self.kind != WORDS:
            return self
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
        named = (found.column, found.tokenizer, *found.words) if isinstance(found.words, tuple) else (None,)
        texts = all(isinstance(text, str) for text in named)
        fills = found.fill is None or (type(found.fill) in (int, float) and math.isfinite(found.fill))
        counts = all(type(count) is int and count >= 0 for count in (found.length, found.padding))
        known = found.kind in KINDS and (found.kind == TEXT) == (found.length > 0)
        if not texts or not fills or not counts or not known or type(found.own_fill) is not bool:
            raise ValueError(f"no column has the encoding {fields!r:.200}")
        return found


@functools.lru_cache(maxsize=8)
def _hash(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:_DIGITS]


def of_features(encodings: Iterable[Encoding], names: Sequence[str]) -> tuple[Encoding, ...]:
    """Return the encodings of the columns that have these features, in the features' order."""
    kept = [each.of_features(names) for each in encodings if set(each.names) & set(names)]
    return tuple(sorted(kept, key=lambda each: names.index(each.names[0])))
