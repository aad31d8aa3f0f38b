"""The page of attacks and the catalogue."""

from __future__ import annotations

from tests.hostile import table
from tests.hostile.catalogue import BESIDE


def test_the_page_lists_the_catalogue() -> None:
    """An attack that comes or goes, or of which something else becomes, needs `make test-hostile` and a new page."""
    assert table.PAGE.read_text(encoding="utf-8") == table.page()


def test_the_tests_it_names_exist() -> None:
    for test in (test for beside in BESIDE for test in beside.test.split()):
        path, _, name = test.partition("::")
        assert f"\ndef {name}(" in (table.ROOT / path).read_text(), test
