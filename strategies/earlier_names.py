"""The names that the modules of strategies.baselines and strategies.kernels had directly in `strategies`, for one release.

`import strategies.fedavg` gives the module strategies.baselines.fedavg itself, and a DeprecationWarning that names it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pkgutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_FOLDERS = ("baselines", "kernels")


@functools.cache
def _moved() -> dict[str, str]:
    """Return the folder of each module that moved, by its name."""
    beside = Path(__file__).parent
    return {module.name: folder for folder in _FOLDERS for module in pkgutil.iter_modules([str(beside / folder)])}


class _EarlierNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for a module that lies in a folder now. None for any other."""
        package, _, name = fullname.partition(".")
        folder = _moved().get(name.partition(".")[0]) if package == "strategies" else None
        now = f"strategies.{folder}.{name}"
        if folder is None or importlib.util.find_spec(now) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=now)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the module of today's name. The import sets its spec, and `exec_module` sets it back."""
        assert spec.origin is not None
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__
        warnings.warn(f"{spec.name} is {spec.origin} now", DeprecationWarning, stacklevel=2)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back. It has run already."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def accept() -> None:
    """Let the earlier names be imported."""
    if not any(isinstance(finder, _EarlierNames) for finder in sys.meta_path):
        # before the finder of files, which would load a submodule of a moved package a second time
        sys.meta_path.insert(0, _EarlierNames())
