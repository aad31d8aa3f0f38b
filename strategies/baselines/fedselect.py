"""FedSelect: each client's personal parameters grow by those that training changes most; the others are FedAvg's.

Tamirisa, Xie, Bao, Zhou, Arel, Shamsian: "FedSelect: Personalized Federated Learning with Customized Selection of
Parameters for Fine-Tuning", CVPR 2024.

Client: it has its trained vector, the mask it trained with (`used`) and that mask grown (`mask`), all empty at first.

1. It starts from its own values on `used` and from the received ones elsewhere. So the parameters selected last take
   the mean once more and then stay (Algorithm 1).
2. LocalAlt, `local-epochs` times: one epoch steps `mask` alone, then one steps the rest.
3. It uploads the rest and the mask.
4. The mask grows, tensor by tensor. It takes the share p of the parameters that are still shared, those with the
   largest |change| over this participation. It stops at the share alpha of the tensor (Algorithm 3).

Server: the mean of a parameter over the clients that share it. A parameter that no client of the round shares keeps its
value. Statistics are FedAvg's. alpha = 0 or p = 0 is FedAvg, bit for bit.

Decisions and deviations:

- Shares are taken per tensor and never of biases, as in the authors' code. Algorithm 3 takes them of all parameters
  (keys `scope`, `biases`).
- |change| is measured within the participation (Algorithm 3). The code measures it since the last growth, across
  aggregations.
- The number added is exact, and ties go to the lower index. The code takes all changes that reach the cutoff, so a
  tensor of mostly dead inputs becomes personal as a whole.
- The limit is kept exactly. The code tests it before growing, and overshoots.
- The mean is weighted by samples. Paper and code are uniform (key `weighting`).
- BatchNorm's running statistics are averaged. The code keeps them on the client. With that, alpha = 0 would not be
  FedAvg, as the paper states it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from strategies.base import (
    AT_LEAST_ONE,
    RATIO,
    ClientState,
    Expected,
    InEpochs,
    Layers,
    Layout,
    LocalUpdate,
    Method,
    Model,
    Outliers,
    Overview,
    PersonalizedStrategy,
    RoundContext,
    State,
    Turn,
    Upload,
    Uploads,
    Vector,
    WireError,
    all_tensors,
    key,
)
from strategies.fedobp import COUNTS, count_by_layer
from strategies.kernels import Stack, check_weights, for_blocks, masks, mean_block, weighted_mean


@dataclass(frozen=True)
class FedSelectParams(InEpochs):
    """Parameters of FedSelect, table `fedselect`."""

    rate: float = key(
        0.25, "Part of the shared parameters that becomes personal at each growth (p, from the authors' code).", RATIO
    )
    limit: float = key(
        0.3, "Largest personal share (alpha); the paper recommends 0.3 to 0.5, its code has 0.8. 0 is FedAvg.", RATIO
    )
    grow_every: int = key(
        1, "Participations from one growth of the mask to the next (Algorithm 3: 1; the code: 3).", AT_LEAST_ONE
    )
    scope: Literal["layer", "model"] = key(
        "layer", "The shares refer to each tensor (authors' code), or to the whole model (Algorithm 3)."
    )
    biases: bool = key(False, "Biases may become personal too (Algorithm 3); the authors' code never selects them.")
    weighting: Literal["samples", "uniform"] = key(
        "samples", "Weights of the mean: training samples, or equal (paper and authors' code)."
    )


def grow(
    mask: NDArray[np.bool_],
    change: NDArray[np.floating[Any]],
    sizes: Sequence[int],
    *,
    rate: float,
    limit: float,
    eligible: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Return the mask with the most changed parameters of each layer added, bool [d] (FedSelect Algorithm 3).

    mask: bool [d]; change: float [d], only its size counts; sizes: elements per layer, summing to d; rate (p) and limit
    (alpha): in [0, 1]; eligible: bool [d], or one per layer, the parameters that may be selected.

    A layer of n parameters has f eligible ones outside the mask. It adds f - round((1 - p) f) of them, half to even,
    but ends with at most floor(alpha n) ones. Ties go to the lower index.

    Raises ValueError on shapes that do not fit, arguments out of range and changes that are not finite.
    """
    eligible = np.asarray(eligible, bool)
    if eligible.shape == (len(sizes),):
        eligible = np.repeat(eligible, sizes)
    if not mask.shape == change.shape == eligible.shape == (sum(sizes),):
        raise ValueError(
            f"mask {mask.shape}, change {change.shape}, eligible {eligible.shape}: sizes sum to {sum(sizes)}"
        )
    if not 0 <= rate <= 1 or not 0 <= limit <= 1:
        raise ValueError(f"rate and limit must be in [0, 1], got {rate} and {limit}")
    size_of_change = np.abs(change)
    if not np.isfinite(size_of_change).all():
        raise ValueError(f"change must be finite, got {np.count_nonzero(~np.isfinite(size_of_change))} that are not")
    grown = mask.copy()
    start = 0
    for size in sizes:
        layer = slice(start, start + size)
        free = np.flatnonzero(eligible[layer] & ~mask[layer])
        room = math.floor(limit * size) - int(np.count_nonzero(mask[layer]))
        count = min(free.size - round((1 - rate) * free.size), room)
        if count > 0:
            chosen = np.zeros(free.size, bool)
            masks.mark_largest(size_of_change[layer][free], count, chosen)
            grown[start + free[chosen]] = True
        start += size
    return grown


