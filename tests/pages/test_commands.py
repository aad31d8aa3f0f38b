"""docs/commands.md beside the code: exit codes, and the options that programs use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from corolla.cli import build_command
from fl_app import exit_codes
from website.pages import ROOT

PAGE = ROOT / "docs" / "commands.md"
OPTIONS = ("--quiet", "--events", "--json", "--verbose", "--no-progress", "--open", "--log-file")


def table(heading: str) -> list[str]:
    """Return the lines of the first table below a heading, without its two first."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("|")][2:]


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Yield each command that the help lists, with its name."""
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield from commands(below, (*path, name))
    if not getattr(command, "commands", {}):
        yield " ".join(path), command


def test_every_exit_code_is_in_the_table() -> None:
    assert table("Exit codes") == [
        f"| {code} | {'<br>'.join(occasions)} |" for code, occasions in exit_codes.OCCASIONS.items()
    ]


@pytest.mark.parametrize(
    "path", [*(ROOT / "corolla" / "cli").glob("*.py"), *(ROOT / "deploy").glob("*cli.py")], ids=str
)
def test_commands_end_with_named_codes(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("typer.Exit", "SystemExit", "sys.exit"):
            numbers = [one for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, int)]
            assert not numbers, f"{path.name}: {ast.unparse(node)}"


def test_each_option_is_listed_with_its_commands() -> None:
    found: dict[str, list[str]] = {option: [] for option in OPTIONS}
    for name, command in commands(build_command()):
        for option in OPTIONS:
            if any(option in parameter.opts for parameter in command.params):
                found[option].append(f"`{name}`")
    listed = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in table("Options for programs")}
    assert listed == {f"`{option}`": ", ".join(names) for option, names in found.items()}
