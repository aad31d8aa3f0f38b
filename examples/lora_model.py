"""A small vision transformer of timm with LoRA layers (Hu et al. 2021) in its attention.

Run as a script it writes the backbone's file, examples/backbone.safetensors: here weights from a seed stand for pretrained ones,
which `timm.create_model(..., pretrained=True)` would give.
"""

from __future__ import annotations

from pathlib import Path

import timm
import torch
from torch import Tensor, nn

RANK = 4


class LoRA(nn.Module):
    """A linear layer W x + b beside a trained one of low rank, B A x; B starts at zero."""

    def __init__(self, linear: nn.Linear, rank: int = RANK) -> None:
        """Wrap a linear layer."""
        super().__init__()
        self.linear = linear
        self.lora_a = nn.Parameter(torch.randn(rank, linear.in_features) / rank)
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both."""
        out: Tensor = self.linear(x) + x @ self.lora_a.T @ self.lora_b.T
        return out


def build(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Return the transformer; its weights come from the run's `initial-weights`."""
    model: nn.Module = timm.create_model(
        "vit_tiny_patch16_224", in_chans=in_channels, num_classes=num_classes, img_size=image_size, patch_size=2, embed_dim=32,
        depth=2, num_heads=2,
    )
    for block in model.blocks:  # type: ignore[union-attr]
        block.attn.qkv = LoRA(block.attn.qkv)
    return model


if __name__ == "__main__":
    from safetensors.torch import save_file

    torch.manual_seed(0)
    save_file(build(1, 10, 8).state_dict(), Path(__file__).with_name("backbone.safetensors"))
