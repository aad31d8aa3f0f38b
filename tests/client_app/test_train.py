from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from client_app.flat import set_mode
from client_app.trainer import LocalTrainer
from fl_app import models, rng, weights
from fl_app.config import RunConfig
from fl_app.data import ClientData, DatasetInfo
from fl_app.layout import Layout, Model
from tests.conftest import config, f32

SIDE, CLASSES = 8, 3
INFO = DatasetInfo(1, SIDE, ("a", "b", "c"), 100, 100, (0.25,), (0.5,))


def data_of(n: int, num_test: int = 7, info: DatasetInfo = INFO) -> ClientData:
    """Random images; the first pixel of a training image is its index."""
    random = np.random.default_rng(0)
    shape = (info.in_channels, info.image_size, info.image_size)
    x = random.integers(0, 256, (n, *shape), np.uint8)
    x[:, 0, 0, 0] = np.arange(n)
    x_test = random.integers(0, 256, (num_test, *shape), np.uint8)
    k = info.num_classes
    return ClientData(x, random.integers(0, k, n), x_test, random.integers(0, k, num_test), info)


def mlp() -> nn.Module:
    return models.build("mlp", in_channels=1, num_classes=CLASSES, image_size=SIDE)


def with_batchnorm() -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.BatchNorm1d(8)]
    return nn.Sequential(*body, nn.Linear(8, CLASSES))


def with_dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, CLASSES))


def trainer(
    make: Callable[[], nn.Module] = mlp,
    n: int = 30,
    round: int = 1,
    client_id: int = 0,
    data: ClientData | None = None,
    **changes: Any,
) -> LocalTrainer:
    return LocalTrainer(make(), config(**changes), data or data_of(n), round, client_id)


def bits(model: Model) -> bytes:
    return model.params.tobytes() + model.buffers.tobytes()


def train(make: Callable[[], nn.Module] = mlp, **changes: Any) -> Model:
    return trainer(make, **changes).train(weights.read(make()))


# training


@pytest.mark.parametrize("count", [1, 4, 9])
def test_some_batches_are_the_first_of_as_many_epochs_as_they_take(count: int) -> None:
    one, start = trainer(momentum=0.5, local_epochs=1), weights.read(mlp())  # four batches an epoch
    got = one.train(start, max_batches=count, epochs=1)
    assert one.steps == count and math.isfinite(one.last_loss)
    many = trainer(momentum=0.5, local_epochs=3)
    many.load(start)
    optimizer = many.optimizer(many.weights)
    for k, (x, y) in enumerate(many.batches(3)):
        if k < count:
            many.differentiate(x, y)
            optimizer.step(many.gradient, many.learning_rate)
    assert bits(many.read()) == bits(got)


