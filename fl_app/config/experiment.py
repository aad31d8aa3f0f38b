"""The keys of the run configuration that say what is learned: the experiment, its data, its task, its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_app.keys import AT_LEAST_ONE, BELOW_ONE, NOT_NEGATIVE, POSITIVE, POSITIVE_RATIO, Rule, key
from fl_app.known_names import BY_COLUMN, FIXED_SIZES, MODELS, OVER_CLASSES, OWN_PARTITION, PARTITIONS, TASKS
from fl_app.sources import NODE, either, sources_that


def _listed(**has: bool) -> str:
    """Return the data sources with these properties as a key's sentence names them."""
    return either(f"`{source.prefix}{':' * bool(source.path)}`" for source in sources_that(**has))


@dataclass(frozen=True)
class ExperimentKeys:
    """What is learned from which data by how many; RunConfig goes on with how."""

    # the experiment
    method: str = key(
        "fedcac",
        "Federated learning method; `corolla methods` lists them with their parameters. Or your own `module:METHOD`.",
        checked=True,
    )
    num_server_rounds: int = key(30, "Rounds T.", AT_LEAST_ONE, extends=True, headline=True)
    num_clients: int = key(
        0,
        "Clients N of the experiment; `corolla run --clients` sets it. 0: the SuperNodes' `num-partitions`.",
        NOT_NEGATIVE,
        about="data",
        headline=True,
    )
    fraction_train: float = key(
        1.0, "Fraction of the clients sampled for each round (at least one is).", POSITIVE_RATIO, headline=True
    )
    holdout_clients: float = key(
        0.0,
        "Part of the clients, drawn by the seed, that never train: evaluations tell of them apart (`unseen`), as they are and "
        "after `finetune-epochs`.",
        BELOW_ONE,
        compared=False,
    )
    seed: int = key(
        0,
        "Seed of everything random: partition, initial weights, sampling, batches.",
        NOT_NEGATIVE,
        partitions=PARTITIONS,
        headline=True,
        compared=False,
        checked=True,
    )
    partition_seed: int = key(
        -1,
        "Seed of the partition alone, for runs of several seeds on one split; -1: `seed`.",
        Rule(low=-1),
        about="data",
        partitions=PARTITIONS,
        compared=False,
        checked=True,
    )
    scale: Literal["full", "small"] = key(
        "full",
        "Set by `corolla run --scale small`: clients, rounds and samples were cut, figures are not the paper's.",
        compared=False,
    )
    plugins: str = key(
        "", "Set by `corolla run`: your own files that the run uses, each with the beginning of its sha256."
    )
    # data
    dataset: str = key(
        "digits",
        f"{either(f'`{source.form}` {source.note}'.rstrip() for source in sources_that())}.",
        about="data",
        headline=True,
    )
    classes: str = key(
        "",
        "Comma-separated class names in label order; required by `node`, optional for the user's own data. Empty: sorted names.",
        about="data",
        compared=False,
    )
    image_size: int = key(
        0,
        f"Side in pixels to which the images of {_listed(resizes=True)} are resized (short side) and centre-cropped; "
        "0: as they are, all equal and square.",
        Rule(low=0, high=512),
        about="data",
    )
    target: str = key(
        "",
        f"Column of {_listed(has_columns=True)} that is to be learned; several numbers with commas. All other columns are "
        "features.",
        about="data",
        compared=False,
    )
    client: str = key(
        "",
        "Column that says whose each sample is (a hospital, a device), for the partition `by-column`. It is no feature "
        "([how each source has it](tasks.md#data)).",
        about="data",
        compared=False,
    )
    exclude: str = key(
        "",
        f"Columns of {_listed(has_columns=True)} that are no features, with commas: a patient's number, a name.",
        about="data",
        compared=False,
    )
    categorical: str = key(
        "",
        f"Columns of {_listed(has_columns=True)} that hold words or codes, with commas: each of a column's values becomes a "
        "feature of 0 and 1. A column of words that is not among them, nor in `exclude`, is refused.",
        about="data",
        compared=False,
    )
    na_values: str = key(
        "",
        "Words that stand for a missing value in a CSV file, with commas; an empty cell always does. `empty`: no word does, so "
        "that `NA` and `None` are names. Empty: pandas' own list.",
        about="data",
        compared=False,
    )
    separator: str = key(
        "",
        "What divides the columns of a CSV file: one character, or `tab`. Empty: a comma.",
        about="data",
        compared=False,
    )
    partition: str = key(
        "dirichlet-client",
        f"{either(f'`{name}`' for name in (*PARTITIONS, BY_COLUMN, f'{OWN_PARTITION}/path.npz'))}.",
        about="data",
        headline=True,
    )
    dirichlet_alpha: float = key(
        0.1,
        "Concentration per class of the Dirichlet partitions.",
        POSITIVE,
        about="data",
        partitions=("dirichlet-client", *OVER_CLASSES),
        headline=True,
    )
    classes_per_client: int = key(
        2,
        "Classes each client holds in the `pathological` partition.",
        AT_LEAST_ONE,
        about="data",
        partitions=("pathological",),
    )
    pathological_assignment: Literal["balanced", "random", "blocks"] = key(
        "balanced",
        "Which classes the clients of the `pathological` partition hold. `balanced`: every class equally many clients, up to "
        "one. `random`: each client draws its own, so that some share classes (as FedCAC's authors). `blocks`: classes dealt to "
        "consecutive blocks of clients, which then hold the same (as PFLlib).",
        about="data",
        partitions=("pathological",),
    )
    train_samples: int = key(
        100,
        "Training samples per client (`dirichlet-client`, `pathological`, `iid`); 0: an equal share of all.",
        NOT_NEGATIVE,
        about="data",
        partitions=FIXED_SIZES,
    )
    test_samples: int = key(
        40,
        "Test samples per client (`dirichlet-client`, `pathological`, `iid`); 0: an equal share of all.",
        NOT_NEGATIVE,
        about="data",
        partitions=FIXED_SIZES,
    )
    min_samples: int = key(
        10,
        "Smallest number of samples a client may get in the `dirichlet` partitions.",
        AT_LEAST_ONE,
        about="data",
        partitions=OVER_CLASSES,
    )
    dirichlet_balance: bool = key(
        False,
        "Self-balancing of the `dirichlet` partition: a client that has more than an equal share already gets nothing of the "
        "classes that follow (as PFLlib); `min-samples` holds as well.",
        about="data",
        partitions=("dirichlet",),
    )
    test_ratio: float = key(
        0.25,
        "Part of each client's samples used for test in the `dirichlet` partitions, and of the rows of "
        f"{_listed(takes_test_ratio=True)} that have no test part of their own.",
        BELOW_ONE,
        about="data",
        partitions=(*OVER_CLASSES, *(source.prefix for source in sources_that(takes_test_ratio=True)), NODE),
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
        "",
        "Directory of prepared data sets. Empty: `$COROLLA_DATA_DIR`, or the user's cache.",
        about="place",
        checked=True,
    )
    # task
    task: str = key(
        "classification",
        "What is learned: "
        + ", ".join(f"`{name}`" for name in TASKS)
        + ", or your own `module:Class` (docs/tasks.md).",
        headline=True,
        checked=True,
    )
    metrics: str = key(
        "",
        "Which of the task's metrics evaluations of all clients measure beside its headline, with commas, or `all`. Empty: all, "
        "but for `classification` accuracy alone.",
        compared=False,
        checked=True,
    )
    # model
    model: str = key(
        "mlp",
        ", ".join(f"`{name}`" for name in MODELS) + ", or your own `module:factory`.",
        headline=True,
        checked=True,
    )
    norm: Literal["batch", "group"] = key("batch", "Normalisation layers of the ResNets.", checked=True)
    share: str = key(
        "", "Patterns over tensor names, with commas: of what the method sends only these travel. Empty: all of it."
    )
    train: str = key(
        "",
        "Patterns over tensor names, with commas: only these train, `*.adapter.*`. All others never travel and must be "
        "the same on every node, which checks it. Empty: all.",
    )
    initial_weights: str = key(
        "",
        "File the run starts from, safetensors or a PyTorch state dict (`.pt`, as `corolla export` writes). The server reads it; "
        "so does every client, at the same path, whose method leaves part of the model with it. Empty: from the seed.",
        checked=True,
    )
