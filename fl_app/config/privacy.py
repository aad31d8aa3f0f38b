"""The keys of the run configuration that say what others may learn of a site."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_app.keys import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, Rule, key

# Beyond it the fixed point of 40 clients has steps of 1/32 and more.
LARGEST_PRIVATE_RANGE = 2.0**20


@dataclass(frozen=True)
class PrivacyKeys:
    """What the server learns of single clients, and anybody of single records."""

    # privacy
    private: bool = key(
        False,
        "The server is sent sums of at least three clients' models and, of masks, who agrees with whom: no client's own "
        "([what that hides](privacy.md)). Not for every method; `report-class-counts` is off.",
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
        "Largest absolute weight that a client can send in a private run; of BatchNorm statistics 64 times as much. A client "
        "with a larger one fails by name. A wider range has a coarser fixed point.",
        Rule(low=0, high=LARGEST_PRIVATE_RANGE, low_open=True),
        compared=False,
    )
    private_regroup: int = key(
        5, "Rounds for which the groups of a private run are kept.", AT_LEAST_ONE, compared=False, counts_rounds=True
    )
    private_absent: Literal["alone", "company"] = key(
        "alone",
        "Who is left out of a private run's sums when a client is away: it alone, and its model can be roughly told "
        "from the difference, or two others with it ([what that hides](privacy.md#companies)).",
        compared=False,
    )
    report_accuracy: bool = key(
        True,
        "Clients tell the server their losses and metrics. `false`: nothing of a run is known but its models.",
        compared=False,
    )
    dp_epsilon: float = key(
        0.0,
        "Differential privacy of each site's training records, over all rounds together: they are looked at by noisy steps "
        "alone ([what that means](privacy.md#records)); `report-class-counts` is off. 0: none.",
        NOT_NEGATIVE,
        compared=False,
        checked=True,
        spans_run=True,
    )
    dp_delta: float = key(
        1e-5,
        "Chance with which `dp-epsilon` may not hold; below one over a site's training samples.",
        Rule(0, 1, True, True),
        compared=False,
    )
    dp_clip: float = key(
        1.0,
        "Norm to which each training record's gradient is cut; noise is in proportion to it.",
        POSITIVE,
        compared=False,
    )
    report_class_counts: bool = key(
        True,
        "Clients tell the server how many training samples of each class they have, for `clients.json` and the report; it "
        "reveals their label distributions.",
        compared=False,
    )
