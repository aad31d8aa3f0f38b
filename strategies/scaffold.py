"""SCAFFOLD: every step of a client is corrected by how far its own gradients differ from everybody's.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
Algorithm 1, option II.

Client i, on receiving x and the control variate c, with its own c_i (0 at first): E epochs of SGD, every gradient (weight decay
included) + c - c_i. Of K steps taken, A = K, or with momentum m the sum over k <= K of (1 - m^k)/(1 - m);
c_i <- c_i - c + (x - y)/(eta A), the mean of its gradients. It sends y and K. Server, over the round's clients S of N:
x <- x + eta_s mean_S (y_i - x), c <- c + 1/N sum_S Delta_i with Delta_i = (x - y_i)/(eta A_i) - c, which it computes itself: c_i
never travels. c is always the mean of all N clients' c_i.

Deviations: momentum is allowed, through A (the paper has none), and warned of. Option I (c_i is the gradient at x, one more pass)
is not built. The step size in A is the round's own, also where it decays (PFLlib: the initial one). BatchNorm's running statistics
take the plain mean.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fl_app.config import RunConfig
from fl_app.keys import POSITIVE, key
from fl_app.layout import Model
from fl_app.wire import Upload, WireError
from strategies.aggregate import mean_block, weighted_mean
from strategies.base import (
    ClientState,
    Correction,
    LocalUpdate,
    Method,
    RoundContext,
    Uploads,
    all_but_local_statistics,
)
from strategies.blocks import for_blocks
from strategies.fedavg import FedAvg, GlobalModelParams

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("corolla")

Floats = NDArray[np.floating]
# down, float32 [d]: c; up, a number: K
CONTROL, STEPS = "control", "steps"


@dataclass(frozen=True)
class SCAFFOLDParams(GlobalModelParams):
    """Parameters of SCAFFOLD, table `scaffold`."""

    server_learning_rate: float = key(1.0, "Step of the global model towards the clients' mean (eta_s).", POSITIVE)

    def problems(self, config: RunConfig) -> Iterable[str]:
        """Say where steps are no gradients."""
        if config.optimizer != "sgd":
            yield f"optimizer: scaffold takes a client's move for a sum of gradients: it must be sgd, got {config.optimizer}"
        if config.clip_norm:
            yield f"clip-norm: scaffold takes a client's move for a sum of gradients: it must be 0, got {config.clip_norm:g}"


def effective_steps(steps: int, momentum: float) -> float:
    """How many plain steps `steps` steps with momentum on a constant gradient amount to (A); momentum in [0, 1)."""
    if not momentum:
        return float(steps)
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


def server_step(
    Y: Floats, x: Floats, c: Floats, changes: Floats, num_clients: int, rate: float
) -> tuple[Floats, Floats]:
    """Next global model and control variate, both [d], computed in float64 and returned as floating as Y is.

    Y: [N, d], the round's models; x, c: [d], what was sent; changes: [N, d], of the clients' control variates; num_clients: of the
    run; rate: eta_s. With rate 1 the model is the mean of Y, exactly.
    """
    Y, changes = np.asarray(Y), np.asarray(changes)
    mean = mean_block(Y, np.ones(len(Y)), len(Y))
    model = mean if rate == 1 else x + rate * (mean - x)
    control = c + changes.sum(axis=0, dtype=np.float64) / num_clients
    dtype = np.result_type(Y.dtype, np.float32)
    return model.astype(dtype), control.astype(dtype)


def control_change(x: Floats, y: Floats, c: Floats, scale: float | Floats) -> NDArray[np.float64]:
    """Change of a client's control variate, (x - y)/scale - c, float64; x, c: [d]; y: [..., d]; scale: eta A, [N, 1] for rows."""
    change: NDArray[np.float64] = np.subtract(x, y, dtype=np.float64) / scale - c
    return change


def round_rate(config: RunConfig, round: int) -> float:
    """The learning rate of a round, counted from 1."""
    return config.learning_rate * config.rate_factor(round)


