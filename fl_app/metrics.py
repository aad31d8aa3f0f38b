"""The metrics of a run: one table of the numbers that clients report after a round and after an evaluation.

A row defines a number's name, its range, its reduction over clients in a round's record, and its display in trackers
and reports. Checks of replies, `metrics.jsonl`, CSV files, trackers and the report's pictures all use these rows. A
method declares further rows for its own numbers (`Method.reports`). A task declares its metrics (`Task.metrics`).
This file imports nothing heavy, because the command and every client process load it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fl_app.errors import listed, plain
from fl_app.figures import Scalars

log = logging.getLogger("corolla")

# The largest number that a client may report: sums of such numbers stay finite.
MAX_NUMBER = 1e30
# Tolerance for rounding beyond a metric's range: a part of the bound, or of 1. It covers a mean of a million float32.
ROUNDING = 1e-4
# Clients without a number that one line names at most.
MOST_NAMED = 20
FINETUNED, GLOBAL, POOLED, UNSEEN = "-finetuned", "-global", "-pooled", "unseen"
VALIDATION = "validation-"
"""Prefix of metrics on validation data (`validation-ratio`). Metrics on test data have no prefix."""
METRIC_ERRORS = "metric-errors"
"""Key of a client's entry for the metrics that failed, with the errors."""
# Version of the digest of all personalized models. Version 1 covers parameters only; runs without a version have it.
# Version 2 also covers BatchNorm statistics and other buffers.
DIGEST_VERSION = 2
# Version of the digest of the arrays that the server sends for an evaluation. Clients of private runs and of runs with
# `dp-epsilon` send no hashes of their models.
SENT_DIGEST_VERSION = 3
# Spent by a client's records: a record that is added or removed, and one that is replaced. Both hold at `dp-delta`.
EPSILON, REPLACE_EPSILON = "dp-epsilon", "dp-epsilon-replace"

# A round's record: one line of metrics.jsonl.
Record = dict[str, Any]

Reduction = Literal["none", "mean", "mean-and-pooled", "max", "sum"]
"""The reduction of the clients' numbers in a record.

`mean`: every client counts once. `mean-and-pooled`: also NAME-pooled, the metric over all clients' test samples, if it
can be computed from the clients' metrics (Metric.pooling). `max`, `sum`: over the clients. `none`: the number is only
in the clients' entries.
"""


@dataclass(frozen=True)
class Metric:
    """A number that clients report: its name, its better direction and its range.

    ratio: it lies in [0, 1] and is shown in per cent. low, high: the range of any other number; None: no bound. reduce:
    see Reduction. tracked: its name in trackers, for metrics of every method; a method's own are method/NAME. picture:
    title of its picture in the report; empty: it has no picture, or one of another kind. unit: label of the picture's
    axis. undefined: the reason why it may be undefined on a client's data. promised: why clients send it in private runs
    and with `dp-epsilon` too; empty: they do not. It has an effect in OF_EVERY_METHOD only.

    pooling: the rule that computes the metric over all samples from the clients' metrics and numbers of samples.
    `mean`: it is a mean over samples (accuracy). `root-mean-square`: it is the root of a mean (RMSE). Empty: there is
    no such rule and no pooled metric (AUC, F1, R2).
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
    promised: str = ""
    # not compared: runs of earlier versions do not record these two
    pooling: Literal["mean", "root-mean-square", ""] = dataclasses.field(default="", compare=False)
    undefined: str = dataclasses.field(default="", compare=False)

    @property
    def range(self) -> tuple[float, float]:
        """(lowest, highest) possible number."""
        if self.ratio:
            return 0.0, 1.0
        return -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high

    @property
    def record_names(self) -> frozenset[str]:
        """Its names in a round's record or in the clients' entries."""
        return frozenset({self.name, self.name + POOLED} if self.is_pooled else {self.name})

    @property
    def is_pooled(self) -> bool:
        """Whether a record also has the metric over all clients' samples."""
        return self.reduce == "mean-and-pooled" and self.pooling != ""

    @property
    def best(self) -> Callable[[Iterable[float]], float]:
        """The function that returns the best of several values."""
        return max if self.higher_is_better else min

    @property
    def title(self) -> str:
        """Its name in headings: accuracy, RMSE, AUC."""
        is_acronym = len(self.name) <= (3 if self.ratio else 4)
        return self.name.upper() if is_acronym else self.name

    @property
    def figure(self) -> Scalars | None:
        """Its picture in a report; None if `picture` is empty."""
        return Scalars(self.name, self.picture, self.unit, percent=self.ratio) if self.picture else None

    @property
    def declared(self) -> dict[str, Any]:
        """The fields of a task's metric that run.json keeps."""
        names = ("name", "higher_is_better", "ratio", "low", "high", "pooling", "undefined")
        return {name: getattr(self, name) for name in names}

    def clipped(self, value: float) -> float:
        """Return the bound for a value that lies beyond it by rounding only, any other value unchanged."""
        low, high = self.range
        near = any(abs(value - bound) <= ROUNDING * max(1.0, abs(bound)) < math.inf for bound in (low, high))
        return min(max(value, low), high) if near else value

    def text(self, value: float, digits: int = 2) -> str:
        """Return a value as text: a ratio in per cent with `digits` decimals, others with 4 significant digits."""
        return f"{100 * value:.{digits}f}" if self.ratio else f"{value:.4g}"


