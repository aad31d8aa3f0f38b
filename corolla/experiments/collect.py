"""Compact copies of finished runs for a repository: summary.json and run.tar.xz (`corolla runs --collect`).

run.tar.xz holds config.toml, run.json and metrics.jsonl; the run's other files are left out. All commands read these
folders like other run folders. The copy keeps the config's keys for the run's own method, the clients' measured metrics,
the errors of failed metrics, and numbers of test samples. From other figures of a round it keeps numbers, seconds and
failures. Paths of the run's machine are removed.
"""

from __future__ import annotations

import functools
import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from corolla.experiments.runs import RecordedRun
from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.files import explain_full_disk, make_directory, publish, publish_text
from fl_app.keys import Scalar, own, specs
from fl_app.metrics import FINETUNED, GLOBAL, METRIC_ERRORS, VALIDATION, Record
from fl_app.server import run_folder
from fl_app.server.run_folder import CONFIG, METRICS, PACKED, RUN, SUMMARY
from fl_app.toml import to_toml

# decimal places of clients' metrics, and of seconds
DIGITS, SECONDS_DIGITS = 6, 3
# keys with values that may contain a path: `kind:/path`
_PATHS = ("dataset", "partition")


def collect(runs: Iterable[RecordedRun], directory: Path) -> list[Path]:
    """Write compact copies of finished runs into folders with the runs' names, and return these.

    Earlier copies are replaced. Raises UserError, before anything is written, if a target folder is another run, the
    run itself, or a run that was not collected. Raises UserError also for a run that is too large to be read again.
    """
    targets: dict[Path, RecordedRun] = {}
    for run in runs:
        target = directory / run.path.resolve().name
        if target.resolve() == run.path.resolve():
            raise UserError(
                key="--collect", rule=f"{target} is the run itself; the copy would replace it; choose another directory"
            )
        if (target / METRICS).exists():
            raise UserError(
                key="--collect",
                rule=f"{target} is a run that was not collected; the copy would replace it; choose another directory",
            )
        taken = targets.get(target, RecordedRun(target)).about
        if (taken or target.exists()) and taken.get("experiment") != run.about.get("experiment"):
            raise UserError(f"{target} exists and holds another run than {run.path}; move or remove one of them")
        targets[target] = run
    for target, run in targets.items():
        names = [metric.name for metric in run.metrics]
        rounds = "".join(json.dumps(rounded(record, names)) + "\n" for record in run.rounds.values())
        config = to_toml(settings(run.settings, target.name))
        files = {CONFIG: config, RUN: json.dumps(run.about) + "\n", METRICS: rounds}
        summary = json.dumps(without_path(run.summary), indent=2) + "\n"
        # in an archive: a header per file, and whole blocks of 512
        if (size := sum(1024 + len(text) for text in files.values())) > run_folder.MOST_UNPACKED:
            raise UserError(
                key="--collect",
                rule=f"{run.path} has {size:,} bytes, and a copy of more than {run_folder.MOST_UNPACKED:,} is "
                "not read; copy the folder itself",
            )
        with explain_full_disk("--collect", directory):
            make_directory(target)
            publish(target / PACKED, functools.partial(Path.write_bytes, data=packed(files)))
            publish_text(target / SUMMARY, summary)
    return list(targets)


def packed(files: Mapping[str, str]) -> bytes:
    """Return texts as a compressed archive, in the given order. Equal texts give equal bytes."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:xz", format=tarfile.USTAR_FORMAT) as members:
        for name, text in files.items():
            content = text.encode()
            # TarInfo's defaults leave owner and time empty
            member = tarfile.TarInfo(name)
            member.size = len(content)
            members.addfile(member, io.BytesIO(content))
    return archive.getvalue()


def settings(config: Mapping[str, Scalar], name: str) -> dict[str, Scalar]:
    """Return the keys of a flat config that apply to the run. Keys that only name places have their defaults.

    Other paths are cut to the last component.
    """
    places = {spec.name: spec.default for spec in specs(RunConfig) if spec.about == "place"}
    kept = own(config, str(config.get("method")))
    kept |= {key: value for key, value in places.items() if key in kept} | {"run-name": name}
    if kept.get("initial-weights"):
        kept["initial-weights"] = Path(str(kept["initial-weights"])).name
    return without_path(kept)


def without_path(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config or summary with the folders removed from the names of data set and partition."""
    cut = {}
    for key in (key for key in _PATHS if key in table):
        kind, colon, path = str(table[key]).partition(":")
        cut[key] = f"{kind}{colon}{Path(path).name}"
    return {**table, **cut}


def rounded(record: Record, metrics: Sequence[str]) -> Record:
    """Return a round's record as kept: numbers, seconds, failures, evaluation, and clients' metrics and test samples."""
    kept = {key: value for key, value in record.items() if isinstance(value, int | float | None) or key == "failures"}
    kept["seconds"] = {phase: round(seconds, SECONDS_DIGITS) for phase, seconds in record.get("seconds", {}).items()}
    kept["clients"] = _rows(record.get("clients", {}), _names(metrics, ("-before", "-after")))
    if "evaluation" in record:
        kept["evaluation"] = {
            **record["evaluation"],
            "clients": _rows(record["evaluation"].get("clients", {}), _names(metrics, ("", FINETUNED, GLOBAL))),
        }
    return kept


def _names(metrics: Sequence[str], ends: Sequence[str]) -> list[str]:
    """Return the names of metrics in clients' entries, on test and validation data, and of their test samples."""
    return [*(f"{part}{name}{end}" for part in ("", VALIDATION) for name in metrics for end in ends), "test-samples"]


def _rows(clients: Mapping[str, Record], names: Sequence[str]) -> dict[str, Record]:
    rows: dict[str, Record] = {}
    for i, row in clients.items():
        rows[i] = {name: round(row[name], DIGITS) for name in names if row.get(name) is not None}
        if row.get(METRIC_ERRORS):
            rows[i][METRIC_ERRORS] = row[METRIC_ERRORS]
    return rows
