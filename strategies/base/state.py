"""The values of a round: the state before and after it, what clients are sent, and the uploads or sums that come back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.errors import MethodError
from fl_app.keys import Scalar
from fl_app.layout import Model
from fl_app.server import client_arrays
from fl_app.transport.wire import Expected, Upload


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

    @cached_property
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


# a round's uploads of at most this many bytes stay in memory, whatever the limit
SMALL = 64e6


@dataclass(frozen=True)
class Uploads:
    """A round's accepted uploads as stacks, with rows sorted by client id.

    - `ids`: the N clients' ids.
    - `W`: parameters, float32 [N, d]. `B`: buffers, float32 [N, b].
    - `sizes`: numbers of training samples, float64 [N].
    - `bits`: packed masks, uint8 [N, ceil(d/8)], if the method sends masks.
    - `extras`: the method's arrays by name, [N, ...].
    - `metrics`: each client's numbers by name.
    - `summed`: sums over clients by name (`Means.summed`), if uploads were added up as they came.
    - `factors`: the factor of each upload's age on its weight, float64 [N]; `sizes` have it already. None: all are 1.
    - `bounded`: the part of its reported samples that `max-size-weight` leaves each client, float64 [N]; `sizes` have it
      already. None: all are 1.

    The stacks belong to the method: it may change and keep them. If uploads were added up as they came
    (`Means.streams`), `W` and `B` are `Folded` and have no rows.
    """

    ids: list[int]
    W: NDArray[np.float32]
    B: NDArray[np.float32]
    sizes: NDArray[np.float64]
    bits: NDArray[np.uint8] | None
    extras: dict[str, NDArray[Any]]
    metrics: list[Mapping[str, Scalar]]
    summed: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    factors: NDArray[np.float64] | None = None
    bounded: NDArray[np.float64] | None = None

    def counts(self, name: str) -> NDArray[np.float64]:
        """Return the clients' numbers of samples by class, extra array `name` [N, C], as weights of means, float64 [N, C].

        Each client's numbers shrink as its size does by `max-size-weight`.
        """
        counts = self.extras[name].astype(np.float64)
        return counts if self.bounded is None else counts * self.bounded[:, None]

    @property
    def once(self) -> NDArray[np.float64]:
        """The weights of means in which every client counts once, float64 [N]: 1, and less for late uploads."""
        return np.ones_like(self.sizes) if self.factors is None else self.factors

    def rows(self, chosen: list[int]) -> Uploads:
        """Return copies of the chosen rows of every stack."""
        bits = None if self.bits is None else self.bits[chosen]
        extras = {name: stack[chosen] for name, stack in self.extras.items()}
        ids, metrics = [self.ids[k] for k in chosen], [self.metrics[k] for k in chosen]
        factors, bounded = (None if values is None else values[chosen] for values in (self.factors, self.bounded))
        W, B, sizes = self.W[chosen], self.B[chosen], self.sizes[chosen]
        return Uploads(ids, W, B, sizes, bits, extras, metrics, factors=factors, bounded=bounded)


class DeclaredSizes(Uploads):
    """The uploads that a private round passes to `weights`: only client ids and sizes are known.

    sizes: float64 [N], as clients declared them. Any other attribute raises UserError with the method's name.
    """

    def __init__(self, method: str, ids: list[int], sizes: Sequence[float]) -> None:
        # The parent is frozen, and its other fields stay unset.
        vars(self).update({"_method": method, "ids": ids, "sizes": np.array(sizes, np.float64)})

    def __getattr__(self, name: str) -> Any:
        """Raise UserError: nothing else of an upload arrives in a private run."""
        raise MethodError(
            key="private",
            rule=f"method {self._method} cannot run private: its weights need the uploads' {name}, and the "
            "server has only ids and sizes",
        )


@dataclass(frozen=True)
class Sums:
    """The result of a private round.

    - `ids`: the clients in the sums, sorted.
    - `groups`: the members of each sum, by the group's number.
    - `means`: the weighted mean over each group, by the same number.
    - `mean`: the weighted mean over all clients.
    - `bits`: the sketches of masks, uint8 [N, ceil(m/8)], in the order of `ids`, if the method sends masks.
      `sketch_bits`: m.
    """

    ids: list[int]
    groups: Mapping[int, list[int]]
    means: Mapping[int, Model]
    mean: Model
    bits: NDArray[np.uint8] | None
    sketch_bits: int


@dataclass
class UploadBuffer:
    """Stacks that replies are decoded into, with one row for each client whose upload may come.

    factors: by client, the factor of its upload's age on its weight; 1 for clients that are not in it.
    """

    ids: list[int]
    expected: Expected
    W: NDArray[np.float32]
    B: NDArray[np.float32]
    bits: NDArray[np.uint8] | None
    extras: dict[str, NDArray[Any]]
    sizes: NDArray[np.float64]
    metrics: dict[int, Mapping[str, Scalar]] = field(default_factory=dict)
    upload_bytes: dict[int, int] = field(default_factory=dict)
    factors: dict[int, float] = field(default_factory=dict)

    @cached_property
    def row_of(self) -> dict[int, int]:
        """Each client's row in the stacks."""
        return {client_id: row for row, client_id in enumerate(self.ids)}

    @classmethod
    def of(cls, ids: list[int], expected: Expected, limit: float = 0, directory: Path | None = None) -> UploadBuffer:
        """Allocate stacks for the uploads of these clients. Memory is taken only when it is written.

        Stacks of more than `limit` bytes in all (0: no limit) are memory maps of unnamed files in `directory`. Stacks
        of at most `SMALL` bytes always stay in memory. Raises UserError if the files have no room on the disk.
        """
        n, mask_bytes = len(ids), -(-expected.num_params // 8)
        shapes = {name: (np.dtype(dtype), (n, *shape)) for name, (dtype, shape) in expected.extras.items()}
        shapes |= {"W": (np.dtype(np.float32), (n, expected.d)), "B": (np.dtype(np.float32), (n, expected.b))}
        shapes |= {"bits": (np.dtype(np.uint8), (n, mask_bytes))}
        whole = sum(dtype.itemsize * math.prod(shape) for dtype, shape in shapes.values())
        place = directory if limit and whole > max(limit, SMALL) else None
        stacks = {name: client_arrays.stack(shape, dtype, place) for name, (dtype, shape) in shapes.items()}
        W, B, bits = (stacks.pop(name) for name in ("W", "B", "bits"))
        return cls(ids, expected, W, B, bits if mask_bytes else None, stacks, np.zeros(n))

    def row(self, client_id: int) -> Model:
        """Return a client's row, for a model that is read into it before `add`."""
        row = self.row_of[client_id]
        return Model(self.W[row], self.B[row])

    def add(self, client_id: int, upload: Upload, metrics: Mapping[str, Scalar], nbytes: int = 0) -> None:
        """Copy an upload into its client's row, unless it was read into it. nbytes: the size of the message."""
        row = self.row_of[client_id]
        if not np.may_share_memory(self.W[row], upload.model.params):
            self.W[row], self.B[row] = upload.model.params, upload.model.buffers
        self.sizes[row] = upload.num_examples
        if self.bits is not None and upload.mask is not None:
            self.bits[row] = upload.mask
        # Arrays of size 0 do not travel.
        for name, array in upload.extras.items():
            self.extras[name][row] = array
        self.metrics[client_id], self.upload_bytes[client_id] = metrics, nbytes

    def skip(self, client_id: int) -> None:
        """Note that no upload of this client will come."""

    @property
    def rows(self) -> list[int]:
        """Rows of the stacks that hold an upload."""
        return [row for row, i in enumerate(self.ids) if i in self.metrics]

    def reject(self, client_id: int) -> None:
        """Remove an accepted upload."""
        del self.metrics[client_id], self.upload_bytes[client_id]

    def result(self) -> Uploads:
        """Move the used rows to the front, in place, and return them. The buffer's own stacks are no longer complete."""
        rows = self.rows
        ids = [self.ids[row] for row in rows]

        def closed(stack: NDArray[Any]) -> NDArray[Any]:
            for to, row in enumerate(rows):
                if to != row:
                    stack[to] = stack[row]
            return stack[: len(rows)]

        bits = None if self.bits is None else closed(self.bits)
        extras = {name: closed(stack) for name, stack in self.extras.items()}
        metrics = [self.metrics[i] for i in ids]
        uploads = Uploads(ids, closed(self.W), closed(self.B), self.sizes[rows], bits, extras, metrics)
        # from here on only the caller holds the stacks
        nothing = np.empty((0, 0), np.float32)
        self.W, self.B, self.bits, self.extras = nothing, nothing, None, {}
        return uploads


StepBefore = Callable[[Uploads, UploadBuffer], Uploads]
"""A step between the uploads and the method: (the uploads, what they came from) -> the uploads that the method gets."""

StepAfter = Callable[[State, State], State]
"""A step after the method: (the state before the round, the state that the method made) -> the next state."""
