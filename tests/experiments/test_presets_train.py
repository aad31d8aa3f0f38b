"""One cell of every method in every paper's tables trains two small rounds, in this process, on stand-in images.

The images are random, of the shape and with the classes of the cell's data set. Rounds, clients, samples and epochs are cut as
far as `--scale small` goes and further; models, methods and partitions are the cell's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from client_app.client_app import app
from corolla import presets
from fl_app.config import parse
from fl_app.keys import Scalar
from fl_app.server.run_folder import read_metrics, read_summary
from fl_app.server_app import run
from fl_app.sources import named_data
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

# enough of each class for all clients of a pathological split
CLIENTS, PER_CLASS = 4, 20
TINY: Mapping[str, int] = {
    "num-server-rounds": 2,
    "num-clients": CLIENTS,
    "local-epochs": 1,
    "finetune-epochs": 1,
    "batch-size": 5,
    "train-samples": 10,
    "test-samples": 5,
    "fedrep.head-epochs": 1,
    "fedgen.generator-steps": 20,
}
PUBLISHED = [preset for preset in presets.all_presets().values() if preset.paper]
KINDS = dict.fromkeys((preset.name.partition("/")[0], str(preset.settings["method"])) for preset in PUBLISHED)


def cell(paper: str, method: str) -> presets.Preset:
    """Return a method's first cell in a paper: tables begin with the small data sets."""
    return next(p for p in PUBLISHED if p.name.startswith(f"{paper}/") and p.settings["method"] == method)


def stand_in(directory: Path, dataset: str) -> str:
    """Write random images like those of a named data set, which every class has some of, and return the run's `dataset`."""
    named = named_data(dataset)
    assert named is not None
    labels = np.repeat(np.arange(named.num_classes), PER_CLASS)
    images = np.random.default_rng(0).integers(
        0, 256, (len(labels), named.image_size, named.image_size, named.in_channels), np.uint8
    )
    path = directory / "images.npz"
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels)
    return f"npz:{path}"


@pytest.mark.parametrize(("paper", "method"), KINDS, ids=["/".join(kind) for kind in KINDS])
def test_a_cell_trains(tmp_path: Path, paper: str, method: str) -> None:
    preset = cell(paper, method)
    raw: dict[str, Scalar] = dict(preset.settings)
    raw |= presets.small(parse(raw, METHOD_PARAMS))
    raw |= {name: value for name, value in TINY.items() if name in raw}
    raw |= {
        "dataset": stand_in(tmp_path, str(raw["dataset"])),
        "data-dir": str(tmp_path),
        "device": "cpu",
        "run-name": "run",
        "output-dir": str(tmp_path / "runs"),
        "state-dir": str(tmp_path / "state"),
        "fraction-train": 1.0,
    }
    folder = run(InProcessGrid(app, raw, CLIENTS), parse(raw, METHOD_PARAMS), lambda *_: None)
    summary = read_summary(folder.path)
    assert summary["digest"] and summary["failures"] == 0 and summary["scale"] == "small"
    rounds = list(read_metrics(folder.path))
    assert [record["round"] for record in rounds][-2:] == [1, 2]
    assert all(np.isfinite(record["loss"]) for record in rounds if record["round"])
