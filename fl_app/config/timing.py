"""The keys of the run configuration for rounds that do not wait for every client, and for simulated time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fl_app.keys import BELOW_ONE, NOT_NEGATIVE, POSITIVE, POSITIVE_RATIO, File, key

SIMULATED = ("speeds", "availability", "day-length", "drop-rate")
"""Keys that decide who answers when in a simulation."""

# largest SIGMA of `lognormal:SIGMA`: speeds that differ by a factor of 10^4 for each standard deviation
MOST_SIGMA = 10.0
# seconds of a simulated day if `day-length` does not say
_DAY = 86400.0
SPEEDS_FILE, LOGNORMAL = "file:", "lognormal:"


@dataclass(frozen=True)
class TimingKeys:
    """Keys of a round's end, of late uploads, and of the clients' speeds in simulated time."""

    # time
    quorum: float = key(
        1.0,
        "The round closes when this fraction of its clients has answered, without those that failed ([how](time.md)). The others "
        "are late, and late is not failed. A client that still works is not sampled.",
        POSITIVE_RATIO,
        compared=False,
    )
    round_deadline: float = key(
        0.0,
        "Seconds after which a round closes without its `quorum`, if at least `min-results` of its clients have answered. 0: none.",
        NOT_NEGATIVE,
        compared=False,
    )
    staleness: int = key(
        0,
        "A late upload is used by the round in which it arrives, if that is at most this many rounds after its own. 0: it is "
        "thrown away by name.",
        NOT_NEGATIVE,
        compared=False,
    )
    staleness_decay: float = key(
        1.0, "Factor on a late upload's weight for each round of its age.", POSITIVE_RATIO, compared=False
    )
    staleness_rule: Literal["decay", "fedbuff"] = key(
        "decay",
        "Use of a late upload ([each](time.md#late-uploads)).",
        compared=False,
    )
    speeds: str = key(
        "none",
        "Clients' speeds in simulated time: `none`, `lognormal:SIGMA` (drawn by `seed`), or `file:speeds.csv` "
        "([columns](time.md#speeds)). A simulation with them records `virtual-seconds`, and waits for nobody.",
        compared=False,
        path=File(after_word=True, at_site=False),
    )
    availability: float = key(
        1.0,
        "Part of each simulated day in which a client is there; when its day begins is drawn by `seed`. It needs `speeds`.",
        POSITIVE_RATIO,
        compared=False,
    )
    day_length: float = key(_DAY, "Seconds of a simulated day. It needs `speeds`.", POSITIVE, compared=False)
    drop_rate: float = key(
        0.0,
        "Probability that a client fails while it works on a round of a simulation. It needs `speeds`.",
        BELOW_ONE,
        compared=False,
    )
    replay: str = key(
        "",
        "Run folder whose arrivals are repeated in a simulation; set by `corolla run --replay`.",
        compared=False,
        path=File(at_site=False),
    )

    @property
    def closes_early(self) -> bool:
        """Whether a round may close before all of its clients have answered."""
        return self.quorum < 1 or self.round_deadline > 0

    @property
    def records_arrivals(self) -> bool:
        """Whether the run writes who answered when."""
        return (self.closes_early or self.is_timed) and not self.replay

    @property
    def is_timed(self) -> bool:
        """Whether the run has simulated time."""
        return self.speeds != "none"


def sigma_of(speeds: str) -> float | None:
    """Return SIGMA of `lognormal:SIGMA`; None for text of another form."""
    found = re.fullmatch(rf"{LOGNORMAL}(\d+(?:\.\d*)?)", speeds, re.ASCII)
    return float(found[1]) if found and float(found[1]) <= MOST_SIGMA else None


def check_timing(values: Mapping[str, Any], refuse: Callable[[str, str, object], None]) -> None:
    """Refuse every value of these keys that is malformed, or contradicts another key's value. refuse: takes key, rule and value."""
    speeds = str(values["speeds"])
    path = speeds.removeprefix(SPEEDS_FILE) if speeds.startswith(SPEEDS_FILE) else ""
    if path and not Path(path).is_absolute():
        refuse("speeds", "must be an absolute path", path)
    elif not path and speeds != "none" and sigma_of(speeds) is None:
        refuse("speeds", f"must be none, {LOGNORMAL}SIGMA (at most {MOST_SIGMA:g}) or {SPEEDS_FILE}speeds.csv", speeds)
    if path and values["availability"] != 1:
        rule = "the file of speeds sets the clients' hours (from, until) or none; leave it at 1"
        refuse("availability", rule, values["availability"])
    early = values["quorum"] < 1 or values["round-deadline"] > 0
    if values["quorum"] < values["min-results"]:
        refuse("quorum", f"must be at least min-results ({values['min-results']:g})", values["quorum"])
    if values["staleness"] and not early:
        refuse("staleness", "nobody is late without quorum below 1 or a round-deadline; set one", values["staleness"])
    if values["private"] and early:
        rule = "a private run's sums need every client that was asked, so no round can close early; leave it at its default"
        for name, none in (("quorum", 1), ("round-deadline", 0), ("staleness", 0)):
            if values[name] != none:
                refuse(name, rule, values[name])
    for name, default in (("availability", 1.0), ("day-length", _DAY), ("drop-rate", 0.0)):
        if values[name] != default and speeds == "none":
            refuse(name, "it is about simulated time, which needs speeds", values[name])
