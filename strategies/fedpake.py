"""FedPake: one global model; parameters on which clients disagree are averaged over clusters of clients, and shrunk.

Liao, Wang, Yuan, Zhang: "The Key of Parameter Skew in Federated Learning" (2024). It changes the server only; clients
train as in FedAvg.

Server, layer by layer:

1. The coefficient of variation is std/mean over clients (Eq. 2-3), min-max normalised over the layer. Dispersion is
   high where it exceeds lambda (Eq. 4).
2. There, a client's squared deviation from the mean falls into one of C equal bins of (0, 1], its Micro-Class (Eq. 6).
3. Clients that agree in Micro-Class on many high-dispersion parameters (Eq. 8) form a Macro-Class.
4. Each Macro-Class has a most frequent Micro-Class for every parameter (Eq. 9). That class holds a share of the layer's
   high-dispersion parameters. This share, divided by the number of Macro-Classes, is the Macro-Class's weight for the
   parameter (Eq. 11).
5. Where dispersion is high, the new parameter is the weighted sum of the Macro-Classes' means. Elsewhere it is the mean
   of all clients (Eq. 10).

Deviations and decisions:

- The mean in std/mean is signed as printed, and kept 1e-12 away from 0. `cv = "absolute"` is ours.
- Squared deviations of 0 and above 1 are outside the paper's bins. They go to classes 1 and C. With `deviations =
  "scaled"` they are in [0, 1].
- Eq. 8 counts differences over the whole layer and divides by the number of high-dispersion parameters. Ours counts
  both over the latter (`similarity-over`).
- The paper names no clustering. Ours is average linkage (`linkage`) on 1 - SIM, cut at `delta` (see `delta-meaning`)
  and at S clusters.
- `random-micro` and `random-macro` are the ablations of Table 4. The paper does not state the distribution. Ours is
  uniform, drawn anew in every round.
- Eq. 11 divides by the limit S. By default we divide by the number of clusters found (`divisor`). The reason: weights
  of usual size deviate by far less than sqrt(1/C). So all clients are in Micro-Class 1 and one Macro-Class. Dividing by
  S then multiplies the high-dispersion parameters by 1/S every round, which does not train. Dividing by the number
  found is FedAvg without sample weights there.
- Weights sum to at most 1, so a parameter shrinks if its classes vary over the layer. `normalize = true` (ours)
  rescales the sum to 1.
- Client means are unweighted, as printed.
- BatchNorm statistics take the plain mean, or stay on the client as in the code base of the paper's tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from fl_app import rng
from strategies.base import (
    AT_LEAST_ONE,
    RATIO,
    Late,
    Layers,
    LocalUpdate,
    Method,
    Model,
    Overview,
    PersonalizedStrategy,
    Rule,
    State,
    Turn,
    Uploads,
    all_but_local_statistics,
    key,
    local_epochs,
    specs,
)
from strategies.baselines.fedavg import GlobalModelParams
from strategies.kernels import Stack, in_order, weighted_mean
from strategies.kernels.blocks import blocks

# uint64 words of a plane, of all clients: all rows that a client is compared with stay in the cache
_BLOCK_WORDS = 262_144


def num_differing(classes: NDArray[np.uint8], highest: int) -> NDArray[np.int64]:
    """Return the number of columns in which each pair of rows differs (Eq. 8), int64 [N, N].

    classes: uint8 [N, M], at most `highest`. Works on one packed plane of bits per binary digit.
    """
    n, m = classes.shape
    planes = np.zeros((highest.bit_length(), n, -(-m // 64)), np.uint64)
    for digit, plane in enumerate(planes):
        plane.view(np.uint8)[:, : -(-m // 8)] = np.packbits(classes & (1 << digit), axis=1)
    upper = np.zeros((n, n), np.int64)
    for start, stop in blocks(0, planes.shape[2], max(128, _BLOCK_WORDS // n)):
        words = np.ascontiguousarray(planes[:, :, start:stop])
        for i in range(n - 1):
            differ = np.bitwise_or.reduce(words[:, i, None] ^ words[:, i + 1 :], axis=0)
            upper[i, i + 1 :] += np.bitwise_count(differ).sum(axis=1, dtype=np.uint32)
    return upper + upper.T


def most_frequent(classes: NDArray[np.uint8], members: Sequence[NDArray[np.intp]], highest: int) -> NDArray[np.uint8]:
    """Return the most frequent of the classes 1..highest, per column and group of rows (Eq. 9), uint8 [groups, M].

    classes: uint8 [N, M]. Ties go to the smaller class. The result is 0 if all of a group's classes are 0.
    """
    kind = np.min_scalar_type(len(classes))
    winner = np.zeros((len(members), classes.shape[1]), np.uint8)
    for start, stop in blocks(0, classes.shape[1]):
        part, best = classes[:, start:stop], winner[:, start:stop]
        most = np.zeros(best.shape, kind)
        for c in range(1, highest + 1):
            equal = part == c
            for j, rows in enumerate(members):
                count = np.add.reduce(equal if len(rows) == len(equal) else equal[rows], axis=0, dtype=kind)
                won = (count > most[j]).view(np.uint8)
                # classes come in increasing order: a later winner is the larger number
                won *= np.uint8(c)
                np.maximum(best[j], won, out=best[j])
                np.maximum(most[j], count, out=most[j])
    return winner


# a smaller |mean| is replaced by this
_TINY = 1e-12
# a similarity that misses delta by rounding counts as reaching it
_ROUNDING = 1e-9
_BLOCK = 65_536  # columns
# float64 values that `measure` works on at a time, so that they stay in the cache
_CHUNK = 80_000

T = TypeVar("T")


@dataclass(frozen=True)
class FedPakeParams(GlobalModelParams):
    """Parameters of FedPake, table `fedpake`."""

    threshold: float = key(
        0.2, "Normalised coefficient of variation above which dispersion is high (lambda, Eq. 4).", RATIO
    )
    num_micro: int = key(
        4,
        "Number of Micro-Classes (C, Eq. 6); paper: 4 (CIFAR-10), 5 (CIFAR-100), 8 (Tiny-ImageNet).",
        Rule(low=1, high=255),
    )
    num_macro: int = key(4, "Largest number of Macro-Classes (S); in the paper S = C.", AT_LEAST_ONE)
    delta: float = key(0.2, "Threshold at which the clustering into Macro-Classes stops (delta, Appendix C.1).", RATIO)
    delta_meaning: Literal["similarity", "distance"] = key(
        "similarity",
        "Clusters merge while their mean similarity is at least `delta`, or their distance at most `delta`.",
    )
    divisor: Literal["found", "limit"] = key(
        "found", "Divisor of the weights: the number of Macro-Classes found, or S as printed (Eq. 11)."
    )
    cv: Literal["signed", "absolute"] = key(
        "signed",
        "Denominator of the coefficient of variation: the mean as printed (Eq. 2), or its absolute value (ours).",
    )
    normalize: bool = key(False, "Rescale the Macro-Classes' weights of every parameter to the sum 1 (ours).")
    deviations: Literal["printed", "scaled"] = key(
        "printed",
        "Squared deviations that Eq. 6 sorts into bins. `scaled`: each parameter's are divided by their largest over clients, so "
        "that the bins cover them (ours).",
    )
    similarity_over: Literal["high", "all", "printed"] = key(
        "high",
        "Parameters that SIM (Eq. 8) counts: those of high dispersion, or `all` of the layer. `printed`: all in the "
        "numerator, those of high dispersion in the denominator.",
    )
    linkage: Literal["average", "single", "complete"] = key(
        "average",
        "Similarity of two clusters: their pairs' mean, largest or smallest one. The paper names no clustering.",
    )
    random_micro: bool = key(False, "Draw every client's Micro-Class of every parameter at random (Table 4).")
    random_macro: bool = key(False, "Draw every client's Macro-Class in every layer at random (Table 4).")


Draw = Callable[[str], np.random.Generator]
"""A function from a purpose to the round's generator for it."""


