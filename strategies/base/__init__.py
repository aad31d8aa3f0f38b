"""The classes and functions that a method's file imports: its two halves, their arguments, and its registration."""

from strategies.base.declared import Exported, Holds, Late, Means, Outliers, Submodel
from strategies.base.earlier import AGE, LATE, MOVED
from strategies.base.local_update import (
    OWN_MODEL,
    ClientState,
    Correction,
    LocalUpdate,
    Objective,
    Optimizer,
    RoundContext,
    Trainer,
)
from strategies.base.method import (
    AnyMethod,
    InEpochs,
    Method,
    ModelFactory,
    all_but_local_statistics,
    all_tensors,
    all_where_features_are,
    local_epochs,
    no_tensors,
)
from strategies.base.needs import (
    FEATURES,
    LINEAR,
    SPLIT,
    Need,
    all_but_classifier,
    check_head_trains,
    classifier_path,
    refuse,
    unfit,
)
from strategies.base.overview import Overview
from strategies.base.state import OnDemand, Sent, State, models_by_client
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.turn import Turn
from strategies.base.uploads import Sums, Uploads

__all__ = [
    "AGE",
    "FEATURES",
    "LATE",
    "LINEAR",
    "MOVED",
    "OWN_MODEL",
    "SPLIT",
    "AnyMethod",
    "ClientState",
    "Correction",
    "Exported",
    "Holds",
    "Late",
    "LocalUpdate",
    "Means",
    "Method",
    "ModelFactory",
    "Need",
    "Objective",
    "OnDemand",
    "Optimizer",
    "Outliers",
    "Overview",
    "PersonalizedStrategy",
    "RoundContext",
    "Sent",
    "State",
    "Submodel",
    "Sums",
    "Trainer",
    "Turn",
    "Uploads",
    "all_but_classifier",
    "all_but_local_statistics",
    "all_tensors",
    "all_where_features_are",
    "check_head_trains",
    "classifier_path",
    "InEpochs",
    "local_epochs",
    "models_by_client",
    "no_tensors",
    "refuse",
    "unfit",
]
