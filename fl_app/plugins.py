"""The user's own Python files, named `module:NAME`: a method, a model or a task.

A module is looked up in the directories `reset` was given, then wherever Python imports from. The command names the config
file's directory and the current one. On a node nothing is named: there the app's directory, into which the command has put the
files, is the first that Python imports from. A file may import others that lie beside it: they travel with it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from fl_app.errors import UserError, describe
from fl_app.files import make_directory, publish
from fl_app.keys import Scalar

PACKAGES = ("fl_app", "strategies", "client_app", "deploy", "corolla")  # Corolla's own
_DIGITS = 16  # of a file's sha256
_directories: list[Path] = []
_imported: set[str] = set()
_resets = 0


def is_reference(name: object) -> bool:
    """Tell whether a method's, a model's or a task's name is `module:NAME`, something from outside."""
    return ":" in str(name)


def reset(*directories: Path) -> None:
    """Set the directories in which the user's files are looked up first, and forget all that was read or imported of such files.

    Their modules leave sys.modules, so that the next use imports a file again, as it is then.
    """
    global _resets
    _resets += 1
    _directories[:] = dict.fromkeys(directory.expanduser().resolve() for directory in directories)
    while _imported:
        sys.modules.pop(_imported.pop(), None)
    _content.cache_clear()


def generation() -> int:
    """Return how often `reset` was called: what was made of the user's files is good as long as this stays."""
    return _resets


# Files ----------------------------------------------------------------------------------------------------------------


def source(reference: str) -> tuple[Path, Path] | None:
    """Return the user's file of a reference, and the directory it was looked up in; None if it is in none of them."""
    module = reference.partition(":")[0]
    for directory in _directories:
        if (path := _file(directory, module)) is not None:
            return path, directory
    return None


def references(config: Mapping[str, Scalar]) -> dict[str, str]:
    """Return the references in a flat run config by their keys."""
    return {key: str(config[key]) for key in ("method", "model", "task") if is_reference(config.get(key, ""))}


def origin(reference: str) -> str:
    """Return which file a reference is taken from; "" if none is found."""
    if (where := source(reference)) is not None:
        return str(where[0])
    try:
        spec = importlib.util.find_spec(reference.partition(":")[0])
    except (ImportError, ValueError):
        return ""
    return str(spec.origin) if spec else ""


def files(config: Mapping[str, Scalar]) -> dict[str, bytes]:
    """Return the user's files that a run config needs, with those they import beside them: content by path in their directory.

    The content is what it was when this process first asked.
    """
    found: dict[str, bytes] = {}
    for reference in references(config).values():
        if (where := source(reference)) is not None:
            path, directory = where
            for file in _with_imports(path, directory):
                found[file.relative_to(directory).as_posix()] = _content(file)
    return dict(sorted(found.items()))


def fingerprint(files: Mapping[str, bytes]) -> str:
    """Return the key `plugins`: every file with the beginning of its sha256."""
    return ",".join(f"{name}:{hashlib.sha256(content).hexdigest()[:_DIGITS]}" for name, content in files.items())


def read(plugins: str) -> dict[str, bytes]:
    """Return the files that a key `plugins` names, found where this process imports from.

    Raises UserError naming a file that is missing or not the one the key was made of.
    """
    found: dict[str, bytes] = {}
    for entry in filter(None, plugins.split(",")):
        name = entry.partition(":")[0]
        here = [d / name for d in (*_directories, *map(Path, sys.path)) if (d / name).is_file()]
        same = next((path for path in here if fingerprint({name: _content(path)}) == entry), None)
        if same is None:
            what = f"{here[0]} is not the file" if here else f"{name} is not here,"
            raise UserError(f"plugins: {what} the run was started with ({entry})")
        found[name] = _content(same)
    return found


def write(files: Mapping[str, bytes], directory: Path) -> None:
    """Write files into a directory, by their paths in it."""
    for name, content in files.items():
        make_directory((directory / name).parent)
        publish(directory / name, functools.partial(Path.write_bytes, data=content))


def _file(directory: Path, module: str) -> Path | None:
    stem = directory.joinpath(*module.split("."))
    return next((p for p in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py") if p.is_file()), None)


@functools.cache
def _content(path: Path) -> bytes:
    return path.read_bytes()


def _with_imports(path: Path, directory: Path) -> list[Path]:
    """A file, the packages it lies in, and what these import from the same directory."""
    todo, seen = [path], dict[Path, None]()
    while todo:
        file = todo.pop()
        if file in seen:
            continue
        seen[file] = None
        above = (
            parent / "__init__.py"
            for parent in file.parents
            if parent.is_relative_to(directory) and parent != directory
        )
        todo += [init for init in above if init.is_file()]
        modules = [
            m for m in _imports(file, directory) if m.partition(".")[0] not in (*PACKAGES, *sys.stdlib_module_names)
        ]
        todo += [found for module in modules if (found := _file(directory, module)) is not None]
    return list(seen)


def _imports(path: Path, directory: Path) -> Iterator[str]:
    """Yield what may be the modules a file imports; of a file that is no Python nothing."""
    try:
        tree = ast.parse(_content(path))
    except (SyntaxError, ValueError):
        return
    package = path.relative_to(directory).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join((*above, *filter(None, [node.module])))
            yield from filter(None, (base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)))


# Modules --------------------------------------------------------------------------------------------------------------


def load(key: str, reference: str) -> Any:
    """Import `module:NAME` and return what it names. key: which run key asks, for errors.

    Raises UserError if there is no such module, it cannot be imported, or has no such name.
    """
    module_name, _, attribute = reference.partition(":")
    where = source(reference)
    try:
        module = importlib.import_module(module_name) if where is None else _import(module_name, *where)
    except UserError as error:
        raise UserError(f"{key} {reference}: {error}") from None
    except Exception as error:
        raise UserError(
            f"{key} {reference}: cannot import {module_name} ({describe(error)}); its file must lie beside the config file, in the "
            "current directory or in the app directory, or the module be importable on every node"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise UserError(f"{key} {reference}: {module_name} ({module.__file__}) has no {attribute}") from None


def _import(name: str, path: Path, directory: Path) -> ModuleType:
    """Import a module from its own directory, which comes first of all from now on, as the app's does on a node."""
    top = name.partition(".")[0]
    if top in PACKAGES or top in sys.stdlib_module_names:
        whose = "Corolla" if top in PACKAGES else "Python"
        raise UserError(f"{path}: {whose} has a module {top} already; choose another name")
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    if loaded is not None:
        if name not in _imported:
            raise UserError(f"{path}: there is a module {name} already, {loaded.__file__}; choose another name")
        del sys.modules[name]
    # From here on a module of that directory comes first: what Corolla has not imported yet must not be one of them.
    for package in PACKAGES:
        importlib.import_module(package)
    sys.path[:] = [str(directory), *(entry for entry in sys.path if entry != str(directory))]
    importlib.invalidate_caches()
    module = importlib.import_module(name)
    _imported.add(name)
    return module
