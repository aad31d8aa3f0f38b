"""A deployment's trail: a line for each message to a site and its answer, beside what the site's own audit says of both.

`trail.jsonl` in the run folder names the round, the client and its name, Flower's run, node and message ids, the name under
which the key is registered, and its fingerprint. Lines are only added: a resumed run adds those of its rounds again.
`corolla audit join` compares them with the sites' audits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_app.errors import MALFORMED
from fl_app.files import explain_full_disk, opener
from fl_app.log_format import utc

FILE = "trail.jsonl"


def add(folder: Path, entry: Mapping[str, Any]) -> None:
    """Add an entry, with the time."""
    text = json.dumps({"time": utc(time.time()), **entry}) + "\n"
    with explain_full_disk("output-dir", folder), open(folder / FILE, "a", encoding="utf-8", opener=opener) as file:
        file.write(text)


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the entries; [] without the file. Half a line of a crash is left out."""
    found: list[dict[str, Any]] = []
    path = folder / FILE
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            found.append(dict(json.loads(line)))
        except MALFORMED:
            continue
    return found
