"""FedOBP: the few parameters that lie furthest from the global model stay personal; all others are FedAvg's.

"FedOBP: Federated Optimal Brain Personalization with Few Personalized Parameters" (2025, anonymous).

Client i receives w_g. w_i_prev is its trained vector of its last participation, and importance is
I = (w_i_prev - w_g)^2 (Eq. 19). A parameter is personal where I exceeds the q-quantile of all its scores (Eq. 7-8). The
client trains from w_i_prev there and from w_g elsewhere (Eq. 9-10), and uploads everything. Server: the mean weighted
by samples (Eq. 2).

Decisions and deviations:

- The quantile interpolates linearly. So d - 1 - floor((d - 1) q) parameters are personal if all scores differ. The
  printed inf{F >= q} (`quantile-rule = "printed"`) gives floor((1 - q) d), but the paper's Table 5 fits the linear rule
  in 15 of 16 entries. The other one is MEDMNISTA at q = 0.9999: it should be 59, and the printed 53 belongs to 0.99991.
- The additional 1/|C| of Eq. 11 is left out.
- At its first participation a client has nothing personal.
- `scope = "classifier"` (the paper's CLS) takes scores and quantile of the classifier alone. For Table 8's
  q = 0.983 the printed rule makes 87 of 5,130 personal, as the paper states; the linear one makes 88.
- Gradient scores are of the last participation (Eq. 5). Fisher scores are the squared gradient of the mean local loss
  at w_i_prev (Eq. 6).
- `score = "sensitivity"` is |(w_i_prev - w_g) w_i_prev|, the score of the authors' public code: Optimal Brain Damage's
  first-order term.
- `ema` (from the authors' code) smooths scores over participations.
- BatchNorm statistics are the global ones. With `critical` a client starts from its own last ones, and `local` keeps
  them off the wire.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from strategies.base import (
    BELOW_ONE,
    RATIO,
    SPLIT,
    ClientState,
    Expected,
    Layers,
    LocalUpdate,
    Means,
    Method,
    Model,
    Outliers,
    Overview,
    RoundContext,
    RunConfig,
    State,
    Turn,
    Upload,
    Uploads,
    UserError,
    Vector,
    WireError,
    all_but_local_statistics,
    key,
)
from strategies.baselines.fedavg import FedAvg
from strategies.kernels import RULES, masks, scores

# per layer, int64 on the wire
COUNTS = "personal-parameters"


@dataclass(frozen=True)
class FedOBPParams:
    """Parameters of FedOBP, table `fedobp`."""

    quantile: float = key(
        0.9999,
        "Share of the parameters that stay global (q). The paper's by data set (Table 5) are in its presets.",
        RATIO,
    )
    quantile_rule: Literal["linear", "printed"] = key(
        "linear",
        "Threshold at q: interpolated between two scores (the authors' code, Table 5), or the printed inf{F >= q}, "
        "usually one personal parameter fewer.",
    )
    score: Literal["obp", "gradient", "fisher", "sensitivity"] = key(
        "obp",
        "Importance: squared distance to the global model (Eq. 19), last local update (Eq. 5), squared gradient (Eq. 6), "
        "or distance times value (the authors' public code).",
    )
    normalization: Literal["none", "global", "layer"] = key(
        "none", "Min-max normalisation of the scores before the quantile; `global` cannot change the mask (Table 8)."
    )
    scope: Literal["all", "classifier"] = key(
        "all",
        "Parameters that the quantile covers and that may be personal: all, or those of the classifier (Table 8's CLS).",
        checked=True,
    )
    ema: float = key(
        0.0, "Weight of earlier participations' scores in an exponential moving average; 0: none.", BELOW_ONE
    )
    upload_mask: bool = key(
        False, "Upload the packed personal mask too. The counts per layer always travel, except in private runs."
    )
    batchnorm_statistics: Literal["global", "critical", "local"] = key(
        "global",
        "BatchNorm running statistics: averaged, averaged but each client starts from its own, or kept on the client.",
    )

    def problems(self, config: RunConfig) -> Iterator[UserError]:
        """Yield an error for `upload-mask` in a private run, which sends no masks."""
        if config.private and self.upload_mask:
            yield UserError(key="fedobp.upload-mask", rule="a private run sends no masks; leave it off", value=True)


def personal_mask(
    local: Vector,
    received: Vector,
    sizes: Sequence[int],
    *,
    quantile: float,
    normalization: str = "none",
    rule: str = "linear",
) -> NDArray[np.bool_]:
    """Return the personal parameters, bool [d]: squared difference above its quantile (FedOBP Eq. 7, 19).

    local: float32 [d], the client's trained vector of its last participation; received: float32 [d], the global one;
    sizes: elements per layer; quantile: in [0, 1], over all squared differences; normalization: "none", "global" or
    "layer"; rule: of the quantile, as in `select`.

    Raises ValueError on shapes that do not fit, arguments out of range and values that are not finite.
    """
    if local.shape != received.shape or local.ndim != 1:
        raise ValueError(f"local has shape {local.shape}, received {received.shape}: both must be [d]")
    difference = np.abs(np.subtract(local, received))
    if normalization == "layer":
        scores = difference.astype(np.float64)
        return select(scores * scores, sizes, quantile=quantile, normalization=normalization, rule=rule)
    # The absolute difference has the order of its square, and does not underflow. Rounding to float32 can only add
    # ties. Ties matter at the threshold alone, where float64 separates them.
    _check(difference, sizes, quantile, normalization)
    rank = _rank(difference.size, quantile, rule)
    below = _score_at(difference, rank)
    mask: NDArray[np.bool_] = difference > below
    num_missing = difference.size - 1 - rank - int(np.count_nonzero(mask))
    if num_missing > 0 and below > 0:
        tied = np.flatnonzero(difference == below)
        exact = np.abs(local[tied].astype(np.float64) - received[tied])
        mask[tied] = exact > _score_at(exact, tied.size - 1 - num_missing)
    return mask


def select(
    scores: NDArray[np.floating[Any]],
    sizes: Sequence[int],
    *,
    quantile: float,
    normalization: str = "none",
    rule: str = "linear",
) -> NDArray[np.bool_]:
    """Return the scores above their quantile, bool [d].

    scores: float [d], not negative; sizes: elements per layer, summing to d. The rule "linear" interpolates, as NumPy
    and torch do: if all scores differ, d - 1 - floor((d - 1) * quantile) are selected. "printed" takes the smallest
    score that at least a share `quantile` does not exceed (Eq. 7): floor((1 - quantile) * d) are selected. "layer"
    first scales every layer's scores to [0, 1], and a layer of equal scores to 0.

    Raises ValueError as `personal_mask`.
    """
    _check(scores, sizes, quantile, normalization)
    if normalization == "layer":
        scores = _scaled_by_layer(scores, sizes)
    return scores > _score_at(scores, _rank(scores.size, quantile, rule))


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


def _score_at(scores: NDArray[np.floating[Any]], rank: int) -> float:
    """Return the score of a rank, counted from 0 at the lowest; -inf at rank -1."""
    return float(np.partition(scores, rank)[rank]) if rank >= 0 else -math.inf


def _rank(d: int, quantile: float, rule: str) -> int:
    """Return the rank of the score at the quantile. Exactly the scores above it are above the quantile.

    An interpolated quantile lies between this score and the next one, and no score lies between the two.
    """
    if rule == "printed":
        # the decimal as written: 0.07 * 100 is above 7 in floats
        return math.ceil(Fraction(str(quantile)) * d) - 1
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
    """Server half: FedAvg, and a record of the number of personal parameters in every layer (Fig. 5)."""

    means = Means(RULES, streams=True, sets_model=True)
    # uploads include personal parameters, which drift: 4 times the usual distance was seen in 30 rounds
    outliers = Outliers(tolerance=2.0)

    def form(self, state: State, turn: Turn) -> Expected:
        """Return the form of an upload: the counts of personal parameters per layer.

        If configured it also has a mask, with any number of ones.
        """
        num_params = self.layout.d if self.params.upload_mask else 0
        return replace(
            super().form(state, turn), num_params=num_params, extras={COUNTS: ("<i8", (len(self.layout.params),))}
        )

    def check(self, upload: Upload) -> None:
        """Raise WireError for counts beyond a layer's size, and for counts that differ from the mask's."""
        counts = upload.extras[COUNTS]
        for count, slot in zip(counts.tolist(), self.layout.params, strict=True):
            if not 0 <= count <= slot.size:
                raise WireError(f"array {COUNTS} has {count} for {slot.name}, a tensor of {slot.size} elements")
        if upload.mask is not None:
            found = count_by_layer(masks.unpack(upload.mask, self.layout.d), self.layout.sizes)
            if found != counts.tolist():
                raise WireError(f"array {COUNTS} is {counts.tolist()}, but the mask has {found} ones per layer")

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Average, and note the counts by layer name."""
        names = [slot.name for slot in self.layout.params]
        # none in a private run
        for client_id, counts in zip(uploads.ids, uploads.extras.get(COUNTS, np.empty(0)).tolist(), strict=True):
            turn.note(client_id, COUNTS, dict(zip(names, counts, strict=True)))
        return super().update(state, uploads, turn)


