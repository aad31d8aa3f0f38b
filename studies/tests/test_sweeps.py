"""The sweeps of the collected runs, and the two user-written methods in one of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from corolla.experiments import sweep
from corolla.presets import read_preset
from fl_app import models, plugins
from fl_app.config import parse
from fl_app.layout import Layout, Model
from strategies import METHOD_PARAMS
from studies.results_page import SWEEPS
from tests.experiments.test_compare import FASHION


@pytest.mark.parametrize("path", sorted(SWEEPS.glob("*.toml")), ids=lambda path: path.stem)
def test_sweep_files_expand(path: Path) -> None:
    plugins.reset(SWEEPS)
    plan = sweep.read_sweep(path)
    full = sweep.expand(plan, METHOD_PARAMS, Path("/out"), {}, dict)
    assert len(full) > 1
    if not str(plan.settings.get("partition", "")).startswith("file:"):
        small = sweep.expand(dataclasses.replace(plan, scale="small"), METHOD_PARAMS, Path("/out"), {}, dict)
        assert {p.parsed.scale for p in small} == {"small"}


def test_the_replayed_clients_are_those_of_the_logs() -> None:
    """Compare two rounds with FedAvg's log."""
    plugins.reset(SWEEPS)
    settings = read_preset(f"{FASHION}/fedper") | {"method": "replayed:METHOD"}
    method = plugins.load("method", "replayed:METHOD")
    config = parse(settings, METHOD_PARAMS)
    strategy, server, everybody = method.strategy, SimpleNamespace(config=config), list(range(100))
    layout = Layout.of(models.build("cnn", in_channels=1, num_classes=10, image_size=28))
    own = parse(settings | {"replayed.personal": "classifier"}, METHOD_PARAMS)
    assert (
        method.travelling(config, layout) == layout.names
        and method.travelling(own, layout) == layout.names - layout.classifier
    )
    assert strategy.sample(server, everybody, 10) == [20, 21, 31, 34, 48, 59, 68, 77, 81, 93]
    assert strategy.sample(server, everybody, 100) == [15, 28, 31, 53, 71, 76, 77, 79, 97, 99]


def test_newcomers_as_logged_have_what_they_receive_and_later_their_own_classifier() -> None:
    plugins.reset(SWEEPS)
    method = plugins.load("method", "as_logged:METHOD")
    layout = Layout.of(models.build("cnn", in_channels=1, num_classes=10, image_size=28))
    received, trained = (
        Model(np.full(layout.d, value, np.float32), np.zeros(layout.b, np.float32)) for value in (1, 2)
    )
    own = layout.indices(layout.classifier)
    for personal, start in (("classifier", np.where(own, 2, 1)), ("nothing", np.ones(layout.d))):
        params = SimpleNamespace(personal=personal)
        trainer = SimpleNamespace(train=lambda start: trained)
        ctx = SimpleNamespace(round=1, params=params, layout=layout, trainer=trainer)
        state, update = SimpleNamespace(arrays={}), method.local_update()
        first = layout.tensors(update.merge(received, state, ctx))
        # torch's own initial weights
        assert np.abs(first["fc1.weight"]).max() <= 1 / 32 and first["conv2.bias"].std() > 0
        ctx.round = 2
        assert update.merge(received, state, ctx) is received
        assert update.train(received, state, ctx) is trained
        np.testing.assert_array_equal(update.merge(received, state, ctx).params, start)
