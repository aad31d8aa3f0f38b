"""Checkpoints of the server. The last two are kept, each durable and verified before use.

A checkpoint is `checkpoints/round-<t>.safetensors` with the arrays and, written after it, `round-<t>.json`. The JSON
file holds everything else, with the arrays' SHA-256 and its own. Clients' arrays are in separate files (client_files),
which both checkpoints may name. All files are published whole and durable. A truncated or altered checkpoint is never
used.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fl_app import software
from fl_app.checksums import sha256_of
from fl_app.errors import UserError
from fl_app.files import explain_full_disk, make_directory, numbered, publish, publish_text
from fl_app.server.client_files import ClientFiles, Personal, read_index, write_tensors

log = logging.getLogger("corolla")

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
