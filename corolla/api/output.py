"""Output that never ends a run: what an encoding cannot show is replaced, and what cannot be written is dropped."""

from __future__ import annotations

import codecs
import contextlib
from typing import Any

HANDLER = "corolla-replace"
# signs in Corolla's own lines, in ASCII
_SIGNS = {"±": "+-", "–": "-", "—": "-", "…": "...", "×": "x", "→": "->", "≤": "<=", "≥": ">=", "▸": ">"}


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_SIGNS.get(sign, "?") for sign in text), error.end


codecs.register_error(HANDLER, _replaced)


class Lenient:
    """A text stream that stands before another one. Writing to it raises neither UnicodeError nor OSError."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind

    def __getattr__(self, name: str) -> Any:
        """Return the stream's own attribute."""
        return getattr(self._behind, name)

    def write(self, text: str) -> int:
        """Write a text, with what the stream's encoding cannot show replaced. Return its length."""
        encoding = self._behind.encoding or "utf-8"
        # a reader that has ended, a full disk
        with contextlib.suppress(OSError):
            self._behind.write(text.encode(encoding, HANDLER).decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        with contextlib.suppress(OSError):
            self._behind.flush()
