"""FedAvg: one global model, the mean of the clients' models weighted by their training samples.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017. BatchNorm statistics are averaged like parameters.
"""

from __future__ import annotations

from typing import TypeVar

from fl_app.keys import NoParams
from fl_app.layout import Model
from strategies.aggregate import weighted_mean
from strategies.base import LocalUpdate, Method, PersonalizedStrategy, Uploads, all_tensors

P = TypeVar("P")


class FedAvg(PersonalizedStrategy[P]):
    """Server half, for every method whose server averages what travels."""

    def personalize(self, round: int, uploads: Uploads) -> None:
        """Mean weighted by training samples."""
        self.global_model = Model(weighted_mean(uploads.W, uploads.sizes), weighted_mean(uploads.B, uploads.sizes))


METHOD = Method("fedavg", NoParams, FedAvg[NoParams], LocalUpdate[NoParams], all_tensors)
