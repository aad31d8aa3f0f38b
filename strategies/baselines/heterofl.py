"""HeteroFL: clients of different capacity train networks of different width, each a corner of one global network.

Diao, Ding, Tarokh: "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients", ICLR
2021.

Client i has a rate r_i in (0, 1]. Of every hidden layer it holds the first r_i of the outputs, and of the inputs those
that the layer below still has: ceil(r_i K) of K. It has all inputs of the network and all classes. Narrow networks are
nested. A client receives its part, trains it and sends it back.

Server: each element is the mean over the round's clients that hold it, unweighted; the others keep their value.

Scaling: in training a narrow client's hidden layers are divided by r_i, so that their sums are as large as a wide one's.
`mask-classes`: in training and in tests, logits of classes that a client does not have are 0. Its rows of these classes do
not count in the classifier's mean.

A client is evaluated with its own width. Rates of 1 and `mask-classes = false` is FedAvg bit for bit, if all clients
count equally.

Deviations:

- A narrow network is computed inside the wide one: elements beyond the part are 0 and do not train. Results and messages
  are those of the narrow network. The time and the memory of training are the wide one's.
- Widths are fixed by client. The paper also redraws them in every round.
- A client is tested with its own width, and with the scaling of training: its hidden layers are divided by its rate. The
  authors test only the widest network, which has none.
- `mask-classes = false` is the default, and all clients' rows of the classifier count. The authors mask in all runs in which
  clients lack classes, and average a class's row over the clients that have it.
- BatchNorm's running statistics are averaged as parameters are, over those that hold the channel. The paper gathers them
  anew after training. GroupNorm's groups lie in the wide network, so a narrow one's may be partly empty.
- It is for networks of Linear layers, convolutions and normalisation, whose layers' widths follow from the tensors. Shortcuts
  may add layers, and concatenations are refused. So are attention, recurrent layers, and layers whose weight is
  computed from other tensors, as by spectral normalisation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_app import rng, tasks
from strategies.base import (
    LINEAR,
    SPLIT,
    ClientState,
    Expected,
    Late,
    Layout,
    LocalUpdate,
    Means,
    Method,
    MethodError,
    Model,
    Objective,
    Overview,
    RoundContext,
    RunConfig,
    Sent,
    State,
    Submodel,
    Turn,
    Upload,
    Uploads,
    UserError,
    WireError,
    key,
    unfit,
)
from strategies.baselines.fedavg import FedAvg
from strategies.baselines.perfedmask import masked_mean
from strategies.kernels import Part, for_blocks, head_slots, weighted_mean

if TYPE_CHECKING:
    from torch import Tensor, nn

Slices = tuple[slice, ...]

# down, float64 [1]: the client's rate
RATE = "rate"
# up with `mask-classes`, uint8 [C]: 1 for a class that the client has
CLASSES = "classes"


@dataclass(frozen=True)
class HeteroFLParams:
    """Parameters of HeteroFL, table `heterofl`."""

    rates: str = key(
        "1, 0.5, 0.25",
        "Widths of the clients' networks, in (0, 1], separated by commas: equally many clients have each.",
    )
    mask_classes: bool = key(
        False,
        "Set the logits of classes that a client does not have to 0, in training and in tests, and average a class's row over the "
        "clients that have it (paper).",
    )
    scale: bool = key(True, "Divide a narrow network's hidden layers by its rate in training.")

    def widths(self) -> list[float]:
        """Return the rates in order. Raises UserError for a text that is no list of numbers in (0, 1]."""
        try:
            found = [float(word) for word in self.rates.split(",")]
        except ValueError:
            found = []
        if not found or not all(0 < rate <= 1 for rate in found):
            raise MethodError(
                key="heterofl.rates", rule="must be numbers in (0, 1], separated by commas", value=self.rates
            )
        return found

    def problems(self, config: RunConfig) -> Iterator[UserError]:
        """Yield an error for rates that are no numbers in (0, 1], and for masked classes where there are none."""
        try:
            self.widths()
        except UserError as error:
            yield error
        if self.mask_classes and not tasks.of(config).has_classes:
            rule = f"must be false for task {config.task}, which has no classes"
            yield UserError(key="heterofl.mask-classes", rule=rule, value=True)


def width_slices(layout: Layout, rate: float) -> dict[str, Slices]:
    """Return the corner of each tensor that a network of this width holds, by name: a slice per dimension.

    layout: the whole network's. rate: in (0, 1]. A layer of K outputs keeps ceil(rate K) of them. A layer's inputs are
    those outputs of the layer below, several per output after a flattened convolution. The first layer keeps all
    inputs, the classifier all outputs. A shortcut adds layers of equal width, which stay equal. Raises UserError for
    another rate, and for a layer with inputs that are no earlier layer's outputs, such as a concatenation's.
    """
    if not 0 < rate <= 1:
        raise MethodError(key="heterofl.rates", rule="must be in (0, 1]", value=rate)
    kept: dict[str, Slices] = {}
    outputs: dict[str, int] = {}
    # the layer below: its outputs, and whether it is a convolution; the outputs of all earlier layers
    last: tuple[int, bool] | None = None
    widths: set[int] = set()
    for slot in layout.params:
        module, shape = slot.name.rpartition(".")[0], slot.shape
        if len(shape) < 2:
            continue
        out = shape[0] if slot.name in layout.classifier else narrow(shape[0], rate)
        into = shape[1]
        if last is None:
            inputs = into
        elif last[1] and len(shape) == 2 and into % last[0] == 0:
            inputs = into // last[0] * narrow(last[0], rate)
        elif into in widths or into == 1:
            # 1: a convolution of each channel
            inputs = narrow(into, rate)
        elif rate == 1:
            inputs = into
        else:
            raise unfit(
                "layers whose inputs are another layer's outputs",
                f"{slot.name} has {into} inputs; layers before it have {', '.join(map(str, sorted(widths)))} outputs",
            )
        kept[slot.name] = (slice(0, out), slice(0, inputs), *(slice(0, n) for n in shape[2:]))
        outputs[module], last = out, (shape[0], len(shape) > 2)
        widths.add(shape[0])
    for slot in layout.params + layout.buffers:
        if slot.name not in kept:
            module = slot.name.rpartition(".")[0]
            kept[slot.name] = tuple(slice(0, outputs.get(module, narrow(n, rate))) for n in slot.shape[:1])
    return kept


def narrow(size: int, rate: float) -> int:
    """Return ceil(rate size), the part of so many outputs that a network of this width keeps."""
    return math.ceil(rate * size - 1e-9)


@lru_cache(maxsize=16)
def part_of(layout: Layout, rate: float) -> Part:
    """Return the elements of a model that a network of this width holds. layout: the whole network's."""
    slices = width_slices(layout, rate)

    def flat(slots: Any, length: int) -> NDArray[np.bool_]:
        held = np.zeros(length, bool)
        for slot in slots:
            held[slot.start : slot.stop].reshape(slot.shape)[slices[slot.name]] = True
        return held

    return Part(flat(layout.params, layout.d), flat(layout.buffers, layout.b))


