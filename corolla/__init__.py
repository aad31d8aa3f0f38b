"""Corolla: personalized federated learning on Flower. `from corolla import run, load, compare`: docs/notebook.md.

Importing this package imports nothing else: each name is loaded on first use.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corolla.api import Run, compare, load, run
    from fl_app.errors import ConfigurationError, DataError, DeploymentError, MethodError, RunFailed, UserError

__all__ = [
    "ConfigurationError",
    "DataError",
    "DeploymentError",
    "MethodError",
    "Run",
    "RunFailed",
    "UserError",
    "compare",
    "load",
    "run",
]

_API = ("Run", "compare", "load", "run")
_HOMES = {name: "corolla.api" if name in _API else "fl_app.errors" for name in __all__}
_BESIDE = ("fl_app", "strategies", "client_app", "deploy")
_HERE = Path(__file__).resolve().parent.parent


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _refuse_foreign_packages() -> None:
    """Raise ImportError naming a file that Python imports instead of a package of Corolla's.

    Python searches the working directory first, and that often has a deploy.py or a folder of this name.
    """
    for name in _BESIDE:
        loaded = sys.modules.get(name)
        spec = importlib.util.find_spec(name) if loaded is None else loaded.__spec__
        origin = spec.origin if spec else None
        if origin is not None and Path(origin).resolve().parent != _HERE / name:
            raise ImportError(
                f"{origin} is imported in place of Corolla's package {name}: rename it, or start Python in another "
                "directory. The command `corolla` does not search the current directory",
                name=name,
            )


# `python -m corolla` imports this before corolla/__main__.py, which removes the current directory from the path.
if not (sys.argv[0] == "-m" and "corolla" in sys.orig_argv):
    _refuse_foreign_packages()
