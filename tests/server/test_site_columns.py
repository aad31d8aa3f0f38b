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
from fl_app.transport.wire import FEATURES
from strategies import METHODS
from tests.conftest import Command, Run
from tests.experiments.months import cancer
from tests.server.fake_grid import exchange, properties

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


@pytest.mark.parametrize("over", ["sites", "site"])
@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedcac"])
def test_columns_match_by_name(run: Run, tables: list[Path], tmp_path: Path, method: str, over: str) -> None:
    """A site with another order of columns, and with one more, trains the same bits."""
    more = {"method": method, "normalize_over": over, "validation_ratio": 0.2}
    whole = started(run, tables, "whole", **more)
    other = started(run, [tables[0], reordered(tables[1], tmp_path / "other.csv"), tables[2]], "other", **more)
    first, second = (list(read_metrics(folder.path))[-1] for folder in (whole, other))
    assert first["evaluation"]["accuracy"] == second["evaluation"]["accuracy"] and first["loss"] == second["loss"]
    assert read_summary(whole.path)["digest"] == read_summary(other.path)["digest"]


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
    with pytest.raises(UserError, match="client 1: .*mean area"):
        started(run, [tables[0], tmp_path / "less.csv", tables[2]], "less")


def test_sums_that_cannot_be_are_refused_by_name() -> None:
    names = [json.dumps(["a", "b"]), json.dumps(["b", "a"])]
    nodes = {k: properties(k, **{FEATURES: names[k == 0], "sums": "nonsense"}) for k in range(3)}
    with pytest.raises(UserError, match="client 0: property sums"):
        exchange(nodes, dataset="node", classes="0,1").registry.wait()


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
