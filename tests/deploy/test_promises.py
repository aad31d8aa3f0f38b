"""The promises of docs/security.md: each has a door and a test, and no page names a test that no promise has."""

from __future__ import annotations

import re

import pytest

from tests.deploy import promises
from tests.deploy.promises import PROMISES, ROOT, Promise

PAGES = ("security", "privacy", "deployment", "operations")
ALL = [one for group in PROMISES.values() for one in group]


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.promise[:60])
def test_every_promise_has_its_door_and_its_test(one: Promise) -> None:
    for path in re.findall(r"`((?:deploy|fl_app|client_app|corolla|strategies)/[\w/.]+)`", one.door):
        assert (ROOT / path).exists(), path
    assert one.promise and one.door and one.tests
    for name in one.tests:
        path, _, test = name.partition("::")
        assert f"def {test or 'test_'}" in (ROOT / path).read_text(encoding="utf-8"), name


def test_the_page_lists_the_promises() -> None:
    """`python -m tests.deploy.promises` writes them."""
    assert len(ALL) > 20 and promises.parts()[1].strip() == promises.listed()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_no_test_that_no_promise_has(name: str) -> None:
    found = set(re.findall(r"\btest_\w+\.py", (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")))
    assert not found - {test.partition("::")[0].rpartition("/")[2] for one in ALL for test in one.tests}
