"""Data sets of columns: a table, `table:/path.csv` or `.parquet`, or a data set that Hugging Face's `datasets` saved, `hf:/path`.

One column or more are the targets, one may say whose each row is; fl_app/data/columns.py says what the others become. Data
without a test part are divided: `test-ratio` of each client's rows, or of all rows, are for test, drawn from a stream that no run's
seed changes. pandas and datasets are imported only while converting.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fl_app import extras, rng
from fl_app.data import arrays, columns, precision
from fl_app.data.columns import Columns
from fl_app.data.prepared import DataRequest, Facts, Prepared, listed, note, open_or_convert, save
from fl_app.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

SUFFIXES = (".csv", ".parquet")
VERSION = 3
"""Version of how columns are read; conversions of other versions are not used."""

EMPTY_ONLY = ("empty",)
"""Value of `na-values` that takes no word for a missing value."""

SEPARATORS = {"": ",", "tab": "\t", "\\t": "\t"}
"""What the key `separator` means, where it does not mean itself."""

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
    if path.suffix == ".parquet":
        _refuse_text_keys(request)
    elif len(SEPARATORS.get(request.separator, request.separator)) != 1:
        raise UserError(f"separator: must be one character or tab, got {request.separator!r}")
    return open_columns(request, "table", [path], lambda: ([_read_table(request)], ()), needs)


def prepare_saved(request: DataRequest) -> Prepared:
    """Open what `datasets` saved."""
    path = request.path
    if not path.is_dir():
        raise UserError(f"dataset: no folder {path}")
    _refuse_text_keys(request)
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
    settings += [request.exclude, request.categorical, request.na_values, request.separator]
    return open_or_convert(request, f"{kind}-{path.stem}", [str(path), stamps, *settings, VERSION], convert)


def _refuse_text_keys(request: DataRequest) -> None:
    """Raise UserError for keys that say how text is read, of data that are no text. A site's file may be of another kind."""
    for key, value in (("separator", request.separator), ("na-values", ",".join(request.na_values))):
        if value and not request.site:
            raise UserError(f"{key}: {request.path} is no CSV file; leave it unset, got {value!r}")


# CSV and Parquet ------------------------------------------------------------------------------------------------------


def _read_table(request: DataRequest) -> Columns:
    """Read a table's columns. Raises UserError, with the key that may help, for what pandas makes no table of."""
    import pandas

    path, is_text = request.path, request.path.suffix == ".csv"
    options = _reading(request)
    try:
        # low_memory would read in parts and guess a column's type in each: 01 would be "01" in one and 1 in another
        frame = pandas.read_csv(path, low_memory=False, **options) if is_text else pandas.read_parquet(path)
        header = None
        if is_text:
            header = pandas.read_csv(
                path, sep=options["sep"], header=None, nrows=1, dtype=str, keep_default_na=False, index_col=False
            )
    except (OSError, ValueError, pandas.errors.ParserError) as error:
        hint = "" if request.separator or not is_text else "; if no commas divide its columns, set separator"
        raise UserError(f"dataset: {path} is not a readable table ({error}){hint}") from error
    names = [str(name) for name in frame.columns]
    if header is not None:
        # pandas numbers a name that is there twice: the header as it stands has it
        names = [str(name) for name in header.iloc[0]]
        _refuse_wrong_separator(request, names)
        if not isinstance(frame.index, pandas.RangeIndex):
            first = ", ".join(map(str, [frame.index[0], *frame.iloc[0]])) if len(frame) else ""
            raise UserError(
                f"dataset: {path}: its rows have more values than the {len(names)} names of its header ({listed(names)}); pandas "
                f"would take the first column for the rows' names and shift all others ({first[:80]}); end no row with a "
                f"separator, or name every column"
            )
    if twice := next((name for name in names if name and names.count(name) > 1), ""):
        raise UserError(f"dataset: {path} must have every column once, got {names.count(twice)} named {twice!r}")
    return {str(name): np.asarray(frame[name]) for name in frame.columns}


