"""The table of all methods is complete, the documentation's, and what the command prints."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from corolla.cli.listings import methods
from strategies import METHODS
from strategies.overview import GROUPS, methods_table

DOCS = Path(__file__).resolve().parents[2] / "docs" / "methods.md"


def test_every_method_is_in_one_group() -> None:
    assert Counter(row.method for rows in GROUPS.values() for row in rows) == Counter(list(METHODS))
    assert all(all(row) for rows in GROUPS.values() for row in rows)


def test_the_documentation_and_the_command_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert methods_table() in DOCS.read_text(encoding="utf-8")
    methods(table=True)
    assert capsys.readouterr().out == methods_table() + "\n"
