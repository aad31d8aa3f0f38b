"""Data sets of columns: a table, `table:/path.csv` or `.parquet`, or a data set that Hugging Face's `datasets` saved, `hf:/path`.

One column or more are the targets, one may say whose each row is, and all others are features. Data without a test part are
divided: `test-ratio` of each client's rows, or of all rows, are for test, drawn from a stream that no run's seed changes. pandas
and datasets are imported only while converting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fl_app import extras, rng
from fl_app.data import arrays
from fl_app.data.prepared import DataRequest, Prepared, note, open_or_convert, save
from fl_app.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

SUFFIXES = (".csv", ".parquet")
VERSION = 3
"""Version of how columns are read; conversions of other versions are not used."""

Columns = Mapping[str, NDArray[Any]]
"""Values by the name of their column."""

Read = tuple[Sequence[Columns], Sequence[str]]
"""Columns of the training part, and of the test part if there is one; names of the classes, if the data have them."""


def prepare(request: DataRequest) -> Prepared:
    """Open a table. A site's own may lack classes."""
    path = request.path
    if not path.is_file():
        raise UserError(f"dataset: no file {path}")
    if path.suffix not in SUFFIXES:
        raise UserError(f"dataset: a table must be a {' or '.join(SUFFIXES)} file, got {path}")
    needs = ("pandas", "pyarrow") if path.suffix == ".parquet" else ("pandas",)
    return open_columns(request, "table", [path], lambda: ([_read_table(path)], ()), needs)


def prepare_saved(request: DataRequest) -> Prepared:
    """Open what `datasets` saved."""
    path = request.path
    if not path.is_dir():
        raise UserError(f"dataset: no folder {path}")
    notes: list[str] = []
    files, needs = sorted(path.rglob("*")), ("pandas", "datasets")
    return open_columns(request, "hf", files, lambda: _read_saved(request, notes), needs, notes)


