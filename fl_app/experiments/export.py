"""Final models of a run folder as PyTorch state dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fl_app.errors import UserError
from fl_app.server.run_folder import MODELS, read_config, read_summary

GLOBAL = "global"
COLLECT = "; run with --set collect-personal-models=true to have every client's"


def export_state_dict(run: Path, client: int | None, output: Path | None) -> Path:
    """Write the global model, or a client's, with torch.save as a state dict that load_state_dict accepts strictly.

    Tensors a client does not share are only in the file if the run collected personal models. Raises UserError if the run
    has no such model.
    """
    import torch
    from safetensors.torch import load_file

    path = model_file(run, client)
    tensors: dict[str, Any] = load_file(path)
    for tensor in [t for t in tensors if t.endswith(".running_mean")]:
        tensors[tensor.replace("running_mean", "num_batches_tracked")] = torch.tensor(0)
    output = output or Path(f"{run.resolve().name}-{path.stem}.pt")
    try:
        torch.save(tensors, output)
    except (OSError, RuntimeError) as error:
        raise UserError(f"--output: cannot write {output}: {error}") from None
    return output


def model_file(run: Path, client: int | None) -> Path:
    """Return the file of a run's global model, or of what it holds of a client's. Raises UserError if it has none."""
    read_summary(run)  # complete
    name = GLOBAL if client is None else f"client-{client}"
    path = run / MODELS / f"{name}.safetensors"
    if not path.is_file():
        there = sorted(p.stem for p in (run / MODELS).glob("*.safetensors"))
        hint = "" if client is None or read_config(run)["collect-personal-models"] else COLLECT
        raise UserError(f"{run} holds no model {name!r}; it holds {', '.join(there) or 'none'}{hint}")
    return path
