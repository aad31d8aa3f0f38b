"""FAVOR: the server learns which clients to draw, by a double deep Q-network over the clients' compressed weights.

Wang, Kaplan, Niu, Li: "Optimizing Federated Learning on Non-IID Data with Reinforcement Learning", INFOCOM 2020.

Training and the mean are FedAvg's; only the choice of a round's clients differs. In round 1 all clients train. The
principal components of their weights compress every later model to `components` numbers. The state s_t is the compressed
global model and the last compressed upload of each client. The network Q(s, a) values client a. A round draws the clients
of the largest values, each place with probability epsilon a random client instead. The reward of round t is

    r_t = Xi^(omega_t - Omega) - 1

omega_t is the global model's accuracy after the round, Omega the target, Xi `base`. Every drawn client a gives a
transition (s_{t-1}, a, r_t, s_t), which is replayed. Q moves towards

    r + gamma Q'(s', argmax_b Q(s', b))

Q' is an earlier copy of Q.

Deviations:

- The agent learns online, in the run that it serves. The paper trains it over hundreds of runs, with one client per round,
  and then draws the best K.
- omega_t is the mean accuracy (the key `headline`) of the next round's clients, before they train. The paper's server has
  test data.
- Components that a client lacks until it trains are 0. The last 500 transitions are replayed.
- `report-accuracy = false` leaves no reward and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app import rng, tasks
from strategies.base import (
    AT_LEAST_ONE,
    BELOW_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    RATIO,
    Holds,
    Late,
    LocalUpdate,
    Means,
    Method,
    Overview,
    Rule,
    RunConfig,
    State,
    Turn,
    Uploads,
    UserError,
    all_but_local_statistics,
    key,
    local_epochs,
    moments,
)
from strategies.baselines.fedavg import FedAvg, GlobalModelParams
from strategies.kernels import RULES, one_thread

Array = NDArray[np.float64]
Memory = Mapping[str, NDArray[Any]]
Network = Mapping[str, Array]

# of the network that values, and of its earlier copy; and the replayed transitions
_Q, _COPY, _SEEN = "q.", "copy.", "seen."
# transitions that are replayed, at most
_KEPT = 500


@dataclass(frozen=True)
class FAVORParams(GlobalModelParams):
    """Parameters of FAVOR, table `favor`."""

    components: int = key(
        100, "Principal components that a model is compressed to, at most one per client.", AT_LEAST_ONE
    )
    target: float = key(0.99, "Accuracy at which a round's reward is 0 (Omega).", RATIO)
    base: float = key(64.0, "Base of the reward (Xi).", Rule(low=1))
    discount: float = key(0.9, "Weight of the next state's value (gamma).", BELOW_ONE)
    epsilon: float = key(0.2, "Probability that a place goes to a random client.", RATIO)
    hidden: int = key(512, "Units of the Q-network's hidden layer.", AT_LEAST_ONE)
    learning_rate: float = key(1e-3, "Step size of the Q-network.", POSITIVE)
    steps: int = key(20, "Steps of the Q-network per round, on 32 transitions each.", NOT_NEGATIVE)
    all_first: bool = key(True, "Train all clients in round 1; false: a round's clients, so that others begin unknown.")
    copy_every: int = key(5, "Rounds between copies of the Q-network.", AT_LEAST_ONE)

    def problems(self, config: RunConfig) -> Iterator[UserError]:
        """Yield an error for a run whose clients report no accuracy."""
        if not config.report_accuracy:
            rule = "must be true for favor, whose rewards are accuracies"
            yield UserError(key="report-accuracy", rule=rule, value=False)


def reward(accuracy: float, *, target: float, base: float) -> float:
    """Return a round's reward, base^(accuracy - target) - 1: 0 at the target, and negative below it."""
    return float(base ** (accuracy - target) - 1)


