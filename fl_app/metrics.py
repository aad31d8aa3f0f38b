"""The metrics of a run: one table of what clients report of a round and of an evaluation.

A row says how a number is called, in which range it lies, what a round's record makes of all clients' numbers, and how trackers
and reports show it. Checks of replies, `metrics.jsonl`, CSV files, trackers and the report's pictures follow these rows. A method
declares further rows for its own numbers (`LocalUpdate.reports`); a task declares what it measures (`Task.metrics`).
Nothing heavy is imported: the command and every client process load this file.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fl_app.errors import plain
from fl_app.figures import Scalars

log = logging.getLogger("corolla")

# The largest number that a client may report: sums of such numbers stay finite.
MAX_NUMBER = 1e30
# How far beyond a metric's range rounding takes it: a part of the bound, or of 1. A mean of a million float32 stays within.
ROUNDING = 1e-4
FINETUNED, POOLED, UNSEEN = "-finetuned", "-pooled", "unseen"
# Of the digest of all personalized models. 1, of runs that record none, is over parameters alone; 2 is over BatchNorm statistics
# and other buffers, too.
DIGEST_VERSION = 2
EPSILON = "dp-epsilon"

# A round's record, as a line of metrics.jsonl holds it.
Record = dict[str, Any]

Reduction = Literal["none", "mean", "mean-and-pooled", "max", "sum"]
"""What a record makes of the clients' numbers.

`mean`: every client counts once. `mean-and-pooled`: also, as NAME-pooled, the metric over all clients' test samples, where it
follows from the clients' own (Metric.pooling).
`none`: the number stands in the clients' entries alone.
"""


@dataclass(frozen=True)
class Metric:
    """A number that clients report: its name, which direction is better, and its range.

    ratio: in [0, 1], shown in per cent. low, high: the range of any other; None: no bound. reduce: see Reduction. tracked: what
    trackers call it, of a metric of every method; a method's own are method/NAME. picture: title of the report's picture of it;
    empty: it has none, or one of another kind. unit: what the picture's axis says. pooling: how the metric over all samples follows
    from the clients' metrics and numbers of samples. `mean`: it is a mean over samples (accuracy); `root-mean-square`: the root of
    one (RMSE); empty: it does not follow (AUC, F1, R2), and there is none.
    """

    name: str
    higher_is_better: bool = True
    ratio: bool = False
    low: float | None = None
    high: float | None = None
    _: dataclasses.KW_ONLY
    reduce: Reduction = "mean"
    tracked: str = ""
    picture: str = ""
    unit: str = ""
    # not compared: runs of earlier versions do not record it
    pooling: Literal["mean", "root-mean-square", ""] = dataclasses.field(default="", compare=False)

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest number it can be."""
        if self.ratio:
            return 0.0, 1.0
        return -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high

    @property
    def record_names(self) -> frozenset[str]:
        """Names of what a round's record or its clients' entries hold of it."""
        return frozenset({self.name, self.name + POOLED} if self.is_pooled else {self.name})

    @property
    def is_pooled(self) -> bool:
        """Whether a record holds it over all clients' samples too."""
        return self.reduce == "mean-and-pooled" and self.pooling != ""

    @property
    def best(self) -> Callable[[Iterable[float]], float]:
        """What finds the best of several values."""
        return max if self.higher_is_better else min

    @property
    def title(self) -> str:
        """Its name as headings print it: accuracy, RMSE."""
        is_acronym = not self.ratio and len(self.name) <= 4
        return self.name.upper() if is_acronym else self.name

    @property
    def figure(self) -> Scalars | None:
        """The picture that a report draws of it; None if `picture` is empty."""
        return Scalars(self.name, self.picture, self.unit, percent=self.ratio) if self.picture else None

    @property
    def declared(self) -> dict[str, Any]:
        """What run.json keeps of a task's metric."""
        return {name: getattr(self, name) for name in ("name", "higher_is_better", "ratio", "low", "high", "pooling")}

    def clipped(self, value: float) -> float:
        """Return a value that rounding took beyond the range as the bound; any other as it is."""
        for bound in self.range:
            if abs(value - bound) <= ROUNDING * max(1.0, abs(bound)) < math.inf:
                return min(max(value, self.range[0]), self.range[1])
        return value

    def text(self, value: float, digits: int = 2) -> str:
        """Write a value: a ratio in per cent with so many digits, anything else with four that count."""
        return f"{100 * value:.{digits}f}" if self.ratio else f"{value:.4g}"


