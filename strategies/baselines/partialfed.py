"""PartialFed: a client starts a round with some layers of the received model, and keeps its own last ones of the others.

Sun, Huo, Yang, Bai: "PartialFed: Cross-Domain Personalized Federated Learning via Partial Initialization", NeurIPS 2021.

A layer is a module that owns parameters. In a client's start layer l is w_l (received: it is loaded) or v_l (the client's
own, as its last round left it). Then the client trains everything as in FedAvg. Server: FedAvg's mean.

- PartialFed-Fix: `load` and `batchnorm` say which layers all clients load in every round.
- PartialFed-Adaptive: each client decides about each of these layers. It has a number a_l per layer, the log-odds of
  loading it. Before training it learns them on batches of held-out samples, with both models fixed:

    y_l = sigmoid((a_l + noise_l) / tau),    theta_l = v_l + y_l (w_l - v_l)
    a_l <- a_l - eta_a y_l (1 - y_l) / tau <gradient_l f(theta), w_l - v_l>

  noise is logistic, so that y is a relaxed Bernoulli variable (Gumbel-softmax of two choices). tau falls from round to
  round: tau_t = tau_1 decay^(t - 1). Then layer l is loaded if a_l >= 0.

Everything loaded is FedAvg, bit for bit, and nothing loaded is Local. eta_a = 0 loads all.

The paper's text was not at hand, and no code of its authors was found. The general form, the fixed choices, and the
learned ones (relaxed Bernoulli variables with a falling temperature, alternating with the weights) are from its abstract
and from public summaries. Our reading:

- A round learns the choices first, for `local-epochs` epochs, and then the weights.
- Choices are learned on training samples that the weights never see. On the same samples a client's own layers, which
  have learned them, nearly always win: with equal distributions too, clients then train alone.
- A client starts from the likelier choice of each layer (a tie loads), not from a drawn one. At first loading is likely:
  from even odds, noise of the first steps would decide for good, because layers that clients keep grow apart.
- The temperature falls by a factor per round, and a_l moves by plain gradient steps.
- Batches are those of training: the network normalises by the batch, and its statistics from learning are dropped.
- Evaluations learn the choices too, on the round's batches, and do not keep them.
- A client's first round loads all that it may. Other layers start from the run's initial model.
- Layers that no client ever loads do not travel: nobody would use their mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fl_app.config.rules import split_names
from fl_app.trainable_tensors import matching
from strategies.base import (
    BELOW_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_RATIO,
    ClientState,
    Diverged,
    Layout,
    LocalUpdate,
    Method,
    MethodError,
    Metric,
    Model,
    Overview,
    RoundContext,
    Rule,
    RunConfig,
    Upload,
    UserError,
    key,
    local_epochs,
    log,
)
from strategies.baselines.fedavg import FedAvg
from strategies.baselines.fedfomo import held_out, num_held_out

LOAD = "partialfed.load"
# arrays of a client: its own values of the tensors that travel, and the log-odds of loading each layer, float64 [L]
_PARAMS, _BUFFERS, _CHOICES = "partialfed.params", "partialfed.buffers", "partialfed.choices"
LOADED = Metric("loaded-share", ratio=True, picture="Layers that clients load")


@dataclass(frozen=True)
class PartialFedParams:
    """Parameters of PartialFed, table `partialfed`."""

    strategy: Literal["adaptive", "fix"] = key(
        "adaptive", "The layers of `load` that a client loads: those that it learns to choose, or all."
    )
    load: str = key(
        "*",
        "Layers that may be loaded: `bottom:K` or `top:K` for the first or the last K modules with parameters, or patterns of "
        "tensors' names, separated by commas.",
        checked=True,
    )
    batchnorm: Literal["global", "local"] = key(
        "global", "BatchNorm layers, parameters and statistics: loaded like others, or never."
    )
    validation_ratio: float = key(
        0.2,
        "Share of a client's training data that is held out to learn the choices; 0: they are learned on all (ours).",
        BELOW_ONE,
        trains_on=lambda ratio, n, _: n - num_held_out(ratio, n),
    )
    load_probability: float = key(
        0.9,
        "Probability of loading a layer, before a client has learned it (ours).",
        Rule(low=0.5, high=1, high_open=True),
    )
    choice_learning_rate: float = key(
        3.0, "Step size of the choices (eta_a; ours); never decays. 0 loads all.", NOT_NEGATIVE
    )
    temperature: float = key(1.0, "Temperature of the relaxed choices in round 1 (tau_1; ours).", POSITIVE)
    temperature_decay: float = key(0.95, "Factor on the temperature after each round (ours).", POSITIVE_RATIO)

    def count(self) -> tuple[str, int] | None:
        """Return the end of the model and the number of layers that `load` counts there; None if it has patterns.

        Raises UserError for a text that is neither.
        """
        end, colon, number = self.load.partition(":")
        counts = bool(colon) and end in ("bottom", "top")
        if (counts and not number.isdecimal()) or not split_names(self.load):
            rule = "must be bottom:K or top:K with a whole number K >= 0, or patterns separated by commas"
            raise MethodError(key=LOAD, rule=rule, value=self.load)
        return (end, int(number)) if counts else None

    def problems(self, config: RunConfig) -> Iterator[UserError]:
        """Yield an error for a text in `load` of another form."""
        try:
            self.count()
        except UserError as error:
            yield error


def layers_of(layout: Layout) -> list[frozenset[str]]:
    """Return the names of each layer's tensors, in the model's order.

    A layer is a module that owns parameters. Statistics of a module without parameters belong to the first layer.
    """
    found: dict[str, set[str]] = {}
    for slot in layout.params:
        found.setdefault(slot.name.rpartition(".")[0], set()).add(slot.name)
    first = next(iter(found))
    for slot in layout.buffers:
        module = slot.name.rpartition(".")[0]
        found[module if module in found else first].add(slot.name)
    return [frozenset(names) for names in found.values()]


def loadable(layout: Layout, params: PartialFedParams) -> frozenset[str]:
    """Return the names of the tensors that clients may load, which alone travel.

    Raises UserError for more layers than the model has, and for a pattern that matches no tensor.
    """
    counted = params.count()
    if counted is None:
        names = matching(LOAD, params.load, [slot.name for slot in (*layout.params, *layout.buffers)])
    else:
        end, number = counted
        layers = layers_of(layout)
        if number > len(layers):
            rule = f"K must be at most {len(layers)}, the number of the model's layers with parameters"
            raise MethodError(key=LOAD, rule=rule, value=params.load)
        names = frozenset().union(*(layers[:number] if end == "bottom" else layers[len(layers) - number :]))
    return names - layout.batchnorm if params.batchnorm == "local" else names


def temperature(params: PartialFedParams, round: int) -> float:
    """Return the temperature in a round, counted from 1; positive however late the round is."""
    return max(params.temperature * params.temperature_decay ** (round - 1), float(np.finfo(np.float64).tiny))


def relaxed(choices: NDArray[np.float64], noise: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    """Return the layers' weights of the received model: sigmoid((choices + noise) / temperature), float64 [L] in [0, 1].

    choices: log-odds, float64 [L]. noise: from the standard logistic distribution, float64 [L]. The smaller the
    temperature, the nearer is a weight to a draw of 0 or 1 with these log-odds.
    """
    with np.errstate(over="ignore"):
        found: NDArray[np.float64] = (1 + np.tanh((choices + noise) / temperature / 2)) / 2
    return found


def gradient_of_choices(
    weights: NDArray[np.float64], slopes: NDArray[np.float64], temperature: float
) -> NDArray[np.float64]:
    """Return the loss's gradient by the choices, float64 [L].

    weights: those of `relaxed`, float64 [L]. slopes: the loss's derivatives by these weights, float64 [L].
    """
    return slopes * weights * (1 - weights) / temperature


class PartialFed(FedAvg[PartialFedParams]):
    """Server half: FedAvg on the tensors that travel."""

    def summary(self) -> None:
        """Log the run as every method does. Warn if it is another method's."""
        super().summary()
        travel = self.layout.names
        if not travel:
            log.warning("partialfed: no layer is loaded, so this run is Local")
        elif self.params.strategy == "fix" and travel == self.full_layout.names:
            log.warning("partialfed: every layer is loaded, so this run is FedAvg")


