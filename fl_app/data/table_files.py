"""The columns of CSV and Parquet files, and the places of their rows. pandas is imported only to read them."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import gzip
import io
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from fl_app import extras
from fl_app.data.columns import Columns, Read, declared_in, declared_words
from fl_app.data.parsing import Places, missing, numbers_of, usable_numbers
from fl_app.data.prepared import DataRequest, listed, not_read
from fl_app.data.site_columns import AS_THE_RUN, SiteColumns
from fl_app.errors import DataError, UserError, counted, describe
from fl_app.files import no_such
from fl_app.keys import nearest
from fl_app.sources import SOURCES, suffix_of

if TYPE_CHECKING:
    import pandas

if TYPE_CHECKING:
    from datasets import Dataset


SUFFIXES = SOURCES["table"].reads
TEXT = tuple(suffix for suffix in SUFFIXES if suffix != ".parquet")
EMPTY_ONLY = ("empty",)
"""Value of `na-values` that makes only empty cells missing values."""

_WORDS = "training|train|testing|test|validation|valid|val|dev|evaluation|eval|holdout"
_PART, _NUMBER = re.compile(rf"(?<![a-z])(?:{_WORDS})(?![a-z])"), re.compile(r"\d+")

_MARK = "\ufeff"  # byte order mark
_LONGEST_CELL = 2**31 - 1  # the csv module's own limit is 128 KB

SEPARATORS = {"": ",", "tab": "\t", "\\t": "\t"}
"""Characters by the value of the key `separator`. All other values stand for themselves."""


def beside(request: DataRequest) -> list[str]:
    """Return the tables in a table's folder that may be other parts of the same data.

    Their names differ only in the word for a part, such as train and validation, or in a number. At a site a number may
    stand for another site's table.
    """

    def common(file: Path) -> str:
        stem = _PART.sub("*", name_of(file))
        return stem if request.site else _NUMBER.sub("#", stem)

    path, tables = request.path, list[Path]()
    # a confined application may read the table alone
    with contextlib.suppress(OSError):
        tables = [file for file in path.parent.iterdir() if suffix_of(file) in SUFFIXES]
    return sorted(file.name for file in tables if common(file) == common(path) and name_of(file) != name_of(path))


def name_of(path: Path) -> str:
    """Return a table's name in lower case, without its suffix."""
    return path.name[: -len(suffix_of(path))].lower()


def separator_of(request: DataRequest) -> str:
    """Return the character between the columns of a text file."""
    own = "tab" if suffix_of(request.path).startswith(".tsv") else ""
    given = request.own.separator or request.separator
    return SEPARATORS.get(given or own, given)


