"""pFedGate: blocks by hand and their properties, its gate, the limit FedAvg, what is evaluated, and what leaves a run."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from corolla.experiments.exported.export import export
from fl_app import models, weights
from fl_app.errors import ConfigurationError
from fl_app.layout import Layout
from fl_app.server.run_folder import read_metrics
from strategies import METHODS
from strategies.base import ModelFactory
from strategies.baselines.pfedgate import Blocks, select_blocks, sub_blocks
from tests.conftest import Run, config
from tests.facts import rejected
from tests.methods.federation import Federation, close
from tests.methods.one_client import small
from tests.methods.runs import small_clients
from tests.methods.trials import Small as Convolutions
from tests.small_models import BATCHNORM

SHAPE = {"in_channels": 1, "num_classes": 10, "image_size": 8}


def test_blocks_by_hand() -> None:
    assert sub_blocks(25, 10) == [3] * 8 + [1]  # ceil(25/10) = 3
    assert sub_blocks(10, 5) == [2] * 5 and sub_blocks(3, 5) == [1] * 3 and sub_blocks(7, 1) == [7]
    # round(10 g): 9, 5, 5, 1. 4 elements: the first, then of the equal ones the earlier; the last no longer fits.
    assert select_blocks([0.54, 0.9, 0.46, 0.1], [2, 2, 2, 1], 4) == [0, 1]
    # what does not fit is passed over
    assert select_blocks([0.5, 0.9, 0.3], [4, 2, 1], 3) == [1, 2]
    assert select_blocks([1, 1], [3, 3], 2) == [] and select_blocks([], [], 5) == []


@given(st.integers(1, 200), st.integers(1, 12))
def test_sub_blocks_are_all_of_a_tensor(size: int, parts: int) -> None:
    sizes = sub_blocks(size, parts)
    assert sum(sizes) == size and len(sizes) <= parts and len(set(sizes[:-1])) <= 1 and 0 < sizes[-1] <= sizes[0]


def test_kept_blocks_by_hand() -> None:
    # A Linear layer's tensors of 10 and 5 elements in fifths, another of 10. s_min 0.2: of (0.6 - 0.2) * 15 = 6 elements the
    # largest g take 2, 1 and 1, and 2, what then does not fit is dropped; of 0.4 * 10 = 4 the largest two. First blocks stay.
    blocks = Blocks(((2,) * 5, (1,) * 5, (2,) * 5), (True, True, False))
    g = np.array([0.0, 0.9, 0.5, 0.4, 0.3, 0.1, 0.8, 0.2, 0.7, 0.1, 0.2, 0.3, 0.9, 0.1, 0.8])
    want = [1, 1, 1, 0, 0, 1, 1, 0, 1, 0, 1, 0, 1, 0, 1]
    assert blocks.kept(g, 0.6, 5).astype(int).tolist() == want
    # With 20 parts s_min is 0.1, not 0.05: 7.5 elements, one more block of 1; 5 elements, no room for a third block of 2.
    assert blocks.kept(g, 0.6, 20).astype(int).tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 0, 1, 0, 1]


@given(
    st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=5),
    st.integers(1, 6),
    st.floats(0.05, 1),
    st.integers(0, 2**32 - 1),
)
def test_kept_blocks_fit(tensors: list[tuple[int, bool]], parts: int, sparsity: float, seed: int) -> None:
    blocks = Blocks(tuple(tuple(sub_blocks(n, parts)) for n, _ in tensors), tuple(linear for _, linear in tensors))
    g = np.random.default_rng(seed).random(blocks.count)
    kept, at = blocks.kept(g, sparsity, parts), 0
    used = {True: 0, False: 0}
    for (_, linear), sizes in zip(tensors, blocks.sizes, strict=True):
        own = kept[at : at + len(sizes)]
        assert own[0]
        used[linear] += int(np.array(sizes)[1:][own[1:]].sum())
        at += len(sizes)
    least = min(max(1 / parts, 0.1), sparsity)
    for linear in (True, False):
        assert used[linear] <= (sparsity - least) * sum(n for n, is_linear in tensors if is_linear == linear) + 1e-6
    assert blocks.kept(g, 1.0, parts).all()


Moments = tuple[Tensor, Tensor]  # means and variances


def gate_by_hand(x: Tensor, own: dict[str, Tensor], batch: Moments | None, linear: Moments | None) -> Tensor:
    """g word by word, float64, of images [n, c, h, w]; batch, linear: what evaluation mode has instead of the batch's moments."""
    a, b = own["0.of_means"].softmax(0), own["0.of_variances"].softmax(0)
    normal = torch.empty_like(x)
    for i, image in enumerate(x):
        for c, channel in enumerate(image):
            of_batch = (x[:, c].mean(), x[:, c].var(correction=0)) if batch is None else (batch[0][c], batch[1][c])
            mean = a[0] * channel.mean() + a[1] * image.mean() + a[2] * of_batch[0]
            variance = b[0] * channel.var(correction=0) + b[1] * image.var(correction=0) + b[2] * of_batch[1]
            normal[i, c] = (channel - mean) / (variance + 1e-5).sqrt() * own["0.weight"][c] + own["0.bias"][c]
    z = normal.flatten(1) @ own["2.weight"].T + own["2.bias"]
    mean, variance = (z.mean(0), z.var(0, correction=0)) if linear is None else linear
    numbers = (z - mean) / (variance + 1e-5).sqrt() * own["3.weight"] + own["3.bias"]
    return (1 / (1 + torch.exp(-numbers))).mean(0)


