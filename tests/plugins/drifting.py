"""FedAvg whose clients also report how far they move: one more client metric, declared in this file alone."""

from __future__ import annotations

import dataclasses

import numpy as np

from fl_app.keys import NoParams
from fl_app.layout import Model
from fl_app.metrics import Metric
from fl_app.transport.wire import Upload
from strategies.base import ClientState, LocalUpdate, Method, RoundContext, all_tensors
from strategies.baselines.fedavg import FedAvg

DRIFT = Metric("drift", higher_is_better=False, low=0, picture="How far clients move", unit="Euclidean norm")


class DriftingUpdate(LocalUpdate[NoParams]):
    """Client half."""

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[NoParams]) -> Upload:
        """Add the norm of what training has changed."""
        plain = super().upload(before, after, state, ctx)
        moved = float(np.linalg.norm(after.params - before.params))
        return dataclasses.replace(plain, metrics={**plain.metrics, DRIFT.name: moved})


METHOD = Method("drifting", NoParams, FedAvg[NoParams], DriftingUpdate, all_tensors, reports=(DRIFT,))