def opened(path: Path) -> BinaryIO:
    """Return a text file's bytes, unpacked."""
    return cast(BinaryIO, gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb"))


def refuse_text_keys(request: DataRequest) -> None:
    """Raise UserError for keys of CSV files, if the data are no CSV file.

    A site is an exception, because other sites may have a CSV file.
    """
    for key, value in (("separator", request.separator), ("na-values", ",".join(request.na_values))):
        if value and not request.site:
            raise DataError(key=key, rule=f"{request.path} is no CSV file; leave it unset", value=value)


def read_rows(
    path: Path,
    separator: str = "",
    na_values: Sequence[str] = (),
    names: Mapping[str, Collection[str]] = MappingProxyType({}),
    own: SiteColumns = AS_THE_RUN,
    long_rows: bool = False,
) -> Columns:
    """Return the columns of a CSV or Parquet file, read as a training table is read. Raises UserError.

    names: the known names in each column that holds names. own: how the table differs from the run's. long_rows: as in `read`.
    """
    if not path.is_file():
        raise DataError(no_such(path))
    extras.require("pandas", str(path))
    request = DataRequest("table", path, Path(), na_values=tuple(na_values), separator=separator, own=own)
    return read(request, [], names, long_rows)


def places_in(path: Path, separator: str = "", own: SiteColumns = AS_THE_RUN) -> Places:
    """Return the places of a trained model's rows in a CSV or Parquet file, as a spreadsheet counts them."""
    return dataclasses.replace(places(DataRequest("table", path, Path(), separator=separator, own=own)), of_model=True)


def read(
    request: DataRequest,
    notes: list[str],
    names_in: Mapping[str, Collection[str]] | None = None,
    long_rows: bool = False,
) -> Columns:
    """Return a table's columns. Raises UserError, naming a key that may help, for a file that pandas cannot read.

    notes: receives remarks about how the file was read. names_in: the known names in each column that holds names;
    None: as the request declares them. long_rows: keep rows with more values than columns; each column says there that
    they have. Else they are refused.
    """
    import pandas

    path, is_text = request.path, suffix_of(request.path) in TEXT
    options = _reading(request)
    try:
        header = None
        if is_text:
            header = pandas.read_csv(
                path, sep=options["sep"], header=None, nrows=1, dtype=str, keep_default_na=False, index_col=False
            )
            # before all rows: they may not be readable with a wrong separator
            names = request.own.names(path, [str(name) for name in header.iloc[0]])
            _refuse_wrong_separator(request, names)
            if request.own.rename:
                options |= {"names": names, "header": 0}
        # low_memory reads in parts and guesses a column's type in each: 01 may be "01" in one part and 1 in another
        try:
            frame = pandas.read_csv(path, low_memory=False, **options) if is_text else pandas.read_parquet(path)
        except pandas.errors.ParserError:
            if not long_rows or header is None:
                raise
            count = len(header.columns)
            options |= {
                "engine": "python",
                "on_bad_lines": lambda cells: [f"{len(cells)} values in {count} columns"] * count,
            }
            frame = pandas.read_csv(path, **options)
    except UserError:
        raise
    except pandas.errors.EmptyDataError as error:
        raise DataError(key="dataset", rule=f"{path} must have a header and rows, it is empty") from error
    except UnicodeDecodeError as error:
        raise DataError(
            key="dataset", rule=f"{path} must be UTF-8 text, it has another encoding; save it as UTF-8"
        ) from error
    except Exception as error:  # damaged files make pandas and pyarrow raise many kinds
        hint = "" if request.separator or not is_text else "; if commas do not separate its columns, set separator"
        raise DataError(
            key="dataset", rule=f"{path} is not a readable table ({' '.join(describe(error).split())}){hint}"
        ) from error
    names = [str(name) for name in frame.columns]
    if header is not None:
        # pandas adds a number to a repeated name: only the header itself shows the repetition
        names = request.own.names(path, [str(name) for name in header.iloc[0]])
        if not isinstance(frame.index, pandas.RangeIndex):
            first = ", ".join(map(str, [frame.index[0], *frame.iloc[0]])) if len(frame) else ""
            raise DataError(
                key="dataset",
                rule=f"{path}: its rows have more values than the {len(names)} names of its header ({listed(names)}); "
                f"pandas would read the first column as the rows' names and shift all others ({first[:80]}); "
                "remove separators at the ends of rows, or name every column",
            )
    else:
        frame = _with_index(frame, notes)
        frame.columns = names = request.own.names(path, [str(name) for name in frame.columns])
    counts = Counter(names)
    if twice := next((name for name in names if name and counts[name] > 1), ""):
        raise DataError(key="dataset", rule=f"{path} must have every column once, got {counts[twice]} named {twice!r}")
    table = {str(name): np.asarray(frame[name]) for name in frame.columns}
    if is_text:
        known = _declared(request, table) if names_in is None else names_in
        table |= _names_as_written(request, table, known, options)
    return _in_the_runs_units(request, table)


def as_the_run_has_it(request: DataRequest, table: Columns) -> Columns:
    """Return a site's columns with the run's names and units. Raises UserError for a column that the site lacks."""
    names = request.own.names(request.path, [*table])
    return _in_the_runs_units(request, dict(zip(names, table.values(), strict=True)))


def _in_the_runs_units(request: DataRequest, table: Columns) -> Columns:
    """Return a site's columns in the run's units, without the missing values that its `fill` names, nor those of its `exclude`.

    Raises UserError.
    """
    found, path, rows = dict(table), request.path, len(next(iter(table.values()), ()))
    for name in request.own.exclude:
        if found.pop(name, None) is None and not request.own.may_lack:
            raise UserError(
                key="exclude", rule=f"{path} has no column {name!r}; it has {listed([*found])}{nearest(name, found)}"
            )
    for name, factor in request.own.scale:
        if name not in found:
            if request.own.may_lack:
                continue
            raise UserError(
                key="scale", rule=f"{path} has no column {name!r}; it has {listed([*found])}{nearest(name, found)}"
            )
        read = numbers_of(found[name])
        # where no value may be refused, one that is no number counts as missing
        if read is None and not request.hides:
            raise DataError(key="scale", rule=f"{path}: column {name} must hold numbers")
        found[name] = (usable_numbers(found[name]) if read is None else read[1]).astype(np.float64) * factor
    for name, value in request.own.fill:
        kind = object if isinstance(value, str) else np.float64
        if name not in found:
            found[name] = np.full(rows, value, dtype=kind)
        elif (gone := missing(found[name])).any():
            found[name] = np.where(gone, np.array(value, dtype=kind), found[name])
    return found


def _declared(request: DataRequest, table: Columns) -> dict[str, Collection[str]]:
    """Return the declared names in each column that holds names: of clients, of categories, of classes."""
    categories = {name: declared_words(text) for name, text in declared_in(request.categorical, table).items()}
    targets = request.targets if request.of_task.has_classes else ()
    return {request.client: (), **categories, **dict.fromkeys(targets, request.classes)}


def _names_as_written(
    request: DataRequest, table: Columns, names: Mapping[str, Collection[str]], options: Mapping[str, Any]
) -> Columns:
    """Return columns of a CSV file that hold names as text, where pandas' own type does not keep it.

    For example, pandas reads 7 and 07 as one number. names: the known names in each column. options: as it was read with.
    """
    import pandas

    typed = [name for name in names if name in table and pandas.api.types.infer_dtype(table[name]) != "string"]
    if not typed:
        return {}
    texts = pandas.read_csv(request.path, usecols=typed, dtype=str, **options)
    found = {}
    for name in typed:
        values, written = table[name], np.array(texts[name], dtype=object)
        gone = missing(values)
        written[gone] = None
        known = set(written[~gone]) <= set(names[name])
        # targets with a point are refused where they are classes: they may be numbers to predict
        as_typed = (name in request.targets and values.dtype.kind == "f") or _keeps_text(values[~gone], written[~gone])
        if known or not as_typed:
            found[name] = written
    return found


def _keeps_text(values: NDArray[Any], written: NDArray[Any]) -> bool:
    """Return whether values, as text, are what is written, apart from case (TRUE) and blanks at the ends.

    Case and blanks must be the same everywhere: two spellings must not become one value.
    """
    pairs = {(str(value), str(text)) for value, text in zip(values, written, strict=True)}
    alike = all(value.casefold() == text.strip().casefold() for value, text in pairs)
    return alike and len({value for value, _ in pairs}) == len(pairs)


def _with_index(frame: pandas.DataFrame, notes: list[str]) -> pandas.DataFrame:
    """Return a Parquet file's columns. An index with a name becomes a column, because it was a column of the table."""
    import pandas

    if isinstance(frame.index, pandas.RangeIndex) and frame.index.name is None:
        return frame
    named = [str(name) for name in frame.index.names if name is not None]
    if not named:
        notes.append("the file has an index without a name, which is left out")
        return frame.reset_index(drop=True)
    notes.append(f"the file has an index named {listed(named)}: it is read as the first column{'s' * (len(named) > 1)}")
    unnamed = [name for name in frame.index.names if name is None]
    return (frame.droplevel(unnamed) if unnamed else frame).reset_index()


def _reading(request: DataRequest) -> dict[str, Any]:
    """Return the options with which pandas reads a CSV file."""
    options: dict[str, Any] = {"sep": separator_of(request)}
    if request.own.decimal:
        options["decimal"] = request.own.decimal
    if request.na_values:
        words = () if request.na_values == EMPTY_ONLY else request.na_values
        options |= {"keep_default_na": False, "na_values": ["", *words]}
    if request.hides:
        # a refusal of one row would tell of it
        options |= {"on_bad_lines": "skip", "index_col": False, "encoding_errors": "replace"}
    return options


def _refuse_wrong_separator(request: DataRequest, names: Sequence[str]) -> None:
    """Raise UserError if a header looks as if its columns had another separator."""
    missing = [name for name in (*request.targets, request.client) if name and name not in names]
    if len(names) > 1 and not missing:
        return
    text = separator_of(request).join(names)
    counts = {name: text.count(sign) for name, sign in ((";", ";"), ("tab", "\t"), ("|", "|"), (",", ","))}
    used = next(
        (name for name, sign in SEPARATORS.items() if name and sign == separator_of(request)), separator_of(request)
    )
    counts.pop(used, None)
    best = max(counts, key=lambda name: counts[name])
    if counts[best]:
        found = "one column" if len(names) == 1 else f"{len(names)} columns"
        raise DataError(
            key="separator",
            rule=f"{request.path}: pandas made {found} of its header, {text[:80]!r}; set separator = "
            f"{best!r} if that separates them",
        )


def places(request: DataRequest) -> Places:
    """Return the rows' places: as a spreadsheet counts them (row 1 is the header) in a table, from 0 in other data."""
    if suffix_of(request.path) in TEXT and not request.hides:
        rows = functools.cache(lambda: _rows_of(request))
        return Places(lambda row: rows()[row + 1].number, lambda column, row: _as_written(request, rows(), column, row))
    return Places(lambda row: row + 2) if suffix_of(request.path) in SUFFIXES else Places()


class _Row(NamedTuple):
    """A row of a CSV file: its number in a spreadsheet, and the byte at which it begins."""

    number: int
    start: int


def _rows_of(request: DataRequest) -> list[_Row]:
    """Return a CSV file's header and each row that pandas reads: all but empty lines."""
    found, lines, start = list[_Row](), list[str](), 0
    with opened(request.path) as packed, io.TextIOWrapper(packed, encoding="utf-8", newline="") as file:
        if file.read(1) == _MARK:
            start = len(_MARK.encode())
        file.seek(start)
        for number, cells in enumerate(_cells(request, _kept(file, lines)), 1):
            text = "".join(lines)
            lines.clear()
            # an empty cell in quotes makes a row
            if len(cells) > 1 or text.strip():
                found.append(_Row(number, start))
            start += len(text.encode())
    return found


def _kept(file: Iterable[str], lines: list[str]) -> Iterator[str]:
    """Yield a file's lines, and append each to `lines`."""
    for line in file:
        lines.append(line)
        yield line


def _cells(request: DataRequest, lines: Iterable[str]) -> Iterator[list[str]]:
    """Return the cells of each row in a CSV file's lines."""
    csv.field_size_limit(_LONGEST_CELL)
    return csv.reader(lines, delimiter=_reading(request)["sep"])


def _as_written(request: DataRequest, rows: Sequence[_Row], name: str, row: int) -> str:
    """Return a cell's text in a CSV file, word for word; "" for an empty cell."""

    def cells_of(row: _Row) -> list[str]:
        with opened(request.path) as file:
            file.seek(row.start)
            return next(_cells(request, io.TextIOWrapper(file, encoding="utf-8", newline="")))

    # pandas names columns without a name so
    header = [cell or f"Unnamed: {place}" for place, cell in enumerate(cells_of(rows[0]))]
    names = [dict(request.own.rename).get(cell, cell) for cell in header]
    return dict(zip(names, cells_of(rows[row + 1]), strict=False)).get(name, "")


# A data set that Hugging Face's `datasets` saved, `hf:/path`; datasets is imported only during conversion -------------


def read_saved(request: DataRequest, notes: list[str]) -> Read:
    """Return the columns of the splits train and test, and the classes' names if the target has them.

    notes: receives remarks about how images were read. Raises UserError naming a split, column or row that cannot be
    read.
    """
    from datasets import ClassLabel, DatasetDict, load_from_disk

    path = request.path
    try:
        # datasets cannot load a split that it saved without rows
        for state in sorted(path.glob("*/state.json")):
            if json.loads(state.read_text(encoding="utf-8")).get("_data_files") == []:
                _refuse_no_rows(path, state.parent.name)
        found = load_from_disk(str(path))
    except UserError:
        raise
    except Exception as error:  # damaged files make datasets raise many kinds
        raise DataError(key="dataset", rule=f"{path} is no data set that datasets saved ({describe(error)})") from error
    if isinstance(found, DatasetDict):
        if "train" not in found:
            raise DataError(key="dataset", rule=f"{path} must have a split train, it has {', '.join(found)}")
        sets = {name: found[name] for name in ("train", "test") if name in found}
        notes += not_read(
            path, [f"split {name} ({counted(len(found[name]), 'row')})" for name in found if name not in sets]
        )
    else:
        sets = {"train": found}
        # the path may be that of one split of a DatasetDict
        others = path.parent.glob("*/state.json") if (path.parent / "dataset_dict.json").is_file() else ()
        notes += not_read(path.parent, [f"split {file.parent.name}" for file in sorted(others) if file.parent != path])
    for split, part in sets.items():
        if not len(part):
            _refuse_no_rows(path, split)
    labels = sets["train"].features.get(request.own.own_name(request.targets[0]))
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

    notes: receives remarks about them. Raises UserError naming a row that cannot be read.
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
                    raise DataError(key="dataset", rule=f"{rows[-1]} has no image")
                files.append(value[name]["bytes"] or Path(value[name]["path"]))
        images, said = as_array(rows, files)
        notes += said
        ends = np.cumsum([len(part) for part in having.values()])[:-1]
        found |= {(split, name): part for split, part in zip(having, np.split(images, ends), strict=True)}
    return found


def _refuse_no_rows(path: Path, split: str) -> None:
    advice = {"train": "", "test": "; remove this split, and test-ratio divides train"}.get(
        split, "; remove this split"
    )
    raise DataError(key="dataset", rule=f"{path} has no rows in its split {split}{advice}")


def _saved_column(path: Path, split: str, part: Any, name: str) -> NDArray[Any]:
    """Return a column of a split: numbers in their own type, labels as names, lists and arrays as one array."""
    from datasets import ClassLabel, Value

    feature = part.features[name]
    if isinstance(feature, ClassLabel):
        codes = np.asarray(part.with_format("arrow")[:][name].to_pandas(), np.float64)
        known = [*feature.names, None]
        return np.array([known[-1 if np.isnan(code) or code < 0 else int(code)] for code in codes], dtype=object)
    if isinstance(feature, Value):
        return np.asarray(part.with_format("arrow")[:][name].to_pandas())
    # by default datasets converts lists of float64 to float32
    numbers = {"dtype": np.float64} if _element(feature) == "float64" else {}
    try:
        return np.asarray(part.select_columns(name).with_format("numpy", **numbers)[:][name])
    except (ValueError, TypeError, OSError) as error:
        raise DataError(
            key="dataset", rule=f"{path}: column {name} of split {split} cannot be read ({error})"
        ) from error


def _element(feature: Any) -> str:
    """Return the type of the elements of a feature that is a list or an array; "" for any other feature."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    found = getattr(feature, "dtype", "")
    return found if isinstance(found, str) else ""
