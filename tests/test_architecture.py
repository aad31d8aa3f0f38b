"""Imports point one way: fl_app foundations <- strategies <- client_app; the composition roots join them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPOSITION_ROOTS = ("fl_app/server_app.py", "fl_app/cli/", "fl_app/api/")


def imports(path: Path) -> set[str]:
    """Top-level packages and modules a file imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def test_foundations_import_neither_strategies_nor_the_client() -> None:
    for path in files("fl_app"):
        if not str(path.relative_to(ROOT)).startswith(COMPOSITION_ROOTS):
            wrong = {m for m in imports(path) if m.split(".")[0] in ("strategies", "client_app")}
            assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_strategies_do_not_import_the_client() -> None:
    for path in files("strategies"):
        wrong = {m for m in imports(path) if m.split(".")[0] in ("client_app", "deploy")}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_kernels_do_not_import_flower_or_torch() -> None:
    for name in ("masks", "scores", "aggregate", "robust"):
        wrong = {m for m in imports(ROOT / "strategies" / f"{name}.py") if m.split(".")[0] in ("flwr", "torch", "fl_app")}
        assert not wrong, f"strategies/{name}.py imports {wrong}"


def test_the_client_process_does_not_import_what_it_does_not_use() -> None:
    code = "import sys, client_app.client_app; print(' '.join(sys.modules))"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    unwanted = {"torchvision", "sklearn", "scipy", "ray", "datasets", "flwr_datasets", "matplotlib", "torch", "psutil"}
    unwanted |= {"pandas", "IPython", "ipykernel", "nbclient", "mlflow", "wandb", "tensorboard"}
    assert not unwanted & loaded, f"a client process imports {sorted(unwanted & loaded)}"
