"""The cost of a private round of FedCAC beside a plain one: a client's work, the server's step, bytes.

python -m benchmarks.privacy            # d = 1.2 million, as resnet8
python -m benchmarks.privacy --short    # d = 0.4 million

There are 40 clients. Times are the processor's.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from benchmarks.kernels import RESNET18, random_masks, stack
from benchmarks.measure import arguments, finish, interleaved
from client_app.private import Masker
from client_app.run_keys import SiteKeys
from fl_app.config import RunConfig
from fl_app.keys import Scalar
from fl_app.layout import Model
from fl_app.privacy import keyring, masking, sketch
from fl_app.privacy.keyring import PEERS, Keyring, drawn_run_keys, open_keyring
from fl_app.privacy.transcript import SentHashes, config_hash
from fl_app.wire import PRIVATE, Download, Upload, payload_bytes, upload_message
from strategies import aggregate, fedcac, linkage, masks

N = 40


def site_keys(directory: Path, n: int) -> list[Path]:
    """Make the keys of n sites. Return their files; the list is beside them."""
    lines, paths = [], []
    for i in range(n):
        path = directory / f"{i}.x25519"
        path.write_bytes(keyring.make_private_key())
        path.chmod(0o600)
        node = ec.generate_private_key(ec.SECP384R1())
        public = (
            node.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
        )
        lines.append(f"{i} {public} {keyring.KEY_TYPE} {keyring.statement(keyring.read_private_key(path), node)}\n")
        paths.append(path)
    (directory / PEERS).write_text("".join(lines))
    return paths


class Sites:
    """Sites of a run: the first one with files, the others with their keys for the run."""

    def __init__(self, directory: Path, n: int, config: RunConfig) -> None:
        paths, self.directory, self.config = site_keys(directory, n), directory, config
        self.path = paths[0]
        ring = open_keyring(str(paths[0]), 0, 0, n)
        rings = [Keyring(i, n, keyring.read_private_key(path), ring.public_of) for i, path in enumerate(paths)]
        others = [drawn_run_keys(own, 1, config_hash(config)) for own in rings[1:]]
        self.announced = [self.first().keys.announced, *(keys.announced for keys in others)]
        self.sealed = others[0].seal({0: self.announced[0]})[0]
        self.attempt = 0

    def first(self) -> SiteKeys:
        """Return the first site's keys, as a process reads them for each message."""
        return SiteKeys.open(self.directory / "site", str(self.path), self.config, 0, 1)

    def asked(self, model: Model) -> Download:
        """Return the server's next request to client 0, in one sum of all clients."""
        n, self.attempt = len(self.announced), self.attempt + 1
        sent = SentHashes().of(Download("train", self.attempt, 0, "benchmark", model), {})
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


def by_clients(numbers: Sequence[int], model: Model) -> dict[str, dict[str, float]]:
    """Return, by the number of clients in a sum, a client's additional seconds and the bytes that it gets and sends."""
    found = {}
    for n in numbers:
        with tempfile.TemporaryDirectory() as directory:
            sites = Sites(Path(directory), n, RunConfig(method="fedavg", private=True, num_clients=n))
            upload = Upload(model, num_examples=1)
            asked = sites.asked(model)
            scalars = sum(len(str(value)) for value in asked.method.values())
            started = time.process_time()
            sent = Masker.of(asked, sites.config, sites.first(), 50, lambda samples: samples / 2**24).mask(upload)
            seconds = time.process_time() - started
            found[str(n)] = {
                "seconds": seconds,
                "bytes more in a download": float(scalars),
                "bytes of an upload": float(payload_bytes(upload_message(sent))),
                "bytes of a plain upload": float(payload_bytes(upload_message(upload))),
            }
    return found


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
            return Masker.of(asked, config, sites.first(), 50, lambda samples: samples / 2**24).mask(upload)

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
    results["upload / plain upload"] = payload_bytes(upload_message(sent)) / payload_bytes(upload_message(upload))
    results["by clients"] = by_clients((10, 100) if options.short else (10, 100, 1000), model)
    finish(
        results,
        {"client seconds at d = 1.2 million": 0.6, "server / plain server": 1.5, "upload / plain upload": 2.0},
        options,
    )


if __name__ == "__main__":
    main()
