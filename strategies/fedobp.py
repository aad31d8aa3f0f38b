"""FedOBP: a handful of parameters, those furthest from the global model, stay personal; all others are FedAvg's.

"FedOBP: Federated Optimal Brain Personalization with Few Personalized Parameters" (2025, anonymous).

Client i, on receiving w_g: importance I = (w_i_prev - w_g)^2, w_i_prev its trained vector of its last participation (Eq. 19);
personal where I exceeds the q-quantile of all its scores (Eq. 7-8); it trains from w_i_prev there and w_g elsewhere (Eq. 9-10)
and uploads everything. Server: mean weighted by samples (Eq. 2).

Decisions and deviations: the quantile interpolates linearly, so d - 1 - floor((d - 1) q) parameters are personal if all scores
differ; the printed inf{F >= q} gives one fewer, but the paper's Table 5 fits the linear rule (15 of 16 entries; MEDMNISTA at q
= 0.9999 should be 59, printed is 53, which is what 0.99991 gives). The additional 1/|C| of Eq. 11 is left out. At its first
participation a client has nothing personal. `scope = "classifier"` (the paper's CLS) takes scores and quantile of the last
Linear layer alone; for Table 8's q = 0.983 the printed rule makes 87 of 5,130 personal, as the paper says, the linear one 88.
Gradient scores are of the last participation (Eq. 5), Fisher scores the squared gradient of the mean local loss at w_i_prev
(Eq. 6). `ema` (the authors' code's) smooths scores over participations.
BatchNorm statistics: the global ones; `critical` starts from the client's own last ones, `local` keeps them off the wire.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.figures import Layers
from fl_app.keys import BELOW_ONE, RATIO, key
from fl_app.layout import Layout, Model, Vector
from fl_app.wire import Expected, Upload, WireError
from strategies import masks
from strategies.base import (
    ClientState,
    LocalUpdate,
    Method,
    RoundContext,
    Uploads,
    all_but_local_statistics,
    check_head_trains,
)
from strategies.fedavg import FedAvg

# per layer, int64 on the wire
COUNTS = "personal-parameters"


@dataclass(frozen=True)
class FedOBPParams:
    """Parameters of FedOBP, table `fedobp`."""

    quantile: float = key(
        0.9999,
        "Share of the parameters that stay global (q). The paper's, for Dir(0.1)/Dir(0.5): CIFAR-10 0.99998/0.99979, "
        "CIFAR-100 0.9998/0.99992, EMNIST 0.995/0.9991, SVHN 0.99997/0.9998, MNIST 0.9998/0.99993, FMNIST 0.99993/0.9999, "
        "MEDMNISTA 0.9999/0.99995, MEDMNISTC 0.9997/0.99995.",
        RATIO,
    )
    score: Literal["obp", "gradient", "fisher"] = key(
        "obp",
        "Importance: distance to the global model (Eq. 19), last local update (Eq. 5), or squared gradient (Eq. 6).",
    )
    normalization: Literal["none", "global", "layer"] = key(
        "none", "Min-max normalisation of the scores before the quantile; `global` cannot change the mask (Table 8)."
    )
    scope: Literal["all", "classifier"] = key(
        "all",
        "Where the quantile is taken and parameters are personal: everywhere, or in the last Linear layer (Table 8's CLS).",
        checked=True,
    )
    ema: float = key(
        0.0, "Weight of earlier participations' scores in an exponential moving average; 0: none.", BELOW_ONE
    )
    upload_mask: bool = key(
        False, "Upload the packed personal mask too; the counts per layer always travel, but in private runs."
    )
    batchnorm_statistics: Literal["global", "critical", "local"] = key(
        "global",
        "BatchNorm running statistics: averaged, averaged but each client starts from its own, or kept on the client.",
    )

    def problems(self, config: RunConfig) -> Iterator[str]:
        """A private run sends no masks."""
        if config.private and self.upload_mask:
            yield "fedobp.upload-mask: a private run sends no masks; leave it off"


def personal_mask(
    local: Vector, received: Vector, sizes: Sequence[int], *, quantile: float, normalization: str = "none"
) -> NDArray[np.bool_]:
    """Personal parameters: squared difference above the quantile of all squared differences (FedOBP Eq. 7, 19), bool [d].

    local: float32 [d], the client's trained vector of its last participation; received: float32 [d], the global one; sizes:
    elements per layer; quantile in [0, 1]; normalization "none", "global" or "layer".
    Raises ValueError on shapes that do not fit, arguments out of range and values that are not finite.
    """
    if local.shape != received.shape or local.ndim != 1:
        raise ValueError(f"local has shape {local.shape}, received {received.shape}: both must be [d]")
    difference = np.abs(np.subtract(local, received))
    if normalization == "layer":
        scores = difference.astype(np.float64)
        return select(scores * scores, sizes, quantile=quantile, normalization=normalization)
    # A difference orders the parameters as its square does, and does not underflow. Rounding it to float32 keeps the order
    # but for ties, which matter at the threshold only: there they are told apart in float64.
    _check(difference, sizes, quantile, normalization)
    below = _quantile_below(difference, quantile)
    mask: NDArray[np.bool_] = difference > below
    num_missing = difference.size - 1 - _rank(difference.size, quantile) - int(np.count_nonzero(mask))
    if num_missing > 0 and below > 0:
        tied = np.flatnonzero(difference == below)
        exact = np.abs(local[tied].astype(np.float64) - received[tied])
        rank = tied.size - 1 - num_missing
        mask[tied] = exact > np.partition(exact, rank)[rank]
    return mask


def select(
    scores: NDArray[np.floating[Any]], sizes: Sequence[int], *, quantile: float, normalization: str = "none"
) -> NDArray[np.bool_]:
    """Scores above their quantile, which interpolates linearly (NumPy's and torch's rule), bool [d].

    scores: float [d], not negative; sizes: elements per layer, summing to d. d - 1 - floor((d - 1) * quantile) are selected
    if all differ. "layer" scales every layer's scores to [0, 1] first, a layer of equal scores to 0.
    Raises ValueError as `personal_mask`.
    """
    _check(scores, sizes, quantile, normalization)
    if normalization == "layer":
        scores = _scaled_by_layer(scores, sizes)
    return scores > _quantile_below(scores, quantile)


def _check(scores: NDArray[np.floating[Any]], sizes: Sequence[int], quantile: float, normalization: str) -> None:
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile must be in [0, 1], got {quantile}")
    if normalization not in ("none", "global", "layer"):
        raise ValueError(f"normalization must be one of none, global, layer, got {normalization!r}")
    if not scores.size or sum(sizes) != scores.size:
        raise ValueError(
            f"sizes sum to {sum(sizes)}, scores have {scores.size} elements; both must be equal and at least 1"
        )
    if not math.isfinite(scores.max()):  # NaN wins every maximum
        raise ValueError(f"scores must be finite, got {np.count_nonzero(~np.isfinite(scores))} that are not")


def _quantile_below(scores: NDArray[np.floating[Any]], quantile: float) -> float:
    """The score just below the interpolated quantile, or at it: no score lies between the two, so it separates as well."""
    rank = _rank(scores.size, quantile)
    return float(np.partition(scores, rank)[rank])


def _rank(d: int, quantile: float) -> int:
    return math.floor((d - 1) * quantile)


def _scaled_by_layer(scores: NDArray[np.floating[Any]], sizes: Sequence[int]) -> NDArray[np.float64]:
    scaled, stop = np.zeros(scores.size), 0
    for size in sizes:
        start, stop = stop, stop + size
        if size:
            layer = scores[start:stop].astype(np.float64)
            low = layer.min()
            spread = layer.max() - low
            if spread > 0:
                scaled[start:stop] = (layer - low) / spread
    return scaled


def count_by_layer(mask: NDArray[np.bool_], sizes: Sequence[int]) -> list[int]:
    """Return the number of ones in each layer."""
    stops = np.cumsum(sizes, dtype=np.int64).tolist()
    return [int(np.count_nonzero(mask[stop - size : stop])) for size, stop in zip(sizes, stops, strict=True)]


class FedOBP(FedAvg[FedOBPParams]):
    """Server half: FedAvg, and a record of how many parameters of which layers are personal (Fig. 5)."""

    # personal parameters are uploaded, too, and drift: 4 times in 30 rounds were seen
    spread = 2.0

    def expected(self) -> Expected:
        """The counts of personal parameters per layer, and a mask with any number of ones if asked for."""
        num_params = self.layout.d if self.params.upload_mask else 0
        return dataclasses.replace(
            super().expected(), num_params=num_params, extras={COUNTS: ("<i8", (len(self.layout.params),))}
        )

    def check(self, upload: Upload) -> None:
        """Refuse counts beyond a layer's size, and others than those of the mask."""
        counts = upload.extras[COUNTS]
        for count, slot in zip(counts.tolist(), self.layout.params, strict=True):
            if not 0 <= count <= slot.size:
                raise WireError(f"array {COUNTS} says {count} for {slot.name}, which has {slot.size} elements")
        if upload.mask is not None:
            found = count_by_layer(masks.unpack(upload.mask, self.layout.d), self.layout.sizes)
            if found != counts.tolist():
                raise WireError(f"array {COUNTS} says {counts.tolist()}, the mask has {found} ones per layer")

    def personalize(self, round: int, uploads: Uploads) -> None:
        """Average, and note the counts by layer name."""
        super().personalize(round, uploads)
        if COUNTS not in uploads.extras:  # of a private run
            return
        names = [slot.name for slot in self.layout.params]
        for client_id, counts in zip(uploads.ids, uploads.extras[COUNTS].tolist(), strict=True):
            self.note(client_id, COUNTS, dict(zip(names, counts, strict=True)))


