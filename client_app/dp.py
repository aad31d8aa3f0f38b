"""Differential privacy of one site's records: DP-SGD with Opacus, its accountant included (Abadi et al., CCS 2016).

Each training record enters a batch by chance. Its gradient is clipped to a norm of `dp-clip`, and Gaussian noise is
added to the sum. So (`dp-epsilon`, `dp-delta`) bound the information that a model reveals about any one record, over
all rounds together.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from opacus.accountants import RDPAccountant, register_accountant
from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent
from opacus.accountants.utils import get_noise_multiplier
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from client_app.batches import SecretDraws
from client_app.noise import noisy
from client_app.notes import Notes, Training
from client_app.trainer import LocalTrainer
from fl_app import tasks
from fl_app.config import RunConfig
from fl_app.errors import Diverged, UserError, describe
from fl_app.layout import Model
from fl_app.privacy.secure_random import SecureRandom
from strategies.base import Correction, Objective

log = logging.getLogger("corolla")

# relative, for the rounding in an accountant's sums
SLACK = 1e-6
# beyond it more noise changes no accountant's result
_MOST_NOISE = 1e6

# orders of the bound for a replaced record; few, because a deployment's client computes them in every round
_REPLACE_ORDERS = (1.5, 1.75, 2, 2.25, 2.5, 3, 3.5, *range(4, 33), 40, 48, 64, 96, 128, 256)

Kind = tuple[float, float]
"""A kind of step: (noise multiplier, sampling rate). Steps of one kind cost the same."""


def check_module(module: nn.Module, config: RunConfig, input_shape: tuple[int, ...]) -> None:
    """Raise UserError for a module without per-record gradients, such as an LSTM.

    Two samples of zeros pass through a copy of it, forward and backward. input_shape: the shape of a sample.
    """
    wrapped = _keeping_records_apart(copy.deepcopy(module), config.model)
    example = torch.zeros((2, *input_shape), dtype=getattr(torch, tasks.of(config).input_dtype))
    try:
        with quiet():
            wrapped(example).sum().backward()
    except Exception as error:
        # raised by PyTorch, by its function transforms, or by Opacus
        why = describe(error).splitlines()[0]
        raise UserError(
            key="dp-epsilon",
            rule=f"model {config.model} gives no gradients per record ({why}); replace the layer by one of "
            "opacus.layers (DPLSTM, DPMultiheadAttention)",
        ) from None


def _keeping_records_apart(module: nn.Module, model: str) -> GradSampleModule:
    try:
        return GradSampleModule(module, loss_reduction="mean")
    except NotImplementedError as error:
        raise UserError(key="dp-epsilon", rule=f"model {model} does not keep records apart: {error}") from None


@dataclass(frozen=True)
class Spent:
    """The privacy budget that earlier trainings spent on the same records, and the budgets that they promised.

    steps: by kind. epsilon, delta: the smallest that any run promised. Without one they are inf and 1, which limit
    nothing.
    """

    steps: Mapping[Kind, int] = field(default_factory=dict)
    epsilon: float = math.inf
    delta: float = 1.0

    @classmethod
    def of(cls, trainings: Collection[Training], experiment: str = "") -> Spent:
        """Sum up trainings: the steps of all experiments but `experiment`, and all promised budgets."""
        return cls(
            _by_kind(t for t in trainings if t.experiment != experiment),
            min((t.epsilon for t in trainings), default=math.inf),
            min((t.delta for t in trainings), default=1.0),
        )

    def budget(self, config: RunConfig) -> tuple[float, float]:
        """Return the run's limit (epsilon, delta): for each, the smaller of the run's own and the promised one."""
        return min(self.epsilon, config.dp_epsilon), min(self.delta, config.dp_delta)


@dataclass(frozen=True)
class Plan:
    """A plan to spend a budget.

    rate: a record's probability of being in a batch; steps: per epoch; noise: multiplier of `dp-clip`.
    """

    rate: float
    steps: int
    noise: float

    @classmethod
    def of(cls, config: RunConfig, samples: int, epochs: int, before: Spent | None = None) -> Plan:
        """Plan for a client with `samples` training samples, which trains `epochs` epochs a round.

        before: the spending of other runs on the same records. With the plan's noise the client can take part in all
        rounds, within the run's budget and all budgets promised before. Raises UserError if no noise is enough.
        """
        if config.dp_delta * samples >= 1:
            raise UserError(
                key="dp-delta",
                rule=f"must be below 1 / {samples}, one over the number of training samples, got "
                f"{config.dp_delta:g}; a larger value would allow a run to publish a sample",
            )
        rate, steps = min(1.0, config.batch_size / samples), math.ceil(samples / config.batch_size)
        before = before or Spent()
        epsilon, delta = before.budget(config)
        total, others = steps * epochs * config.num_server_rounds, tuple(sorted(before.steps.items()))
        try:
            noise = _noise(epsilon, delta, rate, total, others)
        except ValueError:
            spent = epsilon_of(before.steps, delta)
            other_runs = f"; other runs have spent {spent:.4g} of it at this site" if spent else ""
            raise UserError(
                key="dp-epsilon",
                rule=f"no noise keeps {samples} samples within {epsilon:g} "
                f"(dp-delta {delta:g}{promised_before(config, epsilon, delta)}) "
                f"over {config.num_server_rounds} rounds of {steps * epochs} steps{other_runs}",
            ) from None
        return cls(rate, steps, noise)


@functools.cache
def _noise(epsilon: float, delta: float, rate: float, steps: int, before: tuple[tuple[Kind, int], ...]) -> float:
    """Return the noise multiplier that keeps `steps` steps within the budget. Raises ValueError if none does.

    before: steps already taken, by kind.
    """
    with quiet():
        tolerance = epsilon / 1000
        found = get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=delta,
            sample_rate=rate,
            steps=steps,
            accountant=_Accountant.mechanism(),
            epsilon_tolerance=tolerance,
        )
    if not before:
        return float(found)
    low = high = float(found)

    def spent(noise: float) -> float:
        return epsilon_of(Counter(dict(before)) + Counter({(noise, rate): steps}), delta)

    while spent(high) > epsilon:
        low, high = high, 2 * high
        if high > _MOST_NOISE:
            raise ValueError
    while epsilon - spent(high) > tolerance and high - low > high * 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if spent(middle) <= epsilon else (middle, high)
    return high


def promised_before(config: RunConfig, epsilon: float, delta: float) -> str:
    """Return the part of an error that names an earlier run's promise, or "" if the limit is the run's own budget."""
    own = config.dp_epsilon, config.dp_delta
    return "" if (epsilon, delta) == own else ", promised before; this run's are {:g} and {:g}".format(*own)


def epsilon_of(steps: Mapping[Kind, int], delta: float) -> float:
    """Return the epsilon of steps of these kinds together."""
    if not steps:
        return 0.0
    accountant = _Accountant()
    accountant.history = [(*kind, taken) for kind, taken in steps.items()]
    with quiet():
        return float(accountant.get_epsilon(delta=delta))


def replace_epsilon_of(steps: Mapping[Kind, int], delta: float) -> float:
    """Return an epsilon that holds for replacing a record, at the same delta.

    Opacus's accountant has the Rényi divergence of a record that is added or removed. Those of a removal and an addition
    together bound that of a replacement: D_a <= (a - 1/2) / (a - 1) D_2a + D_(2a - 1) (Mironov, CSF 2017, Prop. 11).
    """
    if not steps:
        return 0.0
    orders = tuple(sorted({order for a in _REPLACE_ORDERS for order in (2 * a, 2 * a - 1)}))
    with quiet():
        of_steps = sum(_of_one_step(noise, rate, orders) * taken for (noise, rate), taken in steps.items())
        found = dict(zip(orders, np.asarray(of_steps, np.float64), strict=True))
        bound = [(a - 0.5) / (a - 1) * found[2 * a] + found[2 * a - 1] for a in _REPLACE_ORDERS]
        return float(get_privacy_spent(orders=list(_REPLACE_ORDERS), rdp=bound, delta=delta)[0])


class _Accountant(RDPAccountant):  # type: ignore[misc]
    """Opacus's accountant, which computes each kind of step once: a search and a run ask for the same kinds often."""

    @classmethod
    def mechanism(cls) -> str:
        return "corolla-rdp"

    def get_privacy_spent(self, *, delta: float, alphas: list[float] | None = None) -> tuple[float, float]:
        orders = alphas or self.DEFAULT_ALPHAS
        rdp = sum(_of_one_step(noise, rate, tuple(orders)) * steps for noise, rate, steps in self.history)
        epsilon, order = get_privacy_spent(orders=orders, rdp=rdp, delta=delta)
        return float(epsilon), float(order)


