"""What finds a client that lies in a private run: small groups, measured, and what a proof of each upload would cost.

`python -m benchmarks.bounded` trains 30 clients on digits in a private run in one process, and keeps what each sends. It
then forms the sums of groups of 2, 3, 5 and 10 clients, in fixed point and under masks as a run does, and looks for far
ones as a server does (strategies/engine/screening.py, 3 times the usual distance). One client lies: its update has so many
times the norm of the usual update, in a random direction. The script prints, for each size of a group, the share of
honest sums that are called far, and the share of lies that are found. Sums of 2 are no choice for a run, because each
member would learn the other's model; they have no masks here.

The last lines have the time of one multiplication on Curve25519, and of commitments to all values of a model: every proof
that inputs are bounded begins with one for each value (RoFL, EIFFeL, ACORN).
"""

from __future__ import annotations

import itertools
import logging
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from client_app.client_app import app
from client_app.private_round import Masker
from fl_app.config import parse
from fl_app.keys import Scalar
from fl_app.layout import Model
from fl_app.privacy import masking
from fl_app.server_app import run
from fl_app.transport.inprocess import InProcessGrid
from fl_app.transport.wire import GROUP_MIN, Download, Upload
from strategies import METHOD_PARAMS
from strategies.engine.screening import SumDistances

CLIENTS, ROUNDS, LIMIT = 30, 6, 3.0
SIZES, LIES = (2, 3, 5, 10), (3, 10, 30, 100)
D = 1_240_000

Vector = NDArray[np.float32]


@dataclass
class Recorded:
    """What a private run's clients received and would send without masks, by round and client."""

    sent: dict[int, Vector] = field(default_factory=dict)
    uploads: dict[int, dict[int, Vector]] = field(default_factory=dict)


@contextmanager
def _recording(found: Recorded) -> Iterator[None]:
    claim, send = Masker.of, Masker.mask

    def of(download: Download, *more: Any) -> Masker:
        found.sent[download.round] = download.model.params.copy()
        return claim(download, *more)

    def masked(masker: Masker, upload: Upload) -> Upload:
        own = found.uploads.setdefault(masker.transcript.round, {})
        own[masker.site.keys.ring.client_id] = upload.model.params.copy()
        return send(masker, upload)

    with mock.patch.object(Masker, "of", of), mock.patch.object(Masker, "mask", masked):
        yield


def recorded(clients: int = CLIENTS, rounds: int = ROUNDS, alpha: float = 0.1) -> Recorded:
    """Train a private run of FedAvg. alpha: of the Dirichlet distribution of labels."""
    found = Recorded()
    with tempfile.TemporaryDirectory() as directory, _recording(found):
        raw: dict[str, Scalar] = {
            "method": "fedavg",
            "private": True,
            "num-clients": clients,
            "num-server-rounds": rounds,
            "partition": "dirichlet",
            "dirichlet-alpha": alpha,
            "min-samples": 8,
            "train-samples": 0,
            "test-samples": 0,
            "evaluate-every": 0,
            "device": "cpu",
            "run-name": "run",
            "output-dir": directory,
            "state-dir": f"{directory}/state",
        }
        run(InProcessGrid(app, raw, clients), parse(raw, METHOD_PARAMS), lambda *_: None)
    return found


def mean_of(models: Sequence[Vector], clients: int, limit: float = 8.0) -> Vector:
    """Return the mean that a server decodes from the members' masked uploads. models: each float32 [d]."""
    none, total = np.zeros(0, np.float32), np.zeros(models[0].size + 1, np.uint64)
    keys = {pair: secrets.token_bytes(32) for pair in itertools.combinations(range(len(models)), 2)}
    for i, params in enumerate(models):
        words, _ = masking.encode(Model(params, none), 1.0, clients, limit)
        if len(models) >= GROUP_MIN:
            own = {j: keys[min(i, j), max(i, j)] for j in range(len(models)) if j != i}
            masking.mask(words, i, own)
        total += words
    return masking.decode(total, models[0].size, clients, len(models), limit).params


@dataclass(frozen=True)
class Found:
    """The shares of honest sums that are called far, and of lies that are found, by their size."""

    alarms: float
    found: dict[int, float]


def detection(seen: Recorded, size: int, lies: Sequence[int] = LIES) -> Found:
    """Return what a server finds in sums of groups of `size` clients. In each trial one client of one group lies."""
    rng, known = np.random.default_rng(size), SumDistances()
    alarms: list[bool] = []
    found: dict[int, list[bool]] = {times: [] for times in lies}
    for round, uploads in sorted(seen.uploads.items()):
        sent, clients = seen.sent[round], len(uploads)
        groups = rng.permutation(sorted(uploads)).reshape(-1, size)

        def distance(models: Sequence[Vector], sent: Vector = sent, clients: int = clients) -> float:
            return float(np.linalg.norm(mean_of(models, clients) - sent))

        apart = {k: distance([uploads[i] for i in group]) for k, group in enumerate(groups)}
        far = known.far(round, apart, LIMIT)
        alarms += [k in far for k in apart]
        norm = float(np.median([np.linalg.norm(model - sent) for model in uploads.values()]))
        for (k, group), times in itertools.product(enumerate(groups), lies if round > 1 else ()):
            direction = rng.normal(size=sent.size)
            lie = (sent + times * norm * direction / np.linalg.norm(direction)).astype(np.float32)
            moved = distance([lie, *(uploads[i] for i in group[1:])])
            found[times].append(k in known.far(round, {**apart, k: moved}, LIMIT))
        known.note(round, apart)
    return Found(float(np.mean(alarms)), {times: float(np.mean(those)) for times, those in found.items()})


def multiplication() -> tuple[float, float]:
    """Return the seconds of a multiplication on Curve25519, from 1,000 and from 4,000 of them, one core."""
    key, other = X25519PrivateKey.generate(), X25519PrivateKey.generate().public_key()
    seconds = []
    for count in (1000, 4000):
        began = time.process_time()
        for _ in range(count):
            key.exchange(other)
        seconds.append((time.process_time() - began) / count)
    return seconds[0], seconds[1]


def main() -> None:
    """Print the tables of studies/privacy.md."""
    logging.disable(logging.CRITICAL)
    seen = recorded()
    print("| members of a sum | honest sums called far |" + "".join(f" lie of {times} |" for times in LIES))
    print("|---|---|" + "---|" * len(LIES))
    for size in SIZES:
        result = detection(seen, size)
        shares = (result.alarms, *result.found.values())
        print(f"| {size} | " + " | ".join(f"{share:.0%}" for share in shares) + " |", flush=True)
    few, many = multiplication()
    print(f"multiplication: {few * 1e6:.0f} µs of 1,000, {many * 1e6:.0f} µs of 4,000")
    print(f"commitments to {D:,} values: {many * D:.0f} s")


if __name__ == "__main__":
    main()
