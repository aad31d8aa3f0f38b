"""Adapters on a vision transformer of timm: each client has its own, and nobody sends the model.

    pip install 'corolla[peft]' timm; python examples/lora_vision.py

LoRA layers (Hu et al. 2021) of the package peft in the attention of a frozen vision transformer, and a classifier, train on the
digits of scikit-learn. The script writes the transformer with random weights into a file of timm's names. A pretrained one is
such a file too: the state dict of `timm.create_model(NAME, pretrained=True)`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

NAME = "vit_tiny_patch16_224"
SIZES = {"patch_size": 2, "embed_dim": 48, "depth": 2, "num_heads": 2}
TRAIN = "*lora_*,*modules_to_save*"
METHODS = ("local", "fedavg", "fedper", "fedcac", "fedobp")


def plain(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Return the transformer. With 0 classes it has no classifier."""
    made: nn.Module = timm.create_model(
        NAME, in_chans=in_channels, num_classes=num_classes, img_size=image_size, **SIZES
    )
    return made


def build(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Return the run's model. What does not train comes from the run's `initial-weights`."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=16, target_modules=["qkv"], modules_to_save=["head"])
    made: nn.Module = get_peft_model(plain(in_channels, num_classes, image_size), config)  # type: ignore[arg-type]
    return made


def write_base(path: Path) -> None:
    """Write the transformer, for digits of 8 x 8 pixels, without a classifier."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    save_file(plain(1, 0, 8).state_dict(), path)


def settings(directory: Path) -> dict[str, Any]:
    """Return the keys of a run, without its method."""
    return {
        "model": "lora_vision:build",
        "train": TRAIN,
        "initial_weights": str(directory / "base.safetensors"),
        "dataset": "digits",
        "partition": "dirichlet-client",
        "num_clients": 4,
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
    """Train with each method. Print the clients' mean accuracy and what a client sends in a round."""
    from corolla import run

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_base(directory / "base.safetensors")
        for method in METHODS:
            done = run(method=method, run_name=method, **settings(directory))
            sent = done.clients["upload-bytes"].max()
            print(f"{method}: accuracy {done.summary['final-accuracy']:.3f}, {sent / 1000:.1f} kB up")


if __name__ == "__main__":
    main()
