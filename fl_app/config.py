"""The run configuration: frozen, typed, parsed once, every problem reported together.

Keys are Flower's run config: flat, kebab-case, values bool, int, float or str (no lists, no null: "" and 0 stand for "not
set", each key says so). A method's parameters live in its own table, `fedcac.tau`. One declaration per key (fl_app/keys.py)
serves the parser, docs/config.md, `corolla methods` and the defaults in pyproject.toml; a test keeps the four equal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fl_app import rng
from fl_app.catalogue import DATASETS, FIXED_SIZES, MODELS, PARTITIONS, TASKS
from fl_app.config_rules import Checked, check_together, check_words, complain
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
    meant,
    recorded,
    specs,
    table_of,
)
from fl_app.plugins import is_reference


@dataclass(frozen=True)
class RunConfig:
    """Everything a run is defined by. See docs/config.md for every key."""

    # the experiment
    method: str = key(
        "fedcac", "Federated learning method; `corolla methods` lists them with their parameters. Or your own `module:METHOD`.",
        checked=True,
    )
    num_server_rounds: int = key(30, "Rounds T.", AT_LEAST_ONE, extends=True, headline=True)
    num_clients: int = key(
        0, "Clients N of the experiment; `corolla run --clients` sets it. 0: the SuperNodes' `num-partitions`.", NOT_NEGATIVE,
        about="data", headline=True,
    )
    fraction_train: float = key(
        1.0, "Fraction of the clients sampled for each round (at least one is).", POSITIVE_RATIO, headline=True
    )
    holdout_clients: float = key(
        0.0, "Part of the clients, drawn by the seed, that never train: evaluations tell of them apart (`unseen`), as they are and "
        "after `finetune-epochs`.", BELOW_ONE, compared=False,
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
        + ", `folder:/path`, `npz:/path`, `table:/path.csv` (or `.parquet`), `hf:/path` (saved by `datasets`) or `node` (each "
        "SuperNode's own `data-path`).", about="data", headline=True,
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
    target: str = key(
        "", "Column of a table or of `hf:` that is to be learned; several numbers with commas. All other columns are features.",
        about="data", compared=False,
    )
    client: str = key(
        "",
        "Column that says whose each sample is (a hospital, a device), for the partition `by-column`; of an `npz:` the arrays "
        "NAME_train and NAME_test. It is no feature.", about="data", compared=False,
    )
    partition: str = key(
        "dirichlet-client", "`dirichlet-client`, `dirichlet`, `pathological`, `iid`, `by-column` or `file:/path.npz`.",
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
        0.25, "Part of each client's samples used for test in the `dirichlet` partition, and of the rows of a table (or of `hf:`) "
        "that has no test part of its own.", BELOW_ONE,
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
    # task
    task: str = key(
        "classification",
        "What is learned: " + ", ".join(f"`{name}`" for name in TASKS) + ", or your own `module:Class` (docs/tasks.md).",
        headline=True, checked=True,
    )
    metrics: str = key(
        "",
        "Which of the task's metrics evaluations of all clients measure beside its headline, with commas, or `all`. Empty: all, "
        "but for `classification` accuracy alone (the others take every client's process a second to import).",
        compared=False, checked=True,
    )
    # model
    model: str = key(
        "mlp",
        ", ".join(f"`{name}`" for name in MODELS) + ", or your own `module:factory`.",
        headline=True, checked=True,
    )
    norm: Literal["batch", "group"] = key("batch", "Normalisation layers of the ResNets.", checked=True)
    share: str = key(
        "", "Patterns over tensor names, with commas: of what the method sends only these travel. Empty: all of it."
    )
    train: str = key(
        "", "Patterns over tensor names, with commas: only these train, `*.adapter.*`. All others never travel and must be "
        "the same on every node, which checks it. Empty: all."
    )
    initial_weights: str = key(
        "",
        "File the run starts from, read by the server: safetensors or a PyTorch state dict (`.pt`, as `corolla export` writes). "
        "Empty: from the seed.", checked=True,
    )
    # local training
    local_epochs: int = key(5, "Local epochs E.", AT_LEAST_ONE, headline=True)
    batch_size: int = key(20, "Batch size of local training.", AT_LEAST_ONE, headline=True)
    drop_last: bool = key(False, "Leave the last batch of an epoch out if it is incomplete, unless it is the only one.")
    optimizer: Literal["sgd", "adamw"] = key(
        "sgd", "`adamw`: betas 0.9 and 0.999, as torch.optim.AdamW; its moments start at zero in every round. A method's own plain "
        "gradient steps stay that.", headline=True,
    )
    learning_rate: float = key(0.1, "Learning rate.", POSITIVE, headline=True)
    learning_rate_decay: float = key(1.0, "Factor on the learning rate after every round.", POSITIVE_RATIO)
    schedule: Literal["constant", "cosine"] = key(
        "constant", "`cosine`: times (1 + cos(pi (t - 1) / T)) / 2 in round t of T, beside `learning-rate-decay`."
    )
    momentum: float = key(0.0, "SGD momentum; it starts at zero in every round.", BELOW_ONE)
    weight_decay: float = key(0.0, "Weight decay; decoupled from the gradient with `adamw`.", NOT_NEGATIVE)
    clip_norm: float = key(
        0.0, "Largest Euclidean norm of the gradient a step is taken with; larger ones are scaled down to it. 0: any.", NOT_NEGATIVE
    )
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
    max_update_norm: float = key(
        3.0, "Uploads that lie farther from the median of all uploads (per parameter), and from what was sent, than so many times "
        "what is usual are dropped by name; 0: none is.", NOT_NEGATIVE, compared=False,
    )  # fmt: skip
    max_size_weight: float = key(
        0.0, "Weight of a client's training samples in means, at most so many times the median client's; 0: no limit.",
        NOT_NEGATIVE, compared=False,
    )  # fmt: skip
    robust: Literal["none", "median", "trimmed-mean", "krum", "geometric-median"] = key(
        "none", "What replaces means over clients on the server, so that a few that lie cannot carry them away; every client then "
        "counts once.", compared=False,
    )  # fmt: skip
    robust_liars: float = key(
        0.3, "Part of the clients that may lie, for `robust = trimmed-mean` and `krum`; at least one of three.",
        Rule(low=0, high=0.5, high_open=True), compared=False,
    )  # fmt: skip
    server_memory_limit: float = key(
        2.0, "Gigabytes of per-client arrays the server keeps in memory between rounds; what is beyond lies in memory-mapped "
        "files in the run folder. 0: no limit.", NOT_NEGATIVE, about="running",
    )
    checkpoint_every: int = key(
        5, "Rounds between checkpoints; there is always one after the last.", AT_LEAST_ONE, about="running"
    )
    finetune_epochs: int = key(
        0, "Evaluations also measure every client after so many local epochs from its personal model; not kept.",
        NOT_NEGATIVE, compared=False,
    )
    # files
    run_name: str = key("", "Name of the run's folder. Empty: time, method and data set.", about="place")
    output_dir: str = key("runs", "Directory of run folders; made absolute by `corolla run`.", about="place")
    state_dir: str = key(
        "", "Directory of client state on each client. Empty: `$COROLLA_STATE_DIR`, or the user's state directory.",
        about="place",
    )
    keep_state: bool = key(
        False,
        "Keep what clients keep between rounds when the run is finished: only then can it be continued with more rounds "
        "(methods without client state always can).",
        about="running",
    )
    resume: str = key("", "Run folder to continue; set by `corolla run --resume`.", about="place")
    collect_personal_models: bool = key(
        False, "Upload every client's personal model at the end; off, parts that never travel stay on the clients.",
        about="running",
    )
    report_class_counts: bool = key(
        True,
        "Clients tell the server how many training samples of each class they have, for `clients.json` and the report; it "
        "reveals their label distributions.", compared=False,
    )
    track: str = key(
        "", "Any of `mlflow`, `wandb`, `tensorboard`, with commas; [how](experiments.md#trackers).", about="running", checked=True,
    )
    tensorboard: bool = key(False, "The same as `tensorboard` in `track`.", about="running", checked=True)
    # the chosen method's parameters, and all keys as resolved and as defaulted
    params: Any = dataclasses.field(default=NoParams())
    resolved: Mapping[str, Scalar] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Scalar] = dataclasses.field(default_factory=dict)

    def rate_factor(self, round: int) -> float:
        """What `learning-rate-decay` and `schedule` make of a learning rate in a round, from 1."""
        angle = math.pi * (round - 1) / self.num_server_rounds if self.schedule == "cosine" else 0.0
        return self.learning_rate_decay ** (round - 1) * ((1 + math.cos(angle)) / 2)

    @property
    def unseen(self) -> frozenset[int]:
        """The clients that never train (`holdout-clients`): at least one if any, and not all."""
        count = min(max(1, math.floor(self.holdout_clients * self.num_clients + 0.5)), self.num_clients - 1)
        if not self.holdout_clients or count < 1:
            return frozenset()
        drawn = rng.generator(self.seed, "holdout").choice(self.num_clients, count, replace=False)
        return frozenset(int(i) for i in drawn)

    @property
    def num_training(self) -> int:
        """How many clients train."""
        return self.num_clients - len(self.unseen)

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
    tables = [table_of(name) for name in (*methods, *outside)]
    problems += [f"{name}: unknown key{meant(name, known, tables, table_of(method))}" for name in raw if name not in known]
    values = {name: spec.read(raw[name], problems) if name in raw else spec.default for name, spec in known.items()}
    check_words(values, methods, problems)
    if not problems:
        check_together(values, problems)
    complain(problems)
    top = {s.field: values[s.name] for s in specs(RunConfig)}
    cls = methods[method]
    params = cls(**{s.field: values[s.name] for s in specs(cls, table_of(method))})
    defaults = {name: spec.default for name, spec in known.items()}
    config = RunConfig(**top, params=params, resolved=values, defaults=defaults)  # type: ignore[arg-type]
    complain([*params.problems(config)] if isinstance(params, Checked) else [])
    return config


def parse_recorded(saved: Mapping[str, Scalar], methods: Mapping[str, type]) -> RunConfig:
    """Parse what a run folder has recorded. Of a user's own method it says all that matters: its code is not needed."""
    method = str(saved.get("method"))
    if is_reference(method):
        table = {key.rpartition(".")[2]: value for key, value in saved.items() if "." in key and bears_on(key, method)}
        methods = {**methods, method: recorded(table)}
    return parse(saved, methods)
