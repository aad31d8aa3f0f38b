"""docs/runs.md, "The run folder, file by file", lists every file and every field that runs write."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

import client_app.client
from fl_app.figures import Links, Matrix
from fl_app.layout import Model
from fl_app.metrics import OF_EVERY_METHOD
from fl_app.server import events
from fl_app.server.client_rows import DIRECTORY
from fl_app.server.run_folder import RunFolder
from strategies import METHODS
from tests.conftest import Run
from tests.server.test_run_misbehaving import corrupting, replaced, with_nan

ROOT = Path(__file__).resolve().parents[2]
FILES = "The run folder, file by file"
OWN = "Numbers of single methods"
PARTS = ("validation-", "-finetuned", "-global", "-pooled")
"""Parts that the names of metrics and losses can have; the page explains them once."""


def sections() -> dict[str, str]:
    """Return the text below each heading of the page's reference, up to the next heading."""
    page = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    parts = re.split(r"^#+ (.+)$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def listed(section: str) -> list[str]:
    """Return the names in the first cells of a section's table."""
    rows = [line.split(" | ")[0] for line in sections()[section].splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def missing(found: Mapping[str, Any], section: str, metrics: Sequence[str]) -> list[str]:
    """Return the fields of a record that a section's table lacks. metrics: the measured ones, the headline first."""
    names = "|".join(map(re.escape, metrics))
    patterns = [
        re.escape(name).replace("<metric>", f"({names})").replace("<headline>", re.escape(metrics[0]))
        for name in listed(section)
    ]
    plain = {name: re.sub("|".join(PARTS), "", name) for name in found}
    return [
        f"{section}: {name}" for name in found if not any(re.fullmatch(pattern, plain[name]) for pattern in patterns)
    ]


def unlisted(folder: RunFolder) -> Iterator[str]:
    """Yield the files and fields of a run folder that the page does not list."""
    path, own = folder.path, listed(OWN)

    def read(name: str) -> Any:
        return json.loads((path / name).read_text())

    metrics = [metric["name"] for metric in read("run.json")["metrics"]]

    def check(found: Mapping[str, Any], section: str, *more: str) -> Iterator[str]:
        yield from missing({name: 0 for name in found if name not in more}, section, metrics)

    files = [name.partition("<")[0].partition("*")[0] for name in listed("The run folder")] + [".lock"]
    for file in path.rglob("*"):
        name = file.relative_to(path).as_posix()
        if file.is_file() and not any(name.startswith(known) for known in files):
            yield f"The run folder: {name}"
    yield from check(read("summary.json"), "summary.json")
    yield from check(read("run.json"), "run.json")
    for name in ("shape", "data", "metrics"):
        about = read("run.json").get(name, {})
        for field in about[0] if isinstance(about, list) else about:
            row = next(line for line in sections()["run.json"].splitlines() if line.startswith(f"| `{name}`"))
            if f"`{field}`" not in row:
                yield f"run.json: {name}: {field}"
    for client in read("clients.json").values():
        yield from check(client, "clients.json")
    if (path / "aggregation-groups.json").exists():
        yield from check(read("aggregation-groups.json"), "aggregation-groups.json")
    for record in map(json.loads, (path / "metrics.jsonl").read_text().splitlines()):
        yield from check(record, "A round", *own)
        yield from check(record["seconds"], "Seconds")
        for failure in [*record["failures"], *record.get("far", [])]:
            yield from check(failure, "Failures")
        for row in record.get("clients", {}).values():
            yield from check(row, "A client's entry", *own)
            yield from phases(row["seconds"])
        evaluation = record.get("evaluation", {})
        yield from check(evaluation, "An evaluation")
        yield from check(evaluation.get("unseen", {}), "An evaluation", "ids")
        for row in evaluation.get("clients", {}).values():
            yield from check(row, "A client's entry in an evaluation")


def phases(seconds: Mapping[str, float]) -> Iterator[str]:
    """Yield the phases of a client's seconds that the page does not list."""
    row = next(line for line in sections()["A client's entry"].splitlines() if line.startswith("| `seconds`"))
    yield from (f"A client's entry: seconds: {name}" for name in seconds if f"`{name}`" not in row)


@pytest.mark.parametrize(
    "keys",
    [
        {"method": "fedcac", "fedcac": {"beta": 8}},
        {
            "method": "fedper",
            "num_clients": 5,
            "holdout_clients": 0.2,
            "validation_ratio": 0.2,
            "finetune_epochs": 1,
            "metrics": "all",
            "stop_when": "loss: 1 rounds without better by 100",
            "num_server_rounds": 4,
        },
        {"method": "ditto", "evaluate_global": True, "validation_ratio": 0.2},
        {"private": True, "method": "fedcac"},
        {"dp_epsilon": 5.0, "num_server_rounds": 1},
        {"model": "tests.small_models:batchnorm", "normalize": "mean-std", "train": "*"},
    ],
    ids=["plain", "validation", "global", "private", "dp", "buffers"],
)
def test_every_field_of_a_run_is_on_the_page(run: Run, keys: dict[str, Any]) -> None:
    assert sorted(set(unlisted(run(**keys)))) == [], "describe it in docs/runs.md"


def test_dropped_and_far_uploads_are_on_the_page(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, tries = corrupting(0, with_nan), iter([True])

    def train(self: Any, download: Any) -> Any:
        # the first attempt loses two of four clients and is repeated; one upload of the second is far from the others
        upload = bad(self, download)
        if self.client_id == 1 and next(tries, False):
            return with_nan(upload)
        if self.client_id == 2:
            return replaced(upload, model=Model(upload.model.params + np.float32(1), upload.model.buffers))
        return upload

    monkeypatch.setattr(client_app.client.CorollaClient, "_train", train)
    folder = run(num_clients=4, min_results=0.6, num_server_rounds=1)
    assert sorted(set(unlisted(folder))) == [], "describe it in docs/runs.md"
    (first, *_) = map(json.loads, (folder.path / "metrics.jsonl").read_text().splitlines())
    assert set(first["failures"][0]) == {"attempt", "client", "cause"} and first["far"]


def test_columns_of_many_clients_are_on_the_page(run: Run) -> None:
    folder = run(num_clients=201, fraction_train=0.02, num_server_rounds=1)
    assert sorted(set(unlisted(folder))) == [], "describe it in docs/runs.md"
    columns = {name for name in pandas.read_parquet(folder.path / DIRECTORY) if not name.startswith("seconds-")}
    entries = ("A client's entry", "A client's entry in an evaluation")
    either = [set(missing(dict.fromkeys(columns), entry, ["accuracy"])) for entry in entries]
    left = {name.partition(": ")[2] for name in either[0]} & {name.partition(": ")[2] for name in either[1]}
    assert left == {"round", "part", "client"}
    assert all(f"`{name}`" in sections()["clients.parquet"] for name in left)


def test_every_part_of_a_metrics_name_is_on_the_page() -> None:
    assert [part for part in PARTS if f"`{part}`" not in sections()[FILES]] == []


def test_every_event_is_on_the_page_with_its_fields() -> None:
    rows = [line for line in sections()["events.jsonl"].splitlines() if line.startswith("| `")]
    listed_fields = {kind: row for row in rows for kind in re.findall(r"`([a-z-]+)`", row.split(" | ")[0])}
    assert set(listed_fields) == set(events.KINDS)
    for word, kind in events.KINDS.items():
        names = {field.name.replace("_", "-") for field in dataclasses.fields(kind)} - {"time"}
        assert [name for name in names if f"`{name}`" not in listed_fields[word]] == [], word


def test_clients_report_every_number_of_every_method(run: Run) -> None:
    record = json.loads((run(dp_epsilon=5.0, num_server_rounds=1).path / "metrics.jsonl").read_text())
    for row in record["clients"].values():
        reported = {*row, *(f"seconds-{phase}" for phase in row["seconds"])}
        lacking = [metric.name for metric in OF_EVERY_METHOD if metric.name not in reported]
        assert lacking == [], "CorollaClient._train in client_app/client.py reports every number of OF_EVERY_METHOD"


def test_every_key_of_a_config_is_on_its_page(run: Run) -> None:
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    text = (run(method="fedcac", num_server_rounds=1).path / "config.toml").read_text()
    keys, table = [], ""
    for line in text.splitlines():
        if line.startswith("["):
            table = line.strip("[]") + "."
        elif line:
            keys.append(table + line.partition(" = ")[0])
    assert [key for key in keys if f"| `{key}` |" not in page] == []


def test_every_number_that_a_method_declares_or_notes_is_on_the_page() -> None:
    declared = {metric.name for method in METHODS.values() for metric in method.recorded}
    declared |= {f.record for method in METHODS.values() for f in method.figures if not isinstance(f, Matrix | Links)}
    between = {f.record for method in METHODS.values() for f in method.figures if isinstance(f, Matrix)}
    noted = set()
    for path in [path for folder in ("", "baselines") for path in (ROOT / "strategies" / folder).glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = {"note": 1, "note_round": 0}.get(node.func.attr)
                if name is not None and len(node.args) > name and isinstance(node.args[name], ast.Constant):
                    noted.add(node.args[name].value)  # type: ignore[attr-defined]
    assert {"collaborators", "cluster-sizes"} <= noted
    assert sorted((declared | noted) - between - set(listed(OWN))) == []
    assert sorted(set(listed(OWN)) - declared - noted) == [], "the page lists what no method records"
