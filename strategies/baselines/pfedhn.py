"""pFedHN: a network on the server makes each client's model from the client's embedding, and learns from their training.

Shamsian, Navon, Fetaya, Chechik: "Personalized Federated Learning using Hypernetworks", ICML 2021.

The server has an embedding v_i for each client and a hypernetwork h: a linear layer of `hidden` units, then `layers` times
ReLU and a linear layer, and a linear layer with an output for every parameter, without a ReLU before it. Client i receives
theta_i = h(v_i), trains it to theta~_i, and sends it.
For each upload the server takes one step (Algorithm 1), with delta = theta_i - theta~_i in place of the gradient of theta_i:

    phi <- phi - alpha (d theta_i / d phi)' delta,    v_i <- v_i - alpha (d theta_i / d v_i)' delta

`local_head = true` is pFedHN-PC: the hypernetwork makes the body alone, and each client keeps its own classifier.

Deviations:

- A round has all its clients' steps one after the other, in the order of their ids. theta_i is then what the hypernetwork
  makes so far, so that no step repeats what earlier ones did. The paper draws one client per round.
- The output layer's biases start at the run's initial model, so that no client starts from small random numbers.
- Steps have momentum and weight decay, and slopes longer than 50 are cut to that length, as in the authors' code. A step
  moves the embedding of its client alone. In the authors' code all embeddings decay and go on with their momentum.
  That code also cuts the gradients of local training to 50; the key `clip-norm` does it here.
- BatchNorm's running statistics are no outputs: all clients receive their mean, weighted by samples.
- A client that never trains has an embedding as drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app import rng
from strategies.base import (
    AT_LEAST_ONE,
    BELOW_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    SPLIT,
    Holds,
    Late,
    Layout,
    LocalUpdate,
    Method,
    Model,
    Overview,
    PersonalizedStrategy,
    Sent,
    State,
    Turn,
    Uploads,
    all_but_classifier,
    key,
    local_epochs,
)
from strategies.kernels import one_thread, weighted_mean

Array = NDArray[np.float32]
# the layers by name, w0 [H, e], b0 [H], w1 [H, H], ..., w [d, H], b [d]
Network = Mapping[str, Array]

# the longest slope of a step
_LONGEST = 50.0
_NETWORK, _MOMENTUM, _EMBEDDINGS = "network.", "momentum.", "embeddings"


@dataclass(frozen=True)
class PFedHNParams:
    """Parameters of pFedHN, table `pfedhn`; defaults are the authors'."""

    learning_rate: float = key(0.01, "Step size of the hypernetwork and the embeddings (alpha).", POSITIVE)
    momentum: float = key(0.9, "Momentum of these steps.", BELOW_ONE)
    weight_decay: float = key(1e-3, "Weight decay of these steps.", NOT_NEGATIVE)
    hidden: int = key(100, "Units of a hidden layer of the hypernetwork.", AT_LEAST_ONE)
    layers: int = key(3, "Hidden layers of the hypernetwork, after the first.", NOT_NEGATIVE)
    embedding: int = key(0, "Elements of an embedding; 0: 1 + N / 4.", NOT_NEGATIVE)
    local_head: bool = key(False, "Clients keep their own classifiers (pFedHN-PC).")


def initial_network(width: int, params: PFedHNParams, start: Array, stream: np.random.Generator) -> dict[str, Array]:
    """Return a hypernetwork with random layers, and output biases `start`, float32 [d]. width: elements of an embedding.

    Weights and hidden biases are uniform in +-1 / sqrt(inputs), as PyTorch's Linear layers are.
    """
    found: dict[str, Array] = {}
    sizes = [width] + [params.hidden] * (params.layers + 1)
    for k, (into, out) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        found[f"w{k}"] = _uniform(stream, into, (out, into))
        found[f"b{k}"] = _uniform(stream, into, (out,))
    return {**found, "w": _uniform(stream, sizes[-1], (start.size, sizes[-1])), "b": start.copy()}


def _uniform(stream: np.random.Generator, into: int, shape: tuple[int, ...]) -> Array:
    drawn: Array = (stream.uniform(-1, 1, shape) / np.sqrt(into)).astype(np.float32)
    return drawn


def hidden_layers(network: Network, v: Array, relu_last: bool) -> list[Array]:
    """Return the embedding and the outputs of all hidden layers, float32 [H] each. relu_last: see `generate`."""
    outputs, count = [v], (len(network) - 2) // 2
    for k in range(count):
        h = network[f"w{k}"] @ outputs[-1] + network[f"b{k}"]
        outputs.append(np.maximum(h, 0) if relu_last or k < count - 1 else h)
    return outputs


def generate(network: Network, v: Array, *, relu_last: bool = False) -> Array:
    """Return the parameters that a hypernetwork makes from an embedding, float32 [d].

    v: float32 [e]. Hidden layers have a ReLU, the last one with `relu_last` alone.
    """
    theta: Array = network["w"] @ hidden_layers(network, v, relu_last)[-1] + network["b"]
    return theta


