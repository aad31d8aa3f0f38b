"""Models: sizes, names, seeds, and every error a user can cause."""

from __future__ import annotations

import copy
import importlib
import random
import re
import subprocess
import sys
import textwrap
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fl_app import models, plugins, weights
from fl_app.errors import ConfigurationError, UserError
from fl_app.layout import Layout, Model
from fl_app.rng import torch_seed
from tests.facts import rejected

WIDE = ("mlp", "cnn", "resnet8", "resnet10")
SHAPES = [(n, s, c) for n in WIDE for s, c in ((8, 1), (28, 3), (32, 1), (64, 3))]
SHAPES += [(n, s, c) for n in ("resnet18", "resnet34", "resnet18-fedobp") for s, c in ((8, 3), (64, 1))]


def small(name: str, norm: str = "batch", seed: int = 0) -> nn.Module:
    return models.build(name, in_channels=1, num_classes=3, image_size=8, norm=norm, seed=seed)


def torchvision_resnet(name: str, num_classes: int) -> nn.Module:
    module: nn.Module = getattr(importlib.import_module("torchvision").models, name)(num_classes=num_classes)
    return module


def same(a: Model, b: Model) -> bool:
    return np.array_equal(a.params, b.params) and np.array_equal(a.buffers, b.buffers)


# By hand: cnn 1x28x28 = 832 + 51,264 + (1024 * 512 + 512) + (512 * 10 + 10);
# resnet8 = 9,408 + 128 (stem) + 73,984 + 230,144 + 919,040 (blocks) + 2,570 (fc).
@pytest.mark.parametrize(
    ("name", "channels", "size", "count"),
    [
        ("mlp", 1, 8, 64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10),
        ("cnn", 1, 28, 582_026),
        ("cnn", 3, 32, 878_538),
        ("resnet8", 3, 32, 1_235_274),
        # torchvision's for ImageNet, and a classifier on it
        ("resnet18-fedobp", 3, 32, 11_689_512 + 1000 * 10 + 10),
    ],
)
def test_parameter_counts(name: str, channels: int, size: int, count: int) -> None:
    module = models.build(name, in_channels=channels, num_classes=10, image_size=size)
    assert sum(p.numel() for p in module.parameters()) == count
    assert Layout.of(module).d == count


@pytest.mark.parametrize(("name", "size", "channels"), SHAPES)
def test_forward_shapes(name: str, size: int, channels: int) -> None:
    module = models.build(name, in_channels=channels, num_classes=7, image_size=size)
    assert module.training
    assert all(p.dtype == torch.float32 for p in module.parameters())
    with torch.no_grad():
        assert module(torch.rand(2, channels, size, size)).shape == (2, 7)
        assert module.eval()(torch.rand(1, channels, size, size)).shape == (1, 7)


def rectified_first(name: str, module: nn.Module) -> nn.Module:
    """The same network with the order as printed: rectified, then pooled."""
    module = copy.deepcopy(module)
    if name == "cnn":
        names = ["conv1", "relu1", "pool1", "conv2", "relu2", "pool2", "flatten", "fc1", "relu3", "classifier"]
        return nn.Sequential(OrderedDict((layer, getattr(module, layer)) for layer in names))
    # rectifying again changes nothing
    module.maxpool = nn.Sequential(nn.ReLU(), module.get_submodule("maxpool"))
    return module


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("name", "channels", "size"), [("cnn", 1, 28), ("resnet8", 3, 32), ("resnet18", 3, 64)])
def test_rectifying_after_a_pool_changes_no_bit(
    name: str, channels: int, size: int, layout: torch.memory_format
) -> None:
    ours = models.build(name, in_channels=channels, num_classes=10, image_size=size)
    ours.to(memory_format=layout)  # type: ignore[call-overload]
    printed = rectified_first(name, ours)
    draw = torch.Generator().manual_seed(0)
    # with equal values in a window
    x = torch.randint(0, 4, (16, channels, size, size), generator=draw) / 4
    x[:4] = 0
    found = []
    for module in (ours, printed):
        logits = module(x.to(memory_format=layout))
        logits.square().sum().backward()
        found.append([logits.detach(), *(p.grad for p in module.parameters())])
    for a, b in zip(*found, strict=True):
        assert a is not None and b is not None and torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_cnn_pads_only_where_unpadded_convolutions_do_not_fit() -> None:
    for size, padding in ((4, 2), (15, 2), (16, 0), (17, 0)):
        module = models.build("cnn", in_channels=1, num_classes=3, image_size=size)
        assert module.get_submodule("conv1").padding == (padding, padding)
        assert module(torch.zeros(1, 1, size, size)).shape == (1, 3)


