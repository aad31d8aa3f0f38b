"""The commands' consoles."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from corolla.api import console
from corolla.api.console import LoggedConsole
from corolla.cli import output


def test_no_text_reaches_the_terminal_with_control_characters() -> None:
    out = io.StringIO()
    console = LoggedConsole(file=out, highlight=False, emoji=False, width=80)
    console.print("a\x1b]0;owned\x07\x9b2J\u202eb\nc", markup=False)
    assert out.getvalue() == "a]0;owned2Jb\nc\n"


BAD = "a\x1b]0;owned\x07\x9b2J\u202eb"


def table() -> Table:
    found = Table("class")
    found.add_row(BAD)
    return found


@pytest.mark.parametrize("made", [table, lambda: Panel(Text(BAD)), lambda: Text(BAD)], ids=["table", "panel", "text"])
def test_nothing_that_is_drawn_has_them_either(made: object, tmp_path: Path) -> None:
    """Names of classes and clients come from files and sites of others."""
    out = io.StringIO()
    path = console.open_log(tmp_path / "log.txt")
    try:
        LoggedConsole(file=out, highlight=False, width=80, color_system=None).print(made())  # type: ignore[operator]
    finally:
        console.open_log(None)
    for text in (out.getvalue(), path.read_text()):  # type: ignore[union-attr]
        assert "a]0;owned2Jb" in text and not set(text) & set("\x1b\x07\x9b\u202e")


@pytest.mark.parametrize("boxed", [False, True])
def test_a_table_of_predictions_commands_no_terminal(monkeypatch: pytest.MonkeyPatch, boxed: bool) -> None:
    out = io.StringIO()
    drawn = LoggedConsole(file=out, force_terminal=True, width=80, highlight=False, color_system=None)
    monkeypatch.setattr(output, "console", drawn)
    output.show_table([["sample", "class"], ["x.png", BAD]], boxed=boxed)
    assert "a]0;owned2Jb" in out.getvalue() and not set(out.getvalue()) & set("\x1b\x07\x9b\u202e")
