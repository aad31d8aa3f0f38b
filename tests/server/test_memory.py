"""What the server holds: stacks that are handed on, rows that are closed up, models that lie on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_app.errors import UserError
from fl_app.server.client_arrays import release, to_disk
from fl_app.server.run_folder import RunFolder, read_summary
from fl_app.wire import Expected
from strategies import aggregate, fedcac, feddac, masks
from strategies.base.uploads import Intake

Run = Callable[..., RunFolder]


def test_arrays_on_disk_are_the_same(tmp_path: Path) -> None:
    arrays = {"a": np.arange(5.0), "bits": np.arange(3, dtype=np.uint8), "none": np.empty((0, 2)), "b": np.array(3)}
    kept = to_disk(arrays, tmp_path)
    for name, array in arrays.items():
        assert kept[name].dtype == array.dtype and kept[name].shape == array.shape and (kept[name] == array).all()
    assert isinstance(kept["a"], np.memmap) and not kept["a"].flags.writeable
    assert list(tmp_path.iterdir()) == []


def test_memory_maps_are_whole_after_their_memory_was_given_back(tmp_path: Path) -> None:
    kept = to_disk({"a": np.arange(5000.0)}, tmp_path)
    release(kept | {"in memory": np.ones(3)})
    assert (kept["a"] == np.arange(5000.0)).all()


def test_one_map_for_all_arrays_of_a_client(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    kept = [to_disk({name: np.ones(10) for name in "abcd"}, tmp_path) for _ in range(20)]
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + len(kept)


def test_rows_of_dropped_clients_are_closed_up_and_the_record_keeps_its_sizes() -> None:
    def column(*values: float) -> np.ndarray:
        return np.array(values, np.float32)[:, None]

    W, B, sizes = column(1, 2, 3, 4), column(5, 6, 7, 8), np.array([100.0, 200, 300, 400])
    intake = Intake([4, 5, 6, 7], Expected(1, 1), W, B, None, {"x": column(9, 8, 7, 6)}, sizes)
    intake.metrics = {7: {}, 5: {}}
    uploads = intake.uploads()
    assert (
        uploads.ids == [5, 7] and uploads.sizes.tolist() == [200, 400] and intake.sizes.tolist() == [100, 200, 300, 400]
    )
    assert (
        uploads.W.tolist() == [[2], [4]]
        and uploads.B.tolist() == [[6], [8]]
        and uploads.extras["x"].tolist() == [[8], [6]]
    )
    assert np.shares_memory(uploads.W, W)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="server-memory-limit: clients' models cannot be written to .*missing"):
        to_disk({"a": np.arange(5.0)}, tmp_path / "missing")


@pytest.mark.parametrize("method", ["fedcac", "feddac", "fedamp"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_what_lies_on_disk_does_not_change_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, method: str, fraction: float
) -> None:
    spilled: list[int] = []
    monkeypatch.setattr(
        "fl_app.server.client_arrays.to_disk", lambda arrays, path: (spilled.append(1), to_disk(arrays, path))[1]
    )
    config: dict[str, Any] = {"method": method, "num_server_rounds": 3, "fraction_train": fraction}
    digests = [
        read_summary(run(**config, server_memory_limit=limit, run_name=f"limit-{i}").path)["digest"]
        for i, limit in enumerate((0.0, 1e-9, 1e-4))
    ]
    assert len(set(digests)) == 1 and spilled


@pytest.mark.parametrize("mixing", ["collaborate", "as-critical", "mix", "mix_by_mask"])
def test_a_stack_may_be_overwritten_by_what_is_made_of_it(mixing: str) -> None:
    rng = np.random.default_rng(0)
    n, d = 5, 70_001
    W = rng.standard_normal((n, d), dtype=np.float32)
    bits = np.stack([masks.pack(rng.random(d) < 0.5) for _ in range(n)])
    members = (rng.random((n, n)) < 0.3) | np.eye(n, dtype=bool)
    members[0] = np.eye(n, dtype=bool)[0]
    weights = members / members.sum(axis=1, keepdims=True)

    def result(out: np.ndarray | None, W: np.ndarray) -> np.ndarray:
        if mixing == "collaborate":
            return fedcac.collaborate(W, bits, members, np.arange(1.0, n + 1), out=out)[1]
        if mixing == "as-critical":
            return aggregate.group_means(W, members, out=out)
        if mixing == "mix":
            return aggregate.mix(W, weights, out=out)
        return feddac.mix_by_mask(W, bits, weights, None, out=out)

    expected, stack = result(None, W), W.copy()
    assert result(stack, stack) is stack
    assert (stack == expected).all()
