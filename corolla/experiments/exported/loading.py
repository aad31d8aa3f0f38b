"""A trained model ready for use: from samples as the data set holds them (pixels, rows) to predictions.

Preprocessing (scaling and `normalize`) and the task's `predict` are part of the model, so an ONNX file is complete by
itself. A PyTorch file stays a state dict, which other programs and `initial-weights` read; its card describes the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from corolla.experiments.exported import run_models
from corolla.experiments.exported.run_models import Trained, networks
from corolla.experiments.runs import RecordedRun, that_train
from fl_app import config as configs
from fl_app import data, plugins, progress, tasks
from fl_app.checksums import KEY_DIGITS, sha256_of
from fl_app.config import RunConfig
from fl_app.config.rules import split_names
from fl_app.data import DatasetInfo
from fl_app.data.encoding import Encoding
from fl_app.data.site_columns import SiteColumns
from fl_app.errors import UserError, describe, listed
from fl_app.files import publish
from fl_app.keys import Scalar
from fl_app.layout import Split
from fl_app.model_card import FILE_HASH, Card, Entries
from fl_app.model_names import names_in
from fl_app.server.run_folder import DATA, INITIAL, MODELS, NORMALIZED_BY, READ_BY
from fl_app.sources import NODE, path_in
from fl_app.tasks import Task
from fl_app.tasks.task import Inputs

Answers = Callable[[NDArray[Any]], tuple[NDArray[np.float32], NDArray[np.float32]]]
"""Samples [n, ...] -> (outputs, predictions), float32 [n, K]."""

# largest difference between the outputs of ONNX Runtime and torch, relative to the largest output if that exceeds 1
CLOSE = 1e-5
SAMPLES, OUTPUTS, PREDICTIONS = "samples", "outputs", "predictions"


class ExportedModel(nn.Module):
    """Samples [n, ...] -> (outputs, predictions) float32 [n, K]; outputs alone if the task does not change them."""

    def __init__(self, module: nn.Module, task: Task, described: Mapping[str, Any]) -> None:
        """Combine a network with its preprocessing. described: `input` of a card."""
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
        """Return the model's outputs for samples, and the predictions if the task defines them."""
        outputs: Tensor = self.module(self.inputs(samples)).float()
        return outputs if self.predict is None else (outputs, self.predict(outputs))


def predicts(task: Task) -> bool:
    """Return whether a task turns outputs into predictions that differ from them."""
    return type(task).predict is not Task.predict


# The card's description of a model's use ------------------------------------------------------------------------------


def described(trained: Trained, data_path: str) -> Entries:
    """Return the card's description of samples and predictions: `input`, `outputs`, `classes`.

    For tables it also has `features`, the features' names, and `table`, the conversion of columns into features.
    data_path: path of the node's data, for dataset `node`. Scaling uses the values that the run recorded. Raises
    UserError if the run recorded none and its data are missing or have changed.
    """
    config, task = trained.config, tasks.of(trained.config)
    if data_path and config.dataset != NODE:
        raise UserError(
            key="--data-path",
            rule=f"is for runs with dataset = node, whose data lie at the sites; {trained.run.path} has "
            f"dataset = {config.dataset}, and its scaling is recorded: leave out {data_path}",
        )
    about = trained.run.about.get(DATA, {})
    shape = list(trained.shape.get("input_shape") or (trained.shape["in_channels"], *[trained.shape["image_size"]] * 2))
    recorded, read_by = about.get(NORMALIZED_BY), about.get(READ_BY, {})
    guessed = "int64" if task.input_dtype == "int64" else "uint8" if len(shape) == 3 else "float32"
    info, dtype = None, read_by.get("dtype", guessed)
    scales = tasks.normalization(config, np.dtype(dtype)) == "mean-std"
    if config.dataset != NODE or data_path:
        try:
            found = data.prepare_for(config, data_path)
            if trained.run.data_sha256 not in ("", found.sha256):
                raise UserError(f"{config.dataset} has changed since the run started")
            if data_path:
                refuse_other_data(trained, data_path)
            info, dtype = _in_the_runs_order(trained, found.info), str(found.x_train.dtype)
            scales = tasks.normalization(config, found.x_train.dtype) == "mean-std"
            if scales and config.normalizes_by_site and config.dataset != NODE:
                info = _of_client(trained)
        except UserError as error:
            if data_path:
                raise
            if not recorded:
                raise UserError(
                    key="normalize", rule=f"needs the data set, for its mean and standard deviation: {error}"
                ) from None
    elif not recorded and (scales or (config.normalize == "auto" and not read_by and len(shape) == 3)):
        raise UserError(
            key="normalize-over",
            rule="mean and standard deviation are of each node's own data: export on the node, with their "
            "path as --data-path",
        )
    if info is not None and list(info.input_shape) != shape:
        raise UserError(
            f"{data_path or config.dataset} holds samples of shape {list(info.input_shape)}, the run's have {shape}"
        )
    names = trained.run.about.get("classes") or (list(info.classes) if info else None)
    scaling = recorded or (info.scaling if info is not None else {})
    normalized = scaling if scales else {}
    table = (
        {**info.columns_facts(), **(SiteColumns.of_environment().recorded if data_path else {})}
        if info is not None
        else {"encodings": [], "others": [], **{name: of for name, of in read_by.items() if name != "dtype"}}
    )
    table["others"] = [*dict.fromkeys([*table["others"], *split_names(config.target), *split_names(config.exclude)])]
    if config.client and config.client not in table["others"]:
        table["others"].append(config.client)
    return {
        "input": {
            "name": SAMPLES,
            "dtype": dtype,
            "shape": shape,
            "image-size": config.image_size,
            "bits": info.facts.bits if info is not None else 0,
            "normalize": tasks.normalization(config, np.dtype(dtype)),
            "mean": normalized.get("mean", []),
            "std": normalized.get("std", []),
            "shift": scaling.get("shift", []),
            "scale": scaling.get("scale", []),
        },
        "target-shift": [*info.facts.target_shift] if info is not None else scaling.get("target-shift", []),
        "outputs": [OUTPUTS, PREDICTIONS] if predicts(task) else [OUTPUTS],
        "classes": names or [str(k) for k in range(trained.shape["num_classes"])],
        "has-classes": task.has_classes,
        "features": [name for fields in table["encodings"] for name in Encoding.from_json(fields).names],
        "table": table if table["encodings"] else {},
    }


