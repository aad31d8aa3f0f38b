"""The role of each column of a table: a feature and its encoding, a target, the client, or left out with the reason.

The rules (docs/tasks.md, "Columns") use only a column's name and values, so that they are the same at every site. If no
rule can read a column, it is refused; one error names all refused columns. Columns are matched by name: a test part may
have another order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.data.encoding import BOOLEAN, DATE, NUMBER, TEXT, WORDS, Encoding
from fl_app.data.moments import BEYOND
from fl_app.data.parsing import (
    FROM_ZERO,
    Places,
    first_structure,
    is_structure,
    missing,
    no_date,
    no_number,
    numbers_of,
    shape_of,
    usable_numbers,
)
from fl_app.data.prepared import DataRequest, listed
from fl_app.data.spelling import spellings
from fl_app.data.text import encoding_of, token_ids
from fl_app.data.user_arrays import word
from fl_app.errors import DataError, counted
from fl_app.keys import closest, nearest

Columns = Mapping[str, NDArray[Any]]
"""Columns' values by name."""

Read = tuple[Sequence[Columns], Sequence[str]]
"""(columns of the training part, then of the test part if there is one; the classes' names, if the data have them)."""

FEW, MANY = 10, 20
"""Consecutive whole numbers are row numbers if at least FEW rows are in order, or at least MANY rows in any order."""

MOST_WORDS = 1000
"""A categorical column may have at most this many words."""

_WITHOUT_NAME = re.compile(r"|Unnamed: \d+|__index_level_\d+__")
_SAVED_INDEX = re.compile(r"Unnamed: 0(\.\d+)*|__index_level_\d+__")


@dataclass(frozen=True)
class Use:
    """A column's role: feature, target, client or left out. how: its encoding, or why it is left out."""

    name: str
    role: str
    how: str = ""


@dataclass(frozen=True)
class Encoded:
    """The features of a table.

    uses: every column's, in the file's order. encodings: those of the columns that are features. names: of the encoded
    features, [F]. parts: for each part of the data its features as numbers, each [n] or [n, ...]. remarks: lines for
    the user about columns that were changed or left out. tokens: the number of token ids, if a column has texts; else 0.
    """

    uses: tuple[Use, ...]
    encodings: tuple[Encoding, ...]
    names: tuple[str, ...]
    parts: tuple[tuple[NDArray[Any], ...], ...]
    remarks: tuple[str, ...]
    tokens: int = 0


def by_name(request: DataRequest, parts: Sequence[Columns]) -> list[Columns]:
    """Return the parts with their columns in the first part's order. Raises UserError if the columns' names differ."""
    first = list(parts[0])
    for part in parts[1:]:
        if set(part) != set(first):
            raise DataError(
                key="dataset",
                rule=f"{request.path}: train and test must have columns of the same names; train has "
                f"{listed(first)}; test has {listed(list(part))}",
            )
    return [{name: part[name] for name in first} for part in parts]


def unknown(request: DataRequest, train: Columns) -> list[str]:
    """Return a line for every key that names a column that does not exist, or one that is no feature."""
    problems = []
    has = listed([name if name == name.strip() else repr(name) for name in train])
    targets = frozenset(request.targets)
    if len(targets) < len(request.targets):
        problems.append(f"target: must name every column once, got {request.target!r}")
    for key, name in _named(request, train):
        if name not in train:
            # only other sites may have it
            if key == "exclude" and (request.site or request.own.text) and not closest(name, train):
                continue
            blank = next((repr(own) for own in train if own.strip() == name), "")
            hint = f"; the name {blank} has a blank at its end: rename the column" if blank else nearest(name, train)
            problems.append(f"{key}: {request.path} has no column {name!r}; it has {has}{hint}")
        elif key in ("categorical", "impute") and name in request.exclude:
            problems.append(f"{key}: {name!r} is left out by exclude")
        elif key not in ("target", "client") and (name in targets or name == request.client):
            role = "target" if name in targets else "client"
            problems.append(f"{key}: {name!r} is the column of {role}")
    return problems


def _named(request: DataRequest, train: Columns) -> list[tuple[str, str]]:
    """Return (key, column) for every column that a key names."""
    named: list[tuple[str, Iterable[str]]] = [
        ("target", request.targets),
        ("client", [request.client] if request.client else []),
        ("exclude", request.exclude),
        ("categorical", declared_in(request.categorical, train)),
        ("impute", declared_in(request.impute, train)),
    ]
    return [(key, name) for key, names in named for name in names]


