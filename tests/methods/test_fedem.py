"""FedEM: responsibilities by hand and their properties, a round by hand, its limits, and what leaves a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from corolla.experiments.exported.export import export
from fl_app import models, weights
from fl_app.layout import Layout, Model
from fl_app.server.run_folder import read_metrics
from strategies import METHODS
from strategies.baselines import components, fedem
from strategies.baselines.fedem import mixture, responsibilities
from tests.conftest import Run
from tests.methods.federation import Federation, close
from tests.methods.one_client import small
from tests.methods.runs import small_clients
from tests.small_models import BATCHNORM

SHAPE = {"in_channels": 1, "num_classes": 10, "image_size": 8}


def test_responsibilities_by_hand() -> None:
    # Equal weights: q_s1 = 1/(1 + e^(loss_1 - loss_2)) = 1/(1 + e^-1.9), 1/2, 1/(1 + e^2.5).
    q, pi = responsibilities([[0.1, 2], [1, 1], [3, 0.5]], [0.5, 0.5])
    close(q[:, 0], np.array([0.869892, 0.5, 0.075858]))
    close(pi, np.array([0.481917, 0.518083]))


@given(st.integers(1, 6), st.integers(1, 4), st.floats(0, 500), st.integers(0, 2**32 - 1))
def test_responsibilities_are_shares(n: int, count: int, scale: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    before = random.dirichlet(np.ones(count))
    q, pi = responsibilities(random.uniform(0, scale, (n, count)), before)
    np.testing.assert_allclose(q.sum(axis=1), 1)
    np.testing.assert_allclose(pi, q.mean(axis=0))
    equal, same = responsibilities(np.full((n, count), scale), before)  # equal components: q = pi
    np.testing.assert_allclose(equal, np.tile(before, (n, 1)), atol=1e-12)
    np.testing.assert_allclose(same, before, atol=1e-12)


def test_a_component_without_weight_stays_without() -> None:
    q, pi = responsibilities([[5.0, 0.1], [2.0, 0.2]], [1.0, 0.0])
    assert q.tolist() == [[1, 0], [1, 0]] and pi.tolist() == [1, 0]


@pytest.mark.parametrize("kinds", [{}, {"batchnorm": True}])
def test_the_prediction_is_the_mixture_of_probabilities(kinds: dict[str, Any]) -> None:
    parts = [small(**kinds) for _ in range(3)]
    for seed, part in enumerate(parts):
        torch.manual_seed(seed)
        for parameter in part.parameters():
            torch.nn.init.normal_(parameter)
    whole = mixture(parts).eval()
    whole.pi.copy_(torch.tensor([0.5, 0.2, 0.3]))
    x = torch.rand(4, 1, 2, 2)
    want = sum(p * part(x).softmax(1) for p, part in zip((0.5, 0.2, 0.3), parts, strict=True))
    torch.testing.assert_close(whole(x).exp(), want)


@pytest.mark.parametrize("kinds", [{}, {"batchnorm": True}])
def test_a_client_by_hand(tmp_path: Path, kinds: dict[str, Any]) -> None:
    eta = 0.5
    federation = Federation(
        tmp_path,
        "fedem",
        fedem={"components": 2},
        network=lambda: small(**kinds),
        sizes=(6, 5),
        batch_size=6,
        local_epochs=1,
        learning_rate=eta,
    )
    layout, start = federation.layout, federation.initial
    for _ in range(2):
        received, pi = (
            federation.server.global_model,
            federation.states[0].arrays.get("local.buffers", np.full(2, 0.5, np.float32)),
        )
        full = layout.put(start, received, federation.shared)
        x, y = (torch.tensor(a) for a in federation.data[0])
        x = x.float() / 255
        modules = [small(**kinds) for _ in range(2)]
        for k, module in enumerate(modules):
            weights.write(module, layout.take(full, components.tensors_of(layout, k) - {"pi"}))
        with torch.no_grad():
            losses = torch.stack([cross_entropy(m.eval()(x), y, reduction="none") for m in modules], 1)
        q, next_pi = responsibilities(losses.numpy(), pi)
        uploads = federation.round()
        for k, module in enumerate(modules):
            module.train()
            (cross_entropy(module(x), y, reduction="none") * torch.tensor(q[:, k])).mean().backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for parameter in module.parameters():
                    assert parameter.grad is not None
                    parameter -= eta * parameter.grad
            want = weights.read(module)
            travelling = layout.subset(federation.shared)
            got = travelling.take(Model(uploads.W[0], uploads.B[0]), components.tensors_of(travelling, k))
            close(got.params, want.params)
            close(got.buffers, want.buffers)
        close(federation.states[0].arrays["local.buffers"], next_pi)
        assert sum(a.nbytes for a in federation.states[0].arrays.values()) == 4 * 2
    close(federation.server.global_model.params, uploads.sizes @ uploads.W / uploads.sizes.sum())


def test_equal_components_in_equal_batch_order_stay_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedem, "stream", lambda component: "train")
    federation = Federation(tmp_path, "fedem", momentum=0.5)
    layout = federation.layout
    one = layout.take(federation.initial, components.tensors_of(layout, 0))
    for k in (1, 2):
        federation.initial = layout.put(federation.initial, one, components.tensors_of(layout, k))
    federation.server.global_model = layout.take(federation.initial, federation.shared)
    for _ in range(3):
        federation.round()
        after = federation.server.global_model.params.reshape(3, -1)
        assert (after == after[0]).all()
        for state in federation.states:
            close(state.arrays["local.buffers"], np.full(3, 1 / 3))


def test_models_leave_a_run_as_mixtures(run: Run, tmp_path: Path) -> None:
    setting = {**small_clients(tmp_path), "collect_personal_models": True, "finetune_epochs": 1, **BATCHNORM}
    folder = run(method="fedem", fedem={"components": 2}, **setting)
    records = list(read_metrics(folder.path))
    assert not any(record["failures"] or record.get("evaluation", {}).get("failures") for record in records)
    for client, pi in ((None, [0.5, 0.5]), (0, None)):
        state = torch.load(export(folder.path, METHODS, client, tmp_path / f"{client}.pt")[0])
        network = mixture([models.build(BATCHNORM["model"], **SHAPE) for _ in range(2)])
        network.load_state_dict(state, strict=True)
        assert float(network.pi.sum()) == pytest.approx(1)
        assert pi is None or network.pi.tolist() == pi
    assert Layout.of(network).d == 2 * Layout.of(models.build(BATCHNORM["model"], **SHAPE)).d
