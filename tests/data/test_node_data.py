"""Sites that train on their own data (`dataset = node`): label order, missing and unknown classes, shapes that differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.compat.common import recorddict_compat as compat
from flwr.compat.common.typing import GetPropertiesIns
from PIL import Image

from client_app.client_app import app
from fl_app.config import parse
from fl_app.errors import UserError
from fl_app.keys import Scalar
from fl_app.server.run_folder import RunFolder, read_metrics, read_summary
from fl_app.server_app import run
from fl_app.transport.inprocess import InProcessGrid
from fl_app.transport.wire import IN_PROCESS, QUERY
from strategies import METHOD_PARAMS
from tests.facts import rejected


def site(root: Path, classes: str, size: int = 8, count: int = 6) -> str:
    """Write an image folder whose class c has gray level 40 * ord(c) mod 256, and return its path."""
    for part in ("train", "test"):
        for name in classes:
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                image = np.full((size, size), (40 * ord(name) + i) % 256, np.uint8)
                Image.fromarray(image).save(root / part / name / f"{i}.png")
    return str(root)


def start(tmp_path: Path, sites: list[str], **config: Scalar) -> RunFolder:
    raw: dict[str, Scalar] = {
        "dataset": "node",
        "classes": "a,b,c",
        "method": "fedcac",
        "num-server-rounds": 2,
        "local-epochs": 1,
        "output-dir": str(tmp_path / "runs"),
        "state-dir": str(tmp_path / "state"),
        "data-dir": str(tmp_path / "data"),
        "available-timeout": 5.0,
        "device": "cpu",
        **{k.replace("_", "-"): v for k, v in config.items()},
    }
    nodes: dict[int, Mapping[str, Scalar]] = {i: {"data-path": path} for i, path in enumerate(sites) if path}
    grid = InProcessGrid(app, raw, len(sites), nodes)
    return run(grid, parse(raw, METHOD_PARAMS), lambda *_: None)


def test_sites_may_lack_classes_and_mix_folders_with_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {k: rng.integers(0, 256, (n, 8, 8), dtype=np.uint8) for k, n in (("x_train", 9), ("x_test", 3))}
    np.savez(tmp_path / "c.npz", y_train=np.arange(9) % 2 + 1, y_test=np.array([1, 2, 2]), **arrays)
    sites = [site(tmp_path / "one", "abc"), site(tmp_path / "two", "ac"), str(tmp_path / "c.npz")]
    folder = start(tmp_path, sites)
    summary = read_summary(folder.path)
    assert summary["digest"] and summary["failures"] == 0
    clients = next(read_metrics(folder.path))["clients"]
    assert [clients[str(i)]["train-samples"] for i in range(3)] == [18, 12, 9]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("abx", "client 1: .*x"),
        ("", "client 1: .*data-path"),
        ("missing", "client 1: .*missing"),
    ],
)
def test_a_site_that_does_not_fit_fails_by_name_before_anything_is_written(
    tmp_path: Path, second: str, message: str
) -> None:
    path = {"abx": lambda: site(tmp_path / "two", "abx"), "": lambda: "", "missing": lambda: str(tmp_path / "missing")}
    with pytest.raises(UserError, match=message):
        start(tmp_path, [site(tmp_path / "one", "abc"), path[second]()])
    assert not (tmp_path / "runs").exists()


def test_sites_with_other_image_sizes_are_named(tmp_path: Path) -> None:
    with rejected(UserError, "", "clients [0]", "1 channels", "3 classes", "8 pixels", "clients [1]", "12 pixels"):
        start(tmp_path, [site(tmp_path / "one", "abc"), site(tmp_path / "two", "abc", size=12)])
    folder = start(tmp_path, [site(tmp_path / "three", "abc"), site(tmp_path / "four", "abc", size=12)], image_size=8)
    assert read_summary(folder.path)["rounds"] == 2


@pytest.mark.parametrize("form", ["table:{}/patient.csv", "{}/patient.csv", "csv:{}/patient.csv", "npz:{}/patient.npz"])
def test_a_sites_error_does_not_name_other_files(tmp_path: Path, form: str) -> None:
    (tmp_path / "patients.csv").write_text("a,y\n1,0\n")
    (tmp_path / "patients.npz").write_text("")
    config: dict[str, Scalar] = {"method": "fedavg", "target": "y", "dataset": form.format(tmp_path), "num-clients": 1}
    texts = {}
    for place in ({}, {IN_PROCESS: True}):
        context = Context(1, 1, {"partition-id": 0, "num-partitions": 1, **place}, RecordDict(), dict(config))
        query = compat.getpropertiesins_to_recorddict(GetPropertiesIns({}))
        message = Message(query, dst_node_id=1, message_type=QUERY)
        texts[bool(place)] = str(app(message, context).content)
    assert "readable" in texts[False] or "configuration/" in texts[False]
    assert "patient" not in texts[False]
    assert "did you mean" in texts[True] and "patients." in texts[True]
