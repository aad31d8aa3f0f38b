"""`train` that leaves out parts of the last Linear layer: a method that needs them says so, and names the key and the tensors."""

from __future__ import annotations

from typing import Any

import pytest

from fl_app import models
from fl_app.errors import MethodError, UserError
from fl_app.layout import Layout
from fl_app.server.run_folder import read_metrics
from fl_app.trainable_tensors import freeze
from strategies.base import all_but_classifier, check_head_trains
from tests.conftest import Run
from tests.facts import rejected

SPLITTING = (
    "fedper",
    "fedrep",
    "fedbabu",
    "lg-fedavg",
    "moon",
    "fedgen",
    "pfedfda",
    "flute",
    "fedas",
    "perfedmask",
    "floco",
    "fedrod",
    "fedproto",
    "fedpac",
    "pfedsim",
)


def layout_of(train: str, model: str = "mlp", **shape: Any) -> Layout:
    module = models.build(model, in_channels=1, num_classes=10, image_size=8, **shape)
    freeze(module, train)
    return Layout.of(module)


HEAD = sorted(layout_of("*").classifier)
BODY = sorted(layout_of("*").names - layout_of("*").classifier)
BIAS, WEIGHT = HEAD


def test_a_layout_knows_which_tensors_of_the_last_linear_layer_are_constants() -> None:
    assert (WEIGHT.endswith(".weight"), BIAS.endswith(".bias")) == (True, True)
    assert layout_of("*").constant_head == frozenset()
    assert layout_of(",".join(BODY)).constant_head == {WEIGHT, BIAS}
    partly = layout_of(",".join([*BODY, WEIGHT]))
    assert (partly.constant_head, partly.classifier) == ({BIAS}, {WEIGHT})
    check_head_trains(partly, "weight")
    with rejected(MethodError, "train", "classifier's weight", "bias", f"key leaves out {BIAS}"):
        check_head_trains(partly, "weight", "bias")


@pytest.mark.parametrize("method", SPLITTING)
def test_a_frozen_head_is_no_missing_linear_layer(run: Run, method: str) -> None:
    with pytest.raises(UserError, match="^train: ") as error:
        run(method=method, train=",".join(BODY))
    text = str(error.value)
    assert BIAS in text and WEIGHT in text, text


@pytest.mark.parametrize("method", [name for name in SPLITTING if name != "floco"])
def test_a_frozen_body_is_no_missing_body(run: Run, method: str) -> None:
    with rejected(MethodError, "train", "no tensor of", "body", "below the classifier"):
        run(method=method, train=",".join(HEAD))


@pytest.mark.parametrize(
    ("method", "lacking"),
    [("pfedfda", WEIGHT), ("pfedfda", BIAS), ("floco", WEIGHT), ("fedgen", WEIGHT), ("flute", WEIGHT)],
)
def test_a_method_that_needs_one_of_both_names_the_key(run: Run, method: str, lacking: str) -> None:
    with pytest.raises(UserError, match="^train: .*classifier's "):
        run(method=method, train=",".join({*BODY, *HEAD} - {lacking}))


def test_a_model_without_a_linear_layer_has_none() -> None:
    with rejected(UserError, "model", "method needs body", "classifier", "no classifier"):
        all_but_classifier(Layout((), ()))


@pytest.mark.parametrize("method", ["feddpa", "fedala", "fedselect", "fedavg"])
@pytest.mark.parametrize("left_out", [BIAS, WEIGHT, "*.bias", "*.weight"])
def test_a_weight_trains_without_its_bias_and_a_bias_without_its_weight(run: Run, method: str, left_out: str) -> None:
    kept = {BIAS: [*BODY, WEIGHT], WEIGHT: [*BODY, BIAS], "*.bias": ["*.weight"], "*.weight": ["*.bias"]}[left_out]
    folder = run(method=method, train=",".join(kept), num_server_rounds=3)
    assert not any(record["failures"] for record in read_metrics(folder.path))


def test_fedala_counts_a_bias_that_does_not_train(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its short way through the last layer alone gives the gradients of the long one, which sees the whole model."""
    found: list[str] = []
    settings = {"method": "fedala", "train": ",".join([*BODY, WEIGHT]), "num_server_rounds": 3, "learning_rate": 0.3}
    for name in ("short", "long"):
        if name == "long":
            monkeypatch.setattr("strategies.baselines.fedala.head_inputs", lambda *_: None)
        folder = run(run_name=name, **settings)
        found.append(list(read_metrics(folder.path))[-1]["evaluation"]["digest"])
    assert found[0] == found[1]
