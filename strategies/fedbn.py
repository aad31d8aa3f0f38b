"""FedBN: BatchNorm layers are personal, parameters and statistics; everything else is FedAvg's.

Li, Jiang, Zhang, Kamp, Dou: "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.

Client: start from the received tensors and its own BatchNorm layers, train all by SGD, send all but the BatchNorm layers.
Server: mean of what travels (Algorithm 1), weighted by training samples.

Deviations: the weights (the paper averages uniformly). A model without BatchNorm is FedAvg, bit for bit, and a warning
says so.
"""

from __future__ import annotations

import logging

from fl_app.keys import NoParams
from fl_app.layout import Layout
from strategies.base import LocalUpdate, Method, local_epochs
from strategies.fedavg import FedAvg

log = logging.getLogger("corolla")


class FedBN(FedAvg[NoParams]):
    """Server half: FedAvg on what travels."""

    def summary(self) -> None:
        """Log what runs; warn if nothing is personal."""
        super().summary()
        if not self.full_layout.batchnorm:
            log.warning("fedbn: model %s has no BatchNorm layer, so this run is FedAvg", self.config.model)


def shared(layout: Layout, params: NoParams) -> frozenset[str]:
    """Everything but BatchNorm layers travels."""
    return layout.names - layout.batchnorm


METHOD = Method("fedbn", NoParams, FedBN, LocalUpdate[NoParams], shared, dp_epochs=local_epochs, sums=True)
