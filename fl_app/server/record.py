"""What is recorded of a round and of an evaluation: built, checked and summarized here, as plain JSON-ready tables."""

from __future__ import annotations

import hashlib
import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fl_app import tasks, wire
from fl_app.config import RunConfig
from fl_app.keys import Scalar
from fl_app.tasks import ACCURACY, Metric
from fl_app.wire import Upload, WireError

Record = dict[str, Any]

FINETUNED, POOLED, UNSEEN = "-finetuned", "-pooled", "unseen"


REPORTED = (  # numbers that every method's clients report of a round, beside the task's metrics
    "loss",
    "loss-before",
    "loss-after",
    "test-samples",
    "dp-epsilon",
    "dp-noise",
    *(f"seconds-{phase}" for phase in ("prepare", "merge", "evaluate", "train", "score", "state")),
)
SHA256 = "sha256"


def check_upload(
    upload: Upload,
    own: tuple[str, ...] = (),
    declared: Mapping[str, Scalar] | None = None,
    version: str = "",
    headline: Metric = ACCURACY,
) -> dict[str, Scalar]:
    """Return what a client reported with its upload. Raises WireError for numbers that cannot be.

    own: names of the numbers the method's client half reports. declared: the client's properties, whose samples the upload must
    have. version: the generation of client state that the message makes; the client's must be this one, or none.
    """
    metrics = upload.metrics
    for name in moments(headline):
        wire.number(metrics, name, *headline.range)
    for name in ("loss", "loss-before", "loss-after"):
        wire.number(metrics, name, 0)
    if type(metrics.get("test-samples")) is not int or not 0 <= int(metrics["test-samples"]) < 2**53:
        raise WireError(f"test-samples must be an integer >= 0, got {reprlib.repr(metrics.get('test-samples'))}")
    if upload.num_examples < 1:
        raise WireError(f"num_examples must be at least 1, got {upload.num_examples}")
    check_samples(declared, upload.num_examples, int(metrics["test-samples"]))
    named = metrics.get(wire.STATE_VERSION, "")
    if version and named not in ("", version):
        raise WireError(f"{wire.STATE_VERSION} must be {version} or empty, got {reprlib.repr(named)}")
    return known(metrics, (*moments(headline), *own))


def check_evaluation(
    metrics: Mapping[str, Scalar],
    test_samples: int = 0,
    declared: Mapping[str, Scalar] | None = None,
    measured: Sequence[Metric] = (ACCURACY,),
) -> dict[str, Scalar]:
    """Return what a client reported of an evaluation. Raises WireError for metrics that cannot be, and as `check_upload`."""
    names = {f"{metric.name}{end}": metric for metric in measured for end in ("", FINETUNED)}
    for name in names.keys() & metrics.keys():
        wire.number(metrics, name, *names[name].range)
    check_samples(declared, None, test_samples)
    return known(metrics, tuple(names))


def moments(headline: Metric) -> tuple[str, str]:
    """Names of the headline metric before and after a round's training."""
    return f"{headline.name}-before", f"{headline.name}-after"


def check_samples(declared: Mapping[str, Scalar] | None, train_samples: int | None, test_samples: int) -> None:
    """Raise WireError unless a client has as many samples as it said when it connected."""
    for what, name, got in (
        ("num_examples", "train-samples", train_samples),
        ("test-samples", "test-samples", test_samples),
    ):
        if declared is not None and got is not None and got != declared.get(name):
            raise WireError(
                f"{what} must be the {declared.get(name)} that the client told when it connected, got {got}"
            )


def known(metrics: Mapping[str, Scalar], own: tuple[str, ...] = ()) -> dict[str, Scalar]:
    """Return of what a client reported that which somebody knows: numbers of REPORTED and of its own, its state's versions.

    own: names beside REPORTED: of the task's metrics, of the method's numbers. All else would lie in every record and every
    checkpoint. Raises WireError for one that is not what it must be.
    """
    kept: dict[str, Scalar] = {}
    for name, value in metrics.items():
        if name in REPORTED or name in own:
            if value not in (math.inf, -math.inf):  # of a loss out of range; recorded as none
                wire.number(metrics, name)
            kept[name] = value
        elif name in (wire.STATE_VERSION, wire.STATE_USED):
            if not isinstance(value, str) or not re.fullmatch(r"(\d{6}-\d{6})?", value, re.ASCII):
                raise WireError(f"{name} must be a state's version, got {reprlib.repr(value)}")
            kept[name] = value
        elif name == SHA256 and re.fullmatch("[0-9a-f]{64}", str(value)):
            kept[name] = value
    return kept


def client_row(
    metrics: Mapping[str, Scalar],
    train_samples: int,
    upload_bytes: int,
    download_bytes: int,
    notes: Mapping[str, object],
) -> Record:
    """A client's entry in a round's record: what it reported, what travelled, what the method noted."""
    reported = {name: clean(value) for name, value in metrics.items() if name != "state-version"}
    seconds = {k.removeprefix("seconds-"): reported.pop(k) for k in list(reported) if k.startswith("seconds-")}
    counts = {"train-samples": train_samples, "upload-bytes": upload_bytes, "download-bytes": download_bytes}
    return {**reported, **counts, "seconds": seconds, **{name: clean(value) for name, value in notes.items()}}