class SCAFFOLD(FedAvg[SCAFFOLDParams]):
    """Server half. Memory: `control` float32 [d], c."""

    # c must be the mean of what the clients keep, whoever they are
    robust = frozenset()

    def summary(self) -> None:
        """Log what runs; warn of momentum."""
        super().summary()
        if self.config.momentum:
            log.warning(
                "scaffold: momentum is %g, the paper has none; steps are counted through it", self.config.momentum
            )

    def check(self, upload: Upload) -> None:
        """Steps must be as many as the client's samples make, give or take each epoch's last batch."""
        steps, epochs, size = upload.metrics.get(STEPS), self.config.local_epochs, self.config.batch_size
        fewest, most = (
            epochs * max(1, batches) for batches in (upload.num_examples // size, -(-upload.num_examples // size))
        )
        if type(steps) is not int or not fewest <= steps <= most:
            raise WireError(
                f"{STEPS} must be an integer in {fewest}..{most} for {upload.num_examples} samples, got {steps!r}"
            )

    def download_extras(self, client_id: int) -> Mapping[str, NDArray[Any]]:
        """The control variate c."""
        return {CONTROL: self.memory.get(CONTROL, np.zeros(self.layout.d, np.float32))}

    def personalize(self, round: int, uploads: Uploads) -> None:
        """Step towards the mean, and move c by what the clients' own have moved."""
        sent, c = self.global_model.params, self.download_extras(0)[CONTROL]
        eta, momentum = round_rate(self.config, round), self.config.momentum
        scales = np.array([[eta * effective_steps(int(m[STEPS]), momentum)] for m in uploads.metrics])
        x, control = np.empty_like(sent), np.empty_like(sent)

        def block(start: int, stop: int) -> None:
            at = slice(start, stop)
            Y, now, before = uploads.W[:, at], sent[at].astype(np.float64), c[at].astype(np.float64)
            changes = control_change(now, Y, before, scales)
            rate = self.params.server_learning_rate
            x[at], control[at] = server_step(Y, now, before, changes, self.config.num_training, rate)

        for_blocks(block, sent.size)
        self.global_model, self.memory[CONTROL] = Model(x, weighted_mean(uploads.B)), control


class SCAFFOLDUpdate(LocalUpdate[SCAFFOLDParams]):
    """Client half. State: `scaffold.control` float32 [d], c_i, of what travels."""

    reports = (STEPS,)

    def train(self, start: Model, state: ClientState, ctx: RoundContext[SCAFFOLDParams]) -> Model:
        """Train with corrected steps; renew c_i."""
        trainer, c = ctx.trainer, ctx.extras[CONTROL]
        sent = ctx.layout.take(start, ctx.shared)
        own = state.arrays.get("scaffold.control", np.zeros_like(sent.params))
        # what does not travel is not corrected
        still = Model(np.zeros_like(start.params), np.zeros_like(start.buffers))
        shift = ctx.layout.put(still, Model(c - own, sent.buffers), ctx.shared).params
        after = trainer.train(start, correction=shifted(ctx, shift))
        scale = trainer.learning_rate * effective_steps(trainer.steps, ctx.config.momentum)
        change = control_change(sent.params, ctx.layout.take(after, ctx.shared).params, c, scale)
        state.arrays["scaffold.control"] = (own + change).astype(np.float32)
        return after

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[SCAFFOLDParams]) -> Upload:
        """Send y, and how many steps led there."""
        plain = super().upload(before, after, state, ctx)
        return dataclasses.replace(plain, metrics={**plain.metrics, STEPS: ctx.trainer.steps})


def shifted(ctx: RoundContext[Any], shift: NDArray[np.float32]) -> Correction | None:
    """A constant [d] added to every gradient; None, no operation at all, for zeros."""
    if not shift.any():
        return None
    constant = ctx.trainer.tensor(shift)

    def add(weights: Tensor, gradient: Tensor) -> None:
        gradient.add_(constant)

    return add


METHOD = Method(
    "scaffold",
    SCAFFOLDParams,
    SCAFFOLD,
    SCAFFOLDUpdate,
    all_but_local_statistics,
    not_private="its server needs each client's number of steps",
)
