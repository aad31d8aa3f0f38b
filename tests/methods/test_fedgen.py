"""FedGen: label weights by hand, generator and losses against plain PyTorch, both halves, and its limits bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from client_app.client_app import app
from fl_app import rng, server_app, weights
from fl_app.config import parse
from fl_app.errors import MethodError
from fl_app.keys import Scalar
from fl_app.layout import Layout, Model
from fl_app.server.run_folder import RunFolder, read_metrics, read_summary
from fl_app.transport.inprocess import InProcessGrid
from fl_app.transport.wire import Upload, WireError
from strategies import METHOD_PARAMS
from strategies.base import Uploads
from strategies.base.state import UploadBuffer
from strategies.baselines.fedgen import (
    FedGen,
    FedGenParams,
    annealed,
    diversity_loss,
    draw_noise,
    generate,
    initial_generator,
    label_weights,
    teacher_loss,
)
from tests.conftest import config
from tests.facts import rejected

TINY = {"noise_dim": 3, "hidden": 4, "batch": 5, "generator_steps": 6}


def test_label_weights_by_hand() -> None:
    # Class 0: 6 + 2 samples, shares 6/8 and 2/8; class 1: the second client's alone; class 2: nobody's.
    shares, qualified = label_weights(np.array([[6, 0, 0], [2, 3, 0]]))
    assert shares.tolist() == [[0.75, 0, 0], [0.25, 1, 0]] and qualified.tolist() == [0, 1]


@given(hnp.arrays(np.int32, st.tuples(st.integers(1, 6), st.integers(1, 8)), elements=st.integers(0, 1000)))
def test_label_weights_are_shares(counts: np.ndarray) -> None:
    shares, qualified = label_weights(counts)
    assert shares.dtype == np.float64 and (shares >= 0).all()
    np.testing.assert_allclose(shares.sum(axis=0), np.isin(np.arange(counts.shape[1]), qualified), atol=1e-12)
    turned, same = label_weights(counts[::-1])
    assert (turned[::-1] == shares).all() and (same == qualified).all()


def test_weights_decay_to_a_floor_and_0_stays_0() -> None:
    assert [annealed(10, 0.5, t) for t in (1, 2, 4)] == [10, 5, 1.25]
    assert annealed(10, 0.5, 100) == annealed(1e-6, 1, 1) == 1e-4
    assert annealed(0, 0.5, 100) == 0


def sequential(p: FedGenParams, num_classes: int, width: int, model: Model) -> nn.Sequential:
    """The generator as a module."""
    inner = nn.Linear(p.noise_dim + num_classes, p.hidden)
    module = nn.Sequential(inner, nn.BatchNorm1d(p.hidden), nn.ReLU(), nn.Linear(p.hidden, width))
    weights.write(module, model)
    return module


def entering(noise: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    return torch.cat([noise, torch.eye(num_classes)[labels]], dim=1)


def test_the_generator_is_linear_batchnorm_relu_linear() -> None:
    p = FedGenParams(noise_dim=3, hidden=4)
    model = initial_generator(5, 7, p, seed=2)
    assert (model.params.size, model.buffers.size) == ((3 + 5 + 3) * 4 + (4 + 1) * 7, 2 * 4)  # d_G, b_G
    assert initial_generator(5, 7, p, seed=2).params.tobytes() == model.params.tobytes()
    assert initial_generator(5, 7, p, seed=3).params.tobytes() != model.params.tobytes()
    module = sequential(p, 5, 7, model)
    flat, statistics = torch.tensor(model.params), torch.tensor(model.buffers)
    noise, labels = torch.rand(6, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 4, 4, 1, 2, 3])
    for training in (True, False):
        module.train(training)
        got = generate(flat, statistics, noise, labels, 5, training=training)
        torch.testing.assert_close(got, module(entering(noise, labels, 5)))
        np.testing.assert_allclose(statistics.numpy(), weights.read(module).buffers, rtol=1e-6)
    # moved by the one in training mode
    assert (statistics.numpy() != model.buffers).all()


@pytest.mark.parametrize(("noise", "mean", "variance"), [("uniform", 1 / 2, 1 / 12), ("gaussian", 0, 1)])
def test_noise(noise: Any, mean: float, variance: float) -> None:
    drawn = draw_noise(np.random.default_rng(0), 1000, FedGenParams(noise=noise, noise_dim=20))
    assert drawn.dtype == np.float32 and drawn.shape == (1000, 20)
    assert abs(drawn.mean() - mean) < 0.02 and abs(drawn.var() - variance) < 0.02
    assert (drawn.min() >= 0) == (noise == "uniform")


def test_the_losses_one_element_at_a_time() -> None:
    random = np.random.default_rng(0)
    n, clients, classes, width = 4, 3, 5, 2
    z, noise = random.normal(size=(n, width)), random.normal(size=(n, 6))
    heads, biases = random.normal(size=(clients, classes, width)), random.normal(size=(clients, classes))
    shares, y = random.random((clients, classes)), np.array([4, 0, 0, 2])
    want = 0.0
    for i in range(clients):
        for b in range(n):
            logits = heads[i] @ z[b] + biases[i]
            want += shares[i, y[b]] * (np.log(np.exp(logits).sum()) - logits[y[b]]) / n
    got = teacher_loss(*(torch.tensor(a) for a in (z, y, heads, biases, shares)))
    assert got.ndim == 0 and got.item() == pytest.approx(want, rel=1e-12)
    pairs = [np.abs(z[i] - z[j]).mean() * ((noise[i] - noise[j]) ** 2).mean() for i in range(n) for j in range(n)]
    assert diversity_loss(torch.tensor(z), torch.tensor(noise)).item() == pytest.approx(
        np.exp(-np.mean(pairs)), rel=1e-12
    )


def network(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3, bias=bias))


def server(folder: Path, module: nn.Module, **changes: Any) -> FedGen:
    parsed = config(method="fedgen", fedgen={**TINY, **changes})
    layout = Layout.of(module)
    return FedGen(parsed, parsed.params, layout, weights.read(module), layout.names, RunFolder(folder, "x"))


def uploads_of(layout: Layout, seed: int = 0, ids: Iterable[int] = range(3)) -> Uploads:
    """Three uploads around nothing in particular; nobody has class 2."""
    W = np.random.default_rng(seed).normal(0, 1, (3, layout.d)).astype(np.float32)
    counts = np.array([[6, 0, 0], [2, 3, 0], [0, 9, 0]], np.int32)
    none = np.zeros((3, 0), np.float32)
    return Uploads(list(ids), W, none, counts.sum(axis=1).astype(np.float64), None, {"class-counts": counts}, [{}] * 3)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("teacher", ["loss", "ensemble"])
def test_two_rounds_of_the_server_against_plain_pytorch(tmp_path: Path, teacher: str, bias: bool) -> None:
    module = network(bias)
    fedgen = server(tmp_path, module, teacher=teacher, diversity=0.7)
    p, layout = fedgen.params, fedgen.layout
    wanted = sequential(p, 3, 6, initial_generator(3, 6, p, seed=0))
    adam = torch.optim.Adam(wanted.parameters(), p.generator_learning_rate, weight_decay=0.01)
    assert fedgen.download_extras(0) == {}
    for round in (1, 2):
        uploads = uploads_of(layout, seed=round)
        clients = [network(bias) for _ in range(3)]
        for i, other in enumerate(clients):
            weights.write(other, Model(uploads.W[i], np.zeros(0, np.float32)))
        shares = torch.tensor([[0.75, 0, 0], [0.25, 0.25, 0], [0, 0.75, 0]])
        stream = rng.generator(0, "fedgen", round)
        adam.param_groups[0]["lr"] = p.generator_learning_rate * 0.98 ** (round - 1)
        wanted.train()
        for _ in range(p.generator_steps):
            labels = torch.tensor(stream.choice(np.array([0, 1]), p.batch))
            noise = torch.tensor(stream.random((p.batch, p.noise_dim), np.float32))
            z = wanted(entering(noise, labels, 3))
            logits = [other[-1](z) for other in clients]
            if teacher == "loss":
                each = [cross_entropy(made, labels, reduction="none") for made in logits]
                loss = sum((share[labels] * losses).mean() for share, losses in zip(shares, each, strict=True))
            else:
                loss = cross_entropy((6 * logits[0] + 5 * logits[1] + 9 * logits[2]) / 20, labels)
            apart = (z[:, None] - z).abs().mean(2) * (noise[:, None] - noise).square().mean(2)
            loss = loss + 0.7 * torch.exp(-apart.mean())
            adam.zero_grad()
            loss.backward()
            adam.step()
        fedgen.round = round
        fedgen.personalize(round, uploads)
        sent, want = fedgen.download_extras(0), weights.read(wanted)
        np.testing.assert_allclose(sent["generator"], want.params, atol=2e-6)
        np.testing.assert_allclose(sent["generator-statistics"], want.buffers, atol=2e-6)
        assert sent["qualified"].tolist() == [1, 1, 0] and sent["qualified"].dtype == np.uint8
        assert fedgen.attempt.round_notes["generator-loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert np.allclose(fedgen.global_model.params, (uploads.sizes @ uploads.W) / 20, atol=1e-6)  # FedAvg
    assert int(fedgen.memory["steps"]) == 12
    # without steps and qualified
    elements = sum(array.size for array in fedgen.memory.values()) - 1 - 3
    assert elements == 3 * want.params.size + want.buffers.size  # 12 d_G + 4 b_G bytes


def test_the_order_of_uploads_and_the_number_of_threads_do_not_matter(tmp_path: Path) -> None:
    made = []
    for threads, order in [(1, (0, 1, 2)), (2, (2, 0, 1))]:
        fedgen = server(tmp_path, network())
        given_rows = uploads_of(fedgen.layout)
        buffer = UploadBuffer.of([4, 5, 7], fedgen.expected())
        for row in order:
            upload = Upload(
                Model(given_rows.W[row], np.zeros(0, np.float32)),
                num_examples=int(given_rows.sizes[row]),
                extras={"class-counts": given_rows.extras["class-counts"][row]},
            )
            fedgen.check(upload)
            buffer.add([4, 5, 7][row], upload, {})
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            fedgen.personalize(1, buffer.result())
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
        made.append({name: array.tobytes() for name, array in fedgen.memory.items()})
    assert made[0] == made[1]


def test_counts_that_cannot_be_are_refused(tmp_path: Path) -> None:
    fedgen = server(tmp_path, network())
    model = Model(np.zeros(fedgen.layout.d, np.float32), np.zeros(0, np.float32))
    for counts in ([-1, 4, 0], [1, 1, 0]):
        with rejected(WireError, "", "class-counts", ">= 0", "num_examples 3"):
            fedgen.check(Upload(model, num_examples=3, extras={"class-counts": np.array(counts, np.int32)}))
    fedgen.check(Upload(model, num_examples=3, extras={"class-counts": np.array([1, 2, 0], np.int32)}))


def test_a_generator_that_diverges_ends_the_run(tmp_path: Path) -> None:
    fedgen = server(tmp_path, network(), generator_learning_rate=1e30)
    with rejected(MethodError, "fedgen", "generator diverged", "round 1", "fedgen.generator-learning-rate 1e"):
        fedgen.personalize(1, uploads_of(fedgen.layout))


def test_the_error_names_the_client_with_the_largest_classifier(tmp_path: Path) -> None:
    fedgen = server(tmp_path, network())
    uploads = uploads_of(fedgen.layout)
    uploads.W[1, fedgen.layout.indices(fedgen.layout.classifier)] = 3e38
    with rejected(MethodError, "fedgen", f"client {uploads.ids[1]}'s", "largest weight", "3e+38"):
        fedgen.personalize(1, uploads)


def test_without_steps_the_first_generator_is_lent(tmp_path: Path) -> None:
    fedgen = server(tmp_path, network(), generator_steps=0)
    fedgen.round = 1
    fedgen.personalize(1, uploads_of(fedgen.layout))
    want = initial_generator(3, 6, fedgen.params, seed=0)
    assert fedgen.download_extras(0)["generator"].tobytes() == want.params.tobytes()
    assert "generator-loss" not in fedgen.attempt.round_notes


def test_the_order_of_replies_does_not_matter(raw_config: dict[str, Scalar]) -> None:
    class Backwards(InProcessGrid):
        useful_messages = math.inf

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            return super().pull_messages(list(message_ids)[::-1])

    digests = []
    for grid, name in ((InProcessGrid, "a"), (Backwards, "b")):
        raw = raw_config | {"method": "fedgen", "fedgen.generator-steps": 3, "num-server-rounds": 3, "run-name": name}
        folder = server_app.run(grid(app, raw, 3), parse(raw, METHOD_PARAMS), lambda *_: None)
        digests.append((read_summary(folder.path)["digest"], [r["generator-loss"] for r in read_metrics(folder.path)]))
    assert digests[0] == digests[1]
