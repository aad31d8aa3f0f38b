"""A run that starts from an exported model: its names are compared with the data's, and the scaling is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from corolla.experiments.exported import loading, predict
from corolla.experiments.exported.export import export
from fl_app import data, model_card, model_names, weights
from fl_app.config import parse
from fl_app.errors import ConfigurationError, UserError
from fl_app.model_names import ModelNames
from fl_app.server.run_folder import RunFolder, read_about, read_config, read_metrics
from strategies import METHOD_PARAMS, METHODS
from tests.conftest import Made, Run
from tests.experiments.months import SETTING, WINE, cancer, diabetes, wine
from tests.facts import rejected

BACKWARDS = tuple(range(12, -1, -1))


def exported(folder: RunFolder, path: Path) -> Path:
    return export(folder.path, METHODS, None, path)[0]


def first(folder: RunFolder, name: str = "accuracy-before") -> float:
    """Return a figure of the first round, before any training."""
    return float(next(iter(read_metrics(folder.path)))[name])


def figure_of(file: Path, folder: RunFolder) -> float:
    """Return the mean figure of an exported model over the clients' raw test rows of a run."""
    config, card = parse(read_config(folder.path), METHOD_PARAMS), model_card.read(file)
    found = data.prepare_for(config)
    columns = [found.info.facts.features.index(name) for name in card["features"]]
    outputs = predict.ask(loading.open_file(file, card, METHODS), found.x_test[:, columns], card)[0]
    place = {name: k for k, name in enumerate(card["classes"])}
    y = np.array([place[found.info.classes[label]] for label in found.y_test])
    correct = outputs.argmax(1) == y
    groups = [correct[[k for k, g in enumerate(found.groups.test) if g == one]] for one in range(3)]  # type: ignore[union-attr]
    return float(np.mean([own.mean() for own in groups]))


@pytest.fixture(scope="module")
def june(tmp_path_factory: pytest.TempPathFactory, made_once: Made) -> Path:
    """Last month's table, and its model beside it."""
    place = tmp_path_factory.mktemp("june")
    table = wine(place / "june.csv", words=True)
    folder = made_once(
        place / "run",
        dataset=f"table:{table}",
        classes=",".join(WINE),
        categorical="strength=light|strong",
        **SETTING,
        num_server_rounds=8,
    )
    exported(folder, place / "june.pt")
    return place


@pytest.fixture
def month(june: Path, tmp_path: Path) -> Path:
    """Last month's model, and its table beside it."""
    for file in june.glob("june.*"):
        shutil.copy(file, tmp_path)
    return tmp_path / "june.pt"


def july(run: Run, tmp_path: Path, file: Path, **changes: Any) -> RunFolder:
    """Run the next month: the same rows, in other orders."""
    table = wine(tmp_path / "july.csv", words=True, columns=BACKWARDS)
    setting = {
        "dataset": f"table:{table}",
        "classes": ",".join(WINE[::-1]),
        "categorical": "strength=strong|light",
        **SETTING,
        "num_server_rounds": 1,
        "run_name": "july",
        "initial_weights": str(file),
    }
    return run(**{**setting, **changes})


def test_classes_features_and_words_in_another_order_start_as_the_model_ended(
    run: Run, tmp_path: Path, month: Path
) -> None:
    before = model_card.read(month)["metrics"]["accuracy"]
    assert before > 0.9
    folder = july(run, tmp_path, month)
    assert first(folder) == pytest.approx(before, abs=1e-6)


def test_other_classes_and_features_are_refused_by_name(run: Run, tmp_path: Path, month: Path) -> None:
    table = pd.read_csv(tmp_path / "june.csv")
    table["kind"] = table["kind"].replace("barbera", "dolcetto")
    table.rename(columns={"ash": "cinders"}).to_csv(tmp_path / "other.csv", index=False)
    setting = {"categorical": "strength=light|strong", "dataset": f"table:{tmp_path / 'other.csv'}"}
    with pytest.raises(UserError, match=r"features .*cinders.*ash"):
        july(run, tmp_path, month, **setting, classes="")
    table.to_csv(tmp_path / "other.csv", index=False)
    with pytest.raises(UserError, match=r"classes .*dolcetto.*barbera"):
        july(run, tmp_path, month, **setting, classes="")
    with pytest.raises(UserError, match=r"features .*strength=medium"):
        july(run, tmp_path, month, categorical="strength=light|strong|medium")


