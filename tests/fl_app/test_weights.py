"""The vectors behind a module, their files, and every error a user's weights can cause."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fl_app import models, trainable_tensors, weights
from fl_app.errors import UserError
from fl_app.layout import Layout, Model
from tests.facts import each_mentions, mentions, rejected
from tests.fl_app.test_models import same, small, torchvision_resnet


def initial_model(module: nn.Module, path: str, **how: Any) -> Model:
    """Return the model that `load_initial` makes of a module, which stays as it is."""
    loaded = copy.deepcopy(module)
    weights.load_initial(loaded, path, **how)
    return weights.read(loaded)


def test_read_after_write_is_identity() -> None:
    module = small("resnet8")
    layout = Layout.of(module)
    rng = np.random.default_rng(0)
    model = Model(rng.random(layout.d, np.float32), rng.random(layout.b, np.float32))
    model.params.flags.writeable = False
    pointers = [p.data_ptr() for p in module.parameters()]
    weights.write(module, model)
    assert same(weights.read(module), model)
    assert [p.data_ptr() for p in module.parameters()] == pointers
    state = module.state_dict()
    assert all(np.array_equal(state[name].numpy(), array) for name, array in layout.tensors(model).items())


def test_read_shares_no_memory() -> None:
    module = nn.Linear(1, 1, bias=False)
    model = weights.read(module)
    assert model.params.flags.writeable and model.buffers.shape == (0,)
    with torch.no_grad():
        module.weight += 1
    assert model.params[0] != module.weight.item()


def test_write_refuses_the_wrong_length() -> None:
    with pytest.raises(AssertionError, match="6 elements"):
        weights.write(nn.Linear(2, 2), Model(np.zeros(7, np.float32), np.zeros(0, np.float32)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_read_and_write_on_a_gpu() -> None:
    module = small("resnet8")
    model = weights.read(module)
    module.cuda()
    assert same(weights.read(module), model)
    other = weights.read(small("resnet8", seed=9))
    weights.write(module, other)
    assert same(weights.read(module), other)


# files


def test_file_round_trip(tmp_path: Path) -> None:
    module = small("resnet8")
    layout, model, path = Layout.of(module), weights.read(module), tmp_path / "global.safetensors"
    weights.save_safetensors(path, layout, model)
    weights.save_safetensors(path, layout, model)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert same(weights.load_safetensors(path, layout), model)
    other = small("resnet8", seed=1)
    assert same(initial_model(other, str(path)), model)


def test_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(2, 2)
    layout, model, path = Layout.of(module), weights.read(module), tmp_path / "m.safetensors"
    weights.save_safetensors(path, layout, model)

    def fail(fd: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        weights.save_safetensors(path, layout, Model(model.params + 1, model.buffers))
    assert same(weights.load_safetensors(path, layout), model)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_initial_model_reads_a_torchvision_checkpoint_in_any_float(tmp_path: Path, dtype: torch.dtype) -> None:
    theirs = torchvision_resnet("resnet18", 3)
    state = {k: t.to(dtype) if t.is_floating_point() else t for k, t in theirs.state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    module = models.build("resnet18", in_channels=3, num_classes=3, image_size=32)
    model = initial_model(module, str(tmp_path / "w.safetensors"))
    expected = weights.read(theirs.to(dtype).float())
    assert model.params.dtype == np.float32 and same(model, expected)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.register_buffer("scale", torch.full((1,), 7.0), persistent=False)


def test_initial_model_ignores_tied_names_and_keeps_unsaved_buffers(tmp_path: Path) -> None:
    module = Tied()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert "b.weight" in state and "scale" not in state
    save_file(state, tmp_path / "w.safetensors")
    model = initial_model(module, str(tmp_path / "w.safetensors"))
    assert model.params.shape == (8,) and same(model, weights.read(module)) and model.buffers[0] == 7


def test_initial_model_names_what_does_not_fit(tmp_path: Path) -> None:
    path = str(tmp_path / "w.safetensors")
    save_file(
        {
            "fc1.weight": torch.zeros(4, 64),
            "fc1.bias": torch.zeros(128, dtype=torch.int8),
            "head": torch.zeros(3),
            "steps": torch.zeros(1, dtype=torch.int64),
        },
        path,
    )
    with pytest.raises(UserError) as caught:
        initial_model(small("mlp"), path)
    assert each_mentions(
        str(caught.value).splitlines(),
        (f"initial-weights {path}", "does not fit", "model"),
        ("missing (4)", "fc2.weight [64, 128]", "fc2.bias [64]", "classifier.weight [3, 64]", "classifier.bias [3]"),
        ("  unexpected (1): head [3]",),
        (
            "wrong shape",
            "type (2)",
            "fc1.weight [4, 64]",
            "expected [128, 64]",
            "fc1.bias I8 [128]",
            "expected [128]",
        ),
        ("initial-weights-partial =", "fits", "file"),
    )
    with pytest.raises(UserError, match=r"missing \(47\): .*; and 42 more"):
        initial_model(small("resnet8"), path)


def test_initial_model_reads_a_pytorch_state_dict(tmp_path: Path) -> None:
    module, path = small("resnet8", seed=1), tmp_path / "client-3.pt"
    torch.save(module.state_dict(), path)
    assert same(initial_model(small("resnet8"), str(path)), weights.read(module))
    torch.save({"weights": module.state_dict()}, path)
    with rejected(UserError, "client-3.pt", "state dict", "(tensors by name)", "got 'weights'"):
        initial_model(module, str(path))
    for bad in (module, torch.zeros(3)):
        torch.save(bad, path)
        with pytest.raises(UserError, match="client-3.pt: .*(only tensors|state dict)"):
            initial_model(module, str(path))
    path.write_bytes(b"nothing")
    with rejected(UserError, "client-3.pt", "PyTorch file"):
        initial_model(module, str(path))


def forms(module: nn.Module) -> dict[str, object]:
    """What people save of a module, by a name."""
    state = module.state_dict()
    return {
        "in a checkpoint": {"state_dict": state, "epoch": 3},
        "in another checkpoint": {"model_state_dict": state, "optimizer_state_dict": {"state": {}}, "loss": 0.5},
        "of DataParallel": {f"module.{name}": tensor for name, tensor in state.items()},
        "compiled": {f"_orig_mod.{name}": tensor for name, tensor in state.items()},
        "compiled in DataParallel": {"state_dict": {f"module._orig_mod.{name}": t for name, t in state.items()}},
        "sparse": {name: tensor.to_sparse() if tensor.dim() == 2 else tensor for name, tensor in state.items()},
    }


@pytest.mark.parametrize("form", forms(nn.Linear(1, 1)))
@pytest.mark.parametrize("name", ["mlp", "resnet8"])
def test_initial_model_reads_what_people_save(tmp_path: Path, form: str, name: str) -> None:
    module, path = small(name, seed=1), tmp_path / "w.pt"
    torch.save(forms(module)[form], path)
    assert same(initial_model(small(name), str(path)), weights.read(module))


@pytest.mark.parametrize("kind", [dict, list])
def test_parameters_without_buffers_do_where_there_are_none(tmp_path: Path, kind: type) -> None:
    module, path = small("mlp", seed=1), tmp_path / "w.pt"
    torch.save(kind(module.named_parameters()), path)
    assert same(initial_model(small("mlp"), str(path)), weights.read(module))
    torch.save(kind(small("resnet8").named_parameters()), path)
    with rejected(UserError, "w.pt", "not the buffers", "running_mean", "save `module.state_dict()`"):
        initial_model(small("resnet8"), str(path))


def from_file(module: nn.Module, state: dict[str, torch.Tensor], path: Path) -> tuple[Model, str]:
    """Return a partial file's model, and the line about it."""
    lines: list[str] = []
    if path.suffix == ".pt":
        torch.save(state, path)
    else:
        save_file(state, path)
    model = initial_model(module, str(path), partial=True, told=lines.append)
    (line,) = lines
    return model, line.removeprefix(f"initial-weights {path}: ")


