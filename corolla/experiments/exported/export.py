"""Export of a run's final models, each as a file with a card."""

from __future__ import annotations

import contextlib
import io
import re
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from corolla.experiments.exported import run_models
from corolla.experiments.runs import RecordedRun
from fl_app import model_card, plugins
from fl_app.config import ids_in
from fl_app.errors import UserError
from fl_app.files import make_directory, publish


class FileForm(Enum):
    """The form of an exported model, with the end of its name. `peft` and `merged` are folders."""

    pytorch = ".pt"
    onnx = ".onnx"
    peft = "-adapter"
    merged = "-merged"


def export(
    run: Path,
    methods: Mapping[str, Any],
    client: int | str | None = None,
    output: Path | None = None,
    *,
    form: FileForm = FileForm.pytorch,
    data_path: str = "",
) -> tuple[Path, model_card.Entries]:
    """Write the global model or a client's model, its card, and copies of the run's plugins.

    Return the model's path and the card. The model is as in `run_models.load`: for a client that is evaluated with the
    global model, the global one. The file is a PyTorch state dict that `load_state_dict` accepts strictly, or ONNX. In
    peft's form it is the adapter's weights in a folder of peft, or the merged model's in a folder of transformers. A
    state dict lacks tensors that clients do not share, unless the run collected personal models; other forms need all
    tensors.

    methods: the registered Methods. output: default RUN-client-K.pt in the current directory. data_path: path of the
    node's data, for dataset `node`. Raises UserError if the run has no such model, if a file cannot be written, and as
    `described` and `write_onnx` do.
    """
    from corolla.experiments.exported import adapter, loading

    onnx = form is FileForm.onnx
    if onnx:
        loading.require_onnx()
    model = run_models.load(run, client, methods)
    if form is not FileForm.pytorch or model.client is None:
        run_models.refuse_parts(model)
    output = output or Path(f"{run.resolve().name}-{model.name}{form.value}")
    if onnx != (output.suffix == ".onnx"):
        raise UserError(
            key="--output", rule=f"{output} must {'end' if onnx else 'not end'} in .onnx; --onnx selects the format"
        )
    facts = {**run_models.about(model), **loading.described(model, data_path)}
    facts["data"] |= loading.data_hashes(model)
    if model.missing:
        facts["missing"] = list(model.missing)
    try:
        match form:
            case FileForm.onnx:
                loading.write_onnx(model, facts, output)
            case FileForm.pytorch:
                _write_state_dict(model, output)
            case FileForm.peft:
                output = adapter.write_adapter(model, output)
            case FileForm.merged:
                output = adapter.write_merged(model, output)
        plugins.write(plugins.read(model.config.plugins), own_files(output))
        return output, model_card.write(output, facts)
    except OSError as error:
        raise UserError(key="--output", rule=f"cannot write {output}: {error.strerror}") from None


def export_each(
    run: Path,
    methods: Mapping[str, Any],
    client: int | str | None,
    directory: Path,
    *,
    form: FileForm = FileForm.pytorch,
    data_path: str = "",
) -> tuple[list[tuple[Path, model_card.Entries]], dict[str, str]]:
    """Write a client's model into a directory, or each client's. Return what was written, and why others were not, by name.

    A file has the client's name, or `client-K`. Raises UserError as `export` does for the chosen client, and if no
    client's model can be exported.
    """
    recorded = RecordedRun(run)
    each = (
        [run_models.client_id(recorded, client)] if client is not None else list(range(recorded.summary["num-clients"]))
    )
    called = {i: str(recorded.clients.get(str(i), {}).get("name") or f"client-{i}") for i in each}
    plain = {i: re.sub(r"[^\w.-]|^\.", "_", name) for i, name in called.items()}
    twice = {name for name, count in Counter(name.casefold() for name in plain.values()).items() if count > 1}
    gone = ids_in(recorded.settings.get("without", ""))
    written: list[tuple[Path, model_card.Entries]] = []
    failed: dict[str, str] = {}
    made = not directory.exists()
    make_directory(directory)
    for i in each:
        stem = f"{plain[i]}-{i}" if plain[i].casefold() in twice else plain[i]
        file = directory / f"{stem}{form.value}"
        try:
            written.append(export(run, methods, i, file, form=form, data_path=data_path))
        except UserError as error:
            if client is not None or (not written and i == each[-1]):
                if made:
                    with contextlib.suppress(OSError):
                        directory.rmdir()
                raise
            # a client that the run went on without has a model only if the server holds an earlier one
            if i not in gone:
                failed[called[i]] = str(error)
    return written, failed


def own_files(output: Path) -> Path:
    """Return the folder of an exported model's plugins, if the run used any; `predict` needs them."""
    return output.with_name(f"{output.name}.plugins")


def _write_state_dict(model: run_models.Trained, output: Path) -> None:
    import torch

    state = model.module.state_dict()
    for name in model.missing:
        del state[name]
        if name.endswith("running_mean"):
            state.pop(name.replace("running_mean", "num_batches_tracked"), None)
    # torch hides the error of a full disk
    content = io.BytesIO()
    torch.save(dict(state), content)
    publish(output, lambda file: file.write_bytes(content.getbuffer()))
