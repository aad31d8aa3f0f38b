"""SCAFFOLD: each step of a client is corrected by the difference between its own gradients and those of all clients.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML
2020, Algorithm 1, option II.

Client i receives x and the control variate c. Its own c_i is 0 at first. It runs E epochs of SGD and adds c - c_i to
every gradient (weight decay included). The result is y, after K steps. Then

    A = K, or with momentum m the sum over k <= K of (1 - m^k)/(1 - m)
    c_i <- c_i - c + (x - y)/(eta A)

The new c_i is the mean of the client's gradients. The client sends y and K. Server, over the round's clients S of N:

    x <- x + eta_s mean_S (y_i - x)
    c <- c + 1/N sum_S Delta_i, with Delta_i = (x - y_i)/(eta A_i) - c

The server computes Delta_i itself, so c_i never travels. c is always the mean of all N clients' c_i.

Deviations:

- Momentum is allowed, through A, with a warning. The paper has none.
- Option I is not built: c_i is the gradient at x, which takes one more pass.
- The step size in A is the round's own, also where it decays. PFLlib takes the initial one.
- BatchNorm's running statistics take the plain mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from strategies.base import (
    POSITIVE,
    ClientState,
    Correction,
    Late,
    LocalUpdate,
    Means,
    Method,
    Model,
    Overview,
    RoundContext,
    RunConfig,
    Sent,
    State,
    Turn,
    Upload,
    Uploads,
    UserError,
    WireError,
    all_but_local_statistics,
    key,
    log,
)
from strategies.baselines.fedavg import FedAvg, GlobalModelParams
from strategies.kernels import block_means, for_blocks, weighted_mean

if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.floating]
# down, float32 [d]: c; up, a number: K
CONTROL, STEPS = "control", "steps"
_NEEDS_GRADIENTS = "which computes gradients from a client's update"


@dataclass(frozen=True)
class SCAFFOLDParams(GlobalModelParams):
    """Parameters of SCAFFOLD, table `scaffold`."""

    server_learning_rate: float = key(1.0, "Step of the global model towards the clients' mean (eta_s).", POSITIVE)

    def problems(self, config: RunConfig) -> Iterator[UserError]:
        """Yield an error for settings under which steps are not gradients."""
        if config.optimizer != "sgd":
            yield UserError(
                key="optimizer", rule=f"must be sgd for scaffold, {_NEEDS_GRADIENTS}", value=config.optimizer
            )
        if config.clip_norm:
            yield UserError(key="clip-norm", rule=f"must be 0 for scaffold, {_NEEDS_GRADIENTS}", value=config.clip_norm)


def effective_steps(steps: int, momentum: float) -> float:
    """Return A: the number of plain steps that move as far as `steps` steps with momentum on a constant gradient.

    momentum: in [0, 1).
    """
    if not momentum:
        return float(steps)
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


def moved(mean: Floats, x: Floats, c: Floats, change: Floats, num_clients: int, rate: float) -> tuple[Floats, Floats]:
    """Return the next global model and control variate, all [d].

    mean: of the round's models; x, c: the values sent; change: the sum of the changes of the clients' control variates;
    num_clients: of the run; rate: eta_s. With rate 1 the model is the mean, exactly.
    """
    return mean if rate == 1 else x + rate * (mean - x), c + change / num_clients


def control_change(x: Floats, y: Floats, c: Floats, scale: float | Floats) -> NDArray[np.float64]:
    """Return the change of a client's control variate, (x - y)/scale - c, float64.

    x, c: [d]; y: [..., d]; scale: eta A, [N, 1] for rows.
    """
    change: NDArray[np.float64] = np.subtract(x, y, dtype=np.float64) / scale - c
    return change


def round_rate(config: RunConfig, round: int) -> float:
    """Return the learning rate of a round, counted from 1."""
    return config.learning_rate * config.rate_factor(round)


def control_changes(server: SCAFFOLD, upload: Upload, turn: Turn) -> Mapping[str, NDArray[np.float64]]:
    """Return the change of a client's control variate; the round sums these up."""
    sent, c = server.state.model.params, server.control(server.state).astype(np.float64)
    steps, momentum = int(upload.metrics[STEPS]), server.config.momentum
    scale = round_rate(server.config, turn.round) * effective_steps(steps, momentum)
    return {CONTROL: control_change(sent.astype(np.float64), upload.model.params, c, scale)}


