"""FedGen: FedAvg plus a generator of features, which the server trains on the clients' classifiers and lends to them.

Zhu, Hong, Zhou: "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021.

Generator G: [noise; onehot(y)] -> Linear -> BatchNorm -> ReLU -> Linear -> features, the input of the model's last
Linear layer.

Server: it trains G on a round's uploads, before it averages them as FedAvg. The clients' label counts give
omega_i^y = n_i^y / sum_j n_j^y. Then it takes `generator-steps` of Adam on

    sum_i mean_b omega_i^{y_b} CE(head_i(G(y_b)), y_b)
        + eta exp(-mean_ij mean|z_i - z_j| mean (noise_i - noise_j)^2)

head_i is client i's classifier and z the generated features. Labels are drawn uniformly from the qualified ones, those
that at least one client has.

Client, from round 2 on: SGD on

    CE + B_G/B alpha_t mean CE(head(G(y')), y') + beta_t KL(head(G(y)) || logits)

y' is drawn uniformly from the qualified labels; y are the batch's. G is held fixed and, in the last term, head(G(y))
too. a_t = max(1e-4, a decay^(t-1)) for a in (alpha, beta). alpha = beta = 0, and the first round, are FedAvg, bit for
bit.

Deviations:

- Label counts are those of the training samples. The authors count the labels in a round's batches, plus 1.
- `teacher`: a loss per client weighted by label share (authors' code), or CE of the mean of logits (the paper). Ours
  weights that mean by samples, as PFLlib does.
- `noise`: uniform (authors' code) or Gaussian (paper).
- The authors' student loss has weight 0 and is left out.
- A weight of 0 stays 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_app import rng
from strategies.base import (
    AT_LEAST_ONE,
    LINEAR,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_RATIO,
    ClientState,
    Expected,
    LocalUpdate,
    Method,
    MethodError,
    Model,
    Objective,
    Outliers,
    Overview,
    RoundContext,
    Rule,
    Scalars,
    Sent,
    State,
    Turn,
    Upload,
    Uploads,
    WireError,
    all_but_local_statistics,
    key,
)
from strategies.baselines.fedavg import FedAvg, GlobalModelParams
from strategies.kernels import head_slots

if TYPE_CHECKING:
    from torch import Tensor, nn

# up, int32 [C]: training samples per class
COUNTS = "class-counts"
# down: float32, float32, uint8 [C]
GENERATOR, STATISTICS, QUALIFIED = "generator", "generator-statistics", "qualified"

# lower bound of a decaying weight
_LEAST = 1e-4
# of the generator's Adam, as in the authors' code
_WEIGHT_DECAY, _LEARNING_RATE_DECAY = 0.01, 0.98


@dataclass(frozen=True)
class FedGenParams(GlobalModelParams):
    """Parameters of FedGen, table `fedgen`; defaults are the authors' for MNIST."""

    alpha: float = key(10.0, "Weight of the loss on generated features (alpha).", NOT_NEGATIVE)
    beta: float = key(10.0, "Weight of the distillation of generated predictions (beta).", NOT_NEGATIVE)
    diversity: float = key(1.0, "Weight of the generator's diversity loss.", NOT_NEGATIVE)
    decay: float = key(0.98, "Factor on alpha and beta after every round; they stay at least 1e-4.", POSITIVE_RATIO)
    generator_learning_rate: float = key(
        3e-4, "Adam's learning rate for the generator, times 0.98 every round.", POSITIVE
    )
    generator_steps: int = key(50, "Steps of the generator per round.", NOT_NEGATIVE)
    batch: int = key(32, "Generated samples per step, on the server and on clients (B_G).", Rule(low=2))
    noise_dim: int = key(32, "Elements of the generator's noise.", AT_LEAST_ONE)
    hidden: int = key(256, "Width of the generator's hidden layer.", AT_LEAST_ONE)
    noise: Literal["uniform", "gaussian"] = key(
        "uniform", "Noise from [0, 1) (authors' code), or standard normal (paper)."
    )
    teacher: Literal["loss", "ensemble"] = key(
        "loss",
        "The generator's loss: one per client, weighted by label share (authors' code), or that of the mean of logits "
        "(paper).",
    )

    @property
    def generates(self) -> bool:
        """Return whether the run has a generator at all."""
        return bool(self.alpha or self.beta)


