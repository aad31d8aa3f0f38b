"""The key `gradient-checkpointing`: the same bits from fewer kept activations, and models that do not offer it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from client_app.flat import FlatModule
from fl_app import gradient_checkpointing, trainable_tensors
from fl_app.errors import ConfigurationError, MethodError
from fl_app.server.run_folder import read_summary
from tests.conftest import Run, config
from tests.facts import rejected

TRAIN = "*lora_*,*modules_to_save*"


def vision(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Return a vision transformer of timm with adapters of peft, and dropout."""
    timm, peft = pytest.importorskip("timm"), pytest.importorskip("peft")
    sizes = {
        "img_size": image_size,
        "patch_size": 2,
        "embed_dim": 24,
        "depth": 3,
        "num_heads": 2,
        "proj_drop_rate": 0.1,
    }
    plain = timm.create_model("vit_tiny_patch16_224", in_chans=in_channels, num_classes=num_classes, **sizes)
    made: nn.Module = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=["qkv"], modules_to_save=["head"]))
    return made


class Texts(nn.Module):
    """A BERT with adapters of peft, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
        sizes = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
        plain = transformers.BertForSequenceClassification(
            transformers.BertConfig(vocab_size=20, num_labels=3, **sizes)
        )
        self.network = peft.get_peft_model(plain, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(input_ids=x.flatten(1).long() % 20).logits
        return logits


class Earlier(nn.Module):
    """A network with the function of earlier versions of transformers, beside a part without."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.rest = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh(), nn.Softplus())))
        self.again: dict[str, Any] | None = None

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        self.again = gradient_checkpointing_kwargs

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            answer: Tensor = self.rest(self.first(x / 128))
            return answer

        x = x.flatten(1)
        answer: Tensor = inner(x) if self.again is None else checkpoint(inner, x, **self.again)
        return answer


def earlier(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Return the model of a run."""
    return nn.Sequential(Earlier(), nn.Linear(64, num_classes))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "timm": lambda: vision(1, 3, 8),
    "transformers": Texts,
    "an earlier form": lambda: earlier(1, 3, 8),
}


def passed(module: nn.Module) -> tuple[dict[str, Tensor], int]:
    """Pass a batch forward and backward. Return the gradients, and the bytes that were kept in between."""
    torch.manual_seed(3)
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = module(torch.arange(128.0).view(2, 1, 8, 8)).square().sum()
    loss.backward()
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}, sum(t.nbytes for t in kept.values())


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same_from_fewer_activations(name: str) -> None:
    plain = MODELS[name]().train()
    if "earlier" not in name:
        trainable_tensors.freeze(plain, TRAIN)
    again = copy.deepcopy(plain)
    gradient_checkpointing.enable(again, name)
    (expected, kept), (found, fewer) = passed(plain), passed(again)
    assert found.keys() == expected.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(found[one], gradient) for one, gradient in expected.items())
    assert fewer < kept / 2


@pytest.mark.parametrize("name", ["timm", "transformers"])
def test_such_a_network_is_restored_and_shared_like_any_other(name: str) -> None:
    module = MODELS[name]().train()
    gradient_checkpointing.enable(module, name)
    assert pickle.loads(pickle.dumps(module)).recomputes
    flat = FlatModule(module, torch.device("cpu"))
    passed(flat.module)
    flat.reset()
    assert flat.is_restorable


# FedDPA differentiates by sample in evaluation mode
@pytest.mark.parametrize("method", ["fedcac", "feddpa"])
def test_a_run_has_the_same_bits(run: Run, method: str) -> None:
    model = f"{__name__}:vision"
    pytest.importorskip("peft")
    ended = [
        run(method=method, model=model, train=TRAIN, gradient_checkpointing=on, run_name=str(on))
        for on in (False, True)
    ]
    plain, again = (read_summary(folder.path)["digest"] for folder in ended)
    assert plain == again


def batchnorm(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Return a network with BatchNorm in a part that offers it."""
    part = Earlier()
    part.first = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    return nn.Sequential(part, nn.Linear(64, num_classes))


def test_models_that_cannot_are_refused_before_the_run(run: Run) -> None:
    with rejected(ConfigurationError, "gradient-checkpointing", "no part", "set_grad_checkpointing", "mlp"):
        run(gradient_checkpointing=True)
    with rejected(ConfigurationError, "gradient-checkpointing", "BatchNorm", "0.first.1", f"{__name__}:batchnorm"):
        run(model=f"{__name__}:batchnorm", gradient_checkpointing=True)
    # its statistics do not change then
    run(model=f"{__name__}:batchnorm", train="1.*", gradient_checkpointing=True, num_server_rounds=1)
    with rejected(MethodError, "gradient-checkpointing", "method ifca"):
        run(method="ifca", gradient_checkpointing=True)
    with rejected(ConfigurationError, "gradient-checkpointing", "dp-epsilon"):
        config(gradient_checkpointing=True, dp_epsilon=8.0)