def admits(value: object, low: float, high: float) -> bool:
    """Return whether a reported value is a number in [low, high]. No other place checks ranges.

    NaN is in every range: it means that there was nothing to measure. An unbounded range contains infinity, recorded as
    null, and numbers up to MAX_NUMBER.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    if math.isnan(value):
        return True
    if math.isinf(value):
        return high >= MAX_NUMBER if value > 0 else low <= -MAX_NUMBER
    return max(low, -MAX_NUMBER) <= value <= min(high, MAX_NUMBER)


def range_error(name: str, value: object, low: float, high: float) -> str:
    """Return an error for a reported value, "" if it is a number in [low, high]."""
    if admits(value, low, high):
        return ""
    bounds = f"[{max(low, -MAX_NUMBER):g}, {min(high, MAX_NUMBER):g}]"
    return f"metric {name} must be a number in {bounds}, got {reprlib.repr(value)}"


def range_errors(reported: Mapping[str, object], rows: Mapping[str, Metric]) -> Iterator[str]:
    """Yield an error for each of a client's numbers that is out of range. rows: metrics by name; others are ignored."""
    for name, value in reported.items():
        if (row := rows.get(name)) is not None and (error := range_error(name, value, *row.range)):
            yield error


# The table ------------------------------------------------------------------------------------------------------------

_SECONDS = ("prepare", "merge", "evaluate", "train", "score", "state")

LOSS = Metric("loss", higher_is_better=False, low=0, tracked="loss/training", pooling="mean")

_OF_LOSS = "the loss; NaN with `report-accuracy = false`"

OF_EVERY_METHOD = (
    LOSS,
    Metric("loss-before", higher_is_better=False, low=0, tracked="loss/before-training", promised=_OF_LOSS),
    Metric("loss-after", higher_is_better=False, low=0, tracked="loss/after-training", promised=_OF_LOSS),
    Metric("test-samples", low=0, high=2.0**53, reduce="none"),
    # at a site what is spent, and the noise, would show its number of records
    Metric(
        EPSILON, higher_is_better=False, low=0, reduce="max", promised="the limit of the records' budget, not its use"
    ),
    Metric(REPLACE_EPSILON, higher_is_better=False, low=0, reduce="max"),
    Metric("dp-noise", low=0, reduce="none"),
    *(
        Metric(
            f"seconds-{phase}",
            higher_is_better=False,
            low=0,
            reduce="none",
            unit="s",
            promised="the time of a part of the client's turn",
        )
        for phase in _SECONDS
    ),
)
"""Metrics that clients of every method report after a round, beside the task's metrics before and after training."""

ONE_CLASS = Metric("one-class", higher_is_better=False, low=0, high=1, reduce="none")
"""A client's report after an evaluation with classes: 1 if the model predicts one class for all of its test samples.

There is no report if that is right because all samples are of this class."""

