"""FedOBP against METHODS.md: its Table 5, a round by hand, quantiles at any size, every option, the server and client half."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from client_app.stored_state import StoredState
from corolla.experiments import sweep
from fl_app.layout import Layout, Model
from fl_app.transport.wire import Upload, WireError, encode_upload, payload_bytes
from strategies import METHOD_PARAMS
from strategies.base import RoundContext
from strategies.fedobp import COUNTS, METHOD, FedOBPParams, FedOBPUpdate, count_by_layer, personal_mask, select
from strategies.kernels import masks
from tests.conftest import bools, config, f32, flat_layout
from tests.facts import rejected
from tests.methods import halves
from tests.methods.test_fedobp import MASK, PREVIOUS, RECEIVED

LAYOUT = flat_layout([2, 3], [1])


LAYOUT = Layout(LAYOUT.params, LAYOUT.buffers, classifier=frozenset({"w1"}))


INITIAL = Model(np.full(5, -1, np.float32), f32(-1))


class Trainer:
    """Ends with the next of the given vectors; statistics become 100, 200, ..."""

    def __init__(self, *results: np.ndarray, gradient: np.ndarray | None = None) -> None:
        self.results, self.starts, self.gradient = list(results), [], gradient  # type: ignore[var-annotated]

    def train(self, start: Model, **options: Any) -> Model:
        assert not options
        self.starts.append(start)
        return Model(self.results[len(self.starts) - 1], f32(100 * len(self.starts)))

    def loss_gradient(self, model: Model) -> np.ndarray:
        assert self.gradient is not None and model.params is self.results[len(self.starts) - 1]
        assert model.buffers.tolist() == [100 * len(self.starts)]
        return self.gradient


def context(trainer: Trainer, **params: Any) -> RoundContext[FedOBPParams]:
    return halves.context("fedobp", LAYOUT, initial=INITIAL, trainer=trainer, **({"quantile": 0.5} | params))


def one_round(received: np.ndarray, state: StoredState, ctx: RoundContext[FedOBPParams], buffer: float = 7) -> Upload:
    update = FedOBPUpdate()
    travelling = (
        Model(received, f32(buffer)) if ctx.shared >= LAYOUT.names else Model(received, np.zeros(0, np.float32))
    )
    start = update.merge(travelling, state, ctx)
    after = update.train(start, state, ctx)
    update.keep_local(after, state, ctx)
    return update.upload(start, after, state, ctx)


def test_the_golden_round_on_the_client() -> None:
    trainer, state = Trainer(PREVIOUS, f32(9, 9, 9, 9, 9)), StoredState()
    ctx = context(trainer)
    first = one_round(f32(0, 0, 0, 0, 0), state, ctx)
    assert trainer.starts[0].params.tolist() == [0] * 5  # everything global
    assert first.extras[COUNTS].tolist() == [0, 0] and first.mask is None
    assert (
        first.model.params is PREVIOUS
        and payload_bytes(encode_upload(first)) == 4 * 6 + 8 * 2
        and first.num_examples == 12
    )
    second = one_round(RECEIVED, state, ctx)
    # personal: parameters 1 and 3, the client's 2 and 4; the rest received
    assert trainer.starts[1].params.tolist() == [1.5, 2, 3, 4, 4]
    assert trainer.starts[1].buffers.tolist() == [7]  # global statistics
    assert second.extras[COUNTS].tolist() == [1, 1]
    assert state.arrays["fedobp.params"].tolist() == [9] * 5
    # evaluation merges the model trained last with what is received then, and trains nothing
    assert FedOBPUpdate().merge(Model(f32(9, 9, 9, 9, 8), f32(7)), state, ctx).params.tolist() == [9] * 5


def test_nothing_is_personal_at_quantile_one() -> None:
    trainer, state = Trainer(PREVIOUS, PREVIOUS), StoredState()
    ctx = context(trainer, quantile=1.0)
    one_round(RECEIVED, state, ctx)
    upload = one_round(RECEIVED, state, ctx)
    assert trainer.starts[1].params.tobytes() == RECEIVED.tobytes() and upload.extras[COUNTS].tolist() == [0, 0]


def test_the_mask_is_uploaded_on_request() -> None:
    trainer, state = Trainer(PREVIOUS, PREVIOUS), StoredState()
    ctx = context(trainer, upload_mask=True)
    assert one_round(RECEIVED, state, ctx).mask.tolist() == [0]  # type: ignore[union-attr]
    upload = one_round(RECEIVED, state, ctx)
    assert (
        upload.mask is not None
        and masks.unpack(upload.mask, 5).tolist() == MASK
        and payload_bytes(encode_upload(upload)) == 4 * 6 + 1 + 8 * 2
    )


def test_scope_classifier_takes_the_classifiers_own_quantile() -> None:
    # w1's squared differences 0, 9, 1: the median is 1, above it parameter 3 alone
    trainer, state = Trainer(PREVIOUS, PREVIOUS), StoredState()
    ctx = context(trainer, scope="classifier")
    one_round(RECEIVED, state, ctx)
    assert one_round(RECEIVED, state, ctx).extras[COUNTS].tolist() == [0, 1]
    assert trainer.starts[1].params.tolist() == [1.5, 0, 3, 4, 4]


def test_table_8_makes_88_of_the_classifiers_5130_parameters_personal() -> None:
    # 512 features and 10 classes; the linear quantile's rule: 5129 - floor(5129 * 0.983) = 88; the printed inf{F >= q}: 87
    difference = np.random.default_rng(0).permutation(5130).astype(np.float32)
    zeros = np.zeros(5130, np.float32)
    assert personal_mask(difference, zeros, [5120, 10], quantile=0.983).sum() == 88
    assert personal_mask(difference, zeros, [5120, 10], quantile=0.983, rule="printed").sum() == 87


@pytest.mark.parametrize("scale", ["full", "small"])
def test_the_cifar_10_run_of_table_8_with_cls_makes_88_parameters_personal(scale: str) -> None:
    plan = dataclasses.replace(sweep.read_sweep(sweep.bundled()["fedobp-table8"]), scale=scale)
    points = sweep.expand(plan, METHOD_PARAMS, Path("/out"), {}, dict)
    (chosen,) = [p.parsed for p in points if p.varying["preset"] == "fedobp/cifar10-table8/global-norm-cls"]
    layout = Layout.of(METHOD.network(chosen, in_channels=3, num_classes=10, image_size=32))
    assert sum(slot.size for slot in layout.params if slot.name in layout.classifier) == 5130
    own = Model(np.random.default_rng(0).permutation(layout.d).astype(np.float32), np.zeros(layout.b, np.float32))
    zeros = Model(np.zeros_like(own.params), own.buffers)
    loops: Any = Trainer()
    ctx = RoundContext(chosen, chosen.params, 2, 0, layout, layout.names, lambda: zeros, loops, 12, {})
    assert FedOBPUpdate().mask(own, zeros, StoredState(), ctx).sum() == 88


def test_score_gradient_is_the_last_local_update() -> None:
    # |0 - (1..5)|: the largest two are the last two, whatever is received
    trainer, state = Trainer(PREVIOUS, f32(2, 9, 9, 4, 4)), StoredState()
    ctx = context(trainer, score="gradient")
    one_round(f32(0, 0, 0, 0, 0), state, ctx)
    assert one_round(RECEIVED, state, ctx).extras[COUNTS].tolist() == [0, 2]
    assert trainer.starts[1].params.tolist() == [1.5, 0, 3, 4, 5]
    assert state.arrays["fedobp.update"].tolist() == [0.5, 9, 6, 0, 1]


def test_score_fisher_is_the_squared_gradient_at_the_own_model() -> None:
    trainer, state = Trainer(PREVIOUS, PREVIOUS, gradient=f32(-5, 1, 4, 0, -2)), StoredState()
    ctx = context(trainer, score="fisher")
    one_round(f32(0, 0, 0, 0, 0), state, ctx)
    assert one_round(RECEIVED, state, ctx).extras[COUNTS].tolist() == [1, 1]
    # personal 0 (1) and 2 (3 = 3)
    assert trainer.starts[1].params.tolist() == [1, 0, 3, 7, 4]


def test_score_sensitivity_weighs_the_distance_by_the_own_value() -> None:
    # |(own - received) * own|: 0.5 * 1, 2 * 2, 0 * 3, 3 * 4, 1 * 5. Above the median, 4: the last two; obp takes 1 and 3
    trainer, state = Trainer(PREVIOUS, PREVIOUS), StoredState()
    ctx = context(trainer, score="sensitivity")
    one_round(f32(0, 0, 0, 0, 0), state, ctx)
    assert one_round(RECEIVED, state, ctx).extras[COUNTS].tolist() == [0, 2]
    assert trainer.starts[1].params.tolist() == [1.5, 0, 3, 4, 5]


# multiples of 1/8: float32 has their products exactly
vectors = hnp.arrays(np.int32, (2, 6), elements=st.integers(-800, 800)).map(lambda v: (v / 8).astype(np.float32))


@given(vectors, st.floats(0, 1))
def test_sensitivity_is_symmetric_and_follows_scale(pair: np.ndarray, q: float) -> None:
    own, received = pair

    def mask(own: np.ndarray, received: np.ndarray, score: str = "sensitivity") -> list[bool]:
        ctx = context(Trainer(own), score=score, quantile=q)
        update, buffers = FedOBPUpdate(), f32(0)
        scores = update.scores(Model(own, buffers), Model(received, buffers), StoredState(), ctx)
        return select(scores, [own.size], quantile=q).tolist()

    assert mask(own, received) == mask(-own, -received) == mask(4 * own, 4 * received)
    # at a global model of zeros it is Eq. 19's score
    zeros = np.zeros_like(own)
    assert mask(own, zeros) == mask(own, zeros, "obp")


def test_ema_smooths_scores() -> None:
    # scores of round 2: 0.25, 4, 0, 9, 1; of round 3 against zeros: 1, 4, 9, 16, 25; ema 0.9: 0.325, 4, 0.9, 9.7, 3.4
    trainer, state = Trainer(PREVIOUS, PREVIOUS, PREVIOUS), StoredState()
    ctx = context(trainer, ema=0.9)
    one_round(f32(0, 0, 0, 0, 0), state, ctx)
    assert "fedobp.ema" not in state.arrays
    one_round(RECEIVED, state, ctx)
    one_round(f32(0, 0, 0, 0, 0), state, ctx)
    np.testing.assert_allclose(state.arrays["fedobp.ema"], [0.325, 4, 0.9, 9.7, 3.4])
    assert trainer.starts[2].params.tolist() == [0, 2, 0, 4, 0]  # without ema: the last two


def test_no_ema_is_the_same_as_obp_scores() -> None:
    rng = np.random.default_rng(0)
    own, received = rng.standard_normal((2, 5), dtype=np.float32)
    ctx = context(Trainer(own))
    scores = FedOBPUpdate().scores(Model(own, f32(0)), Model(received, f32(0)), StoredState(), ctx)
    assert (select(scores, [5], quantile=0.5) == personal_mask(own, received, [5], quantile=0.5)).all()


@pytest.mark.parametrize(("statistics", "started"), [("global", 7), ("critical", 100), ("local", 100)])
def test_batchnorm_statistics(statistics: str, started: float) -> None:
    trainer, state = Trainer(PREVIOUS, PREVIOUS), StoredState()
    ctx = context(trainer, batchnorm_statistics=statistics)
    first = one_round(RECEIVED, state, ctx)
    assert trainer.starts[0].buffers.tolist() == [-1 if statistics == "local" else 7]
    assert first.model.buffers.size == (0 if statistics == "local" else 1)
    one_round(RECEIVED, state, ctx)
    assert trainer.starts[1].buffers.tolist() == [started]


def server(**params: Any) -> Any:
    return halves.server("fedobp", LAYOUT, INITIAL, **params)


def test_the_server_averages_by_samples_and_notes_counts() -> None:
    strategy = server()
    W, B = np.stack([PREVIOUS, RECEIVED, RECEIVED * 2]), np.stack([f32(1), f32(2), f32(5)])
    extras = {COUNTS: np.array([[0, 0], [1, 1], [2, 3]])}
    strategy.personalize(1, halves.uploads([0, 2, 5], W, B, sizes=[1, 2, 1], extras=extras))
    # (PREVIOUS + 2 RECEIVED + 2 RECEIVED)/4
    np.testing.assert_allclose(strategy.global_model.params, (PREVIOUS + 4 * RECEIVED) / 4)
    assert strategy.global_model.buffers.tolist() == [2.5]
    assert strategy.attempt.client_notes == {
        0: {COUNTS: {"w0": 0, "w1": 0}},
        2: {COUNTS: {"w0": 1, "w1": 1}},
        5: {COUNTS: {"w0": 2, "w1": 3}},
    }


def test_masks_are_expected_on_request_only() -> None:
    assert server().expected().num_params == 0
    assert (server(upload_mask=True).expected().num_params, server(upload_mask=True).expected().num_selected) == (5, -1)
    assert server(batchnorm_statistics="local").expected().b == 0


def counted(*counts: int, mask: np.ndarray | None = None) -> Upload:
    return Upload(INITIAL, mask, {COUNTS: np.array(counts, np.int64)})


def test_check_accepts_counts() -> None:
    server().check(counted(0, 1))
    server().check(counted(2, 3))


@pytest.mark.parametrize(
    ("counts", "message"), [((3, 0), "has 3 for w0, a tensor of 2 elements"), ((1, -1), "has -1 for w1")]
)
def test_check_refuses_counts_by_name(counts: tuple[int, ...], message: str) -> None:
    with pytest.raises(WireError, match=message):
        server().check(counted(*counts))


def test_check_compares_counts_with_the_mask() -> None:
    mask = masks.pack(np.array(MASK))
    server(upload_mask=True).check(counted(1, 1, mask=mask))
    with rejected(WireError, "", "is [1, 2]", "mask has [1, 1]", "per layer"):
        server(upload_mask=True).check(counted(1, 2, mask=mask))


def test_count_by_layer() -> None:
    assert count_by_layer(bools("110 0 0111"), [3, 0, 1, 4]) == [2, 0, 0, 3]


# more than one evaluation batch
@pytest.mark.parametrize("n", [30, 700])
def test_the_trainers_loss_gradient_is_that_of_the_mean_loss(n: int) -> None:
    import torch
    from torch import nn

    from client_app.trainer import LocalTrainer
    from fl_app import weights
    from fl_app.data import ClientData, DatasetInfo

    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (n, 1, 4, 4), np.uint8), rng.integers(0, 3, n)
    data = ClientData(x, y, x[:2], y[:2], DatasetInfo(1, 4, ("a", "b", "c"), n, 2, (0.5,), (0.5,)))
    start = weights.read(module)
    module.eval()
    loss = nn.functional.cross_entropy(module(torch.from_numpy(x).float() / 255), torch.from_numpy(y))
    exact = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(module.parameters()))]).numpy()
    trainer = LocalTrainer(module, config(), data, 1, 0)
    # whatever was in the module before
    trainer.train(start)
    np.testing.assert_allclose(trainer.loss_gradient(start), exact, rtol=1e-4, atol=1e-6)
    after = trainer.read()
    assert after.params.tobytes() == start.params.tobytes() and after.buffers.tobytes() == start.buffers.tobytes()
