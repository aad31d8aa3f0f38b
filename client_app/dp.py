"""Differential privacy of one site's records: DP-SGD with Opacus, whose accountant says what a training spends of the budget.

Every training record is in a batch by chance; its gradient is cut to a norm of `dp-clip`, and Gaussian noise is added to the sum.
What a model says of any one record is bounded by (`dp-epsilon`, `dp-delta`), over all rounds together. Abadi et al., CCS 2016.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import secrets
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from opacus.accountants import RDPAccountant
from opacus.accountants.utils import get_noise_multiplier
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from client_app.state import BUDGET, SUFFIX
from client_app.trainer import LocalTrainer
from fl_app import rng
from fl_app.config import RunConfig
from fl_app.data import ClientData
from fl_app.errors import UserError
from fl_app.files import lock, make_directory, publish
from fl_app.layout import Model
from strategies.base import Correction, Objective

log = logging.getLogger("corolla")

FILE = f"{BUDGET}.json"  # beside the client's state: what its records have spent in this experiment
RUNS = ".runs"  # under the state directory: in which experiment each run spends (no experiment is called so)
SLACK = 1e-6  # relative, of the sums of an accountant

Spent = tuple[str, float, float, int]
"""A training: its name, noise multiplier, sampling rate, steps."""


@dataclass(frozen=True)
class Plan:
    """How a budget is spent. rate: a record's chance to be in a batch; steps: per epoch; noise: multiplier of `dp-clip`."""

    rate: float
    steps: int
    noise: float

    @classmethod
    def of(cls, config: RunConfig, samples: int, epochs: int) -> Plan:
        """Plan for a client with so many training samples, whose every round has so many epochs.

        The noise is what lets it take part in all rounds. Raises UserError if there is no such noise.
        """
        if config.dp_delta * samples >= 1:
            raise UserError(
                f"dp-delta: must be below 1 / {samples}, one over the training samples, or it allows to publish one of them; "
                f"got {config.dp_delta:g}"
            )
        rate, steps = min(1.0, config.batch_size / samples), math.ceil(samples / config.batch_size)
        try:
            noise = _noise(config.dp_epsilon, config.dp_delta, rate, steps * epochs * config.num_server_rounds)
        except ValueError:
            raise UserError(
                f"dp-epsilon: no noise keeps {samples} samples within {config.dp_epsilon:g} (dp-delta {config.dp_delta:g}) over "
                f"{config.num_server_rounds} rounds of {steps * epochs} steps"
            ) from None
        return cls(rate, steps, noise)


