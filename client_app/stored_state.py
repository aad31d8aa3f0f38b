"""Durable client state: immutable generations on the client's disk.

A generation is one file, `<state dir>/<experiment>/client-<id>/<round>-<attempt>.state`: a sha256, then safetensors
bytes. It is published whole and durable. A client loads exactly the generation that the server names, never the latest.
After a server crash or a repeated round the client may be ahead of the server. Older generations that no checkpoint
names are deleted at once, and all generations when the run ends.

No directory has more than a thousand entries. Clients from 500 on are grouped by the thousand, in
`<experiment>/clients-<first>/client-<id>`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import time
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app import foreign_files
from fl_app.errors import UserError
from fl_app.files import expanded, make_directory, publish
from fl_app.site_directory import user_state
from fl_app.transport.wire import state_version

log = logging.getLogger("corolla")

SUFFIX = ".state"
# name of an empty array in the files of runs with dp-epsilon
_NOISY = "dp-epsilon"
# clients below _DIRECT have a directory directly in the experiment's; others are grouped by _GROUP
_DIRECT, _GROUP = 500, 1000
_EXPERIMENT = re.compile(r"[\w-]{1,64}", re.ASCII)
_GENERATION = re.compile(rf"[^/]+/(?:clients-[^/]*/)?client-[^/]*/[^/]*{re.escape(SUFFIX)}")


class _DamagedState(UserError):
    """A generation's checksum is wrong."""


@dataclass
class StoredState:
    """Named arrays a client keeps between its rounds (strategies.base.ClientState), and the generation they were read from."""

    arrays: MutableMapping[str, NDArray[Any]] = field(default_factory=dict)
    version: str = ""


def state_root(state_dir: str) -> Path:
    """Return the configured directory, $COROLLA_STATE_DIR, or the user's state directory."""
    if given := state_dir or os.environ.get("COROLLA_STATE_DIR"):
        return expanded(given)
    return user_state()