COUNTED = (
    Metric("train-samples", reduce="none"),
    Metric("upload-bytes", higher_is_better=False, reduce="sum", tracked="bytes/upload", unit="B"),
    Metric("download-bytes", higher_is_better=False, reduce="sum", tracked="bytes/download", unit="B"),
)
"""Metrics that the server counts for every client of a round."""

_NO_METRICS = frozenset({"round", "clients", "failures", "evaluation", "seconds", "left-out"})  # of a round's record


def moments(headline: str) -> tuple[str, str]:
    """Return the names of a metric before and after a round's training."""
    return f"{headline}-before", f"{headline}-after"


def of_training(measured: Sequence[Metric], validation: bool = False) -> tuple[Metric, ...]:
    """Return the metrics that clients report after a round: each metric before and after training, and OF_EVERY_METHOD.

    measured: the headline first. validation: whether clients also report losses and metrics on validation data.
    """
    both = []
    for metric in measured:
        tracked = (f"{metric.name}/before-training", f"{metric.name}/after-training")
        for name, shown in zip(moments(metric.name), tracked, strict=True):
            both.append(dataclasses.replace(metric, name=name, reduce="mean-and-pooled", tracked=shown))
    losses = [metric for metric in OF_EVERY_METHOD if metric.name in moments(LOSS.name)]
    apart = [_of_validation(metric) for metric in (*both, *losses)] if validation else []
    return (*both, *OF_EVERY_METHOD, *apart)


def of_evaluation(
    measured: Sequence[Metric], validation: bool = False, global_model: bool = False
) -> tuple[Metric, ...]:
    """Return the metrics that clients report after an evaluation, each without and with fine-tuning, and the loss.

    measured, validation: as in `of_training`. global_model: whether each metric is also of the global model.
    """
    headline, *others = measured
    ends = ("", FINETUNED, GLOBAL) if global_model else ("", FINETUNED)
    groups = [
        [dataclasses.replace(metric, name=metric.name + end, reduce="mean-and-pooled") for end in ends]
        for metric in (headline, *others)
    ]
    loss = dataclasses.replace(LOSS, reduce="mean-and-pooled")
    found = (*groups[0], loss, *(metric for group in groups[1:] for metric in group))
    return (*found, *map(_of_validation, found)) if validation else found


def _of_validation(metric: Metric) -> Metric:
    """Return the same metric on validation data: its name has a prefix, and it is not pooled."""
    tracked = f"{VALIDATION}{metric.tracked}" if metric.tracked else ""
    return dataclasses.replace(metric, name=f"{VALIDATION}{metric.name}", reduce="mean", tracked=tracked)


def tracked_names(measured: Sequence[Metric]) -> dict[str, str]:
    """Return trackers' names of a round's numbers by their names in the record, without a method's own metrics."""
    names: dict[str, str] = {}
    for metric in (*of_training(measured, validation=True), *COUNTED):
        if metric.tracked:
            names |= {name: metric.tracked + name.removeprefix(metric.name) for name in metric.record_names}
    return names


def undefined_note(
    rows: Mapping[str, Record], metric: Metric, name: str = "", called: Callable[[str], str] = lambda i: i
) -> str:
    """Return how many clients a metric's mean covers: `AUC: 5 of 6 clients (Chur: one class)`.

    The reasons for the other clients are in parentheses. rows: the clients' entries by id. name: the metric's name in
    them; empty: `metric.name`. called: returns a client's name by its id. Returns "" if all clients have a number, or
    none has.
    """
    lacking = why_undefined(rows, metric, name)
    if not 0 < len(lacking) < len(rows):
        return ""
    reasons: dict[str, list[str]] = {}
    for i, why in lacking.items():
        reasons.setdefault(why, []).append(called(i))
    whose = "; ".join(f"{listed(ids, most=MOST_NAMED)}: {why}" for why, ids in reasons.items())
    return f"{metric.title}: {len(rows) - len(lacking)} of {len(rows)} clients ({whose})"


def why_undefined(rows: Mapping[str, Record], metric: Metric, name: str = "") -> dict[str, str]:
    """Return the reason for each client without a metric, by id in order. rows, name: see `undefined_note`."""
    found: dict[str, str] = {}
    for i in sorted(rows, key=int):
        row = rows[i]
        if row.get(name or metric.name) is not None:
            continue
        failed = {error.partition(":")[0] for error in str(row.get(METRIC_ERRORS, "")).split("; ")}
        found[i] = "it failed" if metric.name in failed else metric.undefined or "not defined"
        if not row.get("test-samples", 1):
            found[i] = "no test samples"
    return found