@functools.cache
def _noise(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Return the noise multiplier that keeps so many steps within the budget. Raises ValueError if none does."""
    with quiet():
        tolerance = epsilon / 1000
        found = get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=delta,
            sample_rate=rate,
            steps=steps,
            accountant="rdp",
            epsilon_tolerance=tolerance,
        )
    return float(found)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep back Opacus's hints: that its table of orders ends near the best one, when what it says is a bound all the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Budget:
    """What a client's records may spend in one experiment, and have spent: a file in the client's directory, never turned back.

    repeatable: noise follows from the seed, so that a training that is repeated tells what it told before and costs nothing more.
    """

    def __init__(self, directory: Path, config: RunConfig, *, repeatable: bool, run: int = 0) -> None:
        self.path, self.config, self.repeatable, self.run = directory / FILE, config, repeatable, run

    def check(self) -> None:
        """Raise UserError if what the client keeps of the experiment was made without a budget."""
        if not self.path.exists() and any(self.path.parent.glob(f"*{SUFFIX}")):
            raise UserError(f"dp-epsilon: what {self.path.parent} keeps was trained without a budget, and is not told")

    def read(self) -> list[Spent]:
        """Return the trainings so far. Raises UserError if the file cannot be read: what was spent is then unknown."""
        try:
            return [(str(a), float(b), float(c), int(d)) for a, b, c, d in json.loads(self.path.read_text())]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"dp-epsilon: what was spent cannot be read from {self.path} ({error}); nothing more is"
            ) from None

    def epsilon(self, spent: list[Spent]) -> float:
        """Return the epsilon of trainings at `dp-delta`."""
        steps: Counter[tuple[float, float]] = Counter()
        for _, noise, rate, taken in spent:
            steps[noise, rate] += taken
        accountant = RDPAccountant()
        accountant.history = [(*kind, taken) for kind, taken in steps.items()]
        with quiet():
            return float(accountant.get_epsilon(delta=self.config.dp_delta)) if steps else 0.0

    def spend(self, name: str, plan: Plan, steps: int) -> float:
        """Note a training before it takes place, for good; return the epsilon spent then. Raises UserError if it is too much."""
        try:
            with self._alone():
                return self._spend(name, plan, steps)
        except OSError as error:
            raise UserError(f"dp-epsilon: cannot note what is spent in {self.path}: {error.strerror}") from None

    def _spend(self, name: str, plan: Plan, steps: int) -> float:
        before = self.read()
        if self.repeatable and name in (training[0] for training in before):
            return self.epsilon(before)
        after = [*before, (name, plan.noise, plan.rate, steps)]
        spent, allowed = self.epsilon(after), self.config.dp_epsilon
        if spent > allowed * (1 + SLACK):
            raise UserError(
                f"dp-epsilon: {self.epsilon(before):.4g} of {allowed:g} is spent, and {steps} steps more would make it {spent:.4g}"
            )
        publish(self.path, lambda temporary: temporary.write_text(json.dumps(after)))
        return spent

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other messages from spending at the same time, and the run from a second experiment, whose budget is whole."""
        client, experiment = self.path.parent.name, self.path.parent.parent.name
        runs = self.path.parents[2] / RUNS
        make_directory(self.path.parent)
        with lock(self.path.with_suffix(".lock"), wait=True):
            if not self.repeatable:
                make_directory(runs)
                with lock(runs / f"{self.run}-{client}", wait=True) as file:
                    file.seek(0)
                    if (bound := file.read().decode() or experiment) != experiment:
                        raise UserError(
                            f"dp-epsilon: this run spends in experiment {bound}, and not in {experiment} as well"
                        )
                    file.truncate(0)
                    file.write(experiment.encode())
            yield


class NoisyTrainer(LocalTrainer):
    """A trainer that looks at training records only by noisy steps, each within the budget."""

    def __init__(
        self,
        module: nn.Module,
        config: RunConfig,
        data: ClientData,
        round: int,
        client_id: int,
        *,
        budget: Budget,
        epochs: int,
    ) -> None:
        super().__init__(module, config, data, round, client_id)
        self.budget, self._epochs, self._trainings = budget, epochs, 0
        self.epsilon = math.nan  # spent when the last training ended
        self._views = [(p, p.grad) for p in self.module.parameters()]
        self._noisy: DPOptimizer | None = None
        for name in (
            "samples",
            "sample_losses",
            "leave_out",
            "features",
            "fisher",
            "loss_gradient",
            "alternate",
            "step",
        ):
            setattr(self, name, self._looks)

    @functools.cached_property
    def plan(self) -> Plan:
        """How the budget is spent."""
        return Plan.of(self.config, self.data.num_used, self._epochs)

    @property
    def class_counts(self) -> NDArray[np.int64]:
        """Not to be had."""
        self._looks()

    @property
    def last_loss(self) -> float:
        """NaN: a mean over records as they are."""
        return math.nan

    def check_loss(self) -> None:
        """Raise UserError if a weight is not finite."""
        if not bool(self.weights.isfinite().all()):
            raise UserError(f"training diverged (learning-rate {self.learning_rate:g})")

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
    ) -> Model:
        """Train by noisy steps, which are noted as spent before the first."""
        if objective is not None or max_batches:
            self._refuse("an objective of its own, or parts of epochs")
        steps = self.plan.steps * (self.config.local_epochs if epochs is None else epochs)
        stream = self._generator(purpose)
        self._trainings += 1
        self.epsilon = self.budget.spend(f"{self.round}-{self._trainings}-{purpose}", self.plan, steps)
        log.debug("client %d: epsilon %.4g of %g spent", self.client_id, self.epsilon, self.config.dp_epsilon)
        self.data.poisson = self.plan.rate, self.plan.steps, stream
        self.flat.hold(
            frozen
        )  # of what is frozen no gradients are taken, record by record, that would count in their norms
        try:
            with quiet(), self._by_record():
                self._noisy = DPOptimizer(
                    torch.optim.SGD(self.module.parameters(), lr=0.0),
                    noise_multiplier=self.plan.noise,
                    max_grad_norm=self.config.dp_clip,
                    expected_batch_size=max(1, round(self.plan.rate * self.data.num_used)),
                    generator=self._generator(f"{purpose}-noise", self.device),
                )
                return super().train(start, epochs=epochs, purpose=purpose, correction=correction, frozen=frozen)
        finally:
            self._noisy, self.data.poisson = None, None

    def differentiate(
        self, x: Tensor, y: Tensor, objective: Objective | None = None, *, counted: bool = True
    ) -> Tensor:
        """Leave the noisy mean of the records' clipped gradients in `gradient`; return 0. x, y: a batch, which may be empty."""
        noisy = self._noisy
        if noisy is None:
            self._refuse("a loop of its own")
        noisy.zero_grad()
        if len(y):
            super().differentiate(x, y, counted=False)
        for p in noisy.params:
            if p.grad_sample is None:  # nobody is in the batch, or the parameter had no part in it
                p.grad_sample = p.new_zeros((len(y), *p.shape))
            p.grad_sample = p.grad_sample.nan_to_num(
                0.0, 0.0, 0.0
            )  # a NaN of one record's would be in the sum, whatever its norm
        noisy.pre_step()
        for p, view in self._views:  # Opacus puts a new tensor in the gradient's place
            if p.grad is not None and view is not None and p.grad is not view:
                view.copy_(p.grad)
                p.grad = view
        return self.weights.new_zeros(())

    @contextlib.contextmanager
    def _by_record(self) -> Iterator[None]:
        """Have backward passes leave each record's gradient, `grad_sample`, with every parameter that trains."""
        try:
            wrapped = GradSampleModule(self.module, loss_reduction="mean")
        except NotImplementedError as error:
            raise UserError(f"dp-epsilon: model {self.config.model} does not keep records apart: {error}") from None
        try:
            self._check_apart()
            yield
        finally:
            wrapped.to_standard_module()

    @torch.no_grad()
    def _check_apart(self) -> None:
        """Raise UserError if what the module says of one sample changes with another one in the batch; both are made up."""
        self.train_mode()
        said = []
        for other in (0, 1):
            samples = self.data.blank(2)
            samples[1] = other
            torch.manual_seed(0)  # for dropout
            said.append(self.logits(self.module, self.data.inputs(samples))[0])
        if not torch.allclose(said[0], said[1], equal_nan=True):
            raise UserError(
                f"dp-epsilon: model {self.config.model} does not keep records apart: what it says of one changes with others"
            )

    def _generator(self, purpose: str, device: torch.device | None = None) -> torch.Generator:
        repeatable = self.budget.repeatable
        own = rng.torch_seed(self.config.seed, f"dp-{purpose}", self.round, self.client_id)
        seed = own if repeatable else secrets.randbits(63)
        return torch.Generator(device or "cpu").manual_seed(seed)

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(f"dp-epsilon: method {self.config.method} looks at records by {what}, which no noise covers")

    def _looks(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("more than steps")
