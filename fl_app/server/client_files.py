"""Clients' arrays in checkpoints: each is written once, when it has changed.

`checkpoints/clients-<t>.safetensors` has the arrays that changed until round t, as `client.<id>.<name>`. A checkpoint
lists the files with its arrays, their SHA-256, and the clients for each array. Files that no checkpoint names are
deleted. If less than half of a file is still needed, its needed arrays are written once more, to a new file. So the
files never hold more than about twice the size of the clients' arrays.
"""

from __future__ import annotations

import itertools
import os
import re
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.checksums import sha256_of
from fl_app.files import publish

# Client id, and name of the array.
Key = tuple[int, str]
Personal = Mapping[int, Mapping[str, NDArray[Any]]]

_PATTERN = "clients-*.safetensors"
# Bytes that an array takes in a file beside its numbers.
_ENTRY = 100


@dataclass(frozen=True)
class _Saved:
    """A written array. array: the very object, as a weak reference. file: the name of its file."""

    array: weakref.ref[NDArray[Any]]
    file: str


@dataclass
class ClientFiles:
    """The file of each client's array in a run's checkpoints, and the files' SHA-256.

    An array counts as changed if it is another object than the written one. Written arrays become read-only, so that
    changing one in place raises an error.
    """

    directory: Path
    _saved: dict[Key, _Saved] = field(default_factory=dict)
    _hashes: dict[str, str] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)

    def write(self, round: int, personal: Personal) -> list[dict[str, Any]]:
        """Write the arrays that changed. Return the files of all arrays, as a checkpoint lists them.

        The files are durable when this returns. Files of earlier checkpoints stay as they are. Raises OSError.
        """
        arrays = {(i, name): array for i, own in personal.items() for name, array in own.items()}
        kept = {key: saved for key, saved in self._saved.items() if key in arrays and saved.array() is arrays[key]}
        # of files of which less than half is needed, what is needed is written again
        needed: dict[str, int] = defaultdict(int)
        for key, saved in kept.items():
            needed[saved.file] += arrays[key].nbytes + _ENTRY
        kept = {key: saved for key, saved in kept.items() if 2 * needed[saved.file] >= self._sizes[saved.file]}
        changed = {key: array for key, array in arrays.items() if key not in kept}
        if changed:
            # a skipped checkpoint may name a file of the same round
            names = itertools.chain([f"clients-{round:06d}"], (f"clients-{round:06d}-{k}" for k in itertools.count(2)))
            path = next(path for name in names if not (path := self.directory / f"{name}.safetensors").exists())
            publish(path, lambda file: write_tensors(file, {_tensor(key): array for key, array in changed.items()}))
            self._hashes[path.name] = sha256_of(path)
            self._sizes[path.name] = sum(array.nbytes + _ENTRY for array in changed.values())
            for key, array in changed.items():
                array.flags.writeable = False
                kept[key] = _Saved(weakref.ref(array), path.name)
        self._saved = kept
        found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for (client_id, name), saved in sorted(self._saved.items()):
            found[saved.file][name].append(client_id)
        return [
            {"file": file, "sha256": self._hashes[file], "bytes": self._sizes[file], "arrays": dict(of)}
            for file, of in sorted(found.items())
        ]

    def moved(self, client_id: int, before: Mapping[str, NDArray[Any]], after: Mapping[str, NDArray[Any]]) -> None:
        """Record that a client's arrays are other objects with the same values."""
        for name, array in after.items():
            saved = self._saved.get((client_id, name))
            if saved is not None and saved.array() is before[name]:
                array.flags.writeable = False
                self._saved[client_id, name] = _Saved(weakref.ref(array), saved.file)

    def adopt(self, index: Iterable[Mapping[str, Any]], personal: Personal) -> None:
        """Take over the files that a checkpoint lists. personal: the arrays that were read from them."""
        for of in index:
            self._hashes[of["file"]], self._sizes[of["file"]] = of["sha256"], of["bytes"]
            for name, ids in of["arrays"].items():
                for client_id in ids:
                    array = personal[client_id][name]
                    array.flags.writeable = False
                    self._saved[client_id, name] = _Saved(weakref.ref(array), of["file"])

    def collect(self, named: Iterable[str]) -> None:
        """Delete all files but the named ones: they are of earlier checkpoints, or of an interrupted one."""
        kept = set(named)
        for path in self.directory.glob(_PATTERN):
            if path.name not in kept:
                path.unlink(missing_ok=True)
                self._hashes.pop(path.name, None)
                self._sizes.pop(path.name, None)


def read_index(directory: Path, index: Iterable[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """Return the clients' arrays that a checkpoint lists, by `client.<id>.<name>`.

    Raises OSError, and ValueError if a file is damaged.
    """
    found: dict[str, NDArray[Any]] = {}
    for of in index:
        path = directory / of["file"]
        if sha256_of(path) != of["sha256"]:
            raise ValueError(f"{path.name}: wrong checksum")
        found |= read_tensors(path, [_tensor((i, name)) for name, ids in of["arrays"].items() for i in ids])
    return found


def _tensor(key: Key) -> str:
    client_id, name = key
    return f"client.{client_id}.{name}"


def write_tensors(file: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays by name. Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file({name: np.asarray(a, order="C") for name, a in arrays.items()}, file)
    except SafetensorError as error:  # which has the system's error only in its text
        if found := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(file)) from error
        raise


def read_tensors(file: Path, names: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Return some of a file's arrays by name. Raises ValueError if it lacks one, or is no safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np") as opened:
            return {name: opened.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{file.name}: {error}") from None