def test_a_partial_start_takes_rows_by_class(run: Run, tmp_path: Path, month: Path) -> None:
    table = pd.read_csv(tmp_path / "june.csv")
    extra = table.sample(30, random_state=0).assign(kind="dolcetto")
    pd.concat([table, extra]).to_csv(tmp_path / "four.csv", index=False)
    setting = {
        "categorical": "strength=light|strong",
        "dataset": f"table:{tmp_path / 'four.csv'}",
        "learning_rate": 1e-9,
    }
    with pytest.raises(UserError, match="dolcetto"):
        july(run, tmp_path, month, **setting, classes="")
    folder = july(
        run, tmp_path, month, **setting, classes="dolcetto,barbera,barolo,grignolino", initial_weights_partial=True
    )
    state, old = torch.load(exported(folder, tmp_path / "four.pt")), torch.load(month)
    last = list(old)[-1]
    assert torch.allclose(state[last][1:], old[last][[2, 0, 1]], atol=1e-5) and state[last].shape == (4,)


@pytest.mark.parametrize("over", ["sites", "initial"])
def test_the_scaling_is_the_datas_or_the_models_own(run: Run, tmp_path: Path, month: Path, over: str) -> None:
    table = pd.read_csv(tmp_path / "june.csv")
    drifted = table[table["alcohol"] > 12.5]
    drifted[[*table.columns[::-1]]].to_csv(tmp_path / "drifted.csv", index=False)
    setting = {"categorical": "strength=light|strong", "dataset": f"table:{tmp_path / 'drifted.csv'}"}
    folder = july(run, tmp_path, month, **setting, classes="barbera,barolo,grignolino", normalize_over=over)
    card, told = model_card.read(month), read_about(folder.path)["data"]["normalization"]
    place = {name: k for k, name in enumerate(card["features"])}
    config = parse(read_config(folder.path), METHOD_PARAMS)
    features = data.prepare_for(config).info.facts.features
    theirs = [card["input"]["mean"][place[name]] for name in features]
    assert (told["mean"] == theirs) == (over == "initial")
    expected = figure_of(month, folder)
    assert (first(folder) == pytest.approx(expected, abs=1e-6)) == (over == "initial")
    # the new model's card has the scaling that was used
    file = exported(folder, tmp_path / "drifted.pt")
    assert model_card.read(file)["input"]["mean"] == told["mean"]
    final = list(read_metrics(folder.path))[-1]["evaluation"]["accuracy"]
    assert figure_of(file, folder) == pytest.approx(final, abs=1e-6)


def test_normalize_over_initial_needs_a_model_with_a_scaling(run: Run, tmp_path: Path, month: Path) -> None:
    with pytest.raises(UserError, match="initial-weights"):
        july(run, tmp_path, Path(), normalize_over="initial", initial_weights="")
    with pytest.raises(UserError, match="normalize"):
        july(run, tmp_path, month, normalize_over="initial", normalize="unit")
    model_card.beside(month).unlink()
    with pytest.raises(UserError, match="card"):
        july(run, tmp_path, month, normalize_over="initial")


def test_a_file_without_a_card_is_said_and_a_wrong_card_is_refused(
    run: Run, tmp_path: Path, month: Path, caplog: pytest.LogCaptureFixture
) -> None:
    card = model_card.beside(month)
    text = card.read_text()
    card.write_text(text.replace("barolo", "borolo"))
    with pytest.raises(UserError, match=r"june\.pt\.json"):
        july(run, tmp_path, month)
    other = json.loads(text)
    card.write_text(text)
    state = torch.load(month)
    torch.save({name: tensor + 1 for name, tensor in state.items()}, month)
    with pytest.raises(UserError, match="has changed"):
        july(run, tmp_path, month)
    card.unlink()
    assert other["format"] == 1
    with caplog.at_level("WARNING", logger="corolla"):
        july(run, tmp_path, month, run_name="nameless")
    assert sum("june.pt.json" in line.getMessage() for line in caplog.records) == 1


