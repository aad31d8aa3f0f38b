"""The prepared form of a data set: memory-mapped arrays that every client process opens in milliseconds.

A data set is converted into the directory <root>/datasets/<key>/ with these files:

- x_train.npy, x_test.npy: images uint8 [n, C, H, W], or float32 or int64 [n, ...].
- y_train.npy, y_test.npy: labels int64 [n], or float32 [n, k].
- info.json.
- groups_train.npy, groups_test.npy: int64 [n], if a column names each sample's client.

$COROLLA_PREPARED_DIR, if it is set, is in place of <root> here and for partitions. A site sets it for confined applications:
what they write must not be read by others.

The key is a hash of everything that defines the data, so every client process can compute it. A conversion holds a lock
and ends in a rename. So many processes at once convert exactly once, and an interrupted conversion leaves nothing that
another process would use.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import hmac
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app import checksums, tasks
from fl_app.config import RunConfig
from fl_app.config.rules import split_names
from fl_app.data.encoding import Encoding, of_features
from fl_app.data.moments import Moments, MomentSums
from fl_app.data.site_columns import SiteColumns
from fl_app.data.spelling import spellings
from fl_app.errors import DataError, UserError, describe
from fl_app.files import build_once, cache_key, expanded, lock, make_directory, publish_text
from fl_app.known_names import SCALING
from fl_app.privacy import secure_random
from fl_app.site_directory import site_directory
from fl_app.sources import NODE, path_in, source_of
from fl_app.tasks import Task

log = logging.getLogger("corolla")

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
Samples = NDArray[Any]
"""uint8 [n, C, H, W], float32 or int64 [n, ...]."""
Targets = NDArray[Any]
"""int64 [n] or float32 [n, k]."""
Arrays = tuple[Samples, Targets, Samples, Targets]

FORMAT = 2
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
FILES = "files.sha256"
"""File beside the arrays: a hash of the files they were converted from."""
GROUPS = "groups.json"
HASH_KEY = "hash-key"
"""File in the site's own directory: the key of keyed hashes."""
FACTS = "facts.json"
PREPARED = "COROLLA_PREPARED_DIR"
DOWNLOADS = "downloads"
"""Directory of downloaded files in the data directory."""


@dataclass(frozen=True)
class DataRequest:
    """A request to a source of data to prepare a data set.

    dataset: as in the run config. path: the absolute path of the user's data; unused by a source without a path. root:
    the data directory. classes: names in label order; empty: the source's own order. image_size: pixels; 0: do not
    resize. task: defines the targets' form. target: the targets' columns, with commas. client: the column that names
    each sample's client. test_ratio: part of the rows used for test if columns have no test part; test_seed: draws
    these rows. exclude, categorical, impute: columns that are no features, columns of words, and columns of numbers
    with missing values. na_values, separator, test_after: as the keys of these names. tokenizer: the file that makes
    token ids of texts; Path(): none does. own: how
    this site's table differs. site: whether the data are one
    site's own, which may lack classes and test samples. public: whether columns must be declared such that names and
    shapes follow from the config and the columns' names, and from no record. hides: whether no value is refused, because
    a refusal would tell of it: targets that cannot be used are marked (arrays.known), and features filled in.
    force: convert again. look: convert again if files were overwritten since.
    """

    dataset: str
    path: Path
    root: Path
    classes: tuple[str, ...] = ()
    image_size: int = 0
    task: str = "classification"
    target: str = ""
    client: str = ""
    test_ratio: float = 0.25
    test_seed: int = 0
    exclude: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    impute: tuple[str, ...] = ()
    na_values: tuple[str, ...] = ()
    separator: str = ""
    tokenizer: Path = Path()
    test_after: str = ""
    own: SiteColumns = SiteColumns()
    site: bool = False
    public: bool = False
    hides: bool = False
    force: bool = False
    look: bool = False

    @classmethod
    def of(cls, config: RunConfig, data_path: str = "", **more: bool) -> DataRequest:
        """Return a run's request. data_path: path of a site's own data, for dataset `node`. more: `force`, `look`."""
        site = config.dataset == NODE
        return cls(
            config.dataset,
            absolute(data_path if site else path_in("dataset", config.dataset)),
            data_root(config),
            split_names(config.classes),
            config.image_size,
            config.task,
            config.target,
            config.client,
            config.test_ratio,
            max(config.partition_seed, 0),
            split_names(config.exclude),
            split_names(config.categorical),
            split_names(config.impute),
            split_names(config.na_values),
            config.separator,
            absolute(config.tokenizer),
            config.test_after,
            SiteColumns.of_environment(),
            site,
            config.dp_epsilon > 0 or hides_values(config),
            hides_values(config),
            **more,
        )

    @property
    def of_task(self) -> Task:
        """The task object that the field `task` names."""
        return tasks.named(self.task)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the columns that hold the targets."""
        return split_names(self.target)


def hides_values(config: RunConfig) -> bool:
    """Return whether no value in a run's data decides about its answers: one that cannot be used counts as missing."""
    return config.is_confidential and (bool(config.classes) or not tasks.of(config).has_classes)