def _meant(request: DataRequest, train: Columns) -> set[str]:
    """Return the columns that mistyped names likely mean. Errors about these would only repeat the typing error."""
    wrong = (name for _, name in _named(request, train) if name not in train)
    return {close for name in wrong if (close := closest(name, train))}


def _has_lost_role(request: DataRequest, train: Columns) -> bool:
    """Return whether the target or client is a name that is close to no column: it may mean any column."""
    return any(name and name not in train and not closest(name, train) for name in (*request.targets, request.client))


def declared_in(items: Sequence[str], train: Columns) -> dict[str, str]:
    """Return the text after `=` by column, for items `column` or `column=more`. A column's name may contain `=`."""
    found = {}
    for item in items:
        name, _, more = (item, "", "") if item in train else item.partition("=")
        found[name.strip()] = more.strip()
    return found


def declared_words(text: str) -> list[str]:
    """Return the words that an item of `categorical` sets, from its text `icu|medicine|surgery`; none for ""."""
    return [word.strip() for word in text.split("|")] if text else []


def encode(
    request: DataRequest, parts: Sequence[Columns], training: NDArray[np.int64], places: Places
) -> tuple[Encoded, list[str]]:
    """Return the features of a table's parts, and a line for each problem with a column.

    parts: their columns must be in one order. training: the rows of the first part that are for training.
    """
    train = parts[0]
    categorical, fills = declared_in(request.categorical, train), _fills(request, train)
    declared = {**categorical, **declared_in(request.impute, train)}
    targets, excluded = frozenset(request.targets), frozenset(request.exclude)
    uses: list[Use] = []
    encodings: list[Encoding] = []
    features: list[list[NDArray[Any]]] = [[] for _ in parts]
    problems: list[str] = []
    remarks: list[str] = []
    unfit: list[str] = []
    meant = _meant(request, train)
    tokens = 0
    for place, (name, values) in enumerate(train.items()):
        if name in meant:
            continue
        if name in targets or name == request.client:
            uses.append(Use(name, "target" if name in targets else "client"))
            continue
        if why := _left_out(excluded, declared, name, None if request.public else values, place):
            uses.append(Use(name, "left out", why))
            # the user asked for this in `exclude`: no remark
            remarks += [f"column {name!r} is left out: {why}"] if name not in excluded else []
            continue
        if _WITHOUT_NAME.fullmatch(name):
            problems.append(
                f"column {place + 1} must have a name ({name!r} means it has none); name it in the header, or exclude it"
            )
            continue
        sides = [part[name] for part in parts]
        if name in categorical:
            words = declared_words(categorical[name])
            if request.public and not words:
                problems.append(
                    f"categorical: {name!r} must declare its words ({name}=a|b) with private or dp-epsilon: no feature may "
                    "follow from records"
                )
                continue
            found = _words(name, sides, words, places, others=request.public)
        elif request.tokenizer.name and _has_texts(train[name]):
            encoding, tokens = encoding_of(name, request.tokenizer)
            found = _tokens(encoding, sides)
        else:
            found = _numbers(name, sides, training, fills.get(name, NEVER), places)
        if isinstance(found, str):
            problems.append(found)
            unfit.append(found)
            continue
        how, encoding, numbers = found
        uses.append(Use(name, "feature", how))
        remarks += _remarks(name, how, encoding, values)
        encodings.append(encoding)
        for part, more in zip(features, numbers, strict=True):
            part += more
    if len(unfit) == 1 and _has_lost_role(request, train):
        # the only column that is no feature is likely the one that the user did not name
        problems.remove(unfit[0])
    names = tuple(feature for encoding in encodings for feature in encoding.names)
    counts = Counter(names)
    if twice := next((name for name in names if counts[name] > 1), ""):
        problems.append(f"two features would have the name {twice!r}; rename one of their columns")
    if not names and not problems and not meant and not unfit:
        left = [f"{use.name} ({use.how})" for use in uses if use.role == "left out"]
        others = ", ".join(use.name for use in uses if use.role != "left out")
        also = f"; left out: {listed(left)}" if left else ""
        problems.append(f"no columns but {others}: nothing to learn from{also}")
    parts_of_it = tuple(tuple(side) for side in features)
    return Encoded(tuple(uses), tuple(encodings), names, parts_of_it, tuple(remarks), tokens), problems


