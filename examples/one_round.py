"""FedCAC's rounds with its kernels and NumPy alone: no Flower, no PyTorch, no messages. Read this file first.

    python examples/one_round.py

Wu, Liu, Niu, Zhu, Tang: "Bold but Cautious", ICCV 2023. `one_round` is a round: every client trains, and marks its
critical parameters; the server averages each client's critical parameters over clients with a similar mask, and the
others over all clients. strategies/fedcac.py is the same method for real networks, with its options.

The model is a linear one, with two layers to the kernels: `weight` [10 * 4] and `bias` [4]. A vector has d = 44.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strategies.kernels import aggregate, masks, scores

Vector = NDArray[np.float32]  # [d]
Stack = NDArray[np.float32]  # [N, d]

FEATURES, CLASSES, CLIENTS = 10, 4, 6
SIZES = (FEATURES * CLASSES, CLASSES)  # parameters per layer
D = sum(SIZES)
TAU = 0.5  # share of every layer's parameters that is critical (Eq. 6)
BETA = 8  # last round in which clients share critical parameters (Eq. 7)


# Data and a client's training -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Client:
    """A client's data: x float32 [n, FEATURES], y int64 [n], for training and for tests."""

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    x_test: NDArray[np.float32]
    y_test: NDArray[np.int64]


def clients(seed: int = 0) -> list[Client]:
    """Return clients in pairs: both of a pair have the same two classes. Each has 20 to 40 training samples."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(CLASSES, FEATURES))

    def samples(classes: list[int], n: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        y = rng.choice(classes, n)
        return (centres[y] + 1.5 * rng.normal(size=(n, FEATURES))).astype(np.float32), y

    out = []
    for k in range(CLIENTS):
        pair = [k // 2 % CLASSES, (k // 2 + 1) % CLASSES]
        out.append(Client(*samples(pair, 20 + 4 * k), *samples(pair, 200)))
    return out


def logits(w: Vector, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the linear model's outputs, float32 [n, CLASSES]."""
    weight, bias = w[: SIZES[0]].reshape(FEATURES, CLASSES), w[SIZES[0] :]
    return x @ weight + bias


def train(start: Vector, client: Client, steps: int = 20, learning_rate: float = 0.2) -> Vector:
    """Return the model after some steps of gradient descent on the client's cross-entropy."""
    w, target = start.copy(), np.eye(CLASSES, dtype=np.float32)[client.y]
    for _ in range(steps):
        out = logits(w, client.x)
        p = np.exp(out - out.max(axis=1, keepdims=True))
        error = (p / p.sum(axis=1, keepdims=True) - target) / len(client.y)
        w -= learning_rate * np.concatenate([(client.x.T @ error).ravel(), error.sum(axis=0)])
    return w


def accuracy(w: Vector, client: Client) -> float:
    """Return the share of the client's test samples whose class the model finds."""
    return float((logits(w, client.x_test).argmax(axis=1) == client.y_test).mean())


# The client's upload and the server's step ----------------------------------------------------------------------------


def critical(before: Vector, after: Vector) -> masks.Bits:
    """Return the packed mask of the critical parameters, uint8 [ceil(d/8)] (Eq. 5-6).

    A parameter's sensitivity is |(after - before) * after|. The top TAU of every layer are critical.
    """
    return masks.pack(masks.top_k(scores.sensitivity(before, after), SIZES, TAU))


def collaborators(bits: masks.Bits, round: int) -> NDArray[np.bool_]:
    """Return which clients share critical parameters, bool [N, N], the diagonal True (Eq. 7-8).

    bits: uint8 [N, ceil(d/8)]. The overlap of two masks is their share of common ones. The threshold rises from the mean
    over pairs to the largest one, which it reaches in round BETA. After that everybody is alone.
    """
    alone = np.eye(len(bits), dtype=bool)
    if round > BETA:
        return alone
    overlap = masks.overlap(bits, masks.num_selected(SIZES, TAU))
    pairs = overlap[~alone]
    threshold = pairs.mean() + round / BETA * (pairs.max() - pairs.mean())
    shared: NDArray[np.bool_] = overlap >= min(threshold, pairs.max())
    return shared | alone


def personalize(W: Stack, bits: masks.Bits, sizes: NDArray[np.float64], round: int) -> tuple[Vector, Stack]:
    """Return the global model, float32 [d], and every client's next model, float32 [N, d] (Eq. 9-11).

    W: the trained models; bits: their masks; sizes: float64 [N], numbers of training samples, the weights of the global
    mean.
    """
    everyone = aggregate.weighted_mean(W, sizes)
    groups = aggregate.group_means(W, collaborators(bits, round))
    return everyone, np.array([aggregate.merge(own, group, everyone) for own, group in zip(bits, groups, strict=True)])


def one_round(models: Stack, data: list[Client], round: int) -> tuple[Stack, Vector]:
    """Run a round and return the clients' next models, float32 [N, d], and the global one. models: those they start from."""
    W = np.array([train(start, client) for start, client in zip(models, data, strict=True)])
    bits = np.array([critical(before, after) for before, after in zip(models, W, strict=True)])
    everyone, personalized = personalize(W, bits, np.array([len(client.y) for client in data], float), round)
    return personalized, everyone


def main(rounds: int = 10) -> None:
    """Run some rounds and print the mean accuracy of the personalized models and of the global one."""
    data = clients()
    models = np.zeros((CLIENTS, D), np.float32)
    for round in range(1, rounds + 1):
        models, everyone = one_round(models, data, round)
        own = np.mean([accuracy(w, client) for w, client in zip(models, data, strict=True)])
        shared = np.mean([accuracy(everyone, client) for client in data])
        print(f"round {round}: personalized {own:.3f}, global {shared:.3f}")


if __name__ == "__main__":
    main()
