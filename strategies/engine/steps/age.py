"""Weights of late uploads, which shrink with their age (key `staleness-decay`)."""

from __future__ import annotations

import dataclasses

import numpy as np

from fl_app.config import RunConfig
from strategies.base.state import StepBefore, UploadBuffer, Uploads


def step(config: RunConfig) -> StepBefore | None:
    """Return the step; None in a run without late uploads."""
    return _aged if config.staleness else None


def _aged(uploads: Uploads, buffer: UploadBuffer) -> Uploads:
    if not buffer.factors:
        return uploads
    factors = np.array([buffer.factors.get(i, 1.0) for i in uploads.ids])
    return dataclasses.replace(uploads, sizes=uploads.sizes * factors, factors=factors)
