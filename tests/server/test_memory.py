"""What the server holds: stacks that are handed on, rows that are closed up, models that lie on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fl_app.errors import UserError
from fl_app.server.client_arrays import on_disk, release, spill, stack, stack_like, to_disk
from fl_app.server.run_folder import RunFolder, read_summary
from fl_app.transport.wire import Expected
from strategies import fedcac, feddac
from strategies.base.state import UploadBuffer
from strategies.kernels import aggregate, masks
from tests.facts import rejected

Run = Callable[..., RunFolder]


def test_arrays_on_disk_are_the_same(tmp_path: Path) -> None:
    arrays = {"a": np.arange(5.0), "bits": np.arange(3, dtype=np.uint8), "none": np.empty((0, 2)), "b": np.array(3)}
    kept = to_disk(arrays, tmp_path)
    for name, array in arrays.items():
        assert kept[name].dtype == array.dtype and kept[name].shape == array.shape and (kept[name] == array).all()
    assert on_disk(kept["a"]) and not kept["a"].flags.writeable
    assert list(tmp_path.iterdir()) == []


def test_memory_maps_are_whole_after_their_memory_was_given_back(tmp_path: Path) -> None:
    kept = to_disk({"a": np.arange(5000.0)}, tmp_path)
    release(kept | {"in memory": np.ones(3)})
    assert (kept["a"] == np.arange(5000.0)).all()


def test_arrays_on_disk_keep_no_file_open_and_their_maps_end_with_them(tmp_path: Path) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def maps() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    before = open_files()
    kept = [to_disk({name: np.full(10, k) for name in "abcd"}, tmp_path) for k in range(20)]
    assert open_files() <= before and maps() == 20
    last = kept.pop()["d"]
    del kept
    assert maps() == 1 and last.tolist() == [19] * 10
    del last
    assert maps() == 0


def test_rows_of_dropped_clients_are_closed_up_and_the_record_keeps_its_sizes() -> None:
    def column(*values: float) -> np.ndarray:
        return np.array(values, np.float32)[:, None]

    W, B, sizes = column(1, 2, 3, 4), column(5, 6, 7, 8), np.array([100.0, 200, 300, 400])
    buffer = UploadBuffer([4, 5, 6, 7], Expected(1, 1), W, B, None, {"x": column(9, 8, 7, 6)}, sizes)
    buffer.metrics = {7: {}, 5: {}}
    uploads = buffer.result()
    assert (
        uploads.ids == [5, 7] and uploads.sizes.tolist() == [200, 400] and buffer.sizes.tolist() == [100, 200, 300, 400]
    )
    assert (
        uploads.W.tolist() == [[2], [4]]
        and uploads.B.tolist() == [[6], [8]]
        and uploads.extras["x"].tolist() == [[8], [6]]
    )
    assert np.shares_memory(uploads.W, W)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    with rejected(UserError, "server-memory-limit", "clients' models cannot", "be written", "missing"):
        to_disk({"a": np.arange(5.0)}, tmp_path / "missing")


def test_a_rounds_stacks_beyond_the_limit_lie_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.base.state.SMALL", 100)
    expected = Expected(1000, 5, num_params=1000, extras={"x": ("<i8", (2, 3))})
    # a client's row has 4000 + 20 + 125 + 48 bytes
    for limit, mapped in ((0, False), (4 * 4193, False), (4 * 4193 - 1, True)):
        buffer = UploadBuffer.of([1, 2, 3, 5], expected, limit, tmp_path)
        assert buffer.bits is not None
        stacks: list[NDArray[Any]] = [buffer.W, buffer.B, buffer.bits, buffer.extras["x"]]
        assert [isinstance(each, np.memmap) for each in stacks] == [mapped] * 4
        assert [each.shape for each in stacks] == [(4, 1000), (4, 5), (4, 125), (4, 2, 3)]
        assert buffer.extras["x"].dtype == np.int64
        buffer.W[2] = np.arange(1000)
        release({"W": buffer.W[2]})
        assert (buffer.W[2] == np.arange(1000)).all()
        assert isinstance(stack_like(buffer.W, tmp_path), np.memmap) == mapped
    assert list(tmp_path.iterdir()) == []


def test_rows_that_a_mapped_stack_is_kept_for_are_copied_out_of_it(tmp_path: Path) -> None:
    W = stack((3, 100), np.dtype(np.float32), tmp_path)
    W[:] = np.arange(3)[:, None]
    personal = {i: {"params": W[i], "round": np.array(1)} for i in range(3)}
    spill(personal, [0, 1, 2], 1, tmp_path)
    assert all(np.shares_memory(own["params"], W) for own in personal.values())
    spill(personal, [0, 1], 1, tmp_path)
    assert [np.shares_memory(own["params"], W) for own in personal.values()] == [True, True, False]
    before, kept = dict(personal[2]), personal[2]["params"]
    assert on_disk(kept) and (kept == 2).all() and int(personal[2]["round"]) == 1
    spill(personal, [0, 1], 1, tmp_path)
    assert personal[2]["params"] is before["params"]


def test_a_stack_that_the_disk_has_no_room_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with rejected(UserError, "server-memory-limit", "no room", "round's uploads", "4 B", "No space left"):
        stack((1,), np.dtype(np.float32), tmp_path)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(
    ("method", "own", "stacks"),
    [
        ("fedcac", {}, False),
        ("fedamp", {}, False),
        ("fedcac", {}, True),
        ("feddac", {}, True),
        ("feddwa", {"guidance": "extrapolated"}, True),
        ("ifca", {}, True),
    ],
)
def test_what_lies_on_disk_does_not_change_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, method: str, own: dict[str, Any], stacks: bool, fraction: float
) -> None:
    """Clients' arrays, or a round's stacks too."""
    on_disk: list[bool] = []

    def spilled(arrays: Any, path: Path) -> Any:
        on_disk.append(not stacks)
        return to_disk(arrays, path)

    def stacked(shape: tuple[int, ...], dtype: Any, place: Path | None) -> Any:
        on_disk.append(stacks and place is not None)
        return stack(shape, dtype, place)

    if stacks:
        monkeypatch.setattr("strategies.base.state.SMALL", 0)
    monkeypatch.setattr("fl_app.server.client_arrays.to_disk", spilled)
    monkeypatch.setattr("fl_app.server.client_arrays.stack", stacked)
    config: dict[str, Any] = {"method": method, "num_server_rounds": 3, "fraction_train": fraction, method: own}
    digests = set()
    for i, limit in enumerate((0.0, 1e-9)):
        digests.add(read_summary(run(**config, server_memory_limit=limit, run_name=f"limit-{i}").path)["digest"])
        assert any(on_disk) == (limit > 0)
    assert len(digests) == 1


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