# What rounds come to --------------------------------------------------------------------------------------------------


KEPT = "kept"
"""Entry of an evaluation in a run with `keep-best`: whether its round was the best until then."""


def kept(rounds: Sequence[Record]) -> Record:
    """Return the round with the evaluation of the models that a run keeps: the last one, or the best. {} without any."""
    return next((r for r in reversed(rounds) if r.get("evaluation") and r["evaluation"].get(KEPT, True)), {})


def best_validated(rounds: Sequence[Record], headline: Metric) -> Record | None:
    """Return the first round with the best headline on validation data before training; None without such data."""
    name = VALIDATION + moments(headline.name)[0]
    known = [record for record in rounds if record.get(name) is not None]
    best = headline.best([record[name] for record in known]) if known else None
    return next((record for record in known if record[name] == best), None)


def outcome(rounds: Sequence[Record], measured: Sequence[Metric]) -> Record:
    """Return a run's results by their names in summary.json; None where the rounds have no value.

    rounds: those recorded. `final-` values are from the last evaluation of all clients among them, with `keep-best` from
    that of the best round (`kept-round`). measured: the headline first. With validation data, `best-` values are from the
    round that was best on these (`best-round`). Without, they are the best on test data.
    """
    headline, *others = measured
    of_kept = kept(rounds)
    final: Record = of_kept.get("evaluation", {})
    before = moments(headline.name)[0]
    chosen = best_validated(rounds, headline)

    def best(moment: str) -> float | None:
        values = [r[moment] for r in rounds if r.get(moment) is not None]
        return headline.best(values) if values else None

    found: Record = {
        f"final-{headline.name}{end}": final.get(f"{headline.name}{end}")
        for end in ("", POOLED, FINETUNED, f"{FINETUNED}{POOLED}")
    }
    if chosen is None:
        found[f"best-{headline.name}"] = best(before)
        found[f"best-{headline.name}{POOLED}"] = best(before + POOLED)
    else:
        found[f"best-{headline.name}"] = chosen.get(before)
        found[f"best-{headline.name}{POOLED}"] = chosen.get(before + POOLED)
        found[f"best-{VALIDATION}{headline.name}"] = chosen[VALIDATION + before]
        found["best-round"] = chosen["round"]
    of_validation = [f"{VALIDATION}{metric.name}{end}" for metric in measured for end in ("", FINETUNED, GLOBAL)]
    of_global = [f"{metric.name}{GLOBAL}" for metric in measured]
    for name in (*of_validation, *of_global, f"{of_global[0]}{POOLED}"):
        if name in final:
            found[f"final-{name}"] = final[name]
    for metric in others:
        found |= {f"final-{metric.name}{end}": final.get(f"{metric.name}{end}") for end in ("", FINETUNED)}
    if KEPT in final:
        found["kept-round"] = of_kept["round"]
    if UNSEEN in final:
        found |= {f"unseen-{name}": final[UNSEEN].get(name) for name in (headline.name, headline.name + FINETUNED)}
    return {
        **found,
        "digest": final.get("digest"),
        # evaluations of earlier versions of Corolla record no version
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
    """Return the metrics that a method declares. A bare name becomes a metric that is only in the clients' entries."""
    return tuple(Metric(one, reduce="none") if isinstance(one, str) else one for one in reports)


def taken_names(metrics: Iterable[Metric], measured: Sequence[Metric]) -> list[str]:
    """Return the names of a method's own metrics that a record uses for something else, or that occur twice."""
    taken = _NO_METRICS.union(*(metric.record_names for metric in (*of_training(measured, validation=True), *COUNTED)))
    found = []
    for metric in metrics:
        if not taken.isdisjoint(metric.record_names):
            found.append(metric.name)
        taken |= metric.record_names
    return found


class Reports:
    """The metrics that a method declares. Names that clients report without a declaration are logged once.

    metrics: those that the method declares.
    """

    # names come from clients: a client that sends thousands must not fill the log
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
