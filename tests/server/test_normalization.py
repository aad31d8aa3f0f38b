"""What inputs are scaled by: the default by kind of data, all sites' constants and each site's own, recorded and sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_app.client_app import app
from fl_app.config import parse
from fl_app.data import open_client
from fl_app.errors import ConfigurationError, UserError
from fl_app.keys import Scalar
from fl_app.known_names import SCALING
from fl_app.server.record import one_class_line
from fl_app.server.run_folder import RunFolder, read_about, read_metrics, read_summary
from fl_app.server_app import run
from fl_app.transport.inprocess import InProcessGrid
from fl_app.transport.wire import FEATURES
from strategies import METHOD_PARAMS
from tests.facts import mentions, rejected
from tests.server.fake_grid import exchange, properties

SIZES = (40, 25, 12)


def hospitals(tmp_path: Path, kind: str = "rows") -> tuple[Path, list[Path]]:
    """Write three hospitals' arrays, as one file with a column that says whose each sample is, and as a file each."""
    generator = np.random.default_rng(3)
    parts: list[dict[str, Any]] = []
    for k, size in enumerate(SIZES):
        if kind == "images":
            x = generator.integers(20 * k, 120 + 40 * k, (size, 6, 6), dtype=np.uint8)
        elif kind == "series":
            x = generator.normal(50 + 20 * k, 9, (size, 5, 3)).astype(np.float32)
        else:
            x = generator.normal([120 + 9 * k, 56, 0.3], [14, 11, 0.1], (size, 3)).astype(np.float32)
        y = (x.reshape(size, -1).mean(1) > np.median(x.reshape(size, -1).mean(1))).astype(np.int64)
        cut = size * 3 // 4
        parts.append({"x_train": x[:cut], "y_train": y[:cut], "x_test": x[cut:], "y_test": y[cut:]})
    files = []
    for k, part in enumerate(parts):
        files.append(tmp_path / f"{kind}-{k}.npz")
        np.savez(files[-1], **part)
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    for side in ("train", "test"):
        whole[f"site_{side}"] = np.concatenate([np.full(len(part[f"y_{side}"]), k) for k, part in enumerate(parts)])
    np.savez(tmp_path / f"{kind}.npz", **whole)
    return tmp_path / f"{kind}.npz", files


def settings(tmp_path: Path, **config: Scalar) -> dict[str, Scalar]:
    return {
        "classes": "0,1",
        "method": "fedavg",
        "model": "mlp",
        "num-server-rounds": 2,
        "num-clients": len(SIZES),
        "local-epochs": 2,
        "learning-rate": 0.05,
        "output-dir": str(tmp_path / "runs"),
        "state-dir": str(tmp_path / "state"),
        "data-dir": str(tmp_path / "data"),
        "available-timeout": 5.0,
        "device": "cpu",
        **{k.replace("_", "-"): v for k, v in config.items()},
    }


def start(raw: dict[str, Scalar], sites: list[Path] | None = None) -> RunFolder:
    nodes: dict[int, Mapping[str, Scalar]] = {i: {"data-path": str(path)} for i, path in enumerate(sites or [])}
    grid = InProcessGrid(app, raw, len(SIZES), nodes)
    return run(grid, parse(raw, METHOD_PARAMS), lambda *_: None)


def simulated(tmp_path: Path, file: Path, **config: Scalar) -> RunFolder:
    own = {"dataset": f"npz:{file}", "client": "site", "partition": "by-column"}
    return start(settings(tmp_path, **own, **config))


def deployed(tmp_path: Path, files: list[Path], **config: Scalar) -> RunFolder:
    return start(settings(tmp_path, dataset="node", **config), files)


def constants(folder: RunFolder) -> dict[str, list[float]] | None:
    found: dict[str, list[float]] | None = read_about(folder.path).get("data", {}).get("normalization")
    return found


@pytest.mark.parametrize(("kind", "normalize"), [("rows", "auto"), ("series", "auto"), ("images", "mean-std")])
def test_a_deployment_has_the_bits_of_its_simulation(tmp_path: Path, kind: str, normalize: str) -> None:
    file, sites = hospitals(tmp_path, kind)
    one = simulated(tmp_path, file, normalize=normalize, run_name="simulated")
    other = deployed(tmp_path, sites, normalize=normalize, run_name="deployed")
    assert read_summary(one.path)["digest"] == read_summary(other.path)["digest"]
    x = np.concatenate([np.load(site)["x_train"] for site in sites])
    axes, scale = ((0, 1, 2), 255) if kind == "images" else (tuple(range(x.ndim - 1)), 1)
    found = constants(other)
    assert found is not None and found == constants(one) and set(found) == set(SCALING)
    np.testing.assert_allclose(found["mean"], x.astype(float).mean(axes) / scale, rtol=1e-6)
    np.testing.assert_allclose(found["std"], x.astype(float).std(axes) / scale, rtol=1e-6)


