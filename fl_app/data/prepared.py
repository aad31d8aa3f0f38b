"""The prepared form of a data set: memory-mapped arrays that every client process opens in milliseconds.

A data set becomes <root>/datasets/<key>/ with x_train.npy, x_test.npy (images uint8 [n, C, H, W], or float32 or int64 [n, ...]),
y_train.npy, y_test.npy (labels int64 [n], or float32 [n, k]) and info.json; groups_train.npy, groups_test.npy (int64 [n]) where a
column says whose each sample is. The key is made of all that defines the data, so that every client process finds it without being
told. A conversion holds a lock and ends in a rename: many processes at once do it exactly once, and an interrupted one leaves
nothing that would be used.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import hmac
import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app import checksums, tasks
from fl_app.config import RunConfig
from fl_app.config.rules import split_names
from fl_app.errors import UserError, describe
from fl_app.files import build_once, cache_key, lock, make_directory, publish_text
from fl_app.known_names import SCALING
from fl_app.site import site_directory
from fl_app.sources import NODE, path_in
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
"""Beside the arrays: a hash of the files they were made of."""
GROUPS = "groups.json"
HASH_KEY = "hash-key"
"""In the site's own directory."""
FACTS = "facts.json"
STATISTICS_BATCH = 1024


@dataclass(frozen=True)
class DataRequest:
    """What a source of data is asked to prepare.

    dataset: as in the run config. path: where the user's data lie, absolute; of no meaning to a source without a path. root: the
    data directory. classes: names in label order; empty: the source's own order. image_size: pixels, 0: as the images are. task:
    says what targets are. target: the columns they stand in, with commas. client: the column that says whose a sample is.
    test_ratio: part of the rows for test, of columns that have no test part. exclude, categorical: columns that are no features,
    and columns of words. na_values, separator: how a CSV file is read, as the keys of these names. site: whether they are one
    site's own, which may lack classes and test samples. force: convert them again. look: convert them again if files have been
    overwritten since.
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
    exclude: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    na_values: tuple[str, ...] = ()
    separator: str = ""
    site: bool = False
    force: bool = False
    look: bool = False

    @classmethod
    def of(cls, config: RunConfig, data_path: str = "", **more: bool) -> DataRequest:
        """Return what a run asks for. data_path: where a site's own data lie, for dataset `node`. more: `force` and `look`."""
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
            split_names(config.exclude),
            split_names(config.categorical),
            split_names(config.na_values),
            config.separator,
            site,
            **more,
        )

    @property
    def of_task(self) -> Task:
        """The task."""
        return tasks.named(self.task)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the columns that hold the targets."""
        return split_names(self.target)


def absolute(path: str) -> Path:
    """Return a path of the user's as an absolute one; none stays none."""
    return Path(path).expanduser().resolve() if path else Path()


@dataclass(frozen=True)
class Facts:
    """What a source tells of its data beside the arrays.

    features: their names in order, () where data name none. columns: (name, role, encoding or reason) of every column of a table.
    remarks: what its user should know of how the data were read. shift, scale: per feature, target_shift: per target; what is
    stored is (value - shift) / scale; () where everything is stored as it is.
    """

    features: tuple[str, ...] = ()
    columns: tuple[tuple[str, str, str], ...] = ()
    remarks: tuple[str, ...] = ()
    shift: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    target_shift: tuple[float, ...] = ()

    @classmethod
    def from_json(cls, fields: Mapping[str, list[Any]]) -> Facts:
        """Return the facts that JSON holds as lists."""
        plain: dict[str, Any] = {name: tuple(values) for name, values in fields.items()}
        plain["columns"] = tuple(tuple(column) for column in plain.get("columns", ()))
        return cls(**plain)