@pytest.mark.parametrize("name", ["resnet18", "resnet34"])
def test_resnets_are_torchvisions(name: str) -> None:
    ours = models.build(name, in_channels=3, num_classes=10, image_size=32, seed=5)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch_seed(5, f"model:{name}"))
        theirs = torchvision_resnet(name, 10)
    state = theirs.state_dict()
    assert list(ours.state_dict()) == list(state)
    # The same draws in the same order: the initialization is torchvision's, to the bit.
    assert all(torch.equal(tensor, state[key]) for key, tensor in ours.state_dict().items())
    batch = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(batch), theirs.eval()(batch))


def test_fedobps_resnet_is_torchvisions_with_a_classifier_on_its_1000_outputs() -> None:
    ours = models.build("resnet18-fedobp", in_channels=3, num_classes=10, image_size=32).eval()
    theirs = torchvision_resnet("resnet18", 1000).eval()
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert missing == ["classifier.weight", "classifier.bias"] and unexpected == []
    batch = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(batch), ours.get_submodule("classifier")(theirs(batch)))


@pytest.mark.parametrize("name", ["resnet8", "resnet18"])
def test_group_norm(name: str) -> None:
    module = small(name, norm="group")
    norms = [m for m in module.modules() if isinstance(m, nn.GroupNorm)]
    assert norms and all(m.num_groups == 32 for m in norms)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in module.modules())
    assert Layout.of(module).b == 0
    # one sample, one pixel, train mode
    assert module(torch.rand(1, 1, 8, 8)).shape == (1, 3)


def test_group_norm_of_odd_widths_uses_fewer_groups() -> None:
    assert models._norm("group", 48).num_groups == 16
    assert models._norm("group", 7).num_groups == 1


def test_layout_knows_classifier_and_batchnorm() -> None:
    for name, classifier in (
        ("mlp", "classifier"),
        ("cnn", "classifier"),
        ("resnet8", "fc"),
        ("resnet18-fedobp", "classifier"),
    ):
        layout = Layout.of(small(name))
        assert layout.classifier == {f"{classifier}.weight", f"{classifier}.bias"}
        assert bool(layout.batchnorm) == name.startswith("resnet")


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet8"])
def test_weights_come_from_seed_and_name_alone(name: str) -> None:
    torch.manual_seed(1)
    first = weights.read(small(name, seed=3))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = weights.read(small(name, seed=3))
    assert torch.equal(torch.get_rng_state(), before)
    assert same(first, second)
    assert not np.array_equal(first.params, weights.read(small(name, seed=4)).params)


# --- the user's own model

