"""Models of tables in use: columns go by name, what is missing or foreign is refused, and the API answers as the command does."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_iris

import corolla
from corolla.experiments.exported import predict
from corolla.experiments.exported.export import FileForm, export
from corolla.experiments.exported.predict import from_columns
from fl_app import model_card
from fl_app.config import parse
from fl_app.data import open_client
from fl_app.data.table_files import read_rows
from fl_app.errors import DataError, UserError
from fl_app.server.run_folder import CONFIG, read_about, read_config, read_metrics
from strategies import METHOD_PARAMS, METHODS
from tests.conftest import Command, Run
from tests.facts import mentions, rejected
from tests.report.conftest import start as start

FIRST_SECOND = 1_709_251_200


def patients(rows: int = 240) -> pandas.DataFrame:
    """Return a table whose columns lie on very different scales, one of them beyond what float32 keeps apart."""
    generator = np.random.default_rng(5)
    age, pressure = generator.uniform(26, 86, rows), generator.uniform(92, 176, rows)
    ward = generator.choice(["icu", "medicine"], rows)
    second = FIRST_SECOND + generator.uniform(0, 600, rows)
    risk = (age - 56) / 15 + (pressure - 134) / 30 + (ward == "icu") + (second - FIRST_SECOND - 300) / 300
    return pandas.DataFrame(
        {
            "age": age,
            "pressure": pressure,
            "ward": ward,
            "second": second,
            "hospital": np.arange(rows) % 3,
            "outcome": np.where(risk > 0.4, "yes", "no"),
        }
    )


@pytest.fixture(scope="module")
def once(start: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, and its table beside the folder of runs."""
    table = tmp_path_factory.mktemp("table") / "patients.csv"
    patients().to_csv(table, index=False)
    return start(
        "run", method="fedavg", dataset=f"table:{table}", target="outcome", client="hospital", categorical="ward",
        partition="by-column", num_clients=3, num_server_rounds=6, local_epochs=6, learning_rate=0.1,
        collect_personal_models=True, model="mlp",
    )  # fmt: skip


@pytest.fixture
def trained(once: Path, tmp_path: Path) -> Path:
    """A copy of the run, as if it had been made from a table in the test's directory."""
    folder = Path(shutil.copytree(once, tmp_path / "runs" / "run"))
    config, dataset = folder / CONFIG, str(read_config(once)["dataset"])
    table = Path(shutil.copy(dataset.removeprefix("table:"), tmp_path / "patients.csv"))
    config.write_text(config.read_text().replace(dataset, f"table:{table}"))
    return folder


def answers(text: str) -> list[str]:
    """Return the classes that `corolla predict` printed."""
    return [line.split()[2] for line in text.splitlines() if line.startswith("row ")]


@pytest.mark.parametrize("suffix", [".pt", ".onnx"])
def test_columns_go_by_name(trained: Path, command: Command, tmp_path: Path, suffix: str) -> None:
    if suffix == ".onnx":
        pytest.importorskip("onnxruntime")
    file, _ = export(trained, METHODS, 1, tmp_path / f"model{suffix}", form=FileForm(suffix))
    frame = patients()
    right, reverse = (tmp_path / f"{name}.csv" for name in ("right", "reverse"))
    frame.to_csv(right, index=False)
    frame[frame.columns[::-1]].to_csv(reverse, index=False)
    frame[["age", "pressure", "ward", "second"]].to_csv(bare := tmp_path / "bare.CSV", index=False)
    said = [command("predict", str(file), str(table)) for table in (right, reverse, bare)]
    assert [code for code, _, _ in said] == [0, 0, 0]
    found = answers(said[0][1])
    assert len(found) == len(frame) and found == answers(said[1][1]) == answers(said[2][1])
    accuracy = np.mean(np.array(found) == frame.outcome)
    assert accuracy > 0.85
    # only the first file is the run's own, byte for byte
    own, whose = said[0][1].split("; these rows are ")
    assert f"accuracy {100 * accuracy:.2f} % on 240 samples" in own and own == said[1][1].rstrip()
    assert mentions(whose, "run's own data", "most of them", "training rows")
    assert "accuracy" not in said[2][1]


