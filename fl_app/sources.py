"""The registry of data sources: the values that `dataset` may have, and Corolla's facts about each.

A source is a file in fl_app/data/ and a line in REGISTERED. The run config and every client process import this file,
so it imports nothing heavy. A source's own module is imported when its data are opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fl_app.errors import ConfigurationError
from fl_app.known_names import OWN_PARTITION

FOLDER = "/"
"""In Source.reads: a directory."""


@dataclass(frozen=True)
class NamedData:
    """Facts that follow from a data set's name. Its images are [in_channels, image_size, image_size].

    torchvision: its class in torchvision.datasets, if it is there. train, test: that class's arguments for either part.
    first_label: the label of its first class there.
    file: its file's name in the data directory, where the user puts it.
    """

    in_channels: int
    num_classes: int
    image_size: int
    torchvision: str = ""
    train: Mapping[str, str | bool] = field(default_factory=lambda: {"train": True})
    test: Mapping[str, str | bool] = field(default_factory=lambda: {"train": False})
    first_label: int = 0
    file: str = ""


@dataclass(frozen=True)
class Source:
    """A source of data. These fields are all that the rest of Corolla knows of it; a file in fl_app/data/ reads it.

    prefix: its name in the key `dataset`: `prefix:/path`, or `prefix` alone if it has no path.
    prepare: `module:function` of a function that takes a DataRequest and returns a Prepared (fl_app/data/prepared.py).
    path: the text after the colon in documentation and errors; "" if the source has no path.
    note: further text in documentation and errors.
    reads: suffixes of its files in lower case, or FOLDER. They find the source of a node's data, and show a wrong
    prefix.
    has_columns: the key `target` names the columns to learn, and `test-ratio` divides rows without a test part.
    divides_rows: `test-ratio` divides its rows, though the key `target` names nothing in it.
    images: its samples are images of 8 bits, in any of the user's file formats.
    labels_only: its targets are labels of classes, and the key `client` names nothing in it.
    targets: the place of its targets, unless the key `target` names it.
    tells_classes: clients send the names of its classes even with `report-class-counts = false`.
    resizes: the key `image-size` resizes its images.
    installed: its samples come with a Python package, so it reads nothing that is a site's.
    tokens: its samples are token ids, which are not scaled.
    order: the order of its samples, in which `partition = file:` counts them.
    known: facts that follow from its name. The user cannot set its classes, nor its image size unless it resizes.
    """

    prefix: str
    prepare: str
    path: str = ""
    note: str = ""
    reads: tuple[str, ...] = ()
    has_columns: bool = False
    divides_rows: bool = False
    images: bool = False
    labels_only: bool = False
    targets: str = ""
    tells_classes: bool = False
    resizes: bool = False
    installed: bool = False
    tokens: bool = False
    order: str = ""
    known: NamedData | None = None

    @property
    def takes_test_ratio(self) -> bool:
        """Whether `test-ratio` divides its rows."""
        return self.has_columns or self.divides_rows

    @property
    def form(self) -> str:
        """Its form in the key `dataset`."""
        return f"{self.prefix}:{self.path}" if self.path else self.prefix


def _named(
    prefix: str, prepare: str, known: NamedData, path: str = "", resizes: bool = False, installed: bool = False
) -> Source:
    return Source(
        prefix, prepare, path, images=True, labels_only=True, resizes=resizes, installed=installed, known=known
    )


_DIGITS, _TORCHVISION = "fl_app.data.named:prepare_digits", "fl_app.data.named:prepare_torchvision"
_MEDMNIST, _TINY_IMAGENET = "fl_app.data.npz:prepare_medmnist", "fl_app.data.named:prepare_tiny_imagenet"


def _emnist(prefix: str, split: str, num_classes: int, first_label: int = 0) -> Source:
    train, test = ({"split": split, "train": train} for train in (True, False))
    return _named(prefix, _TORCHVISION, NamedData(1, num_classes, 28, "EMNIST", train, test, first_label))


NODE = "node"
"""Each SuperNode's own data, as a value of `dataset`."""

_DIVIDED = "the rows that `test-ratio` or `test-after` takes for test count apart"

