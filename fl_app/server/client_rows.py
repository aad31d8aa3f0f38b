"""Clients' rows of rounds and evaluations as columns, for runs with too many clients for metrics.jsonl.

A run of more than MOST clients has its rows in `clients.parquet`. The file has a row per round, part (`training` or
`evaluation`) and client, and a column per number. The column `seconds-train` is the entry `train` of the table
`seconds`. A column with the metadata `form = json` holds JSON texts: lists, tables, or values of several types. Null
means that a row lacks the number, NaN that it is not finite.

A Parquet file cannot be appended to. Later rounds are lines of `clients.jsonl`, one per round. They become columns when
there are many, and when the run ends. A round that is in both files counts once.
"""

from __future__ import annotations

import json
import logging
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fl_app.errors import MALFORMED, UserError, describe
from fl_app.files import opener, publish, publish_text, sync
from fl_app.metrics import Record

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger("corolla")

COLUMNS, LINES = "clients.parquet", "clients.jsonl"
MOST = 200
TRAINING, EVALUATION = "training", "evaluation"
# Columns that identify a row.
_KEYS = ("round", "part", "client")
_SECONDS = "seconds"
# Metadata of fields.
_JSON, _UNDER = {b"form": b"json"}, {b"under": _SECONDS.encode()}
# Lines become columns once they hold this many rows, and at least as many as the columns. So each row is rewritten few times.
_AT_ONCE = 20_000
# Decoded parts in the cache: readers ask for one several times.
_KEPT = 4
_ABSENT = object()

Rows = Mapping[str, Record]
Parts = Mapping[str, Rows]


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
    """The files of a run's rows, read once, on first access."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._decoded: OrderedDict[tuple[int, str], dict[str, Record]] = OrderedDict()

    @property
    def exist(self) -> bool:
        """Whether the run keeps its clients' rows in these files."""
        return (self.run / COLUMNS).is_file() or (self.run / LINES).is_file()

    def check(self) -> None:
        """Raise UserError if a file cannot be read."""
        if self.exist:
            self._index  # noqa: B018 - read now, for its errors

    def of(self, round: int, part: str) -> ClientRows:
        """Return the rows of one part of a round, empty if it has none."""
        return ClientRows(self, round, part)

    def rows(self, key: tuple[int, str]) -> dict[str, Record]:
        """Return a part's decoded rows by client id. key: round and part."""
        if key not in self._decoded:
            table, start, count = self._index.get(key, (None, 0, 0))
            self._decoded[key] = _decoded(table.slice(start, count)) if table is not None else {}
            if len(self._decoded) > _KEPT:
                self._decoded.popitem(last=False)
        return self._decoded[key]

    def count(self, key: tuple[int, str]) -> int:
        """Return the number of a part's rows."""
        return self._index.get(key, (None, 0, 0))[2]

    def column(self, key: tuple[int, str], name: str) -> NDArray[np.float64]:
        """Return a column of a part as numbers, float64 [n], NaN where there is none."""
        table, start, count = self._index.get(key, (None, 0, 0))
        if table is None or name not in table.column_names or not _is_number(table.schema.field(name).type):
            return np.full(count, np.nan)
        return _as_floats(table.column(name).slice(start, count))

    @cached_property
    def _index(self) -> dict[tuple[int, str], tuple[Any, int, int]]:
        """By round and part: the table, the first row, the number of rows.

        Raises UserError if a file cannot be read.
        """
        # lines first: rows that become columns meanwhile are then in both
        lines = list(read_lines(self.run))
        columns = read_columns(self.run)
        found = _places(columns)
        last = max((round for round, _ in found), default=0)
        return found | _places(_table(part for line in lines if line.round > last for part in line.parts()))


def _places(table: pyarrow.Table | None) -> dict[tuple[int, str], tuple[Any, int, int]]:
    """Return, by round and part, the table, the part's first row, and its number of rows."""
    if table is None or not table.num_rows:
        return {}
    rounds = table.column("round").to_numpy()
    parts = table.column("part").to_numpy(zero_copy_only=False)
    begins = np.flatnonzero((rounds[1:] != rounds[:-1]) | (parts[1:] != parts[:-1])) + 1
    edges = [0, *begins.tolist(), len(rounds)]
    return {
        (int(rounds[start]), str(parts[start])): (table, start, stop - start)
        for start, stop in zip(edges, edges[1:], strict=False)
    }


