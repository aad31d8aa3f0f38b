"""Clients' rows of rounds and evaluations as columns, for runs with too many clients for metrics.jsonl.

A run of more than MOST clients has its rows in the folder `clients.parquet`, which `pandas.read_parquet` reads as one
table: a row per round, part (`training` or `evaluation`) and client, and a column per number. The column `seconds-train`
is the entry `train` of the table `seconds`. A column with the metadata `form = json` holds JSON texts: lists, tables, or
values of several types. Null means that a row lacks the number, NaN that it is not finite.

A Parquet file cannot be appended to, so each round is a file of its own. Readers such as pandas take the columns of all
files from the first one. So this is a file without rows that has every column so far.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fl_app.errors import UserError, describe
from fl_app.files import make_directory, publish
from fl_app.metrics import Record

if TYPE_CHECKING:
    import pyarrow

DIRECTORY = "clients.parquet"
# the first by name
_COLUMNS, _ROUND = "columns.parquet", "round-*.parquet"
MOST = 200
TRAINING, EVALUATION = "training", "evaluation"
# Columns that identify a row.
_KEYS = ("round", "part", "client")
_SECONDS = "seconds"
# Metadata of fields.
_JSON, _UNDER = {b"form": b"json"}, {b"under": _SECONDS.encode()}
# Decoded parts in the cache: readers ask for one several times.
_KEPT = 4
_ABSENT = object()

Rows = Mapping[str, Record]
Parts = Mapping[str, Rows]


def _path(run: Path, round: int) -> Path:
    return run / DIRECTORY / f"round-{round:06d}.parquet"


# Readers --------------------------------------------------------------------------------------------------------------


class ClientRows(Mapping[str, Record]):
    """One part of a round: rows by client id, read on first access."""

    def __init__(self, files: RowFiles, round: int, part: str) -> None:
        self._files, self._key = files, (round, part)

    def __getitem__(self, client_id: str) -> Record:
        """Return a client's row."""
        return self._files.rows(self._key)[client_id]

    def __iter__(self) -> Iterator[str]:
        """Yield the clients' ids in the order of the round."""
        return iter(self._files.rows(self._key))

    def __len__(self) -> int:
        """Return the number of clients, without reading their rows."""
        return self._files.count(self._key)

    def __repr__(self) -> str:
        """Return the number of clients as text."""
        return f"<rows of {len(self)} clients>"

    def ids(self) -> NDArray[np.int64]:
        """Return the clients' ids, int64 [n]."""
        return self._files.column(self._key, "client").astype(np.int64)

    def numbers(self, name: str) -> NDArray[np.float64]:
        """Return one number of all rows, float64 [n], NaN where a row has none."""
        return self._files.column(self._key, name)


def ids(rows: Rows) -> NDArray[np.int64]:
    """Return the ids of a part's clients, int64 [n], from either kind of rows."""
    return rows.ids() if isinstance(rows, ClientRows) else np.array([int(i) for i in rows], np.int64)


def numbers(rows: Rows, name: str) -> NDArray[np.float64]:
    """Return a number of a part's clients, float64 [n] in the order of `ids`, NaN where a client has none.

    name: as in a row; `seconds-train` is the entry `train` of the table `seconds`. Rows kept as columns are not
    decoded.
    """
    if isinstance(rows, ClientRows):
        return rows.numbers(name)
    found = np.full(len(rows), np.nan)
    table, dash, phase = name.partition("-")
    for k, row in enumerate(rows.values()):
        value = row.get(name)
        if value is None and dash and table == _SECONDS:
            value = row.get(_SECONDS, {}).get(phase)
        if isinstance(value, (int, float)):
            found[k] = value
    return found


class RowFiles:
    """The files of a run's rows, each read once, on first access."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._tables: dict[int, pyarrow.Table | None] = {}
        self._decoded: OrderedDict[tuple[int, str], dict[str, Record]] = OrderedDict()

    @property
    def exist(self) -> bool:
        """Whether the run keeps its clients' rows in these files."""
        return (self.run / DIRECTORY).is_dir()

    def check(self) -> None:
        """Raise UserError if a file cannot be read."""
        for path in sorted((self.run / DIRECTORY).glob(_ROUND)):
            _read(path)

    def of(self, round: int, part: str) -> ClientRows:
        """Return the rows of one part of a round, empty if it has none."""
        return ClientRows(self, round, part)

    def rows(self, key: tuple[int, str]) -> dict[str, Record]:
        """Return a part's decoded rows by client id. key: round and part."""
        if key not in self._decoded:
            table = self._part(key)
            self._decoded[key] = _decoded(table) if table is not None else {}
            if len(self._decoded) > _KEPT:
                self._decoded.popitem(last=False)
        return self._decoded[key]

    def count(self, key: tuple[int, str]) -> int:
        """Return the number of a part's rows."""
        table = self._part(key)
        return 0 if table is None else int(table.num_rows)

    def column(self, key: tuple[int, str], name: str) -> NDArray[np.float64]:
        """Return a column of a part as numbers, float64 [n], NaN where there is none."""
        table = self._part(key)
        if table is not None and name in table.column_names:
            from pyarrow import compute, float64, types

            column = table.column(name)
            if types.is_integer(column.type) or types.is_floating(column.type) or types.is_boolean(column.type):
                floats: NDArray[np.float64] = compute.fill_null(column.cast(float64(), safe=False), np.nan).to_numpy()
                return floats
        return np.full(self.count(key), np.nan)

    def _part(self, key: tuple[int, str]) -> pyarrow.Table | None:
        """Return the rows of a part as a table, None if the round has no file. Raises UserError for a damaged file."""
        round, part = key
        if round not in self._tables:
            path = _path(self.run, round)
            self._tables[round] = _read(path) if path.is_file() else None
        table = self._tables[round]
        return None if table is None else table.filter(np.asarray(table.column("part")) == part)


