"""A trained model as something to use: from samples as the data set holds them (pixels, rows) to predictions.

What comes before the network, scaling and `normalize`, is part of it, and so is the task's `predict` after it: who has the ONNX
file needs nothing else. A PyTorch file stays a state dict, which other programs and `initial-weights` read; its card says the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from corolla.experiments.exported.model_card import Card
from corolla.experiments.exported.run_models import Trained, networks
from fl_app import config as configs
from fl_app import data, plugins, tasks
from fl_app.config import RunConfig
from fl_app.errors import UserError, describe, listed
from fl_app.files import publish
from fl_app.server.run_folder import DATA, NORMALIZED_BY
from fl_app.sources import NODE
from fl_app.tasks import Task
from fl_app.tasks.task import Inputs

Predictor = Callable[[NDArray[Any]], tuple[NDArray[np.float32], NDArray[np.float32]]]
"""Samples [n, ...] -> (outputs, predictions), float32 [n, K]."""

# how far ONNX Runtime's outputs may lie from torch's, relative to the largest where that is above 1
CLOSE = 1e-5
SAMPLES, OUTPUTS, PREDICTIONS = "samples", "outputs", "predictions"


class Product(nn.Module):
    """Samples [n, ...] -> (outputs, predictions) float32 [n, K]; outputs alone where the task makes nothing of them."""

    def __init__(self, module: nn.Module, task: Task, described: Mapping[str, Any]) -> None:
        """Put a network behind its inputs. described: `input` of a card."""
        super().__init__()
        self.module, self.predict = module, task.predict if predicts(task) else None
        self.inputs = Inputs(
            task,
            described["normalize"],
            len(described["shape"]),
            torch.device("cpu"),
            described["mean"],
            described["std"],
        )

    def forward(self, samples: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return what the model says of samples."""
        outputs: Tensor = self.module(self.inputs(samples)).float()
        return outputs if self.predict is None else (outputs, self.predict(outputs))


def predicts(task: Task) -> bool:
    """Tell whether a task makes something else of a model's outputs."""
    return type(task).predict is not Task.predict


# What a card tells of a model's use -----------------------------------------------------------------------------------


def described(trained: Trained, data_path: str) -> Card:
    """Return what a card tells of samples and answers: `input`, `outputs`, `classes`.

    data_path: of the node whose data the model is for, for dataset `node`. What numbers are scaled by is what the run
    recorded. Raises UserError if it has not, and its data are not here, or have changed since.
    """
    config, task = trained.config, tasks.of(trained.config)
    shape = list(trained.shape.get("input_shape") or (trained.shape["in_channels"], *[trained.shape["image_size"]] * 2))
    recorded = trained.run.about.get(DATA, {}).get(NORMALIZED_BY)
    info, dtype = None, "int64" if task.input_dtype == "int64" else "uint8" if len(shape) == 3 else "float32"
    if config.dataset != NODE or data_path:
        try:
            found = data.prepare_for(config, data_path)
            if trained.run.data_sha256 not in ("", found.sha256):
                raise UserError(f"{config.dataset} has changed since the run started")
            info, dtype = found.info, str(found.x_train.dtype)
        except UserError as error:
            # runs of earlier versions, which have no hashes, did not shift numbers
            unknown = config.normalize == "mean-std" or bool(trained.run.hashes)
            if (unknown and not recorded) or data_path:
                raise UserError(f"normalize: what the data set's numbers are scaled by is needed: {error}") from None
    elif config.normalize == "mean-std":
        raise UserError(
            "normalize: mean-std's mean and standard deviation are of each node's own data: say with --data-path which, and export "
            "where they lie"
        )
    if info is not None and list(info.input_shape) != shape:
        raise UserError(
            f"{data_path or config.dataset} holds samples of shape {list(info.input_shape)}, the run's have {shape}"
        )
    names = trained.run.about.get("classes") or (list(info.classes) if info else None)
    scaling = recorded or (info.scaling if info is not None else {})
    normalized = scaling if config.normalize == "mean-std" else {}
    return {
        "input": {
            "name": SAMPLES,
            "dtype": dtype,
            "shape": shape,
            "image-size": config.image_size,
            "normalize": config.normalize,
            "mean": normalized.get("mean", []),
            "std": normalized.get("std", []),
            "shift": scaling.get("shift", []),
            "scale": scaling.get("scale", []),
        },
        "target-shift": scaling.get("target-shift", []),
        "outputs": [OUTPUTS, PREDICTIONS] if predicts(task) else [OUTPUTS],
        "classes": names or [str(k) for k in range(trained.shape["num_classes"])],
        "has-classes": task.has_classes,
    }


# ONNX -----------------------------------------------------------------------------------------------------------------


