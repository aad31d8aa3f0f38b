"""Model, data and training loop: nothing here knows Flower or Corolla."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A network of two layers for digits of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits float32 [n, 10] of x float32 [n, 64]."""
        logits: torch.Tensor = self.head(torch.relu(self.norm(self.body(x))))
        return logits


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Return one client's training and test data. Each client has few classes, in other proportions."""
    digits = load_digits()
    draw = np.random.default_rng(0)
    shares = draw.dirichlet(np.full(num_partitions, 0.2), size=10)
    mine = []
    for label, share in enumerate(shares):
        samples = draw.permutation(np.flatnonzero(digits.target == label))
        cuts = (np.cumsum(share)[:-1] * len(samples)).astype(int)
        mine.append(np.split(samples, cuts)[partition_id])
    indices = draw.permutation(np.concatenate(mine))
    # a client without samples would have nothing to train on
    indices = indices if len(indices) >= 8 else draw.choice(len(digits.target), 8, replace=False)
    x, y = torch.tensor(digits.data[indices] / 16, dtype=torch.float32), torch.tensor(digits.target[indices])
    cut = max(4, len(x) * 3 // 4)
    train, test = TensorDataset(x[:cut], y[:cut]), TensorDataset(x[cut:], y[cut:])
    return DataLoader(train, batch_size, shuffle=True, drop_last=len(train) > batch_size), DataLoader(test, 256)


def train(net: nn.Module, data: DataLoader, epochs: int, learning_rate: float) -> float:
    """Train the network in place, and return the mean loss of the last epoch."""
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=learning_rate)
    loss_of = nn.CrossEntropyLoss()
    total = 0.0
    for _ in range(epochs):
        total = 0.0
        for x, y in data:
            optimizer.zero_grad()
            loss = loss_of(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / max(1, len(data))


def test(net: nn.Module, data: DataLoader) -> tuple[float, float]:
    """Return the network's mean loss and its accuracy."""
    net.eval()
    loss_of = nn.CrossEntropyLoss(reduction="sum")
    total, right, seen = 0.0, 0, 0
    with torch.no_grad():
        for x, y in data:
            outputs = net(x)
            total += loss_of(outputs, y).item()
            right += int((outputs.argmax(1) == y).sum())
            seen += len(y)
    return total / max(1, seen), right / max(1, seen)