def admits(value: object, low: float, high: float) -> bool:
    """Tell whether a reported value is a number in [low, high]; the one place where a range is checked.

    NaN is in every range: it says that there was nothing to measure. A range without a bound holds infinity, which a record keeps
    as null, and otherwise numbers up to MAX_NUMBER.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    if math.isnan(value):
        return True
    if math.isinf(value):
        return high >= MAX_NUMBER if value > 0 else low <= -MAX_NUMBER
    return max(low, -MAX_NUMBER) <= value <= min(high, MAX_NUMBER)


def range_error(name: str, value: object, low: float, high: float) -> str:
    """Return what is wrong with a reported value, "" if it is a number in [low, high]."""
    if admits(value, low, high):
        return ""
    bounds = f"[{max(low, -MAX_NUMBER):g}, {min(high, MAX_NUMBER):g}]"
    return f"metric {name} must be a number in {bounds}, got {reprlib.repr(value)}"


def range_errors(reported: Mapping[str, object], rows: Mapping[str, Metric]) -> Iterator[str]:
    """Yield what is wrong with a client's numbers. rows: metrics by their names; what none of them is about is left out."""
    for name, value in reported.items():
        if (row := rows.get(name)) is not None and (error := range_error(name, value, *row.range)):
            yield error


# The table ------------------------------------------------------------------------------------------------------------

_SECONDS = ("prepare", "merge", "evaluate", "train", "score", "state")

LOSS = Metric("loss", higher_is_better=False, low=0, tracked="loss/training", pooling="mean")

OF_EVERY_METHOD = (
    LOSS,
    Metric("loss-before", higher_is_better=False, low=0, tracked="loss/before-training"),
    Metric("loss-after", higher_is_better=False, low=0, tracked="loss/after-training"),
    Metric("test-samples", low=0, high=2.0**53, reduce="none"),
    Metric(EPSILON, higher_is_better=False, low=0, reduce="max"),
    Metric("dp-noise", low=0, reduce="none"),
    *(Metric(f"seconds-{phase}", higher_is_better=False, low=0, reduce="none", unit="s") for phase in _SECONDS),
)
"""What the clients of every method report of a round, beside the task's headline before and after training."""

COUNTED = (
    Metric("train-samples", reduce="none"),
    Metric("upload-bytes", higher_is_better=False, reduce="sum", tracked="bytes/upload", unit="B"),
    Metric("download-bytes", higher_is_better=False, reduce="sum", tracked="bytes/download", unit="B"),
)
"""What the server counts of every client of a round."""

_NO_METRICS = frozenset({"round", "clients", "failures", "evaluation", "seconds", "left-out"})  # of a round's record


def moments(headline: str) -> tuple[str, str]:
    """Names of a headline metric before and after a round's training, by its name."""
    return f"{headline}-before", f"{headline}-after"


def of_training(headline: Metric) -> tuple[Metric, ...]:
    """Return what clients report of a round: the headline before and after training, and OF_EVERY_METHOD."""
    tracked = (f"{headline.name}/before-training", f"{headline.name}/after-training")
    both = [
        dataclasses.replace(headline, name=name, reduce="mean-and-pooled", tracked=shown)
        for name, shown in zip(moments(headline.name), tracked, strict=True)
    ]
    return (*both, *OF_EVERY_METHOD)


def of_evaluation(measured: Sequence[Metric]) -> tuple[Metric, ...]:
    """Return what clients report of an evaluation: the loss, and every metric without and with fine-tuning."""
    headline, *others = measured
    pairs = [
        [dataclasses.replace(metric, name=metric.name + end, reduce="mean-and-pooled") for end in ("", FINETUNED)]
        for metric in (headline, *others)
    ]
    loss = dataclasses.replace(LOSS, reduce="mean-and-pooled")
    return (*pairs[0], loss, *(metric for pair in pairs[1:] for metric in pair))


