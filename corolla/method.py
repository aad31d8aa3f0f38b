"""Everything that a method's file imports, in one line (docs/methods-howto.md).

These are the two halves of a method and their arguments, its registration, the declaration of its keys, and the figures
that a report may draw. The file travels to the nodes, so importing this module loads neither torch nor Flower's or
Corolla's commands.
"""

from __future__ import annotations

from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.figures import Groups, Layers, Links, Matrix, Scalars
from fl_app.keys import (
    AT_LEAST_ONE,
    BELOW_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_RATIO,
    RATIO,
    NoParams,
    Rule,
    key,
)
from fl_app.layout import NOTHING, Layout, Model, Slot
from fl_app.metrics import Metric
from fl_app.transport.wire import Expected, Upload
from strategies.base import (
    OWN_MODEL,
    ClientState,
    Correction,
    Exported,
    Holds,
    Late,
    LocalUpdate,
    Means,
    Method,
    ModelFactory,
    Objective,
    OnDemand,
    Optimizer,
    Outliers,
    PersonalizedStrategy,
    RoundContext,
    Sent,
    State,
    Submodel,
    Sums,
    Trainer,
    Turn,
    Uploads,
    all_but_classifier,
    all_but_local_statistics,
    all_tensors,
    all_where_features_are,
    local_epochs,
    models_by_client,
    no_tensors,
)
from strategies.baselines.fedavg import FedAvg
from strategies.kernels.aggregate import weighted_mean
from strategies.kernels.averages import RULES

# the earlier name, for one release
Drawings = ModelFactory

__all__ = [
    "AT_LEAST_ONE",
    "BELOW_ONE",
    "NOTHING",
    "NOT_NEGATIVE",
    "OWN_MODEL",
    "POSITIVE",
    "POSITIVE_RATIO",
    "RATIO",
    "RULES",
    "ClientState",
    "Correction",
    "ModelFactory",
    "Expected",
    "Exported",
    "FedAvg",
    "Groups",
    "Holds",
    "Late",
    "Layers",
    "Layout",
    "Links",
    "LocalUpdate",
    "Matrix",
    "Means",
    "Method",
    "Metric",
    "Model",
    "NoParams",
    "Objective",
    "OnDemand",
    "Optimizer",
    "Outliers",
    "PersonalizedStrategy",
    "RoundContext",
    "Rule",
    "RunConfig",
    "Scalars",
    "Sent",
    "Slot",
    "State",
    "Submodel",
    "Sums",
    "Trainer",
    "Turn",
    "Upload",
    "Uploads",
    "UserError",
    "all_but_classifier",
    "all_but_local_statistics",
    "all_tensors",
    "all_where_features_are",
    "key",
    "local_epochs",
    "models_by_client",
    "no_tensors",
    "weighted_mean",
]
