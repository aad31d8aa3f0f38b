"""Sites whose tables differ: columns match by name, and `[data]` of site.toml says the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from corolla.experiments.exported import loading, predict
from corolla.experiments.exported.export import export
from deploy import site, supernode
from fl_app.data import site_columns
from fl_app.errors import UserError
from fl_app.server.run_folder import RunFolder, read_metrics, read_summary
from fl_app.site_directory import VARIABLE as SITE_DIRECTORY
from strategies import METHODS
from tests.conftest import Command, Run
from tests.experiments.months import cancer
from tests.facts import mentions, rejected

SETTING: dict[str, Any] = {"dataset": "node", "target": "kind", "classes": "malignant,benign", "learning_rate": 0.05}


@pytest.fixture
def tables(tmp_path: Path) -> list[Path]:
    return [cancer(tmp_path / f"{k}.csv", slice(k, None, 3)) for k in range(3)]


def started(run: Run, tables: list[Path], name: str, **more: Any) -> RunFolder:
    nodes = {k: {"data-path": str(path), "name": f"plant-{k}"} for k, path in enumerate(tables)}
    return run(**SETTING, node_configs=nodes, run_name=name, **more)


def reordered(path: Path, to: Path) -> Path:
    frame = pd.read_csv(path)
    frame = frame[[*frame.columns[::-1]]]
    frame.insert(2, "shift leader", np.arange(len(frame)) % 3)
    frame.to_csv(to, index=False)
    return to


def test_columns_of_a_private_run_are_in_the_order_of_their_names(run: Run, tables: list[Path], tmp_path: Path) -> None:
    """Whatever order each site's file has: the same bits, and a site's own model predicts its own raw rows."""
    more = {"method": "fedavg", "private": True, "private_left_out": "client", "num_clients": 3}
    whole = started(run, tables, "whole", **more)
    turned = [
        sorted_in(path, tmp_path / f"{k}-turned.csv", np.random.default_rng(k).permutation(9))
        for k, path in enumerate(tables)
    ]
    other = started(run, turned, "other", **more)
    assert not list(read_metrics(other.path))[0]["failures"]
    assert read_summary(whole.path)["digest"] == read_summary(other.path)["digest"]
    file, card = export(other.path, METHODS, None, tmp_path / "own.pt", data_path=str(turned[1]))
    assert list(card["features"]) == sorted(pd.read_csv(tables[1]).columns[:8])
    _, again = export(whole.path, METHODS, None, tmp_path / "whole.pt", data_path=str(tables[1]))
    answers = []
    for path in (tables[1], turned[1]):
        asked = predict.read_inputs([path], card)
        answers.append(predict.ask(loading.open_file(file, card, METHODS), asked.samples, card)[1])
    assert (answers[0] == answers[1]).all() and again["input"]["mean"] == card["input"]["mean"]


def sorted_in(path: Path, to: Path, order: np.ndarray) -> Path:
    frame = pd.read_csv(path)
    frame[[frame.columns[k] for k in order]].to_csv(to, index=False)
    return to


def test_a_site_of_a_private_run_leaves_out_its_additional_column(
    run: Run, tables: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"method": "fedavg", "private": True, "private_left_out": "client", "num_clients": 3}
    there = [reordered(path, tmp_path / f"{k}-more.csv") for k, path in enumerate(tables)]
    with rejected(UserError, "", "client 2", "columns or classes", "other names"):
        started(run, [*tables[:2], there[2]], "refused", **more)
    whole = started(run, tables, "whole", **more)
    monkeypatch.setenv(site_columns.VARIABLE, json.dumps({"exclude": ["shift leader"]}))
    other = started(run, there, "other", **more, exclude="shift leader")
    assert read_summary(whole.path)["digest"] == read_summary(other.path)["digest"]


def test_what_a_run_excludes_need_not_be_in_each_sites_table(run: Run, tables: list[Path], tmp_path: Path) -> None:
    whole = started(run, tables, "whole", method="fedavg")
    other = [tables[0], reordered(tables[1], tmp_path / "other.csv"), tables[2]]
    assert (
        read_summary(started(run, other, "other", method="fedavg", exclude="shift leader").path)["digest"]
        == (read_summary(whole.path)["digest"])
    )
    with pytest.raises(UserError, match="exclude"):
        started(run, tables, "mistyped", method="fedavg", exclude="mean aera")


def test_a_model_exported_at_a_site_reads_rows_in_the_sites_order(run: Run, tables: list[Path], tmp_path: Path) -> None:
    own = reordered(tables[1], tmp_path / "other.csv")
    folder = started(run, [tables[0], own, tables[2]], "run", method="fedavg", validation_ratio=0.2)
    _, served = export(folder.path, METHODS, 1, tmp_path / "served.pt")
    file, card = export(folder.path, METHODS, 1, tmp_path / "own.pt", data_path=str(own))
    assert card["features"] == served["features"]
    asked = [predict.read_inputs([tables[1]], known).samples for known in (card, served)]
    found = [predict.ask(loading.open_file(file, card, METHODS), rows, card)[1] for rows in asked]
    assert (found[0] == found[1]).all()
    assert (asked[0] == predict.read_inputs([own], card).samples).all()


def test_a_file_is_no_data_path_of_a_run_whose_data_are_the_runs(run: Run, tables: list[Path], tmp_path: Path) -> None:
    shared = run(num_clients=1, method="fedavg", dataset=f"table:{tables[0]}", target="kind", partition="iid")
    with pytest.raises(UserError, match="--data-path"):
        export(shared.path, METHODS, 0, tmp_path / "other.pt", data_path=str(tables[1]))


def test_a_client_that_is_gone_is_not_new(run: Run, tables: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    june = started(run, tables, "june", method="fedavg", keep_state=True)
    started(run, tables, "july", method="fedavg", from_run=str(june.path), without="2", num_server_rounds=1)
    (line,) = [line for line in caplog.messages if line.startswith("goes on from")]
    assert "with 2 clients" in line and "new" not in line.partition(";")[2].partition(";")[0]


def test_a_run_goes_on_with_the_columns_of_the_earlier_one(run: Run, tables: list[Path], tmp_path: Path) -> None:
    """Whatever order the sites' tables have by now, and if all have an additional column."""
    june = started(run, tables, "june", method="fedper", keep_state=True)
    more = {"method": "fedper", "from_run": str(june.path), "num_server_rounds": 1, "collect_personal_models": True}
    more["keep_state"] = True
    july = started(run, tables, "july", **more)
    now = [reordered(path, tmp_path / f"{k}-now.csv") for k, path in enumerate(tables)]
    later = started(run, now, "later", **more)
    assert read_summary(july.path)["digest"] == read_summary(later.path)["digest"]
    # although no site's own table has this order, the run knows it
    _, card = export(later.path, METHODS, 0, tmp_path / "later.pt")
    assert list(card["features"]) == list(pd.read_csv(tables[0]).columns[:8])
    started(run, now, "august", method="fedper", from_run=str(later.path), num_server_rounds=1)
    less = [tmp_path / f"{k}-less.csv" for k in range(3)]
    for path, to in zip(tables, less, strict=True):
        pd.read_csv(path).drop(columns="mean area").to_csv(to, index=False)
    with rejected(UserError, "from", "features", "mean area", "only there"):
        started(run, less, "less", **more)


