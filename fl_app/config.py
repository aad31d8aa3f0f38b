"""The run configuration: frozen, typed, parsed once, every problem reported together.

Keys are Flower's run config: flat, kebab-case, values bool, int, float or str (no lists, no null: "" and 0 stand for "not
set", each key says so). A method's parameters live in its own table, `fedcac.tau`. One declaration per key (fl_app/keys.py)
serves the parser, docs/config.md, `corolla methods` and the defaults in pyproject.toml; a test keeps the four equal.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from fl_app.catalogue import DATASETS, MODELS, NODE, PATH_DATASETS
from fl_app.errors import UserError
from fl_app.keys import (
    AT_LEAST_ONE,
    BELOW_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_RATIO,
    RATIO,
    KeySpec,
    NoParams,
    Rule,
    Scalar,
    bears_on,
    key,
    nearest,
    recorded,
    specs,
    table_of,
)
from fl_app.plugins import is_reference

PARTITIONS = ("dirichlet-client", "dirichlet", "pathological", "iid")
FIXED_SIZES = ("dirichlet-client", "pathological", "iid")


@dataclass(frozen=True)
class RunConfig:
    """Everything a run is defined by. See docs/config.md for every key."""

    # the experiment
    method: str = key(
        "fedcac", "Federated learning method; `corolla methods` lists them with their parameters. Or your own `module:METHOD`."
    )
    num_server_rounds: int = key(30, "Rounds T.", AT_LEAST_ONE, extends=True, headline=True)
    num_clients: int = key(
        0, "Clients N of the experiment; `corolla run --clients` sets it. 0: the SuperNodes' `num-partitions`.", NOT_NEGATIVE,
        about="data", headline=True,
    )
    fraction_train: float = key(
        1.0, "Fraction of the clients sampled for each round (at least one is).", POSITIVE_RATIO, headline=True
    )
    seed: int = key(
        0, "Seed of everything random: partition, initial weights, sampling, batches.", NOT_NEGATIVE,
        partitions=PARTITIONS, headline=True, compared=False, checked=True,
    )
    scale: Literal["full", "small"] = key(
        "full", "Set by `corolla run --scale small`: clients, rounds and samples were cut, figures are not the paper's.",
        compared=False,
    )
    plugins: str = key(
        "", "Set by `corolla run`: your own files that the run uses, each with the beginning of its sha256."
    )
    # data
    dataset: str = key(
        "digits",
        ", ".join(f"`{name}:/path`" if data.has_path else f"`{name}`" for name, data in DATASETS.items())
        + ", `folder:/path`, `npz:/path` or `node` (each SuperNode's own `data-path`).", about="data", headline=True,
    )
    classes: str = key(
        "", "Comma-separated class names in label order; required by `node`, optional for `folder:`. Empty: sorted names.",
        about="data", compared=False,
    )
    image_size: int = key(
        0,
        "Side in pixels to which the images of a `folder:`, `tiny-imagenet:` or `node` folder are resized (short side) "
        "and centre-cropped; 0: as they are, all equal and square.",
        Rule(low=0, high=512), about="data",
    )
    partition: str = key(
        "dirichlet-client", "`dirichlet-client`, `dirichlet`, `pathological`, `iid` or `file:/path.npz`.",
        about="data", headline=True,
    )
    dirichlet_alpha: float = key(
        0.1, "Concentration per class of both Dirichlet partitions.", POSITIVE,
        about="data", partitions=("dirichlet-client", "dirichlet"), headline=True,
    )
    classes_per_client: int = key(
        2, "Classes each client holds in the `pathological` partition.", AT_LEAST_ONE,
        about="data", partitions=("pathological",),
    )
    pathological_assignment: Literal["balanced", "random", "blocks"] = key(
        "balanced",
        "Which classes the clients of the `pathological` partition hold. `balanced`: every class equally many clients, up to "
        "one. `random`: each client draws its own, so that some share classes (as FedCAC's authors). `blocks`: classes dealt to "
        "consecutive blocks of clients, which then hold the same (as PFLlib).",
        about="data", partitions=("pathological",),
    )
    train_samples: int = key(
        100, "Training samples per client (`dirichlet-client`, `pathological`, `iid`); 0: an equal share of all.",
        NOT_NEGATIVE, about="data", partitions=FIXED_SIZES,
    )
    test_samples: int = key(
        40, "Test samples per client (`dirichlet-client`, `pathological`, `iid`); 0: an equal share of all.",
        NOT_NEGATIVE, about="data", partitions=FIXED_SIZES,
    )
    min_samples: int = key(
        10, "Smallest number of samples a client may get in the `dirichlet` partition.", AT_LEAST_ONE,
        about="data", partitions=("dirichlet",),
    )
    dirichlet_balance: bool = key(
        False,
        "Self-balancing of the `dirichlet` partition: a client that has more than an equal share already gets nothing of the "
        "classes that follow (as PFLlib); `min-samples` holds as well.",
        about="data", partitions=("dirichlet",),
    )
    test_ratio: float = key(
        0.25, "Part of each client's samples used for test in the `dirichlet` partition.", BELOW_ONE,
        about="data", partitions=("dirichlet",),
    )
    normalize: Literal["unit", "mean-std", "symmetric"] = key(
        "unit",
        "Inputs scaled to [0, 1] (`unit`), or then shifted and scaled per channel by the training data's mean and std, or scaled "
        "to [-1, 1] (`symmetric`).",
    )
    augment: Literal["none", "crop-flip", "crop-flip-rotate"] = key(
        "none",
        "`crop-flip`: random crop after padding by an eighth of the side, and horizontal flip, on the device. "
        "`crop-flip-rotate`: then also a rotation by up to 15 degrees either way, bilinear. What comes in from outside is 0.",
    )
    data_dir: str = key(
        "", "Directory of prepared data sets. Empty: `$COROLLA_DATA_DIR`, or the user's cache.",
        about="place", checked=True,
    )
    # model
    model: str = key(
        "mlp",
        ", ".join(f"`{name}`" for name in MODELS) + ", or your own `module:factory`.",
        headline=True, checked=True,
    )
    norm: Literal["batch", "group"] = key("batch", "Normalisation layers of the ResNets.", checked=True)
    initial_weights: str = key(
        "", "Safetensors file the run starts from, read by the server. Empty: from the seed.", checked=True
    )
    # local training
    local_epochs: int = key(5, "Local epochs E.", AT_LEAST_ONE, headline=True)
    batch_size: int = key(20, "Batch size of local training.", AT_LEAST_ONE, headline=True)
    drop_last: bool = key(False, "Leave the last batch of an epoch out if it is incomplete, unless it is the only one.")
    learning_rate: float = key(0.1, "SGD learning rate.", POSITIVE, headline=True)
    learning_rate_decay: float = key(1.0, "Factor on the learning rate after every round.", POSITIVE_RATIO)
    momentum: float = key(0.0, "SGD momentum; it starts at zero in every round.", BELOW_ONE)
    weight_decay: float = key(0.0, "SGD weight decay.", NOT_NEGATIVE)
    precision: Literal["float32", "bfloat16"] = key(
        "float32", "`bfloat16`: forward and backward passes in mixed precision (autocast); weights stay float32."
    )
    device: str = key(
        "auto", "`auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:k`.", compared=False, checked=True
    )
    client_threads: int = key(
        1, "Threads of one client's training; the results' bits depend on it.", AT_LEAST_ONE, compared=False
    )
    # server
    evaluate_every: int = key(
        0, "Evaluate all clients every so many rounds; 0: only after the last.", NOT_NEGATIVE, compared=False
    )
    min_available_clients: int = key(
        0, "Clients that must be connected before a round starts; 0: `num-clients`.", NOT_NEGATIVE, compared=False
    )
    available_timeout: float = key(
        120.0, "Seconds to wait for `min-available-clients` before the run fails.", POSITIVE, about="running"
    )
    round_timeout: float = key(3600.0, "Seconds to wait for the replies of a round.", POSITIVE, about="running")
    min_results: float = key(
        0.5, "Part of a round's clients whose uploads it needs to count (at least one).", RATIO, compared=False
    )
    round_retries: int = key(
        1, "How often a round with fewer usable uploads than `min-results` is repeated before the run fails.",
        Rule(low=0, high=99), about="running",
    )
    server_memory_limit: float = key(
        2.0, "Gigabytes of per-client arrays the server keeps in memory between rounds; what is beyond lies in memory-mapped "
        "files in the run folder. 0: no limit.", NOT_NEGATIVE, about="running",
    )
    checkpoint_every: int = key(
        5, "Rounds between checkpoints; there is always one after the last.", AT_LEAST_ONE, about="running"
    )
    finetune_epochs: int = key(
        0, "Evaluations also report every client's accuracy after so many local epochs from its personal model; not kept.",
        NOT_NEGATIVE, compared=False,
    )
    # files
    run_name: str = key("", "Name of the run's folder. Empty: time, method and data set.", about="place")
    output_dir: str = key("runs", "Directory of run folders; made absolute by `corolla run`.", about="place")
    state_dir: str = key(
        "", "Directory of client state on each client. Empty: `$COROLLA_STATE_DIR`, or the user's state directory.",
        about="place",
    )
    resume: str = key("", "Run folder to continue; set by `corolla run --resume`.", about="place")
    collect_personal_models: bool = key(
        False, "Upload every client's personal model at the end; off, parts that never travel stay on the clients.",
        compared=False,
    )
    report_class_counts: bool = key(
        True,
        "Clients tell the server how many training samples of each class they have, for `clients.json` and the report; it "
        "reveals their label distributions.", compared=False,
    )
    tensorboard: bool = key(
        False, "Also write every round as TensorBoard events, into the run folder (needs `pip install tensorboard`).",
        about="running", checked=True,
    )
    # the chosen method's parameter dataclass, and all keys as resolved and as defaulted
    params: Any = dataclasses.field(default=NoParams())
    resolved: Mapping[str, Scalar] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Scalar] = dataclasses.field(default_factory=dict)

    def own_keys(self) -> Iterator[tuple[KeySpec, Scalar]]:
        """Yield the keys that bear on this run, with their values: those of all runs, then the method's."""
        for owner, table in ((self, ""), (self.params, table_of(self.method))):
            yield from ((spec, getattr(owner, spec.field)) for spec in specs(type(owner), table))


