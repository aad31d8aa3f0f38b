"""A language model and a class per token, on adapters of frozen transformers: each room's clients train their own.

    pip install 'corolla[peft]'; cd examples; python lora_tokens.py

Two tasks of one's own, with LoRA layers (Hu et al. 2021) of the package peft: a GPT-2 that is judged by its perplexity, and
a BERT that gives each token a class. The script makes both with random weights, and texts of two rooms.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from corolla.task import Metric, Task

IDS, LENGTH, TAGS, ROWS, PADDING = 12, 8, 3, 80, -1
SIZES = {"vocab_size": IDS, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.2}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


class LanguageModel(nn.Module):
    """Token ids [n, T] to the loss of each token from those before it, [n, T]. The first one's is 0."""

    def __init__(self) -> None:
        super().__init__()
        import peft
        import transformers

        lora = peft.LoraConfig(
            task_type="CAUSAL_LM", r=8, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True
        )
        network = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**SIZES, **NO_DROPOUT, bos_token_id=0, eos_token_id=0)
        )
        self.network = peft.get_peft_model(network, lora)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.network(input_ids=ids).logits[:, :-1]
        losses = cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        return nn.functional.pad(losses, (1, 0))


class Tagger(nn.Module):
    """Token ids [n, T] to logits of each token's class, [n, T * TAGS]."""

    def __init__(self) -> None:
        super().__init__()
        import peft
        import transformers

        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        config = transformers.BertConfig(vocab_size=IDS, num_labels=TAGS, **sizes)
        lora = peft.LoraConfig(task_type="TOKEN_CLS", r=4, target_modules=["query", "value"])
        self.network = peft.get_peft_model(transformers.BertForTokenClassification(config), lora)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.network(input_ids=ids).logits
        return logits.flatten(1)


def language_model(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Return the model of a run."""
    return LanguageModel()


def tagger(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Return the model of a run."""
    return Tagger()


class Language(Task):
    """Outputs: each token's loss. Targets: 1 for tokens, 0 for what follows a text's end."""

    metrics = (Metric("perplexity", higher_is_better=False, low=1),)
    input_dtype = "int64"

    def inputs(self, x: Tensor) -> Tensor:
        return x.long()

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs * y).sum() / y.sum()

    def measure(self, outputs: Tensor, y: Tensor, names: Iterable[str]) -> dict[str, float]:
        return {"perplexity": math.exp(float(self.loss(outputs.double(), y)))}


class Tags(Task):
    """Outputs and targets [n, T * TAGS]: the targets have a 1 for each token's class, and zeros for padding."""

    metrics = (Metric("token-accuracy", ratio=True),)
    input_dtype = "int64"

    def inputs(self, x: Tensor) -> Tensor:
        return x.long()

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(outputs.reshape(-1, TAGS), classes(y), ignore_index=PADDING)

    def measure(self, outputs: Tensor, y: Tensor, names: Iterable[str]) -> dict[str, float]:
        truth = classes(y)
        right = outputs.reshape(-1, TAGS).argmax(1) == truth
        return {"token-accuracy": float(right.sum() / (truth != PADDING).sum())}


def classes(y: Tensor) -> Tensor:
    """Return the class of each token, PADDING where its targets are zeros."""
    y = y.reshape(-1, TAGS)
    return y.argmax(1).where(y.any(1), PADDING)


def write(path: Path, tags: bool) -> None:
    """Write two rooms' texts. In each, a token follows from the one before. A token's class depends on it alone.

    Texts with classes have 5 to 8 tokens, and padding behind them.
    """
    draw, arrays = np.random.default_rng(0), {}
    for part in ("train", "test"):
        room = np.arange(ROWS) % 2
        ids = (draw.integers(0, IDS, (ROWS, 1)) + np.arange(LENGTH) * (1 + 4 * room[:, None])) % IDS
        y = np.arange(LENGTH) > np.zeros((ROWS, 1))
        if tags:
            is_token = np.arange(LENGTH) < draw.integers(5, LENGTH + 1, (ROWS, 1))
            ids = ids * is_token
            y = (np.eye(TAGS)[ids % TAGS] * is_token[..., None]).reshape(ROWS, -1)
        arrays |= {f"x_{part}": ids, f"y_{part}": y.astype(np.float32), f"room_{part}": room}
    np.savez(path, **arrays)


def settings(directory: Path, kind: str) -> dict[str, Any]:
    """Write the texts of "language" or "tags", and return the keys of a run, without its method."""
    write(directory / f"{kind}.npz", kind == "tags")
    own: dict[str, Any] = {
        "language": {"model": "lora_tokens:language_model", "task": "lora_tokens:Language", "train": "*lora_*"},
        "tags": {"model": "lora_tokens:tagger", "task": "lora_tokens:Tags", "train": "*lora_*,*modules_to_save*"},
    }[kind]
    return own | {
        "dataset": f"npz:{directory / f'{kind}.npz'}",
        "partition": "by-column",
        "client": "room",
        "num_clients": 2,
        "num_server_rounds": 4,
        "local_epochs": 5,
        "batch_size": 8,
        "optimizer": "adamw",
        "learning_rate": 0.02,
    }


def main() -> None:
    """Train both with FedAvg and FedCAC, and print the perplexity and the share of tokens with the right class."""
    from corolla import run

    with tempfile.TemporaryDirectory() as name:
        for kind, metric in (("language", "perplexity"), ("tags", "token-accuracy")):
            for method in ("fedavg", "fedcac"):
                places = {key: Path(name, part) for key, part in (("output_dir", "runs"), ("state_dir", "state"))}
                done = run(method=method, run_name=f"{kind}-{method}", progress=False, **places, **settings(Path(name), kind))
                print(f"{method}: {metric} {done.summary[f'final-{metric}']:.3f}")


if __name__ == "__main__":
    main()
