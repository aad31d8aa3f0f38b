"""Each command's help has an example that the command line takes, and `corolla -h` has groups."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from corolla.cli import examples, whole


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Yield the visible commands that do something, each with its words."""
    if not isinstance(command, click.Group):
        yield " ".join(path), command
        return
    for name, below in command.commands.items():
        if not below.hidden:
            yield from commands(below, (*path, name))


def test_each_command_has_an_example_and_a_group() -> None:
    assert {words for words, _ in commands(whole())} == set(examples.EXAMPLES)
    top = {name for name, command in whole().commands.items() if not command.hidden}  # type: ignore[attr-defined]
    assert sorted(top) == sorted(name for names in examples.GROUPS.values() for name in names)


@pytest.mark.parametrize("words", sorted(examples.EXAMPLES))
def test_an_example_is_valid(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = dict(commands(whole()))[words]
    arguments = shlex.split(examples.EXAMPLES[words])
    # files that must exist
    for name in arguments:
        if "." in name and "/" not in name and "=" not in name:
            (tmp_path / name).write_text("")
        if name.startswith("runs"):
            (tmp_path / name).mkdir(parents=True, exist_ok=True)
    parent = click.Context(whole(), info_name="corolla")
    context = command.make_context(words, arguments, parent=parent)
    assert context.command is command
    assert command.epilog == f"Example: {examples.example(words)}"


def test_the_list_of_commands_has_headings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        whole()(["-h"], prog_name="corolla")
    shown = capsys.readouterr().out
    places = [shown.index(f"─ {group} ─") for group in ("Run", "Look", "Data and state", "Deploy")]
    assert places == sorted(places)
