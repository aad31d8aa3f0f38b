"""pFedLA: for each client a hypernetwork on the server weighs all clients' models, layer by layer.

Ma, Zhang, Guo, Xu: "Layer-wised Model Aggregation for Personalized Federated Learning", CVPR 2022.

The server keeps each client's last model theta_j, and for client i a hypernetwork with an embedding v_i: hidden layers of
ReLU units, then for every layer l of the model a ReLU unit per client. Their outputs over their sum are the weights
alpha_ilj. Client i receives (Eq. 5)

    thetabar_il = sum_j alpha_ilj theta_jl

It trains this model to theta_i and sends it. With delta = thetabar_i - theta_i in place of the gradient of thetabar_i the
server takes one step on client i's hypernetwork and embedding (Eq. 7):

    phi_i <- phi_i - eta (d thetabar_i / d phi_i)' delta,    v_i <- v_i - eta (d thetabar_i / d v_i)' delta

`keep_layers` is HeurpFedLA: the layers with the largest weights alpha_ili, so many, are client i's own.

Readings and deviations:

- This step lowers ||thetabar_i - theta_i||^2 / 2, so that the mixture moves towards what training made of it. The
  authors' code and FL-bench take delta = theta_i - thetabar_i with the same minus sign, which moves it away.
- A round's clients train at the same time. In FL-bench they train one after the other, each on the others' new models.
- theta_i is the trained model. FL-bench keeps the client's last model plus theta_i - thetabar_i.
- Every client's first hypernetwork is drawn anew. In FL-bench all have the same, and only the embeddings differ.
- A layer is a parameter tensor, as in FL-bench. If all its units are 0, it is the client's own.
- A client that has not trained counts with the initial model.
- BatchNorm's running statistics are mixed by the mean of the layers' weights.
- HeurpFedLA's layers are sent too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_app import rng
from strategies.base import (
    AT_LEAST_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    Holds,
    Late,
    LocalUpdate,
    Method,
    Model,
    Overview,
    PersonalizedStrategy,
    Sent,
    State,
    Turn,
    Uploads,
    all_tensors,
    key,
    local_epochs,
)
from strategies.baselines.pfedhn import Array, Network, generate, slopes
from strategies.kernels import one_thread

# hidden layers of a hypernetwork
_HIDDEN = 3
_EMBEDDING = "v"


@dataclass(frozen=True)
class PFedLAParams:
    """Parameters of pFedLA, table `pfedla`; defaults are FL-bench's."""

    learning_rate: float = key(5e-3, "Step size of the hypernetworks and embeddings (eta).", POSITIVE)
    hidden: int = key(100, "Units of a hidden layer of a hypernetwork.", AT_LEAST_ONE)
    embedding: int = key(100, "Elements of an embedding.", AT_LEAST_ONE)
    keep_layers: int = key(
        0, "Layers that are the client's own: those with its largest weights (HeurpFedLA).", NOT_NEGATIVE
    )


def initial_network(outputs: int, params: PFedLAParams, stream: np.random.Generator) -> dict[str, Array]:
    """Return a random hypernetwork and embedding, with `outputs` units.

    The last layer's weights are uniform in [0, 1), so that first weights are about equal. Others are as PyTorch's.
    """
    found: dict[str, Array] = {_EMBEDDING: stream.normal(size=params.embedding).astype(np.float32)}
    sizes = [params.embedding] + [params.hidden] * _HIDDEN
    for k, (into, out) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        for name, shape in ((f"w{k}", (out, into)), (f"b{k}", (out,))):
            found[name] = (stream.uniform(-1, 1, shape) / np.sqrt(into)).astype(np.float32)
    found["w"] = stream.uniform(0, 1, (outputs, params.hidden)).astype(np.float32)
    found["b"] = np.zeros(outputs, np.float32)
    return found