@pytest.mark.parametrize("over", ["sites", "site"])
def test_a_table_is_divided_as_its_sites_divide_theirs(tmp_path: Path, over: str) -> None:
    _, arrays = hospitals(tmp_path)
    tables, sites = [], []
    for k, file in enumerate(arrays):
        part = np.load(file)
        rows = np.concatenate([part["x_train"], part["x_test"]]).tolist()
        outcomes = np.concatenate([part["y_train"], part["y_test"]]).tolist()
        lines = [",".join(map(str, [*row, y])) for row, y in zip(rows, outcomes, strict=True)]
        sites.append(file.with_suffix(".csv"))
        sites[k].write_text("\n".join(["a,b,c,outcome", *lines]) + "\n")
        tables += [f"{line},{k}" for line in lines]
    whole = tmp_path / "whole.csv"
    # a site's rows keep their order, between those of others
    whole.write_text("\n".join(["a,b,c,outcome,site", *tables[::2], *tables[1::2]]) + "\n")
    for k, site in enumerate(sites):
        own = [line.removesuffix(f",{k}") for line in whole.read_text().splitlines()[1:] if line.endswith(f",{k}")]
        site.write_text("\n".join(["a,b,c,outcome", *own]) + "\n")
    more: dict[str, Scalar] = {"target": "outcome", "normalize_over": over}
    table = {"dataset": f"table:{whole}", "client": "site", "partition": "by-column"}
    one = start(settings(tmp_path, run_name="simulated", **table, **more))
    other = deployed(tmp_path, sites, run_name="deployed", **more)
    assert read_summary(one.path)["digest"] == read_summary(other.path)["digest"]
    assert [line["accuracy-after"] for line in read_metrics(one.path)] == [
        line["accuracy-after"] for line in read_metrics(other.path)
    ]


@pytest.mark.parametrize("over", ["sites", "site"])
def test_validation_data_count_in_every_mode(tmp_path: Path, over: str) -> None:
    file, sites = hospitals(tmp_path)
    more: dict[str, Scalar] = {"validation_ratio": 0.25, "normalize_over": over}
    one = simulated(tmp_path, file, run_name="simulated", **more)
    other = deployed(tmp_path, sites, run_name="deployed", **more)
    assert read_summary(one.path)["digest"] == read_summary(other.path)["digest"]
    whole, second = np.concatenate([np.load(site)["x_train"] for site in sites]), np.load(sites[1])["x_train"]
    own = {"dataset": f"npz:{file}", "client": "site", "partition": "by-column"}
    info = open_client(parse(settings(tmp_path, **own, **more), METHOD_PARAMS), 1).info
    np.testing.assert_allclose(info.mean, (whole if over == "sites" else second).astype(float).mean(0), rtol=1e-6)


def test_the_default_is_mean_std_but_for_images(tmp_path: Path) -> None:
    digests = {}
    for kind in ("rows", "images"):
        file, _ = hospitals(tmp_path, kind)
        for normalize in ("auto", "unit", "mean-std"):
            folder = simulated(tmp_path, file, normalize=normalize, run_name=f"{kind}-{normalize}")
            digests[kind, normalize] = read_summary(folder.path)["digest"]
    assert digests["rows", "auto"] == digests["rows", "mean-std"] != digests["rows", "unit"]
    assert digests["images", "auto"] == digests["images", "unit"] != digests["images", "mean-std"]


@pytest.mark.parametrize("private", [False, True])
def test_each_site_by_its_own_data(tmp_path: Path, private: bool) -> None:
    file, sites = hospitals(tmp_path)
    more: dict[str, Scalar] = {"private": True} if private else {"normalize_over": "site"}
    one = simulated(tmp_path, file, run_name="simulated", **more)
    other = deployed(tmp_path, sites, run_name="deployed", **more)
    assert read_summary(one.path)["digest"] == read_summary(other.path)["digest"]
    assert constants(one) is None and constants(other) is None
    together = simulated(tmp_path, file, run_name="together")
    assert read_summary(together.path)["digest"] != read_summary(one.path)["digest"]
    raw = settings(tmp_path, dataset=f"npz:{file}", client="site", partition="by-column", **more)
    part = open_client(parse(raw, METHOD_PARAMS), 1)
    np.testing.assert_allclose(part.info.mean, part.x_train.mean(0), rtol=1e-6)


@pytest.mark.parametrize("hidden", [{"private": True}, {"dp_epsilon": 3.0}])
def test_no_site_tells_sums_where_single_sites_are_hidden(tmp_path: Path, hidden: dict[str, Scalar]) -> None:
    raw = settings(tmp_path, dataset="node", normalize_over="sites", **hidden)
    with rejected(ConfigurationError, "normalize-over", "site or auto", "send the server"):
        parse(raw, METHOD_PARAMS)


