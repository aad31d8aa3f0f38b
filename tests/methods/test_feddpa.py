"""FedDPA: masks and penalties by hand, its invariants, both phases against the textbook loop, its limits bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from client_app.stored_state import StoredState
from fl_app import rng, weights
from fl_app.layout import Model
from fl_app.transport.wire import Upload, WireError
from strategies.base import ClientState, RoundContext
from strategies.baselines.feddpa import FedDPAUpdate, constraint_gradient, personal_mask
from strategies.fedobp import FedOBPUpdate
from strategies.kernels import masks
from tests.conftest import bools, f32, flat_layout
from tests.methods import halves
from tests.methods.trials import Small, another, client


@pytest.mark.parametrize(
    ("meaning", "threshold", "want"),
    [
        # Tensors of 6 and 3. Scaled: 5/6, 1/6, 4/6, 2/6, 1, 0 and 0, 1/9, 1.
        ("value", 0.4, "101010 001"),
        ("value", 0.0, "111110 011"),
        ("value", 1.0, "000000 000"),
        ("value", 0.1, "111110 011"),
        # The 0.4-quantile of six numbers lies at 0.4 * 5 = 2: the third smallest, 2. Of three at 0.8: between 0 and 1.
        ("quantile", 0.4, "101010 011"),
        ("quantile", 0.0, "111110 011"),
        ("quantile", 1.0, "000000 000"),
    ],
)
def test_masks_by_hand(meaning: str, threshold: float, want: str) -> None:
    fisher = f32(5, 1, 4, 2, 6, 0, 0, 1, 9)
    assert (personal_mask(fisher, (6, 3), threshold=threshold, meaning=meaning) == bools(want)).all()


def test_equal_values_are_not_personal() -> None:
    for meaning in ("value", "quantile"):
        got = personal_mask(f32(3, 3, 3, 0, 1, 7), (3, 2, 1), threshold=0.0, meaning=meaning)
        assert (got == bools("000 01 0")).all()


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(0, 1000),
    st.sampled_from(["value", "quantile"]),
    st.integers(-20, 20),
    st.integers(0, 2**32 - 1),
)
def test_invariants_of_masks(sizes: list[int], thousandths: int, meaning: str, power: int, seed: int) -> None:
    threshold = thousandths / 1000
    fisher = (np.random.default_rng(seed).integers(0, 6, sum(sizes)) ** 2).astype(np.float32)
    mask = personal_mask(fisher, sizes, threshold=threshold, meaning=meaning)
    scaled = personal_mask(fisher * np.float32(2.0**power), sizes, threshold=threshold, meaning=meaning)
    assert (mask == scaled).all()
    start = 0
    for size in sizes:
        layer, chosen = fisher[start : start + size].astype(np.float64), mask[start : start + size]
        if layer.min() < layer.max():
            assert not chosen[layer == layer.min()].any()
            if meaning == "value":
                assert (chosen[layer == layer.max()] == (threshold < 1)).all()
            else:
                assert (chosen == (layer > np.quantile(layer, threshold) + 1e-9)).all()
        else:
            assert not chosen.any()
        start += size


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"threshold": 1.1}, r"threshold must be in \[0, 1\]"),
        ({"meaning": "share"}, "one of value, quantile"),
        ({"sizes": (3,)}, "sizes sum to 3"),
        ({"fisher": f32(1, np.inf)}, "must be finite, got 1"),
    ],
)
def test_what_masks_refuse(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        personal_mask(**{"fisher": f32(1, 2), "sizes": (2,), "threshold": 0.4, "meaning": "value", **changes})


def test_penalties_by_hand() -> None:
    # update (3, 4), norm 5, weight 0.1. weight/2 * 5 = 0.25, slope 0.05 * (3, 4)/5 = (.03, .04).
    # |5 - 7.5| and |5 - 2.5| are 2.5, times 0.05: 0.125 both; below the bound it points outward.
    update = torch.tensor([3.0, 4.0], dtype=torch.float64)
    for bound, want in [(0.0, [0.03, 0.04]), (7.5, [-0.03, -0.04]), (2.5, [0.03, 0.04]), (5.0, [0, 0])]:
        np.testing.assert_allclose(constraint_gradient(update, 0.1, bound).numpy(), want, atol=1e-15)
        assert penalty(update, 0.1, bound).item() == pytest.approx(0.05 * abs(5 - bound))
    assert (
        not constraint_gradient(torch.zeros(3), 0.1).any() and not constraint_gradient(torch.zeros(3), 0.1, 0.5).any()
    )


def penalty(update: Tensor, weight: float, bound: float) -> Tensor:
    return weight / 2 * (update.square().sum().sqrt() - bound).abs()


@given(st.integers(1, 8), st.floats(0, 3), st.floats(0.01, 2), st.integers(0, 2**32 - 1))
def test_the_penaltys_gradient_is_its_derivative(d: int, bound: float, weight: float, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    update = (torch.randn(d, generator=random, dtype=torch.float64) + 0.01).requires_grad_()
    (want,) = torch.autograd.grad(penalty(update, weight, bound), update)
    np.testing.assert_allclose(constraint_gradient(update.detach(), weight, bound).numpy(), want.numpy(), atol=1e-12)


def textbook(ctx: RoundContext[Any], start: Model, mask: NDArray[np.bool_]) -> np.ndarray:
    """Both phases, float64, with autograd on the printed losses and gradients masked by element."""
    c, p, data = ctx.config, ctx.params, ctx.trainer.data  # type: ignore[attr-defined]
    module = Small()
    weights.write(module, start)
    module.double().train()
    origin, on_mask = torch.tensor(start.params).double(), torch.tensor(mask)
    phases = [("train-personal", on_mask, p.personal_weight, 0.0), ("train", ~on_mask, p.shared_weight, p.bound)]
    flat = origin.clone()
    for purpose, moves, weight, bound in phases if mask.any() else phases[1:]:
        generator = torch.Generator().manual_seed(rng.torch_seed(c.seed, purpose, 1, 0))
        velocity = torch.zeros_like(flat)
        for _ in range(c.local_epochs):
            for batch in torch.randperm(ctx.num_samples, generator=generator).split(c.batch_size):
                x, y = data.chosen(batch)
                torch.nn.utils.vector_to_parameters(flat, module.parameters())
                module.zero_grad()
                cross_entropy(module(x.double()), y).backward()
                gradient = torch.cat([q.grad.reshape(-1) for q in module.parameters() if q.grad is not None])
                update = (flat - origin)[moves].requires_grad_()
                if update.detach().any():
                    gradient[moves] += torch.autograd.grad(penalty(update, weight, bound), update)[0]
                velocity = c.momentum * velocity + (gradient + c.weight_decay * flat) * moves
                flat = flat - c.learning_rate * velocity
    return flat.numpy()


@pytest.mark.parametrize("nobody", [False, True])
def test_both_phases_against_the_textbook_loop(nobody: bool) -> None:
    heavy = {"personal_weight": 0.5, "shared_weight": 0.8, "bound": 2.0}
    ctx = client("feddpa", momentum=0.5, weight_decay=0.01, local_epochs=2, learning_rate=0.05, feddpa=heavy)
    start = ctx.initial()
    mask = np.random.default_rng(3).random(ctx.layout.d) < (0 if nobody else 0.3)
    state = StoredState({"feddpa.own": start.params, "feddpa.mask": masks.pack(mask)})
    after = FedDPAUpdate().train(start, state, ctx)
    np.testing.assert_allclose(after.params, textbook(ctx, start, mask), rtol=1e-3, atol=3e-6)


def test_the_phases_leave_each_other_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = client("feddpa", momentum=0.9, weight_decay=0.1)
    start = ctx.initial()
    mask = np.random.default_rng(0).random(ctx.layout.d) < 0.3
    phases: list[tuple[Model, Model]] = []
    train = ctx.trainer.train

    def record(begin: Model, **how: Any) -> Model:
        phases.append((begin, train(begin, **how)))
        return phases[-1][1]

    monkeypatch.setattr(ctx.trainer, "train", record)
    FedDPAUpdate().train(start, StoredState({"feddpa.own": start.params, "feddpa.mask": masks.pack(mask)}), ctx)
    (before, middle), (again, after) = phases
    assert before is start and again is middle
    assert (middle.params == start.params)[~mask].all() and (middle.params != start.params)[mask].any()
    assert (after.params == middle.params)[mask].all() and (after.params != middle.params)[~mask].any()


def test_participations_in_turn() -> None:
    ctx = client("feddpa", feddpa={"threshold": 0.2})
    update, state, start = FedDPAUpdate(), StoredState(), ctx.initial()
    assert update.merge(start, state, ctx) is start
    first = update.train(start, state, ctx)
    mask = masks.unpack(state.arrays["feddpa.mask"], ctx.layout.d)
    assert 0 < mask.sum() < ctx.layout.d / 2
    fisher = ctx.trainer.fisher(first)
    assert (mask == personal_mask(fisher, ctx.layout.sizes, threshold=0.2, meaning="value")).all()
    assert sum(a.nbytes for a in state.arrays.values()) == 4 * ctx.layout.d + -(-ctx.layout.d // 8)
    received = another(first, 1)
    merged = update.merge(received, state, ctx)
    assert (merged.params == first.params)[mask].all() and (merged.params == received.params)[~mask].all()
    upload = update.upload(merged, first, state, ctx)
    assert upload.model is first and upload.mask is None
    assert upload.metrics["personal-share"] == mask.sum() / ctx.layout.d


def test_fisher_samples_by_hand() -> None:
    # F is the mean over samples of squared gradients, in evaluation mode: of two drawn ones, half the sum of both squares.
    ctx = client("feddpa", feddpa={"fisher_samples": 2, "constraint": "none"})
    trainer = ctx.trainer
    update, state = FedDPAUpdate(), StoredState()
    after = update.train(ctx.initial(), state, ctx)
    chosen = rng.generator(ctx.config.seed, "fisher", 1, 0).choice(20, 2, replace=False)
    trainer.load(after)
    trainer.module.eval()
    squares = np.zeros(ctx.layout.d)
    for i in chosen:
        trainer.differentiate(*trainer.samples(np.array([i])), counted=False)
        squares += trainer.vector(trainer.gradient).astype(np.float64) ** 2 / 2
    want = personal_mask(squares, ctx.layout.sizes, threshold=0.4, meaning="value")
    assert (masks.unpack(state.arrays["feddpa.mask"], ctx.layout.d) == want).all()


def test_without_constraint_it_is_fedobp_with_this_mask() -> None:
    class WithThisMask(FedOBPUpdate):
        def mask(self, own: Model, start: Model, state: ClientState, ctx: RoundContext[Any]) -> NDArray[np.bool_]:
            fisher = ctx.trainer.fisher(own)
            return personal_mask(fisher, ctx.layout.sizes, threshold=0.1, meaning="value")

    ours = client("feddpa", feddpa={"constraint": "none", "threshold": 0.1}, momentum=0.5)
    theirs = client("fedobp", momentum=0.5)
    a, b, model = StoredState(), StoredState(), ours.initial()
    for seed in range(3):
        received = another(model, seed)
        starts = FedDPAUpdate().merge(received, a, ours), WithThisMask().merge(received, b, theirs)
        assert starts[0].params.tobytes() == starts[1].params.tobytes()
        model = FedDPAUpdate().train(starts[0], a, ours)
        assert model.params.tobytes() == WithThisMask().train(starts[1], b, theirs).params.tobytes()


def test_shares_that_are_none_are_refused() -> None:
    strategy, model = halves.server("feddpa", flat_layout([2])), Model(f32(0, 0), f32())
    strategy.check(Upload(model, metrics={"personal-share": 0.5}))
    with pytest.raises(WireError, match="personal-share"):
        strategy.check(Upload(model, metrics={"personal-share": 2.0}))
