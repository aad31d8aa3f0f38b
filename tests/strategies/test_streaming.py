"""Uploads that are added up as they come: bits of a stack's means, in any order of arrival, in memory that no clients add to."""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fl_app.errors import MethodError, MethodFault, UserError
from fl_app.keys import Scalar
from fl_app.layout import Model
from fl_app.server import client_arrays
from fl_app.server.run_folder import RunFolder
from fl_app.transport.wire import Upload
from strategies import METHODS
from strategies.base import Uploads
from strategies.base.server_half import ServerHalf
from strategies.base.state import UploadBuffer
from strategies.baselines.fedavg import FedAvg
from strategies.baselines.feddpa import SHARE
from strategies.baselines.scaffold import STEPS
from strategies.engine import streaming
from strategies.engine.attempt import RoundAttempt
from strategies.engine.plain import PlainRounds
from strategies.engine.streaming import RunningMean, streams
from strategies.kernels.aggregate import RowSum, SummedRows, mean_block, weighted_mean
from strategies.kernels.robust import PLAIN
from tests.conftest import Run, config, flat_layout
from tests.facts import rejected

STREAMING = ("fedavg", "pfedme", "feddyn", "scaffold", "feddpa")


def rows(n: int, d: int, seed: int = 0) -> np.ndarray:
    """Uploads whose values are of many sizes: sums of them depend on their order."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((n, d)) * 10.0 ** rng.integers(-6, 6, (n, d))
    values[rng.random((n, d)) < 0.1] = -0.0
    return values.astype(np.float32)


def bits(array: np.ndarray) -> bytes:
    return array.tobytes()


# sums


@given(
    st.integers(1, 40),
    st.sampled_from([1, 2, 3, 4096, 4097, 8193, 40_000]),
    st.sampled_from(["none", "ones", "equal", "one differs", "samples"]),
    st.integers(0, 2**32 - 1),
)
def test_rows_added_up_have_the_mean_of_their_stack(n: int, d: int, kind: str, seed: int) -> None:
    W, rng = rows(n, d, seed), np.random.default_rng(seed)
    weights = {
        "equal": np.full(n, 7.0),
        "one differs": np.where(np.arange(n) == rng.integers(n), 3.0, 1.0),
        "samples": rng.integers(1, 5, n).astype(np.float64),
    }.get(kind, np.ones(n))
    folded = SummedRows(d, 4096)
    for row, weight in zip(W, weights, strict=True):
        folded.add(row, float(weight))
    folded.close()
    asked = None if kind == "none" else weights
    assert bits(weighted_mean(folded, asked)) == bits(weighted_mean(W, asked)) == bits(PLAIN.mean(folded, asked))
    checked = np.ones(n) if (weights == weights[0]).all() else weights
    assert bits(folded.mean(weights)) == bits(mean_block(W, checked, checked.sum()))
    total = RowSum(d, 40_000)
    for row in W:
        total.add(row)
    assert bits(total.total()) == bits(W.astype(np.float64).sum(axis=0))


def test_what_is_not_there_any_more_is_refused() -> None:
    folded = SummedRows(3, 4096)
    for weight in (1.0, 2.0):
        folded.add(np.ones(3, np.float32), weight)
    with rejected(ValueError, "", "added up", "they came", "with other weights"):
        folded.mean()
    with rejected(ValueError, "", "weights", "2 numbers"):
        weighted_mean(folded, np.array([-1.0, 2.0]))
    with rejected(ValueError, "", "least one row"):
        weighted_mean(SummedRows(3, 4096))
    with rejected(TypeError, "", "no stack", "'shape'"):
        _ = folded.shape


# whole rounds


def half(method: str, folder: Path, d: int, b: int) -> ServerHalf[Any]:
    layout = flat_layout([d], [b])
    own = METHODS[method]
    settings = config(method=method, num_clients=60)
    initial = Model(rows(1, d, 5)[0], rows(1, b, 6)[0])
    return own.server(settings, layout, initial, layout.names, RunFolder(folder, "test"))


def uploaded(W: np.ndarray, B: np.ndarray, i: int) -> tuple[Upload, dict[str, Scalar]]:
    metrics: dict[str, Scalar] = {STEPS: 1 + i % 2, SHARE: 0.5}
    return Upload(Model(W[i], B[i]), None, {}, metrics, 10 + i % 3), metrics


def play(
    method: str, folder: Path, arrivals: Sequence[int], lost: Iterable[int] = (), *, stack: bool = False, d: int = 300
) -> ServerHalf[Any]:
    """Run a round of all clients that arrive in an order, but for those who fail; return the server half after it."""
    server, clients = half(method, folder, d, 5), sorted(arrivals)
    W, B = rows(len(clients), d), rows(len(clients), 5, 1)
    protocol = PlainRounds(server)
    attempt = RoundAttempt(server.config, 1)
    server.begin(attempt)
    attempt.buffer = UploadBuffer.of(clients, server.expected()) if stack else protocol.open(attempt, clients)
    assert isinstance(attempt.buffer, RunningMean) != stack
    for i in arrivals:
        if i in lost:
            attempt.buffer.skip(i)
            continue
        upload, metrics = uploaded(W, B, i)
        attempt.buffer.add(i, protocol.check(i, upload) if not stack else upload, metrics)
    server.personalize(1, protocol.screen(attempt) if not stack else attempt.buffer.result())
    return server


@pytest.mark.parametrize("waiting", [0.0, 3_000.0, 64e6])
@pytest.mark.parametrize("method", STREAMING)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_order_of_arrival_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, waiting: float, seed: int
) -> None:
    monkeypatch.setattr(streaming, "_WAITING_BYTES", waiting)
    rng, n = np.random.default_rng(seed), 20
    lost = set(rng.choice(n, 4, replace=False).tolist()) if seed else set()
    orders = [range(n), range(n)[::-1], rng.permutation(n).tolist()]
    expected = play(method, tmp_path, range(n), lost, stack=True)
    for order in orders:
        found = play(method, tmp_path, order, lost)
        for a, b in ((expected.global_model, found.global_model), (expected, found)):
            arrays = [a.params, a.buffers] if isinstance(a, Model) else list(a.memory.values())
            others = [b.params, b.buffers] if isinstance(b, Model) else list(b.memory.values())
            assert [bits(array) for array in arrays] == [bits(array) for array in others]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("room", [0, 1, 2])
def test_an_upload_that_the_disk_has_no_room_for_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(streaming, "_WAITING_BYTES", 0.0)
    expected, left = play("fedavg", tmp_path, range(6), stack=True), [None] * room
    to_disk = client_arrays.to_disk

    def with_room(arrays: dict[str, NDArray[Any]], directory: Path) -> dict[str, NDArray[Any]]:
        if not left:
            raise UserError("no space left on the disk")
        left.pop()
        return to_disk(arrays, directory)

    monkeypatch.setattr(client_arrays, "to_disk", with_room)
    found = play("fedavg", tmp_path, [2, 3, 5, 1, 0, 4])
    assert bits(found.global_model.params) == bits(expected.global_model.params)
    assert bits(found.global_model.buffers) == bits(expected.global_model.buffers)


def peak(folder: Path, n: int, arrivals: Sequence[int], method: str, d: int) -> float:
    """Most memory of a round of n clients, in vectors [d]."""
    server = half(method, folder, d, 0)
    protocol = PlainRounds(server)
    attempt = RoundAttempt(server.config, 1)
    server.begin(attempt)
    attempt.buffer = protocol.open(attempt, list(range(n)))
    tracemalloc.start()
    try:
        for i in arrivals:
            vector = np.random.default_rng(i).standard_normal(d, dtype=np.float32)
            metrics: dict[str, Scalar] = {STEPS: 2}
            upload = Upload(Model(vector, np.empty(0, np.float32)), None, {}, metrics, 10 + i % 3)
            attempt.buffer.add(i, protocol.check(i, upload), metrics)
        server.personalize(1, protocol.screen(attempt))
        return tracemalloc.get_traced_memory()[1] / (4 * d)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
@pytest.mark.parametrize("backwards", [False, True])
def test_memory_does_not_grow_with_the_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, backwards: bool
) -> None:
    d = 50_000
    # so many vectors may wait in memory
    monkeypatch.setattr(streaming, "_WAITING_BYTES", 4 * 4 * d)
    few, many = (peak(tmp_path, n, range(n)[::-1] if backwards else range(n), method, d) for n in (40, 160))
    # a map of a file takes some kB
    assert many < few + 3 and many < 40


# which methods, and what is said


def test_which_methods_add_up() -> None:
    adding = {
        name for name, method in METHODS.items() if streams(getattr(method.strategy, "__origin__", method.strategy))
    }
    assert adding == {
        "fedavg", "fedprox", "fedper", "fedrep", "fedbn", "lg-fedavg", "ditto", "pfedme", "fedntd", "moon", "fedbabu",
        "apfl", "fedala", "flute", "feddpa", "feddyn", "scaffold", "fedobp", "fedem", "pfedgate",
        "perfedavg", "fedrod", "adabest", "partialfed",
    }  # fmt: skip


def test_a_method_of_ones_own_adds_up_only_if_it_says_so_itself() -> None:
    class Own(FedAvg[Any]):
        def personalize(self, round: int, uploads: Uploads) -> None:
            super().personalize(round, uploads)

    class Weighing(FedAvg[Any]):
        def weights(self, uploads: Uploads) -> Any:
            return uploads.sizes / uploads.sizes.sum()

    class Saying(Own):
        streams = True

    class Sending(FedAvg[Any]):
        def download_extras(self, client_id: int) -> dict[str, Any]:
            return {}

    assert [streams(each) for each in (FedAvg, Own, Weighing, Saying, Sending)] == [True, False, False, True, True]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"max_update_norm": 3.0}, "max-update-norm compares each with all others"),
        ({"robust": "median"}, "robust = median compares them"),
        ({"max_size_weight": 2.0}, "max-size-weight compares their sizes"),
        ({"method": "fedobp", "fedobp": {"upload_mask": True}}, "masks come with them"),
        ({"method": "fedcac", "max_update_norm": 3.0}, ""),
    ],
)
def test_a_run_says_once_why_it_keeps_a_stack(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr(logging.getLogger("corolla"), "propagate", True)
    caplog.set_level(logging.INFO, "corolla")
    run(**changes)
    said = [record.message for record in caplog.records if "kept as a stack" in record.message]
    assert len(said) == bool(why) and all(why in line for line in said)


def test_a_fault_of_the_methods_is_no_clients_fault(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def weights(self: Any, uploads: Uploads) -> Any:
        return uploads.W[:, 0]

    monkeypatch.setattr(FedAvg, "weights", weights)
    with rejected(MethodFault, "method fedavg", "weights()", "`summed` failed (IndexError", "they get"):
        run()


def test_streams_is_true_or_false() -> None:
    class Asking(FedAvg[Any]):
        @property
        def streams(self) -> bool:  # type: ignore[override]
            raise RuntimeError("not here")

    with rejected(MethodError, "", "method class Asking", "streams", "True or False", "got <property"):
        streams(Asking)