def test_a_private_run_goes_on_with_the_columns_of_the_earlier_one(
    run: Run, tables: list[Path], tmp_path: Path
) -> None:
    """The order of a plain run's columns, not that of their names; and so do the runs after it."""
    may = started(run, tables, "may", method="fedavg")
    more = {"method": "fedavg", "private": True, "private_left_out": "client", "num_clients": 3, "num_server_rounds": 1}
    more |= {"normalize_over": "initial"}
    losses = [list(read_metrics(may.path))[-1]["evaluation"]["loss"]]
    for name, before in (("june", "may"), ("july", "june")):
        folder = started(run, tables, name, from_run=str(may.path.with_name(before)), **more)
        (row,) = read_metrics(folder.path)
        assert row["loss-before"] == pytest.approx(losses[-1], rel=1e-6)
        losses.append(row["evaluation"]["loss"])
    other = [tmp_path / f"{k}-other.csv" for k in range(3)]
    for path, to in zip(tables, other, strict=True):
        pd.read_csv(path).rename(columns={"mean area": "surface"}).to_csv(to, index=False)
    with pytest.raises(UserError):
        started(run, other, "other", from_run=str(may.path), **more)
    assert not (tmp_path / "runs" / "other" / "summary.json").exists()


def test_a_private_simulation_goes_on_from_one_with_another_order_of_columns(run: Run, tmp_path: Path) -> None:
    """Each run takes the columns in the order of their names, and the second is the first's next round."""
    table = cancer(tmp_path / "may.csv", slice(None))
    turned = sorted_in(table, tmp_path / "june.csv", np.random.default_rng(0).permutation(9))
    more = {"method": "fedavg", "private": True, "private_left_out": "client", "num_clients": 3, "keep_state": True}
    more |= SETTING | {"num_server_rounds": 1}
    may = run(**more | {"dataset": f"table:{table}"}, run_name="may")
    june = [
        run(**more | {"dataset": f"table:{path}", "from_run": str(may.path)}, run_name=f"from-{path.stem}")
        for path in (table, turned)
    ]
    assert read_summary(june[0].path)["digest"] == read_summary(june[1].path)["digest"]
    (row,) = read_metrics(june[1].path)
    before = list(read_metrics(may.path))[-1]["evaluation"]["loss"]
    assert row["loss-before"] == pytest.approx(before, rel=1e-5)


