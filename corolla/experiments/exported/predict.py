"""What an exported model says of image files or of an .npz: `corolla predict`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corolla.experiments.exported.loading import Predictor
from corolla.experiments.exported.model_card import Card
from fl_app import tasks
from fl_app.data import arrays, npz
from fl_app.data.precision import Stored
from fl_app.errors import UserError, listed
from fl_app.tasks import Metric

BATCH = 512
# what an .npz may call samples and, if it has them, targets
_ARRAYS = (("x", "y"), ("x_test", "y_test"))


def read_inputs(inputs: Sequence[Path], card: Card) -> tuple[list[str], NDArray[Any], NDArray[Any] | None]:
    """Return names of samples, the samples [n, ...] as the model takes them, and their targets, if there are any.

    inputs: image files, or one .npz with `x` or `x_test` (and `y` or `y_test`). Raises UserError naming what does not fit.
    """
    if not inputs:
        raise UserError("give image files, or an .npz file")
    if any(path.suffix == ".npz" for path in inputs):
        if len(inputs) > 1:
            raise UserError(f"one .npz file at a time, or image files, got {listed([str(path) for path in inputs])}")
        return _from_npz(inputs[0], card)
    from fl_app.data.decode import read_image

    wanted = card["input"]
    if len(wanted["shape"]) != 3 or wanted["dtype"] != "uint8":
        raise UserError(f"{inputs[0]}: the model takes {_wanted(card)}, no images; give them as x of an .npz file")
    resize = bool(wanted["image-size"])
    samples = np.stack([read_image(path, tuple(wanted["shape"]), resize=resize) for path in inputs])
    return [str(path) for path in inputs], samples, None


def _from_npz(path: Path, card: Card) -> tuple[list[str], NDArray[Any], NDArray[Any] | None]:
    names = [name for pair in _ARRAYS for name in pair]
    found = npz.members(path, names, optional=names)
    named = next((pair for pair in _ARRAYS if pair[0] in found), None)
    if named is None:
        raise UserError(f"{path}: has neither x nor x_test, samples as in the run's data")
    wanted, raw = card["input"], found[named[0]]
    # as the data set stored them (fl_app/data/precision.py); other shapes are refused below
    how = Stored(tuple(wanted.get("shift", ())), tuple(wanted.get("scale", ())))
    fits = (raw.shape[-1] if raw.ndim > 1 else 1) == len(how.shift)
    x = arrays.samples(path, named[0], how.of(raw) if fits else raw)
    if list(x.shape[1:]) != wanted["shape"] or (x.dtype == np.uint8) != (wanted["dtype"] == "uint8"):
        raise UserError(f"{path}: {named[0]} holds samples {_shape_and_type(x)}, the model takes {_wanted(card)}")
    y = found.get(named[1])
    if y is not None and len(np.atleast_1d(y)) != len(x):
        arrays.refuse(path, named[1], f"have one target for each of the {len(x)} samples", len(np.atleast_1d(y)))
    if not len(x):
        arrays.refuse(path, named[0], "hold samples", "none")
    targets = None
    if y is not None:
        shift = tuple(card.get("target-shift", ()))
        both = named[1], Stored(shift, (1.0,) * len(shift)).of(y)
        targets = arrays.targets(path, tasks.named(card["task"]), both, both, card["classes"])[0]
    return [f"{path}[{k}]" for k in range(len(x))], x.astype(wanted["dtype"], copy=False), targets


def _shape_and_type(x: NDArray[Any]) -> str:
    return f"{x.dtype} {list(x.shape[1:])}"


def _wanted(card: Card) -> str:
    return f"{card['input']['dtype']} {card['input']['shape']}"


def ask(predictor: Predictor, samples: NDArray[Any], card: Card) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return (outputs, predictions), float32 [n, K] each. Raises UserError if there are not as many outputs as the card names."""
    answers = [predictor(np.ascontiguousarray(samples[at : at + BATCH])) for at in range(0, len(samples), BATCH)]
    outputs, predictions = (np.concatenate(side) for side in zip(*answers, strict=True))
    if predictions.shape[1:] != (len(card["classes"]),):
        raise UserError(
            f"{card['file']}: gives {list(predictions.shape[1:])} outputs per sample, its card names {len(card['classes'])}: "
            f"{listed(card['classes'])}"
        )
    return outputs, predictions


def predictions_table(names: Sequence[str], predictions: NDArray[np.float32], card: Card) -> list[list[str]]:
    """Return predictions as a table, header first: the class and its probability, or every output's value."""
    classes: list[str] = card["classes"]
    if card["has-classes"]:
        best = predictions.argmax(1)
        rows = [[name, classes[k], f"{row[k]:.4f}"] for name, k, row in zip(names, best, predictions, strict=True)]
        return [["input", "class", "probability" if len(card["outputs"]) > 1 else "output"], *rows]
    shift = card.get("target-shift") or [0] * len(classes)
    # a shifted target is far from zero beside its spread
    digits = 12 if any(shift) else 4
    return [
        ["input", *classes],
        *(
            [name, *(f"{float(v) + more:.{digits}g}" for v, more in zip(row, shift, strict=True))]
            for name, row in zip(names, predictions, strict=True)
        ),
    ]


def measure(outputs: NDArray[np.float32], targets: NDArray[Any], card: Card) -> tuple[Metric, float]:
    """Return the task's headline metric on samples with targets."""
    import torch

    task = tasks.named(card["task"])
    metric = task.headline
    return metric, task.measure(torch.from_numpy(outputs), torch.from_numpy(targets), (metric.name,))[metric.name]
