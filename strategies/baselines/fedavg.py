"""FedAvg: one global model, the mean of the clients' models weighted by their training samples.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017. BatchNorm statistics are averaged like parameters, or stay local.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

from strategies.base import (
    LocalUpdate,
    Means,
    Method,
    Model,
    Overview,
    PersonalizedStrategy,
    State,
    Turn,
    Uploads,
    all_but_local_statistics,
    key,
    local_epochs,
)
from strategies.kernels import RULES

P = TypeVar("P")


@dataclass(frozen=True, kw_only=True)
class GlobalModelParams:
    """Parameters of FedAvg, table `fedavg`, and of every method with one global model that all clients use."""

    batchnorm_statistics: Literal["global", "local"] = key(
        "global", "BatchNorm running statistics: averaged like parameters, or kept on the client (PFLlib)."
    )


class FedAvg(PersonalizedStrategy[P]):
    """Server half of every method that averages the tensors that travel."""

    means = Means(RULES, streams=True, sets_model=True)

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Return the mean weighted by training samples (`weights`), or the mean that the key `robust` selects."""
        mean, weights = turn.average.mean, self.weights(uploads)
        return state.next(Model(mean(uploads.W, weights), mean(uploads.B, weights)))


METHOD = Method(
    "fedavg",
    GlobalModelParams,
    FedAvg[GlobalModelParams],
    LocalUpdate[GlobalModelParams],
    all_but_local_statistics,
    dp_epochs=local_epochs,
    sums=True,
    overview=Overview(
        group="One global model for all",
        use="similar clients; the baseline for all others",
    ),
)