class StateStore:
    """The generations of one client in one experiment. noisy: those of runs with `dp-epsilon`, which alone are loaded then.

    What a client keeps goes into its uploads, and a server may name the state of any run that it has made.
    """

    def __init__(self, root: Path, experiment: str, client_id: int, noisy: bool = False) -> None:
        if not re.fullmatch(r"[\w-]{1,64}", experiment):
            raise UserError(key=f"client {client_id}", rule=f"malformed experiment id {experiment[:80]!r}")
        self.root, self.client_id, self.experiment, self.noisy = root, client_id, experiment, noisy

    @functools.cached_property
    def directory(self) -> Path:
        """The directory of this client's generations. Only clients that keep state ask for it."""
        name, above = f"client-{self.client_id:04d}", self.root / self.experiment
        if self.client_id >= _DIRECT:
            above /= f"clients-{self.client_id // _GROUP * _GROUP:06d}"
        return above / name

    def load(self, version: str) -> StoredState:
        """Read a generation, or if its checksum is wrong, the newest sound one of an earlier round.

        "" is the empty state. Raises UserError if the generation is missing, or damaged with no sound one before it.
        """
        if not version:
            return StoredState()
        if not re.fullmatch(r"[\w-]{1,64}", version):
            raise UserError(
                key=f"client {self.client_id}", rule=f"the server asks for a malformed state version {version[:80]!r}"
            )
        try:
            return self._read(version)
        except _DamagedState as error:
            damaged = error
        # a version begins with its round, six digits
        rounds_before = [p.stem for p in self.directory.glob(f"*{SUFFIX}") if p.stem[:6] < version[:6]]
        for earlier in sorted(rounds_before, reverse=True):
            with contextlib.suppress(_DamagedState):
                state = self._read(earlier)
                log.warning("%s; used instead: %s", damaged, earlier)
                return state
        raise damaged

    def _read(self, version: str) -> StoredState:
        path = self.path(version)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(
                key=f"client {self.client_id}", rule=f"state of {version} is missing: {path} ({error.strerror})"
            ) from None
        if hashlib.sha256(data[32:]).digest() != data[:32]:
            raise _DamagedState(f"client {self.client_id}: state of {version} is damaged (checksum): {path}")
        from safetensors.numpy import load

        arrays = dict(load(data[32:]))
        if arrays.pop(_NOISY, None) is None and self.noisy:
            raise UserError(
                key="dp-epsilon", rule=f"the state in {path} was trained without a budget, so it is not used"
            )
        return StoredState(arrays, version)

    def save(self, state: StoredState, round: int, attempt: int) -> str:
        """Write a generation and return its version. Nothing is written for an empty state ("")."""
        if not state.arrays:
            return ""
        from safetensors.numpy import save

        version = state_version(round, attempt)
        marks = {_NOISY: np.zeros(0, np.uint8)} if self.noisy else {}
        payload = save({name: np.asarray(array, order="C") for name, array in state.arrays.items()} | marks)
        path = self.path(version)

        def write(temporary: Path) -> None:
            with temporary.open("wb") as file:
                file.write(hashlib.sha256(payload).digest())
                file.write(payload)

        try:
            make_directory(self.directory)
            publish(path, write)
        except OSError as error:
            raise UserError(
                key=f"client {self.client_id}", rule=f"cannot write its state to {path}: {error.strerror}"
            ) from None
        return version

    def delete_before(self, version: str, keep: Collection[str] = ()) -> None:
        """Delete the generations older than `version`, and their remains of interrupted writes. "" deletes none.

        keep: generations that stay.
        """
        if version and self.directory.is_dir():
            for path in [*self.directory.glob(f"*{SUFFIX}"), *self.directory.glob(".*.tmp")]:
                if path.name.lstrip(".") < version and path.stem not in keep:
                    path.unlink(missing_ok=True)

    def forget(self) -> None:
        """Delete this client's state of the experiment, and its directories if they are empty then."""
        for path in self.directory.glob("*"):
            path.unlink(missing_ok=True)
        experiment = self.root / self.experiment
        for empty in (self.directory, *self.directory.parents):
            if not empty.is_relative_to(experiment):
                break
            with contextlib.suppress(OSError):
                empty.rmdir()

    def path(self, version: str) -> Path:
        """Return a generation's file."""
        return self.directory / f"{version}{SUFFIX}"


@dataclass(frozen=True)
class StoredExperiment:
    """The client state of one experiment on this machine."""

    experiment: str
    clients: int
    nbytes: int
    modified: float


def stored(root: Path) -> list[StoredExperiment]:
    """List the experiments with client state under a state directory, oldest first. Raises UserError if there is too much.

    Applications write the directory: anything without an experiment's name, or no client's file, is left out, and links
    are not followed (fl_app/foreign_files.py).
    """
    found = []
    for entry in foreign_files.entries(root):
        if not entry.is_directory or not _EXPERIMENT.fullmatch(entry.path):
            continue
        files = [file for file in foreign_files.walk(root, entry.path) if _GENERATION.fullmatch(file.path)]
        if files:
            nbytes, modified = sum(file.nbytes for file in files), max(file.modified for file in files)
            clients = {file.path.rpartition("/")[0] for file in files}
            found.append(StoredExperiment(entry.path, len(clients), nbytes, min(modified, time.time())))
    return sorted(found, key=lambda e: e.modified)


def missing_clients(root: Path, experiment: str, versions: Mapping[int, str]) -> list[int]:
    """Return the clients without the named generation under a state directory.

    versions: by client id, "" for none.
    """
    return [
        i for i, version in versions.items() if version and not StateStore(root, experiment, i).path(version).is_file()
    ]


def remove(root: Path, experiment: str) -> None:
    """Delete one experiment's directory. Raises UserError if it has no client state. Links are not followed."""
    if experiment not in {e.experiment for e in stored(root)}:
        raise UserError(f"no client state of experiment {experiment!r} under {root}")
    foreign_files.remove(root, experiment)
