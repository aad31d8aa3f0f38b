"""IFCA: means per cluster by hand, which model a client chooses, its limit FedAvg, a shared body, and what leaves a run."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corolla.experiments.exported.export import export
from fl_app import models, weights
from fl_app.errors import MethodError
from fl_app.layout import NOTHING, Layout, Model
from fl_app.server.run_folder import read_metrics
from fl_app.transport.wire import Upload, WireError
from strategies import METHODS
from strategies.baselines import components
from strategies.baselines.ifca import cluster_means, switch
from tests.conftest import Run
from tests.conftest import config as configured
from tests.facts import rejected
from tests.methods.federation import Federation, close
from tests.methods.one_client import same, small
from tests.methods.runs import small_clients

SHAPE = {"in_channels": 1, "num_classes": 10, "image_size": 8}


def test_means_by_hand() -> None:
    # Model 0: (1 * 1 + 3 * 3)/4 = 2.5; nobody chose model 1; model 2: 8 alone.
    W, before = np.array([[1.0], [8.0], [3.0]]), np.array([[7.0], [9.0], [4.0]])
    means = cluster_means(W, np.array([1, 5, 3]), np.array([0, 2, 0]), before)
    assert means.tolist() == [[2.5], [9], [8]]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_means_are_of_those_who_chose(n: int, count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    W, sizes, chosen = random.normal(size=(n, 3)), random.integers(1, 9, n), random.integers(0, count, n)
    before = random.normal(size=(count, 3))
    means = cluster_means(W, sizes, chosen, before)
    for k in range(count):
        mine = chosen == k
        want = np.average(W[mine], axis=0, weights=sizes[mine]) if mine.any() else before[k]
        np.testing.assert_allclose(means[k], want, atol=1e-6)


def choices(federation: Federation) -> list[int]:
    """Which model each client would choose, by its mean training loss."""
    chosen = []
    for i in range(len(federation.data)):
        ctx, received = federation.context(i, round=1)
        part, losses = switch(ctx.trainer.module), []
        for k in range(federation.config.params.clusters):
            part.chosen = k
            losses.append(ctx.trainer.sample_losses(received).mean())
        chosen.append(int(np.argmin(losses)))
    return chosen


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("kinds", [{}, {"batchnorm": True}])
def test_a_round_by_hand(tmp_path: Path, share: bool, kinds: dict[str, Any]) -> None:
    federation = Federation(
        tmp_path, "ifca", ifca={"clusters": 3, "share_body": share}, network=lambda: small(**kinds), sizes=(10, 6, 8, 9)
    )
    layout, plain = federation.layout, Layout.of(small(**kinds))
    assert components.alone(layout, 1) == plain
    names = [components.tensors_of(layout, k) for k in range(3)]
    before = federation.server.global_model
    chosen, sizes = choices(federation), np.array([10, 6, 8, 9])
    uploads = federation.round()
    assert uploads.W.shape == (4, plain.d) and uploads.extras["cluster"][:, 0].tolist() == chosen
    after = federation.server.global_model
    body = frozenset(n for n in plain.names if n not in plain.classifier)
    for k in range(3):
        got, kept = layout.take(after, names[k]), layout.take(before, names[k])
        rows = [i for i in range(4) if chosen[i] == k]
        want = (
            Model(*(np.average(s[rows], axis=0, weights=sizes[rows]) for s in (uploads.W, uploads.B))) if rows else kept
        )
        if share:
            everybody = Model(*(np.average(s, axis=0, weights=sizes) for s in (uploads.W, uploads.B)))
            want = plain.put(want, plain.take(everybody, body), body)
        close(got.params, want.params)
        close(got.buffers, want.buffers)
    # each upload is plain training of the chosen model, whatever the others are
    ctx, _ = federation.context(2, round=1)
    one = Federation(tmp_path, "fedavg", network=lambda: small(**kinds), sizes=(10, 6, 8, 9))
    alone, _ = one.context(2, round=1)
    trained = alone.trainer.train(layout.take(before, names[chosen[2]]))
    assert uploads.W[2].tobytes() == trained.params.tobytes() and uploads.B[2].tobytes() == trained.buffers.tobytes()
    assert not federation.states[2].arrays


def test_ties_go_to_the_first_and_a_client_is_evaluated_with_what_it_chose(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "ifca", ifca={"clusters": 3})
    ctx, received = federation.context(0, round=1)
    update = federation.method.local_update()
    first = ctx.layout.take(received, components.tensors_of(ctx.layout, 0))
    for k in (1, 2):
        received = ctx.layout.put(received, first, components.tensors_of(ctx.layout, k))
    update.merge(received, federation.states[0], ctx)
    assert switch(ctx.trainer.module).chosen == 0
    ctx, received = federation.context(1, round=1)
    model = update.personal(update.merge(received, federation.states[1], ctx), federation.states[1], ctx)
    alone = small()
    weights.write(alone, federation.method.exported.model(model, federation.states[1], ctx))
    x = torch.rand(5, 1, 2, 2)
    ctx.trainer.load(model)
    torch.testing.assert_close(ctx.trainer.module.eval()(x), alone.eval()(x))


@pytest.mark.parametrize("share", [False, True])
def test_models_leave_a_run_as_the_users_own(run: Run, tmp_path: Path, share: bool) -> None:
    setting = {**small_clients(tmp_path), "collect_personal_models": True, "finetune_epochs": 1, "model": "mlp"}
    folder = run(method="ifca", ifca={"clusters": 3, "share_body": share}, **setting)
    records = list(read_metrics(folder.path))
    assert not any(record["failures"] or record.get("evaluation", {}).get("failures") for record in records)
    assert sum(records[0]["cluster-sizes"]) == 3
    clients = records[-1]["evaluation"]["clients"]
    layout = Layout.of(models.build("mlp", **SHAPE))
    for i in range(3):
        model = weights.load_safetensors(folder.path / "models" / f"client-{i}.safetensors", layout)
        assert hashlib.sha256(model.params.tobytes()).hexdigest() == clients[str(i)]["sha256"]
    state = torch.load(export(folder.path, METHODS, 1, tmp_path / "1.pt")[0])
    models.build("mlp", **SHAPE).load_state_dict(state, strict=True)


def test_choices_that_cannot_be_are_refused(tmp_path: Path) -> None:
    server = Federation(tmp_path, "ifca").server
    for chosen in (-1, 4):
        with rejected(WireError, "", "cluster", "0", "3", f"got {chosen}"):
            server.check(Upload(NOTHING, extras={"cluster": np.array([chosen], np.int32)}))


def test_models_start_from_different_draws_and_not_from_a_file(tmp_path: Path) -> None:
    def start(**changes: Any) -> Model:
        return weights.read(
            METHODS["ifca"].network(configured(method="ifca", ifca={"clusters": 2}), **SHAPE, **changes)
        )

    layout = Layout.of(METHODS["ifca"].network(configured(method="ifca", ifca={"clusters": 2}), **SHAPE))
    first, second = (layout.take(start(), components.tensors_of(layout, k)) for k in range(2))
    assert same(first, weights.read(models.build("mlp", **SHAPE))) and not (first.params == second.params).all()
    assert same(start(), start())
    file = tmp_path / "start.safetensors"
    weights.save_safetensors(file, components.alone(layout, 0), first)
    with rejected(MethodError, "initial-weights", "ifca starts", "several models"):
        start(initial_weights=str(file))