FACTORIES = """
    import random

    import numpy as np
    import torch
    from torch import nn

    STARTED = torch.rand(1)  # a draw at import must not shift the weights

    def good(*, in_channels, num_classes, image_size):
        return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))

    def drawn_elsewhere(*, in_channels, num_classes, image_size):
        module = good(in_channels=in_channels, num_classes=num_classes, image_size=image_size)
        scale = random.random() * np.random.normal()
        with torch.no_grad():
            module[1].weight.mul_(scale)
        return module

    def untracked(*, in_channels, num_classes, image_size):
        flat = in_channels * image_size**2
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(flat, track_running_stats=False), nn.Linear(flat, num_classes))

    def lazy(*, in_channels, num_classes, image_size):
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))

    def raises(**_):
        raise KeyError("depth")

    def not_module(**_):
        return [1]

    def frozen(**keywords):
        return good(**keywords).requires_grad_(False)

    def empty(**_):
        return nn.Flatten()

    def wrong_size(*, num_classes, **keywords):
        return good(num_classes=num_classes + 2, **keywords)

    def no_tensor(**keywords):
        class Pair(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = good(**keywords)

            def forward(self, x):
                return self.body(x), x
        return Pair()

    def forward_raises(**_):
        return nn.Linear(5, 3)

    def double(**keywords):
        return good(**keywords).double()

    def half_buffer(**keywords):
        module = good(**keywords)
        module.register_buffer("mean", torch.zeros(1, dtype=torch.float16))
        return module

    def elsewhere(**keywords):
        return good(**keywords).to("meta")

    def old_signature(channels):
        return nn.Linear(1, 1)

    constant = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    (tmp_path / "own_models.py").write_text(textwrap.dedent(FACTORIES))
    (tmp_path / "own_broken.py").write_text("import no_such_package_here\n")
    (tmp_path / "own_syntax.py").write_text("def\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("own_models", "own_broken", "own_syntax"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return lambda factory: f"own_models:{factory}"


def test_own_model_is_seeded_too(own: Callable[[str], str]) -> None:
    before = torch.get_rng_state()
    numpy_before, random_before = np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002 - what is tested
    for factory in ("good", "lazy", "drawn_elsewhere"):
        first, second = (small(own(factory), seed=2) for _ in range(2))
        assert same(weights.read(first), weights.read(second))
        assert first.training and Layout.of(first).d == 64 * 3 + 3
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before) and random.getstate() == random_before  # noqa: NPY002
    for factory in ("lazy", "drawn_elsewhere"):
        ours, other = (weights.read(small(own(factory), seed=seed)) for seed in (2, 3))
        assert not same(ours, other)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "no_such_models:f",
            "cannot import no_such_models .*ModuleNotFoundError.*or in the app directory",
        ),
        ("own_broken:f", "cannot import own_broken .*no_such_package_here"),
        ("own_syntax:f", "cannot import own_syntax .*SyntaxError"),
        ("own_models:other", r"own_models .*own_models.py\) has no other"),
        ("own_models:raises", r"the factory raised KeyError: 'depth'; it is called as factory\(in_channels=1, num_"),
        ("own_models:old_signature", "the factory raised TypeError: .*in_channels"),
        ("own_models:constant", "the factory raised TypeError: 'int' object is not callable"),
        ("own_models:not_module", "must return a torch.nn.Module, got builtins.list"),
        ("own_models:frozen", "no trainable parameters"),
        ("own_models:untracked", "BatchNorm must keep running statistics, .* track_running_stats is False in 1"),
        ("own_models:empty", "no trainable parameters"),
        ("own_models:wrong_size", r"must give logits of shape \[2, 3\], got \[2, 5\]"),
        ("own_models:no_tensor", r"must give logits of shape \[2, 3\], got a tuple"),
        ("own_models:forward_raises", r"forward raised RuntimeError: .* shape \[2, 1, 8, 8\].* of shape \[2, 3\]"),
        ("own_models:double", "parameters must be float32, but 1.weight is torch.float64, 1.bias is torch.float64"),
        ("own_models:half_buffer", "floating-point buffers must be float32, but mean is torch.float16"),
        ("own_models:elsewhere", "must be built on the CPU .*1.weight is on meta"),
    ],
)
def test_own_model_errors(own: Callable[[str], str], name: str, message: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(UserError, match=rf"(?s)^model {name}: .*{message}"):
        small(name)
    assert torch.equal(torch.get_rng_state(), before)


class Answers(nn.Module):
    """A network that answers with a function of its logits and of whether it trains."""

    def __init__(self, answer: Callable[[torch.Tensor, bool], object]) -> None:
        super().__init__()
        self.fc, self.answer = nn.Linear(64, 3), answer

    def forward(self, x: torch.Tensor) -> object:
        return self.answer(self.fc(x.flatten(1)), self.training)


OUTPUTS: dict[str, tuple[Callable[[torch.Tensor, bool], object], str]] = {
    "dict": (lambda y, _: {"logits": y}, "eval mode.* got a dict; return its logits"),
    "object": (lambda y, _: types.SimpleNamespace(logits=y), "eval mode.* got a SimpleNamespace; return its logits"),
    "tuple": (lambda y, _: (y, y), "eval mode.* got a tuple$"),
    "nothing": (lambda y, _: None, "eval mode.* got a NoneType"),
    "integers": (lambda y, _: y.long(), "eval mode.*int64"),
    "complex": (lambda y, _: torch.complex(y, y), "eval mode.*complex64"),
    "sparse": (lambda y, _: y.to_sparse(), "eval mode.*sparse"),
    "detached": (lambda y, _: y.detach(), "eval mode.* gradient"),
    "tuple in training": (lambda y, training: (y, y) if training else y, "train mode.* got a tuple$"),
    "more rows in training": (lambda y, training: torch.cat([y, y]) if training else y, r"train mode.* got \[4, 3\]"),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_what_is_no_logits_is_refused_in_the_same_words(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, message = OUTPUTS[case]
    monkeypatch.setattr(plugins, "load", lambda *_: lambda **_: Answers(answer))
    with rejected(ConfigurationError, f"model own:{case}", "give logits", "[2, 3]") as refused:
        small(f"own:{case}")
    assert re.search(message, str(refused.value))


@pytest.mark.parametrize("traced", [True, False])
def test_a_model_that_fails_in_training_alone_is_refused_every_time(
    traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(y: torch.Tensor, training: bool) -> torch.Tensor:
        if not traced and not training and torch.is_grad_enabled():
            raise RuntimeError("cannot be traced")
        return y * y.new_ones(4) if training else y

    def factory(**_: object) -> nn.Module:
        return Answers(answer)

    monkeypatch.setattr(plugins, "load", lambda *_: factory)
    words = r"forward raised RuntimeError: The size of .* in train mode; it must return logits of shape \[2, 3\]"
    for _ in range(2):
        with pytest.raises(UserError, match=rf"^model own:fails: {words}"):
            small("own:fails")


class _Writes(nn.Module):
    """A network that writes into a parameter in training."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.classifier = nn.Linear(4, 3)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.how == "data":
            self.scale.data.mul_(2)
        if self.training and self.how == "in place":
            with torch.no_grad():
                self.scale.add_(1)
        return torch.as_tensor(self.classifier(x.flatten(1)[:, :4]) * self.scale)


