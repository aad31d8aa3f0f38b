"""FedProto: no models travel, only prototypes: each class's mean features, which pull all clients' features together.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022.

Client i keeps its whole model. It receives the global prototypes p_c and trains with (Eq. 7 and 8)

    cross-entropy + lambda sum_c ||p_c - p_ic||        (`pull = classes`)

p_ic is the mean of the features z of the batch's samples of class c. Features are the classifier's input. After
training it sends, for its classes, the mean features of all its samples and their number n_ic. Server (Eq. 6):

    p_c = sum_i n_ic p_ic / sum_i n_ic

A sample is predicted by the nearest prototype, argmin_c ||z - p_c|| (Eq. 4). That is a linear classifier of the weights p_c and
the biases -||p_c||^2 / 2, so the model to evaluate is the client's with this classifier.

`weight = 0` and `predict = classifier` is Local, bit for bit.

Readings and deviations:

- As printed, Eq. 6 also divides by the number of clients, which would shrink the prototypes. The authors' code takes the
  plain mean over clients: `mean = clients`.
- The authors' code pulls every sample's features to its class's prototype, by the mean squared difference. This is the
  default, `pull = samples`. Eq. 7 (`pull = classes`) adds up distances over classes: with lambda = 1 it outweighs the
  cross-entropy, and the models stay at chance.
- The authors' code gathers a client's prototypes during its last epoch. Here they are those of the trained model.
- A class keeps its last prototype while no client of the round has it.
- A class without any prototype is never predicted, and has a finite loss (`nearest`). Before a client's first prototypes
  arrive, its classifier predicts.
- Fine-tuning starts from the client's own classifier, not from that of the prototypes.
- The authors' test looks only among the classes of the client's own training data: `candidates = own`.
- All clients have the same architecture; the paper's may differ in all but the features' width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from strategies.base import (
    LINEAR,
    NOT_NEGATIVE,
    ClientState,
    Expected,
    Layout,
    LocalUpdate,
    Method,
    MethodError,
    Model,
    Objective,
    Outliers,
    Overview,
    PersonalizedStrategy,
    RoundContext,
    Sent,
    State,
    Turn,
    Upload,
    Uploads,
    WireError,
    key,
)
from strategies.kernels import head_slots

if TYPE_CHECKING:
    from torch import Tensor, nn

PROTOTYPES, COUNTS = "prototypes", "counts"
"""Both ways: float32 [C, k], and int64 [C], the samples that they are means of. A class without samples has zeros."""

# their name in messages on far uploads
COMPARED = "prototypes"
# how far the logit of a class without a prototype stays below the best one: at least, and for each unit of the largest bias
_BELOW, _ROUNDING = 1.0, 1e-3


@dataclass(frozen=True)
class FedProtoParams:
    """Parameters of FedProto, table `fedproto`."""

    weight: float = key(1.0, "Weight of the distance to the global prototypes (lambda); 0: none.", NOT_NEGATIVE)
    pull: Literal["classes", "samples"] = key(
        "samples",
        "What is pulled: every sample's features (authors' code), or a batch's mean per class (Eq. 7; needs a small weight).",
    )
    mean: Literal["samples", "clients"] = key(
        "samples", "A class's prototype: the mean weighted by samples (paper), or over its clients (authors' code)."
    )
    predict: Literal["prototypes", "classifier"] = key(
        "prototypes", "The prediction: the nearest prototype (paper), or the model's own classifier."
    )
    candidates: Literal["all", "own"] = key(
        "all", "The prototypes to predict by: of all classes (paper), or of those in the client's data (authors' code)."
    )


def mean_prototypes(P: ArrayLike, counts: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the global prototypes, float64 [C, k], and the samples per class, int64 [C] (Eq. 6).

    P: [N, C, k], the clients' prototypes. counts: [N, C], the samples behind each, >= 0; 0: the prototype does not count.
    A class without samples has zeros. Raises ValueError for other shapes, and for counts below 0.
    """
    stack, weights = np.asarray(P, np.float64), np.asarray(counts, np.float64)
    if stack.ndim != 3 or weights.shape != stack.shape[:2] or (weights < 0).any():
        raise ValueError(
            f"P must be [N, C, k] and counts [N, C], >= 0, got {list(stack.shape)} and {list(weights.shape)}"
            f"{', counts below 0' if (weights < 0).any() else ''}"
        )
    totals = weights.sum(axis=0)
    sums = np.einsum("nck,nc->ck", np.where(weights[..., None] > 0, stack, 0), weights)
    return sums / np.where(totals > 0, totals, 1)[:, None], np.asarray(counts).sum(axis=0).astype(np.int64)


