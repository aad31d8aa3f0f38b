"""A small convolutional network for series [T, C]."""

from __future__ import annotations

from torch import Tensor, nn


class Series(nn.Module):
    """Two convolutions over time, their mean, a classifier."""

    def __init__(self, channels: int, outputs: int) -> None:
        """Build it for so many channels and outputs."""
        super().__init__()
        self.first = nn.Conv1d(channels, 8, 5, padding=2)
        self.second = nn.Conv1d(8, 16, 5, padding=2)
        self.classifier = nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [n, outputs] for series [n, T, C]."""
        hidden = self.second(self.first(x.transpose(1, 2)).relu()).relu()
        logits: Tensor = self.classifier(hidden.mean(dim=2))
        return logits


def build(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Return the network; of series, in_channels is C and image_size T."""
    return Series(in_channels, num_classes)
