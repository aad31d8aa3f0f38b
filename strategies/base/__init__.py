"""What a method's file imports: the two halves it subclasses, what they are given, and how it is registered."""

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
    Drawings,
    Method,
    all_but_classifier,
    all_but_local_statistics,
    all_tensors,
    all_where_features_are,
    check_head_trains,
    local_epochs,
    no_tensors,
)
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.uploads import Sums, Uploads

__all__ = [
    "OWN_MODEL",
    "AnyMethod",
    "ClientState",
    "Correction",
    "Drawings",
    "LocalUpdate",
    "Method",
    "Objective",
    "Optimizer",
    "PersonalizedStrategy",
    "RoundContext",
    "Sums",
    "Trainer",
    "Uploads",
    "all_but_classifier",
    "all_but_local_statistics",
    "all_tensors",
    "all_where_features_are",
    "check_head_trains",
    "local_epochs",
    "no_tensors",
]
