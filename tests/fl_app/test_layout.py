from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fl_app import weights
from fl_app.layout import Layout, Model
from tests.conftest import flat_layout

NETWORK = nn.Sequential(
    nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)
)


def filled(layout: Layout, start: float) -> Model:
    return Model(start + np.arange(layout.d, dtype=np.float32), start + np.arange(layout.b, dtype=np.float32) / 4)


# reading a module


def test_layout_of_a_module_by_hand() -> None:
    layout = Layout.of(NETWORK)
    assert [(s.name, s.shape, s.start, s.stop) for s in layout.params] == [
        ("0.weight", (2, 1, 3, 3), 0, 18),
        ("1.weight", (2,), 18, 20),
        ("1.bias", (2,), 20, 22),
        ("3.weight", (3, 8), 22, 46),
        ("3.bias", (3,), 46, 49),
        ("4.weight", (3,), 49, 52),
        ("4.bias", (3,), 52, 55),
        ("5.weight", (2, 3), 55, 61),
        ("5.bias", (2,), 61, 63),
    ]
    # no num_batches_tracked: an integer counter
    assert [s.name for s in layout.buffers] == ["1.running_mean", "1.running_var", "4.running_mean", "4.running_var"]
    assert (layout.d, layout.b) == (63, 2 + 2 + 3 + 3)
    assert layout.sizes == (18, 2, 2, 24, 3, 3, 3, 6, 2)


def test_the_classifier_is_the_last_linear_layer() -> None:
    assert Layout.of(NETWORK).classifier == {"5.weight", "5.bias"}
    assert Layout.of(nn.Linear(2, 3, bias=False)).classifier == {"weight"}
    assert Layout.of(nn.Conv2d(1, 1, 1)).classifier == frozenset()


def test_batchnorm_names_are_parameters_and_statistics() -> None:
    tensors = ("weight", "bias", "running_mean", "running_var")
    assert Layout.of(NETWORK).batchnorm == {f"{prefix}.{name}" for prefix in ("1", "4") for name in tensors}
    assert Layout.of(nn.GroupNorm(2, 4)).batchnorm == frozenset()


def test_order_and_values_are_named_parameters() -> None:
    layout, model = Layout.of(NETWORK), weights.read(NETWORK)
    flat = torch.cat([p.detach().reshape(-1) for _, p in NETWORK.named_parameters()]).numpy()
    assert (model.params == flat).all()
    for name, array in layout.tensors(model).items():
        assert (array == NETWORK.state_dict()[name].numpy()).all()
    assert model.nbytes == 4 * (layout.d + layout.b)


def test_a_model_without_parameters() -> None:
    layout = Layout.of(nn.Flatten())
    assert (layout.d, layout.b, layout.names) == (0, 0, frozenset())
    assert layout.model({}).params.shape == (0,)


# subset, take, put

sizes = st.lists(st.integers(0, 6), min_size=1, max_size=6)


@st.composite
def layouts_and_names(draw: st.DrawFn) -> tuple[Layout, frozenset[str]]:
    layout = flat_layout(draw(sizes), draw(sizes))
    return layout, frozenset(draw(st.sets(st.sampled_from(sorted(layout.names)))))


def test_take_and_put_by_hand() -> None:
    # w0 = 0 1, w1 = 2 3 4, w2 = 5; b0, b1
    layout = flat_layout([2, 3, 1], [1, 2])
    model = Model(np.arange(6, dtype=np.float32), np.array([10, 11, 12], np.float32))
    names = frozenset({"w0", "w2", "b1"})
    part = layout.take(model, names)
    assert part.params.tolist() == [0, 1, 5] and part.buffers.tolist() == [11, 12]
    base = Model(np.full(6, -1, np.float32), np.full(3, -1, np.float32))
    got = layout.put(base, part, names)
    assert got.params.tolist() == [0, 1, -1, -1, -1, 5] and got.buffers.tolist() == [-1, 11, 12]
    # a new model, not the old one changed
    assert base.params.tolist() == [-1] * 6
    assert layout.indices(names).tolist() == [True, True, False, False, False, True]
    subset = layout.subset(names)
    assert [(s.name, s.start, s.stop) for s in subset.params] == [("w0", 0, 2), ("w2", 2, 3)]


@given(layouts_and_names())
def test_take_and_put_are_inverse(pair: tuple[Layout, frozenset[str]]) -> None:
    layout, names = pair
    model, base = filled(layout, 1), filled(layout, -1000)
    part = layout.take(model, names)
    subset = layout.subset(names)
    assert (part.params.size, part.buffers.size) == (subset.d, subset.b) and subset.names == names
    got = layout.put(base, part, names)
    back = layout.take(got, names)
    assert (back.params == part.params).all() and (back.buffers == part.buffers).all()
    rest = layout.names - names
    kept, old = layout.take(got, rest), layout.take(base, rest)
    assert (kept.params == old.params).all() and (kept.buffers == old.buffers).all()
    whole = layout.put(got, layout.take(model, rest), rest)
    assert (whole.params == model.params).all() and (whole.buffers == model.buffers).all()
    assert layout.indices(names).sum() == subset.d
    assert (model.params[layout.indices(names)] == part.params).all()


@given(layouts_and_names())
def test_tensors_and_model_are_inverse(pair: tuple[Layout, frozenset[str]]) -> None:
    layout, _ = pair
    model = filled(layout, 3)
    again = layout.model(layout.tensors(model))
    assert (again.params == model.params).all() and (again.buffers == model.buffers).all()


def test_subset_keeps_what_belongs_to_classifier_and_batchnorm() -> None:
    layout = Layout.of(NETWORK)
    body = layout.subset(layout.names - layout.classifier)
    assert body.classifier == frozenset() and "5.weight" not in body.names and body.batchnorm == layout.batchnorm
    assert layout.subset(layout.names) == layout