@dataclass(frozen=True)
class Line:
    """A round in `clients.jsonl`."""

    round: int
    rows: Parts

    def parts(self) -> Iterator[tuple[int, str, Rows]]:
        """Yield round, part and rows."""
        for part, rows in self.rows.items():
            yield self.round, part, rows

    @property
    def count(self) -> int:
        """Number of rows."""
        return sum(len(rows) for rows in self.rows.values())


def read_lines(run: Path) -> Iterator[Line]:
    """Yield the rounds of `clients.jsonl`. Half a line after a crash is skipped and logged."""
    try:
        with open(run / LINES, "rb") as file:
            for number, text in enumerate(file, 1):
                line = _line(text)
                if line is None:
                    log.warning("%s: line %d is not a round's rows; skipped", run / LINES, number)
                else:
                    yield line
    except FileNotFoundError:
        return


def _line(text: bytes) -> Line | None:
    try:
        told = json.loads(text)
        rows = {part: told.get(part, {}) for part in (TRAINING, EVALUATION)}
        return Line(int(told["round"]), {part: each for part, each in rows.items() if each})
    except MALFORMED:
        return None


def read_columns(run: Path) -> pyarrow.Table | None:
    """Return the table in `clients.parquet`, None if there is none. Raises UserError if it is damaged."""
    path = run / COLUMNS
    if not path.is_file():
        return None
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


def _table(parts: Iterable[tuple[int, str, Rows]]) -> pyarrow.Table:
    """Return rows as a table. parts: round, part, and rows by client id, in reading order."""
    import pyarrow

    keys: dict[str, list[Any]] = {name: [] for name in _KEYS}
    columns: dict[tuple[str, bool], list[Any]] = {}
    count = 0
    for round, part, rows in parts:
        for client_id, row in rows.items():
            for name, value in zip(_KEYS, (round, part, int(client_id)), strict=True):
                keys[name].append(value)
            for column, value in _flat(row):
                values = columns.setdefault(column, [])
                values.extend([_ABSENT] * (count - len(values)))
                values.append(value)
            count += 1
    types = (pyarrow.int64(), pyarrow.string(), pyarrow.int64())
    arrays = [pyarrow.array(keys[name], type) for name, type in zip(_KEYS, types, strict=True)]
    fields = [pyarrow.field(name, type) for name, type in zip(_KEYS, types, strict=True)]
    taken = {name for name, nested in columns if not nested}
    for (name, nested), values in columns.items():
        values.extend([_ABSENT] * (count - len(values)))
        array, form = _array(values)
        arrays.append(array)
        under = _UNDER if nested and name not in taken else {}
        fields.append(pyarrow.field(name, array.type, metadata=form | under))
    return pyarrow.table(arrays, pyarrow.schema(fields))


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
    nulls = np.array([value is _ABSENT for value in values], bool)
    known = [None if value is _ABSENT else value for value in values]
    if kinds == {bool}:
        return pyarrow.array(known, pyarrow.bool_()), {}
    if kinds == {str}:
        return pyarrow.array(known, pyarrow.string()), {}
    whole = [value for value in known if type(value) is int]
    if kinds == {int} and all(abs(value) < 2**63 for value in whole):
        return pyarrow.array(known, pyarrow.int64()), {}
    if kinds <= {int, float, type(None)} and all(abs(value) <= 2**53 for value in whole):
        floats = np.array([np.nan if value is None else value for value in known], np.float64)
        return pyarrow.array(floats, mask=nulls), {}
    texts = [None if value is _ABSENT else json.dumps(value, allow_nan=False) for value in values]
    return pyarrow.array(texts, pyarrow.string()), _JSON