def parse(raw: Mapping[str, Scalar], methods: Mapping[str, type]) -> RunConfig:
    """Parse a flat run config into a RunConfig.

    raw: keys as in docs/config.md; missing ones take their default. methods: parameter dataclass per method name; a user's own
    method is imported here, and its keys are known in its own runs alone.
    Raises UserError naming every problem at once (key, value, rule).
    """
    problems: list[str] = []
    known = {spec.name: spec for spec in specs(RunConfig)}
    method = str(raw.get("method", known["method"].default))
    outside = [method] if is_reference(method) and method in methods else []
    for name in [*methods, *outside]:
        known |= {spec.name: spec for spec in specs(methods[name], table_of(name))}
    for name in raw:
        if name not in known:
            problems.append(f"{name}: unknown key{nearest(name, known)}")
    values = {name: spec.read(raw[name], problems) if name in raw else spec.default for name, spec in known.items()}
    _check_words(values, methods, problems)
    if not problems:
        _check_together(values, problems)
    complain(problems)
    top = {s.field: values[s.name] for s in specs(RunConfig)}
    cls = methods[method]
    params = cls(**{s.field: values[s.name] for s in specs(cls, table_of(method))})
    defaults = {name: spec.default for name, spec in known.items()}
    config = RunConfig(**top, params=params, resolved=values, defaults=defaults)  # type: ignore[arg-type]
    complain([*params.problems(config)] if isinstance(params, Checked) else [])
    return config


