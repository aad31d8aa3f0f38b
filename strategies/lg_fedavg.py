"""LG-FedAvg: every client keeps its own body; only the classifier on top is shared.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: "Think Locally, Act Globally: Federated Learning with Local
and Global Representations", arXiv:2001.01523, 2020.

Client: start from its own local representation and the received global part, train both together by SGD, send the global
part. Server: mean of the global parts weighted by training samples (Algorithm 1).

Deviations: the global part is the model's last Linear layer (in the authors' code a number of last layers, averaged
uniformly); all models start from the run's initial weights (in the authors' code from a finished FedAvg run); no auxiliary
unsupervised or fairness losses. BatchNorm statistics belong to the body.
"""

from __future__ import annotations

from fl_app.keys import NoParams
from fl_app.layout import Layout
from strategies.base import LocalUpdate, Method, all_but_classifier
from strategies.fedavg import FedAvg


def shared(layout: Layout, params: NoParams) -> frozenset[str]:
    """Only the classifier travels."""
    return layout.names - all_but_classifier(layout)


METHOD = Method("lg-fedavg", NoParams, FedAvg[NoParams], LocalUpdate[NoParams], shared)
