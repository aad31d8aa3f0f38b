"""docs/month.md as it stands: each command of the page, in its order, by people on machines of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.conftest import wait_for
from tests.e2e.plants import plants_in
from tests.experiments.months import month_of

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "month.md"
PLANTS = ("celle", "verden", "uelzen", "winsen")


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    blocks = re.findall(r"^```\w*\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    ran: list[str] = []
    with plants_in(tmp_path) as plants:
        for k, who in enumerate(PLANTS):
            for number, name in enumerate(("june", "july"), 6):
                month_of(plants.home(who) / f"{name}.csv", k, len(PLANTS), number)
        for block in blocks:
            if named := re.match(r"# (\S+)\n", block):
                plants.write("server", named[1], block)
                continue
            for line in block.splitlines():
                who, command = line.split("$ ", 1)
                if command.endswith(" &"):
                    plants.start(who, command.removesuffix(" &"))
                elif " status " in command:
                    # nodes take a moment
                    wait_for(lambda: _succeeds(plants.run, who, command), 60, every=1)  # noqa: B023
                else:
                    ran.append(plants.run(who, command))
        said = "".join(ran)
        assert "agree on" in said and "july" in said
        plants.run("server", "corolla cluster down lab.yaml")


def _succeeds(run: object, who: str, command: str) -> bool:
    try:
        run(who, command)  # type: ignore[operator]
    except AssertionError:
        return False
    return True
