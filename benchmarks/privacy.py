"""The cost of a private round of FedCAC beside a plain one: a client's work, the server's step, bytes.

python -m benchmarks.privacy            # d = 1.2 million, as resnet8
python -m benchmarks.privacy --short    # d = 0.4 million

There are 40 clients. Times are the processor's.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernels import RESNET18, random_masks, stack
from benchmarks.measure import arguments, finish, interleaved
from benchmarks.private_rounds import site_keys
from client_app.private_round import Masker, answered
from client_app.run_keys import SiteKeys
from fl_app.config import RunConfig
from fl_app.keys import Scalar
from fl_app.layout import NOTHING, Model
from fl_app.privacy import keyring, masking, sketch
from fl_app.privacy.aggregation_groups import threshold
from fl_app.privacy.keyring import Keyring, RunKeys, drawn_run_keys, open_keyring
from fl_app.privacy.transcript import SentHashes, config_hash
from fl_app.transport.wire import (
    AGREED,
    COMMITTED,
    OPEN,
    PRIVATE,
    SHARES,
    Download,
    Upload,
    encode_upload,
    payload_bytes,
)
from strategies import fedcac
from strategies.kernels import aggregate, linkage, masks

N = 40


class Sites:
    """Sites of a run: the first one with files, the others with their keys for the run."""

    def __init__(self, directory: Path, n: int, config: RunConfig) -> None:
        paths, self.directory, self.config = site_keys(directory, n), directory, config
        self.path = paths[0]
        ring = open_keyring(str(paths[0]), 0, 0, n)
        rings = [Keyring(n, ring.public_of, i, keyring.read_private_key(path)) for i, path in enumerate(paths)]
        others = [drawn_run_keys(own, 1, config_hash(config)) for own in rings[1:]]
        self.announced = [self.first().keys.announced, *(keys.announced for keys in others)]
        self.sealed = others[0].seal({0: self.announced[0]})[0]
        self.others, self.attempt = others, 0

    def first(self) -> SiteKeys:
        """Return the first site's keys, as a process reads them for each message."""
        return SiteKeys.open(self.directory / "site", str(self.path), self.config, 0, 1)

    def asked(self, model: Model) -> Download:
        """Return the server's next request to client 0, in one sum of all clients."""
        n, self.attempt = len(self.announced), self.attempt + 1
        sent = SentHashes(self.config.private_left_out == "group").of(
            Download("train", self.attempt, 0, "benchmark", model), {}
        )
        said: dict[str, Scalar] = {
            "members": ",".join(map(str, range(n))),
            "keys": ",".join(self.announced),
            "sent": ",".join([sent] * n),
            "most": 0.0,
            "sealed": self.sealed,
            "sealer": 1,
            "sealer-keys": self.announced[1],
        }
        scalars = {f"{PRIVATE}-{name}": value for name, value in said.items()}
        return Download("train", self.attempt, 0, "benchmark", model, method=scalars)

    def question(self, survivors: int) -> Download:
        """Return the server's question to client 0 that opens the sum of the first clients in the last attempt."""
        experiment = Download(OPEN, 1, 0, "benchmark", NOTHING).experiment
        known = self.first().help_open(experiment, self.attempt, 0, range(survivors))
        label, announced, own = str(known["label"]), self.announced[0], [*range(survivors)]
        part = bytes(masking.SHARE)
        texts = [keyring.sealed(self._keys(j).share_key(announced, label, j, 0), part) for j in own]
        promised = ",".join(masking.commitment(part, j, 0) for j in own)
        said = {f"{PRIVATE}-members": ",".join(map(str, own)), SHARES: ",".join(texts), COMMITTED: promised}
        if survivors < len(self.announced):
            said[AGREED] = ",".join(self._keys(j).agree(label, own) for j in own)
        return Download(OPEN, self.attempt, 0, "benchmark", model=NOTHING, method=said)

    def _keys(self, i: int) -> RunKeys:
        return self.others[i - 1] if i else self.first().keys