def layer_weights(units: Array, own: int, keep: int = 0) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the weights alpha of client `own`, float64 [L, N], rows of sum 1, and the layers that are its own, bool [L].

    units: [L, N], a hypernetwork's outputs before the ReLU. keep: layers that are the client's own in any case.
    """
    positive = np.maximum(units.astype(np.float64), 0)
    totals = positive.sum(axis=1, keepdims=True)
    alpha = positive / np.where(totals > 0, totals, 1)
    kept = totals[:, 0] == 0
    if keep:
        kept[np.argsort(-alpha[:, own], kind="stable")[:keep]] = True
    alpha[kept] = np.eye(units.shape[1])[own]
    return alpha, kept


def unit_slopes(units: Array, toward: NDArray[np.float64], kept: NDArray[np.bool_]) -> Array:
    """Return the gradient of the units, float32 [L, N], from that of the weights alpha, float64 [L, N].

    alpha = relu(u) / sum relu(u). kept: bool [L], layers without a gradient.
    """
    positive = np.maximum(units.astype(np.float64), 0)
    totals = positive.sum(axis=1, keepdims=True)
    totals = np.where(totals > 0, totals, 1)
    centred = toward - (toward * positive / totals).sum(axis=1, keepdims=True)
    slope: Array = (centred / totals * (units > 0) * ~kept[:, None]).astype(np.float32)
    return slope


class PFedLA(PersonalizedStrategy[PFedLAParams]):
    """Server half. Kept per client: its last upload, `params` and `buffers`, and its hypernetwork by layer with `v`."""

    late = Late(aged="the hypernetworks weigh the clients' last models", reads_moves=True)
    holds = Holds(models=True)

    def network_of(self, client_id: int) -> Mapping[str, Array]:
        """Return a client's hypernetwork and embedding; before its first upload, the first ones."""
        mine = self.state.clients.get(client_id)
        if mine is not None:
            return {name: layer for name, layer in mine.items() if name not in ("params", "buffers")}
        stream = rng.generator(self.config.seed, "pfedla", 0, client_id)
        return initial_network(len(self.layout.params) * self.config.num_clients, self.params, stream)

    def units(self, network: Network) -> Array:
        """Return a hypernetwork's outputs before the ReLU, float32 [L, N]."""
        layers = {name: layer for name, layer in network.items() if name != _EMBEDDING}
        return generate(layers, network[_EMBEDDING], relu_last=True).reshape(len(self.layout.params), -1)

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """Return the client's mixture of all clients' layers."""
        with one_thread():
            alpha = layer_weights(self.units(self.network_of(client_id)), client_id, self.params.keep_layers)[0]
        rest = 1 - alpha[:, sorted(self.state.clients)].sum(axis=1)
        start = state.model
        mixed = np.empty(self.layout.d)
        for layer, slot in enumerate(self.layout.params):
            at = slice(slot.start, slot.stop)
            mixed[at] = rest[layer] * start.params[at]
            for j in sorted(self.state.clients):
                mixed[at] += alpha[layer, j] * self.state.clients[j]["params"][at]
        weights = alpha.mean(axis=0)
        buffers = (1 - weights[sorted(self.state.clients)].sum()) * start.buffers.astype(np.float64)
        for j in sorted(self.state.clients):
            buffers += weights[j] * self.state.clients[j]["buffers"]
        return Sent(Model(mixed.astype(np.float32), buffers.astype(np.float32)))

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Keep the uploads, and take a step on their clients' hypernetworks."""
        p, slots = self.params, self.layout.params
        # what the round's models were mixed of
        models = {j: own["params"] for j, own in state.clients.items()}
        changed = {}
        for row, i in enumerate(uploads.ids):
            delta = self.download(state, i, turn).model.params.astype(np.float64) - uploads.W[row]
            network = self.network_of(i)
            toward = np.zeros((len(slots), self.config.num_clients))
            for layer, slot in enumerate(slots):
                at = slice(slot.start, slot.stop)
                toward[layer] = state.model.params[at].astype(np.float64) @ delta[at]
                for j, params in models.items():
                    toward[layer, j] = params[at].astype(np.float64) @ delta[at]
            with one_thread():
                units = self.units(network)
                kept = layer_weights(units, i, p.keep_layers)[1]
                layers = {name: layer for name, layer in network.items() if name != _EMBEDDING}
                delta_units = unit_slopes(units, toward, kept).reshape(-1)
                found, v = slopes(layers, network[_EMBEDDING], delta_units, relu_last=True)
                found["w"] = np.outer(found["b"], found.pop("last"))
            found[_EMBEDDING] = v
            rate = np.float32(p.learning_rate)
            changed[i] = {name: (layer - rate * found[name]).astype(np.float32) for name, layer in network.items()}
        clients = {
            i: {"params": uploads.W[row], "buffers": uploads.B[row], **changed[i]} for row, i in enumerate(uploads.ids)
        }
        return state.next(clients=clients)

    def exported(self, client_id: int | None = None) -> Model | None:
        """Return the model that a client is sent. There is no global one."""
        return None if client_id is None else super().exported(client_id)


METHOD = Method(
    "pfedla",
    PFedLAParams,
    PFedLA,
    LocalUpdate[PFedLAParams],
    all_tensors,
    dp_epochs=local_epochs,
    not_private="its server mixes single clients' models",
    overview=Overview(
        group="Parameters among similar clients",
        server="4(d+b) + 4 H L N a client",
        unseen="mixture by a new hypernetwork",
        use="clients that agree in some layers only",
    ),
)
