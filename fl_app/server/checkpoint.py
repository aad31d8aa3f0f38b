"""Checkpoints of the server: two generations, each durable and checked before it is trusted.

A checkpoint is `checkpoints/round-<t>.safetensors` with the arrays and, written after it, `round-<t>.json` with everything
else, the arrays' sha256 and its own. Both are published whole and durable; a truncated or altered one is never used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.checksums import sha256_of
from fl_app.errors import UserError
from fl_app.files import explain_full_disk, make_directory, publish, publish_text

log = logging.getLogger("corolla")

DIRECTORY = "checkpoints"
_KEEP = 2


@dataclass(frozen=True)
class Checkpoint:
    """Arrays by name, and what JSON holds: round, versions, record."""

    arrays: dict[str, NDArray[Any]]
    meta: dict[str, Any]


def save(run: Path, round: int, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> None:
    """Write the checkpoint of a round; it is durable when this returns, and only then older ones are deleted.

    Raises UserError if the disk is full; the checkpoints before are still there then.
    """
    directory = run / DIRECTORY
    with explain_full_disk("output-dir", run):
        make_directory(directory)
        for left in directory.glob(".*.tmp"):  # by a killed server
            left.unlink()
        tensors = directory / f"round-{round:06d}.safetensors"
        publish(tensors, lambda file: _write_tensors(file, arrays))
        body = json.dumps({**meta, "round": round, "tensors-sha256": sha256_of(tensors)}, allow_nan=False)
        publish_text(tensors.with_suffix(".json"), f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}\n")
    for old in rounds(run)[:-_KEEP]:
        for suffix in (".json", ".safetensors"):
            (directory / f"round-{old:06d}{suffix}").unlink(missing_ok=True)


def _write_tensors(file: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file({name: np.asarray(a, order="C") for name, a in arrays.items()}, file)
    except SafetensorError as error:  # which holds the system's error only in its words
        if found := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(file)) from error
        raise


def rounds(run: Path) -> list[int]:
    """Rounds that have a checkpoint, oldest first, checked or not."""
    return sorted(int(p.stem.removeprefix("round-")) for p in (run / DIRECTORY).glob("round-*.json"))


def load_latest(run: Path) -> Checkpoint:
    """Return the newest sound checkpoint; damaged ones are logged and passed over.

    Raises UserError if there is none.
    """
    for round in reversed(rounds(run)):
        try:
            return _load(run / DIRECTORY / f"round-{round:06d}.json")
        except (OSError, ValueError) as error:
            log.warning("checkpoint of round %d is damaged (%s); using the one before", round, error)
    raise UserError(f"resume: {run} has no sound checkpoint")


def versions_kept(run: Path) -> dict[int, tuple[str, ...]]:
    """Client-state generations that the checkpoints on disk name, per client id."""
    found: dict[int, set[str]] = {}
    for round in rounds(run):
        with contextlib.suppress(OSError, ValueError):
            for client_id, version in _meta(run / DIRECTORY / f"round-{round:06d}.json")["versions"].items():
                found.setdefault(int(client_id), set()).add(version)
    return {client_id: tuple(sorted(filter(None, versions))) for client_id, versions in found.items()}


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
    return Checkpoint(dict(load_file(tensors)), meta)
