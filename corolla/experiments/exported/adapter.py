"""A model with adapters of the package peft, in the files of peft and transformers: the adapter alone, or merged."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corolla.experiments.exported.run_models import Trained, build
from fl_app import extras
from fl_app.errors import UserError, describe
from fl_app.files import make_directory, publish

if TYPE_CHECKING:
    from torch import nn

ADAPTER, MERGED = "adapter_model.safetensors", "model.safetensors"
"""The files with weights that peft and transformers write."""
# so that one file has all weights
_ONE_SHARD = "1000TB"


def write_adapter(trained: Trained, folder: Path) -> Path:
    """Write what trains beside a base model, for `PeftModel.from_pretrained(base, folder)`. Return the file of weights.

    Raises UserError if peft is not installed, or if the model is not one network with adapters of peft.
    """
    return _write(folder, ADAPTER, lambda into: _adapted(trained).save_pretrained(into))


def write_merged(trained: Trained, folder: Path) -> Path:
    """Write the base model with its adapters merged into it. Return the file of weights.

    A model of transformers gets its configuration, for `from_pretrained(folder)`. Any other is safetensors of the base
    model's names. Raises UserError as `write_adapter` does, and for adapters that cannot be merged.
    """
    from safetensors.torch import save_model

    adapted = _adapted(trained)
    try:
        merged = adapted.merge_and_unload()
    # kinds of adapters say it in several ways
    except (ValueError, AttributeError, NotImplementedError) as error:
        raise UserError(key="--merged", rule=f"its adapters cannot be merged ({describe(error)})") from error

    def write(into: Path) -> None:
        if hasattr(merged, "save_pretrained"):
            merged.save_pretrained(into, max_shard_size=_ONE_SHARD)
        else:
            save_model(merged, str(into / MERGED))

    return _write(folder, MERGED, write)


def _adapted(trained: Trained) -> Any:
    """Return the model's network of peft, with the run's weights in parameters as its maker has them."""
    extras.require("peft", "an adapter's export")
    import peft

    module = build(trained.config, trained.shape)
    state = trained.module.state_dict()
    if module.state_dict().keys() != state.keys():
        rule = f"method {trained.config.method} trains a network around the model; export a state dict"
        raise UserError(key="--peft", rule=rule)
    module.load_state_dict(state)
    module.eval()
    found: list[nn.Module] = [part for part in module.modules() if isinstance(part, peft.PeftModel)]
    if len(found) != 1:
        raise UserError(
            key="--peft",
            rule=f"model {trained.config.model} must have one PeftModel in it, it has {len(found) or 'none'}",
        )
    return found[0]


def _write(folder: Path, weights: str, write: Callable[[Path], object]) -> Path:
    """Let `write` fill a directory, and publish its files in a folder. Return the path of the file of weights."""
    make_directory(folder)
    with tempfile.TemporaryDirectory(prefix=".corolla-", dir=folder) as made:
        write(Path(made))
        for file in sorted(Path(made).iterdir()):
            # peft describes the adapter in a page of its own form, the card does here
            if file.is_file() and file.suffix != ".md":
                publish(folder / file.name, functools.partial(shutil.copyfile, file))
    return folder / weights