def test_torchvisions_resnet18_starts_all_of_fedobps_but_its_classifier(tmp_path: Path) -> None:
    theirs, path = torchvision_resnet("resnet18", 1000), tmp_path / "imagenet.pt"
    module = models.build("resnet18-fedobp", in_channels=3, num_classes=10, image_size=32)
    layout = Layout.of(module)
    model, line = from_file(module, theirs.state_dict(), path)
    # 122 tensors there, 20 of them num_batches_tracked, which are no part of a model here
    state = {name: tensor for name, tensor in theirs.state_dict().items() if tensor.is_floating_point()}
    got, seeded = layout.tensors(model), layout.tensors(weights.read(module))
    assert len(got) == 104 and len(state) == 102 and set(got) - set(state) == {"classifier.weight", "classifier.bias"}
    for name, array in got.items():
        expected = state[name].numpy() if name in state else seeded[name]
        assert array.tobytes() == expected.tobytes(), name
    assert mentions(
        line, "102 of 104 tensors", "file", "from the seed (2)", "classifier.weight [10, 1000]", "classifier.bias [10]"
    )
    with rejected(UserError, "", "missing (2)", "classifier.weight", "initial-weights-partial = true takes"):
        initial_model(module, str(path))


def test_a_tensor_of_another_shape_comes_from_the_seed(tmp_path: Path) -> None:
    state = torchvision_resnet("resnet18", 1000).state_dict()
    module = models.build("resnet18", in_channels=1, num_classes=10, image_size=28)
    model, line = from_file(module, state, tmp_path / "w.safetensors")
    assert mentions(
        line,
        "99 of 102 tensors",
        "file",
        "from the seed (3)",
        "conv1.weight [64, 1, 7, 7]",
        "fc.weight [10, 512]",
        "fc.bias [10]",
        "in the file",
        "not used (3)",
        "conv1.weight [64, 3, 7, 7]",
        "fc.bias [1000]",
        "fc.weight [1000, 512]",
    )
    got, seeded = (Layout.of(module).tensors(found) for found in (model, weights.read(module)))
    assert got["fc.weight"].tobytes() == seeded["fc.weight"].tobytes()
    assert (got["layer4.1.bn2.running_var"] == state["layer4.1.bn2.running_var"].numpy()).all()


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_other_names_match_by_order_and_shape_within_a_block(tmp_path: Path, suffix: str) -> None:
    def named(*names: str) -> nn.Sequential:
        """Return two blocks; the first has two equal layers."""
        blocks = [[nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3)], [nn.Linear(3, 1)]]
        left = iter(names)
        return nn.Sequential(*(nn.Sequential(OrderedDict((next(left), layer) for layer in block)) for block in blocks))

    theirs, ours = named("one", "two", "three", "out"), named("a", "b", "c", "head")
    model, line = from_file(ours, theirs.state_dict(), tmp_path / f"w{suffix}")
    got, seeded = Layout.of(ours).tensors(model), Layout.of(ours).tensors(weights.read(ours))
    # safetensors does not keep an order: of the equal layers it cannot tell which is which
    expected = {"0.c": theirs[0].three, "1.head": theirs[1].out}
    if suffix == ".pt":
        expected |= {"0.a": theirs[0].one, "0.b": theirs[0].two}
    assert mentions(line, f"{2 * len(expected)} of 8 tensors", "file", f"order and shape ({2 * len(expected)})", "0")
    for layer in ("0.a", "0.b", "0.c", "1.head"):
        told = expected[layer].weight.detach().numpy() if layer in expected else seeded[f"{layer}.weight"]
        assert got[f"{layer}.weight"].tobytes() == told.tobytes()


