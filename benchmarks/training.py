"""Local training beside the plain PyTorch loop: seconds per step and the largest difference of the results.

python benchmarks/training.py [--short]
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from benchmarks.measure import arguments, finish, interleaved
from client_app.train import LocalTrainer
from fl_app import models, rng
from fl_app.config import RunConfig, parse
from fl_app.data import ClientData, DatasetInfo
from fl_app.layout import Model
from strategies import METHOD_PARAMS


def client_data(samples: int, side: int, channels: int) -> ClientData:
    """Random images."""
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (samples, channels, side, side), dtype=np.uint8)
    y = draw.integers(0, 10, samples)
    info = DatasetInfo(channels, side, tuple("0123456789"), samples, 1, (0.5,) * channels, (0.25,) * channels)
    return ClientData(x, y, x[:1], y[:1], info)


def plain(config: RunConfig, data: ClientData, shape: dict[str, int], start: Model) -> Model:
    """The loop everybody writes: torch.optim.SGD, float32, the same batches."""
    module = models.build(config.model, **shape)
    models.write(module, start)
    module.train()
    x, y = torch.from_numpy(data.x_train).float() / 255, torch.from_numpy(data.y_train)
    optimizer = torch.optim.SGD(module.parameters(), lr=config.learning_rate)
    generator = torch.Generator().manual_seed(rng.torch_seed(config.seed, "train", 1, 0))
    for _ in range(config.local_epochs):
        for chosen in torch.randperm(len(y), generator=generator).split(config.batch_size):
            optimizer.zero_grad()
            cross_entropy(module(x[chosen]), y[chosen]).backward()
            optimizer.step()
    return models.read(module)


def main() -> None:
    """Measure, print, check."""
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    targets = {}
    for name, side, channels, batch in (("cnn", 28, 1, 32), ("resnet8", 32, 3, 100)):
        config = parse(
            {"model": name, "local-epochs": 1, "batch-size": batch, "learning-rate": 0.01, "device": "cpu"}, METHOD_PARAMS
        )
        data = client_data(batch * (4 if options.short else 12), side, channels)
        shape = {"in_channels": channels, "num_classes": 10, "image_size": side}
        start = models.read(models.build(name, **shape))

        def ours(precision: str, config: RunConfig = config, data: ClientData = data, start: Model = start,
                 shape: dict[str, int] = shape) -> Model:  # fmt: skip
            module = models.build(config.model, **shape)
            return LocalTrainer(module, dataclasses.replace(config, precision=precision), data, 1, 0).train(start)  # type: ignore[arg-type]

        cases = {
            "plain": lambda c=config, d=data, s=shape, m=start: plain(c, d, s, m),
            "float32": lambda ours=ours: ours("float32"),
            "bfloat16": lambda ours=ours: ours("bfloat16"),
        }
        seconds = interleaved(cases, 3 if options.short else 7)
        difference = float(np.abs(ours("float32").params - cases["plain"]().params).max())
        results[name] = {"seconds": seconds, "speedup bfloat16": seconds["plain"] / seconds["bfloat16"]}
        results[f"{name}: ours / plain loop"] = seconds["float32"] / seconds["plain"]
        results[f"{name}: largest difference from the plain loop"] = difference
        targets[f"{name}: ours / plain loop"] = 1.0
        targets[f"{name}: largest difference from the plain loop"] = 1e-5
    finish(results, targets, options)


if __name__ == "__main__":
    main()
