"""The transcript of an attempt: all that its masks are derived from. Members with different views share no masks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.config import RunConfig
from fl_app.keys import Scalar, own
from fl_app.transport.wire import PRIVATE, STATE_OF, STATE_VERSION, Download


@dataclass(frozen=True)
class Transcript:
    """An attempt at a sum, as one member sees it.

    experiment, run, config: the run's random id, Flower's number of it, and the configuration's hash. members: sorted.
    sent: by member, the hash of what it was sent (`sent_hash`). keys: by member, its signed keys for this run. listed:
    the hash of the list of all sites' keys. most: the largest sample count that counts, 0 for no bound. words: the length
    of the sum.
    """

    experiment: str
    run: int
    config: str
    round: int
    attempt: int
    members: tuple[int, ...]
    sent: tuple[str, ...]
    keys: tuple[str, ...]
    listed: str
    most: float
    words: int

    @property
    def digest(self) -> str:
        """The SHA-256 of the transcript: a label of every key that is used in the attempt."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def config_hash(config: RunConfig) -> str:
    """Return the SHA-256 of all keys of a run's configuration, without other methods' tables: clients have none of them."""
    known = {**own(config.resolved, config.method), "num-clients": config.num_clients}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


class SentHashes:
    """Hashes of what clients are sent. Arrays that several are sent are read once.

    states: whether the state that a client continues from is a part of it. All clients of an aggregation group continue
    from the same one.
    """

    def __init__(self, states: bool) -> None:
        self._states = states
        # arrays are kept so that no other one gets their place in memory
        self._known: dict[tuple[int, int, str], tuple[NDArray[Any], str]] = {}

    def of(self, download: Download, more: Mapping[str, Scalar]) -> str:
        """Return the hash of a download's model, extras, scalars and state. more: further scalars that it will have."""
        told = {STATE_VERSION: download.state_version, **download.method, **more}
        scalars = {name: value for name, value in told.items() if not name.startswith(PRIVATE)}
        state, origin = scalars.pop(STATE_VERSION), json.loads(str(scalars.pop(STATE_OF, "{}")))
        if self._states:
            # a client's number in the earlier run is its own
            scalars |= {STATE_VERSION: state, STATE_OF: f"{origin.get('secret')} {origin.get('version')}"}
        arrays = {"params": download.model.params, "buffers": download.model.buffers, **download.extras}
        parts = {name: self._array(array) for name, array in arrays.items() if array.size}
        return hashlib.sha256(json.dumps([parts, scalars], sort_keys=True).encode()).hexdigest()

    def _array(self, array: NDArray[Any]) -> str:
        key = array.ctypes.data, array.nbytes, array.dtype.str
        if key not in self._known or not array.flags.c_contiguous:
            whole = np.ascontiguousarray(array)
            hashed = hashlib.sha256(f"{whole.dtype.str}{whole.shape}".encode())
            hashed.update(whole.reshape(-1).view(np.uint8).data)
            digest = hashed.hexdigest()
            if not array.flags.c_contiguous:
                return digest
            self._known[key] = array, digest
        return self._known[key][1]
