"""Which versions a cluster may have: the same on all hosts, and no Flower whose SuperLink opens the control API to the nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from fl_app.errors import UserError

NEWEST = (1, 39)  # of Flower; docs/deployment.md says why, and how to go on


def compare(versions: Mapping[str, Mapping[str, str]], say: Callable[[str], None]) -> None:
    """Compare the packages' versions by host. Raises UserError unless Corolla and Flower are the same, and one we may start."""
    reference_host, reference = next(iter(versions.items()))
    for host, found in versions.items():
        for package, version in found.items():
            if version == reference[package]:
                continue
            what = f"{package} is {version} on {host} and {reference[package]} on {reference_host}"
            if package != "torch":
                raise UserError(f"{what}; install the same version on all hosts")
            say(f"note: {what}; bits may differ from one client to the next")
    refuse_newer(reference_host, reference["flwr"])


def refuse_newer(host: str, flwr: str) -> None:
    """Raise UserError if a SuperLink of this Flower would take runs from everybody who reaches the fleet port."""
    found = re.match(r"(\d+)\.(\d+)", flwr)
    if found and (int(found[1]), int(found[2])) > NEWEST:
        pinned = ".".join(map(str, NEWEST))
        raise UserError(
            f"{host}: flwr {flwr} is newer than {pinned}: from 1.40 on a SuperLink has one port for SuperNodes and for runs, "
            "without a login, and whoever reaches it could run code on every node; "
            f"`pip install 'flwr[simulation]=={pinned}.*'` there (docs/deployment.md, \"Newer Flower\")"
        )