def plain_sgd(module: nn.Module, c: RunConfig, data: ClientData, round: int, client_id: int) -> Model:
    """The textbook loop: torch.optim.SGD, one permutation per epoch from the generator of (seed, round, client id)."""
    lr = c.learning_rate * c.learning_rate_decay ** (round - 1)
    optimizer = torch.optim.SGD(module.parameters(), lr, momentum=c.momentum, weight_decay=c.weight_decay)
    generator = torch.Generator().manual_seed(rng.torch_seed(c.seed, "train", round, client_id))
    x, y = torch.tensor(data.x_train) / 255, torch.tensor(data.y_train)
    if c.normalize == "mean-std":
        x = (x - data.info.mean[0]) / data.info.std[0]
    module.train()
    for _ in range(c.local_epochs):
        order = torch.randperm(len(y), generator=generator)
        for batch in order.split(c.batch_size):
            optimizer.zero_grad()
            cross_entropy(module(x[batch]), y[batch]).backward()
            optimizer.step()
    return weights.read(module)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"momentum": 0.9},
        {"weight_decay": 0.01},
        {"momentum": 0.9, "weight_decay": 0.01},
        {"learning_rate_decay": 0.5},
        {"batch_size": 1},
        {"batch_size": 100},
        {"seed": 5},
        {"normalize": "mean-std"},
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [mlp, with_batchnorm])
def test_training_is_plain_sgd(make: Callable[[], nn.Module], changes: dict[str, Any]) -> None:
    if make is with_batchnorm and changes == {"batch_size": 1}:
        pytest.skip("plain torch cannot: BatchNorm on one sample")
    c, data = config(local_epochs=3, **changes), data_of(30)
    start = weights.read(make())
    got = LocalTrainer(make(), c, data, 3, 4).train(start)
    want = plain_sgd(make(), c, data, 3, 4)
    # float32 rounding alone: our step adds in another order; differences grow over the 3 epochs to 1e-6 of values around 1
    np.testing.assert_allclose(got.params, want.params, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(got.buffers, want.buffers, rtol=1e-4, atol=2e-6)
    assert np.abs(got.params - start.params).max() > 1e-3


@pytest.mark.parametrize("model", ["cnn", "resnet8"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_convolutional_networks_train_as_in_the_plain_loop(model: str, layout: torch.memory_format) -> None:
    """One step in the usual layout, three in ours; why not more: benchmarks/training.py."""
    info = DatasetInfo(3, 16, ("a", "b", "c"), 100, 100, (0.25,) * 3, (0.5,) * 3)
    steps = 1 if layout == torch.contiguous_format else 3
    c, data = config(batch_size=20, local_epochs=1, learning_rate=0.01), data_of(20 * steps, info=info)

    def make() -> nn.Module:
        return models.build(model, in_channels=3, num_classes=CLASSES, image_size=16)

    start = weights.read(make())
    got = LocalTrainer(make(), c, data, 1, 0).train(start)
    want = plain_sgd(make().to(memory_format=layout), c, data, 1, 0)  # type: ignore[call-overload]
    # float32 holds a weight to 6e-8 of its size, and a step is about a thousandth of it: 1e-4 of the way is rounding
    way = np.linalg.norm(want.params - start.params)
    assert np.linalg.norm(got.params - want.params) < 1e-4 * way
    np.testing.assert_allclose(got.buffers, want.buffers, rtol=1e-4, atol=1e-6)


def test_one_step_by_hand() -> None:
    # One linear layer, all zero, 3 classes, one sample of class 2: p = 1/3 each, so the bias' gradient is p - onehot.
    x = np.full((1, 1, 8, 8), 51, np.uint8)
    data = ClientData(x, np.array([2]), x[:0], np.zeros(0, int), INFO)

    def linear() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

    t = trainer(linear, data=data, learning_rate=0.3)
    after = t.train(Model(np.zeros(195, np.float32), np.zeros(0, np.float32)))
    np.testing.assert_allclose(after.params[-3:], [-0.1, -0.1, 0.2], atol=1e-7)
    np.testing.assert_allclose(
        after.params[:-3].reshape(3, 64), np.outer([-0.1, -0.1, 0.2], [51 / 255] * 64), atol=1e-7
    )
    assert t.last_loss == pytest.approx(math.log(3))

    # mu = 3 and center 0.5: adds 3 * (0 - 0.5) = -1.5 to every gradient, so +0.45 to every weight after one step.
    pulled = t.train(Model(np.zeros(195, np.float32), f32()), correction=lambda w, g: g.add_(w - 0.5, alpha=3.0))
    np.testing.assert_allclose(pulled.params, after.params + 0.45, atol=1e-6)


def test_training_leaves_its_start_alone_and_returns_copies() -> None:
    t, start = trainer(with_batchnorm), weights.read(with_batchnorm())
    before = bits(start)
    first = t.train(start)
    kept = bits(first)
    t.train(first)
    assert bits(start) == before and bits(first) == kept


def test_loss_is_the_last_epochs_mean() -> None:
    data = data_of(30)
    same = ClientData(data.x_train, data.y_train, data.x_train, data.y_train, INFO)
    # 30 = 8 + 8 + 8 + 6: a weighted mean
    t = trainer(data=same, learning_rate=1e-12, batch_size=8, local_epochs=2)
    start = weights.read(mlp())
    t.train(start)
    assert t.last_loss == pytest.approx(t.evaluate(start)[0], rel=1e-5)


def test_epochs_can_be_chosen() -> None:
    t, start = trainer(local_epochs=2), weights.read(mlp())
    two = bits(t.train(start))
    assert bits(t.train(start, epochs=2)) == two != bits(t.train(start, epochs=1))


# randomness


@pytest.mark.parametrize("make", [mlp, with_batchnorm, with_dropout])
@pytest.mark.parametrize("augment", ["none", "crop-flip"])
def test_same_seed_same_bits(make: Callable[[], nn.Module], augment: str) -> None:
    def run(**changes: Any) -> bytes:
        torch.rand(3)  # whatever was drawn before
        return bits(train(make, augment=augment, local_epochs=2, **changes))

    once = run()
    assert run() == once
    assert run(client_id=1) != once and run(round=2) != once and run(seed=1) != once


def test_purposes_are_other_streams() -> None:
    t, start = trainer(), weights.read(mlp())
    assert bits(t.train(start)) != bits(t.train(start, purpose="finetune"))


@pytest.mark.parametrize(
    ("given", "rate"), [({}, 0.1), ({"finetune_learning_rate": 0.02}, 0.02)], ids=["undecayed", "its own"]
)
@pytest.mark.parametrize("decayed", [{"schedule": "cosine"}, {"learning_rate_decay": 0.5}], ids=str)
def test_fine_tuning_has_a_learning_rate_of_its_own(
    given: dict[str, float], rate: float, decayed: dict[str, Any]
) -> None:
    start, settings = weights.read(mlp()), {"num_server_rounds": 4, "learning_rate": 0.1}
    t = trainer(round=3, **settings, **decayed, **given)
    # cosine: (1 + cos(pi / 2)) / 2; decay: 0.5 ** 2
    assert t.learning_rate == pytest.approx(0.1 * (0.5 if "schedule" in decayed else 0.25))
    t.begin_finetuning()
    assert t.learning_rate == rate
    constant = trainer(round=3, **{**settings, "learning_rate": rate})
    assert bits(t.train(start, purpose="finetune")) == bits(constant.train(start, purpose="finetune"))


def test_training_twice_in_one_process_is_the_same() -> None:
    t, start = trainer(with_dropout), weights.read(with_dropout())
    assert bits(t.train(start)) == bits(t.train(start))


# batches of one sample


@pytest.mark.parametrize(("n", "batch_size"), [(1, 20), (21, 20), (3, 1)])
def test_batchnorm_with_single_samples_trains(n: int, batch_size: int) -> None:
    start = weights.read(with_batchnorm())
    after = train(with_batchnorm, n=n, batch_size=batch_size, local_epochs=2)
    assert np.isfinite(after.params).all() and np.isfinite(after.buffers).all()
    assert (after.params != start.params).any()
    # one sample has no variance to learn
    assert (after.buffers == start.buffers).all() == (n == 1 or batch_size == 1)


def test_batchnorm_learns_again_after_a_single_sample() -> None:
    t = trainer(with_batchnorm, n=1)
    t.train(weights.read(with_batchnorm()))
    assert all(m.training for m in t.flat.batchnorms)


# frozen tensors


@pytest.mark.parametrize("changes", [{}, {"momentum": 0.9, "weight_decay": 0.1}], ids=str)
def test_frozen_tensors_do_not_change(changes: dict[str, Any]) -> None:
    layout, start = Layout.of(with_batchnorm()), weights.read(with_batchnorm())
    frozen = layout.names - layout.classifier
    t = trainer(with_batchnorm, **changes)
    after = t.train(start, frozen=frozen)
    still = layout.indices(frozen)
    assert (after.params[still] == start.params[still]).all() and (after.buffers == start.buffers).all()
    assert (after.params[~still] != start.params[~still]).any()
    # ... nor under a proximal term, and all train again afterwards
    assert (
        t.train(start, frozen=frozen, correction=lambda w, g: g.add_(w - 9)).params[still] == start.params[still]
    ).all()
    assert (t.train(start).params[still] != start.params[still]).any()


@pytest.mark.parametrize("changes", [{}, {"momentum": 0.9, "weight_decay": 0.1}], ids=str)
def test_parameters_a_users_model_freezes_never_change(changes: dict[str, Any]) -> None:
    def half_frozen() -> nn.Module:
        module = mlp()
        next(module.parameters()).requires_grad_(False)
        return module

    t, start = trainer(half_frozen, **changes), weights.read(half_frozen())
    size = t.layout.params[0].size
    # a second training with the same trainer too
    for _ in range(2):
        after = t.train(start)
        assert (after.params[:size] == start.params[:size]).all()
        assert (after.params[size:] != start.params[size:]).any()
    layout = t.layout
    assert (t.train(start, frozen=layout.classifier).params[:size] == start.params[:size]).all()


# sides in turn


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_alternating_equals_the_textbook_loop_with_an_optimizer_per_side(momentum: float) -> None:
    """Torch's SGD on masked gradients, one velocity and one stream per side."""
    c, data = config(local_epochs=3, momentum=momentum), data_of(30)
    layout, start = Layout.of(mlp()), weights.read(mlp())
    chosen = np.random.default_rng(0).random(layout.d) < 0.3
    got = LocalTrainer(mlp(), c, data, 1, 0).alternate(start, {"train-personal": ~chosen, "train": chosen})

    flat = torch.tensor(start.params)
    velocities = {name: torch.zeros_like(flat) for name in ("train-personal", "train")}
    streams = {name: torch.Generator().manual_seed(rng.torch_seed(c.seed, name, 1, 0)) for name in velocities}
    x, y = torch.tensor(data.x_train) / 255, torch.tensor(data.y_train)
    module = mlp()
    for _ in range(3):
        for name, moves in (("train-personal", chosen), ("train", ~chosen)):
            for batch in torch.randperm(30, generator=streams[name]).split(c.batch_size):
                torch.nn.utils.vector_to_parameters(flat, module.parameters())
                module.zero_grad()
                cross_entropy(module(x[batch]), y[batch]).backward()
                gradient = torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])
                velocities[name] = momentum * velocities[name] + gradient * torch.tensor(moves)
                flat = flat - c.learning_rate * velocities[name]
    np.testing.assert_allclose(got.params, flat.numpy(), rtol=1e-4, atol=2e-6)


def test_one_side_alone_is_plain_training() -> None:
    t, start = trainer(with_batchnorm, momentum=0.9, local_epochs=2), weights.read(with_batchnorm())
    nothing = np.zeros(t.layout.d, bool)
    assert bits(t.alternate(start, {"train": nothing})) == bits(t.train(start))
    assert t.steps == 2 * len(t.data._bounds())
    assert bits(t.alternate(start, {"a": ~nothing, "train": nothing}, epochs=1)) != bits(start)
    assert all(p.requires_grad for p in t.module.parameters())


# evaluation


def test_evaluate_by_hand() -> None:
    # A linear layer that says class 0 with logit 1: 3 of the 4 labels are 0.
    x, y = np.zeros((4, 1, 8, 8), np.uint8), np.array([0, 0, 0, 1])
    data = ClientData(x, y, x, y, INFO)
    t = trainer(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), data=data)
    params = np.zeros(195, np.float32)
    params[-3] = 1
    loss, accuracy = t.evaluate(Model(params, np.zeros(0, np.float32)))
    normalizer = math.log(math.e + 2)
    assert accuracy == 0.75
    assert loss == pytest.approx((3 * (normalizer - 1) + normalizer) / 4, rel=1e-6)