def test_a_shifted_model_answers_as_the_run_measured(trained: Path, tmp_path: Path) -> None:
    config = parse(read_config(trained), METHOD_PARAMS)
    *_, last = read_metrics(trained)
    frame, loaded = patients(), corolla.load(trained)
    assert read_about(trained)["data"]["normalization"]["shift"][-1] > FIRST_SECOND - 1
    for client in range(3):
        part = open_client(config, client)
        model = loaded.model(client)
        shift = np.array(part.info.facts.shift)
        rows = part.x_test.astype(np.float64) + shift
        raw = pandas.DataFrame(rows[:, [4, 1, 0]], columns=["second", "pressure", "age"])
        raw["ward"] = np.where(rows[:, 2] == 1, "icu", "medicine")
        measured = np.mean(model.predict(raw) == np.array(part.info.classes)[part.y_test])
        assert measured == last["evaluation"]["clients"][str(client)]["accuracy"]
    assert (loaded.model(0).predict(frame) == frame.outcome).mean() > 0.85


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"columns": {"age": "Age"}}, ["age is missing", "Age is unknown"]),
        ({"columns": {"outcome": "result"}}, ["result is unknown"]),
    ],
)
def test_missing_and_foreign_columns_are_refused_with_both_lists(
    trained: Path, command: Command, tmp_path: Path, change: dict[str, Any], words: list[str]
) -> None:
    file, _ = export(trained, METHODS, None, tmp_path / "model.pt")
    frame = patients().rename(**change)
    frame.to_csv(tmp_path / "other.csv", index=False)
    code, _, said = command("predict", str(file), str(tmp_path / "other.csv"))
    assert code == 2 and mentions(said, "model has age", "pressure", "ward") and all(word in said for word in words)
    assert f"the table has {', '.join(frame.columns)}" in said
    with rejected(UserError, "DataFrame", "columns", "model's"):
        corolla.load(trained).model().predict(frame)


def test_values_that_do_not_fit_are_named(trained: Path) -> None:
    model = corolla.load(trained).model()
    frame = patients(20)
    with rejected(DataError, "DataFrame", "column ward", "got 'surgery'"):
        model.predict(frame.assign(ward="surgery"))
    with rejected(DataError, "DataFrame", "column age", "hold numbers", "got 'old'"):
        model.predict(frame.assign(age="old"))
    with pytest.raises(UserError, match="has no rows"):
        model.predict(frame.iloc[:0])


def test_rows_of_a_file_are_numbered_as_a_spreadsheet_does(trained: Path, command: Command, tmp_path: Path) -> None:
    file, _ = export(trained, METHODS, None, tmp_path / "model.pt")
    for column, value, words in (
        ("ward", "ICU", "got 'ICU' in row 5"),
        ("age", np.nan, "row 5 has none; 1 of 20 rows; fill them in, or train with the column in impute"),
    ):
        frame = patients(20)
        frame.loc[3, column] = value
        frame.to_csv(tmp_path / "later.csv", index=False)
        code, _, said = command("predict", str(file), str(tmp_path / "later.csv"))
        assert code == 2 and words in said


def test_a_table_is_read_as_one_asks(trained: Path, command: Command, tmp_path: Path) -> None:
    file, _ = export(trained, METHODS, None, tmp_path / "model.pt")
    table, frame = tmp_path / "other.csv", patients(40)
    frame.astype({"age": object}).assign(age=["old", *frame.age[1:].astype(str)]).to_csv(table, index=False)
    code, _, said = command("predict", str(file), str(table))
    # the model needs the column: to leave it out is no way
    assert (
        code == 2
        and mentions(said, "got 'old'", "row 2", "correct it", "name the word", "na-values")
        and "exclude" not in said
    )
    code, _, said = command("predict", str(file), str(table), "--set", "na-values=old")
    assert code == 2 and mentions(said, "column age", "every row", "row 2 has none")
    frame.to_csv(table, index=False, sep=";")
    code, _, said = command("predict", str(file), str(table))
    assert code == 2 and mentions(said, "set separator = ';'", "separates them")
    code, out, said = command("predict", str(file), str(table), "--set", "separator=;")
    assert code == 0, said
    assert answers(out) == corolla.load(trained).model().predict(frame).tolist()
    code, _, said = command("predict", str(file), str(table), "--set", "exclude=age")
    assert code == 2 and mentions(said, "predict takes separator", "na-values", "got exclude")