def usable(
    request: DataRequest, parts: Sequence[Columns], training: NDArray[np.int64], places: Places
) -> tuple[list[Columns], list[str]]:
    """Return parts in which each feature can be read, whatever its cells hold, and a line for each column that was changed.

    For data that hide their values. A number that cannot be read is missing. A missing one is the median of the training
    rows, 0 if they have none; where `impute` names the column, its own rules decide.
    """
    train, filled = parts[0], [dict(part) for part in parts]
    words = declared_in(request.categorical, train)
    imputed = declared_in(request.impute, train)
    lines = []
    for name in train.keys() - {*request.targets, request.client, *request.exclude}:
        sides = [part[name] for part in parts]
        if request.tokenizer.name and name not in words and _has_texts(train[name]):
            continue
        if name in words:
            for part, values in zip(filled, sides, strict=True):
                part[name] = _without_structures(values)
            continue
        found = [usable_numbers(values) for values in sides]
        kinds = {read[0] if (read := numbers_of(values)) else "" for values in sides}
        if len(kinds) == 1 and "" not in kinds and not any(np.isnan(values).any() for values in found):
            continue
        there = found[0][training]
        middle = float(np.nanmedian(there)) if not np.isnan(there).all() else 0.0
        gone = sum(int(np.isnan(values).any(axis=tuple(range(1, values.ndim))).sum()) for values in found)
        for part, values in zip(filled, found, strict=True):
            stays = name in imputed and not np.isnan(there).all()
            part[name] = values if stays else np.where(np.isnan(values), middle, values)
        bad = next((values for values in sides if numbers_of(values) is None), None)
        first = "" if bad is None else f", such as {no_number(bad, name, places)}"
        lines.append(f"column {name!r}: in {counted(gone, 'row')} without a number that can be read{first}")
    return list(filled), sorted(lines)


def _without_structures(values: NDArray[Any]) -> NDArray[Any]:
    """Return values [n] with None in place of lists and maps, and for all values of an array of more dimensions."""
    if values.ndim > 1:
        return np.full(len(values), None, dtype=object)
    if first_structure(values) < 0:
        return values
    return np.array([None if is_structure(value) else value for value in values], dtype=object)


# Columns that are no features -----------------------------------------------------------------------------------------


def _left_out(
    excluded: Collection[str], declared: Collection[str], name: str, values: NDArray[Any] | None, place: int
) -> str:
    """Return why a column is left out; "" if it is a feature.

    excluded, declared: the columns that the user excludes, and that a key declares as features. values: None if they
    must not decide.
    """
    if name in excluded:
        return "exclude"
    if name in declared:
        return ""
    if _SAVED_INDEX.fullmatch(name) or (place == 0 and _WITHOUT_NAME.fullmatch(name)):
        return "an index that a program saved with the table"
    if values is None:
        return ""
    if _WITHOUT_NAME.fullmatch(name) and missing(values).all():
        return "empty and without a name: every line ends with a comma"
    if numbers_the_rows(values):
        return "it numbers the rows"
    return ""


def numbers_the_rows(values: NDArray[Any]) -> bool:
    """Return whether a column has consecutive whole numbers, each once.

    Fewer than MANY rows must be in ascending or descending order, and at least FEW.
    """
    if values.ndim != 1 or values.dtype.kind not in "iuf" or not len(values) or not np.isfinite(values).all():
        return False
    if float(values.max()) - float(values.min()) != len(values) - 1:
        return False
    if len(values) < MANY:
        return len(values) >= FEW and bool(
            (values[1:] == values[:-1] + 1).all() or (values[:-1] == values[1:] + 1).all()
        )
    ordered = np.sort(values)
    return bool((ordered[1:] == ordered[:-1] + 1).all())


