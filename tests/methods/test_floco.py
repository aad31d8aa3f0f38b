"""FLOCO: the simplex's kernels, its network, limits, regions, late clients, FLOCO+, what leaves a run."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

from client_app.stored_state import StoredState
from fl_app import models, weights
from fl_app.layout import Layout
from fl_app.server.run_folder import read_metrics, read_summary
from strategies import METHODS
from strategies.baselines.floco import (
    FLOCOParams,
    FLOCOUpdate,
    centre_of,
    collapse,
    collapsed_layout,
    endpoints_slot,
    mixture_around,
    on_simplex,
    principal_scores,
    project_simplex,
    simplex_network,
    subregions,
    uniform_mixture,
)
from tests.conftest import Run, f32
from tests.conftest import config as configured
from tests.methods.one_client import client, samples, small
from tests.small_models import BATCHNORM

SHAPE = {"in_channels": 1, "num_classes": 10, "image_size": 8}


EARLY: dict[str, Any] = {"projection_round": 2, "endpoints": 3}


scores = hnp.arrays(np.float64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=5), elements=st.floats(-4, 4))


def test_projections_that_are_known() -> None:
    np.testing.assert_allclose(project_simplex([0.5, 0.3, -0.4], 1), [0.6, 0.4, 0], rtol=0, atol=1e-15)
    np.testing.assert_array_equal(project_simplex(np.array([[2.0, 0, 0]]), 1), [[1, 0, 0]])
    np.testing.assert_allclose(project_simplex([0.0, 0], 3), [1.5, 1.5])
    assert project_simplex([-7.0], 0.25).tolist() == [0.25]


@given(scores, st.floats(1e-4, 5))
def test_projection_is_on_the_simplex_and_nothing_on_it_is_nearer(v: np.ndarray, total: float) -> None:
    projected = project_simplex(v, total)
    assert (projected >= 0).all()
    np.testing.assert_allclose(projected.sum(axis=1), total, rtol=1e-9)
    # (v - p) (y - p) <= 0 for every y of the simplex, hence for its corners
    for corner in np.eye(v.shape[1]) * total:
        assert ((v - projected) * (corner - projected)).sum(axis=1).max() <= 1e-9


@settings(max_examples=15)
@given(scores)
def test_centres_are_the_projections_of_least_energy(kappa: np.ndarray) -> None:
    centres, total = subregions(kappa)
    assert centres.shape == kappa.shape and (centres >= 0).all()
    np.testing.assert_allclose(centres.sum(axis=1), 1, rtol=0, atol=1e-12)

    def energy(z: float) -> float:
        rows = on_simplex(kappa, z)
        return sum(1 / max(np.linalg.norm(a - b), 1e-4) ** 2 for a, b in itertools.combinations(rows, 2))

    np.testing.assert_allclose(centres, on_simplex(kappa, total))
    for z in np.linspace(1e-4, 1, 1000)[::111]:
        assert energy(total) <= energy(z) * (1 + 1e-6)


def test_of_equal_energies_the_smaller_simplex_is_taken() -> None:
    # one client, corners always, one endpoint
    for kappa in (
        np.zeros((1, 3)),
        np.array([[9.0, 0], [0, 9]]),
        np.ones((2, 1)),
    ):
        assert subregions(kappa)[1] == 1e-4
    assert subregions(np.zeros((1, 4)))[0].tolist() == [[0.25] * 4]


@pytest.mark.parametrize(("n", "components"), [(6, 3), (2, 4), (1, 2), (5, 5)])
def test_scores_are_those_of_principal_components(n: int, components: int) -> None:
    from sklearn.decomposition import PCA

    X = np.random.default_rng(n).normal(size=(n, 20))
    kappa, mean, axes = principal_scores(X, components)
    rank = min(n - 1, components)
    assert kappa.shape == (n, components) and axes.shape == (components, 20)
    assert not kappa[:, rank:].any() and not axes[rank:].any()
    np.testing.assert_allclose((X - mean) @ axes.T, kappa, atol=1e-12)
    assert (kappa.max(axis=0) >= -kappa.min(axis=0)).all()
    if rank:
        np.testing.assert_allclose(np.abs(PCA(rank).fit_transform(X)), np.abs(kappa[:, :rank]), atol=1e-10)


def test_mixtures() -> None:
    drawn = uniform_mixture(np.random.default_rng(0), 3)
    np.testing.assert_allclose(drawn, [0.395462, 0.593018, 0.011520], rtol=0, atol=5e-7)
    assert uniform_mixture(np.random.default_rng(1), 1).tolist() == [1]
    generator, centre = np.random.default_rng(0), np.array([0.7, 0.3, 0])
    points = np.array([mixture_around(centre, generator, 0.4) for _ in range(200)])
    assert 0.3 < np.abs(points - centre).sum(axis=1).max() <= 0.4 and (points < 0).any()
    assert mixture_around(centre, generator, 0.0).tobytes() == centre.tobytes()


def test_without_a_centre_the_middle() -> None:
    for extras in ({}, {"centre": f32(0, 0)}):
        middle, own = centre_of(extras, 2)
        assert middle.tolist() == [0.5, 0.5] and not own
    centre, own = centre_of({"centre": f32(0.5, 0.5)}, 2)
    assert own and centre.dtype == np.float64


def test_the_network_is_the_runs_with_endpoints() -> None:
    plain = models.build("mlp", **SHAPE)
    wrapped = METHODS["floco"].network(configured(method="floco", floco={"endpoints": 4}), **SHAPE)
    ours, theirs = Layout.of(wrapped), Layout.of(plain)
    assert [s.name for s in ours.params] == [s.name for s in theirs.params] and ours.classifier == theirs.classifier
    assert collapsed_layout(ours) == theirs
    slot = endpoints_slot(ours)
    assert slot.shape == (4, 10, slot.shape[2]) and ours.d == theirs.d + 3 * 10 * slot.shape[2]
    before, after = theirs.tensors(weights.read(plain)), ours.tensors(weights.read(wrapped))
    for name in before:
        assert np.array_equal(before[name], after[name]) == (name != slot.name)
    ends = after[slot.name]
    assert len({end.tobytes() for end in ends}) == 4
    assert ends.std() == pytest.approx(math.sqrt(2 / (10 + slot.shape[2])), rel=0.1)
    again = METHODS["floco"].network(configured(method="floco", floco={"endpoints": 4}), **SHAPE)
    assert weights.read(again).params.tobytes() == weights.read(wrapped).params.tobytes()


@given(st.integers(0, 100))
def test_collapsed_it_computes_the_same(seed: int) -> None:
    wrapped = simplex_network(small(batchnorm=True), FLOCOParams(endpoints=3), seed).eval()
    plain, layout = small(batchnorm=True).eval(), Layout.of(wrapped)
    centre = uniform_mixture(np.random.default_rng(seed), 3)
    wrapped.classifier.centre = torch.from_numpy(centre.astype(np.float32))
    weights.write(plain, collapse(weights.read(wrapped), layout, centre))
    x = torch.from_numpy(np.random.default_rng(seed).normal(size=(7, 4)).astype(np.float32))
    torch.testing.assert_close(wrapped(x), plain(x), rtol=0, atol=1e-6)


def test_gradients_of_the_endpoints_sum_to_that_of_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = client("floco", small(), *samples(), floco={"endpoints": 3})
    update, slot = FLOCOUpdate(), endpoints_slot(ctx.layout)
    trainer: Any = ctx.trainer
    trainer.load(update.merge(ctx.initial(), StoredState(), ctx))
    x, y = next(iter(trainer.batches(1)))
    trainer.differentiate(x, y, update.mixed_loss(ctx, "floco-alpha"))
    alpha = uniform_mixture(ctx.rng("floco-alpha"), 3)  # the batch's, before tau
    got = trainer.vector(trainer.gradient)

    plain = small()
    weights.write(plain, collapse(ctx.initial(), ctx.layout, alpha))
    nn.functional.cross_entropy(plain(x), y).backward()
    used = plain.classifier.weight.grad.numpy()  # type: ignore[union-attr]
    ends = got[slot.start : slot.stop].reshape(slot.shape)
    np.testing.assert_allclose(ends.sum(axis=0), used, rtol=0, atol=1e-6)
    np.testing.assert_allclose(ends, alpha[:, None, None] * used, rtol=0, atol=1e-6)


def test_every_batch_has_a_mixture_of_its_own() -> None:
    ctx = client("floco", small(), *samples(), round=2, extras={"centre": f32(0.5, 0.5, 0)}, floco=EARLY)
    update, layer = FLOCOUpdate(), ctx.trainer.classifier()
    update.merge(ctx.initial(), StoredState(), ctx)
    loss, generator, seen = update.mixed_loss(ctx, "floco-alpha"), ctx.rng("floco-alpha"), []
    for x, y in ctx.trainer.batches():
        loss(ctx.trainer.module, x, y)
        seen.append(layer.alpha.numpy())
    want = [mixture_around(np.array([0.5, 0.5, 0]), generator, 0.1) for _ in range(6)]
    np.testing.assert_allclose(seen, want, rtol=0, atol=1e-7)
    assert layer.centre.tolist() == [0.5, 0.5, 0]
    flat = client(
        "floco", small(), *samples(), extras=ctx.extras, floco={**EARLY, "radius": 3.0, "sampling": "simplex"}
    )
    loss = update.mixed_loss(flat, "floco-alpha")
    for x, y in flat.trainer.batches():
        loss(flat.trainer.module, x, y)
        alpha = flat.trainer.classifier().alpha.numpy()
        assert (alpha >= 0).all() and alpha.sum() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("model", [{"model": "mlp"}, {**BATCHNORM, "train_samples": 17}], ids=["mlp", "batchnorm"])
def test_one_endpoint_without_a_radius_is_fedavg_bit_for_bit(run: Run, tmp_path: Path, model: dict[str, Any]) -> None:
    one = {"endpoints": 1, "radius": 0.0, "projection_round": 2}
    network = METHODS["floco"].network(configured(method="floco", floco=one, **model), **SHAPE)
    layout, start = Layout.of(network), tmp_path / "start.safetensors"
    weights.save_safetensors(start, collapsed_layout(layout), collapse(weights.read(network), layout, np.ones(1)))

    setting = {**model, "initial_weights": str(start), "num_server_rounds": 3, "momentum": 0.5, "fraction_train": 0.7}
    plain = run(method="fedavg", run_name="plain", **setting)
    folder = run(method="floco", run_name="floco", floco=one, **setting)
    assert (folder.path / "models/global.safetensors").read_bytes() == (
        plain.path / "models/global.safetensors"
    ).read_bytes()
    assert read_summary(folder.path)["digest"] == read_summary(plain.path)["digest"]
    ours, theirs = (list(read_metrics(f.path)) for f in (folder, plain))
    assert [len(r["clients"]) for r in ours] == [3, 2, 2] and [len(r["clients"]) for r in theirs] == [2] * 3
    assert ours[2]["accuracy-after"] == theirs[2]["accuracy-after"]
