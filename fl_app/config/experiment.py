"""The keys of the run configuration for the experiment, its data, its task and its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_app.keys import AT_LEAST_ONE, BELOW_ONE, NOT_NEGATIVE, POSITIVE, POSITIVE_RATIO, File, Rule, key
from fl_app.known_names import (
    BY_COLUMN,
    FIXED_SIZES,
    MODELS,
    OVER_CLASSES,
    OWN_PARTITION,
    OWN_TEST_PART,
    PARTITIONS,
    TASKS,
)
from fl_app.sources import NODE, either, sources_that


def _listed(**has: bool) -> str:
    """Return the data sources with these properties, in words, for a key's sentence."""
    return either(f"`{source.prefix}{':' * bool(source.path)}`" for source in sources_that(**has))


_DIVIDED = (*(source.prefix for source in sources_that(takes_test_ratio=True)), NODE)
"""Data sets that draw their test rows when they are read."""


@dataclass(frozen=True)
class ExperimentKeys:
    """Keys of the experiment, its data, its task and its model. RunConfig adds all others."""

    # the experiment
    method: str = key(
        "fedcac",
        "Federated learning method; `corolla methods` lists them with their parameters. Or your own `module:METHOD`.",
        checked=True,
    )
    num_server_rounds: int = key(30, "Number of rounds (T).", AT_LEAST_ONE, extends=True, headline=True)
    num_clients: int = key(
        0,
        "Clients N of the run; `corolla run --clients` sets it. 0: the SuperNodes' `num-partitions`.",
        NOT_NEGATIVE,
        about="data",
        headline=True,
    )
    fraction_train: float = key(
        1.0, "Fraction of the clients sampled for each round (at least one is).", POSITIVE_RATIO, headline=True
    )
    holdout_clients: float = key(
        0.0,
        "Part of the clients, drawn by `seed`, that [never train](tasks.md#clients-that-never-train).",
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
        "Seed of only the partition, for runs of several seeds on one split. -1: `seed`. It also draws the test rows of "
        f"{_listed(takes_test_ratio=True)} data without a test part; there -1 draws the same rows for every `seed`.",
        Rule(low=-1),
        about="data",
        partitions=(*PARTITIONS, *_DIVIDED),
        compared=False,
        checked=True,
    )
    scale: Literal["full", "small"] = key(
        "full",
        "Set by `corolla run --scale small`: fewer clients, rounds and samples, so figures are not the paper's.",
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
        path=File(after_word=True),
    )
    classes: str = key(
        "",
        "Comma-separated class names in label order; required by `node`, optional for the user's own data. Empty: sorted names.",
        about="data",
        compared=False,
    )
    image_size: int = key(
        0,
        f"Images of {_listed(resizes=True)} are resized so that the short side has this many pixels, then cropped to the centre "
        "square. 0: unchanged; all images must be square and of one size.",
        Rule(low=0, high=512),
        about="data",
    )
    target: str = key(
        "",
        f"Column of {_listed(has_columns=True)} to learn, or several columns of numbers, separated by commas. All other columns "
        "are features.",
        about="data",
        compared=False,
    )
    client: str = key(
        "",
        "Column that names each sample's client (a hospital, a device). Then `partition` is `by-column`; any other is an error. "
        "The column is no feature ([its form in each source](tasks.md#clients-by-a-column)).",
        about="data",
        compared=False,
    )
    exclude: str = key(
        "",
        f"Columns of {_listed(has_columns=True)} that are no features, separated by commas: a patient's number, a name.",
        about="data",
        compared=False,
    )
    categorical: str = key(
        "",
        f"Columns of {_listed(has_columns=True)} that hold words or codes, separated by commas. Each value of a column becomes a "
        "feature of 0 and 1. `ward=icu|surgery` fixes the words: sites with different words need this. A column of words that is "
        "neither here nor in `exclude` is refused.",
        about="data",
        compared=False,
    )
    impute: str = key(
        "",
        f"Columns of {_listed(has_columns=True)} with missing numbers to fill in, separated by commas: `crp` with the median of "
        "the training rows, `crp=5` with 5. Each gets a second feature that is 1 where a number is missing. Empty: all columns "
        "that need it, but none where each site has its own table ([why](tasks.md#missing-values)).",
        about="data",
        compared=False,
    )
    na_values: str = key(
        "",
        "Words that mean a missing value in a CSV file, separated by commas. An empty cell is always missing. `empty`: only empty "
        "cells are missing, so `NA` and `None` are names. Empty: pandas' own list of words.",
        about="data",
        compared=False,
    )
    separator: str = key(
        "",
        "Separator of a CSV file's columns: one character, or `tab`. Empty: a comma.",
        about="data",
        compared=False,
    )
    tokenizer: str = key(
        "",
        f"A tokenizer's file, `tokenizer.json`: the column of texts of {_listed(has_columns=True)} becomes token ids "
        "([form](data.md#texts)). Empty: a column of texts is refused.",
        about="data",
        compared=False,
        path=File(),
    )
    partition: str = key(
        "dirichlet-client",
        f"{either(f'`{name}`' for name in (*PARTITIONS, BY_COLUMN, f'{OWN_PARTITION}/path.npz'))}. If `client` is set, the "
        f"default is `{BY_COLUMN}`.",
        about="data",
        headline=True,
        path=File(after_word=True),
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
    pathological_assignment: Literal["balanced", "random", "blocks", "blocks-unbalanced"] = key(
        "balanced",
        "Clients' classes in the `pathological` partition. `balanced`: numbers of clients per class differ by at "
        "most one. `random`: each client draws its own classes (as FedCAC's authors). `blocks`: consecutive blocks "
        "of clients get the same classes (as PFLlib). `blocks-unbalanced`: the same, with unequal numbers of "
        "samples; it needs `train-samples = 0` and `test-samples = -1`.",
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
        "Test samples per client (`dirichlet-client`, `pathological`, `iid`); 0: an equal share of all. -1, for `pathological`: "
        "`test-ratio` of each client's own samples, which come from the training and the test set together.",
        Rule(low=-1),
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
        "In the `dirichlet` partition, a client with more than an equal share gets no samples of the following classes (as "
        "PFLlib). `min-samples` still applies.",
        about="data",
        partitions=("dirichlet",),
    )
    test_ratio: float = key(
        0.25,
        "Share of each client's samples kept for testing in the `dirichlet` partitions, and in `pathological` with "
        "`test-samples = -1`; share of the rows of "
        f"{_listed(takes_test_ratio=True)} data without a test part.",
        BELOW_ONE,
        about="data",
        partitions=(*OVER_CLASSES, OWN_TEST_PART, *_DIVIDED),
    )
    test_after: str = key(
        "",
        f"Test part by time, of {_listed(has_columns=True)} data without a test part. `COLUMN:VALUE`: the rows with a later "
        "date, or a larger number, in a column. `COLUMN`: the last `test-ratio` of each client's rows by it. Empty: drawn rows.",
        about="data",
        compared=False,
    )
    validation_ratio: float = key(
        0.0,
        "Part of each client's training data kept out of training [for "
        "validation](experiments.md#validation-data-and-early-stopping), at least one sample; drawn by `seed` and "
        "stratified by class. 0: choices are made on test data, and tables state this.",
        BELOW_ONE,
    )
    normalize: Literal["auto", "unit", "mean-std", "symmetric"] = key(
        "auto",
        "`unit`: images are scaled to [0, 1], other samples are unchanged. `mean-std`: then all are shifted and scaled by the "
        "training data's mean and std, per channel or feature. `symmetric`: images are scaled to [-1, 1]. `auto`: `unit` for "
        "8-bit images, `mean-std` for tables, series and other arrays ([details](tasks.md#normalization)).",
    )
    normalize_over: Literal["auto", "sites", "site", "initial"] = key(
        "auto",
        "Scope of the mean and std of `mean-std`: the training data of all `sites` together, or of each `site` alone. `initial`: "
        "those of the model in `initial-weights`, from its card. `auto`: `sites`, but `site` with `private` or `dp-epsilon`.",
        compared=False,
    )
    augment: Literal["none", "crop-flip", "crop-flip-rotate"] = key(
        "none",
        "`crop-flip`: random crop after padding by an eighth of the side, and horizontal flip, on the device. "
        "`crop-flip-rotate`: then also a rotation by up to 15 degrees either way, bilinear. Pixels from outside the image are 0.",
    )
    data_dir: str = key(
        "",
        "Directory of prepared data sets. Empty: `$COROLLA_DATA_DIR`, or the user's cache.",
        about="place",
        checked=True,
        path=File(),
    )
    # task
    task: str = key(
        "classification",
        "Learning task: " + ", ".join(f"`{name}`" for name in TASKS) + ", or your own `module:Class` (docs/tasks.md).",
        headline=True,
        checked=True,
    )
    metrics: str = key(
        "",
        "Metrics of the task that clients measure beside the headline, separated by commas, or `all`. Empty: all; "
        "for `classification` only accuracy.",
        compared=False,
        checked=True,
    )
    headline: str = key(
        "",
        "Metric of the task that decides the best round and is shown first. Empty: the task's first metric, accuracy for "
        "`classification`.",
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
        "",
        "Patterns over tensor names, separated by commas: a tensor that the method sends travels only if it matches one. Empty: "
        "all do.",
    )
    train: str = key(
        "",
        "Patterns over tensor names, separated by commas, such as `*.adapter.*`: only these tensors train. [All "
        "others](tasks.md#parts-of-a-model) never travel. Empty: all train.",
    )
    frozen_dtype: Literal["float32", "bfloat16"] = key(
        "float32",
        "Type of the matrices that do not train (`train`). `bfloat16` takes half the memory.",
    )
    gradient_checkpointing: bool = key(
        False,
        "The backward pass computes activations again, which takes less memory. For [models that offer "
        "it](tasks.md#parts-of-a-model).",
        about="running",
        checked=True,
    )
    classifier: str = key(
        "",
        "Patterns over tensor names, separated by commas: the tensors of the classifier, for methods that split the model into "
        "body and classifier. A layer's name stands for its tensors. Empty: the last layers that the model's output passes "
        "through.",
        checked=True,
    )
    initial_weights: str = key(
        "",
        "File or folder with the [initial weights](models.md#initial-weights): safetensors, whole or in shards, or a PyTorch state "
        "dict. The server reads it. If part of the model stays on the clients, they read it too, at this path or that of their "
        "`site.toml`. Empty: drawn by `seed`.",
        checked=True,
        path=File(),
    )
    initial_weights_partial: bool = key(
        False,
        "Take the tensors that fit from `initial-weights`, and all others from the seed. The server's log names them. False: every "
        "tensor must fit.",
        checked=True,
    )