def refuse_other_data(trained: Trained, data_path: str) -> None:
    """Raise UserError unless a file has the data that the client trained on; without a client, those of one of them.

    A run records no hash if the site's directory cannot keep a key.
    """
    recorded = {i: known for i, known in trained.run.hashes.items() if i is not None}
    mine = {i: known for i, known in recorded.items() if trained.client in (None, i)}
    if not mine:
        return
    found = data.open_data(trained.config, data_path).hidden_hashes
    if found in mine.values():
        return
    whose = "any client" if trained.client is None else f"client {trained.run.called(trained.client)}"
    other = next((i for i, known in recorded.items() if found == known), None)
    if other is not None:
        why = f"they are those of client {trained.run.called(other)}"
    elif any(known.data[:KEY_DIGITS] == found.data[:KEY_DIGITS] for known in mine.values()):
        why = "their hash differs from that in clients.json"
    else:
        why = (
            "their hash can be compared only at the site, with its key: export there, with the site's COROLLA_SITE_DIR"
        )
    raise UserError(key="--data-path", rule=f"{data_path} is not known as the data of {whose}: {why}")


def data_hashes(trained: Trained) -> Entries:
    """Return the hash of a run's data, and that of their file if it is one file and still holds these data.

    Empty for data that stay on the clients. `predict` recognizes the run's own file by its hash.
    """
    run, config = trained.run, trained.config
    if not run.data_sha256:
        return {}
    found: Entries = {"sha256": run.data_sha256}
    file = Path(path_in("dataset", config.dataset))
    if not file.is_file():
        return found
    try:
        if data.prepare_for(config).sha256 == run.data_sha256:
            found[FILE_HASH] = sha256_of(file)
    # the data have changed so that they cannot be read
    except UserError:
        pass
    return found


def _in_the_runs_order(trained: Trained, info: DatasetInfo) -> DatasetInfo:
    """Return the data set's description with the features that the run's clients share, in their order. Raises UserError."""
    about, config = trained.run.about, trained.config
    if config.private:
        started = (about.get(INITIAL) or {}).get("features")
        names = tuple(started or info.facts.by_column)
    else:
        names = names_in(about.get(DATA, {}).get(READ_BY, {}))
    return info.with_columns(names) if names and info.facts.features else info


def _of_client(trained: Trained) -> DatasetInfo:
    """Return the data set's description for one client, with the scaling of its inputs. Raises UserError without a client."""
    if trained.client is None:
        raise UserError(
            key="normalize-over", rule="each client's inputs are scaled by its own data: choose one with --client"
        )
    return _in_the_runs_order(trained, data.open_client(trained.config, trained.client).info)


# ONNX -----------------------------------------------------------------------------------------------------------------


