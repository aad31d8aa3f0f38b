"""Methods for a Flower app of one's own: a strategy for each, and a mod for the client app (docs/flower-app.md).

    from corolla.flower import FedCAC                  # server app
    strategy = FedCAC(tau=0.5, beta=20, fraction_train=0.5)
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(Net().state_dict()), num_rounds=50)

    from corolla.flower import personalize             # client app
    app = ClientApp(mods=[personalize])

Importing it loads no method, and never PyTorch.
"""

from __future__ import annotations

import importlib
from typing import Any

_PARTS = {"personalize": "client_mod", "objective": "training_loop", "epochs": "training_loop"}


def __getattr__(name: str) -> Any:
    """Return a part of the package, or the strategy class of a method by its paper's name: `FedCAC`, `LGFedAvg`."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name in _PARTS:
        return getattr(importlib.import_module(f"{__name__}.{_PARTS[name]}"), name)
    return importlib.import_module(f"{__name__}.method_strategy").strategy_class(name)
