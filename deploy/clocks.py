"""Clocks of a cluster's hosts: a SuperNode signs every request with its time, which must be near the SuperLink's.

Else it is refused, and ends as if it had been told to; so the clocks are compared before it is started.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from fl_app.errors import UserError

AHEAD, BEHIND = 5.0, 305.0  # seconds; Flower's SYSTEM_TIME_TOLERANCE, and TIMESTAMP_TOLERANCE more
_WORTH_SAYING = 2.0


def now() -> float:
    """Read this host's clock: seconds since 1970."""
    return time.time()


def compare(ahead: Mapping[str, float], superlink: str, refused: bool) -> list[str]:
    """Return what is worth saying about hosts' clocks.

    ahead: by host, how many seconds its clock is ahead of one and the same clock; an answer's way may take from it, never add.
    superlink: the SuperLink's host. refused: SuperNodes authenticate, so the SuperLink looks at the time. Raises UserError naming
    the hosts whose SuperNodes would be.
    """
    notes, problems = [], []
    for host, seconds in ahead.items():
        off = seconds - ahead[superlink]
        side = "ahead of" if off > 0 else "behind"
        words = f"{host}: its clock is {abs(off):.1f} s {side} that of the SuperLink's host ({superlink})"
        if refused and not -BEHIND < off < AHEAD:
            problems.append(words)
        elif abs(off) > _WORTH_SAYING:
            notes.append(f"note: {words}")
    if problems:
        rule = f"the SuperLink refuses a SuperNode more than {AHEAD:g} s ahead or {BEHIND:g} s behind, and that ends it"
        raise UserError("\n".join([*problems, f"{rule}; let both hosts set their clocks (`timedatectl set-ntp true`)"]))
    return notes
