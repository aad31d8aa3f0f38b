"""A method's halves on a made-up layout: server half, a round's uploads, a client's context."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fl_app.layout import Layout, Model
from fl_app.server.run_folder import RunFolder
from strategies import METHODS
from strategies.base import RoundContext, Uploads
from tests.conftest import config


def filled(layout: Layout, value: float) -> Model:
    """Return a model that is this number everywhere."""
    return Model(np.full(layout.d, value, np.float32), np.full(layout.b, value, np.float32))


def server(
    method: str, layout: Layout, initial: float | Model = -1.0, run: dict[str, Any] | None = None, **own: Any
) -> Any:
    """Return a server half. initial: the model, or its value everywhere; run, own: keys of the run and of the method."""
    parsed = config(method=method, **{method: own}, **(run or {}))
    start = initial if isinstance(initial, Model) else filled(layout, initial)
    shared = METHODS[method].shared(layout, parsed.params)
    return METHODS[method].server(parsed, layout, start, shared, RunFolder(Path("unused"), "experiment"))


def uploads(
    ids: Sequence[int],
    W: np.ndarray,
    B: np.ndarray | None = None,
    *,
    sizes: ArrayLike | None = None,
    bits: np.ndarray | None = None,
    extras: dict[str, np.ndarray] | None = None,
) -> Uploads:
    """Return uploads [N, d], without buffers and of equal sizes unless they are given."""
    counts = np.ones(len(ids)) if sizes is None else np.asarray(sizes, float)
    none = np.zeros((len(ids), 0), np.float32)
    return Uploads(list(ids), W, none if B is None else B, counts, bits, extras or {}, [{} for _ in ids])


def context(
    method: str,
    layout: Layout,
    *,
    initial: Model | None = None,
    trainer: Any = None,
    round: int = 1,
    client_id: int = 0,
    **own: Any,
) -> RoundContext[Any]:
    """Return the context of a client with 12 samples. initial: 0 everywhere unless it is given; own: keys of the method."""
    parsed = config(method=method, **{method: own})
    start, shared = initial or filled(layout, 0), METHODS[method].shared(layout, parsed.params)
    return RoundContext(parsed, parsed.params, round, client_id, layout, shared, lambda: start, trainer, 12, {})
