"""The part of torchmetrics that tasks measure with, without the rest of it.

`import torchmetrics` also loads its metrics of images, sound and text, and with them torchvision and torch's compiler: five seconds
and more in every client's process. The functions of one kind take one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

PACKAGE = "torchmetrics"


@functools.cache
def functional(kind: str) -> ModuleType:
    """Return `torchmetrics.functional.KIND`, "classification" or "regression".

    Where this part cannot be had by itself, or all of the package is there already, it is that one's.
    """
    name = f"{PACKAGE}.functional.{kind}"
    if PACKAGE not in sys.modules:
        with contextlib.suppress(ImportError, AttributeError), _empty(PACKAGE, f"{PACKAGE}.functional"):
            return importlib.import_module(name)
    return importlib.import_module(name)


@contextlib.contextmanager
def _empty(*packages: str) -> Iterator[None]:
    """Let packages be there without what their own files import; afterwards as if nothing of them had been imported.

    So who imports torchmetrics later, a user's own task say, gets a whole one.
    """
    found = importlib.util.find_spec(packages[0])
    if found is None or found.submodule_search_locations is None:
        raise ImportError(f"no package {packages[0]}")
    for name in packages:
        package = ModuleType(name)
        package.__path__ = [str(Path(root, *name.split(".")[1:])) for root in found.submodule_search_locations]
        # The package's other modules import it.
        package.__dict__["_logger"] = logging.getLogger(packages[0])
        sys.modules[name] = package
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == packages[0]]:
            del sys.modules[name]
