"""`python -m tests.hostile.table`: put what became of all attacks into the tables of docs/security.md.

The first table has the results of `make test-hostile` (hostile.json). For the second, this runs the tests that it names.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.hostile import results
from tests.hostile.catalogue import ATTACKS, BESIDE

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "security.md"
BEGIN, END = "<!-- attacks: made by python -m tests.hostile.table -->", "<!-- end of attacks -->"
HELD = {
    "named": "dropped by name, the round goes on",
    "kept": "without effect, the reply counts",
    "refused": "left out by name, the run goes on",
}
WHERE = {"start": "at the start", "join": "during the run"}


def table() -> str:
    """Return the tables. Raises SystemExit if an attack was not played, or not contained."""
    found = results.read()
    if missing := [attack.name for attack in ATTACKS if attack.name not in found]:
        raise SystemExit(f"not in {results.FILE}: {', '.join(missing)}; run make test-hostile")
    if broken := [attack.name for attack in ATTACKS if not found[attack.name]["contained"]]:
        raise SystemExit(f"not contained: {', '.join(broken)}")
    tests = dict.fromkeys(test for beside in BESIDE for test in beside.test.split())
    # those that need a run of this catalogue get a short one
    environment = os.environ | {"COROLLA_ATTACKS": "error-markup,error-text,evaluation-accuracy"}
    if subprocess.run([sys.executable, "-m", "pytest", "-m", "", *tests], env=environment, cwd=ROOT).returncode:
        raise SystemExit("not contained: the tests above that failed")
    return rows()


def rows() -> str:
    """Return the tables of a catalogue that is contained."""
    lines = [
        f"{len(ATTACKS)} attacks on a run, all contained:",
        "",
        "| attack | where | what becomes of it |",
        "|---|---|---|",
        *(f"| {attack.does} | {WHERE.get(attack.where, attack.where)} | {HELD[attack.holds]} |" for attack in ATTACKS),
        "",
        f"{len(BESIDE)} more, each played by a test of its own (`BESIDE` in the catalogue), which passes:",
        "",
        "| attack | where | what becomes of it | test |",
        "|---|---|---|---|",
        *(f"| {one.does} | {one.where} | {one.becomes} | {_named(one.test)} |" for one in BESIDE),
    ]
    return "\n".join(lines)


def _named(tests: str) -> str:
    """Return where tests are, as Markdown."""
    return ", ".join(f"`{path}`" for path in dict.fromkeys(test.partition("::")[0] for test in tests.split()))


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
