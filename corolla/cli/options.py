"""Options and arguments that several commands share."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from corolla import presets
from corolla.api import console as consoles
from corolla.api.console import console, open_page, show_tracebacks, write_events
from corolla.api.one_run import CPUS, GPUS
from corolla.api.settings import Backend, Scale
from corolla.api.waiting import stand_still
from corolla.cli.completion import completed
from fl_app.config import RunConfig
from fl_app.config.earlier_keys import current
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
    Scale, typer.Option(help="small: cut clients, rounds and samples for a laptop; --set still wins.")
]
CpusOption = Annotated[float, typer.Option(help="Simulation: CPU cores per client.", click_type=CPUS)]
GpusOption = Annotated[float, typer.Option(help="Simulation: GPUs per client, or a fraction.", click_type=GPUS)]

BackendOption = Annotated[
    Backend | None,
    typer.Option(
        help="Simulation: how clients run. pool: worker processes; ray: Flower's simulation, also on GPUs and several machines "
        "(default: pool on Linux without GPUs, else ray)."
    ),
]


def _tracebacks_too(wanted: bool) -> bool:
    show_tracebacks(wanted)
    return wanted


VerboseOption = Annotated[
    bool,
    typer.Option("--verbose", help="Also show Flower's and Ray's log lines, and tracebacks.", callback=_tracebacks_too),
]


def _lines_alone(wanted: bool) -> bool:
    stand_still(wanted)
    return wanted


NoProgressOption = Annotated[
    bool, typer.Option("--no-progress", help="Print plain lines instead of a live panel.", callback=_lines_alone)
]


def be_quiet(asked: bool) -> bool:
    """Print nothing on standard output if asked; warnings and errors still go to standard error."""
    console.quiet = asked or console.quiet
    return asked


QuietOption = Annotated[
    bool,
    typer.Option("--quiet", help="Print only warnings and errors, on standard error.", callback=be_quiet),
]


EventsOption = Annotated[
    bool,
    typer.Option(
        "--events",
        help="Print the run's events as JSON lines, and nothing else, on standard output.",
        callback=write_events,
    ),
]
OpenOption = Annotated[
    bool,
    typer.Option("--open", help="Open a page in a browser that grows by the run's rounds.", callback=open_page),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print only JSON on standard output.")]
LogFileOption = Annotated[
    Path | None,
    typer.Option(
        help="Also write all output and the run's full log to this file, with times.", callback=consoles.open_log
    ),
]


def parse_set(pairs: Iterable[str]) -> dict[str, Scalar]:
    """Return KEY=VALUE words as a flat run config. Raises UserError naming every word of another form."""
    out: dict[str, Scalar] = {}
    problems = []
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.strip():
            problems.append(f"--set {pair}: expected KEY=VALUE in one word, as in --set {name.strip() or 'seed'}=1")
            continue
        try:
            out |= _keys(name.strip(), text)
        except UserError as error:
            problems.append(f"--set {pair}: {error}")
    if problems:
        raise UserError("\n".join(problems))
    return current(out, warn=True)


def _keys(name: str, text: str) -> dict[str, Scalar]:
    """Return a key and its value, or the keys of an inline table. Raises UserError for text that is neither."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (RecursionError, ValueError):
        value = text
        if text.strip().startswith("{") and not _is_text(name):
            raise UserError("not an inline TOML table, as in 'fedcac={beta=3, selection=\"random\"}'") from None
    if isinstance(value, dict) and not _is_text(name):
        if not value:
            raise UserError("the table is empty")
        texts = {key: str(inner).lower() if isinstance(inner, bool) else str(inner) for key, inner in value.items()}
        return {f"{name}.{key}": _checked(f"{name}.{key}", inner, texts[key]) for key, inner in value.items()}
    return {name: _checked(name, value, text.strip())}


def _checked(name: str, value: object, text: str) -> Scalar:
    if not isinstance(value, str) and _is_text(name):
        # a name or a column may be a number
        return text
    if not isinstance(value, (bool, int, float, str)):
        raise UserError("the value must be a string, a number, true or false")
    return value


def _is_text(name: str) -> bool:
    """Return whether a key holds a string. False for methods that are not part of Corolla: their keys are unknown here."""
    table, dot, _ = name.partition(".")
    declared = METHOD_PARAMS.get(table) if dot else RunConfig
    return declared is not None and any(
        spec.name == name and spec.type is str for spec in specs(declared, table * bool(dot))
    )


def checked_set(pairs: list[str] | None) -> list[str] | None:
    """Refuse `--set KEY VALUE` before the parser complains about the stray VALUE."""
    parse_set(pairs or [])
    return pairs


SET_HELP = (
    "A config key, e.g. --set fedcac.tau=0.3, or a method's table, --set 'fedcac={tau=0.3, beta=5}'. The value is TOML. A bare "
    "word is a string; keys that hold text take any value as text. Repeatable."
)
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help=SET_HELP, callback=checked_set, shell_complete=completed),
]