def absolute(path: str) -> Path:
    """Return a user's path as an absolute one; an empty `path` gives Path()."""
    return Path(path).expanduser().resolve() if path else Path()


@dataclass(frozen=True)
class Facts:
    """Facts about a source's data beside the arrays.

    features: their names in order, () if the data have none. columns: (name, role, encoding or reason) of every column
    of a table. encodings: those of the columns that became features, in order. remarks: lines for the user about how
    the data were read. shift, scale: per feature; samples are stored as (value - shift) / scale. target_shift: per
    target; targets are stored less this. () means stored unchanged. bits: the bits that 16-bit images use, of which the
    upper 8 are stored; 0 if there are none. tokens: the number of token ids, if the samples are these; 0: they are not.
    """

    features: tuple[str, ...] = ()
    columns: tuple[tuple[str, str, str], ...] = ()
    remarks: tuple[str, ...] = ()
    shift: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    target_shift: tuple[float, ...] = ()
    encodings: tuple[Encoding, ...] = ()
    bits: int = 0
    tokens: int = 0

    @property
    def by_column(self) -> tuple[str, ...]:
        """The features in the order of their columns' names."""
        columns = sorted(self.encodings, key=lambda encoding: encoding.column)
        return tuple(name for encoding in columns for name in encoding.names) or self.features

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Facts:
        """Return the facts that JSON holds as lists and numbers."""
        plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        plain["columns"] = tuple(tuple(column) for column in plain.get("columns", ()))
        plain["encodings"] = tuple(Encoding.from_json(encoding) for encoding in plain.get("encodings", ()))
        return cls(**plain)