def aggregate(
    parts: Sequence[Mapping[str, ArrayLike]], rates: ArrayLike, previous: Mapping[str, ArrayLike]
) -> dict[str, NDArray[np.float64]]:
    """Return the global tensors by name: each element's mean over the clients that hold it, else its previous value.

    parts: by client, its tensors by name, each the corner that its width keeps. rates: [N]. previous: the global tensors
    before the round. The work is in float64. Raises UserError unless equal rates have equal shapes, and larger ones
    shapes as large or larger, and unless there is a rate per client.
    """
    if len(parts) != np.size(rates):
        raise MethodError(
            key="heterofl",
            rule="there must be a rate per client",
            value=np.size(rates),
            hint=f" for {len(parts)} clients",
        )
    if not parts:
        return {name: np.asarray(before, np.float64) for name, before in previous.items()}
    n, order = len(parts), np.argsort(np.asarray(rates, np.float64), kind="stable")
    result: dict[str, NDArray[np.float64]] = {}
    for name, before in previous.items():
        old = np.asarray(before, np.float64)
        stack, held = np.zeros((n, *old.shape)), np.zeros((n, *old.shape), bool)
        least = np.zeros(old.ndim, int)
        for i in order:
            value = np.asarray(parts[i][name], np.float64)
            shape = np.array(value.shape, int)
            if value.ndim != old.ndim or (shape > old.shape).any() or (shape < least).any():
                raise MethodError(
                    key="heterofl",
                    rule=f"tensor {name} of client {i} has the shape {list(value.shape)}, between those of smaller "
                    f"rates and {list(old.shape)} is expected",
                )
            corner, least = (i, *(slice(0, n) for n in value.shape)), shape
            stack[corner], held[corner] = value, True
        mean = masked_mean(stack.reshape(n, -1), held.reshape(n, -1), np.ones(n), old.reshape(-1))
        result[name] = mean.astype(np.float64).reshape(old.shape)
    return result


def class_of(layout: Layout) -> NDArray[np.int64]:
    """Return the class of each element of the classifier, int64 [d]; -1 for elements below it."""
    owner = np.full(layout.d, -1)
    for slot in head_slots(layout):
        if slot is not None:
            owner[slot.start : slot.stop].reshape(slot.shape[0], -1)[:] = np.arange(slot.shape[0])[:, None]
    return owner


