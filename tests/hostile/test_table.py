"""docs/security.md and the catalogue."""

from __future__ import annotations

from tests.hostile import table


def test_the_page_lists_the_catalogue() -> None:
    """An attack that comes or goes, or of which something else becomes, needs `make test-hostile` and a new table."""
    assert table.parts()[1].strip() == table.rows()
