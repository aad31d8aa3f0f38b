"""The user's own Python files, named `module:NAME`: a method, a model, a task, or callbacks.

A module is looked up in the directories given to `reset`, then on Python's import path. A command gives the config
file's directory and the current one. A file may import others beside it; they travel with it.

At a site the command has put the files into the application's directory, and `only_from` makes that the one place to
find them: a run can name no other module of the site, and no other file.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from fl_app.debugging import at
from fl_app.errors import ConfigurationError, UserError, describe
from fl_app.files import make_directory, publish
from fl_app.keys import Scalar
from fl_app.known_names import PACKAGES as PACKAGES

_DIGITS = 16  # of a file's SHA-256
_directories: list[Path] = []
_imported: dict[str, str] = {}  # by the name of a module that `load` imported, its file
_taken: dict[Path, ModuleType] = {}  # by the file of a reference, its module
_resets = 0
_told: Callable[[Sequence[Path]], None] | None = None
_at_site = False


def is_reference(name: object) -> bool:
    """Return whether a name is `module:NAME`, from outside of Corolla."""
    return ":" in str(name)


def reset(*directories: Path, told: Callable[[Sequence[Path]], None] | None = None) -> None:
    """Set the directories in which the user's files are looked up first, and forget all files read or imported so far.

    told: gets a module's file, and those that it imports from its directory, before they run.

    Their modules leave sys.modules, so that the next use imports the current files. Modules that the user's own program
    imported stay.
    """
    global _resets, _told
    _resets, _told = _resets + 1, told
    _directories[:] = dict.fromkeys(directory.expanduser().resolve() for directory in directories)
    while _imported:
        name, file = _imported.popitem()
        if _file_of(name) == file:
            del sys.modules[name]
    _taken.clear()
    _content.cache_clear()


@contextlib.contextmanager
def only_from(directory: Path | None) -> Iterator[None]:
    """Inside, find files in this directory alone, or none at all, and say nothing of the machine's files in errors."""
    global _at_site
    before, _at_site = (_at_site, [*_directories]), True
    _directories[:] = [directory.resolve()] if directory else []
    try:
        yield
    finally:
        _at_site, _directories[:] = before


def directories() -> tuple[Path, ...]:
    """Return the directories in which the user's files are looked up first."""
    return tuple(_directories)


def generation() -> int:
    """Return how often `reset` was called. Objects made from the user's files are valid while this stays the same."""
    return _resets


# Files ----------------------------------------------------------------------------------------------------------------


def source(reference: str) -> tuple[Path, Path] | None:
    """Return the user's file of a reference, and the directory in which it was found; None if it is in none of them."""
    module = reference.partition(":")[0]
    for directory in _directories:
        if (path := _file(directory, module)) is not None:
            return path, directory
    return None


def references(config: Mapping[str, Scalar]) -> tuple[tuple[str, str], ...]:
    """Return the references in a flat run config, each with its key."""
    one = [(key, str(config[key])) for key in ("method", "model", "task") if is_reference(config.get(key, ""))]
    return (*one, *(("callbacks", reference) for reference in callbacks(config)))


def callbacks(config: Mapping[str, Scalar]) -> tuple[str, ...]:
    """Return the references of the user's callbacks in a flat run config, each once."""
    return tuple(dict.fromkeys(re.findall(r"[^\s,]+", str(config.get("callbacks", "")))))


def meant(module: str) -> str:
    """Return `module:NAME` for a user's file of this name, with the method that it declares; "" if there is none."""
    file = next((path for directory in _directories if (path := _file(directory, module))), None)
    if file is None or not module.isidentifier() or _at_site:
        return ""
    with contextlib.suppress(SyntaxError, ValueError):
        for line in ast.parse(_content(file)).body:
            match line:
                case ast.Assign(targets=[ast.Name(id=name), *_], value=ast.Call(func=made)):
                    if ast.unparse(made).endswith("Method"):
                        return f"{module}:{name}"
    return f"{module}:NAME"


def origin(reference: str) -> str:
    """Return the path of a reference's file, "" if none is found."""
    if (where := source(reference)) is not None:
        return str(where[0])
    try:
        spec = importlib.util.find_spec(reference.partition(":")[0])
    except (ImportError, ValueError):
        return ""
    return str(spec.origin) if spec else ""


def files(config: Mapping[str, Scalar]) -> dict[str, bytes]:
    """Return the user's files that a run config needs, with the files they import beside them.

    The result maps each file's path within its directory to its content, as it was when first read after `reset`.
    """
    found: dict[str, bytes] = {}
    for _, reference in references(config):
        if (where := source(reference)) is not None:
            path, directory = where
            for file in _with_imports(path, directory):
                found[file.relative_to(directory).as_posix()] = _content(file)
    return dict(sorted(found.items()))


def refuse_left_behind(config: Mapping[str, Scalar]) -> None:
    """Raise UserError if a run names a module that would not travel with it: a site has no other."""
    for key, reference in references(config):
        if source(reference) is None:
            name = reference.partition(":")[0]
            raise ConfigurationError(
                key=f"{key} {reference}",
                rule=f"a site takes {name} from the run alone; put its file beside the config file or in the "
                "current directory",
            )


def fingerprint(files: Mapping[str, bytes]) -> str:
    """Return the value of the key `plugins`: every file with the beginning of its SHA-256."""
    return ",".join(f"{name}:{hashlib.sha256(content).hexdigest()[:_DIGITS]}" for name, content in files.items())


