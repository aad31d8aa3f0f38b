"""Durable client state: immutable generations on the client's disk.

A generation is one file, `<state dir>/<experiment>/client-<id>/<round>-<attempt>.state`: a sha256 and then safetensors bytes,
published whole and durable. A client loads exactly the generation the server names, never the latest: after a server crash or
a repeated round the client may be ahead of the server. What is older than that and named by no checkpoint is deleted at once, all
of it when the run is finished.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Collection, Iterable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.errors import UserError
from fl_app.files import make_directory, publish
from fl_app.site import user_state
from fl_app.wire import state_version

log = logging.getLogger("corolla")

SUFFIX = ".state"
# where earlier versions noted for good what client_app/notes.py does
_EARLIER = ("budget*", "*.answered")


class _Damaged(UserError):
    """A generation whose checksum is wrong."""


@dataclass
class State:
    """Named arrays a client keeps between its rounds (strategies.base.ClientState), and the generation they were read from."""

    arrays: MutableMapping[str, NDArray[Any]] = field(default_factory=dict)
    version: str = ""


def state_root(state_dir: str) -> Path:
    """Return the configured directory, $COROLLA_STATE_DIR, or the user's state directory."""
    if state_dir or os.environ.get("COROLLA_STATE_DIR"):
        return Path(state_dir or os.environ["COROLLA_STATE_DIR"]).expanduser()
    return user_state()


class StateStore:
    """The generations of one client in one experiment."""

    def __init__(self, root: Path, experiment: str, client_id: int) -> None:
        if not re.fullmatch(r"[\w-]{1,64}", experiment):
            raise UserError(f"client {client_id}: malformed experiment id {experiment[:80]!r}")
        self.client_id = client_id
        self.directory = root / experiment / f"client-{client_id:04d}"

    def refuse_earlier_notes(self) -> None:
        """Raise UserError if an earlier version noted here what was spent and answered: nothing of that would count any more."""
        if earlier := _earlier_notes(self.directory):
            raise UserError(
                f"resume: experiment {self.directory.parent.name} was started with an earlier version, which noted budgets and "
                f"answers in {self.directory} ({earlier[0].name}); start a new run"
            )

    def load(self, version: str) -> State:
        """Read a generation, or if its checksum is wrong the newest sound one of an earlier round; "" is the empty state.

        Raises UserError if the generation is missing, or damaged with none before it.
        """
        if not version:
            return State()
        if not re.fullmatch(r"[\w-]{1,64}", version):
            raise UserError(f"client {self.client_id}: the server asks for a malformed state version {version[:80]!r}")
        try:
            return self._read(version)
        except _Damaged as error:
            damaged = error
        # a version begins with its round, six digits
        rounds_before = [p.stem for p in self.directory.glob(f"*{SUFFIX}") if p.stem[:6] < version[:6]]
        for earlier in sorted(rounds_before, reverse=True):
            with contextlib.suppress(_Damaged):
                state = self._read(earlier)
                log.warning("%s; used instead: %s", damaged, earlier)
                return state
        raise damaged

    def _read(self, version: str) -> State:
        path = self._path(version)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(
                f"client {self.client_id}: state of {version} is missing: {path} ({error.strerror})"
            ) from None
        if hashlib.sha256(data[32:]).digest() != data[:32]:
            raise _Damaged(f"client {self.client_id}: state of {version} is damaged (checksum): {path}")
        from safetensors.numpy import load

        return State(dict(load(data[32:])), version)

    def save(self, state: State, round: int, attempt: int) -> str:
        """Write a generation and return its version; nothing is written for an empty state ("")."""
        if not state.arrays:
            return ""
        from safetensors.numpy import save

        version = state_version(round, attempt)
        payload = save({name: np.asarray(array, order="C") for name, array in state.arrays.items()})
        path = self._path(version)

        def write(temporary: Path) -> None:
            with temporary.open("wb") as file:
                file.write(hashlib.sha256(payload).digest())
                file.write(payload)

        try:
            make_directory(self.directory)
            publish(path, write)
        except OSError as error:
            raise UserError(f"client {self.client_id}: cannot write its state to {path}: {error.strerror}") from None
        return version

    def delete_before(self, version: str, keep: Collection[str] = ()) -> None:
        """Delete the generations older than `version`, and the remains of interrupted writes of such; "" deletes none.

        keep: generations that stay.
        """
        if version and self.directory.is_dir():
            for path in [*self.directory.glob(f"*{SUFFIX}"), *self.directory.glob(".*.tmp")]:
                if path.name.lstrip(".") < version and path.stem not in keep:
                    path.unlink(missing_ok=True)

    def forget(self) -> None:
        """Delete this client's state of the experiment, and its directories if they are empty then."""
        _clear([self.directory])

    def _path(self, version: str) -> Path:
        return self.directory / f"{version}{SUFFIX}"


@dataclass(frozen=True)
class StoredExperiment:
    """Client state one experiment left on this machine."""

    experiment: str
    clients: int
    nbytes: int
    modified: float


def stored(root: Path) -> list[StoredExperiment]:
    """List the experiments with client state under a state directory, oldest first."""
    found = []
    for directory in root.iterdir() if root.is_dir() else []:
        files = list(directory.glob(f"client-*/*{SUFFIX}"))
        if not files:
            continue
        stats = [file.stat() for file in files]
        nbytes, modified = sum(s.st_size for s in stats), max(s.st_mtime for s in stats)
        found.append(StoredExperiment(directory.name, len({file.parent for file in files}), nbytes, modified))
    return sorted(found, key=lambda e: e.modified)


def remove(root: Path, experiment: str) -> None:
    """Delete one experiment's client state, as `StateStore.forget` does. Raises UserError if there is none."""
    if experiment not in {e.experiment for e in stored(root)}:
        raise UserError(f"no client state of experiment {experiment!r} under {root}")
    _clear((root / experiment).glob("client-*"))


def _clear(clients: Iterable[Path]) -> None:
    """Delete the files in clients' directories, but for an earlier version's notes, and the directories that are empty then."""
    for directory in list(clients):
        kept = _earlier_notes(directory)
        for path in directory.glob("*"):
            if path not in kept:
                path.unlink(missing_ok=True)
        for empty in (directory, directory.parent):
            with contextlib.suppress(OSError):
                empty.rmdir()


def _earlier_notes(directory: Path) -> list[Path]:
    """Return the files in which an earlier version noted what a client had spent and answered."""
    return sorted(path for pattern in _EARLIER for path in directory.glob(pattern))
