"""FedAvg or FedPer, a round's clients those of the stored logs of FedOBP's authors.

FL-bench draws them with Python's own generator, seeded 42: rounds 10 and 100 of the log of FedAvg have exactly these clients.
"""

import random
from dataclasses import dataclass
from typing import Literal

from fl_app.keys import key
from fl_app.layout import Layout
from strategies.base import LocalUpdate, Method, all_but_classifier, all_tensors
from strategies.baselines.fedavg import FedAvg

SEED = 42


@dataclass(frozen=True)
class Params:
    """Which of the two."""

    personal: Literal["nothing", "classifier"] = key(
        "nothing", "What stays with a client: `nothing`, as in FedAvg, or FedPer's `classifier`."
    )


class Replayed(FedAvg[Params]):
    """FedAvg's server half."""

    def sample(self, client_ids: list[int], round: int) -> list[int]:
        """Draw for all rounds up to this one, of the clients connected now."""
        draw = random.Random(SEED)
        count = self.config.cohort_size(len(client_ids))
        chosen = [draw.sample(client_ids, count) for _ in range(round)]
        return sorted(chosen[-1])


def shared(layout: Layout, params: Params) -> frozenset[str]:
    """Return the names of what travels."""
    return (all_tensors if params.personal == "nothing" else all_but_classifier)(layout, params)


METHOD = Method("replayed", Params, Replayed, LocalUpdate[Params], shared)