class FedOBPUpdate(LocalUpdate[FedOBPParams]):
    """Client half. State: `fedobp.params`, `.buffers` (trained model of the last participation), `.mask` (packed, of the last
    merge), `.update` (last local update, for gradient scores), `.ema` (smoothed scores).
    """

    def merge(self, received: Model, state: ClientState, ctx: RoundContext[FedOBPParams]) -> Model:
        """Put the client's own values where they are personal (Eq. 9)."""
        start = super().merge(received, state, ctx)
        if "fedobp.params" not in state.arrays:
            state.arrays["fedobp.mask"] = masks.pack(np.zeros(ctx.layout.d, dtype=bool))
            return start
        own = Model(state.arrays["fedobp.params"], state.arrays["fedobp.buffers"])
        mask = self.mask(own, start, state, ctx)
        state.arrays["fedobp.mask"] = masks.pack(mask)
        buffers = own.buffers if ctx.params.batchnorm_statistics == "critical" else start.buffers
        return Model(np.where(mask, own.params, start.params), buffers)

    def mask(self, own: Model, start: Model, state: ClientState, ctx: RoundContext[FedOBPParams]) -> NDArray[np.bool_]:
        """Select by the configured score among the parameters in scope, bool [d]."""
        p = ctx.params
        slots = [s for s in ctx.layout.params if p.scope == "all" or s.name in ctx.layout.classifier]
        inside, sizes = ctx.layout.indices(frozenset(s.name for s in slots)), [s.size for s in slots]
        if p.score == "obp" and not p.ema:
            chosen = personal_mask(
                own.params[inside], start.params[inside], sizes, quantile=p.quantile, normalization=p.normalization
            )
        else:
            scores = self.scores(own, start, state, ctx)
            if p.ema:
                earlier = state.arrays.get("fedobp.ema", scores)
                scores = p.ema * earlier + (1 - p.ema) * scores
                state.arrays["fedobp.ema"] = scores
            chosen = select(scores[inside], sizes, quantile=p.quantile, normalization=p.normalization)
        mask = np.zeros(ctx.layout.d, dtype=bool)
        mask[inside] = chosen
        return mask

    def scores(
        self, own: Model, start: Model, state: ClientState, ctx: RoundContext[FedOBPParams]
    ) -> NDArray[np.float64]:
        """Importance of every parameter, float64 [d]."""
        if ctx.params.score == "gradient":
            return state.arrays["fedobp.update"].astype(np.float64)
        if ctx.params.score == "fisher":
            root: NDArray[np.float64] = ctx.trainer.loss_gradient(own).astype(np.float64)
        else:
            root = own.params.astype(np.float64) - start.params
        root *= root
        return root

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedOBPParams]) -> Model:
        """Train from the merged model (Eq. 10) and remember the result."""
        after = super().train(start, state, ctx)
        state.arrays["fedobp.params"], state.arrays["fedobp.buffers"] = after.params, after.buffers
        if ctx.params.score == "gradient":
            state.arrays["fedobp.update"] = np.abs(start.params - after.params)
        return after

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[FedOBPParams]) -> Upload:
        """Send everything, the counts of personal parameters per layer, and their mask if asked for."""
        plain = super().upload(before, after, state, ctx)
        if ctx.config.private:
            return plain
        packed = state.arrays["fedobp.mask"]
        counts = count_by_layer(masks.unpack(packed, ctx.layout.d), ctx.layout.sizes)
        mask = packed if ctx.params.upload_mask else None
        return dataclasses.replace(plain, mask=mask, extras={COUNTS: np.array(counts, np.int64)})


def shared(layout: Layout, params: FedOBPParams) -> frozenset[str]:
    """All tensors travel, BatchNorm's statistics unless local. Raises UserError if there is no classifier to choose from."""
    if params.scope == "classifier" and not layout.classifier:
        check_head_trains(layout)
        raise UserError("fedobp.scope: classifier needs a model with a Linear layer, this one has none")
    return all_but_local_statistics(layout, params)


FIGURES = (
    Layers(
        COUNTS,
        "In which layers the personal parameters are",
        "share of personal parameters (%)",
        "Of all parameters that clients keep personal in a round, the share that lies in each layer (Fig. 5 of its paper).",
        name="personal",
        shares=True,
    ),
)

METHOD = Method("fedobp", FedOBPParams, FedOBP, FedOBPUpdate, shared, figures=FIGURES, needs_whole=True, sums=True)
