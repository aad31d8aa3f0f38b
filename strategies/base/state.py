"""The state of a method on the server: a value that a round replaces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.layout import Model


@dataclass(frozen=True)
class State:
    """The facts that the server knows after a round. A checkpoint has its arrays and nothing else of a method.

    - `model`: the model sent to clients that have no model of their own, the tensors that travel.
    - `clients`: arrays by client id and name. They may lie on the disk.
    - `memory`: arrays by name that belong to no client.
    - `round`: the last round with used uploads, from 1; 0 before the first. The engine counts it.

    Do not change an array in place. An unchanged array that is given again is not written into checkpoints again.
    """

    model: Model
    clients: dict[int, dict[str, NDArray[Any]]] = field(default_factory=dict)
    memory: dict[str, NDArray[Any]] = field(default_factory=dict)
    round: int = 0

    def next(
        self,
        model: Model | None = None,
        clients: Mapping[int, dict[str, NDArray[Any]]] | None = None,
        memory: Mapping[str, NDArray[Any]] | None = None,
    ) -> State:
        """Return a state with a new model, and with arrays that replace those of the same client or name."""
        every = {**self.clients, **clients} if clients else self.clients
        return replace(self, model=model or self.model, clients=every, memory={**self.memory, **(memory or {})})

    def model_of(self, client_id: int) -> Model:
        """Return the model kept for a client as `params` and `buffers`; `model` if there is none."""
        mine = self.clients.get(client_id)
        return self.model if mine is None else Model(mine["params"], mine["buffers"])


class OnDemand(Mapping[str, NDArray[Any]]):
    """Arrays by name that are made when the first of them is read: other clients' models, which only a message needs."""

    def __init__(self, make: Callable[[], Mapping[str, NDArray[Any]]]) -> None:
        self._make = make

    @functools.cached_property
    def _made(self) -> Mapping[str, NDArray[Any]]:
        made = self._make()
        # what it was made from, such as an earlier state, need not stay
        del self._make
        return made

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return an array."""
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        """Return the names."""
        return iter(self._made)

    def __len__(self) -> int:
        """Return the number of arrays."""
        return len(self._made)


@dataclass(frozen=True)
class Sent:
    """What a client is sent.

    - `model`: a model, the tensors that travel.
    - `extras`: arrays beside it by name; `OnDemand` if they take long to make.
    - `reference`: the values that its upload is compared with, by what messages call them (`Outliers`), where they are not those
      that it is sent.
    """

    model: Model
    extras: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    reference: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def models_by_client(
    ids: Sequence[int], params: Iterable[NDArray[np.float32]], buffers: Iterable[NDArray[np.float32]]
) -> dict[int, dict[str, NDArray[Any]]]:
    """Return rows of two stacks, [N, d] and [N, b], as arrays that `State.model_of` reads, by client."""
    rows = zip(ids, params, buffers, strict=True)
    return {i: {"params": own, "buffers": statistics} for i, own, statistics in rows}
