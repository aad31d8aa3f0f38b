"""Clients of one process that train together: their turns, what a lane keeps, and, on a GPU, steps as CUDA graphs."""

from __future__ import annotations

import math
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from torch import Tensor, nn

import corolla
from client_app import at_once, batches
from client_app.at_once import Lanes
from client_app.batches import Batches
from client_app.client_app import app
from client_app.trainer import LocalTrainer
from corolla.api import one_run
from fl_app import debugging, server_app
from fl_app.config import parse
from fl_app.data import ClientData
from fl_app.debugging import reason
from fl_app.errors import UserError
from fl_app.keys import Scalar
from fl_app.layout import Model
from fl_app.server.run_folder import read_summary
from fl_app.transport import wire
from fl_app.transport.inprocess import Answer, InProcessGrid, first
from strategies import METHOD_PARAMS
from tests.client_app.test_train import data_of, mlp, with_batchnorm
from tests.conftest import config
from tests.facts import mentions, rejected

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")

# turns


def pause() -> None:
    if (lane := at_once.current()) is not None:
        lane.pause()


def kept(name: str, make: Callable[[], Any]) -> Any:
    lane = at_once.current()
    return make() if lane is None else lane.keep(name, make)


def test_a_lane_that_pauses_goes_on_when_the_others_have_had_their_turn() -> None:
    events: list[str] = []

    def work(name: str, pauses: int) -> str:
        for turn in range(pauses):
            events.append(f"{name}{turn}")
            pause()
        events.append(f"{name} ends")
        return name

    lanes = Lanes(3)
    assert lanes.answer([partial(work, "a", 2), partial(work, "b", 1), partial(work, "c", 0)]) == ["a", "b", "c"]
    assert events == ["a0", "b0", "c ends", "a1", "b ends", "a ends"]
    lanes.close()


def test_as_many_tasks_run_as_there_are_lanes_and_a_lane_keeps_what_it_made() -> None:
    made: list[int] = []

    def work(number: int) -> int:
        return kept("first", lambda: made.append(number) or number)  # type: ignore[func-returns-value]

    lanes = Lanes(2)
    assert lanes.answer([partial(work, n) for n in range(5)]) == [0, 1]
    assert lanes.answer([partial(work, n) for n in range(5, 8)]) == [0, 1]
    assert made == [0, 1]
    lanes.close()
    # outside of a lane nothing is kept, and nobody waits
    assert work(9) == 9 and work(10) == 10
    pause()


def test_an_error_of_one_lane_is_raised_when_all_have_ended() -> None:
    ended: list[int] = []

    def work(number: int) -> None:
        pause()
        if number == 0:
            raise ValueError("of the first")
        ended.append(number)

    lanes = Lanes(3)
    with pytest.raises(ValueError, match="of the first"):
        lanes.answer([partial(work, n) for n in range(3)])
    assert ended == [1, 2]
    lanes.close()


def test_ctrl_c_leaves_standard_output_as_it_was() -> None:
    """Of a lane that ran when it came, and of one that had paused while its client printed."""
    before, seen, ended = sys.stdout, list[str](), threading.Event()

    def pausing() -> None:
        with debugging.printed_lines(seen.append):
            print("one")
            pause()
            print("never")

    def interrupted() -> None:
        with debugging.printed_lines(seen.append):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            ended.wait()

    lanes = Lanes(2)
    with pytest.raises(KeyboardInterrupt):
        lanes.answer([pausing, interrupted])
    assert sys.stdout is before
    lanes.close()
    assert sys.stdout is before
    ended.set()
    assert seen == ["one"]


def test_a_line_is_said_once() -> None:
    said: list[str] = []
    lanes = Lanes(2, said.append)
    for line in ("one", "two", "one"):
        lanes.say(line)
    assert said == ["one", "two"]


# runs


def digest(directory: Path, name: str, answer: Answer, **keys: Scalar) -> str:
    raw: dict[str, Scalar] = {
        "dataset": "digits",
        "num-clients": 4,
        "num-server-rounds": 2,
        "local-epochs": 2,
        "device": "cpu",
        "run-name": name,
        **{key: str(directory) for key in ("output-dir", "state-dir", "data-dir")},
        **{key.replace("_", "-"): value for key, value in keys.items()},
    }
    grid = InProcessGrid(app, raw, 4, answer=answer)
    folder = server_app.run(grid, parse(raw, METHOD_PARAMS), lambda *_: None)
    return str(read_summary(folder.path)["digest"])


@pytest.mark.parametrize(
    ("keys", "lines"),
    [
        pytest.param({"method": "moon", "momentum": 0.9}, [], id="objective"),
        pytest.param({"method": "scaffold"}, [], id="correction"),
        pytest.param({"method": "fedrep", "partition": "dirichlet", "dirichlet-alpha": 0.3}, [], id="unequal"),
        pytest.param({"method": "fedavg", "finetune-epochs": 1, "optimizer": "adamw"}, [], id="fine-tuning"),
        pytest.param(
            {"method": "apfl"},
            ["clients-at-once: method apfl has its own training loop; its steps are taken one by one"],
            id="own-loop",
        ),
        pytest.param(
            {"method": "fedselect"},
            ["clients-at-once: method fedselect has its own training loop; its steps are taken one by one"],
            id="own-alternation",
        ),
    ],
)
def test_three_at_once_end_with_the_bits_of_one_by_one(
    tmp_path: Path, keys: dict[str, Scalar], lines: list[str]
) -> None:
    said: list[str] = []
    lanes = Lanes(3, said.append)
    assert digest(tmp_path, "three", lanes.answer, **keys) == digest(tmp_path, "one", first, **keys)
    lanes.close()
    assert said == ["clients-at-once: without a GPU clients take turns, so this is no faster", *lines]


