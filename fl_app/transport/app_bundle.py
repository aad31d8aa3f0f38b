"""The Flower app that a run submits: Corolla's packages and the user's own files, copied to a new directory.

`flwr run` walks through its whole directory; in a clone with a `.venv` this takes many seconds. It also refuses every
run-config key that the app's pyproject.toml lacks. So each run gets a small copy, with the keys of the user's own
method in it. On a node Flower unpacks the copy and imports from it first.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import tomli_w

import fl_app
from fl_app import plugins
from fl_app.errors import UserError
from fl_app.keys import Scalar
from fl_app.toml import read_toml

APP_DIRECTORY = Path(fl_app.__file__).resolve().parent.parent
PROJECT = "pyproject.toml"
# table of the copy's pyproject.toml
_TOOL, _EVENTS = "corolla", "log-events"


@contextlib.contextmanager
def bundle(config: Mapping[str, Scalar], parent: str | None = None) -> Iterator[Path]:
    """Yield a directory with the app for a run with this config; it is removed at the end.

    parent: the directory to create it in. None: that of temporary files.
    """
    project = read_toml(project_file())
    known = project["tool"]["flwr"]["app"]["config"]
    for name, value in config.items():
        table, _, key = name.rpartition(".")
        (known.setdefault(table, {}) if table else known).setdefault(key, value)
    # `corolla run` reads the server's log, and `flwr run .` shows it to people
    project["tool"][_TOOL] = {_EVENTS: True}
    with tempfile.TemporaryDirectory(prefix="corolla-app-", dir=parent) as name:
        directory = Path(name)
        for package in plugins.PACKAGES:
            shutil.copytree(APP_DIRECTORY / package, directory / package, ignore=_all_but_python)
        plugins.write(plugins.files(config), directory)
        (directory / PROJECT).write_text(tomli_w.dumps(project), encoding="utf-8")
        yield directory


def project_file() -> Path:
    """Return the path of the app's pyproject.toml: a wheel's copy in fl_app, or a clone's own.

    Raises UserError if neither exists.
    """
    for path in (APP_DIRECTORY / "fl_app" / PROJECT, APP_DIRECTORY / PROJECT):
        if path.is_file():
            return path
    raise UserError(f"{APP_DIRECTORY} has no {PROJECT}, neither a clone's nor a wheel's: install Corolla again")


def unpacked() -> Path | None:
    """Return the directory of the app that this process runs from, None if its code is installed and not unpacked."""
    return APP_DIRECTORY if (APP_DIRECTORY / PROJECT).is_file() else None


def is_read_by_command() -> bool:
    """Return whether this process runs an app that `corolla` has submitted: its log lines are events for the command."""
    directory = unpacked()
    return directory is not None and _EVENTS in read_toml(directory / PROJECT)["tool"].get(_TOOL, {})


def application_hash(config: Mapping[str, Scalar]) -> str:
    """Return the sha256 of the app that a run with this config submits. Sites identify the app by it."""
    from flwr.cli.build import build_fab_from_disk

    with bundle(config) as directory:
        return hashlib.sha256(build_fab_from_disk(directory)).hexdigest()


def _all_but_python(directory: str, names: list[str]) -> list[str]:
    # a directory that is no package, such as a wheel's examples, is no part of the app
    return [n for n in names if not (n.endswith(".py") or Path(directory, n, "__init__.py").is_file())]
