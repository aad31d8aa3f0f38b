"""The losses over rounds, drawn as the accuracy is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corolla.report.all_runs import losses
from corolla.report.arrays import read_runs
from corolla.report.groups import grouped
from tests.facts import each_mentions, mentions
from tests.report.builders import folder, record, write
from tests.report.read import encoding, frames_of
from tests.report.test_pictures import assert_drawn_within


def run(path: Path, training: Sequence[float | None], **config: Any) -> Path:
    """A run of two clients; the second one's losses are larger by 2. Test losses are 1 above, and equal to, the training loss."""

    def row(loss: float | None, more: float) -> dict[str, Any]:
        if loss is None:
            return {"accuracy-before": 0.5}
        return {
            "accuracy-before": 0.5,
            "loss": loss + more,
            "loss-before": loss + more + 1,
            "loss-after": loss + more,
        }

    records = [record(t, {"0": row(loss, 0), "1": row(loss, 2)}) for t, loss in enumerate(training, 1)]
    return folder(path, records, **config)


@pytest.mark.usefixtures("undrawn")
def test_training_and_test_losses_stand_side_by_side(tmp_path: Path) -> None:
    paths = [run(tmp_path / "a", [4.0, 2.0, 1.0]), run(tmp_path / "b", [4.0, 3.0, 2.0], method="local")]
    (panel,) = losses(grouped(read_runs(paths)))
    frame = frames_of(panel)[0]
    assert each_mentions(
        list(dict.fromkeys(frame["part"])),
        ("Training loss",),
        ("Test loss", "local training"),
        ("Test loss", "local training"),
    )
    assert list(dict.fromkeys(frame["run"])) == ["1 fedavg", "2 local"]
    means = frame.groupby(["part", "run"], sort=False)["mean"].apply(list).tolist()
    assert means[:4] == [[5, 3, 2], [5, 4, 3], [6, 4, 3], [6, 5, 4]]
    up = encoding(panel, "y")
    assert up["title"] == "loss" and up["scale"]["type"] == "linear"
    assert (panel.name, panel.title) == ("loss", "Loss over rounds") and "quartiles" in panel.caption
    assert_drawn_within(panel)
    assert "loss" in write(tmp_path / "out", *paths)[1]


def test_a_band_over_seeds_is_not_cut_at_one_as_an_accuracy_is(tmp_path: Path) -> None:
    paths = [run(tmp_path / str(seed), [first, 1.0], seed=seed) for seed, first in enumerate((2.0, 4.0))]
    (panel,) = losses(grouped(read_runs(paths)))
    frame = frames_of(panel)[0]
    low, high, mean = (frame[frame["part"] == "Training loss"][name] for name in ("low", "high", "mean"))
    # means over the clients: 3 and 5, then 2 and 2
    np.testing.assert_allclose(mean, [4, 2])
    np.testing.assert_allclose([low, high], [[4 - 2**0.5, 2], [4 + 2**0.5, 2]], rtol=1e-5)
    assert mentions(panel.caption, "± one sample standard", "deviation")


def test_losses_that_span_two_decades_have_a_logarithmic_axis(tmp_path: Path) -> None:
    (panel,) = losses(grouped(read_runs([run(tmp_path / "a", [900.0, 30.0, 1.0])])))
    scale = encoding(panel, "y")["scale"]
    assert scale["type"] == "log" and scale["domain"] == pytest.approx([2 / 1.5, 902 * 1.5])
    assert mentions(panel.caption, "vertical axis", "logarithmic")


def test_without_losses_there_is_no_picture(tmp_path: Path) -> None:
    assert not list(losses(grouped(read_runs([run(tmp_path / "a", [None, None])]))))
