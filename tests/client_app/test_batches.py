"""Batches of training: their sizes, order, normalisation and augmentation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as reference
from torch import nn
from torch.nn.functional import pad

from client_app.batches import (
    MAX_DEGREES,
    Batches,
    Part,
    SeededDraws,
    crop_flip,
    crop_flip_draws,
    crop_flip_rotate,
    crop_flip_rotate_draws,
    rotate,
)
from client_app.trainer import LocalTrainer
from fl_app import weights
from fl_app.data import ClientData, DatasetInfo
from tests.client_app.test_train import SIDE, bits, data_of, mlp, train, trainer, with_batchnorm
from tests.conftest import config

# sizes and order


@pytest.mark.parametrize(
    ("make", "n", "batch_size", "sizes"),
    [
        (with_batchnorm, 21, 20, [21]),
        (with_batchnorm, 41, 20, [20, 21]),
        (with_batchnorm, 40, 20, [20, 20]),
        (with_batchnorm, 22, 20, [20, 2]),
        (with_batchnorm, 1, 20, [1]),
        (with_batchnorm, 3, 1, [1, 1, 1]),
        (mlp, 21, 20, [20, 1]),
        (mlp, 1, 20, [1]),
        (mlp, 5, 100, [5]),
    ],
)
def test_batches(make: Callable[[], nn.Module], n: int, batch_size: int, sizes: list[int]) -> None:
    batches = list(trainer(make, n=n, batch_size=batch_size).data.epochs(3, "train"))
    assert [len(y) for _, _, y, _ in batches] == sizes * 3
    assert [first for first, _, _, _ in batches] == [i == 0 for i in range(len(sizes))] * 3
    epochs = [[x[:, 0, 0, 0] for _, x, _, _ in batches[e * len(sizes) : (e + 1) * len(sizes)]] for e in range(3)]
    indices = [torch.cat(epoch).mul(255).round().int().tolist() for epoch in epochs]
    assert all(sorted(epoch) == list(range(n)) for epoch in indices)
    assert [i for epoch in indices for i in epoch] == torch.cat([batch.indices for batch in batches]).tolist()
    assert n < 5 or indices[0] != indices[1]


def test_labels_stay_with_their_images() -> None:
    data = data_of(30)
    for _, x, y, _ in trainer(data=data).data.epochs(1, "train"):
        assert y.tolist() == data.y_train[x[:, 0, 0, 0].mul(255).round().long().numpy()].tolist()


@pytest.mark.parametrize(
    ("make", "n", "batch_size", "sizes"),
    [
        (with_batchnorm, 21, 20, [20]),
        (with_batchnorm, 40, 20, [20, 20]),
        (with_batchnorm, 1, 20, [1]),
        (mlp, 21, 20, [20]),
        (mlp, 59, 20, [20, 20]),
        (mlp, 19, 20, [19]),
        (mlp, 3, 1, [1, 1, 1]),
    ],
)
@pytest.mark.parametrize("augment", ["none", "crop-flip"])
def test_drop_last(make: Callable[[], nn.Module], n: int, batch_size: int, sizes: list[int], augment: str) -> None:
    batches = list(trainer(make, n=n, batch_size=batch_size, drop_last=True, augment=augment).data.epochs(40, "train"))
    assert [len(batch.y) for batch in batches] == sizes * 40
    used = [
        torch.cat([batch.indices for batch in batches[e : e + len(sizes)]]) for e in range(0, len(batches), len(sizes))
    ]
    assert all(len(set(epoch.tolist())) == sum(sizes) for epoch in used)
    # other samples are left out in every epoch
    assert set(torch.cat(used).tolist()) == set(range(n))


@pytest.mark.parametrize(
    ("make", "n", "batch_size", "sizes"),
    [
        (with_batchnorm, 41, 20, [20, 20]),
        (mlp, 41, 20, [20, 20]),
        (mlp, 42, 20, [20, 20, 2]),
        (mlp, 40, 20, [20, 20]),
        (mlp, 1, 20, [1]),
        (mlp, 3, 1, [1, 1, 1]),
    ],
)
def test_drop_single(make: Callable[[], nn.Module], n: int, batch_size: int, sizes: list[int]) -> None:
    batches = list(trainer(make, n=n, batch_size=batch_size, drop_single=True).data.epochs(40, "train"))
    assert [len(batch.y) for batch in batches] == sizes * 40
    assert set(torch.cat([batch.indices for batch in batches]).tolist()) == set(range(n))  # another one in every epoch


def test_drop_last_changes_nothing_where_batches_are_full() -> None:
    assert bits(train(n=40, drop_last=True)) == bits(train(n=40))
    assert bits(train(n=41, drop_last=True)) != bits(train(n=41))


# normalisation


def test_normalize() -> None:
    image = torch.tensor([[[[0, 51, 255]]]], dtype=torch.uint8)
    assert trainer().data.inputs(image).flatten().tolist() == pytest.approx([0, 0.2, 1])
    shifted = trainer(normalize="mean-std").data.inputs(image)  # mean 0.25, std 0.5
    assert shifted.flatten().tolist() == pytest.approx([-0.5, -0.1, 1.5])
    symmetric = trainer(normalize="symmetric").data.inputs(image)
    assert symmetric.flatten().tolist() == pytest.approx([-1, -0.6, 1])
    info = DatasetInfo(3, SIDE, ("a", "b"), 9, 9, (0.0, 0.5, 1.0), (1.0, 0.5, 0.25))
    t = LocalTrainer(
        nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), config(normalize="mean-std"), data_of(9, info=info), 1, 0
    )
    grey = torch.full((2, 3, 1, 1), 255, dtype=torch.uint8)
    assert t.data.inputs(grey)[1].flatten().tolist() == pytest.approx([1, 1, 0])  # per channel


def test_normalize_leaves_the_samples_as_they_are() -> None:
    x = np.random.default_rng(0).normal(5, 2, (6, 3)).astype(np.float32)
    y, info = np.zeros((6, 1), np.float32), DatasetInfo(3, 1, ("0",), 6, 6, (5.0, 4.0, 3.0), (2.0, 1.0, 0.5), (3,))
    options = config(task="regression", partition="iid", normalize="mean-std")
    batches = Batches(options, ClientData(x, y, x, y, info), torch.device("cpu"), round=1, client_id=0)
    parts: list[Part] = ["test", "train"]
    for part in parts:
        # each client is evaluated more than once on what it holds
        for _ in range(2):
            ((inputs, _),) = batches.in_order(part)
            assert torch.equal(inputs, torch.from_numpy((x - np.float32(info.mean)) / np.float32(info.std)))


# augmentation


@pytest.mark.parametrize(("side", "channels"), [(8, 1), (28, 1), (32, 3), (5, 2)])
def test_crop_flip_equals_a_loop(side: int, channels: int) -> None:
    x = torch.rand(20, channels, side, side)
    got = crop_flip(x, crop_flip_draws(20, side, SeededDraws(1)))
    generator = torch.Generator().manual_seed(1)
    margin = max(1, side // 8)
    top = torch.randint(0, 2 * margin + 1, (20,), generator=generator)
    left = torch.randint(0, 2 * margin + 1, (20,), generator=generator)
    flip = torch.rand(20, generator=generator) < 0.5
    padded = pad(x, (margin,) * 4)
    for i in range(20):
        crop = padded[i, :, top[i] : top[i] + side, left[i] : left[i] + side]
        assert torch.equal(got[i], crop.flip(-1) if flip[i] else crop)
    assert flip.any() and not flip.all() and got.shape == x.shape


def test_crop_flip_is_random_and_repeatable() -> None:
    x = torch.rand(50, 1, 8, 8)
    a, b, c = (crop_flip(x, crop_flip_draws(50, 8, SeededDraws(seed))) for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c) and not torch.equal(a, x)


@pytest.mark.parametrize(("side", "channels"), [(8, 1), (33, 3)])
def test_rotate_is_torchvisions(side: int, channels: int) -> None:
    x = torch.rand(6, channels, side, side)
    degrees = torch.tensor([0.0, 15, -15, 3.7, 90, 45])
    got = rotate(x, torch.deg2rad(degrees))
    for image, angle, turned in zip(x, degrees, got, strict=True):
        want = reference.rotate(image, float(angle), reference.InterpolationMode.BILINEAR)
        torch.testing.assert_close(turned, want, atol=1e-4, rtol=0)
    torch.testing.assert_close(got[0], x[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(got[4], x[4].rot90(1, (1, 2)), atol=1e-4, rtol=0)  # counterclockwise
    assert got[5, :, 0, 0].abs().max() == 0  # corners come from outside


def test_crop_flip_rotate_draws() -> None:
    draws = crop_flip_rotate_draws(5000, 32, SeededDraws(1))
    assert torch.equal(draws[:, :3], crop_flip_draws(5000, 32, SeededDraws(1)))
    degrees = draws[:, 3] / 1e6
    assert degrees.abs().max() <= MAX_DEGREES and degrees.abs().mean() == pytest.approx(MAX_DEGREES / 2, rel=0.05)
    assert degrees.mean() == pytest.approx(0, abs=0.5)
    x = torch.rand(4, 3, 32, 32)
    still = draws[:4] * torch.tensor([1, 1, 1, 0])
    torch.testing.assert_close(crop_flip_rotate(x, still), crop_flip(x, still[:, :3]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("augment", ["crop-flip", "crop-flip-rotate"])
def test_augmentation_is_for_training_only(augment: str) -> None:
    data, start = data_of(30), weights.read(mlp())
    assert trainer(data=data, augment=augment).evaluate(start) == trainer(data=data).evaluate(start)
    plain, changed = (next(trainer(data=data, augment=a).data.epochs(1, "train")) for a in ("none", augment))
    assert torch.equal(plain.indices, changed.indices) and not torch.equal(plain.x, changed.x)
    assert bits(train(augment=augment)) == bits(train(augment=augment)) != bits(train())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_on_a_gpu_are_those_on_the_cpu() -> None:
    for ours, theirs in zip(
        *(trainer(augment="crop-flip-rotate", device=d).data.epochs(2, "train") for d in ("cpu", "cuda")), strict=True
    ):
        assert torch.equal(ours.indices, theirs.indices.cpu()) and torch.equal(ours.y, theirs.y.cpu())
        torch.testing.assert_close(ours.x, theirs.x.cpu(), atol=1e-5, rtol=0)
