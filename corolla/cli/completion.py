"""Shell completion: keys and their named values after `--set`, and clients and metrics of runs.

Bash splits words at `=` and `:` before it asks, and replaces only the last piece. Other shells pass whole words.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import split_arg_string

from fl_app.config import RunConfig
from fl_app.errors import UserError, plain
from fl_app.keys import KeySpec, specs, table_of
from fl_app.known_names import MODELS, PARTITIONS, TASKS, TRACKERS
from fl_app.sources import SOURCES
from fl_app.tasks import BUILT_IN as TASKS_BY_NAME
from strategies import METHOD_PARAMS, METHODS

if TYPE_CHECKING:
    from corolla.experiments.runs import RecordedRun

_BREAKS = ("=", ":")
# environment variable: part of the word before the piece that bash replaces
_BEFORE = "COROLLA_COMPLETED"


def join_words() -> None:
    """Join the words that bash has split, if bash asks for completions."""
    if os.environ.get("_COROLLA_COMPLETE") != "complete_bash":
        return
    words = split_arg_string(os.environ.get("COMP_WORDS", ""))
    at = int(os.environ.get("COMP_CWORD", "0"))
    # the last piece may still be empty
    pieces = [*words[:at], *(words[at : at + 1] or [""])]
    joined: list[str] = []
    before = ""
    for k, piece in enumerate(pieces):
        if joined and k and (piece in _BREAKS or pieces[k - 1] in _BREAKS):
            before = joined[-1]
            joined[-1] += piece
        else:
            before = ""
            joined.append(piece)
    if pieces[-1] in _BREAKS:
        before = joined[-1]
    os.environ["COMP_WORDS"] = "\n".join(_quoted(word) for word in joined)
    os.environ["COMP_CWORD"] = str(len(joined) - 1)
    os.environ[_BEFORE] = before


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


def completed(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return completions of a word after `--set`: KEY= while the key is typed, then KEY=VALUE.

    Only the part that the shell replaces is returned.
    """
    key, equals, value = incomplete.partition("=")
    if equals:
        found = [f"{key}={one}" for one in values_of(key, _task(context)) if one.startswith(value)]
    else:
        found = [f"{name}=" for name in _keys() if name.startswith(key)]
    before = os.environ.get(_BEFORE, "")
    return [word.removeprefix(before) for word in found]


def clients_of(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the clients of the typed runs: by name if they have names, else by number, or by id if that has two meanings."""
    names: list[str] = []
    for run in _runs(context):
        clients = sorted(run.clients.items(), key=lambda one: int(one[0]))
        called = {number: plain(str(facts.get("name", ""))) or number for number, facts in clients}
        meanings = Counter(word for number, name in called.items() for word in {number, name})
        names += [name if meanings[name] == 1 else f"id:{number}" for number, name in called.items()]
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def columns_of(incomplete: str) -> list[str]:
    """Return the patterns of the papers' columns, and the names of presets, that begin with the typed text."""
    from corolla.presets import all_presets

    names = [name for preset in all_presets().values() for name in (f"{preset.column}/*", preset.name)]
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete) and name != "/*"]


def metrics_of(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the metrics measured by the typed runs."""
    names = dict.fromkeys(metric.name for run in _runs(context) for metric in run.metrics)
    return [name for name in names if name.startswith(incomplete)]


def rows_of(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the methods and names of the typed runs."""
    runs = _runs(context)
    names = dict.fromkeys([*(run.method for run in runs), *(run.path.name for run in runs)])
    return [name for name in names if name.startswith(incomplete)]


def _runs(context: click.Context) -> list[RecordedRun]:
    """Return the runs among the typed words. Other words are ignored."""
    from corolla.experiments.runs import find

    found: list[RecordedRun] = []
    for word in _words(context):
        with contextlib.suppress(UserError, OSError):
            found += find([Path(word)])
    return found


def _words(context: click.Context) -> list[str]:
    """Return the words typed after the command. While an option waits for its value, click keeps them in a separate list."""
    given = context.params.get("runs") or context.params.get("run") or []
    given = given if isinstance(given, list | tuple) else [given]
    return [*map(str, given), *(word for word in context.args if not word.startswith("-"))]


def _task(context: click.Context) -> str:
    """Return the typed task, or ""."""
    pairs = [str(pair).partition("=") for pair in context.params.get("set_") or ()]
    return next((value for key, _, value in reversed(pairs) if key == "task"), "")


def values_of(key: str, task: str = "") -> list[str]:
    """Return the named values of a key. A value with a path ends where the path begins.

    task: task with the metrics for `headline` and `metrics`; empty: metrics of all tasks.
    """
    if key in ("headline", "metrics"):
        asked = [TASKS_BY_NAME[task]] if task in TASKS_BY_NAME else list(TASKS_BY_NAME.values())
        names = dict.fromkeys(metric.name for one in asked for metric in one.metrics)
        return [*names, *(["all"] if key == "metrics" else [])]
    named: dict[str, Iterable[str]] = {
        "method": METHODS,
        "dataset": [source.prefix + ":" * bool(source.path) for source in SOURCES.values()],
        "partition": (*PARTITIONS, "by-column", "file:"),
        "model": MODELS,
        "task": TASKS,
        "track": TRACKERS,
        "device": ("auto", "cpu", "cuda"),
    }
    if key in named:
        return list(named[key])
    spec = _keys().get(key)
    if spec is None:
        return []
    return list(spec.choices) if spec.choices else ["true", "false"] * (spec.type is bool)


def _keys() -> dict[str, KeySpec]:
    """Return all keys by name, including those of every method."""
    tables = [(RunConfig, ""), *((METHOD_PARAMS[name], table_of(name)) for name in METHOD_PARAMS)]
    return {spec.name: spec for declared, table in tables for spec in specs(declared, table)}
