"""The dtype of uploaded parameters has one home, `wire.UPLOADED`: with another one every method runs, and bytes follow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from corolla import load
from corolla.experiments.dry_run import round_bytes
from fl_app.layout import Model
from fl_app.server.run_folder import read_metrics, read_summary
from fl_app.transport import wire
from strategies import METHODS
from tests.conftest import IN_TWO_ROUNDS, Run, config, of_each_kind
from tests.facts import rejected
from tests.privacy.runs import PRIVATE

SHAPE = {"in_channels": 1, "num_classes": 10, "image_size": 8}


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients send parameters and statistics as float16."""
    monkeypatch.setattr(wire, "UPLOADED", "<f2")


@pytest.fixture
def arriving(monkeypatch: pytest.MonkeyPatch) -> list[wire.Expected]:
    """What the server expected of each upload that it decoded."""
    seen: list[wire.Expected] = []
    decode = wire.decode_upload

    def spy(content: Any, expected: wire.Expected) -> wire.Upload:
        upload = decode(content, expected)
        assert upload.model.params.dtype == upload.model.buffers.dtype == np.float32
        seen.append(expected)
        return upload

    monkeypatch.setattr(wire, "decode_upload", spy)
    return seen


def beside(expected: wire.Expected) -> int:
    """Bytes of what an upload holds beside parameters and statistics."""
    shapes = {name: of for name, of in expected.shapes().items() if name not in ("params", "buffers")}
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for dtype, shape in shapes.values())


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("method", of_each_kind())
def test_every_method_runs_with_half_the_bytes(run: Run, arriving: list[wire.Expected], method: str) -> None:
    own = IN_TWO_ROUNDS.get(method, {})
    folder = run(method=method, num_clients=3, num_server_rounds=2, keep_state=True, **own)
    rounds = list(read_metrics(folder.path))
    assert read_summary(folder.path)["digest"] and not any(record["failures"] for record in rounds)
    sent = [row["upload-bytes"] for record in rounds for row in record["clients"].values()]
    assert sent == [2 * (expected.d + expected.b) + beside(expected) for expected in arriving]


@pytest.mark.usefixtures("halves")
def test_a_dry_run_counts_them(run: Run) -> None:
    parsed = config(method="fedcac")
    cost = round_bytes(parsed, METHODS["fedcac"], SHAPE)
    (first, *_) = read_metrics(run(method="fedcac", num_server_rounds=1).path)
    assert {row["upload-bytes"] for row in first["clients"].values()} == {cost.upload}
    assert cost.upload == 2 * cost.download // 4 + -(-cost.download // 4 // 8)


@pytest.mark.parametrize("method", ["fedavg", "fedcac"])
def test_a_private_run_sums_integers_and_is_the_same(run: Run, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    whole = run(method=method, run_name="whole", **PRIVATE)
    monkeypatch.setattr(wire, "UPLOADED", "<f2")
    half = run(method=method, run_name="half", **PRIVATE)
    assert read_summary(half.path)["digest"] == read_summary(whole.path)["digest"]
    sizes = [[r["upload-bytes"] for r in read_metrics(folder.path)] for folder in (whole, half)]
    assert sizes[0] == sizes[1]


@pytest.mark.usefixtures("halves")
def test_collected_models_are_those_that_were_evaluated(run: Run) -> None:
    folder = run(method="fedper", num_clients=2, num_server_rounds=1, collect_personal_models=True)
    for client in range(2):
        assert load(folder.path).model(client) is not None


@pytest.mark.usefixtures("halves")
def test_values_beyond_the_dtype_are_named() -> None:
    large = Model(np.array([1e5, -1e5, 1, np.inf], np.float32), np.zeros(0, np.float32))
    with rejected(wire.WireError, "", "array params has 2", "beyond float16", "dtype", "wire"):
        wire.encode_upload(wire.Upload(large))