class HeteroFL(FedAvg[HeteroFLParams]):
    """Server half. Widths follow from the seed and are not stored."""

    # an element may have only one client that holds it
    means = Means()
    late = Late(moved="clients upload parts of the model, which fedbuff does not move")

    @cached_property
    def rates(self) -> list[float]:
        """Return each client's rate: equally many clients have each, in an order drawn by the seed."""
        widths, n = self.params.widths(), self.config.num_clients
        order = rng.generator(self.config.seed, "heterofl").permutation(n)
        found = [0.0] * n
        for place, i in enumerate(order.tolist()):
            found[i] = widths[place % len(widths)]
        return found

    def form(self, state: State, turn: Turn) -> Expected:
        """Return the form of an upload: the model, and with `mask-classes` the client's classes."""
        if not self.params.mask_classes:
            return super().form(state, turn)
        num_classes = head_slots(self.layout)[0].shape[0]
        return replace(super().form(state, turn), extras={CLASSES: ("|u1", (num_classes,))})

    def check(self, upload: Upload) -> None:
        """Raise WireError for classes other than 0 and 1, and for a client without any."""
        if self.params.mask_classes:
            told = upload.extras[CLASSES]
            if told.max() != 1:
                raise WireError(f"array {CLASSES} must be 0 or 1, with a 1 at least, got {told.tolist()}")

    def weights(self, uploads: Uploads) -> NDArray[np.float64]:
        """Return equal weights for all uploads, less for late ones."""
        return uploads.once

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """Return the global model, of which the client is sent its part, and the client's rate."""
        return Sent(state.model, {RATE: np.array([self.rates[client_id]])})

    def exported(self, client_id: int | None = None) -> Model | None:
        """Return a client's network inside the wide one: the global model with 0 beyond its part."""
        return (
            self.state.model
            if client_id is None
            else within(self.state.model, part_of(self.layout, self.rates[client_id]))
        )

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Average each element over the clients that hold it, and with `mask-classes` a class's row over those that have it."""
        before, weights = state.model, self.weights(uploads)
        parts = [part_of(self.layout, self.rates[i]) for i in uploads.ids]
        params = np.empty_like(before.params)
        classes = class_of(self.layout) if self.params.mask_classes else None

        def block(start: int, stop: int) -> None:
            at = slice(start, stop)
            held = np.stack([part.params[at] for part in parts])
            if classes is not None:
                held &= (classes[at] < 0) | (uploads.extras[CLASSES][:, classes[at]] == 1)
            params[at] = masked_mean(uploads.W[:, at], held, weights, before.params[at])

        for_blocks(block, params.size)
        if all(part.buffers.all() for part in parts):
            buffers = weighted_mean(uploads.B, weights)
        else:
            held = np.stack([part.buffers for part in parts])
            buffers = masked_mean(uploads.B, held, weights, before.buffers).astype(np.float32)
        return state.next(Model(params, buffers))


def within(model: Model, part: Part) -> Model:
    """Return a model with 0 beyond a part."""
    if part.params.all():
        return model
    zero = np.float32(0)
    return Model(np.where(part.params, model.params, zero), np.where(part.buffers, model.buffers, zero))


def held(layout: Layout, extras: Mapping[str, NDArray[Any]]) -> Part:
    """Return the elements that a client with these extras holds."""
    return part_of(layout, float(extras[RATE][0]))


class HeteroFLUpdate(LocalUpdate[HeteroFLParams]):
    """Client half: it trains its corner of the network. It keeps nothing."""

    def merge(self, received: Model, state: ClientState, ctx: RoundContext[HeteroFLParams]) -> Model:
        """Return the received part inside the wide network."""
        zeros = Model(np.zeros(ctx.layout.d, np.float32), np.zeros(ctx.layout.b, np.float32))
        return held(ctx.layout, ctx.extras).put(zeros, received)

    def personal(self, model: Model, state: ClientState, ctx: RoundContext[HeteroFLParams]) -> Model:
        """Return the network that training computes with, so that it can be tested and exported without the scaling.

        With `mask-classes` its rows of classes that the client does not have are 0.
        """
        model = _times(model, 1 / _scaling(ctx), ctx)
        if not ctx.params.mask_classes:
            return model
        classes = class_of(ctx.layout)
        lacks = (classes >= 0) & (ctx.trainer.class_counts == 0)[classes]
        return Model(np.where(lacks, np.float32(0), model.params), model.buffers)

    def finetune(self, start: Model, state: ClientState, ctx: RoundContext[HeteroFLParams], epochs: int) -> Model:
        """Return the model after more local epochs, trained as in a round. start: a model from `personal`."""
        tuned = self._trained(_times(start, _scaling(ctx), ctx), ctx, epochs=epochs, purpose="finetune")
        return _times(tuned, 1 / _scaling(ctx), ctx)

    def train(self, start: Model, state: ClientState, ctx: RoundContext[HeteroFLParams]) -> Model:
        """Train the part; all other elements stay 0."""
        return self._trained(start, ctx)

    def _trained(self, start: Model, ctx: RoundContext[HeteroFLParams], **options: Any) -> Model:
        """Return the model after training of the client's part. options: those of `trainer.train`."""
        rate = float(ctx.extras[RATE][0])
        objective = known_classes(ctx) if ctx.params.mask_classes else None
        if rate == 1:
            return ctx.trainer.train(start, objective=objective, **options)
        part = held(ctx.layout, ctx.extras)
        with scaled(ctx, _scaling(ctx)):
            after = ctx.trainer.train(start, objective=objective, frozen=~part.params, **options)
        return within(after, part)

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[HeteroFLParams]) -> Upload:
        """Send the part, and with `mask-classes` the client's classes."""
        plain = super().upload(before, after, state, ctx)
        extras = {CLASSES: (ctx.trainer.class_counts > 0).astype(np.uint8)} if ctx.params.mask_classes else {}
        return replace(plain, model=held(ctx.layout, ctx.extras).take(after), extras=extras)