@dataclass(frozen=True)
class DatasetInfo:
    """A data set's description for models and reports.

    Square images have shape [in_channels, image_size, image_size]. in_channels is the number of token ids if samples are
    these, shape [T]. shape: that of any other sample. classes: names of
    the model's outputs in order: the classes in label order, the labels, or the target numbers. mean, std: of the
    training samples, per channel of images scaled to [0, 1], or per feature (the last axis) of other samples. still:
    whether a channel or feature is constant; its std is then 1, so that dividing by it is safe. groups: the distinct
    values of the column that names each sample's client. facts: other facts from the source.
    """

    in_channels: int
    image_size: int
    classes: tuple[str, ...]
    num_train: int
    num_test: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shape: tuple[int, ...] = ()
    groups: tuple[str, ...] = ()
    still: tuple[bool, ...] = ()
    facts: Facts = Facts()

    @property
    def num_classes(self) -> int:
        """Number of classes K, or of other outputs."""
        return len(self.classes)

    @property
    def constant(self) -> bool:
        """Whether every channel or feature is constant over all training samples: nothing can be learned from them."""
        return bool(self.still) and all(self.still)

    @property
    def spread(self) -> tuple[float, ...]:
        """Standard deviation per channel or feature; 0 for a constant one."""
        return tuple(0.0 if still else std for still, std in zip(self.still, self.std, strict=True))

    @property
    def scaling(self) -> dict[str, list[float]]:
        """The five lists that SCALING names: mean, std, shift, scale, target-shift; [] for a step that is not done."""
        facts = self.facts
        lists = (self.mean, self.std, facts.shift, facts.scale, facts.target_shift)
        return {name: [*values] for name, values in zip(SCALING, lists, strict=True)}

    def scaled_by(self, moments: Moments) -> DatasetInfo:
        """Return a copy with the mean and standard deviation of `moments`."""
        return dataclasses.replace(self, mean=moments.mean, std=moments.std, still=moments.still)

    def with_columns(self, names: Sequence[str]) -> DatasetInfo:
        """Return a copy with these features alone, in this order. Raises UserError if one is missing."""
        facts = self.facts
        if lacking := [name for name in names if name not in facts.features]:
            raise UserError(
                f"dataset: this site has no column {lacking[0]!r}", code="data", key="dataset", rule="readable"
            )
        if tuple(names) == facts.features:
            return self
        places = [facts.features.index(name) for name in names]
        columns = of_features(facts.encodings, names)
        kept = {encoding.column for encoding in columns}
        roles = tuple(
            (n, "left out" if role == "feature" and n not in kept else role, how) for n, role, how in facts.columns
        )

        def of(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(values[k] for k in places) if values else ()

        return dataclasses.replace(
            self,
            in_channels=len(places) if self.in_channels == len(facts.features) else self.in_channels,
            mean=of(self.mean),
            std=of(self.std),
            still=of(self.still),
            shape=(len(places),) if self.shape else (),
            facts=dataclasses.replace(
                facts,
                features=tuple(names),
                columns=roles,
                shift=of(facts.shift),
                scale=of(facts.scale),
                encodings=columns,
            ),
        )

    @property
    def remarks(self) -> list[str]:
        """Lines for the user about how the data were read."""
        features = self.facts.features
        # of tokens, each place in a text is one
        stills = () if self.facts.tokens else self.still
        constant = [name for name, still in zip(features, stills, strict=False) if still]
        more = [f"constant in the training part: {listed(constant)}"] if constant and not self.constant else []
        return [*self.facts.remarks, *more]

    def columns_facts(self) -> dict[str, Any]:
        """Return the rules to read another table: `encodings` of the features' columns, and names of all `others`."""
        facts = self.facts
        others = [name for name, role, _ in facts.columns if role != "feature"]
        return {"encodings": [dataclasses.asdict(encoding) for encoding in facts.encodings], "others": others}

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of a sample."""
        return self.shape or (self.in_channels, self.image_size, self.image_size)

    @property
    def samples(self) -> str:
        """The word for samples: "images" or "samples"."""
        return "images" if len(self.input_shape) == 3 else "samples"

    @property
    def model_arguments(self) -> dict[str, Any]:
        """The keyword arguments that a model is built with (fl_app/models.py)."""
        return {
            "in_channels": self.in_channels,
            "num_classes": self.num_classes,
            "image_size": self.image_size,
            "input_shape": self.input_shape,
        }

    @classmethod
    def from_json(cls, text: str) -> DatasetInfo:
        """Return the info that `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        facts = Facts.from_json(fields.pop("facts", {}))
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
        return cls(**fields, facts=facts)

    def to_json(self) -> str:
        """Return all fields as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=1)


@dataclass(frozen=True)
class SampleGroups:
    """The group of each sample by a column's value. train, test: int64 [n], [m], places in `names`."""

    train: Labels
    test: Labels
    names: tuple[str, ...]


def keyed_hash(sha256: str, reading: str) -> str:
    """Return a keyed hash of a site's data that other parties may see.

    Without the key nobody can test guesses of the data against the hash. The key follows from the site's own and from
    `reading`: how a run reads the data. Otherwise two hashes that are equal would show that two readings are, for example
    with and without a value among `na-values`, so that no record has this value.

    The hash begins with digits that identify the key. Hashes of different keys cannot be compared.

    The site's key is stored in its own directory. So the same data, read in the same way, have the same hash at this
    site, and a different hash at another site. Raises OSError, and UserError if the site's directory is a relative path.
    """
    directory = site_directory()
    make_directory(directory)
    path = directory / HASH_KEY
    with lock(directory / f".{HASH_KEY}.lock", wait=True):
        if not path.exists():
            publish_text(path, secure_random.secret().hex())
        own = path.read_text(encoding="utf-8").strip()
    key = hmac.new(own.encode(), reading.encode(), "sha256").digest()
    name = hashlib.sha256(key).hexdigest()[: checksums.KEY_DIGITS]
    return name + hmac.new(key, sha256.encode(), "sha256").hexdigest()[checksums.KEY_DIGITS :]


@dataclass(frozen=True)
class Prepared:
    """A converted data set: read-only memory maps, x [n, ...], y [n] or [n, k]. key: the name of its directory."""

    root: Path
    info: DatasetInfo
    key: str
    x_train: Samples
    y_train: Targets
    x_test: Samples
    y_test: Targets
    groups: SampleGroups | None = None

    @property
    def directory(self) -> Path:
        """The directory of its files."""
        return directory_of(self.root, self.key)

    @property
    def sha256(self) -> str:
        """Hash of samples, targets, groups and all names, as hexadecimal digits; equal on all machines."""
        facts = self.info.facts
        # numbers are stored less their shift: without the shift two data sets may have the same files
        told = (facts.features, facts.shift, facts.scale, facts.target_shift)
        names = [f"{name}.npy" for name in (*ARRAYS, *(("groups_train", "groups_test") if self.groups else ()))]
        return checksums.hash_of(self.directory, names, json.dumps([self.info.classes, self.info.groups, *told]))


def directory_of(root: Path, key: str) -> Path:
    """Return the directory of a data set's files. root: the data directory. key: `Prepared.key`."""
    return prepared_in(root) / "datasets" / key


def prepared_in(root: Path) -> Path:
    """Return the directory of prepared data and partitions. root: the data directory."""
    return Path(os.environ.get(PREPARED) or root)


def cache_directory() -> Path:
    """Return this user's directory of files that can be made again: corolla under $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "corolla"


def data_root(config: RunConfig) -> Path:
    """Return `data-dir`, else $COROLLA_DATA_DIR, else corolla under $XDG_CACHE_HOME or ~/.cache."""
    if chosen := config.data_dir or os.environ.get("COROLLA_DATA_DIR"):
        return expanded(chosen)
    return cache_directory()


def open_or_convert(
    request: DataRequest,
    name: str,
    parts: Sequence[Any],
    convert: Callable[[Path], Sequence[str]],
    files: Callable[[], str] | None = None,
) -> Prepared:
    """Open <root>/datasets/<key>. Convert the data first if no process has done so, or if the request demands it.

    name, parts: the key's parts, a readable word and everything that defines the data, as JSON values. convert: writes
    the four arrays into a directory (see `save`) and returns the class names. files: returns a hash of the source
    files; with `look` the data are converted again if the hash has changed since the conversion.
    """
    key = cache_key(name, [FORMAT, *parts])
    directory = directory_of(request.root, key)
    now = functools.cache(files) if files else None

    def build(fresh: Path) -> None:
        if directory.is_dir() and not request.force:
            log.warning("%s: files have changed since they were converted; they are converted again", name)
        if now:
            (fresh / FILES).write_text(now())
        names = tuple(convert(fresh))
        x_train, _, x_test, _ = _load(fresh)
        images = x_train.dtype == np.uint8
        found = MomentSums.of(x_train).moments
        shape = x_train.shape[1:]
        channels, size = _as_image(shape)
        known = () if images and shape == (channels, size, size) else shape
        column = json.loads((fresh / GROUPS).read_text()) if (fresh / GROUPS).exists() else ()
        note(fresh, _alike(request, names, column, [name for name, *_ in _facts_in(fresh).columns]))
        facts = _facts_in(fresh)
        info = DatasetInfo(
            facts.tokens or channels,
            size,
            names,
            len(x_train),
            len(x_test),
            found.mean,
            found.std,
            known,
            tuple(column),
            found.still,
            facts,
        )
        if request.site:
            # `check`, which prints remarks before a run, does not see a site's data
            for line in info.remarks:
                log.warning("%s: %s", name, line)
        (fresh / "info.json").write_text(info.to_json())

    def stale(there: Path) -> bool:
        if not request.look or now is None:
            return False
        return not (there / FILES).is_file() or (there / FILES).read_text() != now()

    build_once(directory, build, key="data-dir", force=request.force, stale=stale)
    info, arrays, groups = _open(directory)
    return Prepared(request.root, info, key, *arrays, groups)


def _alike(request: DataRequest, outputs: Sequence[str], clients: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Return a line for each kind of names among which some look alike to a person, in data of the user's."""
    if source_of(request.dataset).known:
        return []
    classes = outputs if request.of_task.has_classes else ()
    return [
        *spellings(f"column {request.target!r}" if request.target else "classes", classes, "class"),
        *spellings(f"column {request.client!r}", clients, "client"),
        *spellings("columns", columns, "column"),
    ]


def not_read(path: Path, parts: list[str]) -> list[str]:
    """Return a line naming the parts of the data at a path that a source does not read; none if it reads all.

    Every source passes what it leaves out through this function.
    """
    return [f"not read in {path}: {listed(parts)}"] if parts else []


def note(directory: Path, lines: Sequence[str], **more: Any) -> None:
    """Add lines to the remarks of the facts in a directory, and set other facts (see `Facts`). Call it after `save`."""
    facts = _facts_in(directory)
    _write_facts(directory, dataclasses.replace(facts, remarks=(*facts.remarks, *lines), **more))


def save(directory: Path, arrays: Arrays, groups: SampleGroups | None = None, facts: Facts | None = None) -> None:
    """Write the four arrays of a data set: samples in their own dtype, targets as int64 or float32.

    groups: the samples' groups. facts: other facts about the data.
    """
    if facts is not None:
        _write_facts(directory, facts)
    for name, array in zip(ARRAYS, arrays, strict=True):
        if name.startswith("x"):
            dtype = array.dtype
        else:
            dtype = np.dtype(np.float32 if array.dtype.kind == "f" else np.int64)
        np.save(directory / f"{name}.npy", np.ascontiguousarray(array, dtype))
    if groups is not None:
        np.save(directory / "groups_train.npy", groups.train.astype(np.int64))
        np.save(directory / "groups_test.npy", groups.test.astype(np.int64))
        (directory / GROUPS).write_text(json.dumps(groups.names))


def _facts_in(directory: Path) -> Facts:
    file = directory / FACTS
    return Facts.from_json(json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {})


def _write_facts(directory: Path, facts: Facts) -> None:
    (directory / FACTS).write_text(json.dumps(dataclasses.asdict(facts)), encoding="utf-8")


def _as_image(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return a model's (in_channels, image_size): (C, S) for [C, S, S], (C, T) for [T, C], else (features, 1).

    An image that is not square counts by its longer side.
    """
    if len(shape) == 3:
        return shape[0], shape[1] if shape[1] == shape[2] else max(shape[1:])
    if len(shape) == 2:
        return shape[1], shape[0]
    return int(np.prod(shape)), 1


def _open(directory: Path) -> tuple[DatasetInfo, Arrays, SampleGroups | None]:
    """Open a directory that `open_or_convert` built. Raises UserError if the arrays do not match info.json."""
    groups, problems = None, []
    try:
        info = DatasetInfo.from_json((directory / "info.json").read_text(encoding="utf-8"))
        arrays = _load(directory)
        for name, array in zip(ARRAYS, arrays, strict=True):
            n = info.num_train if name.endswith("train") else info.num_test
            inputs = name.startswith("x")
            of_train = arrays[0] if inputs else arrays[1]
            shape = info.input_shape if inputs else of_train.shape[1:]
            fits = array.shape == (n, *shape) and array.dtype == of_train.dtype
            if inputs and not info.shape:
                fits = fits and array.dtype == np.uint8
            if not fits:
                problems.append(f"{name}.npy does not match info.json")
        if info.groups:
            train, test = (np.load(directory / f"groups_{side}.npy", mmap_mode="r") for side in ("train", "test"))
            groups = SampleGroups(train, test, info.groups)
    except Exception as error:
        # numpy may raise anything for damaged bytes
        problems = [describe(error)]
    checksums.refuse_damage("data-dir", directory, problems)
    return info, arrays, groups


def _load(directory: Path) -> Arrays:
    # as plain arrays: np.memmap's own indexing takes several times as long
    x_train, y_train, x_test, y_test = (
        np.asarray(np.load(directory / f"{name}.npy", mmap_mode="r")) for name in ARRAYS
    )
    return x_train, y_train, x_test, y_test


def at_least_two(names: Sequence[str], path: Path) -> Sequence[str]:
    """Return the class names of the data at `path`. Raises UserError if they are fewer than two."""
    if len(names) < 2:
        raise DataError(key="dataset", rule=f"{path} must hold at least two classes, got {listed(names) or 'none'}")
    return names


def listed(names: Sequence[str]) -> str:
    """Return class names as an error prints them."""
    return ", ".join(names[:20]) + (f" ... ({len(names)})" if len(names) > 20 else "")
