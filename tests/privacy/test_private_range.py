"""Weights and statistics that do not fit the fixed point of a private run: their client says so, and is never cut silently."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_app.private import Masker
from fl_app import plugins
from fl_app.errors import UserError
from fl_app.layout import Model
from fl_app.privacy import masking
from fl_app.privacy.keyring import open_keyring
from fl_app.server.run_folder import read_summary
from fl_app.wire import SEED_KEYS, SUM, Download, Upload
from tests.conftest import Run, f32
from tests.privacy.runs import PRIVATE, rounds

LINE = """
from torch import nn
def build(in_channels, num_classes, image_size):
    return nn.Linear(2, num_classes)
"""


@pytest.fixture
def near_150(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Settings of a linear regression whose targets are near 150: what it learns is the bias."""
    (tmp_path / "line.py").write_text(LINE)
    plugins.reset(tmp_path)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 2)).astype(np.float32)
    y = 150 + x @ f32(2, -1) + rng.normal(size=240).astype(np.float32)
    np.savez(tmp_path / "data.npz", x_train=x[:200], y_train=y[:200], x_test=x[200:], y_test=y[200:])
    yield {
        "dataset": f"npz:{tmp_path / 'data.npz'}",
        "partition": "iid",
        "train_samples": 0,
        "test_samples": 0,
        "task": "regression",
        "model": "line:build",
        "learning_rate": 0.1,
        "local_epochs": 5,
        "num_clients": 5,
        "max_update_norm": 0,
        # private runs scale each site by its own data: another model
        "normalize": "unit",
    }
    plugins.reset()


def test_a_regression_of_large_targets_is_not_cut(run: Run, near_150: dict[str, Any]) -> None:
    plain = read_summary(run(run_name="plain", **near_150).path)
    # the noise of the targets has a deviation of 1
    assert plain["final-rmse"] < 1.3
    with pytest.raises(UserError) as refused:
        run(run_name="narrow", private=True, **near_150)
    assert "client 0: private: the parameters cannot be sent: values must be within +-8, got 1 of 3" in str(
        refused.value
    )
    assert "set private-range, which is 8, to 256 or more" in str(refused.value)
    wide = run(run_name="wide", private=True, private_range=256, **near_150)
    assert read_summary(wide.path)["final-rmse"] == pytest.approx(plain["final-rmse"], rel=1e-3)
    assert [record["failures"] for record in rounds(wide)] == [[], []]


def test_one_client_that_does_not_fit_is_named_and_the_others_go_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "corolla")
    original = Masker.mask

    def larger(masker: Masker, upload: Upload) -> Upload:
        if masker.keys.client_id == 2:
            upload.model.params[:3] = 9
        return original(masker, upload)

    monkeypatch.setattr(Masker, "mask", larger)
    folder = run(method="fedavg", **PRIVATE)
    for record in rounds(folder):
        assert sorted(record["clients"]) == ["0", "1", "3", "4"]
        assert [f["client"] for f in record["failures"]] == [2]
        assert "got 3 of" in record["failures"][0]["cause"] and "private-range" in record["failures"][0]["cause"]
    assert any(
        "client 2" in line and "set private-range, which is 8, to 16 or more" in line for line in caplog.messages
    )


def masker(limit: float, clients: int = 3) -> Masker:
    keys = open_keyring(SEED_KEYS, 0, 0, clients)
    download = Download("train", 1, 0, "abc", Model(f32(), f32()))
    return Masker(keys, download, tuple(range(1, clients)), 1.0, clients, limit, 0, "", 0)


def upload(params: list[float], buffers: list[float]) -> Upload:
    return Upload(Model(f32(*params), f32(*buffers)))


@pytest.mark.parametrize(
    ("params", "buffers", "limit", "message"),
    [
        (
            [8.0, -8.5],
            [0.0],
            8.0,
            r"the parameters cannot be sent: .*\+-8, got 1 of 2 .* set private-range, .* to 16 or",
        ),
        ([-150.0], [], 8.0, "which is 8, to 256 or more"),
        ([256.5], [], 256.0, "which is 256, to 512 or more"),
        # 64 times the range: 513 / 64 is just above 8
        ([0.0], [513.0, 1.0], 8.0, r"the statistics cannot be sent: .*\+-512, got 1 of 2 .* to 16 or more"),
        ([0.0], [1e5], 8.0, "statistics cannot be sent: .* to 2048 or more"),
        ([0.3], [0.0], 0.25, r"\+-0.25, got 1 of 1 .* to 0.5 or more"),
        ([1e7], [], 8.0, r"no private-range holds them \(at most 1.04858e\+06\)"),
        ([np.nan, 9.0], [], 8.0, "values must be finite, got 1 that are not$"),
        ([np.inf], [], 8.0, "values must be finite, got 1 that are not$"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_range_that_it_needs(
    params: list[float], buffers: list[float], limit: float, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        masker(limit).mask(upload(params, buffers))


@pytest.mark.parametrize("limit", [0.25, 8.0, 100.0, 4096.0])
def test_what_is_at_the_edge_fits(limit: float) -> None:
    ends = [([limit, -limit], [64 * limit]), ([limit, limit], [-64 * limit])]
    words = []
    for i, (params, buffers) in enumerate([*ends, ends[0]]):
        keys = open_keyring(SEED_KEYS, 0, i, 3)
        others = tuple(j for j in range(3) if j != i)
        sender = Masker(keys, masker(limit).download, others, 1.0, 3, limit, 0, "", 0)
        words.append(sender.mask(upload(params, buffers)).extras[SUM])
    total = np.add.reduce(words, axis=0, dtype=np.uint32)
    step = 2.0 ** -masking.scale(3, limit)
    np.testing.assert_allclose(masking.decode(total[:2], 3.0, 3, limit), [limit, -limit / 3], atol=step)
    np.testing.assert_allclose(masking.decode(total[2:], 3.0, 3, 64 * limit), [64 * limit / 3], atol=64 * step)
