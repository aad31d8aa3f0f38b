"""Records of rounds and evaluations: built, checked and summarized as plain JSON-ready tables."""

from __future__ import annotations

import hashlib
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from fl_app import tasks
from fl_app.config import RunConfig
from fl_app.errors import listed
from fl_app.keys import Scalar
from fl_app.metrics import (
    COUNTED,
    DIGEST_VERSION,
    LOSS,
    ONE_CLASS,
    POOLED,
    SENT_DIGEST_VERSION,
    UNSEEN,
    Metric,
    Reports,
    kept,
    of_evaluation,
    of_training,
    outcome,
    range_errors,
)
from fl_app.metrics import Record as Record
from fl_app.tasks import ACCURACY
from fl_app.transport import wire
from fl_app.transport.wire import Upload, WireError

VIRTUAL = "virtual-seconds"
"""Entry of a round's record: its seconds of simulated time."""

_OF_ACCURACY = of_training((ACCURACY,))
# Entries of an upload's metrics that belong to the protocol.
_OF_THE_PROTOCOL = (
    wire.STATE_VERSION,
    wire.STATE_USED,
    wire.METRIC_ERRORS,
    wire.PRIVATE,
    wire.SHARES,
    wire.COMMITTED,
    wire.SHA256,
    wire.BUFFERS_SHA256,
)


def check_upload(
    upload: Upload,
    own: Reports | None = None,
    declared: Mapping[str, Scalar] | None = None,
    version: str = "",
    table: Iterable[Metric] = _OF_ACCURACY,
) -> dict[str, Scalar]:
    """Return the known metrics of an upload. Raises WireError for impossible numbers.

    own: metrics of the method's client half. declared: the client's properties; the upload must have the same numbers
    of samples. version: the generation of client state that the message makes; the client must name this one or none.
    table: the metrics of the run (`of_training`).
    """
    metrics = upload.metrics
    if type(metrics.get("test-samples")) is not int or not 0 <= int(metrics["test-samples"]) < 2**53:
        raise WireError(f"test-samples must be an integer >= 0, got {reprlib.repr(metrics.get('test-samples'))}")
    check_count(upload)
    check_samples(declared, upload.num_examples, int(metrics["test-samples"]))
    named = metrics.get(wire.STATE_VERSION, "")
    if version and named not in ("", version):
        raise WireError(f"{wire.STATE_VERSION} must be {version} or empty, got {reprlib.repr(named)}")
    return known(metrics, table, own)


def check_count(upload: Upload) -> None:
    """Raise WireError for an upload without training samples: it would have no weight."""
    if upload.num_examples < 1:
        raise WireError(f"num_examples must be at least 1, got {upload.num_examples}")


def check_evaluation(
    metrics: Mapping[str, Scalar],
    test_samples: int = 0,
    declared: Mapping[str, Scalar] | None = None,
    measured: Sequence[Metric] = (ACCURACY,),
    own: Reports | None = None,
    validation: bool = False,
    global_model: bool = False,
) -> dict[str, Scalar]:
    """Return the known metrics of an evaluation. Raises WireError for impossible metrics, and as `check_upload`."""
    check_samples(declared, None, test_samples)
    return known(metrics, (*of_evaluation(measured, validation, global_model), ONE_CLASS), own)


def check_samples(declared: Mapping[str, Scalar] | None, train_samples: int | None, test_samples: int) -> None:
    """Raise WireError unless a client has as many samples as it reported when it connected."""
    for what, name, got in (
        ("num_examples", "train-samples", train_samples),
        ("test-samples", "test-samples", test_samples),
    ):
        if declared is not None and got is not None and got != declared.get(name):
            raise WireError(
                f"{what} must be the {declared.get(name)} that the client reported when it connected, got {got}"
            )


def known(metrics: Mapping[str, Scalar], table: Iterable[Metric] = (), own: Reports | None = None) -> dict[str, Scalar]:
    """Return the known metrics of a client: those that `table` and the method declare, and those of the protocol.

    The protocol's are the versions of client state, hashes of models, and the reasons why metrics failed. Other metrics
    would fill every record and checkpoint; they are dropped, and `own` names them in the log. Raises WireError for a
    malformed value.
    """
    rows = {metric.name: metric for metric in (*table, *(own.metrics if own else ()))}
    for error in range_errors(metrics, rows):
        raise WireError(error)
    kept: dict[str, Scalar] = {}
    for name, value in metrics.items():
        if name in rows:
            kept[name] = value
        elif name in (wire.STATE_VERSION, wire.STATE_USED):
            if not isinstance(value, str) or not re.fullmatch(r"(\d{6}-\d{6})?", value, re.ASCII):
                raise WireError(f"{name} must be a state's version, got {reprlib.repr(value)}")
            kept[name] = value
        elif name == wire.METRIC_ERRORS:
            kept[name] = wire.one_line(value)
        elif name in (wire.SHA256, wire.BUFFERS_SHA256) and re.fullmatch("[0-9a-f]{64}", str(value)):
            kept[name] = value
    if own:
        own.warn_of_undeclared(name for name in metrics if name not in rows and name not in _OF_THE_PROTOCOL)
    return kept


