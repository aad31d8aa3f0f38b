"""Local training beside the plain PyTorch loop: seconds of an epoch and the difference of the results.

python -m benchmarks.training [--short]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from benchmarks.measure import arguments, finish, interleaved
from client_app.session import prepare_training
from client_app.trainer import LocalTrainer, resolve_device
from fl_app import models, rng, weights
from fl_app.config import RunConfig, parse
from fl_app.data import ClientData, DatasetInfo
from fl_app.keys import NoParams, Scalar
from fl_app.layout import Model


def client_data(samples: int, side: int, channels: int) -> ClientData:
    """Return random images."""
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (samples, channels, side, side), dtype=np.uint8)
    y = draw.integers(0, 10, samples)
    info = DatasetInfo(channels, side, tuple("0123456789"), samples, 1, (0.5,) * channels, (0.25,) * channels)
    return ClientData(x, y, x[:1], y[:1], info)


def configure(**keys: Scalar) -> RunConfig:
    """Parse keys in snake case. The method is FedAvg, which needs no import of the strategies."""
    named: dict[str, Scalar] = {name.replace("_", "-"): value for name, value in keys.items()}
    return parse({"method": "fedavg", **named}, {"fedavg": NoParams})


def plain(config: RunConfig, data: ClientData, start: Model, layout: torch.memory_format) -> Model:
    """Train by the loop that everybody writes: torch.optim.SGD, float32, the same batches."""
    device = resolve_device(config.device)
    module = models.build(config.model, **data.info.model_arguments)
    weights.write(module, start)
    module.to(device, memory_format=layout).train()  # type: ignore[call-overload]
    x = (torch.from_numpy(data.x_train).to(device).float() / 255).contiguous(memory_format=layout)
    y = torch.from_numpy(data.y_train).to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=config.learning_rate)
    generator = torch.Generator().manual_seed(rng.torch_seed(config.seed, "train", 1, 0))
    for _ in range(config.local_epochs):
        for chosen in torch.randperm(len(y), generator=generator).to(device).split(config.batch_size):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            cross_entropy(module(x[chosen]), y[chosen]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return weights.read(module)


def ours(config: RunConfig, data: ClientData, start: Model) -> Model:
    """Train the same by LocalTrainer."""
    return LocalTrainer(models.build(config.model, **data.info.model_arguments), config, data, 1, 0).train(start)


def relative(got: Model, want: Model, start: Model) -> float:
    """Return the distance between two results, in units of the training's own distance."""
    return float(np.linalg.norm(got.params - want.params) / np.linalg.norm(want.params - start.params))


def main() -> None:
    """Measure, print, check.

    Differences are checked twice. The first check compares one step with the plain loop. float32 rounds weights to 6e-8
    of their size, and one step at this learning rate is about a thousandth of that size. So a difference of 1e-4 of the
    step is rounding (measured: 1e-5). Later steps prove nothing: a rounding error moves activations across ReLU's kink,
    and after 8 steps of resnet8 the plain float32 loop itself is 7 % of the way off the same loop in float64.

    The second check therefore compares the whole epoch with the plain loop in our memory layout, channels last. Its
    convolutions sum in the same order, so only rounding may differ (measured: not a bit).
    """
    options = arguments(__doc__).parse_args()
    prepare_training(threads=1)
    results: dict[str, Any] = {}
    targets = {}
    for name, side, channels, batch in (("cnn", 28, 1, 32), ("resnet8", 32, 3, 100)):
        config = configure(model=name, local_epochs=1, batch_size=batch, learning_rate=0.01, device="cpu")
        half = dataclasses.replace(config, precision="bfloat16")
        data, one_batch = (client_data(batch * steps, side, channels) for steps in (4 if options.short else 12, 1))
        start = weights.read(models.build(name, **data.info.model_arguments))
        cases: dict[str, Callable[[], Model]] = {
            "plain": partial(plain, config, data, start, torch.contiguous_format),
            "plain, channels last": partial(plain, config, data, start, torch.channels_last),
            "float32": partial(ours, config, data, start),
            "bfloat16": partial(ours, half, data, start),
        }
        seconds = interleaved(cases, 3 if options.short else 7, short=options.short)
        results[name] = {"seconds": seconds, "speedup bfloat16": seconds["plain"] / seconds["bfloat16"]}
        one_step = plain(config, one_batch, start, torch.contiguous_format)
        checks = {
            "ours / plain loop": (seconds["float32"] / seconds["plain"], 1.0),
            "one step's difference from the plain loop": (
                relative(ours(config, one_batch, start), one_step, start),
                1e-4,
            ),
            "difference from the plain loop in channels last": (
                relative(cases["float32"](), cases["plain, channels last"](), start),
                1e-4,
            ),
        }
        for check, (value, target) in checks.items():
            results[f"{name}: {check}"], targets[f"{name}: {check}"] = value, target
    finish(results, targets, options)


if __name__ == "__main__":
    main()