@pytest.mark.parametrize("how", ["", "data", "in place"])
def test_a_trial_in_training_leaves_no_parameter_changed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It works on the network's own parameters, and the network is built again if it has written into them."""
    made: list[nn.Module] = []

    def factory(**_: object) -> nn.Module:
        made.append(_Writes(how))
        return made[-1]

    monkeypatch.setattr(plugins, "load", lambda *_: factory)
    module = small("own:writes")
    assert isinstance(module, _Writes) and torch.equal(module.scale, torch.ones(3))
    assert len(made) == 1 + bool(how) and module is made[-1]
    if how:
        assert torch.equal(module.classifier.weight, made[0].get_parameter("classifier.weight"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_logits_of_any_precision_train(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "load", lambda *_: lambda **_: Answers(lambda y, training: y.to(dtype)))
    assert small("own:any").training


def test_build_errors() -> None:
    with rejected(ConfigurationError, "model", "resnet8", "got 'resnet9'"):
        small("resnet9")
    with rejected(ConfigurationError, "norm", "batch", "group", value="layer"):
        small("resnet8", norm="layer")
    with rejected(ConfigurationError, "model cnn", "images", "least 4 pixels wide", value=3):
        models.build("cnn", in_channels=1, num_classes=3, image_size=3)


def test_import_is_light_and_a_models_size_is_judged_without_more_of_torch() -> None:
    """Every process of a client does it. Random numbers on the meta device import hundreds of modules."""
    count = "models._bytes_of('resnet8', (3, 32, 32), 10, 'batch', 20_000)"
    code = "import sys; from fl_app import models; assert not {'torchvision', 'safetensors'} & {*sys.modules}"
    code += f"; assert {count} > 4e6"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('sympy' in sys.modules)"], capture_output=True, text=True
    )
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet8", "resnet18-fedobp"])
@pytest.mark.parametrize("told", [{"num_classes": 2**31 - 1}, {"in_channels": 2**31 - 1}, {"image_size": 2**31 - 1}])
def test_a_models_size_is_judged_before_it_is_built(
    name: str, told: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may tell any shape of its data."""
    monkeypatch.setattr(models, "available_memory", lambda: 1e9)
    seeded: list[object] = []
    monkeypatch.setattr(models, "_seed", lambda *words: seeded.append(words))
    shape = {"in_channels": 1, "num_classes": 10, "image_size": 8, **told}
    if name.startswith("resnet") and "image_size" in told:
        # its parameters do not depend on the images' size
        models.build(name, **shape)
        return
    with rejected(ConfigurationError, f"model {name}", "samples of shape", "it needs", "1 GB are free"):
        models.build(name, **shape)
    assert not seeded


def test_a_model_that_the_server_has_tried_is_not_trained_when_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[bool] = []

    class Noting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            modes.append(self.training)
            return super().forward(x.flatten(1))

    def factory(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
        return Noting(in_channels * image_size**2, num_classes)

    monkeypatch.setattr("fl_app.plugins.load", lambda kind, name: factory)
    for tried in (False, True):
        models._SPLITS.clear()
        modes.clear()
        models.build("own:factory", in_channels=1, num_classes=3, image_size=4, tried=tried)
        assert (True in modes) is not tried and False in modes
