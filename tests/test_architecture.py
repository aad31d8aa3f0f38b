"""Imports point one way, floor by floor, and no two files import each other, however indirectly."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from fl_app.sources import SOURCES
from strategies import METHODS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fl_app", "strategies", "client_app", "deploy", "corolla")
# of a run; it alone, of the ground floor, names strategies
COMPOSITION_ROOT = "fl_app.server_app"

BELOW_API = (
    "fl_app",
    "strategies",
    "client_app",
    "deploy",
    "corolla.presets",
    "corolla.experiments",
    "corolla.report",
)

# Folders that take a contributor's file, each with the place of its one line (CONTRIBUTING.md).
DOORS = {
    "corolla.cli": "corolla/cli/__init__.py",
    "fl_app.data": "REGISTERED in fl_app/sources.py",
    "strategies": "METHODS in strategies/__init__.py",
    "strategies.baselines": "METHODS in strategies/__init__.py",
}

# What the files of a floor may import beside their own floor. The longest prefix of a module's name says which floor it is on.
FLOORS: dict[str, tuple[str, ...]] = {
    "fl_app": (),
    COMPOSITION_ROOT: ("fl_app", "strategies"),
    "strategies": ("fl_app",),
    "client_app": ("fl_app", "strategies"),
    "deploy": ("fl_app",),
    "corolla.presets": ("fl_app",),
    "corolla.experiments": ("fl_app", "corolla.presets"),
    "corolla.tracking": ("fl_app", "corolla.experiments"),
    "corolla.report": ("fl_app", "corolla.experiments"),
    "corolla.method": ("fl_app", "strategies"),
    "corolla.task": ("fl_app",),
    "corolla.flower": ("fl_app", "strategies"),
    "corolla.api": BELOW_API,
    "corolla.cli": (*BELOW_API, "corolla.api", "corolla.flower"),
    "corolla": PACKAGES,
}


@cache
def modules() -> dict[str, Path]:
    """Every module of Corolla by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


# Names that several files have for a reason: what Python runs, and what a user's method or task imports beside its home.
SHARED_FILE_NAMES = {"__init__.py", "__main__.py", "method.py", "task.py"}
# Each tracker's file has a Store (corolla/tracking/follow.py).
SHARED_CLASS_NAMES = {"Store"}


def several(names: Iterable[tuple[str, Path]], allowed: set[str]) -> list[str]:
    """The names that stand for several files or classes, with their files."""
    places: dict[str, list[str]] = {}
    for name, path in names:
        places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return [f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1 and name not in allowed]


def test_no_two_files_have_the_same_name() -> None:
    assert several(((path.name, path) for path in modules().values()), SHARED_FILE_NAMES) == []


def test_no_two_classes_have_the_same_name() -> None:
    classes = (
        (node.name, path) for path in modules().values() for node in parsed(path).body if isinstance(node, ast.ClassDef)
    )
    assert several(classes, SHARED_CLASS_NAMES) == []


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(path: Path) -> tuple[str, ...]:
    """What a file imports anywhere: inside functions and for type checkers too. Names may be attributes of modules."""
    return tuple(names_imported(parsed(path)))


def imports(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield a file's imports. Expressions have none."""
    below: list[ast.AST] = [tree]
    while below:
        node = below.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.expr):
            below += ast.iter_child_nodes(node)


def names_imported(tree: ast.Module) -> Iterator[str]:
    for node in imports(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def graph() -> dict[str, set[str]]:
    """The modules of Corolla that each module of Corolla imports."""
    known = modules()
    edges: dict[str, set[str]] = {}
    for module, path in known.items():
        targets = (name if name in known else name.rpartition(".")[0] for name in imported(path))
        edges[module] = {target for target in targets if target in known} - {module}
    return edges


def floor(module: str) -> str:
    return max((name for name in FLOORS if f"{module}.".startswith(f"{name}.")), key=len)


def test_imports_point_down() -> None:
    wrong = []
    for module, targets in graph().items():
        own = floor(module)
        allowed = (own, *FLOORS[own])
        wrong += [
            f"{module} imports {target}"
            for target in sorted(targets)
            if not any(f"{target}.".startswith(f"{name}.") for name in allowed)
        ]
    assert not wrong, "\n".join(wrong)


def test_a_contributors_file_has_its_line() -> None:
    used = {source.prepare.partition(":")[0] for source in SOURCES.values()}.union(*graph().values())
    used |= {
        f"{folder}.{name.replace('-', '_')}" for folder in ("strategies", "strategies.baselines") for name in METHODS
    }
    lacking = [
        f"{path.relative_to(ROOT)}: nothing imports it; its line in {DOORS[folder]} is missing"
        for module, path in modules().items()
        if (folder := module.rpartition(".")[0]) in DOORS and not path.name.startswith("__") and module not in used
    ]
    assert not lacking, "; ".join(lacking)


def test_nothing_but_the_studies_imports_them() -> None:
    for folder in (*PACKAGES, "benchmarks", "tests"):
        # parsing all takes seconds
        naming = [path for path in sorted((ROOT / folder).rglob("*.py")) if b"studies" in path.read_bytes()]
        for path in naming:
            assert "studies" not in {name.split(".")[0] for name in imported(path)}, path


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan, 1972), each sorted by name."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        path.append(module)
        for target in sorted(edges[module]):
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in path:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            component = path[path.index(module) :]
            del path[path.index(module) :]
            if len(component) > 1:
                found.append(sorted(component))

    for module in sorted(edges):
        if module not in index:
            visit(module)
    return found