def require_onnx() -> None:
    """Raise UserError unless the optional packages are here."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"onnx: {error.name} is missing; pip install 'corolla[onnx]'") from None


def write_onnx(trained: Trained, facts: Card, output: Path) -> None:
    """Write a model as ONNX, from samples to predictions, any number of them at a time.

    facts: of its card, which also go into the file. Raises UserError if the model cannot be translated, or if what ONNX Runtime
    makes of the translation is not what torch says.
    """
    product = Product(trained.module, tasks.of(trained.config), facts["input"]).eval()
    example = torch.from_numpy(examples(facts["input"], 3))
    try:
        with _silence():
            program = torch.onnx.export(
                product,
                (example,),
                dynamo=True,
                input_names=[SAMPLES],
                output_names=facts["outputs"],
                verbose=False,
                dynamic_shapes={"samples": {0: torch.export.Dim("n", min=1)}},
            )
            assert program is not None
            model = program.model_proto
    except Exception as error:  # torch raises many kinds for what it cannot translate
        raise UserError(
            f"onnx: model {trained.config.model} cannot be translated: {describe(error).splitlines()[0]}"
        ) from error
    for name in ("classes", "task", "method", "run"):
        entry = model.metadata_props.add()
        entry.key, entry.value = f"corolla.{name}", json.dumps(facts[name])
    content = model.SerializeToString()
    _compare(content, product, facts["input"], trained.config.model)
    publish(output, lambda file: file.write_bytes(content))


def _compare(content: bytes, product: Product, inputs: Mapping[str, Any], model: str) -> None:
    """Raise UserError unless ONNX Runtime's answers are torch's."""
    session = _session(content, model)
    for count in (1, 7):
        samples = examples(inputs, count)
        with torch.no_grad():
            answer = product(torch.from_numpy(samples))
        want = [tensor.numpy() for tensor in (answer if isinstance(answer, tuple) else (answer,))]
        for ours, theirs in zip(session.run(None, {SAMPLES: samples}), want, strict=True):
            allowed = CLOSE * max(1.0, float(np.abs(theirs).max()))
            if ours.shape != theirs.shape or not (largest := float(np.abs(ours - theirs).max())) <= allowed:
                raise UserError(f"onnx: model {model}: ONNX Runtime's outputs differ from torch's by {largest:.3g}")


def examples(inputs: Mapping[str, Any], count: int) -> NDArray[Any]:
    """Return samples as a card's `input` describes them, [count, *shape], from a fixed stream; integers are 0 but for pixels."""
    generator, shape = np.random.default_rng(0), (count, *inputs["shape"])
    if inputs["dtype"] == "uint8":
        return generator.integers(0, 256, shape, np.uint8)
    return np.zeros(shape, np.int64) if inputs["dtype"] == "int64" else generator.standard_normal(shape, np.float32)


def _session(source: bytes, name: str) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise UserError(f"{name}: ONNX Runtime cannot use it: {describe(error).splitlines()[0]}") from error


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep the exporter's remarks off the terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# Files in use ---------------------------------------------------------------------------------------------------------


def config_of(card: Card, methods: Mapping[str, Any]) -> RunConfig:
    """Return the config a card tells. Raises UserError if it is not one of this version."""
    return configs.parse_recorded(card["settings"], {name: method.params for name, method in methods.items()})


def open_file(file: Path, card: Card, methods: Mapping[str, Any]) -> Predictor:
    """Return what answers for an exported model. Raises UserError if it cannot be used, or does not fit its card."""
    return _onnx(file, card) if file.suffix == ".onnx" else _state_dict(file, card, methods)


def _onnx(file: Path, card: Card) -> Predictor:
    require_onnx()
    session = _session(file.read_bytes(), str(file))

    def predict(samples: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        answer = session.run(None, {SAMPLES: samples})
        return answer[0], answer[-1]

    return predict


def _state_dict(file: Path, card: Card, methods: Mapping[str, Any]) -> Predictor:
    from fl_app import weights

    if missing := card.get("missing"):
        raise UserError(f"{file} lacks {listed(missing)}, which stayed on the clients: it predicts nothing by itself")
    config = config_of(card, methods)
    plugins.read(config.plugins)
    state = weights.load_state_dict(file, str(file))
    shape = {**card["shape"], "input_shape": tuple(card["shape"]["input_shape"])}
    # all tensors are in the file
    for module in networks(dataclasses.replace(config, train=""), shape, methods, frozenset(state)):
        if module.state_dict().keys() == state.keys():
            break
    else:
        raise UserError(f"{file}: does not fit model {config.model} of method {config.method}")
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"{file}: does not fit model {config.model}: {describe(error)}") from None
    product = Product(module.eval(), tasks.of(config), card["input"]).eval()

    @torch.no_grad()
    def predict(samples: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        answer = product(torch.from_numpy(samples))
        first, last = answer if isinstance(answer, tuple) else (answer, answer)
        return first.numpy(), last.numpy()

    return predict
