"""A bound on each client's number of samples in means (key `max-size-weight`): a factor times the round's median."""

from __future__ import annotations

import dataclasses

import numpy as np

from fl_app.config import RunConfig
from strategies.base.state import StepBefore, UploadBuffer, Uploads
from strategies.kernels.robust import capped


def step(config: RunConfig) -> StepBefore | None:
    """Return the step; None without the key."""
    factor = config.max_size_weight
    if not factor:
        return None

    def bound(uploads: Uploads, buffer: UploadBuffer) -> Uploads:
        sizes = capped(uploads.sizes, factor)
        bounded = np.divide(sizes, uploads.sizes, out=np.ones_like(sizes), where=uploads.sizes > 0)
        return dataclasses.replace(uploads, sizes=sizes, bounded=bounded)

    return bound