def aggregate(W: Stack, used: NDArray[np.bool_], weights: NDArray[np.float64], previous: Vector) -> Vector:
    """Return the mean of every parameter over the clients that share it, [d] (FedSelect Algorithm 1).

    W: float32 [N, d]; used: bool [N, d], True where personal; weights: float64 [N], not negative; previous: [d], the
    last result, kept where no client shares. The result has the dtype of `previous`, at least float32. Where all
    clients share, it is `weighted_mean`, bit for bit.

    Raises ValueError on shapes that do not fit and weights that do not sum to a positive finite number.
    """
    n, d = W.shape
    if used.shape != (n, d) or previous.shape != (d,):
        raise ValueError(f"W {W.shape} needs used {(n, d)} and previous {(d,)}, got {used.shape} and {previous.shape}")
    weights = check_weights(weights, n)
    out = np.empty(d, np.result_type(previous.dtype, np.float32))

    def block(start: int, stop: int) -> None:
        mean = mean_block(W[:, start:stop], weights, weights.sum())
        apart = start + np.flatnonzero(used[:, start:stop].any(axis=0))
        shares = weights[:, None] * ~used[:, apart]
        total = shares.sum(axis=0)
        sums = (shares * np.where(used[:, apart], 0, W[:, apart])).sum(axis=0)
        mean[apart - start] = np.divide(sums, total, out=previous[apart].astype(np.float64), where=total > 0)
        out[start:stop] = mean

    for_blocks(block, d)
    return out


