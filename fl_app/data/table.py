"""Data sets of columns: a table, `table:/path.csv` or `.parquet`, or a data set that Hugging Face's `datasets` saved, `hf:/path`.

One or more columns are the targets. One column may name each row's client. fl_app/data/columns.py decides about all
other columns. Data without a test part are divided: `test-ratio` of each client's rows, or of all rows, are for test.
`partition-seed` draws these rows, not a run's `seed`. pandas and datasets are imported only during conversion.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fl_app import extras, rng
from fl_app.data import columns, moments, table_files, user_arrays
from fl_app.data.columns import Columns, Read
from fl_app.data.encoding import DATE, Encoding
from fl_app.data.parsing import FROM_ZERO, Places, is_structure, missing, no_number, numbers_of, usable_numbers
from fl_app.data.prepared import (
    DataRequest,
    Facts,
    Prepared,
    Targets,
    not_read,
    note,
    open_or_convert,
    save,
)
from fl_app.data.user_arrays import word
from fl_app.errors import DataError, UserError, listed
from fl_app.keys import nearest
from fl_app.sources import suffix_of

VERSION = 9
"""Version of the rules that read columns. Conversions of other versions are not used."""

# more numbers than this are hardly meant as classes
_MANY = 20


def prepare(request: DataRequest) -> Prepared:
    """Open a table. A site's own may lack classes."""
    path = request.path
    if not path.is_file():
        raise DataError(key="dataset", rule=f"no file {path}")
    if suffix_of(path) not in table_files.SUFFIXES:
        raise DataError(key="dataset", rule=f"a table must be a {' or '.join(table_files.SUFFIXES)} file, got {path}")
    if suffix_of(path) == ".parquet":
        table_files.refuse_text_keys(request)
    elif len(table_files.separator_of(request)) != 1:
        raise DataError(key="separator", rule="must be one character or tab", value=request.separator)
    notes = not_read(path.parent, table_files.beside(request))
    return open_columns(request, "table", [path], lambda: ([table_files.read(request, notes)], ()), ("pandas",), notes)


def prepare_saved(request: DataRequest) -> Prepared:
    """Open a data set that Hugging Face's `datasets` saved."""
    path = request.path
    if not path.is_dir():
        raise DataError(key="dataset", rule=f"no folder {path}")
    table_files.refuse_text_keys(request)
    notes: list[str] = []
    # a link may lead nowhere
    files, needs = sorted(file for file in path.rglob("*") if file.exists()), ("pandas", "datasets")
    return open_columns(request, "hf", files, lambda: table_files.read_saved(request, notes), needs, notes)


