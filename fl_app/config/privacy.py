"""The keys of the run configuration for privacy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_app.keys import AT_LEAST_ONE, NOT_NEGATIVE, Rule, key

# Above this, the fixed-point numbers of a million clients are coarse.
LARGEST_PRIVATE_RANGE = 2.0**20


@dataclass(frozen=True)
class PrivacyKeys:
    """Keys that limit the information about single clients and single records."""

    # privacy
    private: bool = key(
        False,
        "The server receives sums of at least three clients' models, and pairwise overlaps of masks, but no single client's "
        "model or mask ([what this hides](privacy.md)). Some methods do not support it. `report-class-counts` is off.",
        compared=False,
        checked=True,
    )
    private_sketch: int = key(
        0,
        "Bits of a mask's sketch in a private run; 0: one per parameter, and overlaps are exact.",
        NOT_NEGATIVE,
        compared=False,
    )
    private_range: float = key(
        8.0,
        "Largest absolute weight that a client can send in a private run; BatchNorm statistics may be 64 times larger. Larger "
        "values are clipped; the log names such clients at the end.",
        Rule(low=0, high=LARGEST_PRIVATE_RANGE, low_open=True),
        compared=False,
    )
    private_regroup: int = key(
        5,
        "Rounds for which a private run keeps its clusters of clients.",
        AT_LEAST_ONE,
        compared=False,
        counts_rounds=True,
    )
    private_left_out: Literal["client", "group"] = key(
        "group",
        "Clients left out of a private run's sums when a client is away. `group`: an aggregation group with this client, of at "
        "least three ([what this hides](privacy.md#aggregation-groups)). `client`: this client; the difference between rounds "
        "roughly reveals its model.",
        compared=False,
    )
    report_accuracy: bool = key(
        True,
        "Clients send the server their losses and metrics. `false`: they send neither.",
        compared=False,
    )
    dp_epsilon: float = key(
        0.0,
        "Differential privacy of each site's training records, over all rounds together: only noisy steps read the records "
        "([what this means](privacy.md#records)). `report-class-counts` is off. 0: none.",
        NOT_NEGATIVE,
        compared=False,
        checked=True,
        schedule_dependent=True,
    )
    dp_delta: float = key(
        1e-5,
        "Probability that `dp-epsilon` does not hold. It must be below 1 / n for a site's n training samples.",
        Rule(0, 1, True, True),
        compared=False,
    )
    dp_clip: float = key(
        1.0,
        "Norm to which each training record's gradient is clipped. The noise is proportional to it.",
        Rule(low=1e-6),
        compared=False,
    )
    report_class_counts: bool = key(
        True,
        "Clients send the server their numbers of training samples per class, for `clients.json` and the report. This reveals "
        "their label distributions.",
        compared=False,
    )
