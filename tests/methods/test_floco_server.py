"""FLOCO: regions, late clients, both models of FLOCO+, what leaves a run."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from client_app.stored_state import StoredState
from corolla.experiments.exported.export import export
from fl_app import models, rng, weights
from fl_app.layout import Layout, Model
from fl_app.server.run_folder import RunFolder, read_metrics
from strategies import METHODS
from strategies.base import RoundContext, Uploads
from strategies.baselines.floco import (
    FLOCO,
    FLOCOUpdate,
    at_centre,
    collapsed_layout,
    endpoints_slot,
    mixture_around,
    principal_scores,
    simplex_network,
    subregions,
)
from tests.conftest import Run, f32
from tests.conftest import config as configured
from tests.methods import halves
from tests.methods.one_client import client, same, samples, small

SHAPE = {"in_channels": 1, "num_classes": 10, "image_size": 8}


EARLY: dict[str, Any] = {"projection_round": 2, "endpoints": 3}


def server(tmp_path: Path, **floco: Any) -> Any:
    config = configured(method="floco", floco=EARLY | floco, num_clients=6, fraction_train=0.5)
    module = simplex_network(small(), config.params, 0)
    layout = Layout.of(module)
    return METHODS["floco"].server(config, layout, weights.read(module), layout.names, RunFolder(tmp_path, "x"))


def uploads(strategy: FLOCO, ids: list[int], seed: int = 0) -> Uploads:
    random = np.random.default_rng(seed)
    W = strategy.global_model.params + random.normal(0, 0.3, (len(ids), strategy.layout.d)).astype(np.float32)
    return halves.uploads(ids, W)


def test_before_the_projection_everybody_trains_and_those_drawn_are_averaged(tmp_path: Path) -> None:
    strategy = server(tmp_path, projection_round=3)
    everybody = list(range(6))
    strategy.attempt.connected = everybody
    assert len(strategy.sample(everybody, 1)) == 3
    drawn = strategy.drawn(everybody, 2)
    assert strategy.sample(everybody, 2) == everybody and len(drawn) == 3
    came = uploads(strategy, [0, 1, 2, 4, 5])
    rows = [k for k, i in enumerate(came.ids) if i in drawn]
    want = came.W[rows].astype(np.float64).mean(axis=0).astype(np.float32)
    moved = came.W - strategy.global_model.params
    assert not strategy.download_extras(0)
    strategy.personalize(2, came)
    assert strategy.global_model.params.tobytes() == want.tobytes()

    strategy.round = 3
    slot = endpoints_slot(strategy.layout)
    kappa, _, _ = principal_scores(moved[:, slot.start : slot.stop].astype(np.float64), 3)
    for k, i in enumerate(came.ids):
        np.testing.assert_allclose(strategy.download_extras(i)["centre"], subregions(kappa)[0][k], rtol=0, atol=1e-4)
    assert strategy.download_extras(3)["centre"].tolist() == [0, 0, 0]
    assert strategy.attempt.round_notes["simplex-sum"] == subregions(kappa)[1]


def test_no_upload_of_those_drawn_leaves_the_global_model(tmp_path: Path) -> None:
    strategy = server(tmp_path)
    drawn = strategy.drawn(list(range(6)), 1)
    strategy.sample(list(range(6)), 1)
    before = strategy.global_model
    strategy.personalize(1, uploads(strategy, [i for i in range(6) if i not in drawn]))
    assert strategy.global_model is before and len(strategy.personal) == 3


def test_a_late_client_is_placed_where_its_update_would_have_put_it(tmp_path: Path) -> None:
    strategy = server(tmp_path)
    strategy.sample(list(range(6)), 1)
    first = uploads(strategy, [0, 1, 2, 3])
    moved = first.W - strategy.global_model.params
    strategy.personalize(1, first)
    centres = {i: own["centre"] for i, own in strategy.personal.items()}
    late = uploads(strategy, [0, 5])
    late.W[1] = strategy.global_model.params + moved[2]
    strategy.personalize(2, late)
    np.testing.assert_allclose(strategy.personal[5]["centre"], centres[2], rtol=0, atol=1e-4)
    # the others stay where they are
    assert all(strategy.personal[i]["centre"] is centres[i] for i in centres)
    assert sum(a.nbytes for a in strategy.memory.values()) == 4 * 4 * 3 * 3 * 5 + 8  # 4 (M + 1) M C f, and z


def test_what_the_server_exports(tmp_path: Path) -> None:
    strategy = server(tmp_path)
    strategy.keep_for(1, centre=f32(0, 1, 0))
    layout, plain = strategy.form_of_exports.layout(strategy, strategy.full_layout), Layout.of(small())
    assert layout == plain
    ends = strategy.layout.tensors(strategy.global_model)["classifier.weight"]
    middle = layout.tensors(strategy.exported())["classifier.weight"]
    np.testing.assert_allclose(middle, ends.mean(axis=0), rtol=0, atol=1e-7)
    # before tau there are no regions
    strategy.round = 1
    early, strategy.round = strategy.exported(1), 2
    late = strategy.exported(1)
    assert early is not None and late is not None
    assert np.array_equal(layout.tensors(early)["classifier.weight"], middle)
    assert np.array_equal(layout.tensors(late)["classifier.weight"], ends[1])
    # FLOCO+: it is the client's alone
    assert server(tmp_path, personal_epochs=1).exported(1) is None


def personal_hashes(folder: RunFolder) -> dict[str, str]:
    clients = list(read_metrics(folder.path))[-1]["evaluation"]["clients"]
    return {i: row["sha256"] for i, row in clients.items()}


@pytest.mark.parametrize("collected", [False, True])
@pytest.mark.parametrize("plus", [0, 1])
def test_models_leave_a_run_collapsed(run: Run, tmp_path: Path, collected: bool, plus: int) -> None:
    floco = {**EARLY, "personal_epochs": plus}
    folder = run(
        method="floco",
        floco=floco,
        num_server_rounds=3,
        evaluate_every=1,
        collect_personal_models=collected,
        finetune_epochs=1,
    )
    rounds = list(read_metrics(folder.path))
    assert not any(r["failures"] or r["evaluation"]["failures"] for r in rounds)
    layout = Layout.of(models.build("mlp", **SHAPE))
    whole = Layout.of(METHODS["floco"].network(configured(method="floco", floco=floco), **SHAPE))
    for record in rounds:
        for row in record["clients"].values():
            assert row["upload-bytes"] == 4 * whole.d
            assert row["download-bytes"] == 4 * whole.d + (4 * 3 if record["round"] >= 2 else 0)
    assert [len({r["sha256"] for r in record["evaluation"]["clients"].values()}) for record in rounds] == [
        3 if plus else 1,
        3,
        3,
    ]

    files = {p.stem for p in (folder.path / "models").iterdir()}
    assert files == {"global"} | ({f"client-{i}" for i in range(3)} if collected or not plus else set())
    for i, digest in personal_hashes(folder).items():
        if f"client-{i}" in files:
            model = weights.load_safetensors(folder.path / "models" / f"client-{i}.safetensors", layout)
            assert hashlib.sha256(model.params.tobytes()).hexdigest() == digest
    for chosen in (None, *(int(name[7:]) for name in files if name != "global")):
        state = torch.load(export(folder.path, METHODS, chosen, tmp_path / f"{chosen}.pt")[0])
        models.build("mlp", **SHAPE).load_state_dict(state, strict=True)


def test_floco_plus_keeps_a_second_model_near_the_received_one() -> None:
    floco = {**EARLY, "personal_epochs": 2, "proximal_weight": 0.0}
    ctx = client("floco", small(batchnorm=True), *samples(), floco=floco)
    plain = client("floco", small(batchnorm=True), *samples(), floco=EARLY)
    update, state = FLOCOUpdate(), StoredState()
    start = update.merge(ctx.initial(), state, ctx)
    after = update.train(start, state, ctx)
    assert same(
        after, update.train(update.merge(plain.initial(), StoredState(), plain), StoredState(), plain)
    )  # what travels is the same
    assert sum(a.nbytes for a in state.arrays.values()) == 4 * (ctx.layout.d + ctx.layout.b)
    own = update.personal(after, state, ctx)
    assert not same(own, after) and at_centre(own, state, ctx).params.size == collapsed_layout(ctx.layout).d
    pulled = client("floco", small(batchnorm=True), *samples(), floco=floco | {"proximal_weight": 5.0})
    near = StoredState()
    update.train(update.merge(pulled.initial(), near, pulled), near, pulled)
    distance = [np.linalg.norm(s.arrays["personal.params"] - start.params) for s in (state, near)]
    assert distance[1] < distance[0]


def textbook(
    ctx: RoundContext[Any], start: Model, purpose: str, alphas: str, epochs: int, pull: float, to: Model
) -> np.ndarray:
    """A training of the simplex with autograd on W = sum_m alpha_m W_m, float64, pulled towards a model."""
    c, p, data = ctx.config, ctx.params, ctx.trainer.data  # type: ignore[attr-defined]
    order, drawn = torch.Generator().manual_seed(rng.torch_seed(c.seed, purpose, ctx.round, 0)), ctx.rng(alphas)
    flat, middle = (torch.tensor(model.params).double() for model in (start, to))
    velocity = torch.zeros_like(flat)
    for _ in range(epochs):
        for batch in torch.randperm(ctx.num_samples, generator=order).split(c.batch_size):
            x, y = data.chosen(batch)
            alpha = torch.from_numpy(mixture_around(ctx.extras["centre"].astype(np.float64), drawn, p.radius))
            flat.requires_grad_(True)
            inner, inner_bias, ends, bias = (flat[s.start : s.stop].view(s.shape) for s in ctx.layout.params)
            used = sum(a * end for a, end in zip(alpha, ends, strict=True))
            logits = torch.relu(x.double().flatten(1) @ inner.T + inner_bias) @ used.T + bias
            (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, y), flat)
            flat = flat.detach()
            velocity = c.momentum * velocity + gradient + pull * (flat - middle) + c.weight_decay * flat
            flat = flat - c.learning_rate * velocity
    return flat.numpy()


def test_both_models_of_floco_plus_against_the_textbook_loop() -> None:
    floco = {**EARLY, "radius": 0.4, "personal_epochs": 1, "proximal_weight": 0.8}
    ctx = client(
        "floco",
        small(),
        *samples(),
        round=3,
        extras={"centre": f32(0.6, 0.3, 0.1)},
        momentum=0.5,
        weight_decay=0.01,
        floco=floco,
    )
    update, state, received = FLOCOUpdate(), StoredState(), ctx.initial()
    # at first what is received; then its own, which goes on
    own = received
    for _ in range(2):
        after = update.train(update.merge(received, state, ctx), state, ctx)
        shared = textbook(ctx, received, "train", "floco-alpha", ctx.config.local_epochs, 0.0, received)
        np.testing.assert_allclose(after.params, shared, rtol=1e-4, atol=1e-6)
        personal = textbook(ctx, own, "train-personal", "floco-alpha-personal", 1, 0.8, received)
        np.testing.assert_allclose(state.arrays["personal.params"], personal, rtol=1e-4, atol=1e-6)
        own = Model(state.arrays["personal.params"], state.arrays["personal.buffers"])
        received = Model(after.params + np.float32(0.05), after.buffers)
