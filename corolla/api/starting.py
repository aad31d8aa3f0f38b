"""Runs started from Python: keywords become a flat run config and options, checked like the command's."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from corolla.api import one_run
from corolla.api.console import begin_warnings, console
from corolla.api.one_run import OPTION_TYPES, LaunchOptions
from corolla.api.settings import Backend, Scale, look_for_plugins
from corolla.experiments.runs import named
from fl_app import rng
from fl_app.config.earlier_keys import current
from fl_app.errors import ConfigurationError, RunFailed, UserError
from fl_app.keys import Scalar, table_of
from strategies import METHODS


def start(preset: str | None, options: Mapping[str, Any], keys: Mapping[str, Any], progress: bool) -> Path:
    """Run an experiment and return its folder's path. options: of `LaunchOptions`, by name. keys: as `corolla.run` takes them."""
    try:
        return _start(preset, options, keys, progress)
    except (UserError, RunFailed) as error:
        error.args = (in_python(str(error)),)
        raise


# the command's options, as errors name them
_OPTIONS = "|".join(re.escape(field.name.replace("_", "-")) for field in dataclasses.fields(LaunchOptions))
_HINT = re.compile(rf" \(--(?:{_OPTIONS})\)")
_SET = re.compile(r"(?<!\S)--set (?=[\w.-]+=)")
_OPTION = re.compile(rf"(?<![\w/.='\"-])(?<!corolla run )--({_OPTIONS})(?![\w/-])")


def in_python(message: str) -> str:
    """Return an error's message with keywords in place of the command's options: `in_process` for `--in-process`.

    Options in parentheses are hints for the command, and left out. What stands in quotation marks is the user's.
    """
    message = _SET.sub("", _HINT.sub("", message))
    return _OPTION.sub(lambda found: found[1].replace("-", "_"), message)


def _start(preset: str | None, options: Mapping[str, Any], keys: Mapping[str, Any], progress: bool) -> Path:
    """Run an experiment. Errors name the command's options."""
    begin_warnings()
    options = {name: plain(value) for name, value in options.items()}
    checked({**options, "progress": progress})
    given = flat(keys)
    how = LaunchOptions(
        **{
            **options,
            "scale": Scale(options["scale"]),
            "backend": Backend(options["backend"]) if options["backend"] else None,
            **{
                name: named(Path(options[name]).expanduser()) if options[name] else None
                for name in ("resume", "replay", "from_run")
            },
            "output_dir": None if options["output_dir"] is None else os.fspath(options["output_dir"]),
        }
    )
    look_for_plugins()
    with quiet(not progress), callers_torch() if how.in_process else contextlib.nullcontext():
        config, parsed = one_run.configure(preset, given, how)
        path = one_run.start(config, parsed, how)
    if path is None:
        raise RunFailed("the run did not report its folder")
    return path


def checked(options: Mapping[str, Any]) -> None:
    """Raise UserError for an option that `corolla run` would refuse, with its message but the keyword's name."""
    for name in ("in_process", "verbose", "progress", "overwrite", "strict"):
        if type(options[name]) is not bool:
            raise UserError(key=name, rule="must be True or False", value=options[name])
    for name, kind in OPTION_TYPES.items():
        if (value := options[name]) is None:
            continue
        try:
            kind.convert(str(value), None, None)
        except click.BadParameter as error:
            raise ConfigurationError(key=name, rule=error.message) from None


def flat(keys: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return keywords as a flat run config.

    {"num_clients": 3, "fedcac": {"self_weight": 1}} gives num-clients and fedcac.self-weight. A key that is None is
    not set.

    Raises UserError for a key given twice in two spellings. Values are checked later.
    """
    out: dict[str, Scalar] = {}
    for name, value in keys.items():
        inner = {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, Mapping) else {name: value}
        for key, one in inner.items():
            if one is None:
                continue
            written = spelt(key)
            if written in out:
                raise UserError(key=written, rule=f"given twice, {out[written]!r} and {one!r}")
            out[written] = plain(one)
    return current(out, warn=True)


def spelt(name: str) -> str:
    """Return a key as spelt in a config: - for _, except in the table of a user's own method, which has its file's name."""
    table, dot, key = name.rpartition(".")
    kebab = table.replace("_", "-")
    return (kebab if kebab in map(table_of, METHODS) else table) + dot + key.replace("_", "-")


def plain(value: Any) -> Scalar:
    """Return a path as text and a NumPy number as Python's.

    Other values are returned unchanged; invalid ones are refused later.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    elif type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    scalar: Scalar = value
    return scalar


@contextlib.contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """Context without standard output, if wanted; warnings still go to standard error."""
    before, console.quiet = console.quiet, wanted or console.quiet
    try:
        yield
    finally:
        console.quiet = before


@contextlib.contextmanager
def callers_torch() -> Iterator[None]:
    """Restore torch's number of threads and the global generators at the end: clients in this process set both."""
    import torch

    cuda: Any = torch.cuda
    before, on_gpus = torch.get_num_threads(), cuda.is_initialized()
    states = cuda.get_rng_state_all() if on_gpus else []
    try:
        with rng.global_state_kept():
            yield
    finally:
        torch.set_num_threads(before)
        if on_gpus:
            cuda.set_rng_state_all(states)
        elif cuda.is_initialized():
            cuda.seed_all()
