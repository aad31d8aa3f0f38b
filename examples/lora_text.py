"""Adapters on a text model of Hugging Face: each news desk has its own, and nobody sends the model.

    pip install 'corolla[peft]'; python examples/lora_text.py

LoRA layers (Hu et al. 2021) of the package peft, and a classifier, train beside a frozen BERT. The script writes a small BERT
with random weights and a tokenizer into a folder, as `save_pretrained` writes real ones, so that nothing is downloaded. The
variable LORA_TEXT_BASE names that folder: each machine of a run has its own. Desks use the same words for other topics, so
that one common adapter cannot serve them all.
"""

from __future__ import annotations

import csv
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

BASE = "LORA_TEXT_BASE"
TOPICS = {"city": "mayor tram school park", "sport": "goal match coach league", "trade": "bank price stock market"}
DESKS = ("north", "south", "east", "west")
FILLERS = "the a of in at and for with".split()
WORDS, LENGTH, ROWS = 6, 12, 90
TRAIN = "*lora_*,*modules_to_save*"
METHODS = ("local", "fedavg", "fedper", "fedcac", "fedobp")


class Classifier(nn.Module):
    """A network of transformers and peft: token ids [n, T], 0 at a text's end, to logits [n, classes]."""

    def __init__(self, network: nn.Module) -> None:
        """Wrap a network whose forward returns an object with logits."""
        super().__init__()
        self.network = network

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits."""
        ids = ids.long()
        # a text without words is one of a single token
        seen = (ids > 0) | (torch.arange(ids.shape[1], device=ids.device) == 0)
        logits: Tensor = self.network(input_ids=ids, attention_mask=seen.long()).logits
        return logits


def build(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Return the run's model: the base of this machine's folder, with LoRA layers and a classifier."""
    import transformers
    from peft import LoraConfig, TaskType, get_peft_model

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    base = transformers.AutoModelForSequenceClassification.from_pretrained(os.environ[BASE], num_labels=num_classes)
    config = LoraConfig(task_type=TaskType.SEQ_CLS, r=4, lora_alpha=16, target_modules=["query", "value"])
    with warnings.catch_warnings():
        # of transformers, about a name that peft uses
        warnings.simplefilter("ignore", FutureWarning)
        return Classifier(get_peft_model(base, config))


def write_base(folder: Path) -> None:
    """Write a tokenizer, and a BERT with random weights in shards."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import BertConfig, BertModel

    words = [*FILLERS, *" ".join(TOPICS.values()).split()]
    tokenizer: Any = Tokenizer(models.WordLevel({word: k for k, word in enumerate(["[PAD]", "[UNK]", *words])}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    sizes: dict[str, int] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = BertConfig(vocab_size=len(words) + 2, max_position_embeddings=LENGTH, initializer_range=0.2, **sizes)
    BertModel(config).save_pretrained(folder, max_shard_size="200KB")


def write_texts(path: Path) -> None:
    """Write a table with the columns text, topic and desk. Every desk calls the topics in another order."""
    draw, topics = np.random.default_rng(0), list(TOPICS)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["text", "topic", "desk"])
        for row in range(ROWS * len(DESKS)):
            desk, kind = row % len(DESKS), int(draw.integers(len(topics)))
            words = [str(draw.choice(FILLERS if k % 2 else TOPICS[topics[kind]].split())) for k in range(WORDS)]
            table.writerow([" ".join(words), topics[(kind + desk) % len(topics)], DESKS[desk]])


def settings(directory: Path) -> dict[str, Any]:
    """Return the keys of a run, without its method."""
    return {
        "model": "lora_text:build",
        "train": TRAIN,
        "dataset": f"table:{directory / 'texts.csv'}",
        "target": "topic",
        "client": "desk",
        "num_clients": len(DESKS),
        "tokenizer": str(directory / "base" / "tokenizer.json"),
        "optimizer": "adamw",
        "learning_rate": 0.01,
        "batch_size": 16,
        "local_epochs": 4,
        "num_server_rounds": 5,
        "collect_personal_models": True,
        "output_dir": directory,
        "data_dir": directory / "data",
        "state_dir": directory / "state",
        "progress": False,
    }


def main() -> None:
    """Train with each method, and print the clients' mean accuracy and what a client sends in a round."""
    from corolla import run

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_base(directory / "base")
        write_texts(directory / "texts.csv")
        os.environ[BASE] = str(directory / "base")
        for method in METHODS:
            done = run(method=method, run_name=method, **settings(directory))
            sent = done.clients["upload-bytes"].max()
            print(f"{method}: accuracy {done.summary['final-accuracy']:.3f}, {sent / 1000:.1f} kB up")


if __name__ == "__main__":
    main()
