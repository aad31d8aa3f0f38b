"""The counter of hard words counts docstrings and prose, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import language


def test_docstrings_are_counted_and_code_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text('"""Say what."""\nwhat = "what"  # what\nX = 1\n"""Whose."""\n\n\ndef f():\n    """Told who."""\n')
    words, found = language.counts(language.docstrings(path))
    assert words == 5
    assert found == {"what": 1, "tell, say": 2, "who, whom, whose": 2}


def test_blocks_of_code_on_a_page_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("What it is.\n\n```\nwhat what what\n```\n")
    assert language.rates(language.prose(path)) == {
        "what": pytest.approx(1000 / 3),
        "tell, say": 0,
        "who, whom, whose": 0,
    }


def test_messages_are_the_texts_that_users_see(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        '''"""Not this."""
x = "nor this one"
if x:
    raise UserError(f"key: must be 1, got {x!r}" "; mend it")
log.info("round %d: all is well", 1)
n = key(0.5, "The learning rate.", POSITIVE)
o = typer.Option("--long-name", help="How long it is.")
'''
    )
    assert list(language.messages(path)) == [
        (4, "key: must be 1, got {}; mend it"),
        (5, "round %d: all is well"),
        (6, "The learning rate."),
        (7, "How long it is."),
    ]


def test_the_command_prints_the_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("What is told of whom.\n")
    language.main([str(page)])
    assert capsys.readouterr().out.splitlines()[-1].split()[1:] == ["200.00", "200.00", "200.00", "5"]
