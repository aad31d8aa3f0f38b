"""Final models of a run folder as files of their own, each with its card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corolla.experiments.exported import model_card, run_models
from fl_app import plugins
from fl_app.errors import UserError
from fl_app.files import publish


def export(
    run: Path,
    methods: Mapping[str, Any],
    client: int | None = None,
    output: Path | None = None,
    *,
    onnx: bool = False,
    data_path: str = "",
) -> tuple[Path, model_card.Card]:
    """Write the global model, or a client's, its card, and the run's copies of the user's own files; return the first two.

    A client's is what `trained.load` says, the global one where that is what it uses. As PyTorch state dict, which
    `load_state_dict` accepts strictly, or as ONNX. Tensors that a client does not share are only in a state dict if the run
    collected personal models; ONNX needs all. methods: the registered Methods. output: default RUN-client-K.pt in the current
    directory. data_path: the node's own data, for dataset `node`. Raises UserError if the run has no such model, if it cannot be
    written, and as `described` and `write_onnx` do.
    """
    from corolla.experiments.exported import loading

    if onnx:
        loading.require_onnx()
    model = run_models.load(run, client, methods)
    if onnx:
        run_models.refuse_parts(model)
    suffix = ".onnx" if onnx else ".pt"
    output = output or Path(f"{run.resolve().name}-{model.name}{suffix}")
    if onnx != (output.suffix == ".onnx"):
        raise UserError(f"--output: {output} must {'end' if onnx else 'not end'} in .onnx; --onnx says what is written")
    facts = {**model_card.about(model), **loading.described(model, data_path)}
    if model.missing:
        facts["missing"] = list(model.missing)
    try:
        if onnx:
            loading.write_onnx(model, facts, output)
        else:
            _write_state_dict(model, output)
        plugins.write(plugins.read(model.config.plugins), own_files(output))
        return output, model_card.write(output, facts)
    except OSError as error:
        raise UserError(f"--output: cannot write {output}: {error.strerror}") from None


def own_files(output: Path) -> Path:
    """Return where the user's own files that an exported model's run used lie, if there were any: `predict` needs its task."""
    return output.with_name(f"{output.name}.plugins")


def _write_state_dict(model: run_models.Trained, output: Path) -> None:
    import torch

    state = model.module.state_dict()
    for name in model.missing:
        del state[name]
        if name.endswith("running_mean"):
            state.pop(name.replace("running_mean", "num_batches_tracked"), None)
    publish(output, lambda file: torch.save(dict(state), file))