def _of_no_round(purpose: str) -> np.random.Generator:
    return rng.generator(0, purpose)


@dataclass(frozen=True)
class LayerSplit:
    """A layer's number of high-dispersion parameters, and of Macro-Classes (0 if no parameter is high)."""

    num_high: int
    num_macro: int


def aggregate(
    W: Stack,
    sizes: Sequence[int],
    *,
    threshold: float,
    num_micro: int,
    num_macro: int,
    delta: float,
    delta_meaning: str,
    divisor: str,
    cv: str = "signed",
    normalize: bool = False,
) -> NDArray[np.float32]:
    """Return FedPake's next parameters (Eq. 2-11), float32 [d].

    W: float32 [N, d], the clients' trained vectors; sizes: elements per layer, summing to d; threshold (lambda) and
    delta: in [0, 1]; num_micro (C): in 1..255; num_macro (S): at least 1; delta_meaning: "similarity" or "distance";
    divisor: "found" or "limit"; cv: "signed" or "absolute". threshold = 1, and identical rows, give the uniform mean
    bit for bit.

    Raises ValueError naming the argument that is out of range.
    """
    params = FedPakeParams(
        threshold,
        num_micro,
        num_macro,
        delta,
        delta_meaning,  # type: ignore[arg-type]
        divisor,  # type: ignore[arg-type]
        cv,  # type: ignore[arg-type]
        normalize,
    )
    return aggregate_layers(W, sizes, params)[0]


