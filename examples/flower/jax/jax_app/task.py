"""Model, data and training loop: nothing here knows Flower or Corolla."""

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp
from numpy.typing import NDArray
from sklearn.datasets import load_digits

CLASSES, PIXELS, WIDTH = 10, 64, 64

Params = dict[str, Array]
"""Arrays by name. The names tell the classifier, the last module: `head`."""


def initial() -> Params:
    """Return a network of two layers for digits of 8 x 8 pixels."""
    body, head = jax.random.split(jax.random.key(0))
    return {
        "body.weight": jax.random.normal(body, (PIXELS, WIDTH)) * (2 / PIXELS) ** 0.5,
        "body.bias": jnp.zeros(WIDTH),
        "head.weight": jax.random.normal(head, (WIDTH, CLASSES)) * (1 / WIDTH) ** 0.5,
        "head.bias": jnp.zeros(CLASSES),
    }


def logits(params: Params, x: Array) -> Array:
    """Return logits float32 [n, 10] of x float32 [n, 64]."""
    hidden = jax.nn.relu(x @ params["body.weight"] + params["body.bias"])
    return hidden @ params["head.weight"] + params["head.bias"]


def loss(params: Params, x: Array, y: Array) -> Array:
    """Return the mean cross-entropy."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits(params, x)), y[:, None], axis=1).mean()


@jax.jit
def step(params: Params, x: Array, y: Array, learning_rate: float) -> tuple[Params, Array]:
    """Return the parameters after a step of gradient descent, and the loss before it."""
    value, gradients = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda param, gradient: param - learning_rate * gradient, params, gradients), value


def train(
    params: Params, x: NDArray[np.float32], y: NDArray[np.int64], epochs: int, batch_size: int, learning_rate: float
) -> tuple[Params, float]:
    """Return the trained parameters, and the mean loss of the last epoch."""
    draw = np.random.default_rng()
    batches = max(1, len(y) // batch_size)
    total = 0.0
    for _ in range(epochs):
        total = 0.0
        for batch in np.array_split(draw.permutation(len(y)), batches):
            params, value = step(params, x[batch], y[batch], learning_rate)
            total += float(value)
    return params, total / batches


def test(params: Params, x: NDArray[np.float32], y: NDArray[np.int64]) -> float:
    """Return the network's accuracy."""
    return float((logits(params, x).argmax(axis=1) == y).mean())


def load_data(partition_id: int, num_partitions: int) -> tuple[NDArray[np.float32] | NDArray[np.int64], ...]:
    """Return one client's training and test data: x, y, x, y. Each client has few classes, in other proportions."""
    digits = load_digits()
    draw = np.random.default_rng(0)
    shares = draw.dirichlet(np.full(num_partitions, 0.2), size=CLASSES)
    mine = []
    for label, share in enumerate(shares):
        samples = draw.permutation(np.flatnonzero(digits.target == label))
        cuts = (np.cumsum(share)[:-1] * len(samples)).astype(int)
        mine.append(np.split(samples, cuts)[partition_id])
    indices = draw.permutation(np.concatenate(mine))
    # a client without samples would have nothing to train on
    indices = indices if len(indices) >= 8 else draw.choice(len(digits.target), 8, replace=False)
    x, y = (digits.data[indices] / 16).astype(np.float32), digits.target[indices]
    cut = max(4, len(x) * 3 // 4)
    return x[:cut], y[:cut], x[cut:], y[cut:]