@pytest.mark.parametrize(
    ("edges", "found"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"a"}}, [["a", "b"]]),
        ({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set()}, [["a", "b", "c"]]),
        ({"a": {"b", "c"}, "b": {"a"}, "c": {"d"}, "d": {"c"}}, [["c", "d"], ["a", "b"]]),
    ],
)
def test_circles_are_found(edges: dict[str, set[str]], found: list[list[str]]) -> None:
    assert circles(edges) == found


def test_no_files_import_each_other() -> None:
    known = modules()
    files = [", ".join(str(known[module].relative_to(ROOT)) for module in circle) for circle in circles(graph())]
    assert not files, "these files import each other:\n" + "\n".join(files)


def test_only_two_folders_import_flower() -> None:
    importing = {
        module for module, path in modules().items() for name in imported(path) if name.split(".")[0] == "flwr"
    }
    assert [name for name in sorted(importing) if not name.startswith(("fl_app.transport.", "deploy."))] == []


def test_kernels_do_not_import_flower_or_torch() -> None:
    for path in sorted((ROOT / "strategies" / "kernels").rglob("*.py")):
        names = set(imported(path))
        assert not {name.split(".")[0] for name in names} & {"flwr", "torch"}, f"{path} imports {sorted(names)}"
        inner = {name for name in names if name.startswith("strategies.") and not name.startswith("strategies.kernels")}
        assert not inner, f"{path} imports {sorted(inner)}"


def loaded_by(*codes: str) -> list[set[str]]:
    """Return the modules that a process of its own has loaded after each code, one after the other."""
    code = "\n".join(["import sys", *(f"{code}\nprint(*sys.modules)" for code in codes)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


PLUGIN = """
from dataclasses import dataclass
from corolla.method import FedAvg, LocalUpdate, Method, NoParams, all_tensors
from corolla.task import Metric, Task
"""
OF_ADAPTERS = {"peft", "transformers", "accelerate"}
UNWANTED = {
    "import fl_app.sources": {"numpy", "torch", "pandas", "datasets", "PIL", "flwr", "fl_app.data"},
    "import fl_app.tasks": {"torch", "torchmetrics"},
    "import client_app.client_app": {
        *("torchvision", "sklearn", "scipy", "ray", "datasets", "flwr_datasets", "altair", "torch", "psutil", "pandas"),
        *("IPython", "ipykernel", "nbclient", "mlflow", "wandb", "tensorboard", "timm", "tokenizers", *OF_ADAPTERS),
    },
    PLUGIN: {"torch"},
    "import corolla.cli, client_app.client, corolla.experiments.exported.adapter": OF_ADAPTERS,
}
"""What is imported, from the lightest on, and the packages that it must not import."""


def test_a_process_imports_no_package_that_it_does_not_use() -> None:
    found = dict(zip(UNWANTED, loaded_by(*UNWANTED), strict=True))
    for code, loaded in found.items():
        assert not UNWANTED[code] & loaded, f"`{code}` imports {sorted(UNWANTED[code] & loaded)}"
    own = found[PLUGIN] - found["import client_app.client_app"]
    more = {module for module in own if not module.startswith(("strategies.", "fl_app."))}
    assert more == {"corolla", "corolla.method", "corolla.task"}


def test_importing_corolla_loads_nothing_else() -> None:
    loaded, used = loaded_by("import corolla", "from corolla import run")
    ours = {module for module in loaded if module.partition(".")[0] in PACKAGES}
    assert ours == {"corolla"} and not {"numpy", "flwr", "torch"} & loaded
    assert "corolla.api" in used


def test_what_corolla_names_is_there() -> None:
    import corolla
    import corolla.method
    import corolla.task

    for package in (corolla, corolla.method, corolla.task):
        assert set(package.__all__) <= set(dir(package))
        assert all(getattr(package, name) is not None for name in package.__all__)


def test_examples_import_what_the_pages_name() -> None:
    public, kernels = "corolla", "strategies.kernels"
    for path in (ROOT / "examples").rglob("*.py"):
        ours = [name for name in imported(path) if name.partition(".")[0] in PACKAGES]
        # the round in NumPy, with which the architecture's page begins
        allowed = (public, kernels) if path.name == "one_round.py" else (public,)
        assert not [name for name in ours if not f"{name}.".startswith(tuple(f"{part}." for part in allowed))], path


def test_types_are_told_to_who_imports_a_package() -> None:
    assert [name for name in PACKAGES if not (ROOT / name / "py.typed").is_file()] == []


def test_a_server_half_knows_neither_flower_nor_what_runs_it() -> None:
    edges, tops = graph(), {name.split(".")[0] for name in imported(ROOT / "strategies" / "base" / "server_half.py")}
    assert "flwr" not in tops and "fl_app.transport.flower" not in edges["strategies.base.server_half"]
    reached = {target for target in edges["strategies.base.server_half"] if target.startswith("strategies.engine")}
    assert not reached
    engine = [module for module in edges if module.startswith("strategies.engine.")]
    assert engine and not [module for module in engine if "strategies.base.strategy" in edges[module]]


def test_the_page_lists_every_package() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("\n## Packages\n")[2]
    assert [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")] == [
        f"{package}/" for package in (*PACKAGES, "studies")
    ]
