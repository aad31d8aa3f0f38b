"""Local ("Separate"): each client trains alone; only metrics travel, in either direction."""

from __future__ import annotations

from strategies.base import (
    LocalUpdate,
    Method,
    NoParams,
    Overview,
    PersonalizedStrategy,
    State,
    Turn,
    Uploads,
    local_epochs,
    no_tensors,
)


class Local(PersonalizedStrategy[NoParams]):
    """Server half: there is nothing to aggregate."""

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Return the state unchanged."""
        return state


METHOD = Method(
    "local",
    NoParams,
    Local,
    LocalUpdate[NoParams],
    no_tensors,
    dp_epochs=local_epochs,
    not_private="nothing travels, so there is nothing to hide",
    overview=Overview(
        group="Nothing",
        travels="nothing",
        stays="everything",
        disk="4(d+b)",
        unseen="initial model",
        use="the baseline that sharing must beat",
    ),
)
