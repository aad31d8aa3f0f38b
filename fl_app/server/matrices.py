"""Matrices between clients that methods note: a file per round, `matrices/round-<t>.npz`, beside metrics.jsonl.

Notes that a method declares as a `Matrix` or as `Links` (fl_app/figures.py) are taken out of its other notes. The file
has, by the name of the record, float16 [rows, columns] (float32 for large values). Links are packed bits, `<name>.bits`
(numpy.packbits along rows). `clients` are the ids of the round's clients in its order. Rows and columns are theirs,
unless `<name>.rows` and `<name>.columns` list other ids. A client's row in the round's record keeps its number of
links.
"""

from __future__ import annotations

import logging
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.figures import Figure, Links, Matrix
from fl_app.files import make_directory, numbered, publish
from fl_app.metrics import Record

log = logging.getLogger("corolla")

DIRECTORY = "matrices"
LARGEST = 4_000_000
"""Numbers of the largest matrix that is kept: 2,000 clients, 8 MB."""
_CLIENTS, _ROWS, _COLUMNS, _BITS = "clients", ".rows", ".columns", ".bits"


@dataclass(frozen=True)
class Between:
    """Numbers between clients.

    rows, columns: client ids, int64. values: float64 or bool [rows, columns], NaN where missing.
    """

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    values: NDArray[Any]


@dataclass
class RoundNotes:
    """A method's notes of a round: of the round, of clients by id, and between clients by record."""

    round: dict[str, Any] = field(default_factory=dict)
    clients: dict[int, dict[str, Any]] = field(default_factory=dict)
    between: dict[str, Between] = field(default_factory=dict)


def divided(
    round: Mapping[str, object],
    clients: Mapping[int, Mapping[str, object]],
    ids: Sequence[int],
    figures: Sequence[Figure],
) -> RoundNotes:
    """Return a round's notes, with matrices between clients taken out.

    round: notes of the round. clients: notes by client id. ids: the round's clients in its order. Notes that do not
    have the form of their figure stay as they are.
    """
    notes = RoundNotes(dict(round), {i: dict(clients.get(i, {})) for i in ids})
    for figure in figures:
        name = figure.record
        if isinstance(figure, Matrix):
            found = between(notes.round.get(name), {i: own.get(name) for i, own in notes.clients.items()})
            if found is not None:
                notes.between[name] = found
                notes.round.pop(name, None)
                for own in notes.clients.values():
                    own.pop(name, None)
        elif isinstance(figure, Links):
            lists = {i: own[name] for i, own in notes.clients.items() if isinstance(own.get(name), list | np.ndarray)}
            found = _too_large([*lists]) if len(lists) ** 2 > LARGEST else linked(lists)
            if lists and found is not None:
                notes.between[name] = found
                for i, others in lists.items():
                    notes.clients[i][name] = len(others)
    return notes


def between(whole: Any, own: Mapping[int, Any]) -> Between | None:
    """Return a matrix that a method noted, None if the notes are no matrix.

    whole: the note of the round, rows in the order of its clients. own: the notes of its clients in the same order,
    used if `whole` is no matrix: rows, or tables by client id.
    """
    ids = np.array(list(own), np.int64)
    if isinstance(whole, list | np.ndarray) and len(whole) == len(ids):
        if len(ids) ** 2 > LARGEST and isinstance(whole[0], list | np.ndarray):
            return _too_large([*own])
        values = _floats(whole)
        if values is not None and values.shape == (len(ids), len(ids)):
            return Between(ids, ids, values)
    rows = {i: row for i, row in own.items() if row is not None}
    if not rows:
        return None
    if all(isinstance(row, list | np.ndarray) and len(row) == len(ids) for row in rows.values()):
        if len(rows) * len(ids) > LARGEST:
            return _too_large([*rows], [*own])
        values = _floats(list(rows.values()))
        return Between(np.array(list(rows), np.int64), ids, values) if values is not None else None
    return _of_tables(rows, ids)


def _too_large(rows: list[int], columns: list[int] | None = None) -> Between:
    """Return a matrix without values, which takes no memory. `save` leaves it out and names it."""
    columns = columns or rows
    nothing = np.broadcast_to(np.float64(np.nan), (len(rows), len(columns)))
    return Between(np.array(rows, np.int64), np.array(columns, np.int64), nothing)


def _of_tables(rows: Mapping[int, Any], ids: NDArray[np.int64]) -> Between | None:
    """Return tables by client id as a matrix. A client of the round that a table does not name has 0 in it."""
    tables = {
        i: dict(zip(map(str, ids), row, strict=True)) if isinstance(row, list) and len(row) == len(ids) else row
        for i, row in rows.items()
    }
    if not all(isinstance(row, dict) for row in tables.values()):
        return None
    named = [{int(j): value for j, value in row.items() if str(j).isdecimal()} for row in tables.values()]
    columns = np.array([*ids, *sorted({j for row in named for j in row} - set(ids.tolist()))], np.int64)
    if len(rows) * len(columns) > LARGEST:
        return _too_large([*rows], columns.tolist())
    place = {int(j): k for k, j in enumerate(columns)}
    values = np.full((len(rows), len(columns)), np.nan)
    values[:, : len(ids)] = 0
    for k, row in enumerate(named):
        numbers = _floats(list(row.values()))
        if numbers is None:
            return None
        values[k, [place[j] for j in row]] = numbers
    return Between(np.array(list(rows), np.int64), columns, values)


