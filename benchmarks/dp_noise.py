"""The noise that a site's budget requires, by its number of training records: docs/privacy.md's table.

python -m benchmarks.dp_noise
"""

from __future__ import annotations

import math

from client_app.dp import Plan
from fl_app.config import RunConfig
from fl_app.errors import UserError

RECORDS, EPSILONS, ROUNDS, D = (100, 500, 2_000, 10_000, 50_000), (1.0, 3.0, 8.0), 50, 100_000


def cell(records: int, batch: int, epsilon: float) -> str:
    """Return the noise multiplier, and the norm of a step's noise in units of the largest possible gradient's norm."""
    config = RunConfig(dp_epsilon=epsilon, batch_size=batch, num_server_rounds=ROUNDS)
    try:
        noise = Plan.of(config, records, epochs=1).noise
    except UserError:
        return "refused"
    return f"{noise:.2f} ({noise * math.sqrt(D) / batch:.1f})"


def main() -> None:
    """Print the table."""
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