@contextmanager
def scaled(ctx: RoundContext[Any], rate: float) -> Iterator[None]:
    """Divide the outputs of the network's hidden layers by a rate, in training alone. Rate 1 adds no operation."""

    def divide(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output / rate if module.training else output

    hooks = [m.register_forward_hook(divide) for m in _hidden(ctx).values()] if rate != 1 else []
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _hidden(ctx: RoundContext[Any]) -> dict[str, nn.Module]:
    """Return the network's hidden layers by name: those whose outputs the scaling divides."""
    from torch import nn

    kinds, last = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d), ctx.layout.classifier
    layers = ctx.trainer.module.named_modules()
    return {name: m for name, m in layers if isinstance(m, kinds) and f"{name}.weight" not in last}


def _scaling(ctx: RoundContext[HeteroFLParams]) -> float:
    """Return the number that divides the outputs of the client's hidden layers in training; 1 without `scale`."""
    return float(ctx.extras[RATE][0]) if ctx.params.scale else 1.0


def _times(model: Model, factor: float, ctx: RoundContext[HeteroFLParams]) -> Model:
    """Return the model with weights and biases of the hidden layers times a factor: so are the outputs of these layers."""
    if factor == 1:
        return model
    hidden, params = _hidden(ctx), model.params.copy()
    for slot in ctx.layout.params:
        if slot.name.rpartition(".")[0] in hidden:
            params[slot.start : slot.stop] *= np.float32(factor)
    return Model(params, model.buffers)


def known_classes(ctx: RoundContext[Any]) -> Objective:
    """Return the loss over logits that are 0 for the classes that the client does not have."""
    import torch

    trainer = ctx.trainer
    known = torch.from_numpy(trainer.class_counts > 0).to(trainer.weights.device)

    def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return trainer.loss(trainer.logits(module, x) * known, y)

    return loss


def shared(layout: Layout, params: HeteroFLParams) -> frozenset[str]:
    """Return the names of all tensors.

    Raises UserError for constants in a network that would be narrowed, and for a model that cannot be. Raises UserError
    also for tensors of layers that cannot be narrowed, as of attention.
    """
    if layout.constants and min(params.widths()) < 1:
        raise MethodError(
            key="train",
            rule="heterofl narrows all layers, so all must train; leave the key unset, or set heterofl.rates = 1",
        )
    width_slices(layout, min(params.widths()))
    # attention and recurrent layers hold several layers' weights in one tensor; normalised weights do not grow with theirs
    other = [slot.name for slot in layout.params if len(slot.shape) > 1 and not slot.name.endswith(".weight")]
    if other and min(params.widths()) < 1:
        raise unfit("layers with one tensor `weight`, such as Linear layers and convolutions", f"it has {other[0]}")
    return layout.names


def tested(params: HeteroFLParams) -> str:
    """Return the sentence on the scaling and on masked classes."""
    changes = ["a narrow network's hidden layers are divided by its rate, as in training"] * (
        params.scale and min(params.widths()) < 1
    )
    changes += ["the logits of classes that the client does not have are 0"] * params.mask_classes
    return f"before and after training, {', and '.join(changes)}" if changes else ""


METHOD = Method(
    "heterofl",
    HeteroFLParams,
    HeteroFL,
    HeteroFLUpdate,
    shared,
    needs_whole=True,
    not_private="its server averages each element over those clients that hold it",
    needs=lambda params: LINEAR if params.mask_classes else SPLIT,
    tested=tested,
    submodel=Submodel(held),
    overview=Overview(
        group="A part of the model",
        travels="own width both ways",
        unseen="global model, its own width",
        use="clients of different memory or bandwidth",
    ),
)