class PartialFedUpdate(LocalUpdate[PartialFedParams]):
    """Client half. Adaptive state: own layers in `partialfed.params` and `.buffers`; a in `partialfed.choices`, float64 [L]."""

    def merge(self, received: Model, state: ClientState, ctx: RoundContext[PartialFedParams]) -> Model:
        """Learn the choices, and return the received model with the client's own layers where it does not load."""
        start = super().merge(received, state, ctx)
        if not learns(ctx):
            return start
        held = held_out(ctx)
        if _CHOICES not in state.arrays:
            ctx.trainer.leave_out(held)
            return start
        own = ctx.layout.put(start, Model(state.arrays[_PARAMS], state.arrays[_BUFFERS]), ctx.shared)
        if len(held):
            ctx.trainer.leave_out(np.setdiff1d(np.arange(ctx.num_samples), held))
        choices = state.arrays[_CHOICES] = self.learn(own, start, state.arrays[_CHOICES], ctx)
        ctx.trainer.leave_out(held)
        layers = zip(travelling_layers(ctx), choices, strict=True)
        kept = frozenset[str]().union(*(names for names, choice in layers if choice < 0))
        return ctx.layout.put(start, ctx.layout.take(own, kept), kept)

    def learn(
        self, own: Model, received: Model, choices: NDArray[np.float64], ctx: RoundContext[PartialFedParams]
    ) -> NDArray[np.float64]:
        """Return the choices, float64 [L], after batches at mixtures of two models that stay as they are."""
        import torch

        p, trainer, noise = ctx.params, ctx.trainer, ctx.rng("partialfed")
        tau = temperature(p, ctx.round)
        parts = [span(ctx.layout, names) for names in travelling_layers(ctx)]
        mine, between = trainer.tensor(own.params), trainer.tensor(received.params - own.params)
        trainer.load(received)
        for x, y in trainer.batches(purpose="choices"):
            weights = relaxed(choices, noise.logistic(size=len(parts)), tau)
            trainer.weights.copy_(mine)
            for part, weight in zip(parts, weights.tolist(), strict=True):
                trainer.weights[part].add_(between[part], alpha=weight)
            trainer.differentiate(x, y, counted=False)
            moved = [(trainer.gradient[part] * between[part]).sum(dtype=torch.float64) for part in parts]
            gradient = gradient_of_choices(weights, torch.stack(moved).cpu().numpy(), tau)
            choices = choices - p.choice_learning_rate * trainer.clip_factor(gradient) * gradient
        if not np.isfinite(choices).all():
            raise Diverged(
                f"training diverged: partialfed's choices are {choices.tolist()} (learning-rate {trainer.learning_rate:g})"
            )
        return choices

    def keep_local(self, after: Model, state: ClientState, ctx: RoundContext[PartialFedParams]) -> None:
        """Store the tensors that do not travel. A client that learns choices keeps the others too."""
        super().keep_local(after, state, ctx)
        if learns(ctx):
            own = ctx.layout.take(after, ctx.shared)
            state.arrays[_PARAMS], state.arrays[_BUFFERS] = own.params, own.buffers
            odds = ctx.params.load_probability / (1 - ctx.params.load_probability)
            state.arrays.setdefault(_CHOICES, np.full(len(travelling_layers(ctx)), math.log(odds)))

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[PartialFedParams]) -> Upload:
        """Return the tensors that travel, and the share of layers that the start had from the received model."""
        plain = super().upload(before, after, state, ctx)
        layers = travelling_layers(ctx)
        loaded = int((state.arrays[_CHOICES] >= 0).sum()) if _CHOICES in state.arrays else len(layers)
        return replace(plain, metrics={**plain.metrics, LOADED.name: loaded / len(layers_of(ctx.layout))})


