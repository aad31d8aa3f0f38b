"""Finished runs as what a repository keeps of them (`corolla runs --collect`): summary.json, and all else in run.tar.xz.

All commands read such folders as any others. Of the config the keys of the run's own method stay; of clients' entries the
headline metric and the number of test samples; of a round's other figures numbers, seconds and failures. Paths of the machine the
run was on are left out.
"""

from __future__ import annotations

import functools
import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from corolla.experiments.runs import RecordedRun
from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.files import explain_full_disk, make_directory, publish, publish_text
from fl_app.keys import Scalar, own, specs
from fl_app.metrics import Record
from fl_app.server.run_folder import CONFIG, METRICS, PACKED, RUN, SUMMARY
from fl_app.toml import to_toml

# of clients' metrics; of seconds
DIGITS, SECONDS_DIGITS = 6, 3
# Keys whose values may hold a path: `kind:/path`.
_PATHS = ("dataset", "partition")


def collect(runs: Iterable[RecordedRun], directory: Path) -> list[Path]:
    """Write what is kept of finished runs into folders of their names; the folders, of which those of the same runs are replaced.

    Raises UserError before anything is written if a name is taken by another run, by the run itself, or by one not collected.
    """
    targets: dict[Path, RecordedRun] = {}
    for run in runs:
        target = directory / run.path.resolve().name
        if target.resolve() == run.path.resolve():
            raise UserError(
                f"--collect: {target} is the run itself, of which the rest would be lost; choose another directory"
            )
        if (target / METRICS).exists():
            raise UserError(
                f"--collect: {target} is a run that was not collected, of which the rest would be lost; choose another directory"
            )
        taken = targets.get(target, RecordedRun(target)).about
        if (taken or target.exists()) and taken.get("experiment") != run.about.get("experiment"):
            raise UserError(
                f"{target} is there already and holds another run than {run.path}; move or remove one of them"
            )
        targets[target] = run
    for target, run in targets.items():
        rounds = "".join(json.dumps(rounded(record, run.headline.name)) + "\n" for record in run.rounds.values())
        config = to_toml(settings(run.settings, target.name))
        files = {CONFIG: config, RUN: json.dumps(run.about) + "\n", METRICS: rounds}
        summary = json.dumps(without_path(run.summary), indent=2) + "\n"
        with explain_full_disk("--collect", directory):
            make_directory(target)
            publish(target / PACKED, functools.partial(Path.write_bytes, data=packed(files)))
            publish_text(target / SUMMARY, summary)
            # what an earlier version of Corolla collected would be read first
            for name in (CONFIG, RUN, f"{METRICS}.gz"):
                (target / name).unlink(missing_ok=True)
    return list(targets)


def packed(files: Mapping[str, str]) -> bytes:
    """Return texts as a compressed archive, in the order given; the same texts are the same bytes."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:xz", format=tarfile.USTAR_FORMAT) as members:
        for name, text in files.items():
            content = text.encode()
            # owner and time are those of TarInfo: none
            member = tarfile.TarInfo(name)
            member.size = len(content)
            members.addfile(member, io.BytesIO(content))
    return archive.getvalue()


def settings(config: Mapping[str, Scalar], name: str) -> dict[str, Scalar]:
    """Return the keys of a run's flat config that bear on it, with the defaults of keys that say where files lie.

    What else is a path is cut to its name.
    """
    places = {spec.name: spec.default for spec in specs(RunConfig) if spec.about == "place"}
    kept = own(config, str(config.get("method")))
    kept |= {key: value for key, value in places.items() if key in kept} | {"run-name": name}
    if kept.get("initial-weights"):
        kept["initial-weights"] = Path(str(kept["initial-weights"])).name
    return without_path(kept)


def without_path(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config or summary whose data set and partition are named without the folder they lie in."""
    cut = {}
    for key in (key for key in _PATHS if key in table):
        kind, colon, path = str(table[key]).partition(":")
        cut[key] = f"{kind}{colon}{Path(path).name}"
    return {**table, **cut}


def rounded(record: Record, metric: str) -> Record:
    """Return what is kept of a round's record: its numbers, seconds, failures and evaluation, clients' metric and test samples."""
    kept = {key: value for key, value in record.items() if isinstance(value, int | float | None) or key == "failures"}
    kept["seconds"] = {phase: round(seconds, SECONDS_DIGITS) for phase, seconds in record.get("seconds", {}).items()}
    kept["clients"] = _rows(record.get("clients", {}), (f"{metric}-before", f"{metric}-after", "test-samples"))
    if "evaluation" in record:
        names = (metric, f"{metric}-finetuned", "test-samples")
        kept["evaluation"] = {**record["evaluation"], "clients": _rows(record["evaluation"].get("clients", {}), names)}
    return kept


def _rows(clients: Mapping[str, Record], names: tuple[str, ...]) -> dict[str, Record]:
    rows = {i: {name: row[name] for name in names if row.get(name) is not None} for i, row in clients.items()}
    return {i: {name: round(value, DIGITS) for name, value in row.items()} for i, row in rows.items()}