def _remarks(name: str, how: str, encoding: Encoding, values: NDArray[Any]) -> list[str]:
    """Return lines for the user about a column that became features."""
    lines = [] if how == NUMBER else [f"column {name!r}: {how}"]
    if encoding.kind == WORDS:
        lines += spellings(f"column {name!r}", encoding.words, "word")
    there = values[~missing(values)]
    if len(there) < MANY or _count(there) < len(there):
        return lines
    if encoding.kind == WORDS:
        lines.append(f"column {name!r} has a different word in every row: if these name the rows, set exclude")
    numbers = numbers_of(there)
    if (
        encoding.kind == NUMBER
        and numbers
        and numbers[1].ndim == 1
        and bool((numbers[1] == np.floor(numbers[1])).all())
    ):
        lines.append(f"column {name!r} has a different whole number in every row: if these name the rows, set exclude")
    return lines


def _count(values: NDArray[Any]) -> int:
    """Return the number of distinct values in [n]; 0 for an array of more dimensions."""
    if values.ndim > 1:
        return 0
    return len(np.unique(values) if values.dtype.kind in "biuf" else {word(value) for value in values})


# Features -------------------------------------------------------------------------------------------------------------

Features = tuple[str, Encoding, list[list[NDArray[Any]]]]
"""(encoding in words, encoding, for each part the features)."""


@dataclass(frozen=True)
class Fill:
    """The treatment of missing numbers in a column. allowed: they may be filled in.

    always: the column gets an indicator feature even if no number is missing. value: the number to fill in; None: the
    median of the training rows. own: whether the median is that of a site's own rows.
    """

    allowed: bool
    always: bool = False
    value: float | None = None
    own: bool = False


NEVER = Fill(allowed=False)


def _fills(request: DataRequest, train: Columns) -> dict[str, Fill]:
    """Return the treatment of missing numbers by column. Raises UserError for a fill value that is no number.

    If the key `impute` is unset, every column of a table may be filled in. At a site none may, because all sites must
    have the same features. With a public schema none may, because a missing number would make a feature.
    """
    if not request.impute:
        return {} if request.site or request.public else dict.fromkeys(train, Fill(allowed=True))
    found = {}
    for name, text in declared_in(request.impute, train).items():
        value = None
        if text:
            number = numbers_of(np.array([text], dtype=object))
            try:
                value = float(number[1][0]) if number else float(text)
            except ValueError:
                value = np.nan
            if not np.isfinite(value):
                raise DataError(key="impute", rule=f"must be a column, or column=number, got {name}={text}")
        found[name] = Fill(allowed=True, always=True, value=value, own=request.site and value is None)
    return found


def _numbers(
    name: str, sides: Sequence[NDArray[Any]], training: NDArray[np.int64], fill: Fill, places: Places
) -> Features | str:
    """Return a column as one feature, or as two if missing numbers are filled in; a text if the column is refused.

    The second feature is 1 where a number is missing. The text is the error.
    """
    kind = NUMBER
    columns: list[NDArray[Any]] = []
    for part, values in zip(("", "test part: "), sides, strict=False):
        found = numbers_of(values)
        if found is None:
            return f"{part}column {name} must hold numbers, got {no_number(values, name, places)}"
        if columns and found[0] != kind and not missing(values).all() and DATE in (kind, found[0]):
            return f"{part}column {name} must hold {kind}s as the training part, got {found[0]}s"
        kind = kind if columns else found[0]
        columns.append(found[1])
        if (
            values.dtype.kind == "f"
            and (wrong := np.flatnonzero(np.isinf(values.reshape(len(values), -1)).any(1))).size
        ):
            return f"{part}column {name} must have finite numbers, got {_rows(name, wrong, values, places)}"
    gone = [missing(values) for values in columns]
    value, filled = None, fill.always or any(side.any() for side in gone)
    if filled:
        if not fill.allowed or columns[0].ndim > 1:
            return _refused(name, gone, places)
        of_training = columns[0][training]
        there = of_training[~gone[0][training]]
        if fill.value is None and not len(there):
            return f"column {name} has no value in any row for training; leave it out (add {name!r} to exclude)"
        value = float(np.median(there)) if fill.value is None else fill.value
    encoding = Encoding(name, kind, fill=value, own_fill=fill.own)
    how = {NUMBER: NUMBER, BOOLEAN: "boolean, as 0 and 1", DATE: "date, as days since 1970-01-01"}[kind]
    if value is not None:
        whose = "the median of the training rows" if fill.value is None else "as impute says"
        count, rows = sum(int(side.sum()) for side in gone), sum(map(len, gone))
        how += f"; missing in {count} of {counted(rows, 'row')}: there {value:.6g}, {whose}, and {encoding.names[1]!r} is 1"
    return how, encoding, [_filled(encoding, side) for side in columns]