def components_of(W: NDArray[np.float32], most: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the mean of models, float32 [d], and their principal axes, float32 [p, d], p <= min(most, N).

    W: float32 [N, d]. The axes have length 1 and a sign by which their largest element is positive.
    """
    mean = W.mean(axis=0, dtype=np.float64)
    centred = W.astype(np.float64) - mean
    values, vectors = np.linalg.eigh(centred @ centred.T)
    order = np.argsort(-values, kind="stable")[: min(most, len(W))]
    axes = (vectors[:, order] / np.sqrt(np.maximum(values[order], 1e-12))).T @ centred
    signs = np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(axis=1)])
    return mean.astype(np.float32), (axes * np.where(signs == 0, 1, signs)[:, None]).astype(np.float32)


def initial_network(inputs: int, hidden: int, actions: int, stream: np.random.Generator) -> dict[str, Array]:
    """Return a Q-network: weights uniform in +-1 / sqrt(inputs of the layer), biases 0."""
    return {
        "w0": stream.uniform(-1, 1, (hidden, inputs)) / np.sqrt(inputs),
        "b0": np.zeros(hidden),
        "w1": stream.uniform(-1, 1, (actions, hidden)) / np.sqrt(hidden),
        "b1": np.zeros(actions),
    }


def values_of(network: Network, states: Array) -> Array:
    """Return the values of all actions, float64 [n, A]. states: float64 [n, s]."""
    h = np.maximum(states @ network["w0"].T + network["b0"], 0)
    values: Array = h @ network["w1"].T + network["b1"]
    return values


def targets(network: Network, copy: Network, rewards: Array, following: Array, discount: float) -> Array:
    """Return r + gamma Q'(s', argmax_b Q(s', b)), float64 [n] (double Q-learning).

    network: Q; copy: Q'. rewards: float64 [n]; following: float64 [n, s], the states s'.
    """
    best = values_of(network, following).argmax(axis=1)
    goal: Array = rewards + discount * values_of(copy, following)[np.arange(len(best)), best]
    return goal


def learned(network: Network, states: Array, actions: NDArray[np.int64], goals: Array, rate: float) -> dict[str, Array]:
    """Return a Q-network after one gradient step on the mean of (Q(s, a) - goal)^2 / 2. Arguments: [n, s], [n], [n]."""
    n = len(actions)
    h = np.maximum(states @ network["w0"].T + network["b0"], 0)
    error = np.zeros((n, len(network["b1"])))
    rows = np.arange(n)
    error[rows, actions] = ((h @ network["w1"].T + network["b1"])[rows, actions] - goals) / n
    back = (error @ network["w1"]) * (h > 0)
    slopes = {"w1": error.T @ h, "b1": error.sum(axis=0), "w0": back.T @ states, "b0": back.sum(axis=0)}
    return {name: layer - rate * slopes[name] for name, layer in network.items()}


def chosen(values: Array, among: list[int], count: int, epsilon: float, stream: np.random.Generator) -> list[int]:
    """Return `count` of the clients `among`, sorted: the largest values first; each place random with probability epsilon."""
    ranking = sorted(among, key=lambda i: (-values[i], i))
    found: list[int] = []
    for _ in range(min(count, len(among))):
        at = int(stream.integers(len(ranking))) if stream.random() < epsilon else 0
        found.append(ranking.pop(at))
    return sorted(found)


class FAVOR(FedAvg[FAVORParams]):
    """Server half. Memory: the mean and the axes of the models, the last states, both networks, and the transitions."""

    means = Means(RULES, sets_model=True)
    late = Late(never="its agent learns from the clients that it chose for the round")
    # the models' differences in float64, and their axes
    holds = Holds(made=4, kept=1)

    def sample_clients(self, state: State, client_ids: list[int], turn: Turn) -> list[int]:
        """Return all clients in round 1, or a random part; later those that the Q-network values most."""
        if "axes" not in state.memory:
            return client_ids if self.params.all_first else self.drawn(client_ids, turn.round)
        with one_thread():
            values = values_of(network(state.memory, _Q), self.observed(state.memory)[None])[0]
        stream = rng.generator(self.config.seed, "favor", turn.round)
        return chosen(values, client_ids, self.config.cohort_size(len(client_ids)), self.params.epsilon, stream)

    def observed(self, memory: Memory) -> Array:
        """Return the agent's state: the compressed global model, as it was sent, and clients' models, float64 [(N + 1) p]."""
        return np.concatenate([compressed(memory, self.state.model.params[None])[0], memory["clients"].reshape(-1)])

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Average, learn from the last round's reward, and note this round's transition."""
        W = np.asarray(uploads.W)
        with one_thread():
            memory = self.learned(state.memory, uploads, turn) if "axes" in state.memory else self.begun(W)
            # the first round's choice was not the agent's
            last = (
                {"last.state": self.observed(memory), "last.actions": np.array(uploads.ids)} if turn.round > 1 else {}
            )
            clients = memory["clients"].copy()
            clients[uploads.ids] = compressed(memory, W)
            return super().update(state, uploads, turn).next(memory={**memory, **last, "clients": clients})

    def begun(self, W: NDArray[np.float32]) -> Memory:
        """Return the components of the first round's models, and the networks at their start."""
        n, p = self.config.num_clients, self.params
        mean, axes = components_of(W, p.components)
        drawn = initial_network((n + 1) * len(axes), p.hidden, n, rng.generator(self.config.seed, "favor"))
        networks = {which + name: layer for which in (_Q, _COPY) for name, layer in drawn.items()}
        return {"mean": mean, "axes": axes, "clients": np.zeros((n, len(axes))), **networks}

    def learned(self, memory: Memory, uploads: Uploads, turn: Turn) -> Memory:
        """Add the last round's transitions, whose accuracy is known now, and take steps on all. Return the next memory."""
        p = self.params
        name = moments(tasks.measured(self.config)[0].name)[0]
        told = np.array([float(m.get(name, np.nan)) for m in uploads.metrics])
        known = told[np.isfinite(told)]
        if "last.actions" not in memory or not len(known):
            return memory
        gained = reward(float(known.mean()), target=p.target, base=p.base)
        turn.note_round("reward", gained)
        actions = memory["last.actions"]
        new = {
            "states": np.tile(memory["last.state"], (len(actions), 1)),
            "actions": actions,
            "rewards": np.full(len(actions), gained),
            "following": np.tile(self.observed(memory), (len(actions), 1)),
        }
        seen = {
            name: np.concatenate([memory[_SEEN + name], rows])[-_KEPT:] if _SEEN + name in memory else rows
            for name, rows in new.items()
        }
        values, copy = network(memory, _Q), network(memory, _COPY)
        stream = rng.generator(self.config.seed, "favor-replay", turn.round)
        for _ in range(p.steps):
            batch = stream.integers(len(seen["actions"]), size=32)
            goals = targets(values, copy, seen["rewards"][batch], seen["following"][batch], p.discount)
            values = learned(values, seen["states"][batch], seen["actions"][batch], goals, p.learning_rate)
        moved = (_Q, _COPY) if turn.round % p.copy_every == 0 else (_Q,)
        return {
            **memory,
            **{_SEEN + name: rows for name, rows in seen.items()},
            **{which + name: layer for which in moved for name, layer in values.items()},
        }


def network(memory: Memory, which: str) -> dict[str, Array]:
    """Return one of the networks. which: `_Q` or `_COPY`."""
    return {name.removeprefix(which): a for name, a in memory.items() if name.startswith(which)}


def compressed(memory: Memory, W: NDArray[np.float32]) -> Array:
    """Return models in the principal components, float64 [n, p]. W: float32 [n, d]."""
    centred = W.astype(np.float64) - memory["mean"]
    found: Array = centred @ memory["axes"].astype(np.float64).T
    return found


METHOD = Method(
    "favor",
    FAVORParams,
    FAVOR,
    LocalUpdate[FAVORParams],
    all_but_local_statistics,
    needs_classes=True,
    dp_epochs=local_epochs,
    not_private="its server looks at single clients' models to choose clients",
    overview=Overview(
        group="One global model for all",
        server="4 d min(N, 100)",
        use="few clients per round, of very different data",
    ),
)
