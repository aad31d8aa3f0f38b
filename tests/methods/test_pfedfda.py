"""pFedFDA: its kernels by hand and as properties, the frozen head, the edges, the server's means."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from client_app.stored_state import StoredState
from fl_app.errors import MethodError, UserError
from fl_app.layout import Layout, Model
from fl_app.server.run_folder import read_metrics
from fl_app.transport.wire import Upload, WireError
from strategies import METHODS
from strategies.base import RoundContext
from strategies.baselines.pfedfda import (
    Gaussians,
    PFedFDAParams,
    PFedFDAUpdate,
    Validation,
    adapt,
    best_pair,
    best_single,
    class_prior,
    interpolate,
    lda_head,
    local_gaussian,
    stratified_folds,
    symmetric,
    triangle,
)
from tests.conftest import Run, f32
from tests.facts import rejected
from tests.methods import halves
from tests.methods.one_client import client, same, samples, small

seeds = st.integers(0, 10_000)


def drawn(seed: int, n: int = 20, classes: int = 3, k: int = 4) -> tuple[np.ndarray, np.ndarray, Gaussians]:
    """Features of different classes, and shared Gaussians that are not theirs."""
    draw = np.random.default_rng(seed)
    y = draw.integers(0, classes, n)
    z = draw.normal(size=(n, k)) + draw.normal(size=(classes, k))[y]
    root = draw.normal(size=(k, k))
    return z, y, Gaussians(draw.random((classes, k)), root @ root.T + 0.1 * np.eye(k))


def test_prior_by_hand() -> None:
    # shares 3/4, 1/4, 0, each + 0.1, over their sum 1.3
    got = class_prior(np.array([3, 1, 0]), eps=0.1)
    np.testing.assert_allclose(got, [0.85 / 1.3, 0.35 / 1.3, 0.1 / 1.3], rtol=0, atol=1e-15)
    assert math.log(class_prior(np.array([5, 0]), eps=1e-4)[1]) == pytest.approx(math.log(1e-4 / (1 + 2e-4)), abs=1e-12)


def test_local_gaussian_by_hand() -> None:
    # class 0 has three samples, more than 2: their mean (2, 1). Class 1 has two: the given mean (0, 1). Class 2 has none.
    # Differences (-1, -1), (1, -1), (0, 2) and (1, 0), (-1, 2): sum of products [[4, -2], [-2, 10]], over n - 1 = 4, + 1/2 I.
    z = np.array([[1.0, 0], [3, 0], [2, 3], [1, 1], [-1, 3]])
    y = np.array([0, 0, 0, 1, 1])
    given_means = np.array([[9.0, 9], [0, 1], [5, 6]])
    means, covariance = local_gaussian(z, y, given_means, least=2, ridge=0.5)
    assert means.tolist() == [[2, 1], [0, 1], [5, 6]] and given_means[0, 0] == 9
    np.testing.assert_allclose(covariance, [[1.5, -0.5], [-0.5, 3]], rtol=0, atol=1e-15)
    means, _ = local_gaussian(z, y, given_means, least=1, ridge=0.5)
    assert means[1].tolist() == [0, 2]
    _, alone = local_gaussian(z[:1], y[:1], given_means, least=2, ridge=1.0)  # one sample: over 1
    np.testing.assert_allclose(alone, [[65, 72], [72, 82]], rtol=0, atol=1e-15)


def test_head_by_hand() -> None:
    # Sigma = diag(2, 4), eps 1/2: S = diag(1, 2) + 1/2 * 6/2 I = diag(2.5, 3.5); H = mu / diag, c = -1/2 (mu . H) + log pi
    means, prior = np.array([[5.0, 0], [0, 7]]), np.array([0.25, 0.75])
    weight, bias = lda_head(means, np.diag([2.0, 4.0]), prior, eps=0.5)
    np.testing.assert_allclose(weight, [[2, 0], [0, 2]], rtol=0, atol=1e-15)
    np.testing.assert_allclose(bias, [-5 + math.log(0.25), -7 + math.log(0.75)], rtol=0, atol=1e-14)
    assert weight.dtype == bias.dtype == np.float64


@pytest.mark.parametrize("bad", [np.diag([1.0, -1]), np.diag([1.0, np.nan]), np.full((2, 2), np.inf)])
def test_what_is_no_covariance_is_an_error(bad: np.ndarray) -> None:
    with pytest.raises(ValueError):  # LinAlgError is one
        lda_head(np.ones((2, 2)), bad, np.full(2, 0.5), eps=1e-4)


@given(seeds)
def test_with_unit_covariance_and_equal_classes_the_nearest_mean_wins(seed: int) -> None:
    z, _, shared = drawn(seed)
    weight, bias = lda_head(shared.means, np.eye(4), np.full(3, 1 / 3), eps=1e-4)
    distances = ((z[:, None] - shared.means) ** 2).sum(axis=2)
    assert (np.argmax(z @ weight.T + bias, axis=1) == distances.argmin(axis=1)).all()


@given(seeds)
def test_logits_are_log_densities_up_to_a_constant_over_classes(seed: int) -> None:
    z, _, (means, covariance) = drawn(seed)
    prior, eps = np.array([0.2, 0.5, 0.3]), 1e-2
    weight, bias = lda_head(means, covariance, prior, eps=eps)
    inside = (1 - eps) * covariance + eps * np.trace(covariance) / 4 * np.eye(4)
    difference = z[:, None] - means
    log_density = -0.5 * np.einsum("nci,ij,ncj->nc", difference, np.linalg.inv(inside), difference) + np.log(prior)
    off = z @ weight.T + bias - log_density
    assert np.ptp(off, axis=1).max() <= 1e-9 * max(1, np.abs(log_density).max())


@given(seeds, st.integers(2, 4))
def test_folds_are_stratified_and_those_of_scikit_learn_in_number(seed: int, folds: int) -> None:
    from sklearn.model_selection import StratifiedKFold

    y = np.repeat([0, 1, 2], np.random.default_rng(seed).integers(folds, 9, 3))
    fold = stratified_folds(y, folds, np.random.default_rng(seed))
    splitter = StratifiedKFold(folds, shuffle=True, random_state=0).split(y, y)
    theirs = sorted(np.bincount(y[test], minlength=3).tolist() for _, test in splitter)
    assert sorted(np.bincount(y[fold == f], minlength=3).tolist() for f in range(folds)) == theirs
    assert stratified_folds(y, folds, np.random.default_rng(seed)).tolist() == fold.tolist()


def test_best_single_looks_at_both_ends_and_takes_the_smallest_of_equals() -> None:
    assert best_single(lambda beta: 1.0) == 0.0
    assert best_single(lambda beta: beta) == 0.0 and best_single(lambda beta: -beta) == 1.0
    assert best_single(lambda beta: (beta - 0.3) ** 2) == pytest.approx(0.3, abs=1e-3)
    assert best_pair(lambda b: (b[0] - 0.2) ** 2 + (b[1] - 2) ** 2) == pytest.approx((0.2, 1.0), abs=1e-4)


def validation(seed: int, order: np.ndarray | None = None) -> Validation:
    z, y, shared = drawn(seed)
    fold = stratified_folds(y, 2, np.random.default_rng(seed))
    order = np.arange(len(z)) if order is None else order
    prior = class_prior(np.bincount(y, minlength=3), eps=1e-4)
    return Validation(z[order], y[order], fold[order], shared, prior, least=2, ridge=1.0, eps=1e-4)


@given(seeds)
def test_the_order_of_samples_does_not_matter_if_their_folds_move_along(seed: int) -> None:
    order = np.random.default_rng(seed + 1).permutation(20)
    for betas in ((0.0, 0.0), (0.4, 0.4), (1.0, 0.2)):
        assert validation(seed, order).loss(betas) == pytest.approx(validation(seed).loss(betas), abs=1e-12)


def test_validation_loss_is_the_cross_entropy_of_a_linear_classifier() -> None:
    checked = validation(0)
    total = 0.0
    for f in (0, 1):
        here = checked.fold == f
        own = Gaussians(*local_gaussian(checked.z[~here], checked.y[~here], checked.shared.means, least=2, ridge=1.0))
        mixed = interpolate(own, checked.shared, (0.3, 0.3))
        weight, bias = (torch.from_numpy(a) for a in lda_head(*mixed, checked.prior, eps=1e-4))
        logits = torch.from_numpy(checked.z[here]) @ weight.T + bias
        total += float(nn.functional.cross_entropy(logits, torch.from_numpy(checked.y[here]), reduction="sum"))
    assert checked.loss((0.3, 0.3)) == pytest.approx(total / 20, abs=1e-12)


@given(seeds)
def test_adapted_gaussians_are_no_worse_than_both_ends_and_proper(seed: int) -> None:
    z, y, shared = drawn(seed)
    adapted, betas = adapt(z, y, shared, PFedFDAParams(), np.random.default_rng(seed))
    assert betas[0] == betas[1] and 0 <= betas[0] <= 1
    np.testing.assert_array_equal(adapted.covariance, adapted.covariance.T)
    assert np.linalg.eigvalsh(adapted.covariance).min() > 0
    if (np.bincount(y) >= 2).all():
        loss = validation(seed).loss
        assert loss(betas) <= min(loss((0, 0)), loss((1, 1)))


def test_classes_of_as_many_samples_as_folds_are_validated_on() -> None:
    z, _, shared = drawn(1, n=9)
    y = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2])
    # of the class of one sample there are no folds
    for twos in (y, np.array([0, 0, 0, 0, 0, 0, 1, 1, 2])):
        used = twos < 2
        fold, prior = (
            stratified_folds(twos[used], 2, np.random.default_rng(5)),
            class_prior(np.bincount(twos), eps=1e-4),
        )
        checked = Validation(z[used], twos[used], fold, shared, prior, least=2, ridge=1.0, eps=1e-4)
        want = best_single(lambda beta: checked.loss((beta, beta)))  # noqa: B023
        adapted, betas = adapt(z, twos, shared, PFedFDAParams(), np.random.default_rng(5))
        assert betas == (want, want) and want > 0
        # of these not even the mean is the client's own
        few = np.bincount(twos) <= 2
        np.testing.assert_allclose(adapted.means[few], shared.means[few], rtol=0, atol=1e-12)
        assert (adapted.means[~few] != shared.means[~few]).all()


def test_beta_zero_changes_nothing_and_one_is_ones_own() -> None:
    z, y, shared = drawn(0)
    own = Gaussians(*local_gaussian(z, y, shared.means, least=2, ridge=1.0))
    for got, want in ((interpolate(own, shared, (0, 0)), shared), (interpolate(own, shared, (1, 1)), own)):
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    local, betas = adapt(z, y, shared, PFedFDAParams(betas="local"), np.random.default_rng(0))
    assert betas == (1, 1) and np.array_equal(local.means, own.means)
    separate, betas = adapt(z, y, shared, PFedFDAParams(betas="separate"), np.random.default_rng(0))
    assert betas[0] != betas[1] and all(0 <= b <= 1 for b in betas)
    np.testing.assert_allclose(separate.means, betas[0] * own.means + (1 - betas[0]) * shared.means)


@pytest.mark.parametrize("betas", ["single", "separate", "local"])
def test_one_sample_or_none_alike_leaves_the_shared_gaussians(betas: Any) -> None:
    z, _, shared = drawn(0, n=3)
    p, stream = PFedFDAParams(betas=betas), np.random.default_rng(0)
    assert adapt(z[:1], np.array([2]), shared, p, stream) == (shared, (0, 0))
    # three classes of one sample
    if betas != "local":
        adapted, found = adapt(z, np.arange(3), shared, p, stream)
        assert found == (0, 0) and np.array_equal(adapted.means, shared.means)


def test_triangle_is_row_by_row_and_symmetric_its_inverse() -> None:
    matrix = np.array([[1.0, 2, 3], [2, 4, 5], [3, 5, 6]])
    assert triangle(matrix).tolist() == [1, 2, 3, 4, 5, 6] and triangle(matrix).dtype == np.float32
    assert np.array_equal(symmetric(triangle(matrix)), matrix)
    assert symmetric(triangle(np.eye(1))).tolist() == [[1]]


def context(n: int = 10, extras: dict[str, np.ndarray] | None = None, **changes: Any) -> RoundContext[Any]:
    kinds = changes.pop("kinds", {})
    shared = {"means": np.random.default_rng(0).random((3, 5)).astype(np.float32), "covariance": triangle(np.eye(5))}
    return client(
        "pfedfda", small(**kinds), *samples(n), extras=extras or shared, momentum=0.5, weight_decay=0.01, **changes
    )


def received(ctx: RoundContext[Any]) -> Model:
    return ctx.layout.take(ctx.initial(), ctx.shared)


@pytest.mark.parametrize("kinds", [{}, {"batchnorm": True}])
@pytest.mark.parametrize("n", [1, 2, 10])
def test_a_round(n: int, kinds: dict[str, Any]) -> None:
    ctx = context(n, kinds=kinds)
    update, state = PFedFDAUpdate(), StoredState()
    start = update.merge(received(ctx), state, ctx)
    counts = ctx.trainer.class_counts
    weight, bias = lda_head(ctx.extras["means"].astype(float), np.eye(5), class_prior(counts, eps=1e-4), eps=1e-4)
    tensors = ctx.layout.tensors(start)
    assert np.array_equal(tensors["classifier.weight"], weight.astype(np.float32))
    assert np.array_equal(tensors["classifier.bias"], bias.astype(np.float32))

    trained = update.train(start, state, ctx)
    update.keep_local(trained, state, ctx)
    after = ctx.layout.tensors(trained)
    # the head stands still, bit for bit
    for name in ctx.local:
        assert after[name].tobytes() == tensors[name].tobytes()
    assert after["features.weight"].tobytes() != tensors["features.weight"].tobytes()

    personal = update.personal(trained, state, ctx)
    upload = update.upload(start, trained, state, ctx)
    assert not state.arrays
    assert same(upload.model, ctx.layout.take(trained, ctx.shared)) and same(
        ctx.layout.take(personal, ctx.shared), upload.model
    )
    sent = Gaussians(upload.extras["means"].astype(float), symmetric(upload.extras["covariance"]))
    weight, _ = lda_head(*sent, class_prior(counts, eps=1e-4), eps=1e-4)
    np.testing.assert_allclose(ctx.layout.tensors(personal)["classifier.weight"], weight, rtol=1e-4, atol=1e-5)
    if n == 1:
        assert all(upload.extras[name].tobytes() == ctx.extras[name].tobytes() for name in ctx.extras)
    # a missing class goes back as it came
    for c in np.flatnonzero(counts == 0):
        np.testing.assert_allclose(upload.extras["means"][c], ctx.extras["means"][c], rtol=0, atol=1e-6)
    again = context(n, kinds=kinds)
    other = PFedFDAUpdate()
    # nothing but the message and the data decides
    assert same(other.personal(trained, state, again), personal)


def test_each_body_is_adapted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, update, state = context(), PFedFDAUpdate(), StoredState()
    passes: list[Model] = []
    features = ctx.trainer.features
    monkeypatch.setattr(ctx.trainer, "features", lambda model: passes.append(model) or features(model))
    start = update.merge(received(ctx), state, ctx)
    update.personal(start, state, ctx)
    trained = update.train(start, state, ctx)
    update.keep_local(trained, state, ctx)
    update.personal(trained, state, ctx)
    update.upload(start, trained, state, ctx)
    assert len(passes) == 2


def test_finetuning_starts_under_the_shared_head() -> None:
    ctx, update, state = context(), PFedFDAUpdate(), StoredState()
    start = update.merge(received(ctx), state, ctx)
    personal = update.personal(start, state, ctx)
    assert not same(personal, start)
    assert same(update.finetune(personal, state, ctx, 1), ctx.trainer.train(start, epochs=1, purpose="finetune"))


def test_features_that_are_not_finite_are_an_error() -> None:
    ctx = context()
    start = PFedFDAUpdate().merge(received(ctx), StoredState(), ctx)
    with rejected(MethodError, "pfedfda", "features are not", "finite"):
        PFedFDAUpdate().personal(Model(np.full_like(start.params, np.nan), start.buffers), StoredState(), ctx)


def test_a_classifier_without_a_bias_is_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False))
    with rejected(UserError, "model", "no bias"):
        METHODS["pfedfda"].shared(Layout.of(module), PFedFDAParams())


def server() -> Any:
    return halves.server("pfedfda", Layout.of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))), 0)


def test_the_server_starts_from_random_means_and_averages_by_samples() -> None:
    strategy = server()
    first = strategy.memory["means"].copy()
    assert first.shape == (3, 2) and (first >= 0).all() and (first <= 1).all() and len(np.unique(first)) == 6
    assert strategy.memory["covariance"].tolist() == [1, 0, 1]
    assert np.array_equal(server().memory["means"], first)
    assert {n: a.tobytes() for n, a in strategy.download_extras(0).items()} == {
        n: a.tobytes() for n, a in strategy.memory.items()
    }
    means = np.stack([np.full((3, 2), v, np.float32) for v in (1, 5)])
    covariance = np.stack([f32(1, 0, 1), f32(2, 4, 9)])
    extras = {"means": means, "covariance": covariance}
    strategy.personalize(1, halves.uploads([0, 1], np.zeros((2, 6), np.float32), sizes=[3, 1], extras=extras))
    assert (strategy.memory["means"] == 2).all() and strategy.memory["covariance"].tolist() == [1.25, 1, 3]


def test_a_covariance_that_makes_no_classifier_is_dropped() -> None:
    strategy = server()
    model = Model(np.zeros(6, np.float32), f32())
    strategy.check(Upload(model, extras={"means": np.zeros((3, 2), np.float32), "covariance": f32(1, 0.5, 1)}))
    with pytest.raises(WireError, match="not positive definite"):
        strategy.check(Upload(model, extras={"means": np.zeros((3, 2), np.float32), "covariance": f32(1, 2, 1)}))
    with rejected(WireError, "", "lie within 1e+09 of 0"):
        strategy.check(Upload(model, extras={"means": np.full((3, 2), 1e30, np.float32), "covariance": f32(1, 0, 1)}))


def test_a_run_learns_and_keeps_nothing_on_its_clients(run: Run, tmp_path: Path) -> None:
    folder = run(method="pfedfda", num_server_rounds=4, train_samples=40, local_epochs=2, finetune_epochs=1)
    rounds = list(read_metrics(folder.path))
    assert rounds[-1]["accuracy-after"] > 0.5 and not any(r["failures"] for r in rounds)
    assert not list((tmp_path / "state").rglob("*.state"))
    for client_row in rounds[-1]["clients"].values():
        assert 0 <= client_row["beta-means"] == client_row["beta-covariance"] <= 1
