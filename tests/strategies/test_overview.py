"""The table of all methods is complete, the documentation's, and what the command prints."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from corolla.cli.listings import methods
from corolla.cli.reference import pages_with_tables, with_table
from strategies import METHODS
from strategies.overview import COLUMNS, absent_table, groups, methods_table, of

ROOT = Path(__file__).resolve().parents[2]


def test_every_method_is_in_one_group() -> None:
    assert Counter(name for names in groups().values() for name in names) == Counter(list(METHODS))
    assert all(getattr(of(name), column) for name in METHODS for column in ("group", *COLUMNS))
    assert next(iter(groups())) == of("local").group


def test_the_pages_have_the_tables_and_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    pages = pages_with_tables(ROOT)
    assert len(pages) == len(METHODS) + 4
    assert [path.name for path, text in pages.items() if path.read_text(encoding="utf-8") != text] == []
    methods(table=True)
    printed = capsys.readouterr().out
    assert printed == f"{methods_table()}\n\n{absent_table()}\n"
    assert all(f"| {name} (" in printed for name in ("PartialFed", "FedVKD", "PSPFL", "pFedGF"))


def test_a_table_is_replaced_where_it_stands() -> None:
    page = "# A\n\n## B\n\nwords\n\n| x |\n| y |\n\nmore\n\n| z |\n"
    assert with_table(page, "B", "| new |") == page.replace("| x |\n| y |", "| new |")
    assert with_table("## B\n\n| x |", "B", "| new |") == "## B\n\n| new |\n"
    with pytest.raises(ValueError, match="no table below 'C'"):
        with_table(page, "C", "| new |")
