"""The classifier is the layer whose output is the model's: found by a pass, named by a key, refused in the same words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from corolla.experiments.exported import loading
from corolla.experiments.exported.export import export
from fl_app import models, plugins, tracing
from fl_app.errors import UserError
from fl_app.known_names import MODELS
from fl_app.layout import Layout, Split
from fl_app.server.run_folder import read_metrics
from strategies import METHODS
from strategies.base import FEATURES, SPLIT
from tests.conftest import IN_TWO_ROUNDS, Run, config
from tests.facts import mentions, rejected

FC = {"fc.weight", "fc.bias"}


class Net(nn.Module):
    """Parts by name, and what is done with them."""

    def __init__(self, answer: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.answer = answer

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(self, x)


class LoRA(nn.Module):
    """A Linear layer with an adapter beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.base_layer(x) + 2 * self.up(self.down(x))
        return answer


class Adapted(nn.Linear):
    """A Linear layer with an adapter in its own parameters, which is 0 at the start."""

    def __init__(self, inputs: int, outputs: int) -> None:
        """Build the layer."""
        super().__init__(inputs, outputs)
        self.down, self.up = nn.Parameter(torch.ones(2, inputs)), nn.Parameter(torch.zeros(outputs, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's answer with the adapter's."""
        return super().forward(x) + x @ self.down.T @ self.up.T


def body() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())


def fc() -> nn.Linear:
    return nn.Linear(16, 10)


def attention() -> nn.Module:
    return nn.MultiheadAttention(16, 2, batch_first=True)


def attended(net: Any, x: Tensor) -> Tensor:
    z = net.body(x)[:, None]
    return net.attention(z, z, z)[0].mean(1)  # type: ignore[no-any-return]


def in_pieces(net: Any, x: Tensor) -> Tensor:
    z = net.body(x)
    out = torch.zeros(len(x), 10)
    out[:, :5], out[:, 5:] = net.a(z), net.b(z)
    return out


def skipped(net: Any, x: Tensor) -> Tensor:
    z = net.body(x)
    return net.fc(z) + z[:, :10]  # type: ignore[no-any-return]


def trained(net: Any, x: Tensor) -> Tensor:
    z = net.body(x)
    return net.fc(z) + net.aux(z) if net.training else net.fc(z)  # type: ignore[no-any-return]


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


plain = lambda net, x: net.fc(net.body(x))  # noqa: E731
HEADS = {f"{name}.{own}" for name in "ab" for own in ("weight", "bias")}
G, V = "fc.parametrizations.weight.original0", "fc.parametrizations.weight.original1"

# a network, its classifier, the module that holds it, and whether this is one linear layer
CASES: dict[str, tuple[Callable[[], nn.Module], set[str], str | None, bool]] = {
    "a projection after it": (lambda: Net(plain, body=body(), fc=fc(), projection=fc()), FC, "fc", True),
    "before its body": (lambda: Net(plain, fc=fc(), body=body()), FC, "fc", True),
    "in a dict": (
        lambda: Net(lambda n, x: n.parts["fc"](n.parts["z"](x)), parts=nn.ModuleDict({"fc": fc(), "z": body()})),
        {"parts.fc.weight", "parts.fc.bias"},
        "parts.fc",
        True,
    ),
    "lazy": (lambda: Net(plain, body=body(), fc=nn.LazyLinear(10), last=nn.Linear(2, 2)), FC, "fc", True),
    "log_softmax": (lambda: Net(lambda n, x: plain(n, x).log_softmax(1), fc=fc(), body=body()), FC, "fc", True),
    "dropout and flatten": (
        lambda: nn.Sequential(body(), nn.Sequential(fc(), nn.Dropout(), nn.Flatten())),
        {"1.0.weight", "1.0.bias"},
        "1.0",
        True,
    ),
    "an activation": (
        lambda: nn.Sequential(body(), nn.Sequential(fc(), nn.Tanh())),
        {"1.0.weight", "1.0.bias"},
        "1.0",
        False,
    ),
    "scaled": (lambda: Net(lambda n, x: plain(n, x) * 0.5, body=body(), fc=fc()), FC, "fc", False),
    "scaled by a parameter": (
        lambda: Net(lambda n, x: plain(n, x) * n.t, body=body(), fc=fc(), t=nn.Parameter(torch.ones(1))),
        {*FC, "t"},
        "fc",
        False,
    ),
    "sliced": (lambda: Net(lambda n, x: plain(n, x)[:, :10], body=body(), fc=nn.Linear(16, 20)), FC, "fc", False),
    "with a skip connection": (lambda: Net(skipped, body=body(), fc=fc()), FC, "fc", False),
    "batch normalization": (
        lambda: Net(lambda n, x: n.norm(plain(n, x)), norm=nn.BatchNorm1d(10), body=body(), fc=fc()),
        {*FC, "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"},
        "fc",
        False,
    ),
    "two heads": (
        lambda: Net(lambda n, x: n.a(n.body(x)) + n.b(n.body(x)), a=fc(), b=fc(), body=body()),
        HEADS,
        None,
        False,
    ),
    "two heads, half the classes each": (
        lambda: Net(in_pieces, body=body(), a=nn.Linear(16, 5), b=nn.Linear(16, 5)),
        HEADS,
        None,
        False,
    ),
    "an adapter": (
        lambda: Net(plain, fc=LoRA(fc()), body=body()),
        {"fc.base_layer.weight", "fc.base_layer.bias", "fc.down.weight", "fc.up.weight"},
        "fc",
        False,
    ),
    "an adapter in a subclass": (
        lambda: Net(plain, fc=Adapted(16, 10), body=body()),
        {"fc.weight", "fc.bias", "fc.down", "fc.up"},
        "fc",
        False,
    ),
    "weight norm": (
        lambda: Net(plain, fc=parametrizations.weight_norm(fc()), body=body()),
        {"fc.bias", G, V},
        "fc",
        False,
    ),
    "1x1 convolution": (
        lambda: Net(
            lambda n, x: n.fc(n.conv(x)).mean((2, 3)),
            fc=nn.Conv2d(3, 10, 1),
            conv=nn.Conv2d(1, 3, 3),
            last=nn.Linear(2, 2),
        ),
        FC,
        "fc",
        False,
    ),
    "of the functional form": (
        lambda: Net(
            lambda n, x: F.linear(n.body(x), n.w, n.c),
            w=nn.Parameter(torch.ones(10, 16)),
            c=nn.Parameter(torch.zeros(10)),
            body=body(),
        ),
        {"w", "c"},
        None,
        False,
    ),
    "prototypes": (
        lambda: Net(lambda n, x: -torch.cdist(n.body(x), n.p), p=nn.Parameter(torch.ones(10, 16)), body=body()),
        {"p"},
        None,
        False,
    ),
    "vectorized": (
        lambda: Net(lambda n, x: torch.vmap(n.fc)(n.body(x)), body=body(), fc=fc(), last=nn.Linear(2, 2)),
        FC,
        None,
        False,
    ),
    "decoder before attention": (
        lambda: Net(lambda n, x: n.fc(attended(n, x)), fc=fc(), attention=attention(), body=body()),
        FC,
        "fc",
        True,
    ),
    "attention itself": (
        lambda: Net(lambda n, x: attended(n, x)[:, :10], body=body(), attention=attention()),
        {"attention.out_proj.weight", "attention.out_proj.bias"},
        None,
        False,
    ),
    "a second head in training": (lambda: Net(trained, body=body(), fc=fc(), aux=fc()), FC, "fc", True),
    "a frozen copy beside it": (
        lambda: Net(
            lambda n, x: n.head["own"](n.body(x)),
            body=body(),
            head=nn.ModuleDict({"own": fc(), "original": frozen(fc())}),
        ),
        {"head.own.weight", "head.own.bias"},
        "head.own",
        True,
    ),
    "half frozen": (
        lambda: Net(
            lambda n, x: n.fc(n.mid(n.body(x))), body=frozen(body()), fc=fc(), mid=nn.Sequential(nn.Linear(16, 16))
        ),
        FC,
        "fc",
        True,
    ),
    "scaled by a number": (
        lambda: Net(lambda n, x: plain(n, x) * n.t, body=body(), fc=fc(), t=nn.Parameter(torch.tensor(1.0))),
        {*FC, "t"},
        "fc",
        False,
    ),
    "compiled layers": (
        lambda: Net(plain, fc=torch.compile(fc(), backend="eager"), body=torch.compile(body(), backend="eager")),
        {"fc._orig_mod.weight", "fc._orig_mod.bias"},
        "fc._orig_mod",
        True,
    ),
    "compiled": (
        lambda: torch.compile(Net(plain, fc=fc(), body=body()), backend="eager"),  # type: ignore[dict-item, return-value]
        {"_orig_mod.fc.weight", "_orig_mod.fc.bias"},
        "_orig_mod.fc",
        True,
    ),
}


def tied(net: Any, x: Tensor) -> Tensor:
    return net.fc(net.body(net.table(x.flatten(1).long()).mean(1)))  # type: ignore[no-any-return]


def tied_net() -> nn.Module:
    net = Net(tied, table=nn.Embedding(10, 16), body=nn.Sequential(nn.Linear(16, 16), nn.ReLU()), fc=fc())
    net.fc.weight = net.table.weight  # type: ignore[union-attr, assignment]
    return net


FAULTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "tied": (tied_net, "table.weight"),
    "no body": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), "below its classifier"),
    "not on the way": (
        lambda: Net(lambda n, x: x.flatten(1)[:, :10] + 0 * n.w.detach().sum(), w=nn.Parameter(torch.ones(2))),
        "w",
    ),
    "of a frozen layer": (lambda: Net(plain, body=body(), fc=frozen(fc())), "of its classifier"),
    "below a spare layer": (
        lambda: Net(lambda n, x: n.fc(x.flatten(1)), fc=nn.Linear(64, 10), spare=fc()),
        "below its classifier",
    ),
}


def found(module: nn.Module, shape: tuple[int, ...] = (1, 8, 8)) -> Split:
    return tracing.traced(module.eval(), torch.zeros(2, *shape))[1]


@pytest.mark.parametrize("case", CASES)
def test_the_classifier_is_the_last_layer_of_a_pass(case: str) -> None:
    make, classifier, layer, linear = CASES[case]
    split = found(make())
    assert (split.classifier, split.layer, split.linear, split.fault) == (classifier, layer, linear, "")


@pytest.mark.parametrize(
    ("name", "norm"),
    [*((name, "batch") for name, known in MODELS.items() if not known.tokens), ("resnet8", "group")],
)
def test_a_pass_finds_in_built_in_models_what_they_are_marked_with(name: str, norm: str) -> None:
    module = models.build(name, in_channels=3, num_classes=10, image_size=16, norm=norm)
    assert found(module, (3, 16, 16)) == Split.of(module) == Layout.of(module).split


def test_a_pass_finds_the_classifier_of_the_transformer() -> None:
    module = models.build("transformer", in_channels=8, num_classes=4, image_size=1, input_shape=(8,))
    assert found(module, (8,)) == Split.of(module)


def test_a_pass_changes_nothing() -> None:
    net = Net(
        lambda n, x: n.norm(plain(n, x)), norm=nn.BatchNorm1d(10), body=nn.Sequential(body(), nn.Dropout()), fc=fc()
    )
    before = {name: tensor.clone() for name, tensor in net.eval().state_dict().items()}
    state, hooks = torch.get_rng_state(), [dict(part.__dict__) for part in net.modules()]
    found(net)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state) and not net.training
    assert [dict(part.__dict__) for part in net.modules()] == hooks
    assert all(parameter.grad is None for parameter in net.parameters())


def test_parameters_without_a_gradient_are_unused() -> None:
    net = Net(lambda n, x: n.fc(n.body(x).detach()), body=body(), fc=fc(), spare=nn.Linear(2, 2))
    assert found(net).unused == {"body.1.weight", "body.1.bias", "spare.weight", "spare.bias"}
    assert not found(Net(trained, body=body(), fc=fc(), aux=fc())).unused


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], nn.Module]], str]]:
    """Make a network the one of a user's file."""
    made: list[Callable[[], nn.Module]] = []

    def factory(*, in_channels: int, num_classes: int, image_size: int) -> nn.Module:
        return made[-1]()

    def use(make: Callable[[], nn.Module]) -> str:
        made.append(make)
        return "own:model"

    load = plugins.load
    monkeypatch.setattr(plugins, "load", lambda key, name: factory if name == "own:model" else load(key, name))
    models._SPLITS.clear()
    yield use
    models._SPLITS.clear()


def keys_of(method: str) -> dict[str, Any]:
    return {"method": method, **IN_TWO_ROUNDS.get(method, {})}


NEEDING = {name: METHODS[name].need(config(**keys_of(name))) for name in METHODS}
SPLITTING = [name for name, need in NEEDING.items() if need]


def digest(folder: Any) -> str:
    return str(list(read_metrics(folder.path))[-1]["evaluation"]["digest"])


SMALL_RUN = {"num_clients": 2, "train_samples": 8}


# a module of one layer and of several, tensors of no module, tensors beside frozen ones, and names that a wrapper has changed
@pytest.mark.parametrize(
    "case", ["a projection after it", "an adapter", "prototypes", "a frozen copy beside it", "compiled"]
)
def test_part_of_each_network_is_personal(own_model: Any, run: Run, case: str) -> None:
    reference = own_model(CASES[case][0])
    runs = {
        method: digest(run(method=method, model=reference, num_server_rounds=1, run_name=method, **SMALL_RUN))
        for method in ("fedavg", "fedper", "lg-fedavg", "local")
    }
    assert len(set(runs.values())) == 4


@pytest.mark.parametrize("method", SPLITTING)
@pytest.mark.parametrize(
    "case",
    [
        "a projection after it",
        "two heads",
        "1x1 convolution",
        "scaled by a number",
        "tied",
        "no body",
        "of a frozen layer",
        "below a spare layer",
    ],
)
def test_a_method_runs_or_refuses_before_the_start(
    own_model: Any, run: Run, tmp_path: Path, case: str, method: str
) -> None:
    need = NEEDING[method]
    _, _, layer, linear = CASES.get(case, (None, None, None, False))
    able = case in CASES and (need == SPLIT or linear or (need == FEATURES and layer is not None))
    keys = {**keys_of(method), "model": own_model((CASES[case] if case in CASES else FAULTS[case])[0])}
    if able and method in ("heterofl", "fedma"):
        pytest.skip("it has rules of its own for the rest of the network")
    if able:
        assert not any(record["failures"] for record in read_metrics(run(**SMALL_RUN, **keys).path))
        return
    with rejected(UserError, "model", f"this method needs {need}", "the key classifier"):
        run(**keys)
    assert not (tmp_path / "runs" / "run").exists()


@pytest.mark.parametrize("case", ["compiled layers", "compiled"])
def test_features_of_compiled_networks(own_model: Any, run: Run, case: str) -> None:
    assert not any(
        record["failures"]
        for record in read_metrics(run(method="moon", model=own_model(CASES[case][0]), **SMALL_RUN).path)
    )


@pytest.mark.parametrize("method", [name for name in METHODS if name not in SPLITTING])
def test_a_method_without_a_split_takes_any_classifier(own_model: Any, run: Run, method: str) -> None:
    run(**SMALL_RUN, **keys_of(method), model=own_model(CASES["scaled by a number"][0]))


def test_the_key_names_the_classifier(own_model: Any, run: Run) -> None:
    """Equal digests of FedPer and FedAvg where the key's tensors do not train, different ones with another layer."""
    model = own_model(
        lambda: Net(lambda n, x: n.head(n.body(x)), head=nn.Sequential(fc(), nn.ReLU(), nn.Linear(10, 10)), body=body())
    )
    folders = {
        key: run(method="fedper", model=model, classifier=key, run_name=f"run-{n}")
        for n, key in enumerate(["", "head", "head.*", "head.0.*,head.2.*", "head.2"])
    }
    digests = [digest(folder) for folder in folders.values()]
    assert digests[0] == digests[4] != digests[1] == digests[2] == digests[3]
    about = json.loads((folders["head"].path / "run.json").read_text())["split"]
    assert about["classifier"] == ["head.0.weight", "head.0.bias", "head.2.weight", "head.2.bias"]
    assert about["body"] == ["body.1.weight", "body.1.bias"] and about["unused"] == []
    run(method="moon", model=model, classifier="head", run_name="moon")
    with pytest.raises(UserError, match="^classifier: no tensor"):
        run(method="fedper", model=model, classifier="haed", run_name="none")


def test_fedconcat_exports_encoders_below_a_named_classifier(own_model: Any, run: Run, tmp_path: Path) -> None:
    model = own_model(CASES["a projection after it"][0])
    folder = run(**keys_of("fedconcat"), model=model, classifier="fc")
    file, card = export(folder.path, METHODS, None, tmp_path / "model.pt")
    answers = loading.open_file(file, card, METHODS)  # type: ignore[arg-type]
    assert answers(np.zeros((2, 1, 8, 8), np.uint8))[0].shape == (2, 10)
    assert not any(".fc." in name for name in torch.load(file))


def test_the_key_splits_what_is_tied_and_what_is_built_in(own_model: Any, run: Run) -> None:
    model = own_model(tied_net)
    run(method="fedper", model=model, classifier="table,fc")
    with rejected(UserError, "model", "method needs features"):
        run(method="moon", model=model, classifier="table,fc", run_name="moon")
    plain, wide = (
        digest(run(method="fedper", classifier=key, run_name=f"mlp-{key[:3]}")) for key in ("", "fc2,classifier")
    )
    assert plain != wide


@pytest.mark.parametrize("key", ["classifier", "train"])
def test_each_name_of_a_tied_tensor_counts(own_model: Any, run: Run, key: str) -> None:
    model, method = own_model(tied_net), "fedper" if key == "classifier" else "fedavg"
    first, second, both, bias = (
        run(method=method, model=model, run_name=f"run-{n}", **{key: patterns})
        for n, patterns in enumerate(["table.weight,fc.bias", "*fc*", "fc,table", "fc.bias"])
    )
    assert digest(first) == digest(second) == digest(both) != digest(bias)
    about = [json.loads((folder.path / "run.json").read_text())["split"] for folder in (first, second)]
    assert about[0] == about[1]
    with rejected(UserError, key, "no tensor", "'fc.weigth'", "table.weight"):
        run(method=method, model=model, run_name="none", **{key: "fc.weigth"})


def test_a_run_names_body_classifier_and_unused_layers(
    own_model: Any, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "corolla")
    folder = run(model=own_model(CASES["a projection after it"][0]))
    about = json.loads((folder.path / "run.json").read_text())["split"]
    assert set(about["classifier"]) == FC and set(about["unused"]) == {"projection.weight", "projection.bias"}
    log = (folder.path / "log.txt").read_text()
    assert mentions(log, "model own:model", "body body.1", "projection", "classifier fc")
    assert mentions(log, "no gradient reaches", "projection.weight", "projection.bias")


def test_a_pass_is_made_once_in_a_process(own_model: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[object] = []
    traced = tracing.traced
    monkeypatch.setattr(tracing, "traced", lambda *arguments: passes.append(1) or traced(*arguments))  # type: ignore[func-returns-value]
    run(model=own_model(CASES["two heads"][0]))
    assert len(passes) == 1
    run(run_name="built-in")
    assert len(passes) == 1


def test_a_network_that_cannot_be_followed_trains_without_a_split(
    own_model: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no such mode")

    monkeypatch.setattr(tracing, "traced", fails)
    run(model=own_model(CASES["two heads"][0]))
    with rejected(UserError, "model", "needs body", "classifier", "layers cannot be"):
        run(method="fedper", model="own:model", run_name="fedper")
    run(method="fedper", model="own:model", classifier="a,b", run_name="named")


def test_features_are_the_input_of_the_classifier_found() -> None:
    layout = Layout.of(
        models.build("mlp", in_channels=1, num_classes=10, image_size=8, classifier="fc2.*,classifier.*")
    )
    assert layout.classifier == {"fc2.weight", "fc2.bias", "classifier.weight", "classifier.bias"}
    assert layout.split.layer is None
    assert np.count_nonzero(layout.indices(layout.classifier)) == 128 * 64 + 64 + 64 * 10 + 10
