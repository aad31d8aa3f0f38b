"""A round's uploads as stacks, the stacks that replies are decoded into, and what a private round has instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.errors import UserError
from fl_app.keys import Scalar
from fl_app.layout import Model
from fl_app.wire import Expected, Upload


@dataclass(frozen=True)
class Uploads:
    """A round's accepted uploads as stacks, rows sorted by client id.

    W: float32 [N, d]; B: float32 [N, b]; sizes: float64 [N], training samples; bits: uint8 [N, ceil(d/8)] if the method sends
    masks; extras: arrays by name, [N, ...]; metrics: per client. The stacks are the method's, to work in and to keep.
    """

    ids: list[int]
    W: NDArray[np.float32]
    B: NDArray[np.float32]
    sizes: NDArray[np.float64]
    bits: NDArray[np.uint8] | None
    extras: dict[str, NDArray[Any]]
    metrics: list[Mapping[str, Scalar]]

    def rows(self, chosen: list[int]) -> Uploads:
        """Copies of the chosen rows of every stack."""
        bits = None if self.bits is None else self.bits[chosen]
        extras = {name: stack[chosen] for name, stack in self.extras.items()}
        ids, metrics = [self.ids[k] for k in chosen], [self.metrics[k] for k in chosen]
        return Uploads(ids, self.W[chosen], self.B[chosen], self.sizes[chosen], bits, extras, metrics)


class DeclaredSizes(Uploads):
    """What the server of a private round knows of uploads when it says what each counts: whose they are, and their sizes.

    sizes: float64 [N], as clients declared them. Anything else raises UserError with the method's name.
    """

    def __init__(self, method: str, ids: list[int], sizes: Sequence[float]) -> None:
        # The parent is frozen, and its other fields stay unset.
        vars(self).update({"_method": method, "ids": ids, "sizes": np.array(sizes, np.float64)})

    def __getattr__(self, name: str) -> Any:
        """Refuse what does not arrive in a private run."""
        raise UserError(
            f"private: method {self._method} cannot run private: its weights ask for the uploads' {name}, "
            "and the server has ids and sizes alone"
        )


@dataclass(frozen=True)
class Sums:
    """A private round's result. ids: whose uploads are in it, sorted. groups: who was summed up with whom; means: theirs, weighted.

    mean: over all, weighted. bits: the sketches of masks, uint8 [N, ceil(m/8)] in the order of ids, if the method sends masks;
    sketch_bits: m.
    """

    ids: list[int]
    groups: Mapping[int, list[int]]
    means: Mapping[int, Model]
    mean: Model
    bits: NDArray[np.uint8] | None
    sketch_bits: int


@dataclass
class Intake:
    """Stacks that replies are decoded into, row by sampled client."""

    ids: list[int]
    expected: Expected
    W: NDArray[np.float32]
    B: NDArray[np.float32]
    bits: NDArray[np.uint8] | None
    extras: dict[str, NDArray[Any]]
    sizes: NDArray[np.float64]
    metrics: dict[int, Mapping[str, Scalar]] = field(default_factory=dict)
    upload_bytes: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, ids: list[int], expected: Expected) -> Intake:
        """Allocate stacks for the uploads of these clients; memory is taken as it is written."""
        n, mask_bytes = len(ids), -(-expected.num_params // 8)
        return cls(
            ids,
            expected,
            W=np.empty((n, expected.d), np.float32),
            B=np.empty((n, expected.b), np.float32),
            bits=np.empty((n, mask_bytes), np.uint8) if mask_bytes else None,
            extras={name: np.empty((n, *shape), dtype) for name, (dtype, shape) in expected.extras.items()},
            sizes=np.zeros(n),
        )

    def accept(self, client_id: int, upload: Upload, metrics: Mapping[str, Scalar], nbytes: int = 0) -> None:
        """Copy an upload into its client's row. nbytes: what travelled."""
        row = self.ids.index(client_id)
        self.W[row], self.B[row] = upload.model.params, upload.model.buffers
        self.sizes[row] = upload.num_examples
        if self.bits is not None and upload.mask is not None:
            self.bits[row] = upload.mask
        # Arrays of size 0 do not travel.
        for name, array in upload.extras.items():
            self.extras[name][row] = array
        self.metrics[client_id], self.upload_bytes[client_id] = metrics, nbytes

    @property
    def rows(self) -> list[int]:
        """Rows of the stacks that hold an upload."""
        return [row for row, i in enumerate(self.ids) if i in self.metrics]

    def reject(self, client_id: int) -> None:
        """Leave an accepted upload out again."""
        del self.metrics[client_id], self.upload_bytes[client_id]

    def uploads(self) -> Uploads:
        """Close up the rows of those who sent nothing usable, in place, and return what is left; the stacks are not whole then."""
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
        return Uploads(ids, closed(self.W), closed(self.B), self.sizes[rows], bits, extras, metrics)

    def forget_stacks(self) -> None:
        """Let go of the stacks: from now on they are the method's alone."""
        nothing = np.empty((0, 0), np.float32)
        self.W, self.B, self.bits, self.extras = nothing, nothing, None, {}