class SCAFFOLD(FedAvg[SCAFFOLDParams]):
    """Server half. Memory: `control` float32 [d], c."""

    # c must be the mean of the c_i of all clients, so no upload may be left out
    means = Means(streams=True, summed=control_changes)
    late = Late(never="a control variate's change counts from the c and the learning rate of its own round")

    def weights(self, uploads: Uploads) -> NDArray[np.float64]:
        """Return equal weights for all uploads."""
        return np.ones_like(uploads.sizes)

    def summary(self) -> None:
        """Log the run's settings; warn of momentum."""
        super().summary()
        if self.config.momentum:
            log.warning(
                "scaffold: momentum is %g, the paper has none; steps are counted through it", self.config.momentum
            )

    def check(self, upload: Upload) -> None:
        """Raise WireError for a number of steps that does not fit the client's samples.

        Each epoch may leave out its last batch.
        """
        steps, epochs, size = upload.metrics.get(STEPS), self.config.local_epochs, self.config.batch_size
        fewest, most = (
            self.config.local_steps or epochs * max(1, batches)
            for batches in (upload.num_examples // size, -(-upload.num_examples // size))
        )
        if type(steps) is not int or not fewest <= steps <= most:
            raise WireError(
                f"{STEPS} must be an integer in {fewest}..{most} for {upload.num_examples} samples, got {steps!r}"
            )

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """Return the global model and the control variate c."""
        return Sent(state.model, {CONTROL: self.control(state)})

    def control(self, state: State) -> NDArray[np.float32]:
        """Return c, float32 [d]; at first 0."""
        return state.memory.get(CONTROL, np.zeros(self.layout.d, np.float32))

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Step towards the mean, and move c by the changes of the clients' control variates."""
        sent, c = state.model.params, self.control(state)
        eta, momentum = round_rate(self.config, turn.round), self.config.momentum
        scales = np.array([[eta * effective_steps(int(m[STEPS]), momentum)] for m in uploads.metrics])
        x, control = np.empty_like(sent), np.empty_like(sent)
        mean_of, summed = block_means(uploads.W), uploads.summed.get(CONTROL)
        clients, rate = self.config.num_training, self.params.server_learning_rate

        def block(start: int, stop: int) -> None:
            at = slice(start, stop)
            now, before = sent[at].astype(np.float64), c[at].astype(np.float64)
            if summed is None:
                change = control_change(now, uploads.W[:, at], before, scales).sum(axis=0)
            else:
                change = summed[at]
            x[at], control[at] = moved(mean_of(at), now, before, change, clients, rate)

        for_blocks(block, sent.size)
        return state.next(Model(x, weighted_mean(uploads.B)), memory={CONTROL: control})


class SCAFFOLDUpdate(LocalUpdate[SCAFFOLDParams]):
    """Client half. State: `scaffold.control` float32 [d], c_i, for the tensors that travel."""

    def train(self, start: Model, state: ClientState, ctx: RoundContext[SCAFFOLDParams]) -> Model:
        """Train with corrected steps, then update c_i."""
        trainer, c = ctx.trainer, ctx.extras[CONTROL]
        sent = ctx.layout.take(start, ctx.shared)
        own = state.arrays.get("scaffold.control", np.zeros_like(sent.params))
        # tensors that do not travel are not corrected
        still = Model(np.zeros_like(start.params), np.zeros_like(start.buffers))
        shift = ctx.layout.put(still, Model(c - own, sent.buffers), ctx.shared).params
        after = trainer.train(start, correction=shifted(ctx, shift))
        scale = trainer.learning_rate * effective_steps(trainer.steps, ctx.config.momentum)
        change = control_change(sent.params, ctx.layout.take(after, ctx.shared).params, c, scale)
        state.arrays["scaffold.control"] = (own + change).astype(np.float32)
        return after

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[SCAFFOLDParams]) -> Upload:
        """Send y, and the number of steps."""
        plain = super().upload(before, after, state, ctx)
        return replace(plain, metrics={**plain.metrics, STEPS: ctx.trainer.steps})


def shifted(ctx: RoundContext[Any], shift: NDArray[np.float32]) -> Correction | None:
    """Return a correction that adds a constant [d] to every gradient; None, no operation at all, for zeros."""
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
    reports=(STEPS,),
    overview=Overview(
        group="One global model for all",
        travels="model; down + 4d",
        stays="c_i",
        server="4d",
        disk="4d",
        use="drift, and clients that take part often",
    ),
)