@pytest.mark.parametrize("over", ["sites", "site"])
def test_every_site_may_have_its_own_order_and_columns(
    run: Run, tables: list[Path], tmp_path: Path, over: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No two sites have the same list: the run's columns are those that most have, in the first client's order."""
    more = {"method": "fedper", "normalize_over": over, "validation_ratio": 0.2}
    whole = started(run, tables, "whole", **more)
    own = [
        tables[0],
        *[sorted_in(tables[k], tmp_path / f"{k}-own.csv", np.random.default_rng(k).permutation(9)) for k in (1, 2)],
    ]
    for k, path in enumerate(own):
        frame = pd.read_csv(path)
        frame.insert(3 * k, f"remark {k}", np.arange(len(frame)) % 3)
        own[k] = tmp_path / f"{k}-more.csv"
        frame.to_csv(own[k], index=False)
    other = started(run, own, "other", **more)
    assert read_summary(whole.path)["digest"] == read_summary(other.path)["digest"]
    for k in range(3):
        assert any(f"client {k}" in line and f"remark {k}" in line for line in caplog.messages)


def test_the_first_clients_columns_are_not_the_runs_if_most_have_others(
    run: Run, tables: list[Path], tmp_path: Path
) -> None:
    other = started(run, [reordered(tables[0], tmp_path / "other.csv"), *tables[1:]], "other", method="fedavg")
    file, card = export(other.path, METHODS, None, tmp_path / "model.pt")
    assert list(card["features"]) == list(pd.read_csv(tables[1]).columns[:8])
    for path in (tables[1], tables[0]):
        asked = predict.read_inputs([path], card)
        outputs, _ = predict.ask(loading.open_file(file, card, METHODS), asked.samples, card)
        assert asked.targets is not None and 0 <= predict.measure(outputs, asked.targets, card)[1] <= 1


def test_a_site_that_lacks_a_column_is_named(run: Run, tables: list[Path], tmp_path: Path) -> None:
    pd.read_csv(tables[1]).drop(columns="mean area").to_csv(tmp_path / "less.csv", index=False)
    with rejected(UserError, None, "client 1 (plant-1)", "mean area"):
        started(run, [tables[0], tmp_path / "less.csv", tables[2]], "less")


OWN = """
[data]
separator = ";"
decimal = ","
rename = {Flaeche = "mean area"}
scale = {"mean area" = 0.001}
fill = {"mean texture" = 19.0, "mean radius" = 14.0}
"""


def foreign(path: Path, to: Path) -> Path:
    """Write a table as another plant would: signs, a name, a unit, a missing column and missing values."""
    frame = pd.read_csv(path).drop(columns="mean texture")
    frame["mean area"] *= 1000
    frame.loc[::5, "mean radius"] = np.nan
    frame.rename(columns={"mean area": "Flaeche"}).to_csv(to, index=False, sep=";", decimal=",")
    return to


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "site.toml"
    path.write_text(OWN)
    path.chmod(0o644)
    return path


def test_a_sites_own_table_is_read_in_the_runs_names_and_units(
    command: Command, tables: list[Path], rules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(site_columns.VARIABLE, "")
    table, plain = foreign(tables[0], tmp_path / "own.csv"), pd.read_csv(tables[0])
    words = ["--set", "target=kind", "--set", f"data-dir={tmp_path / 'data'}", "--clients", "1", "--json"]
    code, _, err = command("data", "show", "--set", f"dataset=table:{table}", *words)
    assert code == 2 and "separator" in err
    code, out, err = command("data", "show", "--site", rules, "--set", f"dataset=table:{table}", *words)
    assert code == 0, err
    features = {column[0] for column in json.loads(out)["columns"] if column[1] == "feature"}
    assert features == set(plain.columns[:8])
    from fl_app import data

    found = data.prepare(
        f"table:{table}", tmp_path / "data", target="kind", own=site_columns.SiteColumns.of_environment()
    )
    x = np.concatenate([found.x_train, found.x_test])
    place = {name: k for k, name in enumerate(found.info.facts.features)}
    assert sorted(x[:, place["mean area"]]) == pytest.approx(sorted(plain["mean area"]), rel=1e-5)
    assert set(x[:, place["mean texture"]]) == {19.0} and (x[:, place["mean radius"]] == 14.0).sum() >= len(plain) // 5


@pytest.mark.parametrize(
    "line",
    [
        'rename = {Druck = "pressure"}',
        "scale = {pressure = 0.001}",
        "scale = {kind = 2.0}",
    ],
)
def test_a_column_that_is_not_there_is_named(
    command: Command, tables: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setenv(site_columns.VARIABLE, "")
    path = tmp_path / "site.toml"
    path.write_text(f"[data]\n{line}\n")
    path.chmod(0o644)
    words = ["--set", f"dataset=table:{tables[0]}", "--set", "target=kind", "--set", f"data-dir={tmp_path / 'data'}"]
    code, _, err = command("data", "show", "--site", path, *words, "--clients", "1")
    assert code == 2 and line.partition(" ")[0] in err


def test_a_table_of_its_own_at_a_site_without_one(
    run: Run, tables: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A site's data that are no table are refused beside `[data]`. Data that all sites share have a line."""
    monkeypatch.setenv(site_columns.VARIABLE, json.dumps({"scale": {"mean area": 0.001}}))
    x = np.random.default_rng(0).random((40, 8), np.float32)
    np.savez(tmp_path / "own.npz", x_train=x, y_train=np.arange(40) % 2, x_test=x, y_test=np.arange(40) % 2)
    with rejected(UserError, None, "client 0", "no table") as refused:
        run(**SETTING, num_clients=1, node_configs={0: {"data-path": str(tmp_path / "own.npz")}}, run_name="own")
    assert "scale" in str(refused.value)
    run(num_clients=1, dataset="digits", run_name="shared")
    assert [line for line in caplog.messages if mentions(line, "digits is no", "table")]


def test_a_saved_data_set_is_read_in_the_runs_names_and_units(
    tables: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the site has another name for the classes' column."""
    from datasets import Dataset

    from fl_app import data

    plain = pd.read_csv(tables[0])
    Dataset.from_pandas(plain, preserve_index=False).save_to_disk(tmp_path / "plain")
    own = plain.rename(columns={"mean area": "Flaeche", "kind": "Art"})
    own["Flaeche"] *= 1000
    Dataset.from_pandas(own, preserve_index=False).class_encode_column("Art").save_to_disk(tmp_path / "own")
    names = {"rename": {"Flaeche": "mean area", "Art": "kind"}, "scale": {"mean area": 0.001}}
    found = [
        data.prepare(f"hf:{tmp_path / name}", tmp_path / "data", target="kind", own=site_columns.SiteColumns.of(how))
        for name, how in (("plain", {}), ("own", names))
    ]
    assert found[0].info.classes == found[1].info.classes
    assert found[0].info.facts.features == found[1].info.facts.features
    assert np.allclose(found[0].x_train, found[1].x_train) and (found[0].y_train == found[1].y_train).all()


@pytest.mark.parametrize(
    "line",
    ["units = {}", "scale = {a = 0}", "scale = {a = true}", 'rename = {a = ""}', "decimal = 1", "fill = {a = []}"],
)
def test_a_table_of_another_form_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "site.toml"
    path.write_text(f"[data]\n{line}\n")
    path.chmod(0o644)
    with pytest.raises(UserError, match="data: must be"):
        site.read_site(path)


def test_a_supernode_hands_the_table_to_its_applications(rules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(site_columns.VARIABLE, "")
    supernode.use_rules(rules)
    assert site_columns.SiteColumns.of_environment() == site_columns.SiteColumns.of(site.read_site(rules).data)


def test_a_model_predicts_a_sites_own_raw_file(
    run: Run, command: Command, tables: list[Path], rules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the site's `[data]`, or with what the card of a model that the site exported has of it."""
    raw = [foreign(path, tmp_path / f"{k}-raw.csv") for k, path in enumerate(tables)]
    with monkeypatch.context() as at_sites:
        at_sites.setenv(site_columns.VARIABLE, site_columns.SiteColumns.of(site.read_site(rules).data).text)
        at_sites.setenv(SITE_DIRECTORY, str(tmp_path / "site"))
        folder = started(run, raw, "raw", method="fedper", test_ratio=0.5, collect_personal_models=True)
    served, _ = export(folder.path, METHODS, 1, tmp_path / "served.pt")
    monkeypatch.setenv(SITE_DIRECTORY, str(tmp_path / "site"))
    code, _, err = command("node", "export", "raw", "--to", tmp_path / "own")
    assert code == 0, err
    (own,) = (tmp_path / "own").glob("*.pt")
    monkeypatch.setenv(site_columns.VARIABLE, "")
    code, _, err = command("predict", served, raw[1])
    assert code == 2 and "separator" in err
    code, out, err = command("predict", own, raw[1], "--json")
    assert code == 0 and "card" in err, err
    by_card = json.loads(out)
    client = int(own.stem.rpartition("-")[2])
    code, out, err = command("predict", served, raw[1], "--site", rules, "--json")
    assert code == 0 and str(rules) in err, err
    by_site = json.loads(out)
    assert by_site["measured"]["samples"] == by_card["measured"]["samples"] == len(pd.read_csv(tables[1]))
    if client == 1:
        assert by_site == by_card
    # the same rows, as the run has them; new rows have no target, and no additional column is refused
    known = pd.read_csv(tables[1])
    known["mean texture"] = 19.0
    known.loc[::5, "mean radius"] = 14.0
    known.drop(columns="kind").to_csv(tmp_path / "known.csv", index=False)
    code, out, err = command("predict", served, tmp_path / "known.csv", "--json")
    assert [row["class"] for row in json.loads(out)["predictions"]] == [row["class"] for row in by_site["predictions"]]
    new = pd.read_csv(raw[1], sep=";", decimal=",").drop(columns="kind").assign(foreman="x")
    new.to_csv(tmp_path / "new.csv", index=False, sep=";", decimal=",")
    code, out, err = command("predict", served, tmp_path / "new.csv", "--site", rules, "--json")
    assert code == 0 and json.loads(out)["predictions"] == by_site["predictions"] and "foreman" in err