class FedOBPUpdate(LocalUpdate[FedOBPParams]):
    """Client half.

    State: `fedobp.params`, `.buffers` (trained model of the last participation), `.mask` (packed, of the last merge),
    `.update` (last local update, for gradient scores), `.ema` (smoothed scores).
    """

    def merge(self, received: Model, state: ClientState, ctx: RoundContext[FedOBPParams]) -> Model:
        """Return the received model with the client's own values where they are personal (Eq. 9)."""
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
        """Return the parameters in scope that the configured score selects, bool [d]."""
        p = ctx.params
        slots = [s for s in ctx.layout.params if p.scope == "all" or s.name in ctx.layout.classifier]
        inside, sizes = ctx.layout.indices(frozenset(s.name for s in slots)), [s.size for s in slots]
        how: dict[str, Any] = {"quantile": p.quantile, "normalization": p.normalization, "rule": p.quantile_rule}
        if p.score == "obp" and not p.ema:
            chosen = personal_mask(own.params[inside], start.params[inside], sizes, **how)
        else:
            importance = self.scores(own, start, state, ctx)
            if p.ema:
                importance = p.ema * state.arrays.get("fedobp.ema", importance) + (1 - p.ema) * importance
                state.arrays["fedobp.ema"] = importance
            chosen = select(importance[inside], sizes, **how)
        mask = np.zeros(ctx.layout.d, dtype=bool)
        mask[inside] = chosen
        return mask

    def scores(
        self, own: Model, start: Model, state: ClientState, ctx: RoundContext[FedOBPParams]
    ) -> NDArray[np.float64]:
        """Return the importance of every parameter, float64 [d]."""
        if ctx.params.score == "gradient":
            return state.arrays["fedobp.update"].astype(np.float64)
        if ctx.params.score == "sensitivity":
            return scores.sensitivity(start.params, own.params).astype(np.float64)
        if ctx.params.score == "fisher":
            root: NDArray[np.float64] = ctx.trainer.loss_gradient(own).astype(np.float64)
        else:
            root = own.params.astype(np.float64) - start.params
        root *= root
        return root

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedOBPParams]) -> Model:
        """Train from the merged model (Eq. 10), and keep the result."""
        after = super().train(start, state, ctx)
        state.arrays["fedobp.params"], state.arrays["fedobp.buffers"] = after.params, after.buffers
        if ctx.params.score == "gradient":
            state.arrays["fedobp.update"] = np.abs(start.params - after.params)
        return after

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[FedOBPParams]) -> Upload:
        """Send everything, the counts of personal parameters per layer and, if configured, their mask."""
        plain = super().upload(before, after, state, ctx)
        if ctx.config.private:
            return plain
        packed = state.arrays["fedobp.mask"]
        counts = count_by_layer(masks.unpack(packed, ctx.layout.d), ctx.layout.sizes)
        mask = packed if ctx.params.upload_mask else None
        return replace(plain, mask=mask, extras={COUNTS: np.array(counts, np.int64)})


FIGURES = (
    Layers(
        COUNTS,
        "In which layers the personal parameters are",
        "share of personal parameters (%)",
        "The share of each layer in all parameters that clients keep personal in a round (Fig. 5 of its paper).",
        name="personal",
        shares=True,
    ),
)

METHOD = Method(
    "fedobp",
    FedOBPParams,
    FedOBP,
    FedOBPUpdate,
    all_but_local_statistics,
    figures=FIGURES,
    needs_whole=True,
    sums=True,
    global_beside_personal=True,
    needs=lambda params: SPLIT if params.scope == "classifier" else "",
    overview=Overview(
        group="A part of the model",
        stays="few parameters",
        disk="4(d+b) + ⌈d/8⌉",
        use="a global model with few personal values",
    ),
)