def prototypes_of(
    features: NDArray[np.float32], labels: NDArray[np.int64], num_classes: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return a client's prototypes, float32 [C, k], and its samples per class, int64 [C].

    features: float32 [n, k]; labels: int64 [n]. A class without samples has zeros.
    """
    counts = np.bincount(labels, minlength=num_classes)
    sums = np.zeros((num_classes, features.shape[1]))
    np.add.at(sums, labels, features)
    return (sums / np.maximum(counts, 1)[:, None]).astype(np.float32), counts


def nearest(prototypes: ArrayLike, counts: ArrayLike) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the linear classifier that predicts the nearest prototype: weight float32 [C, k] and bias float32 [C].

    A class with count 0 is never predicted. Its row is the mean of the others' rows, and its bias is below the mean of
    theirs: its logit is below their mean, whatever the features, and its loss is of the size of others.
    prototypes: [C, k]; counts: [C]. Raises ValueError if all counts are 0.
    """
    P, known = np.array(prototypes, np.float64), np.asarray(counts) > 0
    if not known.any():
        raise ValueError("counts must be above 0 for a class, got only 0")
    bias = -(P * P).sum(axis=1) / 2
    P[~known] = P[known].mean(axis=0)
    bias[~known] = bias[known].mean() - _BELOW - _ROUNDING * np.abs(bias[known]).max()
    return P.astype(np.float32), bias.astype(np.float32)


def distance(z: Tensor, y: Tensor, prototypes: Tensor, known: Tensor, *, pull: str) -> Tensor:
    """Return a batch's distance to the prototypes, a scalar.

    z: features float32 [n, k]; y: int64 [n]; prototypes: float32 [C, k]; known: bool [C], the classes that have one.
    pull: `classes`, the sum over the batch's classes of the Euclidean distance of the mean features, or `samples`, the
    mean squared difference of all samples' features.
    """
    import torch

    if pull == "samples":
        squared: Tensor = ((z - prototypes[y]).square() * known[y][:, None]).mean()
        return squared
    members = torch.nn.functional.one_hot(y, len(known)).to(z.dtype)
    counts = members.sum(0)
    means = (members.T @ z) / counts.clamp(min=1)[:, None]
    apart = torch.linalg.vector_norm(prototypes - means, dim=1)
    total: Tensor = (apart * ((counts > 0) & known)).sum()
    return total


def extras_of(layout: Layout) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Return the form of a client's prototypes in an upload. layout: the whole model's."""
    classes, width = head_slots(layout)[0].shape
    return {PROTOTYPES: ("<f4", (classes, width)), COUNTS: ("<i8", (classes,))}


def check_counts(upload: Upload) -> None:
    """Raise WireError unless a client's counts are not negative and sum up to its samples."""
    counts = np.asarray(upload.extras[COUNTS], np.int64)
    if (counts < 0).any() or counts.sum() > upload.num_examples:
        raise WireError(
            f"array {COUNTS} must be >= 0 and add up to at most its {upload.num_examples} samples, got {counts.tolist()}"
        )


def comparable(P: ArrayLike, counts: ArrayLike, sent: ArrayLike) -> NDArray[np.float32]:
    """Return a client's prototypes for a comparison with others', float32 [C, k].

    Its distance from the sent ones is the root mean square over its classes: clients have classes of different number. A
    class that it lacks has the sent prototype. P, sent: [C, k]. counts: [C], 0 where the client lacks the class.
    """
    owned, found = np.asarray(counts) > 0, np.array(sent, np.float32)
    found[owned] += (np.asarray(P, np.float32)[owned] - found[owned]) / np.float32(math.sqrt(max(1, owned.sum())))
    return found


def comparable_prototypes(extras: Mapping[str, NDArray[Any]], sent: NDArray[Any]) -> NDArray[np.float32]:
    """Return an upload's prototypes, float32 [C, k], as outlier screening compares them (`Outliers.comparable`)."""
    return comparable(extras[PROTOTYPES], extras[COUNTS], sent)


def sent_with_prototypes(model: Model, state: State, turn: Turn, layout: Layout) -> Sent:
    """Return a message with the state's prototypes and counts, from the second round on; zeros in a previewed round.

    A class that has none yet is compared with the mean of the others: features of all classes lie in one region. Before the
    first prototypes it is compared with 0. layout: the whole model's.
    """
    form = extras_of(layout)
    sent = {name: state.memory[name] for name in (PROTOTYPES, COUNTS) if name in state.memory}
    if turn.round >= 2:
        sent = {name: np.zeros(shape, dtype) for name, (dtype, shape) in form.items()} | sent
    known = sent[COUNTS] > 0 if COUNTS in sent else np.zeros(form[COUNTS][1], bool)
    reference = np.zeros(form[PROTOTYPES][1], np.float32)
    if known.any():
        reference = np.where(known[:, None], sent[PROTOTYPES], sent[PROTOTYPES][known].mean(axis=0))
    return Sent(model, sent, {COMPARED: reference})


def pulled(ctx: RoundContext[Any], weight: float, pull: str) -> Objective | None:
    """Return the loss plus weight times `distance` to the received prototypes; None, no operation at all, without them."""
    import torch

    if not weight or PROTOTYPES not in ctx.extras:
        return None
    trainer = ctx.trainer
    goal = torch.tensor(ctx.extras[PROTOTYPES], device=trainer.weights.device)
    known = torch.tensor(ctx.extras[COUNTS] > 0, device=trainer.weights.device)

    def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z, logits = trainer.forward(module, x)
        return trainer.loss(logits, y) + weight * distance(z, y, goal, known, pull=pull)

    return loss


class FedProto(PersonalizedStrategy[FedProtoParams]):
    """Server half. Memory: `prototypes` float32 [C, k] and `counts` int64 [C]."""

    # no tensors travel
    outliers = Outliers(models=False, extras={COMPARED: PROTOTYPES}, comparable=comparable_prototypes)

    def form(self, state: State, turn: Turn) -> Expected:
        """Return the form of an upload: no tensors, the prototypes and the counts."""
        return replace(super().form(state, turn), extras=extras_of(self.full_layout))

    def check(self, upload: Upload) -> None:
        """Raise WireError for counts that cannot be the client's."""
        check_counts(upload)

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """Return the global prototypes, from the second round on."""
        return sent_with_prototypes(state.model, state, turn, self.full_layout)

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Average the prototypes of the round's clients; other classes keep theirs."""
        counts = uploads.extras[COUNTS]
        weights = uploads.counts(COUNTS) if self.params.mean == "samples" else (counts > 0).astype(np.float64)
        # a late upload counts less
        means = mean_prototypes(uploads.extras[PROTOTYPES], weights * uploads.once[:, None])[0].astype(np.float32)
        total = counts.sum(axis=0)
        before = state.memory.get(PROTOTYPES, np.zeros_like(means))
        known = state.memory.get(COUNTS, np.zeros_like(total))
        now = {PROTOTYPES: np.where(total[:, None] > 0, means, before), COUNTS: np.where(total > 0, total, known)}
        return state.next(memory=now)


def candidates(ctx: RoundContext[FedProtoParams]) -> NDArray[np.int64]:
    """Return the samples behind the prototypes that predict, int64 [C]; 0 for others. All are 0 if the classifier predicts."""
    counts: NDArray[np.int64] = ctx.extras.get(COUNTS, np.zeros(0, np.int64))
    if ctx.params.predict == "classifier":
        return np.zeros_like(counts)
    return counts * (ctx.trainer.class_counts > 0) if ctx.params.candidates == "own" and len(counts) else counts


def under_prototypes(model: Model, ctx: RoundContext[FedProtoParams], counts: NDArray[np.int64]) -> Model:
    """Return a model with the classifier of prototypes. counts: as `candidates` has them."""
    params = model.params.copy()
    for slot, values in zip(head_slots(ctx.layout), nearest(ctx.extras[PROTOTYPES], counts), strict=True):
        if slot is not None:
            params[slot.start : slot.stop] = values.reshape(-1)
    return Model(params, model.buffers)


class FedProtoUpdate(LocalUpdate[FedProtoParams]):
    """Client half. It keeps its model, as Local does."""

    def personal(self, model: Model, state: ClientState, ctx: RoundContext[FedProtoParams]) -> Model:
        """Return the model under the classifier of the nearest prototype."""
        counts = candidates(ctx)
        return under_prototypes(model, ctx, counts) if counts.any() else model

    def finetune(self, start: Model, state: ClientState, ctx: RoundContext[FedProtoParams], epochs: int) -> Model:
        """Tune the client's own model, not the one under the classifier of prototypes."""
        own = state.arrays["local.params"] if "local.params" in state.arrays else ctx.initial().params
        return super().finetune(Model(own, start.buffers), state, ctx, epochs)

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedProtoParams]) -> Model:
        """Train the client's model with the pull to the prototypes."""
        return ctx.trainer.train(start, objective=pulled(ctx, ctx.params.weight, ctx.params.pull))

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[FedProtoParams]) -> Upload:
        """Send the prototypes at the trained model."""
        means, counts = prototypes_of(*ctx.trainer.features(after), len(ctx.trainer.class_counts))
        return replace(super().upload(before, after, state, ctx), extras={PROTOTYPES: means, COUNTS: counts})


