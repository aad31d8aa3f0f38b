"""Each command's help has an example that the command line takes, and `corolla -h` has groups."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from corolla import cli
from corolla.cli import app, build_command


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Yield the visible commands that do something, each with its words."""
    if not isinstance(command, click.Group):
        yield " ".join(path), command
        return
    for name, below in command.commands.items():
        if not below.hidden:
            yield from commands(below, (*path, name))


COMMAND = build_command()
COMMANDS = dict(commands(COMMAND))
EXAMPLES = {words: str(command.epilog or "") for words, command in COMMANDS.items()}


def test_each_command_has_an_example_and_a_heading() -> None:
    lacking = [words for words, text in EXAMPLES.items() if not text.startswith(f"Example: corolla {words}")]
    assert lacking == [], "the decorator's `epilog` gives an example (corolla/cli/__init__.py)"
    top = COMMAND.commands.items()  # type: ignore[attr-defined]
    assert [name for name, command in top if not command.hidden and not command.rich_help_panel] == []


def test_each_command_has_a_help_text_and_each_file_its_commands() -> None:
    lacking = [words for words, command in COMMANDS.items() if not command.help]
    assert lacking == [], "the function's docstring is the help"
    files = Path(cli.__file__).parent.glob("[a-z]*.py")
    # what `corolla reference` writes is imported when it runs
    unimported = {file.stem for file in files} - set(vars(cli)) - {"reference"}
    assert unimported == set(), "import the file in corolla/cli/__init__.py"


@pytest.mark.parametrize("words", sorted(EXAMPLES))
def test_an_example_is_valid(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(EXAMPLES[words].removeprefix(f"Example: corolla {words}"))
    # files that must exist
    for name in arguments:
        if "." in name and "/" not in name and "=" not in name:
            (tmp_path / name).write_text("")
        if name.startswith("runs"):
            (tmp_path / name).mkdir(parents=True, exist_ok=True)
    parent = click.Context(COMMAND, info_name="corolla")
    assert COMMANDS[words].make_context(words, arguments, parent=parent).command is COMMANDS[words]


def test_the_list_of_commands_has_headings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        COMMAND(["-h"], prog_name="corolla")
    shown = capsys.readouterr().out
    places = [shown.index(f"─ {group} ─") for group in ("Run", "Look", "Data and state", "Deploy")]
    assert places == sorted(places)


def test_a_command_without_example_and_heading_breaks_no_other_one(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        app.command("mine")(lambda: print("done"))
        for words, shown in (("--version", "corolla"), ("-h", "mine"), ("mine", "done")):
            with pytest.raises(SystemExit) as ended:
                build_command()([words], prog_name="corolla")
            assert ended.value.code == 0 and shown in capsys.readouterr().out.lower()
    finally:
        del app.registered_commands[-1]
