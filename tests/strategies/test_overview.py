"""The table of all methods is complete, the documentation's, and what the command prints."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from corolla.cli.listings import methods
from corolla.cli.reference import pages_with_tables, with_table
from fl_app.errors import UserError
from strategies import METHODS
from strategies.method_tables import COLUMNS, absent_table, groups, methods_table, names_table, of
from tests.facts import rejected

ROOT = Path(__file__).resolve().parents[2]


def test_every_file_of_a_method_is_registered() -> None:
    files = (ROOT / "strategies" / "baselines").glob("*.py")
    methods = {file.stem.replace("_", "-") for file in files if "\nMETHOD = " in file.read_text("utf-8")}
    assert methods - set(METHODS) == set(), "add the name to METHODS in strategies/__init__.py"


def test_every_method_has_its_page_and_tests() -> None:
    tests = [path.read_text("utf-8") for path in (ROOT / "tests" / "methods").glob("test_*.py")]
    lacks: list[str] = []
    for name in METHODS:
        module = name.replace("-", "_")
        if not (ROOT / "docs" / "methods" / f"{name}.md").is_file():
            lacks.append(f"method {name} has no page: write docs/methods/{name}.md")
        if not any(re.search(rf"\b({name}|{module})\b", text) for text in tests):
            lacks.append(f"method {name} has no tests: write tests/methods/test_{module}.py")
    assert not lacks, "; ".join(lacks) + " (CONTRIBUTING.md, Adding a method)"


def test_a_method_without_an_overview_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.method_tables.METHODS", {"mine": METHODS["fedavg"].__class__})
    monkeypatch.setattr(METHODS["fedavg"].__class__, "overview", None)
    with pytest.raises(UserError, match="method mine: .*overview"):
        of("mine")


def test_every_method_is_in_one_group() -> None:
    assert Counter(name for names in groups().values() for name in names) == Counter(list(METHODS))
    assert all(getattr(of(name), column) for name in METHODS for column in ("group", *COLUMNS))
    assert next(iter(groups())) == of("local").group


def test_the_pages_have_the_tables_and_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    pages = pages_with_tables(ROOT)
    assert len(pages) == 5
    stale = [path.name for path, text in pages.items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run `corolla reference`"
    methods(table=True)
    printed = capsys.readouterr().out
    assert printed == f"{names_table('`{}`')}\n\n{methods_table()}\n\n{absent_table()}\n"
    assert all(f"| {name} (" in printed for name in ("FedVKD", "PSPFL", "pFedGF"))


def test_a_table_is_replaced_where_it_stands() -> None:
    page = "# A\n\n## B\n\nwords\n\n| x |\n| y |\n\nmore\n\n| z |\n"
    assert with_table(page, "B", "| new |") == page.replace("| x |\n| y |", "| new |")
    assert with_table("## B\n\n| x |", "B", "| new |") == "## B\n\n| new |\n"
    with rejected(ValueError, "", "no table below 'C'"):
        with_table(page, "C", "| new |")
