"""LG-FedAvg: every client keeps its own body; only the classifier on top is shared.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: "Think Locally, Act Globally: Federated Learning with Local
and Global Representations", arXiv:2001.01523, 2020.

Client: start from its own local representation and the received global part, train both together by SGD, send the global
part. Server: mean of the global parts weighted by training samples (Algorithm 1).

Deviations: the global part is the model's last Linear layer (in the authors' code a number of last layers, averaged uniformly);
all models start from the run's initial weights (in the authors' code from a finished FedAvg run); no auxiliary unsupervised or
fairness losses. `shared = "first"` is what FL-bench, and so FedOBP's tables, ran under this name. BatchNorm statistics belong
to the body.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_app.keys import key
from fl_app.layout import Layout
from strategies.base import LocalUpdate, Method, all_but_classifier, local_epochs
from strategies.fedavg import FedAvg


@dataclass(frozen=True)
class LGFedAvgParams:
    """Parameters of LG-FedAvg, table `lg-fedavg`."""

    shared: Literal["classifier", "first"] = key(
        "classifier",
        "The part that travels: the last Linear layer, or the first layer, which FL-bench shares under this name.",
    )


def shared(layout: Layout, params: LGFedAvgParams) -> frozenset[str]:
    """Only the classifier travels, or only the first layer that has parameters."""
    rest = all_but_classifier(layout)
    if params.shared == "classifier":
        return layout.names - rest
    first = layout.params[0].name.rpartition(".")[0]
    return frozenset(slot.name for slot in layout.params if slot.name.rpartition(".")[0] == first)


METHOD = Method(
    "lg-fedavg",
    LGFedAvgParams,
    FedAvg[LGFedAvgParams],
    LocalUpdate[LGFedAvgParams],
    shared,
    dp_epochs=local_epochs,
    sums=True,
)