def test_a_layer_of_another_block_or_one_too_many_does_not_match(tmp_path: Path) -> None:
    ours = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.Linear(2, 3)))
    state = {
        "x.weight": torch.ones(2, 2),
        "y.weight": torch.zeros(2, 2),
        "deep.z.bias": torch.ones(3),
        "b.bias": torch.ones(3),
    }
    model, line = from_file(ours, state, tmp_path / "w.pt")
    assert mentions(
        line,
        "1 of 4 tensors",
        "file",
        "from the seed (3)",
        "a.weight [2, 2]",
        "a.bias [2]",
        "b.weight [3, 2]",
        "in the file",
        "not used (3)",
        "x.weight [2, 2]",
        "y.weight [2, 2]",
        "deep.z.bias [3]",
    )
    assert model.params[-3:].tolist() == [1, 1, 1]
    torch.save({"x.weight": torch.ones(5)}, tmp_path / "w.pt")
    with rejected(UserError, "w.pt", "no tensor fits", "model"):
        initial_model(ours, str(tmp_path / "w.pt"), partial=True)


def test_a_model_whose_own_names_have_the_prefix(tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 1)

    module, path = Wrapped(), tmp_path / "w.pt"
    torch.save(module.state_dict(), path)
    assert same(initial_model(Wrapped(), str(path)), weights.read(module))


