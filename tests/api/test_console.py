"""The commands' consoles."""

from __future__ import annotations

import io

from corolla.api.log_file import LoggedConsole


def test_no_text_reaches_the_terminal_with_control_characters() -> None:
    out = io.StringIO()
    console = LoggedConsole(file=out, highlight=False, emoji=False, width=80)
    console.print("a\x1b]0;owned\x07\x9b2J\u202eb\nc", markup=False)
    assert out.getvalue() == "a]0;owned2Jb\nc\n"