def test_private_clients_and_budgets_of_privacy_are_served_too(tmp_path: Path) -> None:
    for name, keys in (
        ("private", {"method": "fedavg", "private": True}),
        ("dp", {"method": "fedavg", "dp-epsilon": 5.0}),
    ):
        lanes = Lanes(3, lambda line: None)
        found = [
            digest(tmp_path / mode, name, answer, **keys)  # type: ignore[arg-type]
            for mode, answer in (("lanes", lanes.answer), ("one", first))
        ]
        # a network for each message, which opacus marks, is nothing to keep
        assert not any("flat" in key for lane in lanes._lanes for key in lane.kept) or name == "private"
        lanes.close()
        assert found[0] == found[1]


def test_messages_of_clients_that_take_turns_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """512 MB are under way at most, and of clients that train together all."""
    pending: list[int] = []

    def counted(tasks: Iterable[Callable[[], Message]]) -> list[Message]:
        waiting = list(tasks)
        pending.append(len(waiting))
        return [task() for task in waiting]

    monkeypatch.setattr(wire, "payload_bytes", lambda content: 200_000_000)
    digest(tmp_path, "many", counted, method="fedavg")
    # the first are questions, which are small
    assert max(pending[1:]) == 3
    limits: list[float] = []

    def run(grid: Any, config: Any, progress: Any, in_flight: float) -> Any:
        limits.append(in_flight)
        return SimpleNamespace(path=tmp_path)

    monkeypatch.setattr(server_app, "run", run)
    for at_once_count in (1, 3):
        one_run.run_in_process({}, config(num_clients=4), at_once=at_once_count)
    assert limits == [512e6, math.inf]


def test_the_option_needs_one_process_and_a_number() -> None:
    with rejected(UserError, "", "clients_at_once needs in_process", "got 3 without it"):
        corolla.run(method="fedavg", clients_at_once=3)
    with rejected(UserError, "clients_at_once", "-1 is not in the range x>=0"):
        corolla.run(method="fedavg", in_process=True, clients_at_once=-1)


def test_full_memory_of_a_gpu_is_said_in_one_line() -> None:
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 80.00 GiB. GPU 0 has a total capacity of 9 GiB"
    )
    assert mentions(
        reason(error),
        "GPU's memory",
        "80.00 GiB",
        "use a smaller batch-size",
        "fewer clients",
        "GPU at once",
        'or precision = "bfloat16"',
    )


# inputs that are made ready once


@pytest.mark.parametrize("augment", ["none", "crop-flip"])
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_inputs_made_ready_once_are_those_of_each_batch(
    monkeypatch: pytest.MonkeyPatch, augment: str, memory_format: torch.memory_format
) -> None:
    def taken() -> list[tuple[Tensor, tuple[int, ...]]]:
        made = Batches(
            config(augment=augment, normalize="symmetric", batch_size=7),
            data_of(30),
            torch.device("cpu"),
            round=1,
            client_id=0,
            memory_format=memory_format,
        )
        return [(batch.x, batch.x.stride()) for batch in made.epochs(2, "train")]

    plain = taken()
    monkeypatch.setattr(batches, "READY_ON", {"cpu"})
    for (x, stride), (ready, ready_stride) in zip(plain, taken(), strict=True):
        assert torch.equal(x, ready) and stride == ready_stride


# CUDA graphs


def trained(make: Callable[[], nn.Module], lanes: Lanes | None, said: list[str], **more: object) -> list[Model]:
    """Train three clients of unequal size for three epochs, one by one or in lanes, twice over."""

    def one(client_id: int) -> Model:
        data: ClientData = data_of(50 + 7 * client_id)
        module = kept("network", make)
        trainer = LocalTrainer(module, config(device="cuda", momentum=0.9, local_epochs=3), data, 1, client_id)
        start = Model(
            np.concatenate([p.detach().reshape(-1).numpy() for p in make().parameters()]),
            trainer.read().buffers * 0 + 1,
        )
        return trainer.train(start, **more)  # type: ignore[arg-type]

    tasks = [partial(one, client_id) for client_id in range(3)]
    return [model for _ in range(2) for model in (lanes.answer(tasks) if lanes else [task() for task in tasks])]


@on_gpu
@pytest.mark.parametrize("make", [mlp, with_batchnorm])
def test_graphs_do_what_steps_do(make: Callable[[], nn.Module]) -> None:
    said: list[str] = []
    lanes = Lanes(3, said.append)
    for one, other in zip(trained(make, None, said), trained(make, lanes, said), strict=True):
        np.testing.assert_allclose(one.params, other.params, atol=1e-4)
        np.testing.assert_allclose(one.buffers, other.buffers, atol=1e-4)
    assert not said


@on_gpu
def test_an_objective_that_draws_on_the_cpu_is_noticed_and_draws_the_same() -> None:
    draws: list[np.random.Generator] = []

    def objective(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = nn.functional.cross_entropy(module(x), y) * draws[0].random()
        return loss

    found, said = [], list[str]()
    for lanes in (None, Lanes(1, said.append)):
        draws[:] = [np.random.default_rng(0)]
        found.append(trained(mlp, lanes, said, objective=objective)[0])
    np.testing.assert_allclose(found[0].params, found[1].params, atol=1e-4)
    assert len(said) == 1 and mentions(said[0], "captured step", "step itself")
