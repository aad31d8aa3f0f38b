"""The Flower app as a run submits it: Corolla's packages and the user's own files, in a directory of its own.

`flwr run` walks through the whole directory it is given, in a clone with its `.venv` for many seconds, and refuses every run-config
key that the app's pyproject.toml does not have. So each run gets a small copy, with the keys of the user's own method in it. On a
node Flower unpacks it and imports from there first of all.
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


@contextlib.contextmanager
def bundle(config: Mapping[str, Scalar], parent: str | None = None) -> Iterator[Path]:
    """Yield a directory with the app for a run with this config, which is removed in the end.

    parent: where it is made, else where temporary files are.
    """
    project = read_toml(project_file())
    known = project["tool"]["flwr"]["app"]["config"]
    for name, value in config.items():
        table, _, key = name.rpartition(".")
        (known.setdefault(table, {}) if table else known).setdefault(key, value)
    with tempfile.TemporaryDirectory(prefix="corolla-app-", dir=parent) as name:
        directory = Path(name)
        for package in plugins.PACKAGES:
            shutil.copytree(APP_DIRECTORY / package, directory / package, ignore=_all_but_python)
        plugins.write(plugins.files(config), directory)
        (directory / PROJECT).write_text(tomli_w.dumps(project), encoding="utf-8")
        yield directory


def project_file() -> Path:
    """Return the app's pyproject.toml: the copy that a wheel has among fl_app's files, or a clone's own.

    Raises UserError if there is none.
    """
    for path in (APP_DIRECTORY / "fl_app" / PROJECT, APP_DIRECTORY / PROJECT):
        if path.is_file():
            return path
    raise UserError(f"{APP_DIRECTORY} has no {PROJECT}, neither a clone's nor a wheel's: install Corolla again")


def application_hash(config: Mapping[str, Scalar]) -> str:
    """Return the sha256 of the application as a run with this config submits it, by which sites know it."""
    from flwr.cli.build import build_fab_from_disk

    with bundle(config) as directory:
        return hashlib.sha256(build_fab_from_disk(directory)).hexdigest()


def _all_but_python(directory: str, names: list[str]) -> list[str]:
    return [n for n in names if n == "__pycache__" or not (n.endswith(".py") or Path(directory, n).is_dir())]
