"""FedBABU: the classifier never changes and never travels; what fine-tuning moves, and what it starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from client_app.stored_state import StoredState
from client_app.trainer import LocalTrainer
from fl_app import models, weights
from fl_app.layout import Layout, Model
from strategies.base import LocalUpdate, RoundContext
from strategies.baselines.fedbabu import METHOD
from strategies.kernels.aggregate import weighted_mean
from tests.conftest import Run
from tests.methods.runs import client
from tests.small_models import BATCHNORM

HARD = {"momentum": 0.9, "weight_decay": 0.1, "learning_rate": 0.05}


def initial(model: str, seed: int = 0) -> tuple[Layout, Model]:
    module = models.build(model, in_channels=1, num_classes=10, image_size=8, seed=seed)
    return Layout.of(module), weights.read(module)


@pytest.mark.parametrize("model", ["mlp", BATCHNORM["model"]], ids=["mlp", "batchnorm"])
def test_every_untuned_classifier_is_the_initial_one_for_ever(run: Run, model: str) -> None:
    small = {"train_samples": 12, "num_server_rounds": 3, "fraction_train": 0.7, "collect_personal_models": True}
    folder = run(method="fedbabu", model=model, finetune_epochs=1, seed=3, **HARD, **small)
    layout, start = initial(model, seed=3)
    classifier, body = layout.classifier, layout.names - layout.classifier
    models_saved = [
        weights.load_safetensors(folder.path / "models" / f"client-{i}.safetensors", layout) for i in range(3)
    ]
    for saved in models_saved:
        assert layout.take(saved, classifier).params.tobytes() == layout.take(start, classifier).params.tobytes()
        assert layout.take(saved, body).params.tobytes() == layout.take(models_saved[0], body).params.tobytes()
    assert not np.array_equal(layout.take(models_saved[0], body).params, layout.take(start, body).params)
    shared = weights.load_safetensors(folder.path / "models" / "global.safetensors", layout.subset(body))
    assert shared.params.tobytes() == layout.take(models_saved[0], body).params.tobytes()
    assert shared.buffers.tobytes() == models_saved[0].buffers.tobytes()


def test_no_client_keeps_anything(run: Run, tmp_path: Path) -> None:
    run(method="fedbabu", finetune_epochs=1, keep_state=True)
    assert not [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    run(method="fedper", run_name="other", keep_state=True)
    assert [path for path in (tmp_path / "state").rglob("*") if path.is_file()]  # this is where it would lie


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def small_client(**changes: Any) -> RoundContext[Any]:
    random = np.random.default_rng(0)
    x, y = random.integers(0, 256, (12, 1, 2, 2), np.uint8), np.arange(12) % 3
    return client("fedbabu", small(), x, y, num_classes=3, batch_size=5, local_epochs=2, **HARD, **changes)


def moved(ctx: RoundContext[Any], start: Model, after: Model) -> set[str]:
    before, now = ctx.layout.tensors(start), ctx.layout.tensors(after)
    return {name for name in ctx.layout.names if not np.array_equal(before[name], now[name])}


def test_the_client_half_is_training_with_a_frozen_classifier() -> None:
    ctx, state = small_client(), StoredState()
    start = ctx.initial()
    after = METHOD.local_update().train(start, state, ctx)
    classifier = frozenset({"4.weight", "4.bias"})
    assert moved(ctx, start, after) == ctx.layout.names - classifier and not state.arrays
    want = small_client().trainer.train(start, frozen=classifier)
    assert after.params.tobytes() == want.params.tobytes() and after.buffers.tobytes() == want.buffers.tobytes()
    sent = METHOD.local_update().upload(start, after, state, ctx).model
    assert sent.params.size == ctx.layout.d - 18 and sent.buffers.size == 10


@pytest.mark.parametrize(
    ("finetune", "still"),
    [
        ("full", set()),
        ("head", {"1.weight", "1.bias", "2.weight", "2.bias", "2.running_mean", "2.running_var"}),
        ("body", {"4.weight", "4.bias"}),
    ],
)
def test_what_fine_tuning_moves(finetune: str, still: set[str]) -> None:
    ctx, update = small_client(fedbabu={"finetune": finetune}), METHOD.local_update()
    start = ctx.initial()
    tuned = update.finetune(start, StoredState(), ctx, 2)
    assert moved(ctx, start, tuned) == ctx.layout.names - still
    if finetune == "full":  # FedAvg's fine-tuning
        plain = LocalUpdate[Any]().finetune(start, StoredState(), small_client(), 2)
        assert tuned.params.tobytes() == plain.params.tobytes() and tuned.buffers.tobytes() == plain.buffers.tobytes()


def test_a_client_tunes_from_the_global_body_and_the_initial_classifier(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned_from: list[Model] = []
    train = LocalTrainer.train

    def record(self: LocalTrainer, start: Model, **how: Any) -> Model:
        if how.get("purpose") == "finetune":
            tuned_from.append(start)
        return train(self, start, **how)

    monkeypatch.setattr(LocalTrainer, "train", record)
    folder = run(
        method="fedbabu", finetune_epochs=2, fraction_train=0.34, num_server_rounds=1
    )  # one of three takes part
    layout, start = initial("mlp")
    body = weights.load_safetensors(
        folder.path / "models" / "global.safetensors", layout.subset(layout.names - layout.classifier)
    )
    want = layout.put(start, body, layout.names - layout.classifier)
    assert len(tuned_from) == 3 and all(model.params.tobytes() == want.params.tobytes() for model in tuned_from)


def test_the_server_half_is_fedpers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[tuple[np.ndarray, np.ndarray]] = []
    update = METHOD.strategy.update

    def record(self: Any, state: Any, given: Any, turn: Any) -> Any:
        uploads.append((given.W.copy(), given.sizes.copy()))
        return update(self, state, given, turn)

    monkeypatch.setattr(METHOD.strategy, "update", record)
    folder = run(method="fedbabu", num_server_rounds=1)
    layout, _ = initial("mlp")
    W, sizes = uploads[0]
    # 64 x 10 weights and 10 biases
    assert W.shape == (3, layout.d - 650)
    body = weights.load_safetensors(
        folder.path / "models" / "global.safetensors", layout.subset(layout.names - layout.classifier)
    )
    assert body.params.tobytes() == weighted_mean(W, sizes).tobytes()
