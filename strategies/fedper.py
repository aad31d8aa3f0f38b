"""FedPer: the classifier is personal, it never leaves the client; the body below it is FedAvg's.

Arivazhagan, Aggarwal, Singh, Choudhary: "Federated Learning with Personalization Layers", arXiv:1912.00818, 2019.

Client: start from the received base layers and its own personalization layers, train both together by SGD, send the base
layers. Server: mean of the base layers weighted by training samples (Algorithms 1 and 2).

Deviations: one personalization layer, the model's last Linear layer (the paper's K_P = 1; it also tries whole ResNet blocks).
BatchNorm statistics belong to the body.
"""

from __future__ import annotations

from fl_app.keys import NoParams
from strategies.base import LocalUpdate, Method, all_but_classifier, local_epochs
from strategies.fedavg import FedAvg

METHOD = Method(
    "fedper", NoParams, FedAvg[NoParams], LocalUpdate[NoParams], all_but_classifier, dp_epochs=local_epochs, sums=True
)
