"""The six hospitals' table: who gets which rows, and what is said of it before a run trains."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pandas
import pytest

from corolla.api.settings import ready
from corolla.experiments.runs import RecordedRun
from corolla.experiments.sweep import expand, read_sweep
from corolla.report.arrays import client_labels, read_run
from corolla.report.csv_files import as_csv, client_lines
from fl_app import data
from fl_app.config import parse, parse_recorded
from fl_app.data.columns import features_of
from fl_app.data.parsing import Places
from fl_app.errors import ConfigurationError, DataError
from fl_app.keys import Scalar
from fl_app.server.run_folder import read_clients, read_summary
from strategies import METHOD_PARAMS
from tests import hospitals
from tests.conftest import Command
from tests.facts import mentions, rejected

ROWS = 400
CATEGORICAL = "ward"


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The table, as t.csv in the current directory."""
    monkeypatch.chdir(tmp_path)
    return hospitals.write(tmp_path / "t.csv", ROWS, odd_spellings=False)


def raw(**more: Scalar) -> dict[str, Scalar]:
    """A config's keys, without a partition."""
    return {
        "method": "fedavg",
        "dataset": "table:t.csv",
        "target": "outcome",
        "client": "hospital",
        "num-clients": len(hospitals.HOSPITALS),
        "exclude": "patient_id,crp,admitted",
        "categorical": CATEGORICAL,
        "data-dir": "root",
        **more,
    }


def run(command: Command, *sets: str, **more: Scalar) -> tuple[int, str, str]:
    """`corolla run --in-process` with these keys: exit code, output, errors."""
    keys = [f"{name}={value}" for name, value in raw(**more).items() if value != ""] + list(sets)
    keys += ["num-server-rounds=1", "local-epochs=1", "run-name=r"]
    return command("run", "--in-process", *(f"--set={key}" for key in keys))


# Whose rows they are


def test_a_column_says_how_many_clients_there_are(table: Path, command: Command) -> None:
    keys = {name: value for name, value in raw().items() if name != "num-clients"}
    sets = [f"--set={name}={value}" for name, value in keys.items()]
    few = ["--set=num-server-rounds=1", "--set=local-epochs=1"]
    code, _, err = command("run", "--in-process", *sets, *few, "--set=run-name=r")
    assert code == 0 and sorted(facts["name"] for facts in read_clients(Path("runs/r")).values()) == [
        *hospitals.HOSPITALS
    ], err
    code, out, _ = command("data", "show", "--json", *sets)
    assert code == 0 and len(json.loads(out)["clients"]) == len(hospitals.HOSPITALS)
    settings = [f'{name} = "{value}"' for name, value in keys.items()]
    sweep = ["[settings]", *settings, "num-server-rounds = 1", "local-epochs = 1", "[grid]", "seed = [0, 1]"]
    Path("s.toml").write_text("\n".join(sweep))
    for scale in ("full", "small"):
        code, out, err = command("sweep", "s.toml", "--dry-run", "--scale", scale)
        assert code == 0, err
    # what is said of a table is said once, however many runs are of it
    code, _, err = command("sweep", "s.toml", "--in-process", "--set", "output-dir=out")
    assert code == 0 and err.count("warning: column 'ward'") == 1, err
    point, _ = expand(read_sweep(Path("s.toml")), METHOD_PARAMS, Path("out"), {}, ready)
    assert point.parsed.num_clients == len(hospitals.HOSPITALS)


def test_client_implies_by_column(table: Path) -> None:
    config = parse(raw(), METHOD_PARAMS)
    assert config.partition == "by-column" and config.resolved["partition"] == "by-column"
    # Flower adds the defaults of pyproject.toml to what it is given
    assert ready(raw())["partition"] == "by-column"
    frame = pandas.read_csv(table)
    for i, name in enumerate(hospitals.HOSPITALS):
        part = data.open_client(config, i)
        mine = frame[frame.hospital == name]
        assert len(part.y_train) + len(part.y_test) == len(mine)
        ages = np.r_[part.x_train[:, 0], part.x_test[:, 0]]
        assert sorted(ages) == sorted(mine.age)
    assert parse({name: value for name, value in raw().items() if name != "client"}, METHOD_PARAMS).partition == (
        "dirichlet-client"
    )


