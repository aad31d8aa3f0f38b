"""FedPer: the classifier is personal, it never leaves the client; the body below it is FedAvg's.

Arivazhagan, Aggarwal, Singh, Choudhary: "Federated Learning with Personalization Layers", arXiv:1912.00818, 2019.

Client: start from the received base layers and its own personalization layers, train both together by SGD, send the base
layers. Server: mean of the base layers weighted by training samples (Algorithms 1 and 2).

Deviations: one personalization layer, the model's last Linear layer (the paper's K_P = 1; it also tries whole ResNet blocks).
BatchNorm statistics belong to the body.
"""

from __future__ import annotations

from fl_app.errors import UserError
from fl_app.keys import NoParams
from fl_app.layout import Layout
from strategies.base import LocalUpdate, Method
from strategies.fedavg import FedAvg


def body(layout: Layout, params: object = None) -> frozenset[str]:
    """Names of all tensors but the classifier's.

    Raises UserError if the model cannot be split: no Linear layer, or nothing but one.
    """
    below = layout.names - layout.classifier
    if not layout.classifier or not below:
        what = "nothing below its only Linear layer" if layout.classifier else "no Linear layer, hence no classifier"
        raise UserError(f"model: fedper, fedrep and lg-fedavg split it into body and classifier, but it has {what}")
    return below


METHOD = Method("fedper", NoParams, FedAvg[NoParams], LocalUpdate[NoParams], body)