def read(plugins: str) -> dict[str, bytes]:
    """Return the files that the key `plugins` names, by path, found on this process's import path.

    Raises UserError naming a file that is missing, or that differs from the one in the key.
    """
    found: dict[str, bytes] = {}
    places = _directories if _at_site else (*_directories, *map(Path, sys.path))
    for entry in filter(None, plugins.split(",")):
        name = entry.partition(":")[0]
        here = [path for place in places if (path := _within(place, name)) is not None]
        same = next((path for path in here if fingerprint({name: _content(path)}) == entry), None)
        if same is None and _at_site:
            raise _not_the_applications("plugins", "file")
        if same is None:
            what = (
                f"{here[0]} differs from the file the run was started with"
                if here
                else f"the run's file {name} is missing"
            )
            raise ConfigurationError(key="plugins", rule=f"{what} ({entry})")
        found[name] = _content(same)
    return found


def write(files: Mapping[str, bytes], directory: Path) -> None:
    """Write files into a directory, at their paths within it."""
    for name, content in files.items():
        make_directory((directory / name).parent)
        publish(directory / name, functools.partial(Path.write_bytes, data=content))


def _not_the_applications(key: str, what: str) -> UserError:
    text = f"{key}: names a {what} that is not the application's"
    return UserError(text, code="configuration", key=key, rule="own-files")


def _within(directory: Path, name: str) -> Path | None:
    """Return the file of this relative name, None if there is none or if it lies outside the directory."""
    if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        return None
    path = directory / name
    inside = not _at_site or path.resolve().is_relative_to(directory)
    return path if inside and _is_file(path) else None


def _file(directory: Path, module: str) -> Path | None:
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    stem = directory.joinpath(*parts)
    return next((p for p in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py") if _is_file(p)), None)


def _is_file(path: Path) -> bool:
    """Return whether a file exists. No file has a name that is too long."""
    try:
        return path.is_file()
    except OSError:
        return False


@functools.cache
def _content(path: Path) -> bytes:
    return path.read_bytes()


def _with_imports(path: Path, directory: Path) -> list[Path]:
    """Return a file, the packages that contain it, and the files that these import from the same directory."""
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
    """Yield the names of modules that a file may import; none if the file is not valid Python."""
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
    """Import `module:NAME` and return the object of that name. key: the run key, for errors.

    Raises UserError if the module does not exist, cannot be imported, or lacks the name.
    """
    module_name, _, attribute = reference.partition(":")
    where = source(reference)
    if _at_site and (where is None or not where[0].resolve().is_relative_to(where[1])):
        raise _not_the_applications(key, "module")
    try:
        module = importlib.import_module(module_name) if where is None else _import(module_name, *where)
    except UserError as error:
        raise ConfigurationError(key=f"{key} {reference}", rule=error) from None
    except Exception as error:
        hint = "; put its file beside the config file, in the current directory or in the app directory"
        lacks = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        raise ConfigurationError(
            key=f"{key} {reference}",
            rule=f"cannot import {module_name} ({describe(error)}{at(error)}){hint if lacks else ''}",
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        file = "" if _at_site else f" ({module.__file__})"
        raise ConfigurationError(key=f"{key} {reference}", rule=f"{module_name}{file} has no {attribute}") from None


def _import(name: str, path: Path, directory: Path) -> ModuleType:
    """Import a module from its own directory.

    The directory becomes the first on the import path, as the app's is on a node.
    """
    top = name.partition(".")[0]
    if top in PACKAGES or top in sys.stdlib_module_names:
        whose = "Corolla" if top in PACKAGES else "Python"
        if _at_site:
            raise ConfigurationError(f"{whose} has a module {top} already; choose another name")
        raise ConfigurationError(key=path, rule=f"{whose} has a module {top} already; choose another name")
    loaded = sys.modules.get(name)
    if loaded is not None and (_file_of(name) == str(path) or _taken.get(path) is loaded):
        return loaded
    files = _with_imports(path, directory)
    modules = {_module(file, directory): file for file in files}
    for each in [one for one, file in modules.items() if _imported.get(one) == _file_of(one) != str(file)]:
        del sys.modules[each]
    # The directory is about to become the first on the import path: import Corolla's packages before, from their own place.
    for package in PACKAGES:
        importlib.import_module(package)
    sys.path[:] = [str(directory), *(entry for entry in sys.path if entry != str(directory))]
    importlib.invalidate_caches()
    for each, file in modules.items():
        _refuse_another(each, file)
    if name not in sys.modules and _told is not None:
        _told(files)
    before = set(sys.modules)
    module = importlib.import_module(name)
    _imported.update((each, _file_of(each)) for each in (modules.keys() & sys.modules.keys()) - before)
    _taken[path] = module
    return module


def _module(file: Path, directory: Path) -> str:
    """Return the name under which a file of a directory is imported."""
    parts = file.relative_to(directory).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _file_of(name: str) -> str:
    """Return the file of a module in sys.modules; "" if it has none, or is not there."""
    return str(getattr(sys.modules.get(name), "__file__", None) or "")


def _refuse_another(name: str, path: Path) -> None:
    """Raise UserError if a module of this name is there already from another file.

    A file with equal content is the same, except at a site.
    """
    package, there = name.rpartition(".")[0], _file_of(name)
    if name not in sys.modules:
        if package not in sys.modules:
            return
        # a package that is there has its modules where it is
        with contextlib.suppress(ModuleNotFoundError):
            there = str(getattr(importlib.util.find_spec(name), "origin", ""))
    if there == str(path):
        return
    if _at_site:
        raise ConfigurationError(f"the site has a module {name} already; choose another name")
    if not (_is_file(Path(there)) and _content(Path(there)) == _content(path)):
        raise ConfigurationError(
            key=path,
            rule=f"there is a module {name} already, {there or _file_of(package)}, with other content; choose another name, or, "
            "for a finished run, load it in a process that has not imported that module",
        )
