"""Server steps and client scoring beside the memory's own speed: ratios within one run, medians of repeats in turns.

python -m benchmarks.kernels            # d = 11.2 million, as ResNet-18
python -m benchmarks.kernels --short    # d = 3.7 million; beside plain NumPy instead of a copy
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import arguments, finish, interleaved, peak_bytes
from strategies import fedcac, feddac, fedobp, fedpake
from strategies.kernels import masks, scores
from strategies.kernels.aggregate import Stack

# elements per layer of a ResNet-18 for 3x32x32 and 10 classes; the sizes below are scaled from these
RESNET18 = (1728, 36864, 73728, 147456, 294912, 589824, 1179648, 2359296, 2359296, 2359296, 1797594)
PAKE: dict[str, Any] = {
    "threshold": 0.2,
    "num_micro": 4,
    "num_macro": 4,
    "delta": 0.2,
    "delta_meaning": "similarity",
    "divisor": "found",
}


def stack(n: int, d: int, seed: int = 0) -> Stack:
    """Return rows that differ a little, as clients' models do."""
    rng = np.random.default_rng(seed)
    base = rng.standard_normal(d, dtype=np.float32) * np.float32(0.05)
    out = np.empty((n, d), np.float32)
    for row in out:
        np.add(base, rng.standard_normal(d, dtype=np.float32) * np.float32(0.01), out=row)
    return out


def random_masks(n: int, sizes: list[int], ratio: float) -> masks.Bits:
    """Return random critical masks with the same number of ones."""
    rng = np.random.default_rng(1)
    return np.stack([masks.pack(masks.top_k(rng.random(sum(sizes), dtype=np.float32), sizes, ratio)) for _ in range(n)])


def plain(W: Stack, bits: masks.Bits, round: int, beta: int) -> NDArray[np.float32]:
    """Compute FedCAC's equations in straightforward NumPy. Return personalized vectors, float32 [N, d]."""
    critical = np.unpackbits(bits, axis=1, count=W.shape[1], bitorder="little").view(np.bool_)
    chosen = np.eye(len(W), dtype=bool)
    if round <= beta:
        ones = critical.astype(np.float32)
        chosen |= fedcac.collaborators((ones @ ones.T).astype(np.float64) / ones[0].sum(), round, beta)
    groups = (chosen / chosen.sum(axis=1, keepdims=True)).astype(np.float32) @ W
    mixed: NDArray[np.float32] = np.where(critical, groups, W.mean(axis=0))
    return mixed


def main() -> None:
    """Measure, print, check."""
    options = arguments(__doc__).parse_args()
    scale, repeats = (3, 5) if options.short else (1, 5)
    sizes = [size // scale for size in RESNET18]
    d = sum(sizes)
    results: dict[str, Any] = {"d": d}

    W, bits = stack(40, d), random_masks(40, sizes, 0.5)
    spread = {
        "copy": lambda: W.copy(),
        "fedcac-early": lambda: fedcac.personalize(W, bits, 1, beta=100),
        "fedcac-late": lambda: fedcac.personalize(W, bits, 101, beta=100),
        "feddac": lambda: feddac.personalize(W, bits, 1, alpha=200),
    }
    # at full size it needs 12 GB
    if options.short:
        spread["plain"] = lambda: plain(W, bits, 1, beta=100)
    seconds = interleaved(spread, repeats, short=options.short)
    results["seconds"] = dict(seconds)
    results["fedcac / copy of W"] = max(seconds["fedcac-early"], seconds["fedcac-late"]) / seconds["copy"]
    if options.short:
        results["fedcac / plain NumPy"] = seconds["fedcac-early"] / seconds["plain"]
    results["fedcac peak memory / W"] = peak_bytes(spread["fedcac-early"]) / W.nbytes
    results["feddac / fedcac"] = seconds["feddac"] / seconds["fedcac-early"]
    spread.clear()
    W = stack(20, d)

    cases = {"read": lambda: W.sum(), "fedpake": lambda: fedpake.aggregate(W, sizes, **PAKE)}
    seconds = interleaved(cases, repeats, short=options.short)
    results["seconds"] |= seconds
    results["fedpake / read of W"] = seconds["fedpake"] / seconds["read"]

    before, after = W[0].copy(), W[1].copy()
    seconds = interleaved(
        {
            "scoring": lambda: masks.pack(masks.top_k(scores.sensitivity(before, after), sizes, 0.5)),
            "fedobp-mask": lambda: fedobp.personal_mask(before, after, sizes, quantile=0.9999),
        },
        repeats,
        short=options.short,
    )
    results["seconds"] |= seconds
    results["scoring seconds at d = 11.2 million"] = seconds["scoring"] * 11_199_642 / d
    results["fedobp mask seconds at d = 11.2 million"] = seconds["fedobp-mask"] * 11_199_642 / d

    curve = {}
    small = [size // 10 for size in RESNET18]
    for n in (10, 20, 40, 80) if options.short else (10, 20, 40, 80, 160, 320):
        U, own = stack(n, sum(small)), random_masks(n, small, 0.5)
        cases = {"copy": U.copy, "fedcac": partial(fedcac.personalize, U, own, 1, beta=100)}
        at = interleaved(cases, repeats, short=options.short)
        curve[n] = {"seconds": at["fedcac"], "per copy": at["fedcac"] / at["copy"]}
    results[f"fedcac by number of clients, d = {sum(small)}"] = curve

    # Machines differ threefold in copying speed over computing speed, so a short run, for any machine, leaves it out.
    of_fedcac = {"fedcac / plain NumPy": 0.5} if options.short else {"fedcac / copy of W": 2.5}
    targets = of_fedcac | {
        "fedcac peak memory / W": 1.2,
        "feddac / fedcac": 2.0,
        "fedpake / read of W": 12.0,
        "scoring seconds at d = 11.2 million": 0.35,
        "fedobp mask seconds at d = 11.2 million": 0.5,
    }
    finish(results, targets, options)


if __name__ == "__main__":
    main()