register_accountant(_Accountant.mechanism(), _Accountant, force=True)


@functools.lru_cache(maxsize=1024)
def _of_one_step(noise: float, rate: float, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """Return the Rényi divergence of one step at each of these orders. Not to be written to."""
    divergence: NDArray[np.float64] = compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=list(orders))
    return divergence


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings of Opacus, such as that its table of orders ends near the best one: its result is a bound all the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Budget:
    """The budget of a client's records, and its spending: in one run, or in all runs on a site's own data (Notes).

    repeatable: in a simulation noise follows from the seed, so a repeated
    training gives the same result and costs nothing more.
    """

    def __init__(self, notes: Notes, config: RunConfig) -> None:
        self.notes, self.config, self.repeatable = notes, config, notes.simulated

    def before(self) -> Spent:
        """Return the steps that other runs took on the same records, and the budgets promised for these records."""
        return Spent.of(self.notes.trainings(), self.notes.experiment)

    @property
    def limit(self) -> float:
        """The epsilon that the records' spending never exceeds: the run's, or a smaller one that was promised before."""
        return Spent.of(self.notes.trainings()).budget(self.config)[0]

    def replace_epsilon(self) -> float:
        """Return the epsilon spent so far, of a record that is replaced, at the budget's delta."""
        noted = self.notes.trainings()
        return replace_epsilon_of(_by_kind(noted), Spent.of(noted).budget(self.config)[1])

    def spend(self, name: str, plan: Plan, steps: int) -> float:
        """Note a training permanently, before it takes place. Return the epsilon spent with it.

        Raises UserError if that exceeds the budget.
        """
        config, notes = self.config, self.notes
        training = Training(notes.experiment, name, plan.noise, plan.rate, steps, config.dp_epsilon, config.dp_delta)
        try:
            with notes.alone():
                before = notes.trainings()
                allowed, delta = Spent.of(before).budget(config)
                if self.repeatable and name in (earlier.name for earlier in before):
                    return epsilon_of(_by_kind(before), delta)
                spent = epsilon_of(_by_kind([*before, training]), delta)
                if spent > allowed * (1 + SLACK):
                    raise UserError(
                        f"dp-epsilon: {epsilon_of(_by_kind(before), delta):.4g} of {allowed:g} is spent"
                        f"{promised_before(config, allowed, delta)}, and {steps} steps more would make it {spent:.4g}",
                        code="budget",
                        key="dp-epsilon",
                        rule="affordable",
                    )
                notes.note(training)
                return spent
        except OSError as error:
            raise UserError(
                key="dp-epsilon", rule=f"cannot write the spent budget to {notes.budget}: {error.strerror}"
            ) from None