def round_record(
    round: int,
    clients: Mapping[int, Record],
    sent_bytes: int,
    notes: Mapping[str, object],
    failures: list[Record],
    headline: Metric = ACCURACY,
) -> Record:
    """A round's record. clients: entries of those whose uploads were used; sent_bytes: downloads, to failed ones too."""
    rows = list(clients.values())
    record: Record = {"round": round}
    for name in moments(headline):
        record[name], record[f"{name}{POOLED}"] = mean_and_pooled(rows, name)
    for name in ("loss", "loss-before", "loss-after"):
        record[name] = mean_and_pooled(rows, name)[0]
    if spent := [row["dp-epsilon"] for row in rows if row.get("dp-epsilon") is not None]:
        record["dp-epsilon"] = max(spent)
    record["upload-bytes"] = sum(row["upload-bytes"] for row in rows)
    record["download-bytes"] = sent_bytes
    record |= {name: clean(value) for name, value in notes.items()}
    return {**record, "failures": failures, "clients": {str(i): row for i, row in clients.items()}}


def evaluation_record(
    clients: Mapping[int, Record],
    num_clients: int,
    sent_bytes: int,
    failures: list[Record],
    measured: Sequence[Metric] = (ACCURACY,),
    unseen: frozenset[int] = frozenset(),
) -> Record:
    """Record of an evaluation of all clients; its digest is None where a client is absent.

    unseen: clients that never train. Means are over the others; theirs stand apart.
    """
    rows = {str(i): clients[i] for i in sorted(clients)}
    absent = sorted(set(range(num_clients)) - set(clients))
    record: Record = {"download-bytes": sent_bytes, "failures": failures, "absent": absent, "clients": rows}
    record |= means([row for i, row in rows.items() if int(i) not in unseen], measured)
    if unseen:
        apart = {i: row for i, row in rows.items() if int(i) in unseen}
        record[UNSEEN] = {**means(list(apart.values()), measured), "ids": sorted(map(int, apart))}
    record["digest"] = None if absent else digest(str(row["sha256"]) for row in rows.values())
    return record


def means(rows: list[Record], measured: Sequence[Metric]) -> Record:
    """Mean and pooled mean over clients of everything measured."""
    first, *others = (metric.name for metric in measured)
    found: Record = {}
    for name in (first, f"{first}{FINETUNED}", "loss", *(name + end for name in others for end in ("", FINETUNED))):
        found[name], found[f"{name}{POOLED}"] = mean_and_pooled(rows, name)
    return found


def clean(value: object) -> object:
    """Return None for NaN and infinities, which JSON does not have; also for those inside of lists and tables."""
    if isinstance(value, Mapping):
        return {name: clean(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [clean(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def mean_and_pooled(rows: list[Record], name: str) -> tuple[float | None, float | None]:
    """Unweighted and test-sample-weighted mean of a metric over the clients that have it, to 12 digits; None if none has."""
    pairs = [(row[name], row.get("test-samples", 0)) for row in rows if row.get(name) is not None]
    if not pairs:
        return None, None
    values, weights = np.array([p[0] for p in pairs], np.float64), np.array([p[1] for p in pairs], np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        pooled = float(values @ weights / weights.sum()) if weights.sum() > 0 else math.nan
        mean = float(values.mean())
    return _short(mean), _short(pooled)


def _short(value: float) -> float | None:
    return float(f"{value:.12g}") if math.isfinite(value) else None  # 0.97, not 0.9700000000000001


def digest(hashes: Iterable[str]) -> str:
    """Sha256 over the clients' 32-byte hashes, in client order (hex in, hex out)."""
    return hashlib.sha256(b"".join(bytes.fromhex(h) for h in hashes)).hexdigest()


def summarize(config: RunConfig, experiment: str, rounds: list[Record]) -> Record:
    """Summary of a finished run from its rounds."""
    final, (headline, *others) = rounds[-1]["evaluation"], tasks.measured(config)
    name = headline.name

    def best(moment: str) -> float | None:
        values = [r[moment] for r in rounds if r[moment] is not None]
        return headline.best(values) if values else None

    return {
        "method": config.method,
        "dataset": config.dataset,
        "model": config.model,
        "num-clients": config.num_clients,
        "seed": config.seed,
        "scale": config.scale,
        "experiment": experiment,
        "rounds": len(rounds),
        **{f"final-{name}{end}": final[f"{name}{end}"] for end in ("", POOLED, FINETUNED, f"{FINETUNED}{POOLED}")},
        f"best-{name}": best(f"{name}-before"),
        f"best-{name}-pooled": best(f"{name}-before-pooled"),
        **{f"final-{m.name}{end}": final[f"{m.name}{end}"] for m in others for end in ("", FINETUNED)},
        **{f"unseen-{key}": final[UNSEEN][key] for key in (name, f"{name}{FINETUNED}") if UNSEEN in final},
        "digest": final["digest"],
        "absent": final["absent"],
        "upload-bytes": sum(r["upload-bytes"] for r in rounds),
        "download-bytes": sum(r["download-bytes"] for r in rounds),
        "failures": sum(len(r["failures"]) for r in rounds),
        "seconds": round(sum(r["seconds"]["round"] for r in rounds), 3),
    }