def client_row(
    metrics: Mapping[str, Scalar],
    train_samples: int,
    upload_bytes: int,
    download_bytes: int,
    notes: Mapping[str, object],
) -> Record:
    """Return a client's entry in a round's record: metrics, samples, bytes, seconds, and the method's notes."""
    reported = {name: clean(value) for name, value in metrics.items() if name != "state-version"}
    seconds = {k.removeprefix("seconds-"): reported.pop(k) for k in list(reported) if k.startswith("seconds-")}
    counts = {"train-samples": train_samples, "upload-bytes": upload_bytes, "download-bytes": download_bytes}
    return {**reported, **counts, "seconds": seconds, **{name: clean(value) for name, value in notes.items()}}


def round_record(
    round: int,
    clients: Mapping[int, Record],
    sent_bytes: int,
    received_bytes: int,
    notes: Mapping[str, object],
    failures: list[Record],
    table: Iterable[Metric] = _OF_ACCURACY,
    own: Reports | None = None,
) -> Record:
    """Return a round's record.

    clients: entries of clients with a used upload. sent_bytes, received_bytes: of all downloads and uploads that
    travelled, also of dropped clients and earlier attempts. table: the metrics of the run (`of_training`).
    """
    rows = list(clients.values())
    record: Record = {"round": round, **reduced(rows, table)}
    record |= reduced(rows, COUNTED) | {"download-bytes": sent_bytes, "upload-bytes": received_bytes}
    record |= reduced(rows, own.metrics if own else ())
    record |= {name: clean(value) for name, value in notes.items()}
    return {**record, "failures": failures, "clients": {str(i): row for i, row in clients.items()}}


def reduced(rows: list[Record], table: Iterable[Metric]) -> Record:
    """Return each metric's mean, pooled mean, sum or maximum over all clients.

    Maxima are absent if no client has one.
    """
    found: Record = {}
    for metric in table:
        if metric.reduce in ("mean", "mean-and-pooled"):
            mean, pooled = mean_and_pooled(rows, metric.name, squares=metric.pooling == "root-mean-square")
            found[metric.name] = mean
            if metric.is_pooled:
                found[metric.name + POOLED] = pooled
            continue
        values = [row[metric.name] for row in rows if row.get(metric.name) is not None]
        if metric.reduce == "sum":
            found[metric.name] = clean(sum(values))
        elif metric.reduce == "max" and values:
            found[metric.name] = clean(max(values))
    return found


def evaluation_record(
    clients: Mapping[int, Record],
    num_clients: int,
    sent_bytes: int,
    failures: list[Record],
    measured: Sequence[Metric] = (ACCURACY,),
    unseen: frozenset[int] = frozenset(),
    validation: bool = False,
    global_model: bool = False,
    sent: Mapping[int, str] | None = None,
    gone: frozenset[int] = frozenset(),
) -> Record:
    """Return the record of an evaluation of all clients. Its digest is None if a client is absent.

    sent: where clients send no hashes of their models, the hash of the arrays that each was sent.
    unseen: clients that never train. Means are over the other clients; those of unseen clients are kept apart.
    gone: clients that the run goes on without.
    `evaluated` is the number of clients in the means. `expected` is the number that should be in them. `undefined`
    lists, by metric, the clients that its mean leaves out.
    """
    rows = {str(i): clients[i] for i in sorted(clients)}
    everyone = set(range(num_clients)) - gone
    absent = sorted(everyone - set(clients))
    table = of_evaluation(measured, validation, global_model)
    record: Record = {"download-bytes": sent_bytes, "failures": failures, "absent": absent, "clients": rows}
    trained = [row for i, row in rows.items() if int(i) not in unseen]
    record |= {"evaluated": len(trained), "expected": len(everyone - unseen), **reduced(trained, table)}
    if unseen:
        apart = {i: row for i, row in rows.items() if int(i) in unseen}
        record[UNSEEN] = {**reduced(list(apart.values()), table), "ids": sorted(map(int, apart))}
    if left_out := undefined(rows, table):
        record["undefined"] = left_out
    version = DIGEST_VERSION if sent is None else SENT_DIGEST_VERSION
    hashed = list(rows.values()) if sent is None else [{wire.SHA256: sent[i]} for i in sorted(clients)]
    return record | {"digest": None if absent else digest(hashed), "digest-version": version}


def undefined(rows: Mapping[str, Record], table: Iterable[Metric]) -> dict[str, list[int]]:
    """Return, by metric, the clients without a number for it. Metrics that all or no clients have are left out."""
    found = {metric.name: [int(i) for i, row in rows.items() if row.get(metric.name) is None] for metric in table}
    return {name: ids for name, ids in found.items() if 0 < len(ids) < len(rows)}