def _read(path: Path) -> pyarrow.Table:
    """Return a file's table. Raises UserError if it is damaged."""
    # imported here: it takes seconds, and most commands do not need it
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(path, page_checksum_verification=True).read()
        missing = [name for name in _KEYS if name not in table.column_names]
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read: {describe(error).splitlines()[0]}") from None
    if missing:
        raise UserError(f"{path} cannot be read: it has no column {missing[0]}")
    return table


# Columns --------------------------------------------------------------------------------------------------------------


def _table(round: int, parts: Parts) -> pyarrow.Table:
    """Return a round's rows as a table."""
    import pyarrow

    every = [(round, part, int(i), dict(_flat(row))) for part, rows in parts.items() for i, row in rows.items()]
    types = (pyarrow.int64(), pyarrow.string(), pyarrow.int64())
    arrays = [pyarrow.array([row[k] for row in every], kind) for k, kind in enumerate(types)]
    schema = list(map(pyarrow.field, _KEYS, types))
    columns = list(dict.fromkeys(column for *_, row in every for column in row))
    taken = {name for name, nested in columns if not nested}
    for column in columns:
        array, form = _array([row.get(column, _ABSENT) for *_, row in every])
        name, nested = column
        arrays.append(array)
        under = _UNDER if nested and name not in taken else {}
        schema.append(pyarrow.field(name, array.type, metadata=form | under))
    return pyarrow.table(arrays, pyarrow.schema(schema))


def _flat(row: Record) -> Iterator[tuple[tuple[str, bool], Any]]:
    """Yield each column of a row with its value.

    A column is its name, and whether it belongs to the table `seconds`.
    """
    for name, value in row.items():
        nested = name == _SECONDS and isinstance(value, dict) and value
        if nested and not any(f"{_SECONDS}-{phase}" in row for phase in value):
            for phase, seconds in value.items():
                yield (f"{_SECONDS}-{phase}", True), seconds
        else:
            yield (name, False), value


def _array(values: list[Any]) -> tuple[pyarrow.Array, dict[bytes, bytes]]:
    """Return a column, and the metadata of its form."""
    import pyarrow

    kinds = {type(value) for value in values if value is not _ABSENT}
    try:
        if kinds & {list, dict} or (bool in kinds and len(kinds) > 1):
            raise TypeError
        known = [None if value is _ABSENT else np.nan if value is None else value for value in values]
        return pyarrow.array(known), {}
    # values of several types, and numbers that a column would round
    except (TypeError, ValueError, OverflowError):
        texts = [None if value is _ABSENT else json.dumps(value, allow_nan=False) for value in values]
        return pyarrow.array(texts, pyarrow.string()), _JSON


def _decoded(table: pyarrow.Table) -> dict[str, Record]:
    """Return the rows of a table by client id."""
    rows: list[Record] = [{} for _ in range(table.num_rows)]
    for field, column in zip(table.schema, table.columns, strict=True):
        if field.name in _KEYS or column.null_count == len(rows):
            continue
        told = field.metadata or {}
        form, under = told.get(b"form"), told.get(b"under")
        phase = field.name.removeprefix(f"{_SECONDS}-")
        for row, value in zip(rows, column.to_pylist(), strict=True):
            if value is None:
                continue
            if form:
                value = json.loads(value)
            elif value != value:
                value = None
            if under:
                row.setdefault(_SECONDS, {})[phase] = value
            else:
                row[field.name] = value
    return {str(i): row for i, row in zip(table.column("client").to_pylist(), rows, strict=True)}


def _common_field(one: pyarrow.Field, other: pyarrow.Field) -> pyarrow.Field:
    """Return a field that the values of both can be read as. Both have the same name."""
    import pyarrow

    kinds = {one.type, other.type}
    if len(kinds) == 1:
        return one
    is_number = kinds == {pyarrow.int64(), pyarrow.float64()}
    return pyarrow.field(one.name, pyarrow.float64() if is_number else pyarrow.string())


# The writer -----------------------------------------------------------------------------------------------------------


class RowWriter:
    """Writes a run's rows, round by round. Only the run's own process uses it."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._columns: dict[str, pyarrow.Field] | None = None

    def begin(self) -> None:
        """Create the folder. Its presence means that rows are not in metrics.jsonl."""
        make_directory(self.run / DIRECTORY)

    def append(self, round: int, parts: Parts) -> None:
        """Write a round. Its rows are durable when this returns."""
        table = _table(round, parts)
        self._widen(table.schema)
        _publish(_path(self.run, round), table)

    def cut(self, round: int, parts: Parts) -> None:
        """Keep the rounds before this one, and this one with the rows `parts` (unless it is round 0)."""
        if round:
            self.append(round, parts)
        kept = _path(self.run, round).name
        for path in (self.run / DIRECTORY).iterdir():
            if path.name.startswith(".") or kept < path.name:
                path.unlink()

    def _widen(self, schema: pyarrow.Schema) -> None:
        """Add the columns of a round to the file that has every column, before the round is written."""
        path = self.run / DIRECTORY / _COLUMNS
        if self._columns is None:
            self._columns = {field.name: field for field in _read(path).schema} if path.is_file() else {}
        wider = {field.name: _common_field(self._columns.get(field.name, field), field) for field in schema}
        if (every := self._columns | wider) != self._columns:
            import pyarrow

            _publish(path, pyarrow.schema(list(every.values())).empty_table())
            self._columns = every


def _publish(path: Path, table: pyarrow.Table) -> None:
    from pyarrow import parquet

    publish(path, lambda temporary: parquet.write_table(table, temporary, compression="zstd", write_page_checksum=True))
