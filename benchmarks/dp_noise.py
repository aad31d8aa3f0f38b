"""The noise that a site's budget requires, by its number of training records, and the time to draw it.

python -m benchmarks.dp_noise           # studies/privacy.md's table
python -m benchmarks.dp_noise --cost    # seconds for the noise of one step, beside PyTorch's own generator
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from benchmarks.measure import arguments, finish, interleaved
from client_app.dp import Plan
from client_app.noise import noisy
from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.privacy.secure_random import SecureRandom

RECORDS, EPSILONS, ROUNDS, D = (100, 500, 2_000, 10_000, 50_000), (1.0, 3.0, 8.0), 50, 100_000


def cell(records: int, batch: int, epsilon: float) -> str:
    """Return the noise multiplier, and the norm of a step's noise in units of the largest possible gradient's norm."""
    config = RunConfig(dp_epsilon=epsilon, batch_size=batch, num_server_rounds=ROUNDS)
    try:
        noise = Plan.of(config, records, epochs=1).noise
    except UserError:
        return "refused"
    return f"{noise:.2f} ({noise * math.sqrt(D) / batch:.1f})"


RATIO = "secure noise / PyTorch's"


def cost(d: int, repeats: int) -> dict[str, Any]:
    """Measure the noisy sum of d gradients: the secure one, and one with PyTorch's generator as Opacus draws it."""
    torch.set_num_threads(1)
    total, generator, stream = torch.zeros(d), torch.Generator().manual_seed(0), SecureRandom.of_secret()
    seconds = interleaved(
        {
            "secure": lambda: noisy(total, 1.0, stream),
            "pytorch": lambda: total + torch.normal(0.0, 1.0, total.shape, generator=generator),
        },
        repeats,
        # of one thread: other work on the machine does not count
        time.process_time,
    )
    return {"d": d, "seconds": seconds, RATIO: seconds["secure"] / seconds["pytorch"]}


def main() -> None:
    """Print the table, or with --cost or --short the time that noise takes."""
    parser = arguments(__doc__)
    parser.add_argument("--cost", action="store_true", help="measure one step's noise for 11 million parameters")
    options = parser.parse_args()
    if options.cost or options.short:
        finish(cost(1_000_000 if options.short else 11_000_000, 5 if options.short else 15), {RATIO: 2.0}, options)
    else:
        table()


def table() -> None:
    """Print the noise by records and epsilon."""
    print(
        f"{ROUNDS} rounds of one epoch, dp-delta 1e-5: noise multiplier (norm of the noise in largest gradients, d = {D:,})\n"
    )
    print("| records of a site | batch | " + " | ".join(f"epsilon {e:g}" for e in EPSILONS) + " |")
    print("|---|---|" + "---|" * len(EPSILONS))
    for records in RECORDS:
        batch = max(20, records // 100)
        print(f"| {records:,} | {batch} | " + " | ".join(cell(records, batch, e) for e in EPSILONS) + " |")


if __name__ == "__main__":
    main()