def test_json_has_every_class(trained: Path, command: Command, tmp_path: Path) -> None:
    file, _ = export(trained, METHODS, None, tmp_path / "model.pt")
    patients(30).to_csv(tmp_path / "some.csv", index=False)
    code, out, said = command("predict", str(file), str(tmp_path / "some.csv"), "--json")
    assert code == 0, said
    found = [row["probabilities"] for row in json.loads(out)["predictions"]]
    expected = corolla.load(trained).model().probabilities(patients(30))
    assert [list(row) for row in found] == [["no", "yes"]] * 30
    np.testing.assert_allclose([list(row.values()) for row in found], expected, rtol=1e-5)


def test_a_regressions_model_has_no_probabilities(run: Run, tmp_path: Path) -> None:
    patients(40).to_csv(tmp_path / "p.csv", index=False)
    own = {"dataset": f"table:{tmp_path}/p.csv", "target": "age", "client": "hospital", "task": "regression"}
    model = corolla.load(
        run(**own, partition="by-column", num_clients=3, categorical="ward,outcome", train_samples=0).path
    ).model()
    frame = patients(5)
    assert model.predict(frame).shape[0] == 5
    with rejected(UserError, "probabilities", "task regression predicts", "use predict"):
        model.probabilities(frame)
    with rejected(UserError, "predict", "takes an array", "data frame", "got 'x.png'"):
        model.predict("x.png")


def test_answers_need_no_targets(trained: Path, command: Command, tmp_path: Path) -> None:
    """A label that is written in another way leaves the answers unmeasured; it is no reason to give none."""
    file, _ = export(trained, METHODS, None, tmp_path / "model.pt")
    frame = patients(20)
    frame.loc[3, "outcome"] = "Yes "
    frame.to_csv(tmp_path / "odd.csv", index=False)
    code, out, said = command("predict", str(file), str(tmp_path / "odd.csv"))
    assert code == 0 and len(answers(out)) == 20 and "accuracy" not in out
    assert mentions(said, "no metric", "measured") and mentions(said, "column outcome", "among no", "got 'Yes '")
    assert answers(out) == corolla.load(trained).model().predict(frame).tolist()


@pytest.mark.parametrize("column, word", [("dose", "unknown"), ("second", "later")])
def test_a_target_that_is_no_number_is_not_measured(
    run: Run, command: Command, tmp_path: Path, column: str, word: str
) -> None:
    """The targets lie far from zero, so the card has a shift, which no word can take."""
    generator = np.random.default_rng(7)
    frame = patients(60).assign(dose=5000 + generator.normal(0, 1e-3, 60))
    frame.to_csv(tmp_path / "p.csv", index=False)
    folder = run(
        dataset=f"table:{tmp_path}/p.csv", target="dose,second", client="hospital", task="regression", num_clients=3,
        partition="by-column", categorical="ward,outcome", train_samples=0, num_server_rounds=1, model="mlp",
    )  # fmt: skip
    file, card = export(folder.path, METHODS, None, tmp_path / "model.pt")
    assert len(card["target-shift"]) == 2
    frame.astype({column: object}).assign(**{column: [word, *frame[column][1:]]}).to_csv(
        tmp_path / "odd.csv", index=False
    )
    for words in ((), ("--on-error", "row")):
        code, _, said = command("predict", str(file), str(tmp_path / "odd.csv"), *words)
        assert code == 0 and mentions(said, "no metric", "measured") and word in said, said


def test_the_card_holds_what_rows_need(trained: Path, tmp_path: Path) -> None:
    file, _ = export(trained, METHODS, None, tmp_path / "model.pt")
    card = model_card.read(file)
    assert card["features"] == ["age", "pressure", "ward=icu", "ward=medicine", "second"]
    assert card["table"]["others"] == ["hospital", "outcome"] and card["classes"] == ["no", "yes"]
    assert card["input"]["normalize"] == "mean-std" and len(card["input"]["mean"]) == 5
    # and the run folder, so that the table need not be here
    (Path(str(card["settings"]["dataset"]).removeprefix("table:"))).unlink(missing_ok=True)
    (tmp_path / "patients.csv").unlink()
    again, _ = export(trained, METHODS, None, tmp_path / "again.pt")
    other = model_card.read(again)
    assert [other[name] for name in ("features", "input", "classes")] == [
        card[name] for name in ("features", "input", "classes")
    ]
    assert other["table"]["encodings"] == card["table"]["encodings"]