def _by_kind(trainings: Iterable[Training]) -> Mapping[Kind, int]:
    """Return the number of steps of each kind that trainings took."""
    steps: Counter[Kind] = Counter()
    for training in trainings:
        steps[training.noise, training.rate] += training.steps
    return steps


class _NoisyOptimizer(DPOptimizer):  # type: ignore[misc]
    """Opacus's optimizer, with noise from a secure stream (client_app/noise.py)."""

    def __init__(self, stream: SecureRandom, optimizer: torch.optim.Optimizer, **settings: Any) -> None:
        super().__init__(optimizer, **settings)
        self._stream = stream

    def add_noise(self) -> None:
        """Put the noisy sum of clipped gradients into each parameter's `grad`."""
        deviation = self.noise_multiplier * self.max_grad_norm
        for p in self.params:
            p.grad = noisy(p.summed_grad, deviation, self._stream).view_as(p)


# what a LocalTrainer has that reads no training records, or its steps' own batch alone
_PASSED_ON = {
    *("task", "module", "learning_rate", "weights", "gradient", "statistics", "steps", "epoch", "metric_errors"),
    *("load", "read", "network", "tensor", "vector", "optimizer", "clip_factor", "classifier", "logits", "forward"),
    *("loss", "evaluate", "measure"),
}


