"""Names that modules had before they moved to other folders, for one release.

`import strategies.fedavg` gives the module `strategies.baselines.fedavg` itself, and a DeprecationWarning that names it.
A module that became part of another one gives that one.
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
from types import CodeType, ModuleType

_STRATEGIES = Path(__file__).resolve().parent.parent / "strategies"
_TO_TRANSPORT = {
    "fl_app": ("app_bundle", "flower_patches", "outgoing", "wire"),
    "fl_app.server": ("agreement", "client_registry", "discovery", "exchange", "identity", "inprocess", "replies"),
}
_today = {
    "client_app.augment": "client_app.batches",
    "client_app.captured": "client_app.at_once",
    "client_app.device_model": "client_app.trainer",
    "client_app.private": "client_app.private_round",
    "client_app.process": "client_app.session",
    "client_app.state": "client_app.stored_state",
    "deploy.approval": "deploy.site",
    "deploy.arriving": "deploy.unanswered",
    "deploy.expiry": "deploy.certificates",
    "deploy.hosts": "deploy.cluster",
    "deploy.metrics": "deploy.prometheus",
    "deploy.processes": "deploy.detached",
    "fl_app.data.arrays": "fl_app.data.user_arrays",
    "fl_app.data.medmnist": "fl_app.data.npz",
    "fl_app.data.precision": "fl_app.data.moments",
    "fl_app.privacy.companies": "fl_app.privacy.aggregation_groups",
    "fl_app.privacy.shares": "fl_app.privacy.masking",
    "fl_app.server.clock": "fl_app.server.arrivals",
    "fl_app.server.superlink": "fl_app.transport.replies",
    "fl_app.site": "fl_app.site_directory",
    "fl_app.tasks.scores": "fl_app.tasks.scoring",
    "fl_app.transport.discovery": "fl_app.transport.client_registry",
    "fl_app.transport.fetched_reply": "fl_app.transport.replies",
    "strategies.base.overview": "strategies.base.method",
    "strategies.base.uploads": "strategies.base.state",
    "strategies.kernels.folded": "strategies.kernels.aggregate",
    "strategies.kernels.heads": "strategies.kernels.parts",
    "strategies.kernels.kmeans": "strategies.baselines.fedconcat",
    "strategies.kernels.micro_classes": "strategies.fedpake",
    "strategies.overview": "strategies.method_tables",
    **{f"{package}.{name}": f"fl_app.transport.{name}" for package, names in _TO_TRANSPORT.items() for name in names},
}


@functools.cache
def _in_folders() -> dict[str, str]:
    """Return the names of methods and kernels, which lay beside each other, by the earlier ones."""
    return {
        f"strategies.{module.name}": f"strategies.{folder}.{module.name}"
        for folder in ("baselines", "kernels")
        for module in pkgutil.iter_modules([str(_STRATEGIES / folder)])
    }


def _name_today(name: str) -> str | None:
    """Return the name of a module that moved, alone or with its package. None for any other."""
    if name in _today:
        return _today[name]
    package, _, last = name.rpartition(".")
    if package == "strategies":
        return _in_folders().get(name)
    moved = _name_today(package) if package else None
    return f"{moved}.{last}" if moved else None


class _EarlierNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for a module that moved. None for any other."""
        now = _name_today(fullname)
        if now is None or importlib.util.find_spec(now) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=now)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the module of today's name. The import sets its spec, and `exec_module` sets it back."""
        assert spec.origin is not None
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__
        warnings.warn(f"{spec.name} is {spec.origin} now", DeprecationWarning, stacklevel=2)
        return module

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of a module that moved: `python -m` runs it."""
        now = _name_today(fullname)
        found = importlib.util.find_spec(now) if now else None
        assert found is not None and isinstance(found.loader, importlib.abc.InspectLoader)
        return found.loader.get_code(found.name)

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back. It has run already."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


# before the finder of files, which would load a submodule of a moved package a second time
sys.meta_path.insert(0, _EarlierNames())