@pytest.mark.parametrize("partition", ["iid", "dirichlet-client", "dirichlet", "pathological", "file:/p.npz"])
def test_another_partition_beside_client_is_refused(partition: str) -> None:
    """The default's own value is a choice too, once somebody wrote it."""
    with rejected(ConfigurationError, "partition", "by-column if client =", "'hospital' is set", f"got '{partition}'"):
        parse(raw(partition=partition), METHOD_PARAMS)
    # reports read runs of earlier versions
    assert parse_recorded(raw(partition=partition), METHOD_PARAMS).partition == partition


def test_a_sites_table_may_name_its_client_column() -> None:
    assert parse(raw(dataset="node", classes="no,yes"), METHOD_PARAMS).client == "hospital"


def test_a_run_by_client_uses_every_row(command: Command, table: Path) -> None:
    code, out, err = run(command)
    assert code == 0 and "unused" not in out + err and "has no effect" not in out + err
    assert read_summary(Path("runs/r"))["num-clients"] == len(hospitals.HOSPITALS)


def test_rows_left_unused_are_said_before_training_with_the_key(command: Command, table: Path) -> None:
    code, out, err = run(
        command,
        "train-samples=10",
        "test-samples=5",
        client="",
        exclude="patient_id,crp,admitted,hospital",
        partition="iid",
    )
    assert code == 0
    assert mentions(
        err,
        "240 of 300",
        "70 of 100",
        "data set",
        "train-samples = 0 and test-samples = 0",
        "client an",
        "share of all",
    )
    code, out, err = run(command, partition="iid")
    assert code == 2 and mentions(err, "partition", "must be by-column")


def test_keys_without_effect_under_the_partition_are_said(command: Command, table: Path) -> None:
    code, out, err = run(command, "train-samples=100", "dirichlet-alpha=0.5")
    assert code == 0
    for key in ("train-samples", "dirichlet-alpha"):
        assert mentions(err, f"{key} has no effect", "partition by-column")


def test_the_partition_seed_draws_a_tables_test_rows(table: Path) -> None:
    def tested(**more: Scalar) -> list[list[float]]:
        prepared = data.prepare_for(parse(raw(**more), METHOD_PARAMS))
        return sorted(map(list, prepared.x_test.tolist()))

    first = tested()
    assert tested(seed=5) == first and tested(**{"partition-seed": 0}) == first
    other = tested(**{"partition-seed": 1})
    assert other != first and len(other) == len(first)


# What clients are called


def test_clients_names_travel_into_what_a_run_leaves(command: Command, table: Path) -> None:
    import corolla

    assert run(command)[0] == 0
    folder = Path("runs/r")
    told = read_clients(folder)
    assert [told[str(i)]["name"] for i in range(len(hospitals.HOSPITALS))] == list(hospitals.HOSPITALS)
    lines = csv.DictReader(io.StringIO(as_csv([RecordedRun(folder)], client_lines)))
    assert {line["client"]: line["name"] for line in lines} == {str(i): n for i, n in enumerate(hospitals.HOSPITALS)}
    assert list(corolla.load(folder).clients.loc[1, "name"]) == list(hospitals.HOSPITALS)
    assert RecordedRun(folder).client_name(1) == "Bern" and RecordedRun(folder).client_name(99) == "99"
    assert client_labels(read_run(folder), [1, 5]) == ["Bern", "Zug"]
    code, _, err = command("export", "runs/r", "--client", "1", "--output", "m.safetensors")
    assert code == 0, err
    assert json.loads(Path("m.safetensors.json").read_text())["client"] == "Bern"


# one batch of all rows: noise for a part of them takes a second to find for each client
@pytest.mark.parametrize("keys", [["private=true"], ["dp-epsilon=50.0", f"batch-size={ROWS}"]], ids=["private", "dp"])
def test_a_private_run_does_not_tell_names(command: Command, table: Path, keys: list[str]) -> None:
    rows = list(csv.DictReader(Path("t.csv").open(encoding="utf-8")))
    wards, classes = ({row[name] for row in rows} - {""} for name in (CATEGORICAL, "outcome"))
    public = [f"categorical={CATEGORICAL}={'|'.join(sorted(wards))}", f"classes={','.join(sorted(classes))}"]
    code, out, err = run(command, *keys, "normalize=mean-std", *public)
    assert code == 0, out + err
    assert all("name" not in facts for facts in read_clients(Path("runs/r")).values())


