"""What the hosts of a cluster must agree on before it starts: versions and clocks.

Corolla and Flower are the same on all hosts, and no Flower opens the control API to the nodes. A SuperNode signs every request with
its time, which must be near the SuperLink's: else it is refused and ends, so the clocks are compared before it starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from fl_app.errors import UserError

# The newest Flower that may run; docs/deployment.md says why, and how to go on.
NEWEST = (1, 39)
# seconds a SuperNode's clock may be off: Flower's SYSTEM_TIME_TOLERANCE, and TIMESTAMP_TOLERANCE more
MAX_AHEAD, MAX_BEHIND = 5.0, 305.0
_NOTED_SECONDS = 2.0


def compare_versions(versions: Mapping[str, Mapping[str, str]], say: Callable[[str], None]) -> None:
    """Compare the packages' versions by host. Raises UserError unless Corolla and Flower are the same, and one we may start."""
    reference_host, reference = next(iter(versions.items()))
    for host, installed in versions.items():
        for package, version in installed.items():
            if version == reference[package]:
                continue
            what = f"{package} is {version} on {host} and {reference[package]} on {reference_host}"
            if package != "torch":
                raise UserError(f"{what}; install the same version on all hosts")
            say(f"note: {what}; bits may differ from one client to the next")
    refuse_newer_flower(reference_host, reference["flwr"])


def refuse_newer_flower(host: str, flwr: str) -> None:
    """Raise UserError if a SuperLink of this Flower would take runs from everybody who reaches the fleet port."""
    found = re.match(r"(\d+)\.(\d+)", flwr)
    if found and (int(found[1]), int(found[2])) > NEWEST:
        pinned = ".".join(map(str, NEWEST))
        raise UserError(
            f"{host}: flwr {flwr} is newer than {pinned}: from 1.40 on a SuperLink has one port for SuperNodes and for runs, "
            "without a login, and whoever reaches it could run code on every node; "
            f"`pip install 'flwr[simulation]=={pinned}.*'` there (docs/deployment.md, \"Newer Flower\")"
        )


def compare_clocks(ahead: Mapping[str, float], superlink: str, authenticated: bool) -> list[str]:
    """Return a note for every host whose clock differs noticeably from the SuperLink's.

    ahead: by host, how many seconds its clock is ahead of one and the same clock; the answer's way may lower it, not raise it.
    superlink: the SuperLink's host. authenticated: SuperNodes sign their requests, and the SuperLink checks the time. Raises
    UserError naming the hosts whose SuperNodes it would refuse.
    """
    notes, problems = [], []
    for host, seconds in ahead.items():
        off = seconds - ahead[superlink]
        side = "ahead of" if off > 0 else "behind"
        difference = f"{host}: its clock is {abs(off):.1f} s {side} that of the SuperLink's host ({superlink})"
        if authenticated and not -MAX_BEHIND < off < MAX_AHEAD:
            problems.append(difference)
        elif abs(off) > _NOTED_SECONDS:
            notes.append(f"note: {difference}")
    if problems:
        rule = f"the SuperLink refuses a SuperNode more than {MAX_AHEAD:g} s ahead or {MAX_BEHIND:g} s behind, and that ends it"
        raise UserError("\n".join([*problems, f"{rule}; let both hosts set their clocks (`timedatectl set-ntp true`)"]))
    return notes
