"""The keys that a cluster has revoked: a list beside its keys, so that none of them is admitted again."""

from __future__ import annotations

from pathlib import Path

from fl_app.files import publish_text
from fl_app.transport.identity import fingerprint as fingerprint

FILE = "revoked.txt"


def noted(directory: Path) -> frozenset[str]:
    """Return the fingerprints of the keys that a cluster has revoked. directory: of its keys."""
    path = directory / FILE
    return frozenset(path.read_text().split()) if path.is_file() else frozenset()


def note(directory: Path, found: str) -> None:
    """Add a fingerprint to the list."""
    if found not in (known := noted(directory)):
        publish_text(directory / FILE, "".join(f"{line}\n" for line in sorted({*known, found})), 0o644)