def aggregate_layers(
    W: Stack, sizes: Sequence[int], params: FedPakeParams, draw: Draw = _of_no_round
) -> tuple[NDArray[np.float32], list[LayerSplit]]:
    """Return the result of `aggregate`, and each layer's split. draw: for `random_micro` and `random_macro`."""
    _check(W, sizes, params)
    work = _Aggregation(W, sizes, params, draw)
    return work.run(), [LayerSplit(layer.num_high, len(layer.members)) for layer in work.layers]


@dataclass(frozen=True)
class Division:
    """How one layer is divided over N clients, before any mean is taken.

    high: bool [M], the parameters of high dispersion. micro: uint8 [N, M], Micro-Classes, 0 where dispersion is low.
    macro: int64 [N], each client's Macro-Class, numbered from 0 by their first clients; all 0 if no parameter is high.
    """

    high: NDArray[np.bool_]
    micro: NDArray[np.uint8]
    macro: NDArray[np.int64]


def divide(W: Stack, params: FedPakeParams, draw: Draw = _of_no_round) -> Division:
    """Return the Micro-Classes and Macro-Classes of one layer, as `aggregate_layers` finds them (Eq. 2-8).

    W: float32 [N, M], the clients' values of the layer. Raises ValueError naming the argument that is out of range.
    """
    _check(W, [W.shape[1]], params)
    work = _Aggregation(W, [W.shape[1]], params, draw)
    work.divide()
    (layer,) = work.layers
    macro = np.zeros(len(W), np.int64)
    for j, members in enumerate(layer.members):
        macro[members] = j
    # classes are written only in layers with some above 1
    micro = work.classes if layer.highest > 1 else np.ones_like(work.classes)
    return Division(work.high, micro * work.high, macro)


def _check(W: Stack, sizes: Sequence[int], params: FedPakeParams) -> None:
    if W.ndim != 2 or not W.shape[0]:
        raise ValueError(f"W must be [N, d] with at least one row, got shape {W.shape}")
    if sum(sizes) != W.shape[1]:
        raise ValueError(f"sizes sum to {sum(sizes)}, W has {W.shape[1]} columns")
    for name, value in (("threshold", params.threshold), ("delta", params.delta)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {value}")
    if not 1 <= params.num_micro <= 255:
        raise ValueError(f"num_micro must be in [1, 255], got {params.num_micro}")
    if params.num_macro < 1:
        raise ValueError(f"num_macro must be at least 1, got {params.num_macro}")
    for spec in specs(FedPakeParams):
        if spec.choices and (value := getattr(params, spec.field)) not in spec.choices:
            raise ValueError(f"{spec.field} must be one of {', '.join(spec.choices)}, got {value!r}")


@dataclass
class _Layer:
    """A layer, and the results of the passes over it."""

    size: int
    lowest_cv: float = np.inf
    highest_cv: float = -np.inf
    highest: int = 1  # Micro-Class
    num_high: int = 0
    # [N, N], parameters in which two clients' classes differ (`similarity_over`)
    differing: NDArray[np.int64] | int = 0
    members: list[NDArray[np.intp]] = field(default_factory=list)  # rows of each Macro-Class
    # [s, highest + 1], how often a class is a Macro-Class's most frequent
    votes: NDArray[np.int64] | int = 0
    weights: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))  # [s, highest + 1] (Eq. 11)