def test_evaluate_in_batches_equals_all_at_once() -> None:
    data = data_of(4, num_test=1200)
    model, module = weights.read(with_batchnorm()), with_batchnorm().eval()
    loss, accuracy = trainer(with_batchnorm, data=data).evaluate(model)
    with torch.no_grad():
        logits = module(torch.tensor(data.x_test) / 255)
    y = torch.tensor(data.y_test)
    assert accuracy == (logits.argmax(1) == y).sum().item() / 1200
    assert loss == pytest.approx(cross_entropy(logits, y).item(), rel=1e-5)


def test_evaluate_without_test_data_is_nan() -> None:
    t = trainer(data=data_of(5, num_test=0))
    assert all(math.isnan(value) for value in t.evaluate(weights.read(mlp())))


def test_evaluating_does_not_change_training() -> None:
    start = weights.read(with_batchnorm())
    alone = bits(trainer(with_batchnorm).train(start))
    t = trainer(with_batchnorm)
    before = bits(start)
    t.evaluate(start)
    assert bits(start) == before
    assert bits(t.train(start)) == alone


def test_the_mode_is_set_as_torch_sets_it() -> None:
    class Frozen(nn.Sequential):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), Frozen(nn.Dropout(), nn.Linear(2, 2)), nn.Sequential(nn.BatchNorm1d(2)))

    ours, torchs = network(), network()
    for training in (False, True, False):
        set_mode(ours, training)
        torchs.train(training)
        modes = [module.training for module in ours.modules()]
        assert modes == [module.training for module in torchs.modules()]
        assert modes[0] == training and not modes[2]