def test_a_resumed_run_keeps_its_constants(tmp_path: Path) -> None:
    _, sites = hospitals(tmp_path)
    whole = deployed(tmp_path, sites, num_server_rounds=3, run_name="whole")
    first = deployed(tmp_path, sites, num_server_rounds=1, run_name="first")
    kept = constants(first)
    resumed = {"num_server_rounds": 3, "run_name": "first", "resume": str(first.path)}
    folder = deployed(tmp_path, sites, **resumed)
    assert read_summary(folder.path)["digest"] == read_summary(whole.path)["digest"]
    assert constants(folder) == kept
    about = read_about(folder.path)
    about["data"]["normalization"]["mean"][0] += 5
    (folder.path / "run.json").write_text(json.dumps(about))
    again = deployed(tmp_path, sites, **{**resumed, "num_server_rounds": 4})
    other = deployed(tmp_path, sites, num_server_rounds=4, run_name="other")
    assert read_summary(again.path)["digest"] != read_summary(other.path)["digest"]
    del about["data"]
    (folder.path / "run.json").write_text(json.dumps(about))
    with rejected(UserError, "resume", "does not have", "sites agreed"):
        deployed(tmp_path, sites, **{**resumed, "num_server_rounds": 5})


def test_a_site_of_another_kind_is_named(tmp_path: Path) -> None:
    _, sites = hospitals(tmp_path, "images")
    for k, site in enumerate(sites):
        # neither square nor of another shape: only the type of the numbers tells them apart
        found = {
            name: value[:, :4, :, None] if name.startswith("x") else value for name, value in np.load(site).items()
        }
        floats = {name: value.astype(np.float32) for name, value in found.items() if name.startswith("x")}
        np.savez(site, **(found | floats if k == 1 else found))
    with rejected(UserError, "", "client 1", "normalize", "1 features or channels", "the others sampl"):
        deployed(tmp_path, sites)


@pytest.mark.parametrize(
    ("told", "columns", "message"),
    [
        ("nonsense", ["a", "b"], "property sums: "),
        # in another order than the others'
        ("nonsense", ["b", "a"], "property sums"),
        (
            json.dumps({"count": 7, "unit": 1, "totals": [[1, 0]] * 2, "squares": [[1, 0]] * 2}),
            ["a", "b"],
            "over its 5 training samples",
        ),
    ],
)
def test_sums_that_cannot_be_are_refused_by_name(told: str, columns: list[str], message: str) -> None:
    honest = json.dumps({"count": 5, "unit": 1, "totals": [[1, 0]] * 2, "squares": [[1, 0]] * 2})
    names = [json.dumps(columns), json.dumps(["a", "b"]), json.dumps(["a", "b"])]
    nodes = {k: properties(k, **{FEATURES: names[k], "sums": honest if k else told}) for k in range(3)}
    asked = exchange(nodes, dataset="node", classes="0,1")
    with pytest.raises(UserError, match=f"client 0: .*{message}"):
        asked.registry.wait()


def test_one_class_of_a_model_worse_than_at_first_names_the_learning_rate() -> None:
    def line(first: float | None, last: float) -> str:
        evaluation = {"loss": last, "clients": {"0": {"one-class": 1.0, "test-samples": 4}}}
        return one_class_line([{"loss-before": first}, {"loss-before": 9.0, "evaluation": evaluation}], 0.25)

    assert "learning-rate (0.25)" in line(2.3, 97.5)
    assert not [text for text in (line(2.3, 3.4), line(None, 97.5)) if "learning-rate" in text]


def test_one_class_is_not_told_where_single_sites_are_hidden(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, _ = hospitals(tmp_path)
    folder = simulated(tmp_path, file, private=True, learning_rate=1e-9)
    (*_, last) = read_metrics(folder.path)
    assert not [row for row in last["evaluation"]["clients"].values() if "one-class" in row]
    assert not [line for line in caplog.messages if mentions(line, "predicts the same", "class")]


@pytest.mark.parametrize("headline", ["accuracy", "auc"])
def test_a_site_of_one_class_is_no_site_where_one_class_is_predicted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, headline: str
) -> None:
    file, _ = hospitals(tmp_path)
    with np.load(file) as held:
        arrays = {name: held[name].copy() for name in held.files}
    for side in ("train", "test"):
        arrays[f"y_{side}"][arrays[f"site_{side}"] == 2] = 0
        arrays[f"x_{side}"][arrays[f"site_{side}"] == 2] -= 200
    np.savez(file, **arrays)
    with caplog.at_level("WARNING", "corolla"):
        folder = simulated(tmp_path, file, headline=headline, metrics="auc", num_server_rounds=8, run_name="learns")
    *_, last = read_metrics(folder.path)
    rows = last["evaluation"]["clients"]
    assert [rows[str(i)].get("one-class") for i in range(3)] == [0, 0, None]
    assert not [line for line in caplog.messages if mentions(line, "predicts the same", "class")]
    with caplog.at_level("WARNING", "corolla"):
        simulated(tmp_path, file, headline=headline, metrics="auc", learning_rate=1e-9, normalize="unit")
    assert mentions(caplog.messages, "all 3 clients", "model predicts", "same class for", "every sample")