def linked(lists: Mapping[int, Any]) -> Between | None:
    """Return lists of other clients as a bool matrix, None if they are no lists of ids. Lists may be arrays."""
    lists = {i: others.tolist() if isinstance(others, np.ndarray) else others for i, others in lists.items()}
    if not all(type(j) is int for others in lists.values() for j in others):
        return None
    rows = np.array(list(lists), np.int64)
    columns = np.array([*lists, *sorted({j for others in lists.values() for j in others} - set(lists))], np.int64)
    place = {int(j): k for k, j in enumerate(columns)}
    values = np.zeros((len(rows), len(columns)), bool)
    for k, others in enumerate(lists.values()):
        values[k, [place[j] for j in others]] = True
    return Between(rows, columns, values)


def _floats(values: Any) -> NDArray[np.float64] | None:
    """Return numbers as float64, NaN for cells without a finite number.

    Return None if rows differ in length, or if malformed cells leave no finite number.
    """
    try:
        found = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        try:
            # a malformed cell becomes NaN
            found = np.vectorize(_number, otypes=[np.float64])(np.array(values, object))
        except (TypeError, ValueError):
            return None
        if not np.isfinite(found).any():
            return None
    return np.where(np.isfinite(found), found, np.nan)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


# The files ------------------------------------------------------------------------------------------------------------


def save(run: Path, round: int, ids: Sequence[int], found: Mapping[str, Between]) -> list[str]:
    """Write the matrices of a round, durable when this returns.

    Those above LARGEST are left out; return their names.
    """
    order = np.array(ids, np.int64)
    arrays: dict[str, NDArray[Any]] = {_CLIENTS: order.astype(np.int32)}
    kept = {name: one for name, one in found.items() if one.values.size <= LARGEST}
    for name, one in kept.items():
        if one.values.dtype == bool:
            arrays[name + _BITS] = np.packbits(one.values, axis=1)
        else:
            arrays[name] = _short(one.values)
        if not np.array_equal(one.rows, order):
            arrays[name + _ROWS] = one.rows.astype(np.int32)
        if not np.array_equal(one.columns, order):
            arrays[name + _COLUMNS] = one.columns.astype(np.int32)
    if kept:
        make_directory(run / DIRECTORY)
        publish(_path(run, round), lambda temporary: _write(temporary, arrays))
    return [name for name in found if name not in kept]


def _short(values: NDArray[np.float64]) -> NDArray[Any]:
    """Return numbers as float16, or as float32 if one is too large for that."""
    largest = np.nanmax(np.abs(values), initial=0)
    return values.astype(np.float16 if largest <= np.finfo(np.float16).max else np.float32)


def _write(file: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    with file.open("wb") as opened:
        np.savez_compressed(opened, **arrays)  # type: ignore[arg-type]


def read(run: Path, round: int, name: str | None = None) -> dict[str, Between]:
    """Return the matrices of a round by the name of the record, or only the one named `name`; {} if it has none.

    A damaged file is logged.
    """
    path = _path(run, round)
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as file:
            wanted = file.files if name is None else {_CLIENTS, *(name + end for end in ("", _BITS, _ROWS, _COLUMNS))}
            # a file's other matrices are not decompressed
            return _read({key: file[key] for key in file.files if key in wanted})
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        log.warning("%s cannot be read: %s", path, error)
        return {}


def _read(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Between]:
    clients, found = arrays[_CLIENTS].astype(np.int64), {}
    names = [name.removesuffix(_BITS) for name in arrays if name != _CLIENTS and not name.endswith((_ROWS, _COLUMNS))]
    for name in names:
        rows, columns = (arrays.get(name + of, clients).astype(np.int64) for of in (_ROWS, _COLUMNS))
        if name in arrays:
            values = arrays[name].astype(np.float64)
        else:
            values = np.unpackbits(arrays[name + _BITS], axis=1, count=len(columns)).astype(bool)
        if values.shape != (len(rows), len(columns)):
            raise ValueError(f"{name} must be {[len(rows), len(columns)]}, got {list(values.shape)}")
        found[name] = Between(rows, columns, values)
    return found


def matrix_of(run: Path, record: Record, name: str) -> Between | None:
    """Return a matrix of a round, None if it has none."""
    return read(run, record["round"], name).get(name)


def rounds(run: Path) -> list[int]:
    """Return the rounds that have a file, ascending."""
    return numbered(run / DIRECTORY, ".npz")


def cut(run: Path, round: int) -> None:
    """Delete the files of rounds after this one."""
    for later in rounds(run):
        if later > round:
            _path(run, later).unlink(missing_ok=True)


def _path(run: Path, round: int) -> Path:
    return run / DIRECTORY / f"round-{round}.npz"