def _reading(request: DataRequest) -> dict[str, Any]:
    """Return how pandas is to read a CSV file."""
    options: dict[str, Any] = {"sep": SEPARATORS.get(request.separator, request.separator)}
    if request.na_values:
        words = () if request.na_values == EMPTY_ONLY else request.na_values
        options |= {"keep_default_na": False, "na_values": ["", *words]}
    return options


def _refuse_wrong_separator(request: DataRequest, names: Sequence[str]) -> None:
    """Raise UserError if a header looks as if something else divided its columns."""
    missing = [name for name in (*request.targets, request.client) if name and name not in names]
    if len(names) > 1 and not missing:
        return
    text = SEPARATORS.get(request.separator, request.separator).join(names)
    counts = {name: text.count(sign) for name, sign in ((";", ";"), ("tab", "\t"), ("|", "|"), (",", ","))}
    used = next((name for name, sign in SEPARATORS.items() if name and sign == request.separator), request.separator)
    counts.pop(used or ",", None)
    best = max(counts, key=lambda name: counts[name])
    if counts[best]:
        found = "one column" if len(names) == 1 else f"{len(names)} columns"
        raise UserError(
            f"separator: {request.path}: pandas made {found} of its header, {text[:80]!r}; set separator = {best!r} if that is "
            "what divides them"
        )


def _as_written(request: DataRequest, name: str, row: int) -> str:
    """Return what a CSV file has in a row of a column, word for word; "" for an empty cell and for other files."""
    if request.path.suffix != ".csv":
        return ""
    import pandas

    sep = _reading(request)["sep"]
    text = pandas.read_csv(request.path, sep=sep, dtype=str, keep_default_na=False, usecols=[name])
    return str(text[name].iloc[row])


# Data sets of Hugging Face --------------------------------------------------------------------------------------------


def _read_saved(request: DataRequest, notes: list[str]) -> Read:
    from datasets import ClassLabel, DatasetDict, load_from_disk

    path = request.path
    # datasets cannot load what it saved of no rows
    for state in (path / split / "state.json" for split in ("train", "test")):
        if state.is_file() and json.loads(state.read_text(encoding="utf-8")).get("_data_files") == []:
            _refuse_no_rows(path, state.parent.name)
    try:
        found = load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise UserError(f"dataset: {path} is no data set that datasets saved ({error})") from error
    if isinstance(found, DatasetDict):
        if "train" not in found:
            raise UserError(f"dataset: {path} must have a split train, it has {', '.join(found)}")
        sets = {name: found[name] for name in ("train", "test") if name in found}
    else:
        sets = {"train": found}
    for split, part in sets.items():
        if not len(part):
            _refuse_no_rows(path, split)
    labels = sets["train"].features.get(request.targets[0])
    images = _read_images(sets, notes)
    parts = []
    for split, part in sets.items():
        names = part.column_names
        parts.append(
            {n: images[split, n] if (split, n) in images else _saved_column(path, split, part, n) for n in names}
        )
    return parts, labels.names if isinstance(labels, ClassLabel) else ()


def _read_images(sets: Mapping[str, Dataset], notes: list[str]) -> dict[tuple[str, str], NDArray[Any]]:
    """Return columns of images by split and name, uint8 [n, H, W] or [n, H, W, 3], read as image files are.

    notes: gets what is to be said of them. Raises UserError naming a row.
    """
    from datasets import Image

    from fl_app.data.decode import as_array

    found: dict[tuple[str, str], NDArray[Any]] = {}
    for name, kind in sets["train"].features.items():
        if not isinstance(kind, Image):
            continue
        having = {split: part for split, part in sets.items() if isinstance(part.features.get(name), Image)}
        rows: list[str] = []
        files: list[Path | bytes] = []
        for split, part in having.items():
            for row, value in enumerate(part.select_columns([name]).cast_column(name, Image(decode=False))):
                rows.append(f"column {name}, row {row} of {split}")
                if value[name] is None:
                    raise UserError(f"dataset: {rows[-1]} has no image")
                files.append(value[name]["bytes"] or Path(value[name]["path"]))
        images, said = as_array(rows, files)
        notes += said
        ends = np.cumsum([len(part) for part in having.values()])[:-1]
        found |= {(split, name): part for split, part in zip(having, np.split(images, ends), strict=True)}
    return found