def server(words: np.ndarray, bits: masks.Bits, d: int, k: int) -> None:
    """Do the private server's part of a round, with eight groups of five: sums, overlaps, the next partition, means."""
    totals = np.zeros((8, d + 1), np.uint64)
    for i in range(N):
        totals[i // 5] += words
    found = sketch.overlaps(masks.common_ones(bits), d, d, k)
    linkage.partition(found, fedcac.threshold(found, 0.5))
    limit = RunConfig.private_range
    for total in totals:
        masking.decode(total, d, N, N, limit)
    masking.decode(np.add.reduce(totals, axis=0, dtype=np.uint64), d, N, N, limit)


def plain(W: np.ndarray, uploads: np.ndarray, bits: masks.Bits) -> None:
    """Do the plain server's part: copy the rows, then FedCAC's step."""
    for i in range(N):
        W[i] = uploads[i]
    fedcac.personalize(W, bits, 50, beta=100, out=W)


def by_clients(n: int, model: Model) -> dict[str, float]:
    """Return the costs of a round of FedAvg for n clients in one sum: processor seconds, and bytes of texts and arrays."""
    with tempfile.TemporaryDirectory() as directory:
        sites = Sites(
            Path(directory), n, RunConfig(method="fedavg", private=True, private_left_out="client", num_clients=n)
        )
        upload, watch = Upload(model, num_examples=1), Laps()
        asked = sites.asked(model)
        sent = Masker.of(asked, sites.first(), 50, lambda samples: samples / 2**24).mask(upload)
        watch.lap("client: upload")
        questions = {0: sites.question(n)}
        watch.lap("")
        answers = {0: answered(questions[0], sites.first())}
        watch.lap("client: opening")
        # in the next attempt, as this one is opened
        Masker.of(sites.asked(model), sites.first(), 50, lambda samples: samples / 2**24).mask(upload)
        questions[1] = sites.question(n - 1)
        watch.lap("")
        answers[1] = answered(questions[1], sites.first())
        watch.lap("client: opening after a dropout")
        needed, own = threshold(n), [*range(n)]
        held = [*masking.split(bytes(masking.SEED), own, needed).values()][:needed]
        total, between = np.zeros(masking.length(model), np.uint64), {(i, n - 1): bytes(32) for i in own[:-1]}
        watch.lap("")
        seeds = masking.restore(own[:needed], [held] * n)
        masking.remove(total, [masking.own_mask(seed) for seed in seeds], own, [], {})
        watch.lap("server: opening")
        masking.remove(total, [], own[:-1], own[-1:], between)
        watch.lap("server: more for each dropout")
    length = payload_bytes(encode_upload(sent))
    return watch.seconds | {
        "bytes more in a download": _texts(asked.method),
        "bytes of an upload": length + _texts(sent.metrics),
        "bytes of a plain upload": float(payload_bytes(encode_upload(upload))),
        "bytes of an opening": _texts(questions[0].method) + _texts(answers[0]),
        "bytes of an opening after a dropout": _texts(questions[1].method) + _texts(answers[1]) + 88.0,
    }


class Laps:
    """Processor seconds by name, of the work since the last lap."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.process_time()

    def lap(self, name: str) -> None:
        """Note the seconds since the last lap. name: "" to count them nowhere."""
        if name:
            self.seconds[name] = time.process_time() - self._since
        self._since = time.process_time()


def _texts(scalars: Mapping[str, Scalar]) -> float:
    return float(sum(len(str(value)) for value in scalars.values()))


def main() -> None:
    """Measure, print, check."""
    options = arguments(__doc__).parse_args()
    scale, repeats = (28, 3) if options.short else (9, 7)
    sizes = [size // scale for size in RESNET18]
    d, config = sum(sizes), RunConfig(method="fedcac", private=True, num_clients=N)
    results: dict[str, Any] = {"d": d, "clients": N}
    uploads, bits = stack(N, d), random_masks(N, sizes, 0.5)
    model = Model(uploads[0], np.zeros(0, np.float32))
    upload = Upload(model, bits[0], num_examples=1)
    with tempfile.TemporaryDirectory() as directory:
        sites = Sites(Path(directory), N, config)

        def client() -> Upload:
            asked = sites.asked(model)
            return Masker.of(asked, sites.first(), 50, lambda samples: samples / 2**24).mask(upload)

        sent, words = client(), np.zeros(d + 1, np.uint64)
        # it stands for the mean over all clients, so its weight is theirs
        words[-1] = 2 ** int(masking.scale(N, 1.0))
        W, own, k = np.empty_like(uploads), bits[0], masks.popcount(bits[0])
        seconds = interleaved(
            {
                "client": client,
                "client: keys": sites.first,
                "client: merge": lambda: aggregate.merge(own, uploads[1], uploads[2]),
                "server": lambda: server(words, bits, d, k),
                "plain server": lambda: plain(W, uploads, bits),
            },
            repeats,
            time.process_time,
        )
    assert sent.mask is not None
    results["seconds"] = dict(seconds)
    by_length = seconds["client"] - seconds["client: keys"] + seconds["client: merge"]
    results["client seconds at d = 1.2 million"] = seconds["client: keys"] + by_length * 1.2e6 / d
    results["server / plain server"] = seconds["server"] / seconds["plain server"]
    results["upload / plain upload"] = payload_bytes(encode_upload(sent)) / payload_bytes(encode_upload(upload))
    numbers = (10, 100) if options.short else (10, 100, 1000)
    results["by clients"] = {str(n): by_clients(n, model) for n in numbers}
    finish(
        results,
        {"client seconds at d = 1.2 million": 0.6, "server / plain server": 1.5, "upload / plain upload": 2.0},
        options,
    )


if __name__ == "__main__":
    main()
