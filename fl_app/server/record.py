"""What is recorded of a round and of an evaluation: built, checked and summarized here, as plain JSON-ready tables."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fl_app import wire
from fl_app.config import RunConfig
from fl_app.keys import Scalar
from fl_app.wire import Upload, WireError

Record = dict[str, Any]


def check_upload(upload: Upload) -> dict[str, Scalar]:
    """Return what a client reported with its upload. Raises WireError for numbers that cannot be."""
    metrics = dict(upload.metrics)
    for name in ("accuracy-before", "accuracy-after"):
        wire.number(metrics, name, 0, 1)
    for name in ("loss", "loss-before", "loss-after"):
        wire.number(metrics, name, 0)
    if type(metrics.get("test-samples")) is not int or not 0 <= int(metrics["test-samples"]) < 2**53:
        raise WireError(f"test-samples must be an integer >= 0, got {metrics.get('test-samples')!r}")
    if upload.num_examples < 1:
        raise WireError(f"num_examples must be at least 1, got {upload.num_examples}")
    return metrics


def check_evaluation(metrics: Mapping[str, Scalar]) -> None:
    """Raise WireError for accuracies that cannot be."""
    for name in metrics:
        if name.startswith("accuracy"):
            wire.number(metrics, name, 0, 1)


def client_row(
    metrics: Mapping[str, Scalar], train_samples: int, upload_bytes: int, download_bytes: int, notes: Mapping[str, object]
) -> Record:
    """A client's entry in a round's record: what it reported, what travelled, what the method noted."""
    reported = {name: clean(value) for name, value in metrics.items() if name != "state-version"}
    seconds = {k.removeprefix("seconds-"): reported.pop(k) for k in list(reported) if k.startswith("seconds-")}
    counts = {"train-samples": train_samples, "upload-bytes": upload_bytes, "download-bytes": download_bytes}
    return {**reported, **counts, "seconds": seconds, **notes}


def round_record(
    round: int, clients: Mapping[int, Record], sent_bytes: int, notes: Mapping[str, object], failures: list[Record]
) -> Record:
    """A round's record. clients: entries of those whose uploads were used; sent_bytes: downloads, to failed ones too."""
    rows = list(clients.values())
    record: Record = {"round": round}
    for name in ("accuracy-before", "accuracy-after"):
        record[name], record[f"{name}-pooled"] = mean_and_pooled(rows, name)
    for name in ("loss", "loss-before", "loss-after"):
        record[name] = mean_and_pooled(rows, name)[0]
    record["upload-bytes"] = sum(row["upload-bytes"] for row in rows)
    record["download-bytes"] = sent_bytes
    return {**record, **notes, "failures": failures, "clients": {str(i): row for i, row in clients.items()}}


def evaluation_record(clients: Mapping[int, Record], num_clients: int, sent_bytes: int, failures: list[Record]) -> Record:
    """Record of an evaluation of all clients; its digest is None where a client is absent."""
    rows = {str(i): clients[i] for i in sorted(clients)}
    absent = sorted(set(range(num_clients)) - set(clients))
    record: Record = {"download-bytes": sent_bytes, "failures": failures, "absent": absent, "clients": rows}
    for name in ("accuracy", "accuracy-finetuned", "loss"):
        mean, pooled = mean_and_pooled(list(rows.values()), name)
        record |= {name: mean, f"{name}-pooled": pooled}
    record["digest"] = None if absent else digest(str(row["sha256"]) for row in rows.values())
    return record


def clean(value: object) -> object:
    """Return None for NaN and infinities, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def mean_and_pooled(rows: list[Record], name: str) -> tuple[float | None, float | None]:
    """Unweighted and test-sample-weighted mean of a metric over the clients that have it; None if none has."""
    pairs = [(row[name], row.get("test-samples", 0)) for row in rows if row.get(name) is not None]
    if not pairs:
        return None, None
    values, weights = np.array([p[0] for p in pairs], np.float64), np.array([p[1] for p in pairs], np.float64)
    pooled = float(values @ weights / weights.sum()) if weights.sum() > 0 else None
    return float(values.mean()), pooled


def digest(hashes: Iterable[str]) -> str:
    """Sha256 over the clients' 32-byte hashes, in client order (hex in, hex out)."""
    return hashlib.sha256(b"".join(bytes.fromhex(h) for h in hashes)).hexdigest()


def summarize(config: RunConfig, experiment: str, rounds: list[Record]) -> Record:
    """Summary of a finished run from its rounds."""
    final = rounds[-1]["evaluation"]

    def best(name: str) -> float | None:
        return max((r[name] for r in rounds if r[name] is not None), default=None)

    return {
        "method": config.method,
        "dataset": config.dataset,
        "model": config.model,
        "num-clients": config.num_clients,
        "seed": config.seed,
        "scale": config.scale,
        "experiment": experiment,
        "rounds": len(rounds),
        "final-accuracy": final["accuracy"],
        "final-accuracy-pooled": final["accuracy-pooled"],
        "final-accuracy-finetuned": final["accuracy-finetuned"],
        "final-accuracy-finetuned-pooled": final["accuracy-finetuned-pooled"],
        "best-accuracy": best("accuracy-before"),
        "best-accuracy-pooled": best("accuracy-before-pooled"),
        "digest": final["digest"],
        "absent": final["absent"],
        "upload-bytes": sum(r["upload-bytes"] for r in rounds),
        "download-bytes": sum(r["download-bytes"] for r in rounds),
        "failures": sum(len(r["failures"]) for r in rounds),
        "seconds": round(sum(r["seconds"]["round"] for r in rounds), 3),
    }