def shared(layout: Layout, params: FedProtoParams) -> frozenset[str]:
    """Return no names: no tensor travels. Raises UserError for a classifier without the bias that the prediction needs."""
    if head_slots(layout)[1] is None and params.predict == "prototypes":
        raise MethodError(
            key="fedproto.predict",
            rule="prototypes needs a classifier with a bias that trains; take classifier, got prototypes",
        )
    return frozenset()


def tested(params: FedProtoParams) -> str:
    """Return the sentence on the classifier made of prototypes."""
    if params.predict == "classifier":
        return ""
    among = " of its own classes" if params.candidates == "own" else ""
    return f"before and after training, the client's features are tested with the nearest of the received prototypes{among}"


METHOD = Method(
    "fedproto",
    FedProtoParams,
    FedProto,
    FedProtoUpdate,
    shared,
    needs_classes=True,
    needs_whole=True,
    not_private="its server weighs each client's prototypes by its samples of the class",
    needs=LINEAR,
    tested=tested,
    overview=Overview(
        group="Nothing",
        travels="prototypes both ways",
        stays="everything",
        server="4Ck + 8C",
        disk="4(d+b)",
        epochs="E, + 1 forward",
        unseen="initial model under the prototypes",
        use="little traffic; models that must not travel",
    ),
)
