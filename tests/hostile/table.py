"""`python -m tests.hostile.table`: put the results of `make test-hostile` (hostile.json) into the table of docs/security.md."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.hostile import results
from tests.hostile.catalogue import ATTACKS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
BEGIN, END = "<!-- attacks: made by python -m tests.hostile.table -->", "<!-- end of attacks -->"
HELD = {
    "named": "dropped by name, the round goes on",
    "kept": "without effect, the reply counts",
    "refused": "left out by name, the run goes on",
}
WHERE = {"start": "at the start", "join": "during the run"}


def table() -> str:
    """Return the table. Raises SystemExit if an attack was not played, or not contained."""
    found = results.read()
    if missing := [attack.name for attack in ATTACKS if attack.name not in found]:
        raise SystemExit(f"not in {results.FILE}: {', '.join(missing)}; run make test-hostile")
    if broken := [attack.name for attack in ATTACKS if not found[attack.name]["contained"]]:
        raise SystemExit(f"not contained: {', '.join(broken)}")
    return rows()


def rows() -> str:
    """Return the table of a catalogue that is contained."""
    lines = [
        f"| {attack.does} | {WHERE.get(attack.where, attack.where)} | {HELD[attack.holds]} |" for attack in ATTACKS
    ]
    head = [f"{len(ATTACKS)} attacks, all contained:", "", "| attack | where | what becomes of it |", "|---|---|---|"]
    return "\n".join([*head, *lines])


def parts() -> tuple[str, str, str]:
    """Return the page before the table, the table, and the page after it."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    inside, _, after = rest.partition(END)
    return before, inside, after


def main() -> int:
    """Rewrite the page between its marks."""
    before, _, after = parts()
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