def _layout_notes(request: DataRequest, part: Columns) -> list[str]:
    names = [name for name in part if name not in (*request.targets, request.client)]
    return [line for name in names for line in arrays.layout_note(request.path, f"column {name}", part[name].shape)]


def _refuse_no_rows(path: Path, split: str) -> None:
    advice = "; take it away, and test-ratio divides train" if split == "test" else ""
    raise UserError(f"dataset: {path} has no rows in its split {split}{advice}")


def _saved_column(path: Path, split: str, part: Any, name: str) -> NDArray[Any]:
    """Return a column of a data set of Hugging Face: numbers in their own type, labels by name, what has a shape as an array."""
    from datasets import ClassLabel, Value

    feature = part.features[name]
    if isinstance(feature, ClassLabel):
        codes = np.asarray(part.with_format("arrow")[:][name].to_pandas(), np.float64)
        known = [*feature.names, None]
        return np.array([known[-1 if np.isnan(code) or code < 0 else int(code)] for code in codes], dtype=object)
    if isinstance(feature, Value):
        return np.asarray(part.with_format("arrow")[:][name].to_pandas())
    # datasets makes float32 of lists of float64 unless it is told not to
    numbers = {"dtype": np.float64} if _element(feature) == "float64" else {}
    try:
        return np.asarray(part.select_columns(name).with_format("numpy", **numbers)[:][name])
    except (ValueError, TypeError, OSError) as error:
        raise UserError(f"dataset: {path}: column {name} of split {split} cannot be read ({error})") from error