@pytest.mark.filterwarnings("ignore:Validating sparse")
def test_a_sparse_tensor_of_another_shape_is_never_made_dense(tmp_path: Path) -> None:
    nothing = torch.zeros((2, 0), dtype=torch.long)
    state = {"weight": torch.sparse_coo_tensor(nothing, torch.zeros(0), (10**9, 10**4)), "bias": torch.zeros(1)}
    torch.save(state, tmp_path / "w.pt")
    with rejected(UserError, "", "wrong shape", "type", "weight [1000000000, 10000]", "expected [1, 2]"):
        initial_model(nn.Linear(2, 1), str(tmp_path / "w.pt"))


def test_initial_model_refuses_missing_corrupt_and_infinite_files(tmp_path: Path) -> None:
    module, path = nn.Linear(2, 1), tmp_path / "w.safetensors"
    with rejected(UserError, "w.safetensors", "no such file"):
        initial_model(module, str(path))
    with rejected(UserError, tmp_path.name, "safetensors file"):
        initial_model(module, str(tmp_path))
    for content in (b"", b"PK\x03\x04 not safetensors", b"\xff" * 64):
        path.write_bytes(content)
        with rejected(UserError, "w.safetensors", "safetensors file"):
            initial_model(module, str(path))
    save_file({"weight": torch.tensor([[1.0, torch.inf]]), "bias": torch.zeros(1)}, path)
    with rejected(UserError, "w.safetensors", "finite in float32", "got others", "weight"):
        initial_model(module, str(path))


# A base model's file, for its network of peft ---------------------------------------------------------------------------


class Whole(nn.Module):
    """A body of two layers and a head, in parts as networks of texts have them."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Module()
        self.text.query, self.text.out = nn.Linear(6, 5), nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.head(self.text.out(self.text.query(x)).relu())
        return answer


def adapted() -> nn.Module:
    """Return such a network within another module, with an adapter of its query and a copy of the head that trains."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["head"])
    return nn.ModuleDict({"network": peft.get_peft_model(Whole(), config)})


TRAINS = "*lora_*,*modules_to_save*"
AT = "network.base_model.model."
COPIES = {
    f"{AT}head.{copy}.{own}": f"head.{own}"
    for copy in ("original_module", "modules_to_save.default")
    for own in ("weight", "bias")
}
BODY = {
    f"{AT}text.{name}": f"text.{name.replace('base_layer.', '')}"
    for name in ("query.base_layer.weight", "query.base_layer.bias", "out.weight", "out.bias")
}


@pytest.mark.parametrize(
    ("part", "expected"), [("", BODY | COPIES), ("text.", BODY)], ids=["whole", "without its head"]
)
def test_a_base_models_file_fills_its_network_of_peft(tmp_path: Path, part: str, expected: dict[str, str]) -> None:
    module, state, lines = adapted(), Whole().state_dict(), list[str]()
    save_file({n.removeprefix(part): t for n, t in state.items() if n.startswith(part)}, tmp_path / "w.safetensors")
    seeded = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trains = trainable_tensors.trained(module, TRAINS)
    weights.load_initial(module, str(tmp_path / "w.safetensors"), trains=trains, told=lines.append)
    loaded, drawn = module.state_dict(), seeded.keys() - expected.keys()
    assert all(torch.equal(loaded[name], state[theirs]) for name, theirs in expected.items())
    assert all(torch.equal(loaded[name], seeded[name]) for name in drawn)
    (line,) = lines
    assert mentions(
        line,
        f"{len(expected)} of {len(seeded)} tensors",
        f"from the seed ({len(drawn)})",
        "lora_A.default.weight [2, 6]",
    )


def test_a_base_models_tensor_that_fits_nowhere_is_named(tmp_path: Path) -> None:
    module, file = adapted(), tmp_path / "w.safetensors"
    trains = trainable_tensors.trained(module, TRAINS)
    state = Whole().state_dict()
    save_file(state | {"pooler.weight": torch.zeros(2, 2)}, file)
    with rejected(UserError, "", "unexpected (1)", "pooler.weight [2, 2]"):
        weights.load_initial(module, str(file), trains=trains)
    # what does not train must be there, and without `train` all else too
    save_file({name: tensor for name, tensor in state.items() if name != "text.out.bias"}, file)
    with rejected(UserError, "", "missing (1)", f"{AT}text.out.bias [5]"):
        weights.load_initial(module, str(file), trains=trains)
    save_file(state, file)
    with rejected(UserError, "", "missing (2)", "lora_A", "lora_B"):
        weights.load_initial(module, str(file))