@runtime_checkable
class Checked(Protocol):
    """Parameters of a method with rules that one key's range cannot say."""

    def problems(self, config: RunConfig) -> Iterable[str]:
        """Say what is wrong with the values together, one line each: key, rule, value."""
        ...


def complain(problems: Sequence[str]) -> None:
    """Raise UserError with all of the problems, if there are any."""
    if problems:
        raise UserError("invalid configuration:\n" + "\n".join(f"  {p}" for p in problems))


def parse_recorded(saved: Mapping[str, Scalar], methods: Mapping[str, type]) -> RunConfig:
    """Parse what a run folder has recorded. Of a user's own method it says all that matters: its code is not needed."""
    method = str(saved.get("method"))
    if is_reference(method):
        table = {key.rpartition(".")[2]: value for key, value in saved.items() if "." in key and bears_on(key, method)}
        methods = {**methods, method: recorded(table)}
    return parse(saved, methods)


def _check_words(values: Mapping[str, Scalar], methods: Mapping[str, type], problems: list[str]) -> None:
    def refuse(name: str, allowed: tuple[str, ...], more: str = "", prefixes: tuple[str, ...] = ()) -> None:
        value = values[name]
        kind, colon, _ = str(value).partition(":")
        hint = nearest(kind + colon, (*allowed, *prefixes))
        problems.append(f"{name}: must be one of {', '.join(allowed)}{more}, got {value!r}{hint}")

    if values["method"] not in methods:
        refuse("method", tuple(methods), " or module:METHOD")
    dataset, partition, model = str(values["dataset"]), str(values["partition"]), str(values["model"])
    words = (*(name for name, data in DATASETS.items() if not data.has_path), NODE)
    if dataset in DATASETS and DATASETS[dataset].has_path:
        problems.append(f"dataset: {dataset} needs its folder: {dataset}:/path/to/it")
    elif dataset not in words and not _has_path(dataset, PATH_DATASETS):
        refuse("dataset", words, " or folder:/path, npz:/path", PATH_DATASETS)
    if partition not in PARTITIONS and not _has_path(partition, ("file:",)):
        refuse("partition", PARTITIONS, " or file:/path.npz", ("file:",))
    if model not in MODELS and not re.fullmatch(r"[\w.]+:\w+", model):
        refuse("model", tuple(MODELS), " or module:factory")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(values["device"])):
        problems.append(f"device: must be auto, cpu, cuda or cuda:k, got {values['device']!r}")
    if not re.fullmatch(r"[\w.+=,@-]*", str(values["run-name"])) or str(values["run-name"]).startswith("."):
        problems.append(f"run-name: letters, digits and _.+=,@- only, not starting with a dot, got {values['run-name']!r}")
    names = class_names(str(values["classes"]))
    if len(set(names)) != len(names):
        problems.append(f"classes: every name once, got {values['classes']!r}")
    if dataset == NODE and len(names) < 2:
        problems.append(f"classes: dataset node needs at least two class names, got {values['classes']!r}")


def _has_path(value: str, prefixes: tuple[str, ...]) -> bool:
    return any(value.startswith(p) and len(value) > len(p) for p in prefixes)


def _check_together(values: Mapping[str, Any], problems: list[str]) -> None:
    if values["min-available-clients"] > values["num-clients"] > 0:
        problems.append(
            f"min-available-clients: must be at most num-clients ({values['num-clients']}), "
            f"got {values['min-available-clients']}"
        )
    if values["initial-weights"] and not Path(str(values["initial-weights"])).is_absolute():
        problems.append(f"initial-weights: must be an absolute path, got {values['initial-weights']!r}")


def class_names(classes: str) -> tuple[str, ...]:
    """Split the `classes` key."""
    return tuple(name.strip() for name in classes.split(",") if name.strip())