def _element(feature: Any) -> str:
    """Return the type of the elements of a feature that is a list or an array; "" of another."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    found = getattr(feature, "dtype", "")
    return found if isinstance(found, str) else ""


# From columns to arrays -----------------------------------------------------------------------------------------------


def _convert(request: DataRequest, parts: Sequence[Columns], known: Sequence[str], directory: Path) -> Sequence[str]:
    """Write the arrays; return the names of the outputs."""
    path, task = request.path, request.of_task

    def written(name: str, row: int) -> str:
        return _as_written(request, name, row)

    for name in (*request.targets, *([request.client] if request.client else ())):
        if missing := [part for part in parts if name not in part]:
            key = "client" if name == request.client else "target"
            raise UserError(f"{key}: {path} has no column {name!r}; it has {', '.join(missing[0])}")
    parts = columns.by_name(request, parts)
    for name in (*request.targets, *([request.client] if request.client else ())):
        for part in parts:
            columns.refuse_missing(request, name, part[name], written)
    if not len(parts[0][request.targets[0]]):
        raise UserError(f"dataset: {path} has no rows")
    whose = [part[request.client] if request.client else np.zeros(len(part[request.targets[0]])) for part in parts]
    y = [_targets(request, part) for part in parts]
    classes = request.classes or tuple(known)
    if task.has_classes and not classes and not request.site:
        # a divided table's classes are those of all its rows, wherever these come to lie
        classes = _names_of(y[0])
        if len(classes) == 1:
            raise UserError(
                f"dataset: {path}: column {request.target} must hold at least two classes, got {classes[0]}"
            )
    if len(parts) == 1:
        rows = _divide(whose[0], len(y[0]), request.test_ratio)
        y, whose = [y[0][of] for of in rows], [whose[0][of] for of in rows]
    column = f"column {request.target}"
    targets, of_targets = precision.Stored(), []
    if not task.has_classes:
        targets = arrays.stored_targets(request, column, y[0])
        of_targets = precision.remarks(y[0], targets, request.targets)
    y_train, y_test, names = arrays.targets(
        path, task, (column, targets.of(y[0])), (column, targets.of(y[1])), classes, site=request.site, what="rows"
    )
    if task.has_classes and not request.classes and not request.site:
        arrays.refuse_one_class(path, column, y_train, names)
    if not task.has_classes and not request.classes:
        names = request.targets
    encoded = columns.encode(request, parts, written)
    features = list(encoded.parts)
    if len(parts) == 1:
        features = [tuple(values[of] for values in encoded.parts[0]) for of in rows]
    x, how, remarks = _samples(request, encoded.names, features)
    groups = arrays.groups(*whose) if request.client else None
    facts = Facts(
        features=encoded.names,
        columns=tuple((use.name, use.role, use.how) for use in encoded.uses),
        remarks=(*encoded.remarks, *remarks, *of_targets),
        shift=how.shift,
        scale=how.scale,
        target_shift=targets.shift,
    )
    save(directory, arrays.stored(x[0], y_train, x[1], y_test), groups, facts)
    return names


def _targets(request: DataRequest, part: Columns) -> NDArray[Any]:
    y = [part[name] for name in request.targets]
    return y[0] if len(y) == 1 else np.stack(y, axis=1)


def _names_of(y: NDArray[Any]) -> tuple[str, ...]:
    """Return the names of classes that labels [n] are of: integers in their order, words sorted; () for what names none."""
    if y.ndim != 1 or y.dtype.kind not in "iubUSO":
        return ()
    if y.dtype.kind in "iu":
        return tuple(str(value) for value in np.unique(y))
    return tuple(sorted({arrays.word(value) for value in y}))


def _samples(
    request: DataRequest, names: Sequence[str], sides: Sequence[Sequence[NDArray[Any]]]
) -> tuple[list[NDArray[Any]], precision.Stored, list[str]]:
    """Return the samples of training and test rows, how numbers are stored in them, and what to say of it.

    sides: the features of either, each [n], or one of [n, ...].
    """
    path, train, tokens = request.path, sides[0], request.of_task.input_dtype == "int64"
    if len(names) > 1 and any(values.ndim > 1 for values in train):
        several = ", ".join(name for name, values in zip(names, train, strict=True) if values.ndim > 1)
        raise UserError(f"dataset: {path}: {several} must be the only feature, or hold one number per row")
    if len(names) == 1:
        of_feature = names if train[0].ndim == 1 else [f"{names[0]}[{k}]" for k in range(train[0].shape[-1])]
        how = precision.stored(train[0], tokens=tokens)
        x = [arrays.samples(path, f"column {names[0]}", how.of(side[0])) for side in sides]
        if x[0].shape[1:] != x[1].shape[1:]:
            raise UserError(
                f"dataset: {path}: test must have samples like train's, {x[0].shape[1:]}, got {x[1].shape[1:]}"
            )
        return x, how, precision.remarks(train[0], how, of_feature)
    each = [precision.stored(values, tokens=tokens) for values in train]
    lines = [
        line
        for values, one, name in zip(train, each, names, strict=True)
        for line in precision.remarks(values, one, [name])
    ]
    x = []
    for side in sides:
        numbers = [one.of(values) for values, one in zip(side, each, strict=True)]
        singles = [arrays.samples(path, f"column {name}", values) for name, values in zip(names, numbers, strict=True)]
        x.append(np.concatenate([values.astype(np.float32) for values in singles], axis=1))
    shift = tuple(one.shift[0] if one.shift else 0 for one in each)
    scale = tuple(one.scale[0] if one.scale else 1.0 for one in each)
    whole = precision.Stored(shift, scale) if any(one.shift for one in each) else precision.Stored()
    return x, whole, lines


def _divide(whose: NDArray[Any], rows: int, test_ratio: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw the test rows of each group; each keeps a row for training. Returns (training, test) rows, sorted."""
    test: list[NDArray[np.int64]] = []
    stream = rng.generator(0, "table-test-rows")
    for value in np.unique(whose):
        mine = stream.permutation(np.flatnonzero(whose == value))
        test.append(mine[: min(round(len(mine) * test_ratio), len(mine) - 1)])
    chosen = np.sort(np.concatenate(test)).astype(np.int64)
    return np.setdiff1d(np.arange(rows), chosen), chosen