def test_clients_go_by_number_or_name(trained: Path, command: Command, tmp_path: Path) -> None:
    clients = json.loads((trained / "clients.json").read_text())
    for name, facts in zip(("Basel", "Bern", "Chur"), clients.values(), strict=True):
        facts["name"] = name
    (trained / "clients.json").write_text(json.dumps(clients))
    loaded, frame = corolla.load(trained), patients(30)
    bern = loaded.model("Bern")
    np.testing.assert_array_equal(bern.probabilities(frame), loaded.model(1).probabilities(frame))
    assert np.abs(bern.probabilities(frame) - loaded.model("2").probabilities(frame)).max() >= 0
    code, _, _ = command("export", str(trained), "--client", "Bern", "--output", str(tmp_path / "bern.pt"))
    assert code == 0 and model_card.read(tmp_path / "bern.pt")["model"] == "client-1"
    with rejected(UserError, "client", "0 to 2", "Basel", "Bern", value="Genf"):
        loaded.model("Genf")
    for slip in ("bern", "Ber", "Bren"):
        code, _, err = command("export", str(trained), "--client", slip)
        assert code == 2 and mentions(err, f"got {slip!r}", "did you mean", "Bern?")


def test_a_client_that_is_not_there_is_told_with_twenty_names(trained: Path) -> None:
    names = [f"site {k:02}" for k in range(30)]
    for count in (20, 30):
        clients = {str(k): {"name": name} for k, name in enumerate(names[:count])}
        (trained / "clients.json").write_text(json.dumps(clients))
        with pytest.raises(UserError) as caught:
            corolla.load(trained).model("Genf")
        told = str(caught.value)
        assert "site 00, " in told and "site 19" in told and "site 20" not in told
        assert ("and 10 more" in told) == (count == 30)


def test_a_predictor_is_the_network(trained: Path) -> None:
    model = corolla.load(trained).model(0)
    assert isinstance(model, torch.nn.Module) and list(model.state_dict()) == list(model.network.state_dict())
    x = torch.zeros(2, 5)
    with torch.no_grad():
        assert torch.equal(model(x), model.network(x))
    assert model.train().training and model.network.training
    model.predict(patients(5))
    assert model.network.training and not model.eval().network.training


def test_arrays_where_the_data_are_arrays(run: Run, tmp_path: Path) -> None:
    model = corolla.load(run(method="fedavg", num_clients=2, num_server_rounds=1).path).model()
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8), np.uint8)
    assert set(model.predict(images)) <= set(range(10)) and model.probabilities(images).shape == (5, 10)
    with pytest.raises(UserError, match="not named columns"):
        model.predict(patients(5))
    with rejected(UserError, "ndarray", "model takes uint8"):
        model.predict(np.zeros((5, 3)))


def test_a_deployments_model_reads_rows_without_the_sites_data(run: Run, tmp_path: Path) -> None:
    frame = patients()
    nodes: dict[int, dict[str, Any]] = {}
    for k, part in frame.groupby("hospital"):
        part.drop(columns="hospital").to_csv(tmp_path / f"{k}.csv", index=False)
        nodes[int(str(k))] = {"data-path": str(tmp_path / f"{k}.csv")}
    folder = run(
        method="fedavg", dataset="node", classes="no,yes", target="outcome", categorical="ward", num_clients=3,
        num_server_rounds=6, local_epochs=6, learning_rate=0.1, model="mlp", node_configs=nodes,
    )  # fmt: skip
    for k in nodes:
        (tmp_path / f"{k}.csv").unlink()
    model = corolla.load(folder.path).model()
    assert (model.predict(frame.drop(columns="hospital")) == frame.outcome).mean() > 0.85
    with pytest.raises(UserError, match="hospital is unknown"):
        model.predict(frame)