def _filled(encoding: Encoding, values: NDArray[Any]) -> list[NDArray[Any]]:
    """Return the features of a column of numbers. values: NaN where a number is missing."""
    if encoding.fill is None:
        return [values]
    gone = missing(values)
    return [np.where(gone, encoding.fill, values.astype(np.float64)), gone.astype(np.float32)]


def _refused(name: str, gone: Sequence[NDArray[np.bool_]], places: Places) -> str:
    """Return an error naming the first row that has no number where every row must have one."""
    part, side = next((part, side) for part, side in zip(("", "test part: "), gone, strict=False) if side.any())
    empty = np.flatnonzero(side)
    row = f"row {places.number(int(empty[0]))} has none{places.shown(name, int(empty[0]))}"
    return (
        f"{part}column {name} must have a number in every row, {row}; {len(empty)} of {len(side)} rows; fill them in, name the "
        f"column in impute (at every site), or leave it out (add {name!r} to exclude)"
    )


def _rows(name: str, wrong: NDArray[np.int64], values: NDArray[Any], places: Places) -> str:
    more = f" and in {counted(len(wrong) - 1, 'more row')}" if len(wrong) > 1 else ""
    return f"{values[wrong[0]]} in row {places.number(int(wrong[0]))}{more}"


def _words(
    name: str, sides: Sequence[NDArray[Any]], declared: Sequence[str], places: Places, others: bool = False
) -> Features | str:
    """Return a column of words as one feature of zeros and ones for each word, or the error that refuses it.

    declared: the words in order; empty: those of the data, sorted. Where a word is missing, all features are 0. others:
    whether other words count as missing, too; otherwise they are refused.
    """
    for values in sides:
        if values.ndim > 1 or first_structure(values) >= 0:
            return (
                f"column {name} must hold a word or a number per row to be categorical, got {shape_of(values, places)}"
            )
    gone = [missing(values) for values in sides]
    texts = [_texts(values, none, declared) for values, none in zip(sides, gone, strict=True)]
    there = set().union(*(side[~none] for side, none in zip(texts, gone, strict=True)))
    known = list(declared) or sorted(there)
    if not known:
        return f"column {name} has no word in any row; leave it out (add {name!r} to exclude)"
    if len(known) > MOST_WORDS:
        return f"column {name} must have at most {MOST_WORDS} words to be categorical, got {len(known)}"
    for side, none in zip(() if others else texts, () if others else gone, strict=True):
        other = np.flatnonzero(~none & ~np.isin(side, np.array(known, dtype=object)))
        if other.size:
            row = places.number(int(other[0]))
            return f"column {name} must hold one of {listed(known)}, got {side[other[0]]!r} in row {row}"
    encoding = Encoding(name, WORDS, tuple(known))
    how = f"one of {len(known)} words, each a feature of 0 and 1: {listed(known)}"
    if empty := sum(int(none.sum()) for none in gone):
        how += f"; missing in {empty} of {counted(sum(map(len, gone)), 'row')}: all are 0 there"
    return how, encoding, [_each_word(encoding, side) for side in texts]


def _texts(values: NDArray[Any], gone: NDArray[np.bool_], declared: Sequence[str]) -> NDArray[Any]:
    """Return values as words, objects [n], None where a value is missing.

    Floating-point columns of whole numbers are written as integers: a missing value makes a column of integers floating
    point. If all are among the declared words as they are (1.0 of 0.5 and 1.0), they stay.
    """
    there = values[~gone]
    whole = values.dtype.kind == "f" and bool((there == np.floor(there)).all() and (np.abs(there) < BEYOND).all())
    if whole and not {word(value) for value in there} <= set(declared):
        values = np.where(gone, 0, values).astype(np.int64)
    return np.array([None if none else word(value) for value, none in zip(values, gone, strict=True)], dtype=object)


def _each_word(encoding: Encoding, texts: NDArray[Any]) -> list[NDArray[Any]]:
    """Return a feature of 0 and 1 for each word, float32 [n]. texts: objects [n]."""
    return [np.asarray(texts == text, np.float32) for text in encoding.words]