def label_weights(counts: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return each client's share of each class, float64 [N, C], and the qualified classes, int64, sorted.

    counts: [N, C], training samples. A class is qualified if any client has it. Its column of shares sums to 1; other
    columns are 0.
    """
    samples = np.asarray(counts, np.float64)
    totals = samples.sum(axis=0)
    return samples / np.where(totals > 0, totals, 1), np.flatnonzero(totals > 0)


def annealed(weight: float, decay: float, round: int) -> float:
    """Return a weight in round t, counted from 1: times decay^(t-1), at least 1e-4; 0 stays 0."""
    return max(_LEAST, weight * decay ** (round - 1)) if weight else 0.0


# The generator --------------------------------------------------------------------------------------------------------


def initial_generator(num_classes: int, width: int, params: FedGenParams, seed: int) -> Model:
    """Return a run's initial generator: params float32 [d_G], statistics float32 [2H]. PyTorch initializes it."""
    import torch
    from torch import nn

    from fl_app import weights

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(rng.torch_seed(seed, "model:fedgen"))
        inner, outer = nn.Linear(params.noise_dim + num_classes, params.hidden), nn.Linear(params.hidden, width)
        return weights.read(nn.Sequential(inner, nn.BatchNorm1d(params.hidden), outer))


def generate(
    flat: Tensor, statistics: Tensor, noise: Tensor, labels: Tensor, num_classes: int, *, training: bool
) -> Tensor:
    """Return the generator's features float32 [n, f] for noise float32 [n, noise] and labels int64 [n].

    flat: float32 [d_G]; statistics: float32 [2H], running mean and variance; training: normalise by the batch, and
    update the statistics.
    """
    import torch
    from torch.nn.functional import batch_norm, linear, one_hot

    mean, variance = statistics.chunk(2)
    hidden, inputs = len(mean), noise.shape[1] + num_classes
    width = (len(flat) - (inputs + 3) * hidden) // (hidden + 1)
    sizes = [hidden * inputs, hidden, hidden, hidden, width * hidden, width]
    inner, inner_bias, scale, shift, outer, outer_bias = torch.split(flat, sizes)
    entering = torch.cat([noise, one_hot(labels, num_classes).to(noise.dtype)], dim=1)
    normal = batch_norm(
        linear(entering, inner.view(hidden, inputs), inner_bias), mean, variance, scale, shift, training=training
    )
    return linear(normal.relu(), outer.view(width, hidden), outer_bias)


def draw_noise(stream: np.random.Generator, n: int, params: FedGenParams) -> NDArray[np.float32]:
    """Return noise for n samples, float32 [n, noise]."""
    shape = (n, params.noise_dim)
    return stream.random(shape, np.float32) if params.noise == "uniform" else stream.standard_normal(shape, np.float32)


def teacher_loss(z: Tensor, y: Tensor, heads: Tensor, biases: Tensor, weights: Tensor) -> Tensor:
    """Return sum_i mean_b weights[i, y_b] CE(head_i(z_b), y_b), a scalar: the classifiers' weighted cross-entropy.

    z: float [n, f]; y: int64 [n]; heads: float [N, C, f]; biases: float [N, C]; weights: float [N, C].
    """
    num_heads, num_classes, width = heads.shape
    logits = (z @ heads.reshape(-1, width).T).view(-1, num_heads, num_classes) + biases  # [n, N, C]
    losses = logits.logsumexp(dim=2) - logits.gather(2, y.view(-1, 1, 1).expand(-1, num_heads, 1)).squeeze(2)
    return (losses * weights[:, y].T).sum() / len(y)


def diversity_loss(z: Tensor, noise: Tensor) -> Tensor:
    """Return exp(-mean over all pairs of mean|z_i - z_j| mean (noise_i - noise_j)^2), a scalar.

    It is low where different noise gives different features. z: float [n, f]; noise: float [n, noise].
    """
    import torch

    apart = torch.cdist(z, z, p=1) / z.shape[1]
    return torch.exp(-(apart * (noise[:, None] - noise).square().mean(dim=2)).mean())


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread, so that sums do not depend on the number of threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# The two halves -------------------------------------------------------------------------------------------------------


class FedGen(FedAvg[FedGenParams]):
    """Server half. Memory: the generator, its optimizer and the qualified labels."""

    # generated samples move single clients far: 7.2 times the usual distance where most have the same class
    outliers = Outliers(tolerance=4.0)

    def form(self, state: State, turn: Turn) -> Expected:
        """Return the form of an upload: the model and the label counts."""
        if not self.params.generates:
            return super().form(state, turn)
        return replace(super().form(state, turn), extras={COUNTS: ("<i4", (self.num_classes,))})

    def check(self, upload: Upload) -> None:
        """Raise WireError if counts are negative or do not sum to the reported number of samples."""
        if self.params.generates:
            counts = np.asarray(upload.extras[COUNTS], np.int64)
            if counts.min() < 0 or counts.sum() != upload.num_examples:
                raise WireError(
                    f"{COUNTS} must be >= 0 and sum to num_examples {upload.num_examples}, got {counts.tolist()}"
                )

    @property
    def num_classes(self) -> int:
        """Return the number of the classifier's outputs."""
        return head_slots(self.layout)[0].shape[0]

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """Return the global model, and from round 2 on the generator and the qualified labels."""
        if not self.params.generates or not state.round:
            return Sent(state.model)
        last = self.remembered()
        return Sent(state.model, {GENERATOR: last["params"], STATISTICS: last["buffers"], QUALIFIED: last["qualified"]})

    def remembered(self) -> Mapping[str, NDArray[Any]]:
        """Return the generator, Adam's moments and steps, and the qualified labels.

        They are as the last round left them, or at first their initial values.
        """
        if self.state.memory:
            return self.state.memory
        num_classes, width = head_slots(self.layout)[0].shape
        model = initial_generator(num_classes, width, self.params, self.config.seed)
        moments = {name: np.zeros(model.params.size, np.float32) for name in ("first", "second")}
        qualified = np.zeros(num_classes, np.uint8)
        steps = np.zeros((), np.float32)
        return {"params": model.params, "buffers": model.buffers, **moments, "steps": steps, "qualified": qualified}

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Train the generator on the uploaded classifiers, then average."""
        kept: Mapping[str, NDArray[Any]] = {}
        if self.params.generates:
            with one_thread():
                kept = self.trained_generator(uploads, turn)
        return super().update(state, uploads, turn).next(memory=kept)

    def trained_generator(self, uploads: Uploads, turn: Turn) -> dict[str, NDArray[Any]]:
        """Take `generator-steps` of Adam, on the CPU. Return what `remembered` returns next. Raises UserError if they diverge."""
        import torch

        p, last = self.params, self.remembered()
        flat, statistics = torch.tensor(last["params"], requires_grad=True), torch.tensor(last["buffers"])
        rate = p.generator_learning_rate * _LEARNING_RATE_DECAY ** (turn.round - 1)
        adam = torch.optim.Adam([flat], rate, weight_decay=_WEIGHT_DECAY)
        steps, first, second = (torch.tensor(last[name]) for name in ("steps", "first", "second"))
        adam.state[flat] = {"step": steps, "exp_avg": first, "exp_avg_sq": second}  # all moved in place
        shares, qualified = label_weights(uploads.counts(COUNTS))
        teachers = [torch.from_numpy(array) for array in self.teachers(uploads, shares, turn)]
        stream = rng.generator(self.config.seed, "fedgen", turn.round)
        for _ in range(p.generator_steps):
            labels = torch.from_numpy(stream.choice(qualified, p.batch))
            noise = torch.from_numpy(draw_noise(stream, p.batch, p))
            z = generate(flat, statistics, noise, labels, self.num_classes, training=True)
            loss = teacher_loss(z, labels, *teachers)
            if p.diversity:
                loss = loss + p.diversity * diversity_loss(z, noise)
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
            turn.note_round("generator-loss", loss.item())
        if not flat.isfinite().all():
            largest = np.abs(uploads.W[:, self.layout.indices(self.layout.classifier)]).max(axis=1)
            raise MethodError(
                key="fedgen",
                rule=f"the generator diverged in round {turn.round} (fedgen.generator-learning-rate {rate:g} "
                "by then); of the classifiers that it learned from, client "
                f"{uploads.ids[int(largest.argmax())]}'s has the largest weight, {largest.max():.3g}; "
                f"lower learning-rate ({self.config.learning_rate:g}), at which the classifiers grow, or "
                "the generator's",
            )
        known = np.isin(np.arange(self.num_classes), qualified).astype(np.uint8)
        kept = {"params": flat.detach(), "buffers": statistics, "steps": steps, "first": first, "second": second}
        return {name: tensor.numpy() for name, tensor in kept.items()} | {"qualified": known}

    def teachers(
        self, uploads: Uploads, shares: NDArray[np.float64], turn: Turn
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
        """Return classifiers as float32 ([N, C, f], [N, C]), and the weights [N, C] of their losses.

        For the mean of logits it returns one classifier: the mean of linear classifiers gives the mean of their logits.
        """
        weight, bias = head_slots(self.layout)
        flat = [uploads.W[:, slot.start : slot.stop] for slot in (weight, bias) if slot is not None]
        if self.params.teacher == "ensemble":
            averaging, weights = turn.average, self.weights(uploads)
            flat = [averaging.mean(rows, weights)[None] for rows in flat]
            shares = np.ones((1, weight.shape[0]))
        heads = np.ascontiguousarray(flat[0]).reshape(-1, *weight.shape)
        biases = np.ascontiguousarray(flat[1]) if bias else np.zeros(heads.shape[:2], np.float32)
        return heads, biases, shares.astype(np.float32)


class FedGenUpdate(LocalUpdate[FedGenParams]):
    """Client half: cross-entropy and, with a generator, two losses on generated features.

    It sends its label counts.
    """

    def train(self, start: Model, state: ClientState, ctx: RoundContext[FedGenParams]) -> Model:
        """Train, with the generator if one was sent."""
        return ctx.trainer.train(start, objective=self.objective(ctx))

    def objective(self, ctx: RoundContext[FedGenParams]) -> Objective | None:
        """Return CE plus the weighted losses; None, no operation at all, without a generator."""
        if GENERATOR not in ctx.extras or not ctx.params.generates:
            return None
        import torch
        from torch.nn.functional import cross_entropy, kl_div, log_softmax

        p, trainer = ctx.params, ctx.trainer
        alpha, beta = (annealed(weight, p.decay, ctx.round) for weight in (p.alpha, p.beta))
        alpha *= p.batch / ctx.config.batch_size
        head, stream, qualified = trainer.classifier(), ctx.rng("fedgen"), np.flatnonzero(ctx.extras[QUALIFIED])
        flat, statistics = (torch.tensor(ctx.extras[n], device=trainer.weights.device) for n in (GENERATOR, STATISTICS))

        def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            logits = trainer.logits(module, x)
            value = trainer.loss(logits, y)
            drawn = torch.from_numpy(stream.choice(qualified, p.batch if alpha else 0)).to(x.device, non_blocking=True)
            labels = torch.cat([drawn, y]) if beta else drawn
            noise = torch.from_numpy(draw_noise(stream, len(labels), p)).to(x.device, non_blocking=True)
            with torch.no_grad():
                z = generate(flat, statistics, noise, labels, head.out_features, training=False)
            if alpha:
                value = value + alpha * cross_entropy(head(z[: p.batch]), drawn)
            if beta:
                with torch.no_grad():
                    target = log_softmax(head(z[len(drawn) :]), dim=1)
                value = value + beta * kl_div(
                    log_softmax(logits, dim=1), target, reduction="batchmean", log_target=True
                )
            return value

        return loss

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[FedGenParams]) -> Upload:
        """Send the model and, if the run has a generator, the label counts."""
        plain = super().upload(before, after, state, ctx)
        if not ctx.params.generates:
            return plain
        return replace(plain, extras={COUNTS: ctx.trainer.class_counts.astype(np.int32)})


FIGURES = (
    Scalars(
        "generator-loss", "Loss of the generator", "loss", "The loss of the last step on the server in each round."
    ),
)
METHOD = Method(
    "fedgen",
    FedGenParams,
    FedGen,
    FedGenUpdate,
    all_but_local_statistics,
    figures=FIGURES,
    needs_classes=True,
    not_private="it sends label counts with every upload",
    needs=LINEAR,
    overview=Overview(
        group="One global model for all",
        travels="model; up + 4C, down + generator",
        server="generator",
        use="classes missing on clients",
    ),
)