def open_columns(
    request: DataRequest,
    kind: str,
    files: Sequence[Path],
    read: Callable[[], Read],
    needs: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Prepared:
    """Open a data set of columns, converting it first if no process has yet.

    kind: the source's prefix. files: those the data lie in; they are converted again when one changes. read: returns the columns of
    the training part, those of the test part if there is one, and the names of the classes if the data have them. needs: the
    packages that it reads with. notes: what is to be said of how it was read, once that is done.
    """
    path = request.path
    if not request.targets:
        raise UserError(f"target: {path} needs the name of the column to learn (several with commas)")
    if request.image_size:
        raise UserError(f"image-size: {path} holds columns, whose images are not resized; got {request.image_size}")

    def convert(directory: Path) -> Sequence[str]:
        # whatever reads the columns, pandas tells which values are missing
        for package in dict.fromkeys(("pandas", *needs)):
            extras.require(package, f"dataset: {path}")
        parts, known = read()
        names = _convert(request, parts, known, directory)
        note(directory, [*notes, *_layout_notes(request, parts[0])])
        return names

    stamps = [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    settings = [request.classes, request.target, request.client, request.test_ratio, request.task, request.site]
    return open_or_convert(request, f"{kind}-{path.stem}", [str(path), stamps, *settings, VERSION], convert)


def _read_table(path: Path) -> Columns:
    import pandas

    try:
        # low_memory would read in parts and guess a column's type in each: 01 would be "01" in one and 1 in another
        frame = pandas.read_csv(path, low_memory=False) if path.suffix == ".csv" else pandas.read_parquet(path)
    except (OSError, ValueError, pandas.errors.ParserError) as error:
        raise UserError(f"dataset: {path} is not a readable table ({error})") from error
    names = [str(name) for name in frame.columns]
    if path.suffix == ".csv":
        # pandas numbers a name that is there twice: the header as it stands has it
        header = pandas.read_csv(path, header=None, nrows=1, dtype=str, keep_default_na=False)
        names = [str(name) for name in header.iloc[0]]
    if twice := next((name for name in names if name and names.count(name) > 1), ""):
        raise UserError(f"dataset: {path} must have every column once, got {names.count(twice)} named {twice!r}")
    return {str(name): np.asarray(frame[name]) for name in frame.columns}


def _read_saved(request: DataRequest, notes: list[str]) -> Read:
    from datasets import ClassLabel, DatasetDict, load_from_disk

    path = request.path
    try:
        found = load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise UserError(f"dataset: {path} is no data set that datasets saved ({error})") from error
    if isinstance(found, DatasetDict):
        if "train" not in found:
            raise UserError(f"dataset: {path} must have a split train, it has {', '.join(found)}")
        sets = [found[name] for name in ("train", "test") if name in found]
    else:
        sets = [found]
    features = sets[0].features
    labels = features.get(request.targets[0])

    images = _read_images(sets, notes)

    def columns(place: int, part: Dataset) -> Columns:
        others = part.remove_columns(list(images)).with_format("numpy")[:]
        return {name: images[name][place] if name in images else np.asarray(others[name]) for name in part.column_names}

    return [columns(place, part) for place, part in enumerate(sets)], labels.names if isinstance(
        labels, ClassLabel
    ) else ()


def _read_images(sets: Sequence[Dataset], notes: list[str]) -> dict[str, list[NDArray[Any]]]:
    """Return of every column of images its parts, uint8 [n, H, W] or [n, H, W, 3], read as image files are.

    notes: gets what is to be said of them. Raises UserError naming a row.
    """
    from datasets import Image

    from fl_app.data.decode import as_array

    found: dict[str, list[NDArray[Any]]] = {}
    for name, kind in sets[0].features.items():
        if not isinstance(kind, Image):
            continue
        rows: list[str] = []
        files: list[Path | bytes] = []
        for where, part in zip(("train", "test"), sets, strict=False):
            for row, value in enumerate(part.select_columns([name]).cast_column(name, Image(decode=False))):
                rows.append(f"column {name}, row {row} of {where}")
                if value[name] is None:
                    raise UserError(f"dataset: {rows[-1]} has no image")
                files.append(value[name]["bytes"] or Path(value[name]["path"]))
        images, said = as_array(rows, files)
        notes += said
        found[name] = np.split(images, [len(sets[0])])[: len(sets)]
    return found


def _layout_notes(request: DataRequest, part: Columns) -> list[str]:
    names = [name for name in part if name not in (*request.targets, request.client)]
    return [line for name in names for line in arrays.layout_note(request.path, f"column {name}", part[name].shape)]


def _convert(request: DataRequest, parts: Sequence[Columns], known: Sequence[str], directory: Path) -> Sequence[str]:
    """Write the arrays; return the names of the outputs."""
    path = request.path
    wanted = (*request.targets, *([request.client] if request.client else ()))
    for name in wanted:
        if missing := [part for part in parts if name not in part]:
            key = "client" if name == request.client else "target"
            raise UserError(f"{key}: {path} has no column {name!r}; it has {', '.join(missing[0])}")
        for part in parts:
            _refuse_missing(path, name, part[name])
    if not len(parts[0][wanted[0]]):
        raise UserError(f"dataset: {path} has no rows")
    sides = [_side(request, part) for part in parts]
    if len(sides) == 1:
        train, test = _divide(sides[0][2], len(sides[0][0]), request.test_ratio)
        x, y, whose = sides[0]
        sides = [(x[of], y[of], whose[of]) for of in (train, test)]
    (x_train, y_train, whose_train), (x_test, y_test, whose_test) = sides
    if x_train.shape[1:] != x_test.shape[1:]:
        raise UserError(
            f"dataset: {path}: test must have the columns of train, {x_train.shape[1:]}, got {x_test.shape[1:]}"
        )
    task = request.of_task
    classes = request.classes or tuple(known)
    if task.has_classes and not classes and y_train.dtype.kind in "iub" and not request.site:
        classes, y_train, y_test = _codes(y_train, y_test)
    column = f"column {request.target}"
    y_train, y_test, names = arrays.targets(
        path, task, (column, y_train), (column, y_test), classes, site=request.site, what="rows"
    )
    if not task.has_classes and not request.classes:
        names = request.targets
    groups = arrays.groups(whose_train, whose_test) if request.client else None
    save(directory, arrays.stored(x_train, y_train, x_test, y_test), groups)
    return names


def _side(request: DataRequest, part: Columns) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the samples, the raw targets and whose each row is, of one part."""
    path = request.path
    features = {name: values for name, values in part.items() if name not in (*request.targets, request.client)}
    if not features:
        raise UserError(f"dataset: {path} has no columns but {', '.join(part)}: nothing to learn from")
    for name, values in features.items():
        if values.dtype.kind not in "biuf":
            raise UserError(
                f"dataset: {path}: column {name} must hold numbers, got {_no_number(values)}; encode it, or leave it out"
            )
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            bad = int(np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(1))[0])
            raise UserError(f"dataset: {path}: column {name} must have a finite number in every row, row {bad} has not")
    if len(features) == 1:
        ((name, values),) = features.items()
        x = arrays.samples(path, f"column {name}", values)
    elif any(values.ndim > 1 for values in features.values()):
        names = ", ".join(name for name, values in features.items() if values.ndim > 1)
        raise UserError(f"dataset: {path}: {names} must be the only feature, or hold one number per row")
    else:
        x = np.stack([values.astype(np.float32) for values in features.values()], axis=1)
    y = [part[name] for name in request.targets]
    whose = part[request.client] if request.client else np.zeros(len(x))
    return x, y[0] if len(y) == 1 else np.stack(y, axis=1), whose


def _no_number(values: NDArray[Any]) -> str:
    """Return the first value that is no number, and its row."""
    import pandas

    if values.ndim > 1 or not len(values):
        return str(values.dtype)
    known = pandas.to_numeric(pandas.Series(values.astype(str)), errors="coerce").notna().to_numpy()
    row = int(np.argmin(known))
    return f"{str(values[row])!r}"[:40] + f" in row {row}"


def _refuse_missing(path: Path, name: str, values: NDArray[Any]) -> None:
    """Raise UserError if a row has no value in the target's column, or in that of the clients."""
    import pandas

    missing = np.flatnonzero(pandas.isna(values).any(axis=tuple(range(1, values.ndim))))
    if missing.size:
        raise UserError(f"dataset: {path}: column {name} must have a value in every row, row {missing[0]} has none")


def _divide(whose: NDArray[Any], rows: int, test_ratio: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw the test rows of each group; each keeps a row for training. Returns (training, test) rows, sorted."""
    test: list[NDArray[np.int64]] = []
    stream = rng.generator(0, "table-test-rows")
    for value in np.unique(whose):
        mine = stream.permutation(np.flatnonzero(whose == value))
        test.append(mine[: min(round(len(mine) * test_ratio), len(mine) - 1)])
    chosen = np.sort(np.concatenate(test)).astype(np.int64)
    return np.setdiff1d(np.arange(rows), chosen), chosen


def _codes(y_train: NDArray[Any], y_test: NDArray[Any]) -> tuple[tuple[str, ...], NDArray[np.int64], NDArray[np.int64]]:
    """Return the names of integer labels in order, and the labels as places among them."""
    values = np.unique(np.concatenate([y_train, y_test]))
    return tuple(str(value) for value in values), np.searchsorted(values, y_train), np.searchsorted(values, y_test)
