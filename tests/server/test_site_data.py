"""A column in another unit at one site, and the same data at two sites: named at the start, and when a site comes later."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from fl_app.data.moments import MomentSums
from fl_app.known_names import CLIENT_NAME
from fl_app.server.properties import CONTENT
from fl_app.transport.exchange import Exchange
from fl_app.transport.wire import FEATURES
from tests.conftest import Run
from tests.experiments.months import cancer
from tests.facts import each_mentions
from tests.server.fake_grid import exchange, properties

ROWS = np.random.default_rng(0).normal([20.0, 4.0, 0.0], [3.0, 0.5, 1.0], (6, 5, 3)).astype(np.float32)


def site(k: int, rows: np.ndarray, num_clients: int, **more: Any) -> dict[str, Any]:
    sums = {"sums": MomentSums.of(rows).to_json(), FEATURES: json.dumps(["heat", "pressure", "drift"])}
    return properties(k, num_clients, **{**sums, CLIENT_NAME: f"plant {k}", **more})


def connected(tables: Sequence[np.ndarray], **more: Any) -> Exchange:
    nodes = {70 + k: site(k, rows, len(tables), **more) for k, rows in enumerate(tables)}
    e = exchange(nodes, num_clients=len(tables), dataset="node", classes="0,1", min_available_clients=1)
    e.registry.wait()
    return e


def scaled(factors: Sequence[float]) -> list[np.ndarray]:
    return [ROWS[k] * np.array([1, factor, 1], np.float32) for k, factor in enumerate(factors)]


@pytest.mark.parametrize(
    ("factors", "named"),
    [
        ((1, 1, 1000, 1), ["2 (plant 2)"]),
        ((1, 0.001, 1, 1, 1, 1), ["1 (plant 1)"]),
        ((1000, 1, 1, 1000, 1), ["0 (plant 0), 3 (plant 3)"]),
        ((1, 1, 1000, 1, 0.001), ["2 (plant 2)", "4 (plant 4)"]),
        ((1, 1000), ["1 (plant 1)"]),
        ((1, 50, 1, 20), []),
        ((1, 0, 1), []),
    ],
)
def test_a_column_in_another_unit_is_named_with_its_site(factors: tuple[float, ...], named: list[str]) -> None:
    notes = connected(scaled(factors)).registry.notes()
    about = [line.partition(" at client")[2].partition(" ")[2].partition(" are ")[0] for line in notes]
    assert sorted(about) == sorted(named) and all(line.startswith("column pressure: ") for line in notes)


def test_two_sites_with_the_same_data_are_named() -> None:
    tables = [ROWS[0], ROWS[1], ROWS[0][::-1], ROWS[2]]
    assert each_mentions(
        [line for line in connected(tables).registry.notes()], ("clients 0 (plant 0)", "2 (plant 2)", "same data")
    )
    assert connected(ROWS[:4]).registry.notes() == []


def test_sites_whose_names_look_alike_are_named() -> None:
    names = ["Bern", "Zug", "bern ", "Ger\u0430"]
    nodes = {70 + k: site(k, ROWS[k], len(names), **{CLIENT_NAME: name}) for k, name in enumerate(names)}
    e = exchange(nodes, num_clients=len(names), dataset="node", classes="0,1", min_available_clients=1)
    e.registry.wait()
    (line,) = e.registry.notes()
    assert "'Bern' and 'bern'" in line and "Zug" not in line and not e.registry.notes()


def test_the_same_files_at_one_machine_are_named_without_sums() -> None:
    nodes = {70 + k: properties(k, 3, **{"data-sha256": "ab"[k % 2] * 64}) for k in range(3)}
    e = exchange(nodes, dataset="node", classes="0,1")
    e.registry.wait()
    assert each_mentions(e.registry.notes(), ("clients 0", "2", "same data"))


@pytest.mark.parametrize("partition", ["c" * 64, ""], ids=["plain", "private"])
def test_clients_of_shared_files_do_not_have_the_same_data(partition: str) -> None:
    hashes = {"partition-sha256": partition, "data-sha256": "a" * 64}
    e = exchange({70 + k: properties(k, 3, **hashes) for k in range(3)})
    e.registry.wait()
    assert e.registry.notes() == []


def test_sites_that_send_no_sums_are_compared_by_a_hash_of_their_samples() -> None:
    nodes = {70 + k: properties(k, 3, **{CONTENT: "ab"[k % 2] * 64, "data-sha256": f"{k}" * 64}) for k in range(3)}
    e = exchange(nodes, dataset="node", classes="0,1")
    e.registry.wait()
    assert each_mentions(e.registry.notes(), ("clients 0", "2", "same data"))


def test_the_order_of_samples_and_columns_does_not_hide_that_data_are_the_same(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files with other bytes, where sites send no sums."""
    table = cancer(tmp_path / "0.csv", slice(0, None, 3))
    frame = pd.read_csv(table)
    frame[frame.columns[::-1]].iloc[::-1].to_csv(tmp_path / "1.csv", index=False)
    frame.iloc[1:].to_csv(tmp_path / "2.csv", index=False)
    images = [tmp_path / f"images-{k}" for k in range(3)]
    for k, folder in enumerate(images):
        pixels = np.random.default_rng(k % 2).integers(0, 256, (2, 6, 8, 8), np.uint8)
        for name, several in zip(("malignant", "benign"), pixels, strict=True):
            (folder / "train" / name).mkdir(parents=True)
            for i, image in enumerate(several):
                Image.fromarray(image).save(folder / "train" / name / f"{i if k else 9 - i}.png")
    setting: dict[str, Any] = {"dataset": "node", "classes": "malignant,benign", "method": "fedavg", "num_clients": 3}
    tables = {k: {"data-path": str(tmp_path / f"{k}.csv")} for k in range(3)}
    folders = {k: {"data-path": str(folder)} for k, folder in enumerate(images)}
    for nodes, same, more in (
        (tables, "clients 0, 1 have", {"target": "kind", "normalize_over": "site", "test_after": "mean radius:17"}),
        (folders, "clients 0, 2 have", {}),
    ):
        caplog.clear()
        run(**setting, **more, node_configs=nodes, run_name=f"run-{len(more)}")
        assert [line for line in caplog.messages if "the same data" in line] == [f"{same} the same data"]


def test_a_site_that_comes_later_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    tables = scaled((1, 1, 1, 1000))
    nodes = {70 + k: site(k, rows, 4) for k, rows in enumerate(tables[:3])}
    e = exchange(nodes, num_clients=4, dataset="node", classes="0,1", min_available_clients=3)
    e.registry.wait()
    assert e.registry.notes() == []
    nodes[73] = site(3, tables[3], 4)
    e.registry.refresh()
    e.registry.refresh()
    assert len([line for line in caplog.messages if "pressure" in line and "3 (plant 3)" in line]) == 1