def test_the_gate_by_hand() -> None:
    pair = nn.Sequential(nn.Flatten(), nn.Linear(2 * 3 * 3, 4), nn.ReLU(), nn.Linear(4, 3))
    module: Any = METHODS["pfedgate"].around(ModelFactory(lambda k: pair, (2, 3, 3), 0), config(method="pfedgate"))
    seeded(module.gate)
    x = torch.rand(5, 2, 3, 3) * 2 - 0.3
    own = {name: p.detach().double() for name, p in module.gate.named_parameters()}
    got = module.train().gates(x)
    np.testing.assert_allclose(got.detach().numpy(), gate_by_hand(x.double(), own, None, None).numpy(), atol=1e-6)
    moved = {name: b.double() for name, b in module.gate.named_buffers()}
    # a tenth of the way from 0 and 1
    for c in range(2):
        assert moved["0.mean"][c].item() == pytest.approx(0.1 * x[:, c].mean().item(), abs=1e-6)
        assert moved["0.variance"][c].item() == pytest.approx(0.9 + 0.1 * x[:, c].var(correction=0).item(), abs=1e-6)
    got = module.eval().gates(x)
    batch, linear = (moved["0.mean"], moved["0.variance"]), (moved["3.running_mean"], moved["3.running_var"])
    np.testing.assert_allclose(got.detach().numpy(), gate_by_hand(x.double(), own, batch, linear).numpy(), atol=1e-6)


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("size", [1.0, 300.0], ids=["short", "cut"])
def test_a_step_by_hand(tmp_path: Path, size: float, alternate: bool) -> None:
    # Both sides at their own rates, the gradient of each cut to norm 10 by itself; no momentum in the first step. `alternate`: the
    # gate on the batch, then the model on it, under the new gate.
    federation = Federation(
        tmp_path,
        "pfedgate",
        sizes=(6,),
        batch_size=6,
        local_epochs=1,
        learning_rate=0.05,
        momentum=0.5,
        weight_decay=0.01,
        pfedgate={"gate_learning_rate": 5.0, "alternate": alternate},
        network=lambda: seeded(small()),
    )
    federation.initial.params[:] *= size
    federation.server.global_model = federation.layout.take(federation.initial, federation.shared)
    module: Any = federation.module()
    weights.write(module, federation.initial)
    module.train()
    x, y = (torch.tensor(array) for array in federation.data[0])
    uploads, norms = federation.round(), []
    for sides in [["gate"], ["network"]] if alternate else [["gate", "network"]]:
        module.zero_grad()
        nn.functional.cross_entropy(module(x.float() / 255), y).backward()
        for side, rate in (("gate", 5.0), ("network", 0.05)):
            parameters = list(getattr(module, side).parameters()) if side in sides else []
            norms.append(sum(p.grad.double().square().sum().item() for p in parameters) ** 0.5)
            with torch.no_grad():
                for p in parameters:
                    p -= rate * (p.grad * min(1, 10 / norms[-1]) + 0.01 * p)
    for side, got in (("gate", federation.states[0].arrays["local.params"]), ("network", uploads.W[0])):
        want = torch.cat([p.detach().reshape(-1) for p in getattr(module, side).parameters()])
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-5, atol=1e-5 * size)
    assert (max(norms) > 10) == (size > 1)


