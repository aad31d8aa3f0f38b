"""FedAvg: one global model, the mean of the clients' models weighted by their training samples.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017. BatchNorm statistics are averaged like parameters, or stay local.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

from fl_app.keys import key
from fl_app.layout import Model
from strategies.base import LocalUpdate, Method, PersonalizedStrategy, Uploads, all_but_local_statistics, local_epochs
from strategies.robust import RULES

P = TypeVar("P")


@dataclass(frozen=True, kw_only=True)
class GlobalModelParams:
    """Parameters of FedAvg, table `fedavg`, and of every method whose one global model all clients use."""

    batchnorm_statistics: Literal["global", "local"] = key(
        "global", "BatchNorm running statistics: averaged like parameters, or kept on the client (PFLlib)."
    )


class FedAvg(PersonalizedStrategy[P]):
    """Server half, for every method whose server averages what travels."""

    robust = RULES

    def personalize(self, round: int, uploads: Uploads) -> None:
        """Mean weighted by training samples (`weights`), or what the key `robust` puts in its place."""
        mean, weights = self.averaging_of(uploads).mean, self.weights(uploads)
        self.global_model = Model(mean(uploads.W, weights), mean(uploads.B, weights))


METHOD = Method(
    "fedavg",
    GlobalModelParams,
    FedAvg[GlobalModelParams],
    LocalUpdate[GlobalModelParams],
    all_but_local_statistics,
    dp_epochs=local_epochs,
    sums=True,
)