def test_digits_with_their_classes_backwards(run: Run, tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    images = (x.reshape(-1, 8, 8) * 15).astype(np.uint8)
    np.savez(tmp_path / "d.npz", x_train=images[:1200], y_train=y[:1200], x_test=images[1200:], y_test=y[1200:])
    setting = {"dataset": f"npz:{tmp_path / 'd.npz'}", "partition": "iid", "train_samples": 300, "test_samples": 100}
    before = run(**setting, num_server_rounds=6, learning_rate=0.1, local_epochs=2)
    file = exported(before, tmp_path / "d.pt")
    backwards = ",".join(str(k) for k in range(9, -1, -1))
    folder = run(**setting, num_server_rounds=1, classes=backwards, initial_weights=str(file), run_name="july")
    assert first(folder) == pytest.approx(model_card.read(file)["metrics"]["accuracy"], abs=0.02)
    assert first(folder) > 0.7


def test_numbers_are_no_classes(run: Run, tmp_path: Path) -> None:
    """Also where the classes are called 0 and 1, so that no names can be compared."""
    table = diabetes(tmp_path / "targets.csv", ("progress", "bmi"))
    setting = {"partition": "iid", "num_server_rounds": 1, "num_clients": 2, "dataset": f"table:{table}"}
    june = run(**setting, task="regression", target="progress,bmi", run_name="june")
    file, _ = export(june.path, METHODS, None, tmp_path / "june.pt")
    frame = pd.read_csv(table).drop(columns="bmi")
    frame.assign(progress=(frame["progress"] > 1).astype(int)).to_csv(other := tmp_path / "classes.csv", index=False)
    setting |= {"dataset": f"table:{other}", "target": "progress", "initial_weights": str(file)}
    with pytest.raises(ConfigurationError) as refused:
        run(**setting, run_name="july")
    assert refused.value.key.startswith("initial-weights") and refused.value.value == "numbers"
    run(**setting, run_name="july", initial_weights_partial=True)


@pytest.mark.parametrize("far", [0.0, 1e7])
def test_targets_of_a_regression_keep_their_values(run: Run, tmp_path: Path, far: float) -> None:
    setting = {"task": "regression", "partition": "iid", "train_samples": 60, "test_samples": 20, "learning_rate": 0.02}
    june = diabetes(tmp_path / "june.csv", ("progress", "bmi"), far)
    before = run(dataset=f"table:{june}", target="progress,bmi", **setting, num_server_rounds=4)
    file = exported(before, tmp_path / "june.pt")
    july = diabetes(tmp_path / "july.csv", ("bmi", "progress"), far)
    rows = pd.read_csv(july).iloc[40:]
    rows.to_csv(july, index=False)
    folder = run(
        dataset=f"table:{july}",
        target="bmi,progress",
        **setting,
        num_server_rounds=1,
        normalize_over="initial",
        initial_weights=str(file),
        run_name="july",
    )
    config, card = parse(read_config(folder.path), METHOD_PARAMS), model_card.read(file)
    shift = np.array(data.prepare_for(config).info.facts.target_shift or (0.0, 0.0))
    errors = []
    for client in range(3):
        part = data.open_client(config, client)
        words = predict.answers_in_words(
            predict.ask(loading.open_file(file, card, METHODS), part.x_test, card)[1], card
        )
        errors.append(np.sqrt(np.mean((words[:, ::-1] - (part.y_test + shift)) ** 2)))
    assert first(folder, "rmse-before") == pytest.approx(np.mean(errors), rel=1e-3)


@pytest.mark.parametrize(("method", "private"), [("fedavg", False), ("fedper", False), ("fedavg", True)])
def test_sites_with_other_orders(run: Run, tmp_path: Path, method: str, private: bool) -> None:
    """The server's file, and with FedPer the one that each node reads."""
    setting: dict[str, Any] = {
        "target": "kind",
        "num_clients": 3,
        "learning_rate": 0.05,
        "local_epochs": 3,
        "dataset": "node",
    }
    june = [cancer(tmp_path / f"june-{k}.csv", slice(k, None, 3)) for k in range(3)]
    nodes = {k: {"data-path": str(path)} for k, path in enumerate(june)}
    before = run(method="fedavg", classes="malignant,benign", node_configs=nodes, num_server_rounds=5, **setting)
    file = exported(before, tmp_path / "june.pt")
    columns = (3, 0, 1, 2, 7, 6, 5, 4)
    later = [cancer(tmp_path / f"july-{k}.csv", slice(k, None, 3), columns) for k in range(3)]
    nodes = {k: {"data-path": str(path)} for k, path in enumerate(later)}
    more = {"private": True} if private else {}
    again: dict[str, Any] = {
        "method": method,
        "classes": "benign,malignant",
        "node_configs": nodes,
        "num_server_rounds": 1,
        "run_name": "july",
        "initial_weights": str(file),
        "normalize_over": "initial",
        **more,
    }
    folder = run(**setting, **again)
    assert first(folder) == pytest.approx(model_card.read(file)["metrics"]["accuracy"], abs=1e-6)


# layers


class Wide(nn.Module):
    """Features that two layers read, one behind normalizations, and outputs behind a layer without tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.BatchNorm1d(5)
        self.norm, self.deep = nn.LayerNorm(5), nn.Linear(5, 4)
        self.wide, self.head, self.same = nn.Linear(5, 4, bias=False), nn.Linear(4, 3), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.same(self.head(torch.relu(self.deep(self.norm(self.scale(x)))) + self.wide(x)))


class Hidden(nn.Module):
    """Features that are read behind a function that layers do not show, and outputs that are scaled."""

    def __init__(self, *, inputs: bool) -> None:
        super().__init__()
        self.first, self.head, self.inputs = nn.Linear(5, 4), nn.Linear(4, 3), inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * x + x if self.inputs else x
        answer: torch.Tensor = self.head(self.first(x).relu())
        return answer if self.inputs else answer * 2


def file_of(module: nn.Module, path: Path) -> Path:
    torch.save(module.state_dict(), path)
    model_card.write(
        path,
        {
            "format": 1,
            "made-by": "a test",
            "run": {"name": "run", "digest": ""},
            "model": "global",
            "method": "fedavg",
            "data": {"dataset": "table:t.csv"},
            "task": "classification",
            "settings": {},
            "shape": {"num_classes": 3, "in_channels": 5, "image_size": 1, "input_shape": [5]},
            "features": list("abcde"),
            "classes": list("xyz"),
            "has-classes": True,
            "input": {
                "dtype": "float32",
                "shape": [5],
                "image-size": 1,
                "normalize": "mean-std",
                "mean": [0.0] * 5,
                "std": [1.0] * 5,
            },
            "outputs": ["outputs", "predictions"],
            "metrics": {},
        },
    )
    return path


def started(module: nn.Module, file: Path, features: str = "edcba", classes: str = "zxy") -> nn.Module:
    names = ModelNames(tuple(features), tuple(classes))
    weights.load_initial(module, str(file), names=names, example=torch.zeros(2, 5))
    return module.eval()


def test_every_layer_that_reads_the_features_is_reordered(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Wide().eval()
    for tensor in (*module.parameters(), module.scale.running_mean, module.scale.running_var):
        assert isinstance(tensor, torch.Tensor)
        nn.init.uniform_(tensor, 0.5, 1.5)
    x = torch.randn(6, 5)
    want = module(x)
    mine = started(Wide(), file_of(module, tmp_path / "wide.pt"))
    with torch.no_grad():
        torch.testing.assert_close(mine(x.flip(1)), want[:, [2, 0, 1]])


@pytest.mark.parametrize("inputs", [True, False])
def test_a_model_whose_layers_do_not_show_is_refused(tmp_path: Path, inputs: bool) -> None:
    file = file_of(Hidden(inputs=inputs), tmp_path / "hidden.pt")
    what = "features" if inputs else "classes"
    with pytest.raises(UserError, match=what):
        started(Hidden(inputs=inputs), file, *(("edcba", "xyz") if inputs else ("abcde", "zyx")))
    started(Hidden(inputs=inputs), file, "abcde", "xyz")


def test_a_model_that_computes_with_the_order_is_refused(tmp_path: Path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.first(x).relu() + x[:, :1])  # type: ignore[no-any-return]

    with rejected(ConfigurationError, "mixed.pt", "changes what", "model computes"):
        started(Mixed(), file_of(Mixed(), tmp_path / "mixed.pt"))


def test_numbers_beside_words_are_no_names() -> None:
    assert not model_names.differ(["0", "1"], ["cat", "dog"]) and not model_names.differ([], ["cat"])
    assert model_names.differ(["0", "1"], ["1", "0"]) and model_names.differ(["1", "2"], ["0", "1"])
