"""Kinds of failures: a few words for the many causes in `failures` of metrics.jsonl."""

from __future__ import annotations

import re

OTHER = "other"
# the first pattern that is found in a cause decides
_KINDS = {
    "refused": r"refused by its site",
    "late": r"^no reply within ",
    "unavailable": r"^error \d+: .*(Node Unavailable|unavailable)|could not be delivered",
    "ended": r"^error \d+: ",
    "malformed": r"^malformed ",
    "diverged": r"non-finite|diverged",
    "state": r"\bstate\b",
    "memory": r"memory",
    "array": r"^array |^mask |^expected the arrays ",
}
KINDS = (*_KINDS, OTHER)
"""All kinds, in the order in which they are tried."""


def kind(cause: str) -> str:
    """Return the kind of a failure's cause, one of KINDS.

    Clients write parts of causes. So their text cannot name a metric's label, of which there must be few.
    """
    return next((name for name, pattern in _KINDS.items() if re.search(pattern, cause)), OTHER)
