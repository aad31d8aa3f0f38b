"""docs/security.md's table of promises: each has a door and a test, and no page names a test outside of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = ("security", "privacy", "deployment", "operations")
TABLE = "| promise | door | test |"


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def rows() -> list[tuple[str, str, str]]:
    """Return promise, door and tests of each row."""
    lines = page("security").partition(TABLE)[2].splitlines()[2:]
    found = [line.strip("|").split(" | ") for line in lines[: lines.index("")]]
    assert len(found) > 20 and all(len(cells) == 3 for cells in found)
    return [(promise.strip(), door, tests) for promise, door, tests in found]


@pytest.mark.parametrize("promise, door, tests", rows(), ids=lambda text: text[:60])
def test_every_promise_has_its_door_and_its_test(promise: str, door: str, tests: str) -> None:
    for path in re.findall(r"`((?:deploy|fl_app|client_app|corolla|strategies)/[\w/.]+)`", door):
        assert (ROOT / path).exists(), path
    named = re.findall(r"`([^`]*)`", tests)
    assert named
    file = ""
    for name in named:
        path, _, test = name.partition("::")
        file = path or file
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {test or 'test_'}" in text, name


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_no_test_that_the_table_has_not(name: str) -> None:
    # attacks by rounds have a table of their own, which is made of their catalogue
    text = page(name).partition("<!-- attacks:")[0] + page(name).partition("## Tests")[2]
    assert "| claim | test |" not in text
    table = " ".join(tests for _, _, tests in rows())
    found = set(re.findall(r"\btest_\w+\.py", text))
    assert not {file for file in found if file not in table}
