"""`python -m tests.hostile.table`: write what became of all attacks into attacks.md, a page of the site.

The lists have the results of `make test-hostile` (hostile.json). For the table, this runs the tests that it names.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

from tests.hostile import results
from tests.hostile.catalogue import ATTACKS, BESIDE, Attack

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).with_name("attacks.md")
HELD = {
    "named": "dropped by name, the round goes on",
    "kept": "without effect, the reply counts",
    "refused": "left out by name, the run goes on",
}
WHERE = {
    "upload": "An upload",
    "evaluation": "An evaluation",
    "start": "A node at the start",
    "join": "A node during the run",
}


def checked() -> str:
    """Return the page. Raises SystemExit if an attack was not played, or not contained."""
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
    return page()


def page() -> str:
    """Return the page of a catalogue that is contained."""
    lines = [
        "# Attacks",
        "",
        "`make test-hostile` plays the attacks of `tests/hostile/catalogue.py` over real processes. Honest clients' results",
        "equal, bit for bit, those of a run without the attack. `python -m tests.hostile.table` makes this page.",
        "",
        f"{len(ATTACKS)} attacks on a run, all contained:",
    ]
    for (where, holds), attacks in groupby(sorted(ATTACKS, key=_place), _place):
        held = list(HELD)[holds]
        lines += [
            "",
            f"**{list(WHERE.values())[where]}: {HELD[held]}**",
            "",
            *(f"- {attack.does}" for attack in attacks),
        ]
    lines += [
        "",
        f"{len(BESIDE)} more, each played by a test of its own (`BESIDE` in the catalogue), which passes:",
        "",
        "| attack | where | what becomes of it | test |",
        "|---|---|---|---|",
        *(f"| {one.does} | {one.where} | {one.becomes} | {_named(one.test)} |" for one in BESIDE),
        "",
    ]
    return "\n".join(lines)


def _place(attack: Attack) -> tuple[int, int]:
    """Return where an attack's list is."""
    return list(WHERE).index(attack.where), list(HELD).index(attack.holds)


def _named(tests: str) -> str:
    """Return where tests are, as Markdown."""
    return ", ".join(f"`{path}`" for path in dict.fromkeys(test.partition("::")[0] for test in tests.split()))


def main() -> int:
    """Write the page."""
    PAGE.write_text(checked(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
