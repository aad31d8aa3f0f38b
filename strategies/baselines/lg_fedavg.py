"""LG-FedAvg: each client keeps its own body; only the classifier on top is shared.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: "Think Locally, Act Globally: Federated Learning with
Local and Global Representations", arXiv:2001.01523, 2020.

Client: it starts from its own local representation and the received global part. It trains both together by SGD and
sends the global part. Server: the mean of the global parts weighted by training samples (Algorithm 1).

Deviations:

- The global part is the model's classifier. In the authors' code it is a number of last layers, averaged
  uniformly.
- All models start from the run's initial weights. In the authors' code they start from a finished FedAvg run.
- There are no auxiliary unsupervised or fairness losses.
- `shared = "first"` is the method that FL-bench, and so FedOBP's tables, ran under this name.
- BatchNorm statistics belong to the body.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strategies.base import (
    SPLIT,
    Layout,
    LocalUpdate,
    Method,
    Overview,
    all_but_classifier,
    key,
    local_epochs,
)
from strategies.baselines.fedavg import FedAvg


@dataclass(frozen=True)
class LGFedAvgParams:
    """Parameters of LG-FedAvg, table `lg-fedavg`."""

    shared: Literal["classifier", "first"] = key(
        "classifier",
        "The part that travels: the classifier, or the first layer, which FL-bench shares under this name.",
    )


def shared(layout: Layout, params: LGFedAvgParams) -> frozenset[str]:
    """Return the names of the classifier's tensors, or of the first layer that has parameters."""
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
    needs=SPLIT,
    overview=Overview(
        group="A part of the model",
        travels="classifier",
        stays="body",
        disk="4(d−h+b)",
        unseen="global part, the rest initial",
        use="little traffic",
    ),
)
