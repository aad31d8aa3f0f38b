"""Clients' rows as columns: what is read is what was written, wherever it lies."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

import corolla
from fl_app.errors import UserError
from fl_app.server import client_rows
from fl_app.server.client_rows import DIRECTORY, EVALUATION, TRAINING, RowFiles, RowWriter
from fl_app.server.run_folder import METRICS, RunFolder, read_metrics
from tests.conftest import Run
from tests.report.conftest import undrawn as undrawn

SIZES = {1: 5, 2: 7, 3: 1, 4: 30, 5: 3}


def row(client: int, round: int, rng: random.Random) -> dict[str, Any]:
    """A row as methods and hostile clients may make it: numbers lacking, not finite, of several types; lists and tables."""
    every: dict[str, Any] = {
        "loss": rng.choice([rng.random(), None]),
        "test-samples": client if round != 3 else client + 0.5,
        "sha256": f"{client:064x}",
        "state-used": rng.choice(["", "000001-000000"]),
        "flag": client % 2 == 0,
        "links": [1, client],
        "table": {"1": 0.5, "2": None},
        "large": rng.choice([2**53 + client, 2**70]),
        "mixed": rng.choice([1, "one", None, 2.5, [3], True]),
        "whole-or-not": 7 if round == 2 else 7.25,
        "words-later": 3 if round < 4 else "three",
        "nothing": None,
        "seconds": rng.choice([{"train": 0.25, "load": 1}, {"train": rng.random()}, {}]),
    }
    return {name: value for name, value in every.items() if name == "seconds" or rng.random() < 0.8}


def written(run: Path, writer: RowWriter, rounds: dict[int, int] = SIZES) -> dict[tuple[int, str], dict[str, Any]]:
    rng, expected = random.Random(3), {}
    for round, clients in rounds.items():
        parts = {TRAINING: {str(10 * i): row(i, round, rng) for i in range(clients)}}
        if round % 2 == 0:
            parts[EVALUATION] = {str(i): {"accuracy": i / 7, "sha256": "ab"} for i in range(9)}
        writer.append(round, parts)
        expected |= {(round, part): rows for part, rows in parts.items()}
        assert_read(run, expected)
    return expected


def assert_read(run: Path, expected: dict[tuple[int, str], dict[str, Any]]) -> None:
    files = RowFiles(run)
    for (round, part), rows in expected.items():
        found = files.of(round, part)
        assert len(found) == len(rows) and list(found) == list(rows)
        assert dict(found) == dict(rows)
        for client, own in rows.items():
            # 1 == True for Python alone; 1 may come back as 1.0, where other rounds have fractions
            assert {n: v for n, v in found[client].items() if type(v) is bool} == {
                n: v for n, v in own.items() if type(v) is bool
            }
        assert client_rows.ids(found).tolist() == client_rows.ids(rows).tolist() == [int(i) for i in rows]
        for name in ("loss", "seconds-train", "accuracy", "sha256", "none"):
            np.testing.assert_array_equal(client_rows.numbers(found, name), client_rows.numbers(rows, name))


def begun(run: Path) -> RowWriter:
    writer = RowWriter(run)
    writer.begin()
    return writer


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    assert_read(tmp_path, written(tmp_path, begun(tmp_path)))


def test_the_folder_is_one_table_for_pandas(tmp_path: Path) -> None:
    expected = written(tmp_path, begun(tmp_path))
    table = pandas.read_parquet(tmp_path / DIRECTORY)
    assert len(table) == sum(map(len, expected.values())) and table["round"].is_monotonic_increasing
    assert table.columns[:3].tolist() == ["round", "part", "client"]
    tested = table[(table["round"] == 2) & (table["part"] == EVALUATION)]
    assert tested["accuracy"].tolist() == [i / 7 for i in range(9)]
    assert {"seconds-train", "seconds-load", "sha256"} <= set(table.columns)
    # numbers in some rounds and words in others
    assert set(table["words-later"].dropna()) == {"3", "three"}


@pytest.mark.parametrize("cut", [0, 1, 4, 5])
def test_rounds_are_cut_and_written_again(tmp_path: Path, cut: int) -> None:
    sizes = {t: SIZES[t] for t in (1, 4, 5)}
    expected = written(tmp_path, begun(tmp_path), sizes)
    again = RowWriter(tmp_path)
    again.cut(cut, {part: rows for (round, part), rows in expected.items() if round == cut})
    files = RowFiles(tmp_path)
    assert all(not files.of(round, part) for round, part in expected if round > cut)
    assert_read(tmp_path, {key: rows for key, rows in expected.items() if key[0] <= cut})
    for round in sizes:
        if round > cut:
            again.append(round, {part: rows for (t, part), rows in expected.items() if t == round})
    assert_read(tmp_path, expected)


@pytest.mark.parametrize("position", [9, 40, -1])
def test_a_damaged_file_is_named(tmp_path: Path, position: int) -> None:
    written(tmp_path, begun(tmp_path))
    path = tmp_path / DIRECTORY / "round-000004.parquet"
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"{path.name} cannot be read: "):
        RowFiles(tmp_path).check()


# Runs ------------------------------------------------------------------------------------------------------------------


def stripped(folder: RunFolder) -> list[dict[str, Any]]:
    """The records of a run without what may differ between two."""
    records = []
    for record in read_metrics(folder.path):
        rows = {i: {**row, "seconds": sorted(row["seconds"])} for i, row in record["clients"].items()}
        tested = {**record["evaluation"], "clients": dict(record["evaluation"]["clients"])}
        records.append({**record, "seconds": 0, "clients": rows, "evaluation": tested})
    return records


@pytest.mark.parametrize("method", ["fedavg", "fedcac"])
def test_a_run_is_read_alike_in_both_forms(run: Run, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    settings = {"method": method, "num_clients": 5, "num_server_rounds": 3, "evaluate_every": 1, "fraction_train": 0.6}
    within = run(run_name="within", **settings)
    monkeypatch.setattr(client_rows, "MOST", 4)
    apart = run(run_name="apart", **settings)
    assert not (within.path / DIRECTORY).exists() and (apart.path / DIRECTORY).is_dir()
    assert stripped(within) == stripped(apart)
    lines = [json.loads(line) for line in (apart.path / METRICS).read_text().splitlines()]
    assert not any("clients" in line or "clients" in line["evaluation"] for line in lines)
    one, other = corolla.load(within.path), corolla.load(apart.path)
    ours, theirs = (found.clients.drop(columns=[c for c in found.clients if "seconds" in c]) for found in (one, other))
    pandas.testing.assert_frame_equal(ours[sorted(ours)], theirs[sorted(theirs)], check_dtype=False)


@pytest.mark.usefixtures("undrawn")
def test_a_run_with_rows_apart_is_compared_exported_and_collected(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from corolla.experiments import collect, runs
    from corolla.report.page import write_report

    monkeypatch.setattr(client_rows, "MOST", 2)
    folder = run(method="fedcac", num_clients=4, num_server_rounds=2)
    assert (folder.path / DIRECTORY).is_dir()
    (recorded,) = runs.find([folder.path])
    assert recorded.covered(recorded.headline) == (4, 4) and len(runs.listing([recorded])) == 2
    assert corolla.load(folder.path).model(1) is not None
    assert write_report([folder.path], tmp_path / "page")[0].is_file()
    (kept,) = collect.collect([recorded], tmp_path / "kept")
    (record, _) = read_metrics(kept)
    assert list(record["clients"]) == ["0", "1", "2", "3"] and record["clients"]["0"]["test-samples"]


def test_a_damaged_run_is_not_loaded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_rows, "MOST", 2)
    path = run(num_clients=3, num_server_rounds=1).path
    file = path / DIRECTORY / "round-000001.parquet"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match=f"{file.name} cannot be read"):
        corolla.load(path)