def tracked_names(headline: Metric) -> dict[str, str]:
    """Return what trackers call the numbers of a round's record, by their names in it; a method's own are not among them."""
    names: dict[str, str] = {}
    for metric in (*of_training(headline), *COUNTED):
        if metric.tracked:
            names |= {name: metric.tracked + name.removeprefix(metric.name) for name in metric.record_names}
    return names


# What rounds come to --------------------------------------------------------------------------------------------------


def outcome(rounds: Sequence[Record], measured: Sequence[Metric]) -> Record:
    """What the rounds of a run come to, by the names that summary.json has for it; None where they do not say.

    rounds: as far as they are recorded; `final-` is of the last evaluation of all clients among them. measured: the headline first.
    """
    headline, *others = measured
    final: Record = next((r["evaluation"] for r in reversed(rounds) if r.get("evaluation")), {})
    before = moments(headline.name)[0]

    def best(moment: str) -> float | None:
        values = [r[moment] for r in rounds if r.get(moment) is not None]
        return headline.best(values) if values else None

    found: Record = {
        f"final-{headline.name}{end}": final.get(f"{headline.name}{end}")
        for end in ("", POOLED, FINETUNED, f"{FINETUNED}{POOLED}")
    }
    found[f"best-{headline.name}"] = best(before)
    found[f"best-{headline.name}{POOLED}"] = best(before + POOLED)
    for metric in others:
        found |= {f"final-{metric.name}{end}": final.get(f"{metric.name}{end}") for end in ("", FINETUNED)}
    if UNSEEN in final:
        found |= {f"unseen-{name}": final[UNSEEN].get(name) for name in (headline.name, headline.name + FINETUNED)}
    return {
        **found,
        "digest": final.get("digest"),
        # evaluations recorded before there were versions tell none
        "digest-version": final.get("digest-version", 1) if "digest" in final else None,
        "absent": final.get("absent"),
        "final-clients": final.get("evaluated"),
        "final-clients-expected": final.get("expected"),
        "upload-bytes": sum(int(r.get("upload-bytes") or 0) for r in rounds),
        "download-bytes": sum(int(r.get("download-bytes") or 0) for r in rounds),
        "failures": sum(len(part.get("failures", [])) for r in rounds for part in (r, r.get("evaluation") or {})),
        "far-uploads": sum(len(r.get("far", [])) for r in rounds),
        "seconds": round(sum(r.get("seconds", {}).get("round", 0.0) for r in rounds), 3),
    }


# A method's own -------------------------------------------------------------------------------------------------------


def declared(reports: Iterable[str | Metric]) -> tuple[Metric, ...]:
    """Return the metrics that a method declares; a bare name is one that stands in the clients' entries alone."""
    return tuple(Metric(one, reduce="none") if isinstance(one, str) else one for one in reports)


def taken_names(metrics: Iterable[Metric], headline: Metric) -> list[str]:
    """Return the names among a method's own metrics that a record has for something else, or that are there twice."""
    taken = _NO_METRICS.union(*(metric.record_names for metric in (*of_training(headline), *COUNTED)))
    found = []
    for metric in metrics:
        if not taken.isdisjoint(metric.record_names):
            found.append(metric.name)
        taken |= metric.record_names
    return found


class Reports:
    """What the clients of one run report beside `of_training`; what they report and nobody declared is named in the log, once.

    metrics: those that the method declares.
    """

    # names are the clients' own words: a client that sends thousands fills no log
    MOST_NAMED = 20

    def __init__(self, metrics: Iterable[Metric] = ()) -> None:
        self.metrics = tuple(metrics)
        self._named: set[str] = set()

    def warn_of_undeclared(self, names: Iterable[str]) -> None:
        """Log every name that was not logged before."""
        for name in names:
            if name in self._named or len(self._named) > self.MOST_NAMED:
                continue
            self._named.add(name)
            if len(self._named) > self.MOST_NAMED:
                log.warning("clients report further metrics that are not declared; they are not recorded")
            else:
                log.warning(
                    "metric %s: clients report it, but the method's `reports` do not declare it; it is not recorded",
                    plain(name)[:80],
                )