def open_columns(
    request: DataRequest,
    kind: str,
    files: Sequence[Path],
    read: Callable[[], Read],
    needs: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Prepared:
    """Open a data set of columns. Convert it first if no process has done so.

    kind: the source's prefix. files: the data's files; the data are converted again when one changes. read: returns the
    columns of the training part, those of the test part if there is one, and the classes' names if the data have them.
    needs: packages that `read` imports. notes: lines about the files; `read` adds lines about how it read them.
    """
    path = request.path
    if not request.targets:
        raise DataError(key="target", rule=f"{path} needs the name of the column to learn (several with commas)")
    if request.image_size:
        raise DataError(
            key="image-size", rule=f"images in columns, as in {path}, are not resized; got {request.image_size}"
        )

    def convert(directory: Path) -> Sequence[str]:
        # pandas finds missing values in columns of every source
        for package in dict.fromkeys(("pandas", *needs)):
            extras.require(package, f"dataset: {path}")
        parts, known = read()
        if kind != "table":
            # a table's own names are needed to read it
            parts = [table_files.as_the_run_has_it(request, part) for part in parts]
        names = _convert(request, parts, known, directory)
        note(directory, [*notes, *_layout_notes(request, parts[0])])
        return names

    if request.tokenizer.is_file():
        files = [*files, request.tokenizer]
    stamps = [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    settings = [request.classes, request.target, request.client, request.test_ratio, request.test_seed]
    settings += [
        request.task,
        request.site,
        request.exclude,
        request.categorical,
        request.impute,
        request.na_values,
        request.separator,
        request.test_after,
    ]
    if request.own.text:
        settings.append(request.own.text)
    if request.tokenizer.name:
        settings.append(f"tokenizer {request.tokenizer}")
    if request.public:
        settings.append("public")
    if request.hides:
        settings.append("hides values")
    settings += notes
    return open_or_convert(request, f"{kind}-{path.stem}", [str(path), stamps, *settings, VERSION], convert)


def _layout_notes(request: DataRequest, part: Columns) -> list[str]:
    others = {*request.targets, request.client}
    names = [name for name in part if name not in others]
    return [
        line for name in names for line in user_arrays.layout_note(request.path, f"column {name}", part[name].shape)
    ]


# From columns to arrays -----------------------------------------------------------------------------------------------


def _convert(request: DataRequest, parts: Sequence[Columns], known: Sequence[str], directory: Path) -> Sequence[str]:
    """Write the arrays and return the names of the outputs. Raises UserError naming every problem of the data."""
    if request.hides and request.site:
        # its values would decide how many rows are for test
        request = dataclasses.replace(request, client="", exclude=(*request.exclude, *filter(None, [request.client])))
    places, problems = table_files.places(request), columns.unknown(request, parts[0])
    parts = [_with_labels(request, part) for part in columns.by_name(request, parts)]
    named = [name for name in (*request.targets, request.client) if name in parts[0]]
    if request.hides:
        named = [request.client] if request.client in parts[0] else []
    unusable = {name for name in request.targets if name not in parts[0]}
    for name, part in ((name, part) for name in named for part in parts):
        if line := columns.no_single_values(name, part[name], places, several=name != request.client):
            problems.append(line)
            unusable.add(name)
    size = len(next(iter(parts[0].values()), ()))
    if not size:
        raise DataError(key="dataset", rule=f"{request.path} has no rows")
    whose = [np.zeros(len(next(iter(part.values())))) for part in parts]
    if request.client in parts[0]:
        whose = [part[request.client] for part in parts]
    if len(parts) == 1 and problems:
        # the clients' rows are not known
        rows = [np.arange(size), np.arange(0)]
    elif len(parts) == 1 and request.test_after:
        rows = list(divide_by_time(request, parts[0], whose[0], places))
    elif len(parts) == 1:
        rows = list(_divide(whose[0], size, request.test_ratio, request.test_seed))
    elif request.test_after:
        raise DataError(
            key="test-after", rule=f"{request.path} has a test part; leave it unset", value=request.test_after
        )
    else:
        rows = [np.arange(len(side)) for side in whose]
    changed: list[str] = []
    if request.hides:
        parts, changed = columns.usable(request, parts, rows[0], places)
    encoded, unfit = columns.encode(request, parts, rows[0], places)
    problems += unfit
    outputs = None
    if not unusable.intersection(request.targets):
        try:
            outputs = _outputs(request, parts, known, rows, places)
        except UserError as error:
            problems.append(str(error).removeprefix(f"dataset: {request.path}: "))
    _refuse(request, problems)
    assert outputs is not None
    features = list(encoded.parts)
    if len(parts) == 1:
        whose = [whose[0][of] for of in rows]
        features = [tuple(values[of] for values in encoded.parts[0]) for of in rows]
    x, how, remarks = _samples(request, encoded, features)
    groups = user_arrays.groups(*whose) if request.client else None
    facts = Facts(
        features=encoded.names,
        columns=tuple((use.name, use.role, use.how) for use in encoded.uses),
        remarks=(*encoded.remarks, *changed, *remarks, *outputs.remarks),
        shift=how.shift,
        scale=how.scale,
        target_shift=outputs.shift,
        encodings=encoded.encodings,
        tokens=encoded.tokens,
    )
    save(directory, user_arrays.stored(x[0], outputs.train, x[1], outputs.test), groups, facts)
    return outputs.names


def _with_labels(request: DataRequest, part: Columns) -> Columns:
    """Return a part with targets that leave no row unread, if the data hide their values.

    A row without a label has "" for one, which is no class; one without a number has NaN.
    """
    if not request.hides:
        return part
    filled = dict(part)
    for name in {*request.targets} & part.keys():
        values = part[name]
        if not request.of_task.has_classes:
            filled[name] = usable_numbers(values)
        elif values.ndim > 1:
            filled[name] = np.full(len(values), "", dtype=object)
        else:
            gone = [is_structure(value) or none for value, none in zip(values, missing(values), strict=True)]
            filled[name] = np.where(gone, "", values.astype(object)) if any(gone) else values
    return filled


def _refuse(request: DataRequest, problems: Sequence[str]) -> None:
    """Raise UserError with the first problems, one a line, if there are any."""
    if not problems:
        return
    keys = ("target: ", "client: ", "exclude: ", "categorical: ", "impute: ", "classes: ", "dataset: ")
    if len(problems) == 1:
        key, _, rule = problems[0].partition(": ")
        whole = problems[0].startswith(keys)
        raise DataError(key=key if whole else "dataset", rule=rule if whole else f"{request.path}: {problems[0]}")
    shown = [f"  {problem}" for problem in problems[: columns.MANY]]
    if len(problems) > columns.MANY:
        shown.append(f"  and {len(problems) - columns.MANY} more")
    raise DataError(key="dataset", rule=f"{request.path}: {len(problems)} problems:\n" + "\n".join(shown))


class Outputs(NamedTuple):
    """Training and test targets, the names of the model's outputs, the targets' shift, and remarks about them."""

    train: Targets
    test: Targets
    names: Sequence[str]
    shift: tuple[float, ...]
    remarks: Sequence[str]


def _outputs(
    request: DataRequest,
    parts: Sequence[Columns],
    known: Sequence[str],
    rows: Sequence[NDArray[np.int64]],
    places: Places,
) -> Outputs:
    """Return the targets. Raises UserError. rows: those of both parts, or training and test rows of the only part."""
    path, task, column = request.path, request.of_task, f"column {request.target}"
    if not task.has_classes:
        _require_numbers(request, parts, places)
    y = [_targets(request, part) for part in parts]
    classes = request.classes or tuple(known)
    if task.has_classes and not classes and request.public:
        raise DataError(
            key="classes", rule=f"must be set with dp-epsilon: the classes of {column} must not follow from records"
        )
    if task.has_classes and not classes and not request.site:
        # a divided table's classes are those of all rows, in training and in test
        classes = user_arrays.class_names(y[0])
        if len(classes) == 1:
            raise DataError(key="dataset", rule=f"{path}: {column} must hold at least two classes, got {classes[0]}")
    if len(parts) == 1:
        y = [y[0][of] for of in rows]
    stored, remarks = moments.Stored(), []
    if not task.has_classes:
        stored = user_arrays.stored_targets(request, column, y[0])
        remarks = moments.storage_remarks(y[0], stored, request.targets)
    train, test = ((column, stored.of(side)) for side in y)
    y_train, y_test, names = user_arrays.targets(
        path, task, train, test, classes, site=request.site, hides=request.hides, what="rows"
    )
    if task.has_classes and not request.classes and not request.site:
        user_arrays.refuse_one_class(path, column, y_train, names)
    if task.has_classes and len(names) > _MANY and y[0].dtype.kind in "iuf":
        remarks = [
            f"column {request.target!r}: it holds {len(names)} numbers, and each counts as a class; to predict the number "
            "itself, set task = regression"
        ]
    elif not task.has_classes and not request.classes:
        names = request.targets
    return Outputs(y_train, y_test, names, stored.shift, remarks)


def _require_numbers(request: DataRequest, parts: Sequence[Columns], places: Places) -> None:
    """Raise UserError, with the first value, for a target that holds no numbers. Targets are not converted."""
    for part in parts:
        for name in request.targets:
            values = part[name]
            read = numbers_of(values)
            if read is not None and read[0] == DATE:
                raise DataError(
                    key="dataset",
                    rule=f"{request.path}: column {name} must hold numbers, got dates; write them as days",
                )
            if values.dtype.kind not in "biuf":
                # all remedies but to leave the column out
                found = no_number(values, name, dataclasses.replace(places, of_model=True))
                raise DataError(key="dataset", rule=f"{request.path}: column {name} must hold numbers, got {found}")


def _targets(request: DataRequest, part: Columns) -> NDArray[Any]:
    y = [part[name] for name in request.targets]
    return y[0] if len(y) == 1 else np.stack(y, axis=1)


def _samples(
    request: DataRequest, encoded: columns.Encoded, sides: Sequence[Sequence[NDArray[Any]]]
) -> tuple[list[NDArray[Any]], moments.Stored, list[str]]:
    """Return the samples of training and test rows, the way numbers are stored in them, and remarks about it.

    sides: the features of the training and of the test rows: several of [n], or one of [n, ...].
    """
    path, train, names = request.path, sides[0], encoded.names
    tokens = bool(encoded.tokens) or request.of_task.input_dtype == "int64"
    if len(names) > 1 and any(values.ndim > 1 for values in train):
        whose = [encoding.column for encoding in encoded.encodings for _ in encoding.names]
        several = ", ".join(column for column, values in zip(whose, train, strict=True) if values.ndim > 1)
        raise DataError(
            key="dataset",
            rule=f"{path}: {several} must be the only feature, or hold one number per row; leave columns out (exclude)",
        )
    if len(names) == 1:
        of_feature = names if train[0].ndim == 1 else [f"{names[0]}[{k}]" for k in range(train[0].shape[-1])]
        how = moments.storing(train[0], tokens=tokens)
        x = [user_arrays.samples(path, f"column {names[0]}", how.of(side[0])) for side in sides]
        if x[0].shape[1:] != x[1].shape[1:]:
            raise DataError(
                key="dataset",
                rule=f"{path}: test must have samples like train's, {x[0].shape[1:]}",
                value=x[1].shape[1:],
            )
        return x, how, moments.storage_remarks(train[0], how, of_feature)
    each = [moments.storing(values, tokens=tokens) for values in train]
    lines = [
        line
        for values, one, name in zip(train, each, names, strict=True)
        for line in moments.storage_remarks(values, one, [name])
    ]
    x = [np.asarray(_side_by_side(path, names, side, each)) for side in sides]
    shift = tuple(one.shift[0] if one.shift else 0 for one in each)
    scale = tuple(one.scale[0] if one.scale else 1.0 for one in each)
    whole = moments.Stored(shift, scale) if any(one.shift for one in each) else moments.Stored()
    return x, whole, lines


def _side_by_side(
    path: Path, names: Sequence[str], features: Sequence[NDArray[Any]], each: Sequence[moments.Stored]
) -> NDArray[np.float32]:
    """Return features, each [n], as samples float32 [n, F]. each: the way each feature's numbers are stored."""
    numbers = [one.of(values) for values, one in zip(features, each, strict=True)]
    singles = [user_arrays.samples(path, f"column {name}", values) for name, values in zip(names, numbers, strict=True)]
    return np.concatenate([values.astype(np.float32) for values in singles], axis=1)


def _divide(
    whose: NDArray[Any], rows: int, test_ratio: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw the test rows of each group and return (training, test) rows, sorted. Each group keeps a training row.

    A group's rows have the same draw alone, in the file of a site, and in a table with other groups.
    """
    test: list[NDArray[np.int64]] = []
    groups = np.unique(whose, return_inverse=True)[1]
    order = np.argsort(groups, kind="stable")
    for own in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        mine = rng.generator(seed, "table-test-rows").permutation(own)
        test.append(mine[: min(round(len(mine) * test_ratio), len(mine) - 1)])
    chosen = np.sort(np.concatenate(test)).astype(np.int64)
    return np.setdiff1d(np.arange(rows), chosen), chosen


# Rows that come after the training ------------------------------------------------------------------------------------


def samples_of_rows(
    where: Path,
    encodings: Sequence[Encoding],
    table: Columns,
    shift: Sequence[float],
    scale: Sequence[float],
    places: Places,
) -> NDArray[Any]:
    """Return samples of new rows, stored as the training rows were: float32 or int64 [n, ...].

    where, places: they name the rows in errors. Raises UserError naming every column with values that do not fit.
    """
    features = columns.features_of(where, encodings, table, places)
    names = [name for encoding in encodings for name in encoding.names]
    if len(features) == 1:
        return user_arrays.samples(
            where, f"column {names[0]}", moments.Stored(tuple(shift), tuple(scale)).of(features[0])
        )
    each = [moments.Stored((less,), (by,)) for less, by in zip(shift, scale, strict=True)]
    each = each or [moments.Stored()] * len(features)
    return _side_by_side(where, names, features, each)


# The test part by time (`test-after`): rows after a date or a number, or the last rows of each client -----------------


def divide_by_time(
    request: DataRequest, table: Columns, whose: NDArray[np.generic], places: Places = FROM_ZERO
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the (training, test) rows, sorted. whose: each row's client, [n].

    places: of the rows, for errors. Raises UserError for a column that does not exist or holds neither numbers nor dates, and
    for a client that would have no row for training.
    """
    column, text = _parsed(request, table)
    kind, values = _numbers(column, table[column], dataclasses.replace(places, of_model=True))
    if not text:
        test = _last(values, whose, request.test_ratio)
    else:
        test = np.flatnonzero(values > _value(column, kind, text))
        if not len(test):
            raise DataError(key="test-after", rule=f"no row of {request.path} is after {text} in column {column}")
    train = np.setdiff1d(np.arange(len(values)), test)
    without = np.setdiff1d(whose, whose[train])
    if len(without):
        names = [word(name) for name in without] if request.client else ["the data"]
        raise DataError(
            key="test-after", rule=f"{listed(names)} would have no row for training, with {request.test_after}"
        )
    return train, test.astype(np.int64)


def _parsed(request: DataRequest, table: Columns) -> tuple[str, str]:
    """Return the key's column and its value, "" without one. Raises UserError if there is no column of the name."""
    text = request.test_after
    if text in table:
        return text, ""
    column = max((name for name in table if text.startswith(f"{name}:")), key=len, default="")
    if not column or not (value := text[len(column) + 1 :].strip()):
        name = text.partition(":")[0]
        raise DataError(
            key="test-after",
            rule=f"must be COLUMN or COLUMN:VALUE, and {request.path} has no column {name!r}; it has "
            f"{listed(list(table))}{nearest(name, table)}",
        )
    return column, value


def _value(column: str, kind: str, text: str) -> float:
    """Return the key's value as a number, or a date's days since 1970-01-01. Raises UserError for any other text."""
    found = numbers_of(np.array([text], dtype=object))
    with contextlib.suppress(ValueError):
        value = float(found[1][0]) if found and kind == DATE == found[0] else float(text) if kind != DATE else np.nan
        if np.isfinite(value):
            return float(value)
    raise DataError(key="test-after", rule=f"must be {column}:VALUE, with a {kind} as in the column", value=text)


def _numbers(column: str, values: NDArray[np.generic], places: Places) -> tuple[str, NDArray[np.float64]]:
    found = numbers_of(values)
    if found is None or found[1].ndim > 1:
        raise DataError(
            key="test-after",
            rule=f"column {column} must hold numbers or dates, got {no_number(values, column, places)}",
        )
    empty = np.flatnonzero(missing(found[1]))
    if empty.size:
        first = int(empty[0])
        told = f"row {places.number(first)} has none{places.shown(column, first)}"
        raise DataError(
            key="test-after", rule=f"column {column} must have a value in every row, {told}; {empty.size} have none"
        )
    return found[0], found[1].astype(np.float64)


def _last(values: NDArray[np.float64], whose: NDArray[np.generic], ratio: float) -> NDArray[np.int64]:
    """Return the last rows of each client by their values, sorted; each keeps a row for training."""
    groups = np.unique(whose, return_inverse=True)[1]
    chosen: list[NDArray[np.int64]] = []
    for group in range(groups.max() + 1):
        own = np.flatnonzero(groups == group)
        ordered = own[np.argsort(values[own], kind="stable")]
        count = min(round(len(own) * ratio), len(own) - 1)
        chosen.append(ordered[len(own) - count :])
    return np.sort(np.concatenate(chosen)).astype(np.int64)
