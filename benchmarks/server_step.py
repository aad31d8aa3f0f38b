"""The server's step beside reading and writing the round's uploads once: methods that compare all clients with all.

python -m benchmarks.server_step [--short] [--clients 1000] [--parameters 1200000] [--methods fedcac,feddac,...]

Uploads lie in memory-mapped files in `--directory`, as they do beyond `server-memory-limit`. Rows are random vectors
about a common one, masks are random and of equal size, layers have a quarter of the parameters each. FedAMP's sigma is
the mean squared distance, so all weights are normal numbers: its most expensive case. `neighbours` at 5 where the
method has the key is a second case. Every step is measured once. Its memory is the most that the process holds beside
the mapped files.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.kernels import PAKE, random_masks
from benchmarks.measure import arguments, finish
from fl_app.server import client_arrays
from strategies import fedcac, feddac, fedpake
from strategies.baselines import fedamp, feddwa
from strategies.kernels import aggregate

LAYERS = 4
NEIGHBOURS = 5


class Uploads:
    """A round's uploads: W and a second stack, float32 [N, d] and mapped; masks, uint8 [N, ceil(d/8)]."""

    def __init__(self, clients: int, parameters: int, directory: Path) -> None:
        self.sizes = [parameters // LAYERS] * (LAYERS - 1)
        self.sizes.append(parameters - sum(self.sizes))
        draw = np.random.default_rng(0)
        self.common = draw.standard_normal(parameters, dtype=np.float32) * np.float32(0.05)
        self.W, self.other = (client_arrays.stack((clients, parameters), np.dtype("<f4"), directory) for _ in range(2))
        self.bits = random_masks(clients, self.sizes, 0.5)
        self.fill()

    def fill(self) -> None:
        """Draw the rows of W and of the second stack. A step overwrites them."""
        draw = np.random.default_rng(1)
        for stack in (self.W, self.other):
            for row in stack:
                np.add(self.common, draw.standard_normal(len(row), dtype=np.float32) * np.float32(0.01), out=row)

    def read_and_write(self) -> None:
        """Read all rows and write them."""
        for row in self.W:
            np.add(row, np.float32(0), out=row)


def fedcac_step(uploads: Uploads, neighbours: int) -> None:
    """Compute FedCAC's step in place, with all clients as collaborators or with some."""
    overlap = fedcac.mask_overlap(uploads.W, uploads.bits)
    chosen = fedcac.collaborators(overlap, 1, beta=100)
    if neighbours:
        chosen &= fedcac.top_k_similar(overlap, neighbours)
    fedcac.personalize(uploads.W, uploads.bits, 1, beta=100, chosen=chosen, out=uploads.W)


def feddac_step(uploads: Uploads, neighbours: int) -> None:
    """Compute FedDAC's step in place."""
    feddac.personalize(uploads.W, uploads.bits, 1, alpha=200, neighbours=neighbours or 5, out=uploads.W)


def fedamp_step(uploads: Uploads, neighbours: int) -> None:
    """Compute FedAMP's step; the second stack takes the cloud models."""
    sigma = 2 * 0.01**2 * uploads.W.shape[1]
    weights = fedamp.attention(uploads.W, sigma=sigma, alpha=sigma / len(uploads.W), neighbours=neighbours)
    aggregate.mix(uploads.W, weights, out=uploads.other)


def feddwa_step(uploads: Uploads, neighbours: int) -> None:
    """Compute FedDWA's step in place; the second stack holds the guidance."""
    weights = feddwa.neighbour_weights(uploads.other, uploads.W, neighbours or 5)
    aggregate.mix(uploads.W, weights, out=uploads.W)


def fedpake_step(uploads: Uploads, neighbours: int) -> None:
    """Compute FedPake's step, which has no neighbours."""
    fedpake.aggregate(uploads.W, uploads.sizes, **PAKE)


STEPS: Mapping[str, Callable[[Uploads, int], None]] = {
    "fedcac": fedcac_step,
    "feddac": feddac_step,
    "fedamp": fedamp_step,
    "feddwa": feddwa_step,
    "fedpake": fedpake_step,
}
LIMITED = ("fedcac", "fedamp")


def measured(case: Callable[[], None]) -> tuple[float, float, float]:
    """Return the wall seconds of a call, its CPU seconds, and the most bytes that the process held beside its maps."""
    process, most, done = psutil.Process(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.05):
            memory = process.memory_info()
            most = max(most, memory.rss - memory.shared)

    watcher = threading.Thread(target=watch)
    watcher.start()
    wall, cpu = time.perf_counter(), time.process_time()
    case()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    done.set()
    watcher.join()
    return wall, cpu, float(most)


def main() -> None:
    """Measure, print, compare."""
    parser = arguments(__doc__)
    parser.add_argument("--clients", type=int, default=0, help="default 1000, with --short 100")
    parser.add_argument("--parameters", type=int, default=0, help="default 1,200,000, with --short 20,000")
    parser.add_argument("--methods", default=",".join(STEPS))
    parser.add_argument("--directory", type=Path, help="has room for two stacks; the system's temporary one by default")
    options = parser.parse_args()
    clients = options.clients or (100 if options.short else 1000)
    parameters = options.parameters or (20_000 if options.short else 1_200_000)
    cases = [(name, 0) for name in options.methods.split(",")]
    cases += [(name, NEIGHBOURS) for name, _ in cases if name in LIMITED]
    results: dict[str, Any] = {"clients": clients, "parameters": parameters}
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        uploads = Uploads(clients, parameters, Path(directory))
        results["stack, GB"] = uploads.W.nbytes / 1e9
        for name, neighbours in cases:
            uploads.fill()
            base, _, _ = measured(uploads.read_and_write)
            wall, cpu, most = measured(partial(STEPS[name], uploads, neighbours))
            case = f"{name}, {neighbours} neighbours" if neighbours else name
            results[case] = {"seconds": wall, "CPU seconds": cpu, "reading and writing": base, "memory, GB": most / 1e9}
            results[f"{case} / reading and writing the stack"] = wall / base
            print(case, results[case], flush=True)
    finish(results, {}, options)


if __name__ == "__main__":
    main()