def _has_texts(values: NDArray[Any]) -> bool:
    """Return whether the first value that there is in a column is a text."""
    if values.dtype.kind not in "OU" or values.ndim > 1:
        return False
    return isinstance(next((value for value in values if value is not None and value == value), None), str)


def _tokens(encoding: Encoding, sides: Sequence[NDArray[Any]]) -> Features:
    """Return a column of texts as one feature, int64 [n, encoding.length]. A row without a value has an empty text."""
    gone = [missing(values) for values in sides]
    texts = [
        ["" if none else word(value) for value, none in zip(values, side, strict=True)]
        for values, side in zip(sides, gone, strict=True)
    ]
    how = f"text, as its first {encoding.length} tokens, with {encoding.padding} after its end"
    if empty := sum(int(none.sum()) for none in gone):
        how += f"; missing in {empty} of {counted(sum(map(len, gone)), 'row')}: an empty text there"
    return how, encoding, [[token_ids(encoding, side)] for side in texts]


def features_of(
    path: Path, encodings: Sequence[Encoding], table: Columns, places: Places = FROM_ZERO
) -> list[NDArray[Any]]:
    """Return the features of new rows, encoded as the training rows were, in the encodings' order.

    table: must hold a column for each encoding. path, places: they name the rows in errors. Raises UserError naming all
    columns that do not fit.
    """
    features: list[NDArray[Any]] = []
    problems: list[str] = []
    for encoding in encodings:
        found = _encoded(encoding, table[encoding.column], places)
        if isinstance(found, str):
            problems.append(found)
        else:
            features += found
    if problems:
        raise DataError(key=path, rule="; ".join(problems))
    return features


def _encoded(encoding: Encoding, values: NDArray[Any], places: Places) -> list[NDArray[Any]] | str:
    """Return the features of a column's values, or the error that refuses them."""
    name = encoding.column
    if encoding.kind == TEXT:
        return _tokens(encoding, [values])[2][0]
    if encoding.kind == WORDS:
        found = _words(name, [values], encoding.words, places)
        return found if isinstance(found, str) else found[2][0]
    numbers = numbers_of(values)
    if numbers is None and encoding.kind == DATE and (found := no_date(values, places)):
        return f"column {name} must hold dates as year-month-day, got {found}"
    if numbers and DATE in (encoding.kind, numbers[0]) and encoding.kind != numbers[0] and not missing(values).all():
        return f"column {name} must hold {encoding.kind}s, got {numbers[0]}s"
    empty = np.flatnonzero(missing(values))
    if encoding.fill is None and empty.size and (numbers or encoding.own_fill):
        must = f"column {name} must have a number in every row, row {places.number(int(empty[0]))} has none"
        if encoding.own_fill:
            return (
                f"{must}: each site fills in its own median, which never leaves it; export at a site with --data-path, or fill in "
                "the numbers"
            )
        return (
            f"{must}{places.shown(name, int(empty[0]))}; {len(empty)} of {len(values)} rows; fill them in, or train with the "
            "column in impute: this model has no value for missing numbers"
        )
    fill = NEVER
    if encoding.fill is not None or encoding.own_fill:
        # 0 is never used: with a site's own, unknown median, a missing number was refused above
        fill = Fill(allowed=True, always=True, value=encoding.fill or 0.0)
    found = _numbers(name, [values], np.arange(len(values)), fill, places)
    return found if isinstance(found, str) else found[2][0]


def no_single_values(name: str, values: NDArray[Any], places: Places, *, several: bool) -> str:
    """Return an error unless every row has one value in the column of the target or the client; "" if all have.

    several: whether a row may have an array of numbers, as those of targets may.
    """
    if first_structure(values) >= 0 or (values.ndim > 1 and not several):
        return f"column {name} must hold one value per row, got {shape_of(values, places)}"
    return without_value(name, values, places)


def without_value(name: str, values: NDArray[Any], places: Places) -> str:
    """Return an error if a row has no value in the column; "" if all rows have one."""
    empty = np.flatnonzero(missing(values))
    if not empty.size:
        return ""
    row = int(empty[0])
    written = places.shown(name, row)
    advice = "; if that is a name, set na-values = empty: then only empty cells are missing" if written else ""
    more = f" ({len(empty)} of {len(values)} rows)" if len(empty) > 1 else ""
    return f"column {name} must have a value in every row, row {places.number(row)} has none{written}{more}{advice}"
