"""FedConcat: clusters by hand and their properties, both phases by hand, their limits, what a client keeps, what leaves a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from fl_app import rng, weights
from fl_app.layout import Layout, Model
from fl_app.transport.wire import encode_download, payload_bytes
from strategies.baselines import components
from strategies.baselines.fedconcat import centres_of, clusters, squared_distances
from strategies.engine.screening import compared
from tests.conftest import Run
from tests.methods.federation import Federation, close
from tests.methods.one_client import same, small
from tests.methods.runs import outcome
from tests.small_models import BATCHNORM

SHAPE = {"in_channels": 1, "num_classes": 10, "image_size": 8}


MODELS = pytest.mark.parametrize(
    "model", [{"model": "mlp"}, {**BATCHNORM, "train_samples": 17}], ids=["mlp", "batchnorm"]
)


KINDS = pytest.mark.parametrize("kinds", [{}, {"batchnorm": True}], ids=["plain", "batchnorm"])


def shares(count: int, classes: int, seed: int) -> np.ndarray:
    """Shares of a few samples each: often equal."""
    random = np.random.default_rng(seed)
    counts = np.stack([random.multinomial(random.integers(1, 4), np.full(classes, 1 / classes)) for _ in range(count)])
    return counts / counts.sum(axis=1, keepdims=True)


def federation(
    folder: Path, *, rounds: int = 1, total: int = 4, kinds: dict[str, Any] | None = None, **changes: Any
) -> Federation:
    """Clients around one server, whose encoders train for so many rounds."""
    own = {"encoder_rounds": rounds, **changes.pop("fedconcat", {})}
    draw: Callable[[], nn.Module] = lambda: small(**(kinds or {}))  # noqa: E731
    return Federation(folder, "fedconcat", fedconcat=own, num_server_rounds=total, network=draw, **changes)


@pytest.mark.parametrize("seed", range(5))
def test_clusters_by_hand(seed: int) -> None:
    rows = [(1, 0, 0), (0.9, 0.1, 0), (0, 1, 0), (0, 0.8, 0.2), (0, 0, 1)]
    got = clusters(rows, 3, seed)
    assert got.dtype == np.int64 and got.tolist() == [0, 0, 1, 1, 2]
    assert clusters(rows[::-1], 3, seed).tolist() == [0, 1, 1, 2, 2]
    assert clusters([(0.2, 0.8)] * 4, 3, seed).tolist() == [0, 0, 0, 0]
    # fewer clients than clusters
    assert clusters(rows, 9, seed).tolist() == [0, 1, 2, 3, 4]
    assert clusters(rows, 1, seed).tolist() == [0] * 5


@pytest.mark.parametrize("seed", range(6))
def test_of_ten_starts_the_one_of_least_inertia_is_taken(seed: int) -> None:
    # Squares around the means 0, 1/3, 0.8: 0.067, in each column. With 0.5 in the last group 0.085, where most starts end.
    ones = np.array([0, 0, 0, 0.2, 0.3, 0.5, 0.7, 0.9])
    assert clusters(np.stack([ones, 1 - ones], axis=1), 3, seed).tolist() == [0, 0, 0, 1, 1, 1, 2, 2]


@given(st.integers(1, 12), st.integers(2, 4), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_clusters_are_what_k_means_settles_at(count: int, classes: int, k: int, seed: int) -> None:
    rows = shares(count, classes, seed)
    got = clusters(rows, k, seed)
    distinct, kind = np.unique(rows, axis=0, return_inverse=True)
    assert len(set(got.tolist())) == got.max() + 1 == min(k, len(distinct))
    assert [int(label) for label in dict.fromkeys(got.tolist())] == list(range(got.max() + 1))  # by lowest client
    apart = squared_distances(rows, centres_of(rows, got))
    assert (apart[np.arange(count), got] <= apart.min(axis=1) + 1e-12).all()
    if k >= len(distinct):
        assert len(set(zip(kind.reshape(-1).tolist(), got.tolist(), strict=True))) == len(distinct)
    assert clusters(rows, k, seed).tolist() == got.tolist()


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_no_cluster_is_larger_than_it_may_be(count: int, k: int, cap: int, seed: int) -> None:
    rows = shares(count, 3, seed)
    sizes = np.bincount(clusters(rows, k, seed, cap))
    assert sizes.sum() == count and sizes.min() > 0
    assert sizes.max() <= max(cap, -(-count // min(k, len(np.unique(rows, axis=0)))))


def test_later_clients_join_the_nearest_centre(tmp_path: Path) -> None:
    f = federation(tmp_path, sizes=(6, 6, 6, 6, 6), fedconcat={"clusters": 2})
    for i, labels in enumerate(([0], [0, 0, 0, 0, 0, 1], [2], [2], [1, 2, 2])):
        x, _ = f.data[i]
        f.data[i] = x[: len(labels)], np.array(labels)
    f.round(ids=[0, 2])
    assert (
        f.server.cluster_of(f.server.state, 1, f.latest) == 0 and 1 not in f.server.personal
    )  # asked for in an evaluation
    f.rounds -= 1
    f.round(ids=[1, 3, 4])
    assert [f.server.cluster_of(f.server.state, i, f.latest) for i in range(5)] == [0, 0, 1, 1, 1]
    assert f.server.memory["centres"].tolist() == [[1, 0, 0], [0, 0, 1]]


def test_who_does_not_tell_its_labels_is_nearest_to_nothing(tmp_path: Path) -> None:
    f = federation(tmp_path)
    for told in ({}, {"num-classes": 3, "class-counts": "1,2"}, {"num-classes": 3, "class-counts": "0,0,0"}):
        f.latest.declared = {0: told}
        assert f.server.shares_of(0, f.latest).tolist() == [0, 0, 0]


def drawn(kinds: dict[str, Any], count: int = 3) -> list[nn.Module]:
    """Models of one kind, with different weights and statistics."""
    out = []
    for seed in range(count):
        module = small(**kinds)
        torch.manual_seed(seed)
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.is_floating_point():
                    tensor.uniform_(0.1, 1)
        out.append(module.eval())
    return out


@KINDS
def test_a_concatenation_is_one_classifier_on_what_enters_the_models_own(kinds: dict[str, Any]) -> None:
    parts, x = drawn(kinds), torch.rand(4, 1, 2, 2)
    layout, own = Layout.of(parts[0]), [weights.read(part) for part in parts]
    features = [torch.relu(part.norm(part.features(x.flatten(1)))) for part in parts]  # type: ignore[operator]
    logits = sum(part(x) for part in parts)
    whole = components.concatenation(parts).eval()
    assert Layout.of(whole) == components.concatenated(layout, 3)
    torch.testing.assert_close(whole.encoders(x), torch.cat(features, dim=1))  # type: ignore[operator]
    tensors = weights.read(whole)
    classifier = components.sum_of_classifiers(layout, own)
    start = len(tensors.params) - len(classifier)
    weights.write(whole, Model(np.concatenate([tensors.params[:start], classifier]), tensors.buffers))
    torch.testing.assert_close(whole(x), logits)


def test_a_classifier_without_bias_is_concatenated_with_none() -> None:
    parts = [nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Linear(5, 3, bias=False)) for _ in range(2)]
    layout = Layout.of(parts[0])
    classifier = components.sum_of_classifiers(layout, [weights.read(part) for part in parts])
    assert classifier.shape == (3 * 2 * 5 + 3,) and not classifier[-3:].any()


def test_what_comes_after_the_last_linear_layer_does_not_count() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Linear(5, 3), nn.LogSoftmax(1))
    x = torch.rand(4, 1, 2, 2)
    features = model[1](x.flatten(1))
    assert torch.equal(components.bodies_of([model])(x), features)


@MODELS
def test_one_cluster_is_fedavg_bit_for_bit_and_goes_on_with_its_logits(run: Run, model: dict[str, Any]) -> None:
    setting = {**model, "momentum": 0.5, "fraction_train": 0.7, "evaluate_every": 1, "num_server_rounds": 4}
    plain, _ = outcome(run, "fedavg", **setting)
    ours, _ = outcome(
        run, "fedconcat", fedconcat={"clusters": 1, "encoder_rounds": 3, "start": "concatenated"}, **setting
    )
    for mine, theirs in zip(ours[:3], plain[:3], strict=True):
        assert mine["evaluation"]["digest"] == theirs["evaluation"]["digest"]
        assert [mine[k] for k in ("loss", "accuracy-after", "upload-bytes", "download-bytes")] == [
            theirs[k] for k in ("loss", "accuracy-after", "upload-bytes", "download-bytes")
        ]
    for i, client in ours[3]["clients"].items():
        assert client["loss-before"] == plain[3]["clients"][i]["loss-before"]


@KINDS
@pytest.mark.parametrize("start", ["fresh", "concatenated"])
def test_the_classifier_by_hand(tmp_path: Path, kinds: dict[str, Any], start: str) -> None:
    eta, sizes = 0.5, (6, 5, 4)
    f = federation(
        tmp_path, sizes=sizes, learning_rate=eta, batch_size=6, kinds=kinds, fedconcat={"clusters": 2, "start": start}
    )
    plain = Layout.of(small(**kinds))
    f.round()
    trained = [Model(*pair) for pair in zip(f.server.memory["models"], f.server.memory["statistics"], strict=True)]
    cluster = [f.server.cluster_of(f.server.state, i, f.latest) for i in range(3)]
    assert (
        sorted(set(cluster)) == [0, 1] and [c["cluster"] for _, c in sorted(f.latest.client_notes.items())] == cluster
    )
    torch.manual_seed(rng.torch_seed(f.config.seed, "model:fedconcat"))
    fresh = nn.Linear(2 * 5, 3)
    want = np.concatenate([p.detach().numpy().reshape(-1) for p in fresh.parameters()])
    if start == "concatenated":
        want = components.sum_of_classifiers(plain, trained)
    for _ in range(3):  # rounds 2 to 4
        parts = [small(**kinds) for _ in range(2)]
        for part, model in zip(parts, trained, strict=True):
            weights.write(part, model)
        encode = components.bodies_of(parts).eval()
        after = []
        for x, y in f.data:
            layer = nn.Linear(10, 3)
            weights.write(layer, Model(want, np.zeros(0, np.float32)))
            z = encode(torch.tensor(x).float() / 255).detach()
            # the batch is all there is, so three batches are three epochs
            for _ in range(3):
                layer.zero_grad()
                cross_entropy(layer(z), torch.tensor(y)).backward()  # type: ignore[no-untyped-call]
                with torch.no_grad():
                    for parameter in layer.parameters():
                        assert parameter.grad is not None
                        parameter -= eta * parameter.grad
            after.append(weights.read(layer).params)
        uploads = f.round()
        close(uploads.extras["classifier"], np.stack(after))
        want = np.mean(after, axis=0, dtype=np.float64).astype(np.float32)  # not weighted
        close(f.server.memory["classifier"], want)
        assert uploads.W.shape == (3, 0) and same(f.server.models(f.server.state)[1], trained[1])
    for i in range(3):
        kept = f.states[i].arrays
        assert sum(a.nbytes for a in kept.values()) == 2 * 4 * (plain.d - (5 * 3 + 3) + plain.b)


def test_a_cluster_without_participants_stays(tmp_path: Path) -> None:
    f = federation(tmp_path, rounds=2, fedconcat={"clusters": 3})
    f.round()
    before = f.server.models(f.server.state)
    f.round(ids=[1])
    for k, model in enumerate(f.server.models(f.server.state)):
        assert same(model, before[k]) == (k != f.server.cluster_of(f.server.state, 1, f.latest))


def test_batches_of_no_number_are_epochs(tmp_path: Path) -> None:
    f = federation(tmp_path, fedconcat={"classifier_batches": 0})
    f.round()
    f.rounds = 2
    f.latest.round = 2
    ctx, received = f.context(0)
    update = f.method.local_update()
    update.train(update.merge(received, f.states[0], ctx), f.states[0], ctx)
    # two epochs of ten samples, four in a batch
    assert ctx.trainer.steps == 2 * 3


def test_encoders_are_sent_to_who_has_none(tmp_path: Path) -> None:
    f = federation(tmp_path, kinds={"batchnorm": True}, fedconcat={"clusters": 2})
    layout = Layout.of(small(batchnorm=True))
    classifier = 4 * (3 * 2 * 5 + 3)
    encoders = 2 * 4 * (layout.d - (5 * 3 + 3) + layout.b)

    def sent(client_id: int) -> int:
        return payload_bytes(encode_download(f.server.download_for(client_id, f.latest, "evaluate")))

    f.round()
    assert [sent(i) for i in range(3)] == [4 * (layout.d + layout.b)] * 3
    f.round(ids=[1])
    assert [sent(i) for i in range(3)] == [classifier + encoders, classifier, classifier + encoders]
    ctx, received = f.context(1)
    assert not received.nbytes and set(ctx.extras) == {"classifier"}
    # whoever is asked, the answer is the same
    for i in range(3):
        ctx, received = f.context(i)
        update = f.method.local_update()
        got = f.method.exported.model(update.merge(received, f.states[i], ctx), f.states[i], ctx)
        assert same(got, f.server.exported())


def test_classifiers_are_screened_and_models_of_different_clusters_are_not(tmp_path: Path) -> None:
    f = federation(tmp_path)
    f.round()
    kinds = []
    for round in (1, 2):
        f.latest.round, f.server.round = round, round - 1
        expected = f.server.expected()
        kinds.append(sorted(compared(f.server, _buffer(f, expected), lambda i: {})))
    assert kinds == [[], ["classifiers"]]


def _buffer(f: Federation, expected: Any) -> Any:
    from strategies.base.state import UploadBuffer

    return UploadBuffer.of(list(range(len(f.data))), expected)