def test_data_show_calls_clients_by_their_names(command: Command, table: Path) -> None:
    keys = [f"--set={name}={value}" for name, value in raw().items()]
    code, out, err = command("data", "show", *keys)
    assert code == 0, err
    rows = [[cell.strip() for cell in line.split("│")] for line in out.splitlines() if "│" in line]
    # long cells go on in the lines below
    rows = [row for row in rows if row[1]]
    columns = {row[1]: row[2] for row in rows[: len(hospitals.HEADER)]}
    assert columns == {
        "patient_id": "left out",
        "hospital": "client",
        "age": "feature",
        "pressure": "feature",
        "crp": "left out",
        "ward": "feature",
        "smoker": "feature",
        "admitted": "left out",
        "outcome": "target",
    }
    assert [row[1] for row in rows[-len(hospitals.HOSPITALS) :]] == list(hospitals.HOSPITALS)
    assert rows[-4][4].startswith("no: ") and "yes" not in rows[-4][4]


# Sites with a table each


def site(config_of: dict[str, Scalar], path: Path) -> data.Prepared:
    """Open a table as a site's own."""
    keys = {**config_of, "dataset": "node", "client": "", "classes": "no,yes", "partition-seed": -1}
    return data.prepare_for(parse(keys, METHOD_PARAMS), str(path))


def test_sites_have_the_same_features_if_the_config_says_which(table: Path) -> None:
    """One site lacks no number, the other has no patient of one ward: by themselves they would have other features."""
    frame = pandas.read_csv(table).drop(columns="hospital")
    whole, ward = frame[frame.crp.notna()], frame[frame.ward != "icu"]
    for k, part in enumerate((whole, ward)):
        part.to_csv(f"{k}.csv", index=False)
    keys = raw(exclude="patient_id")
    with rejected(DataError, "dataset", "column crp", "every row", "name the column"):
        site(keys, Path("1.csv"))
    assert "crp missing" not in site(keys, Path("0.csv")).info.facts.features
    keys |= {"impute": "crp", "categorical": "ward=icu|medicine|surgery"}
    both = [site(keys, Path(f"{k}.csv")) for k in (0, 1)]
    names = both[0].info.facts.features
    assert names == both[1].info.facts.features and "crp missing" in names and "ward=icu" in names
    # a median is each site's own, unless the config gives one value
    fills = [next(e.fill for e in p.info.facts.encodings if e.column == "crp") for p in both]
    assert fills[0] != fills[1]
    given = [site(keys | {"impute": "crp=5"}, Path(f"{k}.csv")) for k in (0, 1)]
    assert all(e.fill == 5 for p in given for e in p.info.facts.encodings if e.column == "crp")
    with rejected(DataError, "dataset", "column ward", "hold", "medicine", "got 'surgery'"):
        site(keys | {"categorical": "ward=icu|medicine"}, Path("1.csv"))


def test_later_rows_are_encoded_as_the_training_rows_were(table: Path) -> None:
    prepared = data.prepare_for(parse(raw(exclude="patient_id"), METHOD_PARAMS))
    encodings = prepared.info.facts.encodings
    fill = next(e.fill for e in encodings if e.column == "crp")
    frame = pandas.DataFrame(
        {
            "age": [40, 50],
            "pressure": [120, 130],
            "crp": [None, 3.0],
            "ward": ["surgery", None],
            "smoker": [True, False],
            "admitted": ["1970-01-03", "2021-01-01"],
        }
    )
    found = features_of(table, encodings, {name: np.asarray(frame[name]) for name in frame}, Places())
    assert np.stack(found, axis=1).tolist() == [
        [40, 120, fill, 1, 0, 0, 1, 1, 2],
        [50, 130, 3, 0, 0, 0, 0, 0, 18628],
    ]
    frame["admitted"] = [1.0, 2.0]
    with rejected(DataError, "t.csv", "column admitted", "hold dates", "got numbers"):
        features_of(table, encodings, {name: np.asarray(frame[name]) for name in frame}, Places())


def test_the_whole_table_trains(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trap of the file at once: AUC is what a model has that reads every column right."""
    monkeypatch.chdir(tmp_path)
    hospitals.write(tmp_path / "t.csv", odd_spellings=False)
    sets = ["normalize=mean-std", "metrics=auc", "num-server-rounds=5", "local-epochs=5"]
    keys = [f"--set={name}={value}" for name, value in raw(exclude="patient_id").items()]
    code, _, err = command("run", "--in-process", *keys, *(f"--set={key}" for key in sets), "--set=run-name=r")
    assert code == 0, err
    rows = RecordedRun(Path("runs/r")).last_evaluation[1]["clients"]
    values = [row["auc"] for row in rows.values() if row.get("auc") is not None]
    # Chur has one class
    assert len(values) == len(hospitals.HOSPITALS) - 1 and min(values) > 0.75, values
