"""FedBN: BatchNorm layers are personal, parameters and statistics; everything else is FedAvg's.

Li, Jiang, Zhang, Kamp, Dou: "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.

The client starts from the received tensors and its own BatchNorm layers. It trains all of them by SGD, and sends all
but the BatchNorm layers. The server takes the mean of the tensors that travel (Algorithm 1), weighted by training
samples.

Deviation: the weights. The paper averages uniformly. With a model without BatchNorm the run is FedAvg, bit for bit, and
a warning is logged.
"""

from __future__ import annotations

from strategies.base import (
    Layout,
    LocalUpdate,
    Method,
    NoParams,
    Overview,
    local_epochs,
    log,
)
from strategies.baselines.fedavg import FedAvg


class FedBN(FedAvg[NoParams]):
    """Server half: FedAvg on the tensors that travel."""

    def summary(self) -> None:
        """Log the run as every method does. Warn if nothing is personal."""
        super().summary()
        if not self.full_layout.batchnorm:
            log.warning("fedbn: model %s has no BatchNorm layer, so this run is FedAvg", self.config.model)


def shared(layout: Layout, params: NoParams) -> frozenset[str]:
    """Return the names of all tensors outside BatchNorm layers."""
    return layout.names - layout.batchnorm


METHOD = Method(
    "fedbn",
    NoParams,
    FedBN,
    LocalUpdate[NoParams],
    shared,
    dp_epochs=local_epochs,
    sums=True,
    overview=Overview(
        group="A part of the model",
        travels="all but BatchNorm",
        stays="BatchNorm",
        disk="4(a+b)",
        unseen="global part, the rest initial",
        use="inputs that look different",
    ),
)