def _is_number(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _as_floats(column: pyarrow.ChunkedArray) -> NDArray[np.float64]:
    from pyarrow import compute, float64

    floats: NDArray[np.float64] = compute.fill_null(column.cast(float64(), safe=False), np.nan).to_numpy()
    return floats


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


def _joined(one: pyarrow.Table | None, other: pyarrow.Table) -> pyarrow.Table:
    """Return the rows of two tables, one below the other.

    Columns of types that do not fit together become JSON texts.
    """
    import pyarrow

    if one is None:
        return other
    fields, arrays = [], []
    for name in dict.fromkeys([*one.column_names, *other.column_names]):
        field = _common_field([table.schema.field(name) for table in (one, other) if name in table.column_names])
        fields.append(field)
        chunks = [chunk for table in (one, other) for chunk in _in_form(table, field).chunks]
        arrays.append(pyarrow.chunked_array(chunks, field.type))
    return pyarrow.table(arrays, pyarrow.schema(fields))


def _common_field(fields: list[pyarrow.Field]) -> pyarrow.Field:
    """Return a field that can hold the values of all given fields. All have the same name."""
    import pyarrow

    first = fields[0]
    if all(field.equals(first, check_metadata=True) for field in fields):
        return first
    told = [field.metadata or {} for field in fields]
    under = {b"under": told[0][b"under"]} if all(b"under" in each for each in told) else {}
    numbers = {pyarrow.int64(), pyarrow.float64()}
    if not any(b"form" in each for each in told) and {field.type for field in fields} <= numbers:
        return pyarrow.field(first.name, pyarrow.float64(), metadata=under)
    return pyarrow.field(first.name, pyarrow.string(), metadata=_JSON | under)


def _in_form(table: pyarrow.Table, field: pyarrow.Field) -> pyarrow.ChunkedArray:
    """Return a table's column in the form of `field`; nulls if the table has no column of its name."""
    import pyarrow

    if field.name not in table.column_names:
        return pyarrow.chunked_array([pyarrow.nulls(table.num_rows, field.type)])
    column, own = table.column(field.name), table.schema.field(field.name)
    is_json = b"form" in (own.metadata or {})
    if b"form" not in (field.metadata or {}) or is_json:
        return column.cast(field.type)
    values = (None if value != value else value for value in column.to_pylist())
    texts = [
        json.dumps(value) if valid else None for value, valid in zip(values, column.is_valid().to_pylist(), strict=True)
    ]
    return pyarrow.chunked_array([pyarrow.array(texts, pyarrow.string())])


# The writer -----------------------------------------------------------------------------------------------------------


class RowWriter:
    """Writes a run's rows, round by round. Only the run's own process uses it."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._open = self._closed = 0

    def begin(self) -> None:
        """Create the file of lines. Its presence means that rows are not in metrics.jsonl."""
        self._write_lines([])

    def append(self, round: int, parts: Parts) -> None:
        """Append a round. Its rows are durable when this returns."""
        text = _dumped(Line(round, parts))
        with open(self.run / LINES, "a", encoding="utf-8", opener=opener) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self._open += sum(len(rows) for rows in parts.values())
        if self._open >= max(_AT_ONCE, self._closed):
            self._settle()

    def close(self) -> None:
        """Turn all lines into columns, and delete the file of lines."""
        self._settle()
        (self.run / LINES).unlink(missing_ok=True)
        sync(self.run)

    def _settle(self) -> None:
        """Turn all lines into columns. If the process is killed, rounds may be in both files; the columns count."""
        closed = read_columns(self.run)
        last = _last_round(closed)
        lines = [line for line in read_lines(self.run) if line.round > last]
        if closed is None or lines:
            closed = _joined(closed, _table(part for line in lines for part in line.parts()))
            _publish(self.run / COLUMNS, closed)
        self._write_lines([])
        self._open, self._closed = 0, closed.num_rows

    def cut(self, round: int, parts: Parts) -> None:
        """Keep the rounds before this one, and this one with the rows `parts` (unless it is round 0)."""
        closed = read_columns(self.run)
        if closed is not None and _last_round(closed) >= round:
            closed = closed.filter(np.asarray(closed.column("round").to_numpy() < round))
            _publish(self.run / COLUMNS, closed)
        last = _last_round(closed)
        lines = [line for line in read_lines(self.run) if last < line.round < round]
        if round:
            lines.append(Line(round, parts))
        self._write_lines(lines)
        self._open = sum(line.count for line in lines)
        self._closed = 0 if closed is None else closed.num_rows

    def _write_lines(self, lines: Iterable[Line]) -> None:
        publish_text(self.run / LINES, "".join(map(_dumped, lines)))


def _dumped(line: Line) -> str:
    return json.dumps({"round": line.round, **line.rows}, allow_nan=False) + "\n"


def _last_round(table: pyarrow.Table | None) -> int:
    """Return the last round in a table, 0 if it has none."""
    return 0 if table is None or not table.num_rows else int(table.column("round").to_numpy().max())


def _publish(path: Path, table: pyarrow.Table) -> None:
    from pyarrow import parquet

    publish(path, lambda temporary: parquet.write_table(table, temporary, compression="zstd", write_page_checksum=True))
