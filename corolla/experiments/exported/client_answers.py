"""The answers and the features of a run's final models on their clients' test samples, for `corolla report --features`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from corolla.experiments.exported import loading, run_models
from corolla.experiments.runs import RecordedRun, that_train
from fl_app import data, progress, tasks
from fl_app.errors import UserError
from fl_app.layout import Split
from fl_app.server.run_folder import MODELS
from fl_app.sources import NODE

MOST_CLIENTS = 100
"""Most clients whose models are tested; of more, this many at equal distances."""
BATCH = 512


@dataclass(frozen=True)
class ClientAnswers:
    """A client's test samples. truth, predicted: their classes, int64 [n]. features: the classifier's inputs, [n, k].

    classes: their number. features is None if the model has no classifier that is one layer.
    """

    client: int
    classes: int
    truth: NDArray[np.int64]
    predicted: NDArray[np.int64]
    features: NDArray[np.float32] | None


def of_run(path: Path, methods: Mapping[str, Any]) -> list[ClientAnswers]:
    """Test the clients of a finished run, each with its own final model on its own test samples.

    methods: the registered Methods. Raises UserError if the run has no models, if its data are at the sites or have
    changed, if its task has no single class per sample, and as `run_models.load` does.
    """
    run = RecordedRun(path, {name: method.params for name, method in methods.items()})
    config = run.config
    ids = sorted(int(i) for i in that_train((run.last_evaluation or (0, {}))[1]))
    if not (run.finished and any((path / MODELS).glob("*.safetensors"))):
        raise UserError(key="features", rule=f"{path} holds no models; a run has them when it is finished")
    if config.dataset == NODE:
        raise UserError(key="features", rule=f"{path} trained on data that stay at the sites (dataset = node)")
    if not tasks.of(config).has_classes:
        raise UserError(key="features", rule=f"{path} has task {config.task}, whose samples have no class")
    opened = data.open_data(config)
    if run.data_sha256 not in ("", opened.data.sha256):
        raise UserError(key="features", rule=f"{config.dataset} has changed since {path} started")
    if len(ids) > MOST_CLIENTS:
        ids = [ids[k] for k in np.linspace(0, len(ids) - 1, MOST_CLIENTS).astype(int)]
    found = []
    for done, i in enumerate(ids):
        progress.report("testing clients' models", done, len(ids))
        trained = run_models.load(path, i, methods)
        run_models.refuse_parts(trained)
        found.append(_of_client(trained, opened.client(i), loading.described(trained, "")["input"]))
    return found


def _of_client(trained: run_models.Trained, own: data.ClientData, inputs: Mapping[str, Any]) -> ClientAnswers:
    product = loading.ExportedModel(trained.module, tasks.of(trained.config), inputs).eval()
    layer, seen = Split.of(trained.module).layer, list[Tensor]()

    def keep(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen.append(given[0].detach().flatten(1))

    hook = None if layer is None else trained.module.get_submodule(layer).register_forward_pre_hook(keep)
    outputs = []
    with torch.no_grad():
        for start in range(0, len(own.y_test), BATCH):
            answer = product(torch.from_numpy(np.ascontiguousarray(own.x_test[start : start + BATCH])))
            outputs.append((answer[0] if isinstance(answer, tuple) else answer).argmax(1))
    if hook is not None:
        hook.remove()
    predicted = torch.cat(outputs).numpy() if outputs else np.zeros(0, np.int64)
    features = torch.cat(seen).float().numpy() if seen and sum(map(len, seen)) == len(predicted) else None
    classes = int(trained.shape["num_classes"])
    assert trained.client is not None
    return ClientAnswers(trained.client, classes, np.asarray(own.y_test, np.int64), predicted, features)