class NoisyTrainer:
    """A strategies.base.Trainer that reads training records only in noisy steps, each within the budget.

    It trains with a LocalTrainer, and passes on its functions that read no training records. It refuses all others.
    """

    # the training loss is a mean over records without noise
    last_loss = math.nan

    def __init__(self, local: LocalTrainer, *, budget: Budget, epochs: int) -> None:
        self._local, self.budget, self._epochs, self._trainings = local, budget, epochs, 0
        # epsilon spent when the last training ended
        self.epsilon = math.nan
        # each parameter's part of `gradient`
        self._gradients = [(p, p.grad) for p in local.module.parameters()]

    def __getattr__(self, name: str) -> Any:
        """Return a LocalTrainer's attribute. Raises UserError for one by which a method would read training records."""
        found = getattr(self._local, name)
        if name not in _PASSED_ON:
            raise self._refusal(f"`{name}`")
        return found

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan to spend the budget."""
        return Plan.of(self._local.config, self._local.data.num_told, self._epochs, self.budget.before())

    def train(
        self,
        start: Model,
        *,
        epochs: int | None = None,
        purpose: str = "train",
        objective: Objective | None = None,
        correction: Correction | None = None,
        frozen: frozenset[str] | NDArray[np.bool_] = frozenset(),
        max_batches: int = 0,
        learning_rate: float | None = None,
    ) -> Model:
        """Train in noisy steps, which are noted as spent before the first."""
        if objective is not None or max_batches:
            raise self._refusal("an objective of its own, or by parts of epochs")
        local, config, plan = self._local, self._local.config, self.plan
        steps = plan.steps * (config.local_epochs if epochs is None else epochs)
        self._trainings += 1
        self.epsilon = self.budget.spend(f"{local.round}-{self._trainings}-{purpose}", plan, steps)
        log.debug(
            "client %d: epsilon %.4g of %g spent (a record replaced: %.4g)",
            local.client_id,
            self.epsilon,
            config.dp_epsilon,
            self.budget.replace_epsilon(),
        )
        # a frozen parameter gets no gradient: it would count in the norm of each record's gradient
        local.flat.freeze(frozen)
        local.data.poisson = plan.rate, plan.steps, SecretDraws(self._stream(purpose))
        try:
            with quiet(), self._gradients_by_record():
                noise = _NoisyOptimizer(
                    self._stream(f"{purpose}-noise"),
                    torch.optim.SGD(self.module.parameters(), lr=0.0),
                    noise_multiplier=plan.noise,
                    max_grad_norm=config.dp_clip,
                    expected_batch_size=max(1, round(plan.rate * local.data.num_told)),
                )
                trained = local.train(
                    start,
                    epochs=epochs,
                    purpose=purpose,
                    correction=correction,
                    frozen=frozen,
                    learning_rate=learning_rate,
                    differentiate=functools.partial(self._noisy_gradient, noise),
                )
        finally:
            local.data.poisson = None
        if not bool(self.weights.isfinite().all()):
            raise Diverged(f"training diverged (learning-rate {self.learning_rate:g})")
        # no noise protects what a forward pass puts into buffers
        return Model(trained.params, start.buffers)

    def _noisy_gradient(self, noise: _NoisyOptimizer, x: Tensor, y: Tensor) -> None:
        """Leave the noisy mean of the records' clipped gradients in `gradient`. x, y: a batch, which may be empty."""
        noise.zero_grad()
        if len(y):
            self._local.differentiate(x, y, counted=False)
        for p in noise.params:
            # an empty batch, or a parameter that the batch did not use
            if p.grad_sample is None:
                p.grad_sample = p.new_zeros((len(y), *p.shape))
            # With `precision = bfloat16` it has 8 bits: norms and sums would be as imprecise, and clipped gradients
            # could exceed `dp-clip`. One record's NaN would enter the sum, whatever its norm.
            p.grad_sample = p.grad_sample.float().nan_to_num(0.0, 0.0, 0.0)
        noise.pre_step()
        # Opacus puts a new tensor in the gradient's place
        for p, gradient in self._gradients:
            if p.grad is not None and gradient is not None and p.grad is not gradient:
                gradient.copy_(p.grad)
                p.grad = gradient

    @contextlib.contextmanager
    def _gradients_by_record(self) -> Iterator[None]:
        """Inside, backward passes store each record's gradient, `grad_sample`, with every parameter that trains."""
        wrapped = _keeping_records_apart(self.module, self._local.config.model)
        try:
            self._check_records_are_apart()
            yield
        finally:
            wrapped.to_standard_module()

    @torch.no_grad()
    def _check_records_are_apart(self) -> None:
        """Raise UserError if a made-up sample's output changes with another sample in its batch, or buffers with any.

        The parameters are made up too: the server's own could hide it.
        """
        local, stream = self._local, self._stream("apart")

        def drawn(like: Tensor, deviation: float = 1.0) -> Tensor:
            values = (stream.uniform(like.numel()) - 0.5) * (deviation * math.sqrt(12))
            return torch.from_numpy(values).reshape(like.shape).to(like)

        local.train_mode()
        own = [(p, p.detach().clone()) for p in self.module.parameters()]
        buffers, outputs = [b.clone() for b in self.module.buffers()], []
        samples = local.data.blank(2)
        inputs = local.data.inputs(samples)
        if inputs.is_floating_point():
            inputs = drawn(inputs)
        try:
            for p, _ in own:
                # outputs of a size like the inputs', layer by layer
                p.copy_(drawn(p, (p.numel() / max(1, len(p))) ** -0.5 if p.ndim > 1 else 1.0))
            for other in (0, 1):
                inputs = inputs.clone()
                inputs[1] = drawn(inputs[1]) if inputs.is_floating_point() else other
                # dropout must drop the same units both times
                torch.manual_seed(0)
                outputs.append(self.logits(self.module, inputs)[0])
        finally:
            for p, value in own:
                p.copy_(value)
        fault = "" if all(map(torch.equal, buffers, self.module.buffers())) else "a forward pass changes its buffers"
        if not torch.allclose(outputs[0], outputs[1], equal_nan=True):
            fault = "its output for one changes with others"
        if fault:
            rule = f"model {local.config.model} does not keep records apart: {fault}"
            raise UserError(key="dp-epsilon", rule=rule)

    def _stream(self, purpose: str) -> SecureRandom:
        """Return a secret stream. In a simulation it follows from the seed, and hides nothing."""
        local = self._local
        if self.budget.repeatable:
            return SecureRandom.of_seed(local.config.seed, f"dp-{purpose}", local.round, local.client_id)
        return SecureRandom.of_secret()

    def _refusal(self, way: str) -> UserError:
        return UserError(
            key="dp-epsilon", rule=f"method {self._local.config.method} reads records by {way}, which no noise protects"
        )
