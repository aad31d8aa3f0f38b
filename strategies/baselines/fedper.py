"""FedPer: the classifier is personal and never leaves the client; the body below it is FedAvg's.

Arivazhagan, Aggarwal, Singh, Choudhary: "Federated Learning with Personalization Layers", arXiv:1912.00818, 2019.

Client: it starts from the received base layers and its own personalization layers. It trains both together by SGD and
sends the base layers. Server: the mean of the base layers weighted by training samples (Algorithms 1 and 2).

Deviations:

- The personalization layers are the model's classifier (the paper's K_P = 1). The paper also tries whole ResNet blocks,
  which the key `classifier` can name.
- BatchNorm statistics belong to the body.
"""

from __future__ import annotations

from strategies.base import (
    SPLIT,
    LocalUpdate,
    Method,
    NoParams,
    Overview,
    all_but_classifier,
    local_epochs,
)
from strategies.baselines.fedavg import FedAvg

METHOD = Method(
    "fedper",
    NoParams,
    FedAvg[NoParams],
    LocalUpdate[NoParams],
    all_but_classifier,
    dp_epochs=local_epochs,
    sums=True,
    needs=SPLIT,
    overview=Overview(
        group="A part of the model",
        travels="body both ways",
        stays="classifier",
        disk="4h",
        unseen="global part, the rest initial",
        use="different classes per client; simple and strong",
    ),
)
