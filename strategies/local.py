"""Local ("Separate"): every client trains alone; nothing but metrics travels, in either direction."""

from __future__ import annotations

from fl_app.keys import NoParams
from fl_app.layout import Layout
from strategies.base import LocalUpdate, Method, PersonalizedStrategy, Uploads


class Local(PersonalizedStrategy[NoParams]):
    """Server half: there is nothing to aggregate."""

    def personalize(self, round: int, uploads: Uploads) -> None:
        """Do nothing."""


def shared(layout: Layout, params: NoParams) -> frozenset[str]:
    """Nothing travels."""
    return frozenset()


METHOD = Method("local", NoParams, Local, LocalUpdate[NoParams], shared)
