"""What the packages import is declared; a foreign module of one of their names in the working directory breaks nothing."""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from corolla.experiments import launch
from fl_app import extras, plugins
from fl_app.errors import UserError
from fl_app.transport.app_bundle import project_file
from tests.facts import mentions
from tests.test_architecture import imports, modules, parsed

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# What is imported is declared -----------------------------------------------------------------------------------------


@functools.cache
def imported_packages(path: Path) -> frozenset[str]:
    """Return the first parts of the names that a file imports, inside functions and for type checkers too."""
    found = set()
    for node in imports(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return frozenset(found)


def normalized(name: str) -> str:
    """Return a distribution's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required_by_extra(requirement: Requirement) -> set[str]:
    """Return the distributions that a requirement's extras bring: ray, of flwr[simulation]."""
    found = set()
    for line in metadata.distribution(requirement.name).requires or []:
        theirs = Requirement(line)
        if theirs.marker and any(theirs.marker.evaluate({"extra": extra}) for extra in requirement.extras):
            found.add(normalized(theirs.name))
    return found


@functools.cache
def distributions() -> Mapping[str, list[str]]:
    """Return the installed distributions by the packages that they bring."""
    return metadata.packages_distributions()


def undeclared(files: Iterable[Path], requirements: Iterable[str]) -> dict[str, str]:
    """Return the imported third-party packages that no requirement brings, each with a file that imports it."""
    declared = set()
    for requirement in map(Requirement, requirements):
        declared.add(normalized(requirement.name))
        if requirement.extras and requirement.name != "corolla":
            declared |= required_by_extra(requirement)
    found = {}
    for path in files:
        for package in imported_packages(path) - sys.stdlib_module_names - set(plugins.PACKAGES):
            if not declared & {normalized(name) for name in distributions().get(package, [package])}:
                found[package] = str(path)
    return found


def test_what_is_imported_is_declared() -> None:
    optional = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    assert undeclared(modules().values(), [*PROJECT["dependencies"], *optional]) == {}


def test_an_undeclared_package_is_found(tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_text("import os\ndef f():\n    from yaml.nodes import Node\n    import ray, fl_app.transport.wire\n")
    assert undeclared([path], ["flwr>=1"]) == {"yaml": str(path), "ray": str(path)}
    assert undeclared([path], ["flwr[simulation]>=1", "PyYAML"]) == {}


def test_what_an_extra_brings_is_in_the_table_of_extras() -> None:
    # their errors name what to install themselves
    trackers_and_onnx = {"mlflow", "wandb", "tensorboard", "onnx", "onnxruntime", "onnxscript"}
    # it serves tasks of the user's own
    not_seen_in_imports = {"torchmetrics"}
    from_extras = set(undeclared(modules().values(), PROJECT["dependencies"]))
    assert from_extras - trackers_and_onnx == set(extras.EXTRAS) - not_seen_in_imports


def test_the_apps_project_file_is_the_clones() -> None:
    assert project_file() == ROOT / "pyproject.toml"


# Foreign modules in the working directory -----------------------------------------------------------------------------

FOREIGN = [name for name in plugins.PACKAGES if name != "corolla"]
KINDS = {"file": "{}.py", "package": "{}/__init__.py", "folder": "{}/other.py"}
"""Where a foreign module lies. A folder without __init__.py is one for Python, too, but comes after every other."""

# The ways to start Corolla, by whether Python looks for modules in the working directory first.
ELSEWHERE = ("the command", "python -m corolla")
HERE_FIRST = ("python -m corolla.cli", "an import")


def command_of(way: str, python: str) -> list[str]:
    """Return the command that starts Corolla in this way, with this Python, and has it print "demo"."""
    if way == "the command":
        return [str(Path(python).parent / "corolla"), "presets", "demo"]
    if way == "an import":
        return [python, "-c", "from corolla import run; print(run.__name__, 'demo')"]
    return [python, *way.split()[1:], "presets", "demo"]


def put_foreign(directory: Path, name: str, kind: str) -> Path:
    """Put a foreign module into a directory that cannot be imported."""
    path = directory / KINDS[kind].format(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("raise RuntimeError('a foreign module was imported')\n")
    return path


def start(way: str, directory: Path, python: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Start Corolla in a directory."""
    return subprocess.run(
        command_of(way, python), cwd=directory, env=dict(environment), capture_output=True, text=True, check=False
    )


def check_ignored(way: str, directory: Path, python: str, environment: Mapping[str, str]) -> None:
    """Check that Corolla starts in a directory, whatever lies there."""
    done = start(way, directory, python, environment)
    assert done.returncode == 0 and "demo" in done.stdout, done.stderr


def check_named(way: str, foreign: Path, name: str, python: str, environment: Mapping[str, str]) -> None:
    """Check that Corolla does not start in the directory of a foreign module, and names it."""
    directory = foreign.parent if foreign.stem == name else foreign.parent.parent
    done = start(way, directory, python, environment)
    assert done.returncode == 1
    assert mentions(done.stderr, f"{foreign} is imported", f"Corolla's package {name}", "rename it")


@pytest.mark.parametrize("way", ELSEWHERE)
def test_foreign_modules_are_ignored(tmp_path: Path, way: str) -> None:
    for name, kind in itertools.product(FOREIGN, KINDS):
        put_foreign(tmp_path, name, kind)
    check_ignored(way, tmp_path, sys.executable, os.environ)


@pytest.mark.parametrize("way", HERE_FIRST)
def test_foreign_folders_are_ignored_even_where_python_looks_first(tmp_path: Path, way: str) -> None:
    for name in FOREIGN:
        put_foreign(tmp_path, name, "folder")
    check_ignored(way, tmp_path, sys.executable, os.environ)


@pytest.mark.parametrize(
    ("name", "way", "kind"),
    [(name, HERE_FIRST[number % 2], kind) for number, name in enumerate(FOREIGN) for kind in ("file", "package")],
)
def test_a_foreign_module_where_python_looks_first_is_named(tmp_path: Path, way: str, name: str, kind: str) -> None:
    check_named(way, put_foreign(tmp_path, name, kind), name, sys.executable, os.environ)


@pytest.mark.parametrize("kind", ["file", "package"])
@pytest.mark.parametrize("name", plugins.PACKAGES)
def test_a_simulation_names_what_its_clients_would_import(tmp_path: Path, name: str, kind: str) -> None:
    launch.refuse_foreign_packages(tmp_path)
    foreign = put_foreign(tmp_path, name, kind)
    words = f"{foreign} would be imported by simulated clients in place of Corolla's package {name}: rename it"
    with pytest.raises(UserError, match=re.escape(words)):
        launch.refuse_foreign_packages(tmp_path)


def test_a_simulation_starts_beside_foreign_folders_and_in_a_clone(tmp_path: Path) -> None:
    for name in plugins.PACKAGES:
        put_foreign(tmp_path, name, "folder")
    launch.refuse_foreign_packages(tmp_path)
    launch.refuse_foreign_packages(ROOT)


def test_a_simulation_beside_a_foreign_module_writes_nothing(tmp_path: Path) -> None:
    foreign = put_foreign(tmp_path, "strategies", "file")
    command = [str(Path(sys.executable).parent / "corolla"), "run", "--clients", "2", "--backend", "ray"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert mentions(done.stderr, "error", foreign, "imported by simulated")
    assert list(tmp_path.iterdir()) == [foreign]


def test_a_plugin_beside_foreign_modules_imports_corollas(tmp_path: Path) -> None:
    for name in FOREIGN:
        put_foreign(tmp_path, name, "file")
    (tmp_path / "mine.py").write_text("from corolla.method import FedAvg\nimport deploy.cli\n")
    code = (
        "from pathlib import Path; from fl_app import plugins; plugins.reset(Path()); "
        "plugins.load('method', 'mine:FedAvg'); import deploy.connection, client_app.client"
    )
    subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, check=True)