def test_a_sites_median_stays_there(run: Run, tmp_path: Path) -> None:
    """Each site fills in its own: who exports without a site's data takes whole rows alone, with the same features."""
    frame = patients().drop(columns="second").assign(crp=np.arange(240.0))
    frame.loc[::7, "crp"] = np.nan
    nodes: dict[int, dict[str, Any]] = {}
    for k, part in frame.groupby("hospital"):
        part.drop(columns="hospital").to_csv(tmp_path / f"{k}.csv", index=False)
        nodes[int(str(k))] = {"data-path": str(tmp_path / f"{k}.csv")}
    folder = run(
        method="local", dataset="node", classes="no,yes", target="outcome", categorical="ward", impute="crp,age=50",
        num_clients=3, collect_personal_models=True, normalize_over="sites", node_configs=nodes,
    )  # fmt: skip
    told = json.loads((folder.path / "run.json").read_text())["data"]["input"]["encodings"]
    assert {fields["column"]: fields["fill"] for fields in told if fields["fill"] is not None} == {"age": 50}
    config = parse(read_config(folder.path), METHOD_PARAMS)
    for k in nodes:
        there = open_client(config, k, data_path=str(tmp_path / f"{k}.csv"))
        rows = read_rows(tmp_path / f"{k}.csv")
        whole = ~np.isnan(rows["crp"])
        _, card = export(folder.path, METHODS, k, tmp_path / "far.pt")
        with rejected(DataError, tmp_path, "column crp", "every row", "--data-path"):
            from_columns(tmp_path, rows, card)
        far = from_columns(tmp_path, {name: values[whole] for name, values in rows.items()}, card)
        _, card = export(folder.path, METHODS, k, tmp_path / "near.pt", data_path=str(tmp_path / f"{k}.csv"))
        near = from_columns(tmp_path, rows, card)
        assert np.array_equal(far, near[whole])
        trained_on = np.concatenate([there.x_train, there.x_test])
        assert sorted(map(bytes, near)) == sorted(map(bytes, trained_on))
        place = card["features"].index("crp")
        fill = next(fields["fill"] for fields in card["table"]["encodings"] if fields["column"] == "crp")
        assert set(near[~whole][:, place]) == {np.float32(fill)}


def test_names_in_new_rows_are_read_as_text(run: Run, command: Command, tmp_path: Path) -> None:
    """The new rows have only wards and classes that are numbers by themselves, so pandas would read 01 as 1."""
    frame = patients(60).drop(columns="second").assign(ward=["01", "10", "A1"] * 20, outcome=["07", "7", "B"] * 20)
    frame.to_csv(tmp_path / "all.csv", index=False)
    folder = run(
        method="fedavg", dataset=f"table:{tmp_path / 'all.csv'}", target="outcome", client="hospital",
        categorical="ward", partition="by-column", num_clients=3, num_server_rounds=1,
    )  # fmt: skip
    file, _ = export(folder.path, METHODS, None, tmp_path / "model.pt")
    code, out, err = command("predict", str(file), str(tmp_path / "all.csv"))
    assert code == 0 and "on 60 samples" in out, err
    every = answers(out)
    for ward, rows in (("01", slice(0, 60, 3)), ("10", slice(1, 60, 3))):
        frame[rows].to_csv(tmp_path / "some.csv", index=False)
        code, out, err = command("predict", str(file), str(tmp_path / "some.csv"))
        assert code == 0 and "on 20 samples" in out, (ward, err)
        assert answers(out) == every[rows]


def test_rows_count_as_a_spreadsheet_does(trained: Path, command: Command, tmp_path: Path) -> None:
    file, _ = export(trained, METHODS, 1, tmp_path / "model.pt")
    lines = patients(4).to_csv(index=False).splitlines()
    # a spreadsheet counts the empty line too
    (tmp_path / "gap.csv").write_text("\n".join([lines[0], lines[1], "", *lines[2:]]) + "\n")
    code, out, _ = command("predict", str(file), str(tmp_path / "gap.csv"))
    assert code == 0 and [line.split()[1] for line in out.splitlines() if line.startswith("row ")] == [
        "2",
        "4",
        "5",
        "6",
    ]
    wrong = lines[2].split(",")
    wrong[0] = "old"
    (tmp_path / "gap.csv").write_text("\n".join([lines[0], lines[1], "", ",".join(wrong), lines[3]]) + "\n")
    code, _, said = command("predict", str(file), str(tmp_path / "gap.csv"))
    assert code == 2 and mentions(said, "column age", "hold numbers", "got 'old'", "row 4")