@dataclass
class _Block:
    """Consecutive columns of a layer."""

    layer: _Layer
    number: int
    at: slice
    lowest_cv: float = np.inf
    highest_cv: float = -np.inf
    highest: int = 1


class _Aggregation:
    """Two passes over blocks of columns (`divide`), then two that work on layers with several classes (`vote`, `combine`).

    Only `measure` and `combine` read W. After each pass the blocks' results are combined per layer, in order. A pass covers
    all its layers at once, as most layers are too small to keep the threads busy.
    """

    def __init__(self, W: Stack, sizes: Sequence[int], params: FedPakeParams, draw: Draw) -> None:
        n, d = W.shape
        self.W, self.params, self.draw = W, params, draw
        self.layers = [_Layer(size) for size in sizes]
        stops = np.cumsum(sizes, dtype=np.int64).tolist()
        spans = [
            (layer, span)
            for layer, stop in zip(self.layers, stops, strict=True)
            for span in blocks(stop - layer.size, stop, _BLOCK)
        ]
        self.blocks = [_Block(layer, number, slice(*span)) for number, (layer, span) in enumerate(spans)]
        self.merged, self.cv, self.high = np.empty(d, np.float32), np.empty(d), np.empty(d, dtype=bool)
        # np.empty takes memory only where it is written: in layers with classes above 1
        self.classes = np.empty((n, d), np.uint8)

    def run(self) -> NDArray[np.float32]:
        """Return the new parameters."""
        self.divide()
        for block, votes in self.through(self.vote, [b for b in self.blocks if b.layer.num_high]):
            block.layer.votes += votes
        for layer in self.layers:
            layer.weights = self.weights(layer)
        for _ in self.through(self.combine, [b for b in self.blocks if b.layer.num_high]):
            pass
        return self.merged

    def divide(self) -> None:
        """Find the means, the parameters of high dispersion, and the Micro- and Macro-Classes."""
        for block, _ in self.through(self.measure, self.blocks):
            layer = block.layer
            layer.lowest_cv, layer.highest_cv = (
                min(layer.lowest_cv, block.lowest_cv),
                max(layer.highest_cv, block.highest_cv),
            )
            layer.highest = max(layer.highest, block.highest)
        for block, (num_high, differing) in self.through(self.compare, self.blocks):
            block.layer.num_high += num_high
            block.layer.differing += differing
        drawn = self.draw("fedpake-macro").integers(self.params.num_macro, size=(len(self.layers), len(self.W)))
        for layer, groups in zip(self.layers, drawn, strict=True):
            layer.members = self.macro_classes(layer, groups)

    def through(self, work: Callable[[_Block], T], items: list[_Block]) -> Iterator[tuple[_Block, T]]:
        """Return an iterator over pairs (block, work(block)), computed on a few threads."""
        return zip(items, in_order(work, items), strict=True)

    def measure(self, block: _Block) -> None:
        """Compute mean, coefficient of variation and Micro-Classes (Eq. 2, 3, 6) in float64.

        In float32 equal rows would get a std above 0.
        """
        n, step = len(self.W), max(512, _CHUNK // len(self.W))
        scratch = np.empty((n, min(step, block.at.stop - block.at.start)))
        for start in range(block.at.start, block.at.stop, step):
            at = slice(start, min(start + step, block.at.stop))
            squares = scratch[:, : at.stop - at.start]
            squares[:] = self.W[:, at]
            mean = squares.sum(axis=0, initial=-0.0)  # keeps the sign of a zero
            mean /= n
            squares -= mean
            squares *= squares
            cv = squares.sum(axis=0)
            cv /= n
            np.sqrt(cv, out=cv)
            cv /= _away_from_zero(mean, self.params.cv)
            self.merged[at], self.cv[at] = mean, cv
            if self.params.random_micro:
                continue
            if self.params.deviations == "scaled":
                largest = squares.max(axis=0)
                np.divide(squares, largest, out=squares, where=largest > 0)
            highest = int(min(max(np.ceil(squares.max() * self.params.num_micro), 1), self.params.num_micro))
            if highest > 1 and block.highest == 1:
                self.classes[:, block.at] = 1
            block.highest = max(block.highest, highest)
            if highest > 1:
                squares *= self.params.num_micro
                # ceil(x) > bound if and only if x > bound
                above = (squares > 1).view(np.uint8)
                for bound in range(2, highest):
                    above += (squares > bound).view(np.uint8)
                self.classes[:, at] += above
        if self.params.random_micro:
            block.highest, shape = self.params.num_micro, self.classes[:, block.at].shape
            drawn = self.draw(f"fedpake-micro-{block.number}").integers(
                1, block.highest, shape, np.uint8, endpoint=True
            )
            self.classes[:, block.at] = drawn
        block.lowest_cv, block.highest_cv = float(self.cv[block.at].min()), float(self.cv[block.at].max())

    def compare(self, block: _Block) -> tuple[int, NDArray[np.int64] | int]:
        """Mark high dispersion, where the layer's min-max normalised cv exceeds lambda (Eq. 4).

        Returns the number of high parameters, and Eq. 8's counts [N, N] of parameters in which two clients' classes
        differ.
        """
        layer, at = block.layer, block.at
        spread = layer.highest_cv - layer.lowest_cv
        if spread == 0:
            self.high[at] = False
            return 0, 0
        normalised = self.cv[at] - layer.lowest_cv
        normalised /= spread
        high = np.greater(normalised, self.params.threshold, out=self.high[at])
        num_high = int(np.count_nonzero(high))
        if layer.highest == 1:
            return num_high, 0
        classes = self.classes[:, at]
        if block.highest == 1:
            classes[:] = 1
        over_all = self.params.similarity_over != "high"
        differing = num_differing(classes, layer.highest) if over_all else 0
        if num_high < high.size:
            # class 0, the same for all clients
            classes *= high.view(np.uint8)
        return num_high, differing if over_all else num_differing(classes, layer.highest)

    def macro_classes(self, layer: _Layer, drawn: NDArray[np.int64]) -> list[NDArray[np.intp]]:
        """Return the rows of each Macro-Class: none if no parameter is high, one if all are in class 1.

        drawn: the groups with `random_macro`, int64 [N].
        """
        if not layer.num_high:
            return []
        counted = layer.size if self.params.similarity_over == "all" else layer.num_high
        if self.params.random_macro:
            group_of = _numbered_by_first(drawn)
        else:
            group_of = macro_classes(1 - (np.zeros((len(self.W),) * 2) + layer.differing) / counted, self.params)
        return [np.flatnonzero(group_of == group) for group in range(int(group_of.max()) + 1)]

    def vote(self, block: _Block) -> NDArray[np.int64]:
        """Return how often each class is a Macro-Class's most frequent one, int64 [s, highest + 1] (Eq. 9).

        The most frequent classes replace the first rows of `classes`.
        """
        layer, at = block.layer, block.at
        if layer.highest == 1:
            return np.array([[0, np.count_nonzero(self.high[at])]] * len(layer.members))
        winners = most_frequent(self.classes[:, at], layer.members, layer.highest)
        self.classes[: len(winners), at] = winners
        return np.array([[np.count_nonzero(row == c) for c in range(layer.highest + 1)] for row in winners], np.int64)

    def weights(self, layer: _Layer) -> NDArray[np.float64]:
        """Return the weight of a parameter in which Macro-Class j has class c, [s, highest + 1] (Eq. 11)."""
        if not layer.num_high:
            return layer.weights
        divisor = len(layer.members) if self.params.divisor == "found" else self.params.num_macro
        weights = np.asarray(layer.votes, np.float64) / layer.num_high / divisor
        weights[:, 0] = 0
        return weights

    def combine(self, block: _Block) -> None:
        """Set high parameters to the weighted sum of the Macro-Classes' means (Eq. 10)."""
        layer, at = block.layer, block.at
        one_class = layer.highest == 1 and len(layer.members) == 1
        if one_class and (layer.weights[0, 1] == 1 or self.params.normalize):
            return
        for start, stop in blocks(at.start, at.stop):
            part = slice(start, stop)
            self.merged[part] = np.where(self.high[part], self.weighted_sum(layer, part), self.merged[part])

    def weighted_sum(self, layer: _Layer, at: slice) -> NDArray[np.float64]:
        """Return the sum over the Macro-Classes of weight times mean, float64 [M]."""
        rows = self.W[:, at]
        value = np.zeros(rows.shape[1])
        total = np.zeros(rows.shape[1] if self.params.normalize else 0)
        for j, (members, weights) in enumerate(zip(layer.members, layer.weights, strict=True)):
            mean = np.add.reduce(rows if len(members) == len(rows) else rows[members], axis=0, dtype=np.float64)
            mean /= len(members)
            weight = weights[1] if layer.highest == 1 else weights.take(self.classes[j, at])
            mean *= weight
            value += mean
            if self.params.normalize:
                total += weight
        if self.params.normalize:
            np.divide(value, total, out=value, where=self.high[at])
        return value


def _away_from_zero(mean: NDArray[np.float64], cv: str) -> NDArray[np.float64]:
    """Return the denominator of Eq. 2: the mean, or its absolute value, at least 1e-12 in size."""
    out = np.abs(mean)
    np.maximum(out, _TINY, out=out)
    return out if cv == "absolute" else np.copysign(out, mean, out=out)


def macro_classes(similarity: NDArray[np.float64], params: FedPakeParams) -> NDArray[np.int64]:
    """Return each client's cluster by the similarity of Micro-Classes, int64 [N], numbered by their first clients.

    similarity: float64 [N, N], at most 1. The tree of `linkage` on 1 - similarity is cut by `delta`. If more than S
    clusters remain, it is cut at S, or at fewer where several merge at one height.
    """
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    if len(similarity) < 2:
        return np.zeros(len(similarity), np.int64)
    tree = linkage(squareform(1 - similarity, checks=False), params.linkage)
    largest = 1 - params.delta if params.delta_meaning == "similarity" else params.delta
    labels = fcluster(tree, largest + _ROUNDING, "distance")
    if labels.max() > params.num_macro:
        labels = fcluster(tree, params.num_macro, "maxclust")
    return _numbered_by_first(labels)


def _numbered_by_first(labels: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return labels [N] renumbered from 0 in the order of their first occurrence."""
    _, first, label_of = np.unique(labels, return_index=True, return_inverse=True)
    numbered: NDArray[np.int64] = np.argsort(np.argsort(first))[label_of.reshape(-1)].astype(np.int64)
    return numbered


class FedPake(PersonalizedStrategy[FedPakeParams]):
    """Server half."""

    late = Late(aged="the clusters of parameters count every client once")

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Aggregate layer by layer, and note each layer's split."""

        def draw(purpose: str) -> np.random.Generator:
            return rng.generator(self.config.seed, purpose, turn.round)

        merged, splits = aggregate_layers(uploads.W, self.layout.sizes, self.params, draw)
        named = list(zip(self.layout.params, splits, strict=True))
        turn.note_round(
            "high-dispersion", {slot.name: float(np.round(split.num_high / slot.size, 6)) for slot, split in named}
        )
        turn.note_round("macro-classes", {slot.name: split.num_macro for slot, split in named})
        return state.next(Model(merged, weighted_mean(uploads.B)))


FIGURES = (
    Layers(
        "high-dispersion",
        "Where the clients disagree, layer by layer",
        "share of the layer (%)",
        "Left: share of a layer's parameters with high dispersion over the clients. Right: number of clusters "
        "(Macro-Classes) of clients by those parameters; 0 if none is high, 1 if the clients' values agree.",
        name="dispersion",
        heading="Parameters of high dispersion",
        percent=True,
        beside=Layers("macro-classes", "Clusters of clients", "clusters", heading="Clusters of clients", whole=True),
    ),
)

METHOD = Method(
    "fedpake",
    FedPakeParams,
    FedPake,
    LocalUpdate[FedPakeParams],
    all_but_local_statistics,
    figures=FIGURES,
    dp_epochs=local_epochs,
    overview=Overview(
        group="One global model for all",
        use="parameters on which clients disagree",
    ),
)