def slopes(network: Network, v: Array, delta: Array, *, relu_last: bool = False) -> tuple[dict[str, Array], Array]:
    """Return (d theta / d phi)' delta by layer, without that of `w`, and (d theta / d v)' delta, float32 [e].

    delta: float32 [d]. The slope of `w` is the outer product of delta and the last hidden layer's output, which is
    returned as `last` in its place. relu_last: see `generate`.
    """
    outputs = hidden_layers(network, v, relu_last)
    found: dict[str, Array] = {"b": delta, "last": outputs[-1]}
    back: Array = delta @ network["w"]
    for k in reversed(range(len(outputs) - 1)):
        if relu_last or k < len(outputs) - 2:
            back = back * (outputs[k + 1] > 0)
        found[f"w{k}"], found[f"b{k}"] = np.outer(back, outputs[k]), back
        back = back @ network[f"w{k}"]
    return found, back


def step(value: Array, slope: Array, speed: Array | None, params: PFedHNParams) -> None:
    """Move a value, in place, by a step of SGD with weight decay. speed: its momentum, which moves too; None: none."""
    move = slope + params.weight_decay * value
    if speed is not None:
        speed *= params.momentum
        speed += move
        move = speed
    value -= params.learning_rate * move


def network_bytes(server: PFedHN) -> int:
    """Return the bytes of the hypernetwork's output layer, and of its momentum."""
    return 4 * server.params.hidden * server.layout.d * (2 if server.params.momentum else 1)


class PFedHN(PersonalizedStrategy[PFedHNParams]):
    """Server half. Memory: the hypernetwork by layer and `embeddings` float32 [N, e], and the momentum of both."""

    late = Late(aged="the server takes an equal step for every upload", reads_moves=True)
    holds = Holds(memory=network_bytes)

    @property
    def network(self) -> Network:
        """Return the hypernetwork; the first one before round 1."""
        memory = self.state.memory
        if _NETWORK + "b" not in memory:
            p, n = self.params, self.config.num_clients
            width = p.embedding or 1 + n // 4
            stream = rng.generator(self.config.seed, "pfedhn")
            memory[_EMBEDDINGS] = stream.normal(size=(n, width)).astype(np.float32)
            layers = initial_network(width, p, self.state.model.params, stream)
            memory.update({_NETWORK + name: layer for name, layer in layers.items()})
        return {name.removeprefix(_NETWORK): a for name, a in memory.items() if name.startswith(_NETWORK)}

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """Return the model that the hypernetwork makes for the client."""
        with one_thread():
            return Sent(Model(generate(self.network, state.memory[_EMBEDDINGS][client_id]), state.model.buffers))

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Take a step for each upload."""
        p = self.params
        with one_thread():
            network = {name: layer.copy() for name, layer in self.network.items()}
            embeddings = state.memory[_EMBEDDINGS].copy()
            speeds = {
                name: state.memory.get(_MOMENTUM + name, np.zeros_like(value)).copy() if p.momentum else None
                for name, value in {**network, _EMBEDDINGS: embeddings}.items()
            }
            of_embeddings = speeds.pop(_EMBEDDINGS)
            for row, i in enumerate(uploads.ids):
                found, toward = slopes(network, embeddings[i], generate(network, embeddings[i]) - uploads.W[row])
                last = found.pop("last")
                found["w"] = np.outer(found["b"], last)
                rest = [toward, *(slope for name, slope in found.items() if name != "w")]
                square = sum(float(slope.ravel() @ slope.ravel()) for slope in rest)
                square += float(found["b"] @ found["b"]) * float(last @ last)
                scale = np.float32(min(1.0, _LONGEST / max(float(np.sqrt(square)), 1e-12)))
                step(embeddings[i], toward * scale, None if of_embeddings is None else of_embeddings[i], p)
                for name, slope in found.items():
                    step(network[name], slope * scale, speeds[name], p)
        now = {_NETWORK + name: layer for name, layer in network.items()} | {_EMBEDDINGS: embeddings}
        speeds[_EMBEDDINGS] = of_embeddings
        now |= {_MOMENTUM + name: speed for name, speed in speeds.items() if speed is not None}
        return state.next(Model(state.model.params, weighted_mean(uploads.B, self.weights(uploads))), memory=now)

    def exported(self, client_id: int | None = None) -> Model | None:
        """Return the client's model; None if it keeps a part of it. There is no global one."""
        return None if client_id is None or self.params.local_head else super().exported(client_id)


def shared(layout: Layout, params: Any) -> frozenset[str]:
    """Return the names of all tensors, or with `local_head` those of the body."""
    return all_but_classifier(layout) if params.local_head else layout.names


METHOD = Method(
    "pfedhn",
    PFedHNParams,
    PFedHN,
    LocalUpdate[PFedHNParams],
    shared,
    dp_epochs=local_epochs,
    not_private="its server learns from single clients' models",
    needs=lambda params: SPLIT if params.local_head else "",
    overview=Overview(
        group="Parameters among similar clients",
        server="8 H d",
        unseen="model of an untrained embedding",
        use="many clients and a small model",
    ),
)