@pytest.mark.parametrize("network", [small, lambda: small(batchnorm=True)], ids=["plain", "batchnorm"])
def test_gates_of_1_are_fedavg_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: Any) -> None:
    common: dict[str, Any] = {"network": network, "sizes": (8, 6, 10), "momentum": 0.5}
    ours, theirs = Federation(tmp_path, "pfedgate", **common), Federation(tmp_path, "fedavg", **common)
    original = ours.module

    def without_gate() -> Any:
        module = original()
        module.gates = lambda x: torch.ones(module.blocks.count)
        return module

    monkeypatch.setattr(ours, "module", without_gate)
    for ids in ([0, 1, 2], [0, 2]):
        ours.round(ids=ids)
        theirs.round(ids=ids)
        assert ours.server.global_model.params.tobytes() == theirs.server.global_model.params.tobytes()
        assert ours.server.global_model.buffers.tobytes() == theirs.server.global_model.buffers.tobytes()


def test_convolutions_behind_gates_of_1_compute_the_same(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "pfedgate", network=lambda: seeded(Convolutions()))
    module: Any = federation.module().eval()
    x = torch.rand(5, 1, 8, 8)
    torch.testing.assert_close(module(x), module.network.eval()(x), rtol=0, atol=0)


def seeded(module: Any) -> Any:
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def test_a_share_below_that_of_the_first_blocks_is_refused() -> None:
    assert config(method="pfedgate", pfedgate={"sparsity": 0.2}).params.sparsity == 0.2
    for wrong in ({"sparsity": 0.19}, {"sparsity": 0.9, "blocks": 1}):
        with rejected(ConfigurationError, "pfedgate.sparsity", "least 1/", f"got {wrong['sparsity']}"):
            config(method="pfedgate", pfedgate=wrong)


@pytest.mark.parametrize("sparsity", [1.0, 0.5])
def test_what_is_evaluated_is_what_is_exported(tmp_path: Path, sparsity: float) -> None:
    federation = Federation(
        tmp_path, "pfedgate", pfedgate={"sparsity": sparsity}, network=lambda: small(batchnorm=True)
    )
    for _ in range(2):
        federation.round(ids=[0, 1])
    # one that took part, and one that never did
    for i in (0, 2):
        model = federation.evaluated(i)
        ctx, _ = federation.context(i)
        alone = small(batchnorm=True)
        weights.write(alone, federation.method.exported.model(model, federation.states[i], ctx))
        ctx.trainer.load(model)
        module: Any = ctx.trainer.module.eval()
        x, _ = ctx.trainer.samples(np.arange(5))
        torch.testing.assert_close(module(x), alone.eval()(x))
        # whatever else is in the batch
        torch.testing.assert_close(module(x[:1]), module(x)[:1])
        assert ((module.g > 0) & (module.g < 1)).all()
        images, _ = ctx.trainer.samples(np.arange(len(federation.data[i][0])))
        torch.testing.assert_close(module.g, module.gates(images))
    layout, sent, kept = federation.layout, federation.server.layout, federation.states[0].arrays
    assert sum(a.nbytes for a in kept.values()) == 4 * (layout.d + layout.b - sent.d - sent.b)