def require_onnx() -> None:
    """Raise UserError if the optional packages are not installed."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(key="onnx", rule=f"{error.name} is missing; pip install 'corolla[onnx]'") from None


def write_onnx(trained: Trained, facts: Entries, output: Path) -> None:
    """Write a model as ONNX, from samples to predictions, with a free batch size.

    facts: the model's card; some of its entries are also stored in the file. Raises UserError if the model cannot be
    translated, or if ONNX Runtime's outputs differ from torch's.
    """
    product = ExportedModel(trained.module, tasks.of(trained.config), facts["input"]).eval()
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
            key="onnx", rule=f"model {trained.config.model} cannot be translated: {describe(error).splitlines()[0]}"
        ) from error
    for name in ("classes", "task", "method", "run", "input", "features", "table"):
        entry = model.metadata_props.add()
        entry.key, entry.value = f"corolla.{name}", json.dumps(facts[name])
    content = model.SerializeToString()
    _compare(content, product, facts["input"], trained.config.model)
    publish(output, lambda file: file.write_bytes(content))


def _compare(content: bytes, product: ExportedModel, inputs: Mapping[str, Any], model: str) -> None:
    """Raise UserError unless ONNX Runtime's outputs equal torch's within CLOSE."""
    session = inference_session(content, model)
    for count in (1, 7):
        samples = examples(inputs, count)
        with torch.no_grad():
            answer = product(torch.from_numpy(samples))
        want = [tensor.numpy() for tensor in (answer if isinstance(answer, tuple) else (answer,))]
        for ours, theirs in zip(session.run(None, {SAMPLES: samples}), want, strict=True):
            allowed = CLOSE * max(1.0, float(np.abs(theirs).max()))
            if ours.shape != theirs.shape or not (largest := float(np.abs(ours - theirs).max())) <= allowed:
                raise UserError(
                    key="onnx", rule=f"model {model}: ONNX Runtime's outputs differ from torch's by {largest:.3g}"
                )


def examples(inputs: Mapping[str, Any], count: int) -> NDArray[Any]:
    """Return samples that fit a card's `input`, [count, *shape], from a fixed stream. Integers other than pixels are 0."""
    generator, shape = np.random.default_rng(0), (count, *inputs["shape"])
    if inputs["dtype"] == "uint8":
        return generator.integers(0, 256, shape, np.uint8)
    return np.zeros(shape, np.int64) if inputs["dtype"] == "int64" else generator.standard_normal(shape, np.float32)


def inference_session(source: bytes, name: str) -> Any:
    """Return ONNX Runtime's session of a model's bytes. Raises UserError for bytes that are none. name: in the error."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise UserError(key=name, rule=f"ONNX Runtime cannot use it: {describe(error).splitlines()[0]}") from error


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress the exporter's warnings and output."""
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
    """Return the config in a card. Raises UserError if this version does not accept it."""
    return configs.parse_recorded(
        cast(dict[str, Scalar], card["settings"]), {name: method.params for name, method in methods.items()}
    )


def open_file(file: Path, card: Card, methods: Mapping[str, Any]) -> Answers:
    """Return the prediction function of an exported model.

    Raises UserError if the file cannot be used or does not fit its card.
    """
    return _onnx(file, card) if file.suffix == ".onnx" else _state_dict(file, card, methods)


def _onnx(file: Path, card: Card) -> Answers:
    require_onnx()
    session = inference_session(file.read_bytes(), str(file))

    def predict(samples: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        answer = session.run(None, {SAMPLES: samples})
        return answer[0], answer[-1]

    return predict


def _state_dict(file: Path, card: Card, methods: Mapping[str, Any]) -> Answers:
    from fl_app import weight_files

    if missing := card.get("missing"):
        raise UserError(f"{file} lacks {listed(missing)}, which stayed on the clients: it cannot predict alone")
    config = config_of(card, methods)
    plugins.read(config.plugins)
    state = weight_files.load_state_dict(file, str(file))
    shape = {**card["shape"], "input_shape": tuple(card["shape"]["input_shape"])}
    # all tensors are in the file
    for module in networks(dataclasses.replace(config, train=""), shape, methods, frozenset(state)):
        if module.state_dict().keys() == state.keys():
            break
    else:
        raise UserError(key=file, rule=f"does not fit model {config.model} of method {config.method}")
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(key=file, rule=f"does not fit model {config.model}: {describe(error)}") from None
    return answers_of(module, config, card)


def answers_of(module: nn.Module, config: RunConfig, card: Card) -> Answers:
    """Return the prediction function of a network. card: describes its inputs."""
    product = ExportedModel(module.eval(), tasks.of(config), card["input"]).eval()

    @torch.no_grad()
    def predict(samples: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        answer = product(torch.from_numpy(samples))
        first, last = answer if isinstance(answer, tuple) else (answer, answer)
        return first.numpy(), last.numpy()

    return predict


# Answers on test samples ----------------------------------------------------------------------------------------------


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


def answers_of_run(path: Path, methods: Mapping[str, Any]) -> list[ClientAnswers]:
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
        found.append(_answers_of_client(trained, opened.client(i), described(trained, "")["input"]))
    return found


def _answers_of_client(trained: run_models.Trained, own: data.ClientData, inputs: Mapping[str, Any]) -> ClientAnswers:
    product = ExportedModel(trained.module, tasks.of(trained.config), inputs).eval()
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
