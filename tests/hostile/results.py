"""What came out of the attacks: a JSON file, to which every test that plays some of them adds."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fl_app.files import lock

FILE = Path(os.environ.get("COROLLA_HOSTILE", Path(__file__).resolve().parents[2] / "hostile.json"))


def read() -> dict[str, dict[str, object]]:
    """Return the results by the attack's name: `contained`, and `said`, what the run said of it."""
    found: dict[str, dict[str, object]] = json.loads(FILE.read_text() or "{}") if FILE.exists() else {}
    return found


def note(name: str, contained: bool, said: str = "") -> None:
    """Add an attack's result."""
    # files of tests run side by side
    with lock(FILE, wait=True):
        FILE.write_text(json.dumps(read() | {name: {"contained": contained, "said": said}}, indent=1) + "\n")
