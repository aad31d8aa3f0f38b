"""A method's line in the table that compares all methods (`corolla methods --table`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NONE = "–"
Group = Literal[
    "Nothing",
    "One global model for all",
    "A global model and a personal one",
    "A part of the model",
    "Parameters among similar clients",
    "Several global models",
]


@dataclass(frozen=True)
class Overview:
    """A method's costs, and when to use it. The defaults are FedAvg's.

    Sizes are bytes at the parameters' defaults, in the letters of docs/methods/index.md. group: what the clients share;
    methods of one group stand together. use: when to use the method. travels: up and down, per client and round.
    epochs: of training per round; E is `local-epochs`. unseen: what a client that never trains gets. stays: what never
    leaves a client. server, disk: what the server keeps, and what each client keeps.
    """

    group: Group
    use: str
    travels: str = "model both ways"
    epochs: str = "E"
    unseen: str = "global model"
    stays: str = NONE
    server: str = NONE
    disk: str = NONE
