"""Model, data and training: nothing here knows Flower or Corolla."""

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier

CLASSES = np.arange(10)


def model() -> SGDClassifier:
    """Return a linear classifier of digits whose coefficients are all zero."""
    classifier = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=0.05, alpha=0.0, random_state=0)
    classifier.classes_ = CLASSES
    classifier.coef_, classifier.intercept_ = np.zeros((len(CLASSES), 64)), np.zeros(len(CLASSES))
    return classifier


def load_data(partition_id: int, num_partitions: int) -> tuple[NDArray[np.float64], ...]:
    """Return one client's training and test data: x, y, x, y. Each client has few classes, in other proportions."""
    digits = load_digits()
    draw = np.random.default_rng(0)
    shares = draw.dirichlet(np.full(num_partitions, 0.2), size=len(CLASSES))
    mine = []
    for label, share in enumerate(shares):
        samples = draw.permutation(np.flatnonzero(digits.target == label))
        cuts = (np.cumsum(share)[:-1] * len(samples)).astype(int)
        mine.append(np.split(samples, cuts)[partition_id])
    indices = draw.permutation(np.concatenate(mine))
    # a client without samples would have nothing to train on
    indices = indices if len(indices) >= 8 else draw.choice(len(digits.target), 8, replace=False)
    x, y = digits.data[indices] / 16, digits.target[indices]
    cut = max(4, len(x) * 3 // 4)
    return x[:cut], y[:cut], x[cut:], y[cut:]