@dataclass(frozen=True)
class DatasetInfo:
    """What a model and a report need to know of a data set.

    Square images are [in_channels, image_size, image_size]; what other samples are is `shape`. classes: names of the model's
    outputs in order: of the classes in label order, the labels or the numbers. mean, std: per channel, of the training images
    scaled to [0, 1], or per feature, the last axis of samples that are no images; std is 1 where nothing varies (still):
    dividing by it is safe. groups: names of the groups that a column makes of the samples. facts: what else the source tells.
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
        """Whether all training samples are one and the same value in every channel: nothing can be learned from them."""
        return bool(self.still) and all(self.still)

    @property
    def spread(self) -> tuple[float, ...]:
        """Standard deviation per channel or feature, 0 where nothing varies."""
        return tuple(0.0 if still else std for still, std in zip(self.still, self.std, strict=True))

    @property
    def scaling(self) -> dict[str, list[float]]:
        """What turns numbers into inputs: mean, std, and what they are stored less and divided by; [] where nothing is done."""
        facts = self.facts
        lists = (self.mean, self.std, facts.shift, facts.scale, facts.target_shift)
        return {name: [*values] for name, values in zip(SCALING, lists, strict=True)}

    @property
    def remarks(self) -> list[str]:
        """What its user should know of how the data were read."""
        features = self.facts.features
        constant = [name for name, still in zip(features, self.still, strict=False) if still]
        more = [f"constant in the training part: {listed(constant)}"] if constant and not self.constant else []
        return [*self.facts.remarks, *more]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of a sample."""
        return self.shape or (self.in_channels, self.image_size, self.image_size)

    @property
    def samples(self) -> str:
        """What samples are called."""
        return "images" if len(self.input_shape) == 3 else "samples"

    @property
    def model_arguments(self) -> dict[str, Any]:
        """What a model is built with (fl_app/models.py)."""
        return {
            "in_channels": self.in_channels,
            "num_classes": self.num_classes,
            "image_size": self.image_size,
            "input_shape": self.input_shape,
        }

    @classmethod
    def from_json(cls, text: str) -> DatasetInfo:
        """Read what `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        facts = Facts.from_json(fields.pop("facts", {}))
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
        return cls(**fields, facts=facts)

    def to_json(self) -> str:
        """Return all fields as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=1)


@dataclass(frozen=True)
class Groups:
    """Whose each sample is: train, test: int64 [n], [m], places in `names`."""

    train: Labels
    test: Labels
    names: tuple[str, ...]


def keyed_hash(sha256: str) -> str:
    """Return a hash of a site's data as others may see it: keyed, so that nobody can try out what the data may be.

    Its first digits name the key: two hashes of different keys say nothing of each other.

    The site's own directory keeps the key: the same data have the same hash here, and another one elsewhere. Raises UserError for a
    relative one, and OSError.
    """
    directory = site_directory()
    make_directory(directory)
    path = directory / HASH_KEY
    with lock(directory / f".{HASH_KEY}.lock", wait=True):
        if not path.exists():
            publish_text(path, secrets.token_hex(32))
        key = path.read_text(encoding="utf-8").strip()
    name = hashlib.sha256(key.encode()).hexdigest()[: checksums.KEY_DIGITS]
    return name + hmac.new(key.encode(), sha256.encode(), "sha256").hexdigest()[checksums.KEY_DIGITS :]


@dataclass(frozen=True)
class Prepared:
    """A converted data set: read-only memory maps, x [n, ...], y [n] or [n, k]; key names it among all others."""

    root: Path
    info: DatasetInfo
    key: str
    x_train: Samples
    y_train: Targets
    x_test: Samples
    y_test: Targets
    groups: Groups | None = None

    @property
    def directory(self) -> Path:
        """Where its files are."""
        return directory_of(self.root, self.key)

    @property
    def sha256(self) -> str:
        """Hash of its samples, targets, groups and all names, as hexadecimal digits, the same wherever it was converted."""
        facts = self.info.facts
        # numbers are stored less their shift: without it two data sets may look the same
        told = (facts.features, facts.shift, facts.scale, facts.target_shift)
        names = [f"{name}.npy" for name in (*ARRAYS, *(("groups_train", "groups_test") if self.groups else ()))]
        return checksums.hash_of(self.directory, names, json.dumps([self.info.classes, self.info.groups, *told]))


def directory_of(root: Path, key: str) -> Path:
    """Return where the files of a data set are, by the data directory and its key."""
    return root / "datasets" / key