def clean(value: object) -> object:
    """Return None for NaN and infinities, which JSON does not have, also inside lists and tables. Arrays become lists."""
    if isinstance(value, Mapping):
        return {name: clean(inner) for name, inner in value.items()}
    if isinstance(value, np.ndarray):
        return clean(value.tolist())
    if isinstance(value, list | tuple):
        return [clean(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def mean_and_pooled(rows: list[Record], name: str, squares: bool = False) -> tuple[float | None, float | None]:
    """Return mean and pooled mean of a metric over the clients that have it, to 12 digits; None if no client has it.

    The mean is unweighted. The pooled mean is weighted by test samples. squares: pool by the root of the weighted mean
    of squares.
    """
    pairs = [(row[name], row.get("test-samples", 0)) for row in rows if row.get(name) is not None]
    if not pairs:
        return None, None
    values, weights = np.array([p[0] for p in pairs], np.float64), np.array([p[1] for p in pairs], np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        summed = (values**2 if squares else values) @ weights
        pooled = float(summed / weights.sum()) if weights.sum() > 0 else math.nan
        pooled = math.sqrt(pooled) if squares else pooled
        mean = float(values.mean())
    return short(mean), short(pooled)


def short(value: float) -> float | None:
    """Return a number to 12 digits, None if it is not finite."""
    # 0.97, not 0.9700000000000001
    return float(f"{value:.12g}") if math.isfinite(value) else None


def digest(clients: Iterable[Mapping[str, object]], version: int = DIGEST_VERSION) -> str:
    """Return a SHA-256 over the hashes of the models that clients were evaluated with, in hexadecimal digits.

    clients: entries of an evaluation, in client order. The hashes are taken as 32 bytes each. Version 2 takes each
    client's hash of parameters, then its hash of buffers if the model has any. Version 1, of earlier runs, takes
    parameters only. Both are equal for models without buffers.
    """
    names = (wire.SHA256, wire.BUFFERS_SHA256) if version > 1 else (wire.SHA256,)
    hashes = (str(row[name]) for row in clients for name in names if name in row)
    return hashlib.sha256(b"".join(bytes.fromhex(each) for each in hashes)).hexdigest()


def one_class_line(rounds: Sequence[Record], learning_rate: float) -> str:
    """Return a warning that the final model predicts one class only, with the number of clients; "" if there are none.

    A client with only test samples of the predicted class reports nothing. It counts only if all reporting clients
    predict one class. If its loss is half as much again as at the start, the warning names the learning rate.
    """
    evaluation: Record = kept(rounds).get("evaluation", {})
    tested = [row for row in evaluation.get("clients", {}).values() if row.get("test-samples", 1)]
    told = [row[ONE_CLASS.name] for row in tested if row.get(ONE_CLASS.name) is not None]
    wrong = sum(value == 1 for value in told)
    if not wrong:
        return ""
    if wrong == len(told):
        whose = f"all {len(tested)} clients" if len(tested) > 1 else "the only client"
    else:
        whose = f"{wrong} of {len(tested)} clients"
    line = f"{whose}: the model predicts the same class for every sample"
    first, last = rounds[0].get(f"{LOSS.name}-before"), evaluation.get(LOSS.name)
    if first is None or last is None or last <= 1.5 * first:
        return line
    return f"{line}; its loss rose from {first:.3g} to {last:.3g}, so that learning-rate ({learning_rate:g}) may be too high"


def lacking(config: RunConfig, rounds: Sequence[Record], called: Callable[[int | str], str]) -> str:
    """Return the missing results of a finished run: an evaluation's answers, or the final figure; "" if none.

    called: returns a client's number, with its name if it has one, by its id.

    No final figure is expected with `report-accuracy = false`, or without any test sample.
    """
    evaluations: dict[int, Record] = {r["round"]: r["evaluation"] for r in rounds if r.get("evaluation")}
    lines = []
    for number, evaluation in evaluations.items():
        if not evaluation["clients"]:
            causes = [f"client {called(f['client'])}: {f['cause']}" for f in evaluation["failures"]]
            lines.append(f"evaluation after round {number}: no client answered ({listed(causes, '; ')})")
    measured = tasks.measured(config)
    figure = f"final-{measured[0].name}"
    if config.report_accuracy and evaluations and not lines and outcome(rounds, measured)[figure] is None:
        *_, last = evaluations.values()
        tested = {i: row for i, row in last["clients"].items() if row.get("test-samples")}
        causes = [
            f"client {called(i)}: {row[wire.METRIC_ERRORS]}" for i, row in tested.items() if row.get(wire.METRIC_ERRORS)
        ]
        why = (
            listed(causes, "; ")
            or "it is not defined on their test samples, or the clients with test samples are absent"
        )
        if tested or last["absent"]:
            lines.append(
                f"{figure}: no client that trains has it ({why}); set report-accuracy = false for a run without figures"
            )
    return "\n".join(lines)


def summarize(config: RunConfig, experiment: str, rounds: list[Record], ended_early: str = "") -> Record:
    """Return the summary of a finished run from its rounds.

    ended_early: the reason for an end before the last round, "" without one.
    """
    early = {"stopped-early": ended_early} if ended_early else {}
    return {
        "method": config.method,
        "dataset": config.dataset,
        "model": config.model,
        "num-clients": config.num_clients,
        "seed": config.seed,
        "scale": config.scale,
        "experiment": experiment,
        "rounds": len(rounds),
        **early,
        **outcome(rounds, tasks.measured(config)),
    }