REGISTERED: tuple[Source, ...] = (
    _named("digits", _DIGITS, NamedData(1, 10, 8), installed=True),
    _named("mnist", _TORCHVISION, NamedData(1, 10, 28, "MNIST")),
    _named("fashion-mnist", _TORCHVISION, NamedData(1, 10, 28, "FashionMNIST")),
    _emnist("emnist", "byclass", 62),
    _emnist("emnist-balanced", "balanced", 47),
    _emnist("emnist-byclass", "byclass", 62),
    _emnist("emnist-bymerge", "bymerge", 47),
    _emnist("emnist-digits", "digits", 10),
    _emnist("emnist-letters", "letters", 26, first_label=1),
    _emnist("emnist-mnist", "mnist", 10),
    _named("svhn", _TORCHVISION, NamedData(3, 10, 32, "SVHN", {"split": "train"}, {"split": "test"})),
    _named("cifar10", _TORCHVISION, NamedData(3, 10, 32, "CIFAR10")),
    _named("cifar100", _TORCHVISION, NamedData(3, 100, 32, "CIFAR100")),
    _named("medmnist-a", _MEDMNIST, NamedData(1, 11, 28, file="organamnist.npz")),
    _named("medmnist-c", _MEDMNIST, NamedData(1, 11, 28, file="organcmnist.npz")),
    _named("tiny-imagenet", _TINY_IMAGENET, NamedData(3, 200, 64), "/path", resizes=True),
    Source(
        "folder",
        "fl_app.data.folder:prepare",
        "/path",
        reads=(FOLDER,),
        images=True,
        labels_only=True,
        resizes=True,
        order="by class, in the order of `classes` or sorted by name, then by file name",
    ),
    Source(
        "npz",
        "fl_app.data.npz:prepare",
        "/path",
        reads=(".npz",),
        targets="y_train and y_test",
        tells_classes=True,
        order="as the arrays are",
    ),
    Source(
        "table",
        "fl_app.data.table:prepare",
        "/path.csv",
        "(or `.tsv`, `.csv.gz`, `.parquet`)",
        reads=(".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet"),
        has_columns=True,
        tells_classes=True,
        order=f"as the rows are; {_DIVIDED}",
    ),
    Source(
        "hf",
        "fl_app.data.table:prepare_saved",
        "/path",
        "(saved by `datasets`)",
        reads=(FOLDER,),
        has_columns=True,
        tells_classes=True,
        order=f"as the rows of the splits train and test are; without a split test, {_DIVIDED}",
    ),
    Source(
        "ag-news",
        "fl_app.data.text:prepare",
        "/path",
        "(train.csv and test.csv)",
        labels_only=True,
        tokens=True,
        order="as the rows of train.csv and test.csv are",
    ),
    Source(NODE, "fl_app.data:prepare_site", note="(each SuperNode's own `data-path`)", resizes=True),
)
SOURCES: dict[str, Source] = {source.prefix: source for source in REGISTERED}


def source_of(dataset: str) -> Source:
    """Return the source of a data set. Raises UserError if none has this prefix."""
    prefix = dataset.partition(":")[0]
    if prefix not in SOURCES:
        raise ConfigurationError(key="dataset", rule=f"{dataset!r} has no source; there are {', '.join(SOURCES)}")
    return SOURCES[prefix]


def named_data(dataset: str) -> NamedData | None:
    """Return the facts that follow from a data set's name; None for the user's own data and unknown names."""
    source = SOURCES.get(dataset.partition(":")[0])
    return source.known if source else None


def sources_that(**has: bool) -> list[Source]:
    """Return the sources with these properties, in the registry's order: `sources_that(has_columns=True)`."""
    return [source for source in SOURCES.values() if all(getattr(source, name) == value for name, value in has.items())]


def either(words: Iterable[str]) -> str:
    """Return words as a list in a sentence: a, b or c."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def suffix_of(path: Path) -> str:
    """Return a file's suffix in lower case, with the one before `.gz`: it shows the kind of a file in any case."""
    return "".join(path.suffixes[-2:] if path.suffix.lower() == ".gz" else path.suffixes[-1:]).lower()


# Paths in values ------------------------------------------------------------------------------------------------------


def path_prefixes(key: str) -> tuple[str, ...]:
    """Return the prefixes, colon included, that come before a path in a value of `dataset`, `partition` or `speeds`."""
    if key in ("partition", "speeds"):
        return (OWN_PARTITION,)
    return tuple(f"{source.prefix}:" for source in SOURCES.values() if source.path)


def path_in(key: str, value: str) -> str:
    """Return the path in a value of `dataset`, `partition` or `speeds`, "" if it has none."""
    return next((value.removeprefix(prefix) for prefix in path_prefixes(key) if value.startswith(prefix)), "")
