"""Checkpoints of the server. The last two are kept, each durable and verified before use.

A checkpoint is `checkpoints/round-<t>.safetensors` with the arrays and, written after it, `round-<t>.json`. The JSON
file holds everything else, with the arrays' SHA-256 and its own. All files are published whole and durable. A truncated
or altered checkpoint is never used.

Clients' arrays are in files that both checkpoints may name: each array is written once, when it has changed.
`checkpoints/clients-<t>.safetensors` has the arrays that changed until round t, as `client.<id>.<name>`. A checkpoint
lists the files with its arrays, their SHA-256, and the clients for each array. Files that no checkpoint names are
deleted. If less than half of a file is still needed, its needed arrays are written once more, to a new file. So the
files never hold more than about twice the size of the clients' arrays.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
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

from fl_app import software
from fl_app.checksums import sha256_of
from fl_app.errors import UserError
from fl_app.files import explain_full_disk, make_directory, numbered, publish, publish_text

log = logging.getLogger("corolla")

# Client id, and name of the array.
Key = tuple[int, str]
Personal = Mapping[int, Mapping[str, NDArray[Any]]]

_PATTERN = "clients-*.safetensors"
# Bytes that an array takes in a file beside its numbers.
_ENTRY = 100


DIRECTORY = "checkpoints"
# Key of a checkpoint's JSON: the files with the clients' arrays.
CLIENTS = "client-files"
# Key of a checkpoint's JSON, and prefix of its arrays: the works of clients that were late.
LATE = "late"
# Key of a checkpoint's JSON: what wrote it (fl_app/software.py).
SOFTWARE = "software"
_KEEP = 2

# by client id, generations of its state
Versions = dict[int, tuple[str, ...]]


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


@dataclass(frozen=True)
class Checkpoint:
    """All arrays by name, and the JSON content: round, versions, record, files with clients' arrays."""

    arrays: dict[str, NDArray[Any]]
    meta: dict[str, Any]


def save(
    run: Path,
    round: int,
    arrays: Mapping[str, NDArray[Any]],
    meta: Mapping[str, Any],
    personal: Personal | None = None,
    files: ClientFiles | None = None,
    kept: int | None = None,
) -> Versions:
    """Write the checkpoint of a round. It is durable when this returns. Older checkpoints are deleted only after that.

    personal: arrays per client. files: knows which of them are on disk already. kept: a round whose checkpoint stays.
    Returns `versions_kept`. Raises UserError if the disk is full; the earlier checkpoints then remain.
    """
    directory = run / DIRECTORY
    files = files or client_files_of(run)
    with explain_full_disk("output-dir", run):
        make_directory(directory)
        for left in directory.glob(".*.tmp"):  # by a killed server
            left.unlink()
        clients = files.write(round, personal or {})
        tensors = directory / f"round-{round:06d}.safetensors"
        publish(tensors, lambda file: write_tensors(file, arrays))
        facts = {
            **meta,
            "round": round,
            SOFTWARE: software.used(),
            "tensors-sha256": sha256_of(tensors),
            CLIENTS: clients,
        }
        body = json.dumps(facts, allow_nan=False)
        publish_text(tensors.with_suffix(".json"), f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}\n")
    for old in set(rounds(run)[:-_KEEP]) - {kept}:
        for suffix in (".json", ".safetensors"):
            (directory / f"round-{old:06d}{suffix}").unlink(missing_ok=True)
    metas, unread = _metas(run)
    if unread is None:
        # a checkpoint that cannot be read names files, too
        files.collect(of["file"] for meta in metas for of in meta[CLIENTS])
    else:
        log.warning("files of clients' arrays that are no longer needed are kept for now: %s", unread)
    return _versions(metas)


def client_files_of(run: Path) -> ClientFiles:
    """Return a ClientFiles for a run's checkpoints that knows of no array yet."""
    return ClientFiles(run / DIRECTORY)


def rounds(run: Path) -> list[int]:
    """Return the rounds that have a checkpoint, oldest first, verified or not."""
    return numbered(run / DIRECTORY, ".json")


def load_latest(run: Path, kept: int | None = None) -> Checkpoint:
    """Return the newest sound checkpoint. Damaged ones, and those without all their files, are logged and skipped.

    kept: the round of the only checkpoint to look at.

    Raises UserError if there is none, or if a file cannot be read now: it may be sound.
    """
    for round in reversed(rounds(run)) if kept is None else [kept]:
        path = run / DIRECTORY / f"round-{round:06d}.json"
        try:
            return _load(path)
        except (FileNotFoundError, ValueError) as error:
            log.warning("checkpoint of round %d is damaged (%s); using the one before", round, error)
        except OSError as error:
            raise UserError(
                key="resume", rule=f"{error.filename or path} cannot be read: {error.strerror or error}"
            ) from None
    of_kept = "" if kept is None else f" of round {kept}, whose models it keeps (keep-best)"
    raise UserError(key="resume", rule=f"{run} has no sound checkpoint{of_kept}")


def versions_kept(run: Path) -> Versions:
    """Return, by client id, the generations of client state that the checkpoints on disk name, those of late uploads too."""
    return _versions(_metas(run)[0])


def _versions(metas: Iterable[Mapping[str, Any]]) -> Versions:
    """Return the generations of client state that checkpoints name. metas: their JSON content."""
    found: dict[int, set[str]] = {}
    for meta in metas:
        late = {work["client_id"]: work["version"] for work in meta.get(LATE, [])}
        for client_id, version in [*meta.get("versions", {}).items(), *late.items()]:
            found.setdefault(int(client_id), set()).add(version)
    return {client_id: tuple(sorted(filter(None, versions))) for client_id, versions in found.items()}


def _metas(run: Path) -> tuple[list[dict[str, Any]], OSError | None]:
    """Return the JSON content of a run's sound checkpoints, oldest first, and why one cannot be read now.

    Damaged checkpoints are left out: they are never used.
    """
    found: list[dict[str, Any]] = []
    unread = None
    for round in rounds(run):
        try:
            found.append(_meta(run / DIRECTORY / f"round-{round:06d}.json"))
        except ValueError:
            continue
        except OSError as error:
            unread = error
    return found, unread


def _meta(path: Path) -> dict[str, Any]:
    checksum, _, body = path.read_text(encoding="utf-8").partition("\n")
    if hashlib.sha256(body.removesuffix("\n").encode()).hexdigest() != checksum:
        raise ValueError(f"{path.name}: wrong checksum")
    meta: dict[str, Any] = json.loads(body)
    return meta


def _load(path: Path) -> Checkpoint:
    from safetensors.numpy import load_file

    meta = _meta(path)
    tensors = path.with_suffix(".safetensors")
    if sha256_of(tensors) != meta["tensors-sha256"]:
        raise ValueError(f"{tensors.name}: wrong checksum")
    return Checkpoint(dict(load_file(tensors)) | read_index(path.parent, meta[CLIENTS]), meta)
