"""The cost of a private round of FedCAC beside a plain one: a client's work, the server's step, bytes.

python -m benchmarks.privacy            # d = 1.2 million, as resnet8
python -m benchmarks.privacy --short    # d = 0.4 million

There are 40 clients. Times are the processor's.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from benchmarks.kernels import RESNET18, random_masks, stack
from benchmarks.measure import arguments, finish, interleaved
from client_app.private import Masker, properties
from fl_app.config import RunConfig
from fl_app.keys import Scalar
from fl_app.layout import NOTHING, Model
from fl_app.privacy import keyring, masking, sketch
from fl_app.privacy.keyring import PEERS, Keyring, open_keyring
from fl_app.wire import PRIVATE, SUM, Download, Upload, payload_bytes, upload_message
from strategies import aggregate, fedcac, linkage, masks

N = 40


def site_keys(directory: Path) -> Path:
    """Make the keys of N sites. Return the first site's key file; the list is beside it."""
    lines = []
    for i in range(N):
        path = directory / f"{i}.x25519"
        path.write_bytes(keyring.make_private_key())
        path.chmod(0o600)
        node = ec.generate_private_key(ec.SECP384R1())
        public = (
            node.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
        )
        lines.append(f"{i} {public} {keyring.KEY_TYPE} {keyring.statement(keyring.read_private_key(path), node)}\n")
    (directory / PEERS).write_text("".join(lines))
    return directory / "0.x25519"


def asked(keys: Keyring) -> Download:
    """Return the server's request to client 0, in one group of all clients."""
    sealed = str(properties(keys)[f"{PRIVATE}-sealed"]).split(",")[0]
    said: dict[str, Scalar] = {
        "members": ",".join(map(str, range(N))),
        "weight": 1.0,
        "clients": N,
        "sealed": sealed,
        "sealer": 0,
    }
    return Download(
        "train", 1, 0, "benchmark", NOTHING, method={f"{PRIVATE}-{name}": value for name, value in said.items()}
    )


def server(words: np.ndarray, bits: masks.Bits, d: int, k: int) -> None:
    """Do the private server's part of a round, with eight groups of five: sums, overlaps, the next partition, means."""
    totals = np.zeros((8, d), np.uint32)
    for i in range(N):
        totals[i // 5] += words
    found = sketch.overlaps(masks.common_ones(bits), d, d, k)
    linkage.partition(found, fedcac.threshold(found, 0.5))
    limit = RunConfig.private_range
    for total in totals:
        masking.decode(total, 5.0, N, limit)
    masking.decode(np.add.reduce(totals, axis=0, dtype=np.uint32), float(N), N, limit)


def plain(W: np.ndarray, uploads: np.ndarray, bits: masks.Bits) -> None:
    """Do the plain server's part: copy the rows, then FedCAC's step."""
    for i in range(N):
        W[i] = uploads[i]
    fedcac.personalize(W, bits, 50, beta=100, out=W)


def main() -> None:
    """Measure, print, check."""
    options = arguments(__doc__).parse_args()
    scale, repeats = (28, 3) if options.short else (9, 7)
    sizes = [size // scale for size in RESNET18]
    d, config = sum(sizes), RunConfig(method="fedcac", private=True)
    results: dict[str, Any] = {"d": d, "clients": N}
    uploads, bits = stack(N, d), random_masks(N, sizes, 0.5)
    upload = Upload(Model(uploads[0], np.zeros(0, np.float32)), bits[0], num_examples=1)
    with tempfile.TemporaryDirectory() as directory:
        path = site_keys(Path(directory))
        download = asked(open_keyring(str(path), 0, 0, N))

        def client() -> Upload:
            return Masker.of(download, config, open_keyring(str(path), 0, 0, N)).mask(upload)

        sent, words = client(), np.zeros(d, np.uint32)
        W, own, k = np.empty_like(uploads), bits[0], masks.popcount(bits[0])
        seconds = interleaved(
            {
                "client": client,
                "client: keys": lambda: open_keyring(str(path), 0, 0, N),
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
    results["bytes more in an upload"] = payload_bytes(upload_message(sent)) - payload_bytes(upload_message(upload))
    results["upload"] = {SUM: sent.extras[SUM].nbytes, "mask": sent.mask.nbytes}
    finish(
        results,
        {"client seconds at d = 1.2 million": 0.3, "server / plain server": 1.5, "bytes more in an upload": 0},
        options,
    )


if __name__ == "__main__":
    main()