def data_root(config: RunConfig) -> Path:
    """Return `data-dir`, else $COROLLA_DATA_DIR, else corolla under $XDG_CACHE_HOME or ~/.cache."""
    if chosen := config.data_dir or os.environ.get("COROLLA_DATA_DIR"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "corolla"


def open_or_convert(
    request: DataRequest,
    name: str,
    parts: Sequence[Any],
    convert: Callable[[Path], Sequence[str]],
    files: Callable[[], str] | None = None,
) -> Prepared:
    """Open <root>/datasets/<key>, converting the data first if no process has yet, or if the request says so.

    name, parts: what the key is made of, a readable word and all that defines the data, which JSON must hold. convert: writes the
    four arrays into a directory (see `save`) and returns the class names. files: a hash of what the files are like, which `look`
    compares with what they were like then.
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
        mean, std, still = _statistics(x_train) if images else _moments(x_train)
        shape = x_train.shape[1:]
        channels, size = _as_image(shape)
        known = () if images and shape == (channels, size, size) else shape
        column = json.loads((fresh / GROUPS).read_text()) if (fresh / GROUPS).exists() else ()
        facts = _facts_in(fresh)
        info = DatasetInfo(
            channels, size, names, len(x_train), len(x_test), mean, std, known, tuple(column), still, facts
        )
        if request.site:
            # nobody looks at a site's data before a run
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


def note(directory: Path, lines: Sequence[str]) -> None:
    """Add lines to the remarks of the facts in a directory (see `Facts`); call it after `save`."""
    facts = _facts_in(directory)
    _write_facts(directory, dataclasses.replace(facts, remarks=(*facts.remarks, *lines)))


def save(directory: Path, arrays: Arrays, groups: Groups | None = None, facts: Facts | None = None) -> None:
    """Write the four arrays of a data set, samples as they are and targets as int64 or float32.

    groups: whose the samples are. facts: what else is to be known of them.
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
    """Return what a model is built with: channels and side of [C, S, S], features and length of [T, C], else features and 1."""
    if len(shape) == 3:
        return shape[0], shape[1] if shape[1] == shape[2] else max(shape[1:])
    if len(shape) == 2:
        return shape[1], shape[0]
    return int(np.prod(shape)), 1


def _open(directory: Path) -> tuple[DatasetInfo, Arrays, Groups | None]:
    """Open what `open_or_convert` has built. Raises UserError if the arrays are not what info.json says."""
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
                problems.append(f"{name}.npy is not as info.json says")
        if info.groups:
            train, test = (np.load(directory / f"groups_{side}.npy", mmap_mode="r") for side in ("train", "test"))
            groups = Groups(train, test, info.groups)
    except Exception as error:
        # numpy may raise anything for damaged bytes
        problems = [describe(error)]
    checksums.refuse_damage("data-dir", directory, problems)
    return info, arrays, groups


def _load(directory: Path) -> Arrays:
    x_train, y_train, x_test, y_test = (np.load(directory / f"{name}.npy", mmap_mode="r") for name in ARRAYS)
    return x_train, y_train, x_test, y_test


Statistics = tuple[tuple[float, ...], tuple[float, ...], tuple[bool, ...]]
"""Mean and population std, per channel or feature; and whether nothing varies there, where std is 1."""


def _statistics(x: Images) -> Statistics:
    """Return the statistics per channel of x / 255, from exact counts of the 256 values."""
    counts = np.zeros((x.shape[1], 256), np.int64)
    for start in range(0, len(x), STATISTICS_BATCH):
        batch = x[start : start + STATISTICS_BATCH]
        for channel, row in enumerate(counts):
            row += np.bincount(batch[:, channel].reshape(-1), minlength=256)
    values = np.arange(256) / 255
    weights = counts / counts.sum(1, keepdims=True)
    mean = weights @ values
    std = np.sqrt(np.maximum(weights @ values**2 - mean**2, 0))
    return _statistics_of(mean, std, np.count_nonzero(counts, axis=1) == 1)


def _moments(x: Samples) -> Statistics:
    """Return the statistics per channel of [n, C, H, W], per feature (last axis) of anything else."""
    channel = 1 if x.ndim == 4 else x.ndim - 1
    axes = tuple(axis for axis in range(x.ndim) if axis != channel)
    mean = np.asarray(np.mean(x, axes, dtype=np.float64))
    std = np.asarray(np.std(x, axes, dtype=np.float64))
    return _statistics_of(mean, std, np.asarray(x.min(axes) == x.max(axes)) | (std == 0))


def _statistics_of(mean: NDArray[Any], std: NDArray[Any], still: NDArray[Any]) -> Statistics:
    std = np.where(still, 1.0, std)
    return tuple(map(float, mean)), tuple(map(float, std)), tuple(map(bool, still))


def at_least_two(names: Sequence[str], path: Path) -> Sequence[str]:
    """Return the class names of the data at `path`. Raises UserError if they are fewer than two."""
    if len(names) < 2:
        raise UserError(f"dataset: {path} must hold at least two classes, got {listed(names) or 'none'}")
    return names


def listed(names: Sequence[str]) -> str:
    """Return class names as an error prints them."""
    return ", ".join(names[:20]) + (f" ... ({len(names)})" if len(names) > 20 else "")
