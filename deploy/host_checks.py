"""Checks that the hosts of a cluster agree before it starts: versions and clocks. And a check of free disk space.

All hosts must have the same Corolla and Flower, and a Flower that does not open the control API to the nodes. A
SuperNode signs every request with its time. If that is too far from the SuperLink's time, the SuperNode is refused and
ends. So clocks are compared before the start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from fl_app.errors import DeploymentError, size

# The newest Flower that may run; docs/deployment.md gives the reason, and the way to a newer one.
NEWEST = (1, 42)
# seconds that a SuperNode's clock may be off: Flower's SYSTEM_TIME_TOLERANCE, and behind also TIMESTAMP_TOLERANCE
MAX_AHEAD, MAX_BEHIND = 5.0, 305.0
_NOTED_SECONDS = 2.0
# Bytes free under the SuperLink's database: SQLite's own files need the least, most runs' rounds need less than the ample.
LEAST, AMPLE = 16e6, 1e9


def compare_versions(versions: Mapping[str, Mapping[str, str]], say: Callable[[str], None]) -> None:
    """Compare the packages' versions by host; `say` gets a note for each torch that differs.

    Raises UserError unless Corolla and Flower are the same everywhere, and Flower is no newer than NEWEST.
    """
    reference_host, reference = next(iter(versions.items()))
    for host, installed in versions.items():
        for package, version in installed.items():
            if version == reference[package]:
                continue
            what = f"{package} is {version} on {host} and {reference[package]} on {reference_host}"
            if package != "torch":
                raise DeploymentError(f"{what}; install the same version on all hosts")
            say(f"note: {what}; bits may differ from one client to the next")
    refuse_newer_flower(reference_host, reference["flwr"])


def refuse_newer_flower(host: str, flwr: str) -> None:
    """Raise UserError for a Flower whose SuperLink may take runs from anyone that reaches the fleet port."""
    found = re.match(r"(\d+)\.(\d+)", flwr)
    if found and (int(found[1]), int(found[2])) > NEWEST:
        newest = ".".join(map(str, NEWEST))
        raise DeploymentError(
            key=host,
            rule=f"flwr {flwr} is newer than {newest}, the newest whose fleet port deploy.superlink was "
            "tried to guard: without the guard anyone that reaches the port can run code on every "
            f"node; `pip install 'flwr[simulation]=={newest}.*'` there (docs/deployment.md, \"Newer "
            'Flower")',
        )


def note_on_space(host: str, database: str, free: float | None) -> str:
    """Return a note if little space is free under the SuperLink's database, "" if there is ample space.

    free: bytes; None: unknown, or no database on a disk. A run compares the space with the bytes of its rounds. Raises
    UserError if not even an empty database fits.
    """
    if free is None or free >= AMPLE:
        return ""
    found = f"{host}: superlink.database: {database}: {size(free)} are free"
    if free < LEAST:
        raise DeploymentError(f"{found}, and the database needs at least {size(LEAST)}; free space there")
    return f"note: {found}; a round needs the bytes of all its downloads and uploads there"


def compare_clocks(ahead: Mapping[str, float], superlink: str, authenticated: bool) -> list[str]:
    """Return a note for every host with a clock noticeably different from the SuperLink's.

    ahead: by host, seconds that its clock is ahead of one common clock; the answer's travel time may lower it, not
    raise it. superlink: the SuperLink's host. authenticated: SuperNodes sign their requests, and the SuperLink checks
    the time. Raises UserError that names the hosts with SuperNodes it would refuse.
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
        rule = (
            f"the SuperLink refuses a SuperNode more than {MAX_AHEAD:g} s ahead or {MAX_BEHIND:g} s behind, and it ends"
        )
        raise DeploymentError("\n".join([*problems, f"{rule}; synchronize both clocks (`timedatectl set-ntp true`)"]))
    return notes