class FedSelect(PersonalizedStrategy[FedSelectParams]):
    """Server half: means over the clients that share a parameter."""

    # personal values are not the client's
    outliers = Outliers(unmasked=True)

    def form(self, state: State, turn: Turn) -> Expected:
        """Return the form of an upload: its personal mask may have any number of ones."""
        return replace(super().form(state, turn), num_params=self.layout.d)

    def check(self, upload: Upload) -> None:
        """Raise WireError if parameters are not 0 where the mask marks them as personal."""
        assert upload.mask is not None
        if count := np.count_nonzero(upload.model.params[masks.unpack(upload.mask, self.layout.d)]):
            raise WireError(f"{count} parameters that the mask marks as personal are not 0")

    def weights(self, uploads: Uploads) -> NDArray[np.float64]:
        """Return the weights of the mean: by samples, or all equal."""
        return uploads.sizes if self.params.weighting == "samples" else uploads.once

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Average the shared parameters; note how many parameters of every tensor are personal."""
        assert uploads.bits is not None
        weights = self.weights(uploads)
        used = masks.unpack(uploads.bits, self.layout.d)
        params = aggregate(uploads.W, used, weights, state.model.params)
        names = [slot.name for slot in self.layout.params]
        for i, client_id in enumerate(uploads.ids):
            turn.note(client_id, COUNTS, dict(zip(names, count_by_layer(used[i], self.layout.sizes), strict=True)))
        return state.next(Model(params, weighted_mean(uploads.B, weights)))


class FedSelectUpdate(LocalUpdate[FedSelectParams]):
    """Client half.

    State: `fedselect.own` (trained vector), `.used` and `.mask` (packed: trained with, and grown), and with
    `grow-every` above 1 `.participations`.
    """

    def merge(self, received: Model, state: ClientState, ctx: RoundContext[FedSelectParams]) -> Model:
        """Return the received model with the client's own values where it last trained personal ones."""
        if "fedselect.own" not in state.arrays:
            return received
        used = masks.unpack(state.arrays["fedselect.used"], ctx.layout.d)
        return Model(np.where(used, state.arrays["fedselect.own"], received.params), received.buffers)

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedSelectParams]) -> Model:
        """Train personal and shared parameters in turn (LocalAlt), then grow the mask."""
        d = ctx.layout.d
        mask = (
            masks.unpack(state.arrays["fedselect.mask"], d) if "fedselect.mask" in state.arrays else np.zeros(d, bool)
        )
        sides = {"train-personal": ~mask, "train": mask}
        after = ctx.trainer.alternate(start, sides) if mask.any() else ctx.trainer.train(start)
        grown = self.grow(mask, after.params - start.params, state, ctx)
        state.arrays["fedselect.own"] = after.params
        state.arrays["fedselect.used"], state.arrays["fedselect.mask"] = masks.pack(mask), masks.pack(grown)
        return after

    def grow(
        self, mask: NDArray[np.bool_], change: Vector, state: ClientState, ctx: RoundContext[FedSelectParams]
    ) -> NDArray[np.bool_]:
        """Return the mask, grown if it is the participation for it (key `grow-every`)."""
        p = ctx.params
        if p.grow_every > 1:
            participations = state.arrays.get("fedselect.participations", np.zeros(1, np.int64)) + 1
            state.arrays["fedselect.participations"] = participations
            if participations[0] % p.grow_every:
                return mask
        sizes = ctx.layout.sizes if p.scope == "layer" else (ctx.layout.d,)
        return grow(mask, change, sizes, rate=p.rate, limit=p.limit, eligible=eligible(ctx.layout, p.biases))

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[FedSelectParams]) -> Upload:
        """Send the values that were shared in training, 0 elsewhere, and the mask of the others."""
        bits = state.arrays["fedselect.used"]
        shared = Model(np.where(masks.unpack(bits, ctx.layout.d), np.float32(0), after.params), after.buffers)
        return replace(super().upload(before, shared, state, ctx), mask=bits)


def eligible(layout: Layout, biases: bool) -> NDArray[np.bool_]:
    """Return the parameters that may become personal: all, or all but those of tensors named bias; bool [d]."""
    return layout.indices(frozenset(slot.name for slot in layout.params if biases or not slot.name.endswith("bias")))


FIGURES = (
    Layers(
        COUNTS,
        "In which layers the personal parameters are",
        "share of personal parameters (%)",
        "The share of each layer in all parameters that clients train as personal in a round.",
        name="personal",
        shares=True,
    ),
)

METHOD = Method(
    "fedselect",
    FedSelectParams,
    FedSelect,
    FedSelectUpdate,
    all_tensors,
    figures=FIGURES,
    needs_whole=True,
    not_private="its server averages each parameter over those clients that share it",
    global_beside_personal=True,
    overview=Overview(
        group="A part of the model",
        travels="model; up + ⌈d/8⌉",
        stays="a growing part",
        disk="4d + 2⌈d/8⌉",
        epochs="2 E",
        use="unknown which part should be personal",
    ),
)