def learns(ctx: RoundContext[PartialFedParams]) -> bool:
    """Return whether clients learn choices."""
    return ctx.params.strategy == "adaptive" and ctx.params.choice_learning_rate > 0 and bool(ctx.shared)


def travelling_layers(ctx: RoundContext[PartialFedParams]) -> list[frozenset[str]]:
    """Return the names of each layer's tensors that travel, without layers that have none."""
    return [names & ctx.shared for names in layers_of(ctx.layout) if names & ctx.shared]


def span(layout: Layout, names: frozenset[str]) -> slice:
    """Return the slice of the parameters from the first of these tensors to the last; empty if none is a parameter."""
    slots = [slot for slot in layout.params if slot.name in names]
    return slice(slots[0].start, slots[-1].stop) if slots else slice(0, 0)


def dp_epochs(config: RunConfig) -> int:
    """Return `local-epochs`. Raises UserError if clients learn choices."""
    if config.params.strategy == "adaptive":
        rule = "partialfed learns its choices from records by other steps; set partialfed.strategy = fix"
        raise MethodError(key="dp-epsilon", rule=rule, value=config.dp_epsilon)
    return local_epochs(config)


METHOD = Method(
    "partialfed",
    PartialFedParams,
    PartialFed,
    PartialFedUpdate,
    loadable,
    dp_epochs=dp_epochs,
    sums=True,
    reports=(LOADED,),
    global_beside_personal=True,
    overview=Overview(
        group="A part of the model",
        stays="own layers, choices, held-out data",
        disk="4(d+b) + 8 a layer",
        use="clients that gain from sharing different layers",
    ),
)
