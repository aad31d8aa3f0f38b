"""Options and arguments that several commands have."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from typing import Annotated

import typer

from corolla import presets
from corolla.api.runs import CPUS, GPUS
from corolla.api.settings import Scale
from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.keys import Scalar, specs
from strategies import METHOD_PARAMS

PresetArgument = Annotated[
    str | None,
    typer.Argument(
        help="A preset's name or a .toml file with config keys.",
        autocompletion=lambda incomplete: [name for name in presets.all_presets() if name.startswith(incomplete)],
    ),
]
ScaleOption = Annotated[
    Scale, typer.Option(help="small: cut clients, rounds and samples to what a laptop does; --set still wins.")
]
CpusOption = Annotated[float, typer.Option(help="Simulation: CPU cores per client.", click_type=CPUS)]
GpusOption = Annotated[float, typer.Option(help="Simulation: GPUs per client, may be a fraction.", click_type=GPUS)]
VerboseOption = Annotated[bool, typer.Option("--verbose", help="Show Flower's and Ray's log lines too.")]


def parse_set(pairs: Iterable[str]) -> dict[str, Scalar]:
    """Turn KEY=VALUE words into a flat run config. Raises UserError naming every word that is not one."""
    out: dict[str, Scalar] = {}
    problems = []
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.strip():
            problems.append(f"--set {pair}: expected KEY=VALUE in one word, as in --set {name.strip() or 'seed'}=1")
            continue
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        if not isinstance(value, str) and _is_text(name.strip()):
            # a name or a column may well be a number
            value = text.strip()
        if not isinstance(value, (bool, int, float, str)):
            problems.append(f"--set {pair}: the value must be a string, a number, true or false")
            continue
        out[name.strip()] = value
    if problems:
        raise UserError("\n".join(problems))
    return out


def _is_text(name: str) -> bool:
    """Tell whether a key holds a string; of methods that are no part of Corolla nothing is known."""
    table, dot, _ = name.partition(".")
    declared = METHOD_PARAMS.get(table) if dot else RunConfig
    return declared is not None and any(
        spec.name == name and spec.type is str for spec in specs(declared, table * bool(dot))
    )


def checked_set(pairs: list[str] | None) -> list[str] | None:
    """Complain of `--set KEY VALUE` before the parser does of the stray VALUE."""
    parse_set(pairs or [])
    return pairs


SET_HELP = (
    "A config key, e.g. --set fedcac.tau=0.3. The value is TOML; a bare word is a string, and so is what a key of text is given. "
    "Repeatable."
)
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=SET_HELP, callback=checked_set)]