def test_dropped_blocks_are_0_and_their_gates_learn(tmp_path: Path) -> None:
    federation = Federation(tmp_path, "pfedgate", pfedgate={"sparsity": 0.4})
    ctx, received = federation.context(0, round=1)
    update = federation.method.local_update()
    start = update.merge(received, federation.states[0], ctx)
    exported = federation.method.exported.model(start, federation.states[0], ctx).params
    module: Any = ctx.trainer.module
    g = ctx.layout.tensors(start)["g"]
    kept = np.repeat(module.blocks.kept(g, 0.4, 5), np.concatenate([np.array(own) for own in module.blocks.sizes]))
    assert 0 < kept.sum() < len(kept) and (exported[~kept] == 0).all() and (exported[kept] != 0).any()
    ctx.trainer.load(start)
    x, y = next(iter(ctx.trainer.batches(1)))
    ctx.trainer.differentiate(x, y)
    linear = [p for n, p in module.named_parameters() if n == "gate.2.bias"][0]
    # BatchNorm behind it takes its mean away; what follows does not
    assert linear.grad is not None
    shift = [p for n, p in module.named_parameters() if n == "gate.3.bias"][0]
    batch_kept = module.blocks.kept(module.gates(x).detach().numpy(), 0.4, 5)
    assert (shift.grad.numpy()[~batch_kept] != 0).any()


@pytest.mark.parametrize("alternate", [False, True])
def test_the_gate_stays_and_both_sides_train(tmp_path: Path, alternate: bool) -> None:
    federation = Federation(tmp_path, "pfedgate", pfedgate={"alternate": alternate}, local_epochs=1)
    before = federation.server.global_model.params.copy()
    uploads = federation.round()
    assert uploads.W.shape[1] == Layout.of(small()).d and (uploads.W != before).any()
    gates = [state.arrays["local.params"] for state in federation.states]
    assert not (gates[0] == gates[1]).all()
    close(federation.server.global_model.params, uploads.sizes @ uploads.W / uploads.sizes.sum())


def test_gradients_are_cut(tmp_path: Path) -> None:
    federation = Federation(
        tmp_path, "pfedgate", sizes=(4,), local_epochs=1, network=lambda: seeded(small()), momentum=0.0
    )
    federation.initial.params[:] *= 1e3  # huge gradients
    federation.server.global_model = federation.layout.take(federation.initial, federation.shared)
    before = federation.server.global_model.params.copy()
    uploads = federation.round()
    assert np.linalg.norm(uploads.W[0].astype(np.float64) - before) <= 0.1 * 10 * 1.01


def test_models_leave_a_run_as_the_users_own(run: Run, tmp_path: Path) -> None:
    setting = {**small_clients(tmp_path), "collect_personal_models": True, "finetune_epochs": 1, **BATCHNORM}
    folder = run(method="pfedgate", **setting)
    records = list(read_metrics(folder.path))
    assert not any(record["failures"] or record.get("evaluation", {}).get("failures") for record in records)
    clients = records[-1]["evaluation"]["clients"]
    layout = Layout.of(models.build(BATCHNORM["model"], **SHAPE))
    for i in range(3):
        model = weights.load_safetensors(folder.path / "models" / f"client-{i}.safetensors", layout)
        assert hashlib.sha256(model.params.tobytes()).hexdigest() == clients[str(i)]["sha256"]
    for client in (None, 2):
        state = torch.load(export(folder.path, METHODS, client, tmp_path / f"{client}.pt")[0])
        models.build(BATCHNORM["model"], **SHAPE).load_state_dict(state, strict=True)