def test_the_runs_own_file_is_recognized(trained: Path, command: Command, tmp_path: Path) -> None:
    file, model = tmp_path / "patients.csv", tmp_path / "g.pt"
    assert command("export", trained, "--output", model)[0] == 0
    card = json.loads((tmp_path / "g.pt.json").read_text())
    assert card["data"]["sha256"] == read_about(trained)["data"]["sha256"]
    assert card["data"]["file-sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert str(tmp_path) not in json.dumps(card)

    words = "these rows are the run's own data, most of them training rows: the run's own figures are over test rows"
    copy = tmp_path / "copy.csv"
    copy.write_bytes(file.read_bytes())
    for path in (file, copy):
        code, out, err = command("predict", model, path)
        assert code == 0 and out.splitlines()[-1].endswith(f"on 240 samples; {words}"), err
    assert json.loads(command("predict", model, copy, "--json")[1])["own-data"] is True
    patients(200).to_csv(copy, index=False)
    assert command("predict", model, copy)[1].splitlines()[-1].endswith("on 200 samples")
    assert json.loads(command("predict", model, copy, "--json")[1])["own-data"] is False

    # a file that has changed is not the run's any more
    patients(200).to_csv(file, index=False)
    assert command("export", trained, "--output", tmp_path / "h.pt")[0] == 0
    assert "file-sha256" not in json.loads((tmp_path / "h.pt.json").read_text())["data"]
    assert json.loads(command("predict", tmp_path / "h.pt", copy, "--json")[1])["own-data"] is None


def test_an_npz_of_the_run_is_recognized(run: Run, command: Command, tmp_path: Path) -> None:
    g, file = np.random.default_rng(0), tmp_path / "d.npz"
    x, y = g.normal(size=(60, 3)).astype(np.float32), np.arange(60) % 2
    np.savez(file, x_train=x, y_train=y, x_test=x[:10], y_test=y[:10])
    path = run(dataset=f"npz:{file}", num_server_rounds=1).path
    assert command("export", path, "--output", tmp_path / "g.pt")[0] == 0
    out = command("predict", tmp_path / "g.pt", file)[1]
    assert mentions(out.splitlines()[-1], "on 10 samples", "these samples", "run's own data")


# `corolla predict --on-error row`: bad rows come back empty, with their reason; labels keep their type ----------------


@pytest.fixture
def iris(run: Run, tmp_path: Path) -> tuple[Path, Path]:
    """A run on a table with integer labels and a column of words, and its model."""
    x, y = load_iris(return_X_y=True, as_frame=True)
    frame = x.assign(place=np.where(np.arange(150) % 2, "field", "garden"), kind=y)
    frame.columns = [name.removesuffix(" (cm)") for name in frame.columns]
    frame.to_csv(tmp_path / "iris.csv", index=False)
    folder = run(
        dataset=f"table:{tmp_path / 'iris.csv'}",
        target="kind",
        categorical="place",
        impute="petal width",
        partition="iid",
        train_samples=30,
        num_server_rounds=6,
        learning_rate=0.1,
    )
    return folder.path, export(folder.path, METHODS, None, tmp_path / "iris.pt")[0]


def test_bad_rows_come_back_empty_with_their_reason(iris: tuple[Path, Path], tmp_path: Path, command: Command) -> None:
    rows = pd.read_csv(tmp_path / "iris.csv").iloc[40:60].drop(columns="kind").astype({"sepal width": object})
    want = json.loads(command("predict", iris[1], written(rows, tmp_path), "--json")[1])["predictions"]
    bad = rows.assign(extra=1)
    bad.iloc[3, 0], bad.iloc[7, 4], bad.iloc[11, 1], bad.iloc[12, 3] = np.nan, "pond", "wide", np.nan
    code, _, err = command("predict", iris[1], written(bad, tmp_path))
    assert code == 2 and "extra" in err
    code, out, err = command("predict", iris[1], written(bad, tmp_path), "--json", "--on-error", "row")
    found = json.loads(out)["predictions"]
    assert code == 0 and "extra" in err and len(found) == 20
    for k, row in enumerate(found):
        if k in (3, 7, 11):
            word = {3: "sepal length", 7: "pond", 11: "wide"}[k]
            assert row["class"] is None and word in row["error"] and row["input"] == want[k]["input"]
            assert row["input"] in row["error"]
        elif k != 12:
            assert row["class"] == want[k]["class"] and not row["error"]
    # what training filled in is filled in
    assert found[12]["class"] in (0, 1, 2)
    code, out, _ = command("predict", iris[1], written(bad.iloc[[3]], tmp_path), "--json", "--on-error", "row")
    assert code == 0 and [row["error"] != "" for row in json.loads(out)["predictions"]] == [True]


def written(rows: pd.DataFrame, tmp_path: Path) -> Path:
    rows.to_csv(tmp_path / "rows.csv", index=False)
    return tmp_path / "rows.csv"


def test_one_bad_value_spoils_no_other_row(run: Run, tmp_path: Path) -> None:
    """Whatever kind its column has: booleans, dates, numbers, words."""
    frame = pd.DataFrame({"hot": np.arange(60) % 3 == 0, "size": np.arange(60) / 7, "kind": np.arange(60) % 2})
    frame["day"], frame["place"] = pd.date_range("2026-01-01", periods=60).astype(str), np.where(frame["hot"], "a", "b")
    frame.to_csv(tmp_path / "table.csv", index=False)
    setting = {
        "partition": "iid",
        "train_samples": 20,
        "test_samples": 5,
        "num_clients": 2,
        "num_server_rounds": 1,
        "categorical": "place",
    }
    folder = run(**setting, dataset=f"table:{tmp_path / 'table.csv'}", target="kind")
    _, card = export(folder.path, METHODS, None, tmp_path / "model.pt")
    rows = frame.drop(columns="kind").head(6).astype(object)
    want = predict.read_inputs([written(rows, tmp_path)], card).samples
    for column, value in [("hot", "maybe"), ("day", "soon"), ("size", "large"), ("place", "c"), ("hot", None)]:
        bad = rows.copy()
        bad.loc[2, column] = value
        found = predict.read_inputs([written(bad, tmp_path)], card, on_error="row")
        assert [*found.bad] == [2] and (found.samples == np.delete(want, 2, axis=0)).all()


def test_a_row_with_more_values_than_columns_is_a_bad_row(
    iris: tuple[Path, Path], tmp_path: Path, command: Command
) -> None:
    """So is one whose number Python alone reads, as for a table without bad rows."""
    path = written(pd.read_csv(tmp_path / "iris.csv").iloc[40:50].drop(columns="kind"), tmp_path)
    want = json.loads(command("predict", iris[1], path, "--json")[1])["predictions"]
    header, *lines = path.read_text().splitlines()
    lines[2] += ",7,8"
    lines[5] = "5_0" + lines[5][3:]
    path.write_text("\n".join([header, *lines]))
    assert command("predict", iris[1], path)[0] == 2
    code, out, err = command("predict", iris[1], path, "--json", "--on-error", "row")
    assert code == 0, err
    for k, row in enumerate(json.loads(out)["predictions"]):
        assert row["input"] == want[k]["input"] and bool(row["error"]) == (k in (2, 5))
        assert row["class"] == (None if row["error"] else want[k]["class"])
        assert k != 2 or "7 values in 5 columns" in row["error"]


def test_a_bad_sample_of_an_npz(run: Run, tmp_path: Path, command: Command) -> None:
    x, y = load_iris(return_X_y=True)
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    folder = run(dataset=f"npz:{tmp_path / 'd.npz'}", partition="iid", train_samples=30)
    file, _ = export(folder.path, METHODS, None, tmp_path / "d.pt")
    x[4, 2] = np.nan
    np.savez(tmp_path / "new.npz", x=x[:9], y=y[:9])
    assert command("predict", file, tmp_path / "new.npz")[0] == 2
    code, out, _ = command("predict", file, tmp_path / "new.npz", "--json", "--on-error", "row")
    told = json.loads(out)
    assert code == 0 and [k for k, row in enumerate(told["predictions"]) if row["error"]] == [4]
    assert told["measured"]["samples"] == 8


def test_integers_in_integers_out(iris: tuple[Path, Path], tmp_path: Path) -> None:
    frame = pd.read_csv(tmp_path / "iris.csv")
    assert (corolla.load(iris[0]).model().predict(frame) == frame["kind"]).mean() > 0.6
