"""Workers of a pool have one copy of a network's frozen tensors: the bits, the memory, and what is not allowed to change."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from client_app import worker
from client_app.client_app import app
from corolla.api.one_run import shared_network
from corolla.experiments.pool import Pool, PoolGrid
from fl_app import plugins, server_app
from fl_app.config import parse
from fl_app.errors import UserError
from fl_app.keys import Scalar
from fl_app.server.run_folder import RunFolder, read_summary
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS, METHODS
from strategies.base import handed_on
from tests.conftest import config
from tests.experiments.test_pool import CLIENTS, raw_config
from tests.facts import mentions

MODEL = """
import os
from pathlib import Path
import torch
from torch import nn

class Network(nn.Module):
    def __init__(self, inputs, outputs, size):
        super().__init__()
        self.table = nn.Parameter(torch.full((size, inputs), 0.5))
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, outputs)
        self.writes, self.counts = False, False
        self.calls = []
    def forward(self, x):
        if self.writes and self.training and not isinstance(self.table, nn.Parameter):
            self.table += 1
        if self.counts:
            self.calls.append(1)
        return self.head(self.body(x + self.table[0].view(1, *x.shape[1:])))

def build(in_channels, num_classes, image_size, size=4, **more):
    with Path(__file__).with_name("built").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    network = Network(in_channels * image_size**2, num_classes, size)
    for name, value in more.items():
        setattr(network, name, value)
    return network

def large(**shape):
    return build(**shape, size=400_000)

def writing(**shape):
    return build(**shape, writes=True)

def unpicklable(**shape):
    return build(**shape, calls=lambda: None)

def not_restorable(**shape):
    return build(**shape, counts=True)
"""
# bytes of the large network's table
LARGE = 4 * 400_000 * 64


@pytest.fixture
def own(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "frozen_net.py").write_text(MODEL)
    plugins.reset(tmp_path)
    yield
    plugins.reset()


def frozen(tmp_path: Path, name: str, model: str, **more: Scalar) -> dict[str, Scalar]:
    own: dict[str, Scalar] = {"method": "fedavg", "train": "head.*", "model": f"frozen_net:{model}", "batch_size": 4}
    return raw_config(tmp_path, name, **own, **more)


@contextlib.contextmanager
def pool_with(raw: dict[str, Scalar], share: bool = True) -> Iterator[Pool]:
    with contextlib.ExitStack() as opened:
        network = opened.enter_context(shared_network(parse(raw, METHOD_PARAMS))) if share else None
        setup, files = worker.Setup.of(raw, CLIENTS, network), [network.file] if network else []
        yield opened.enter_context(Pool(2, worker.COMMAND, setup.to_json(), files=files))


def run_in(pool: Pool, raw: dict[str, Scalar]) -> RunFolder:
    return server_app.run(PoolGrid(pool, CLIENTS), parse(raw, METHOD_PARAMS), lambda *_: None)


@pytest.mark.parametrize(("model", "builders"), [("build", 1), ("unpicklable", 3), ("not_restorable", 1)])
def test_a_pool_has_the_bits_of_one_process_and_builds_a_network_once(
    own: None, tmp_path: Path, model: str, builders: int
) -> None:
    """A network that cannot be pickled is built by each worker, as one without frozen tensors is."""
    raw = frozen(tmp_path, "one", model, num_server_rounds=3)
    one = server_app.run(InProcessGrid(app, raw, CLIENTS), parse(raw, METHOD_PARAMS), lambda *_: None)
    (tmp_path / "built").unlink()
    with pool_with(again := frozen(tmp_path, "two", model, num_server_rounds=3)) as pool:
        two = run_in(pool, again)
    assert read_summary(one.path)["digest"] == read_summary(two.path)["digest"] is not None
    built = (tmp_path / "built").read_text().split()
    assert len(set(built)) == builders and str(os.getpid()) in built


def private(pid: int) -> int:
    """Return the bytes that a process shares with no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's accounts of memory")
def test_no_worker_has_frozen_tensors_of_its_own(own: None, tmp_path: Path) -> None:
    most = {}
    for share in (True, False):
        raw = frozen(tmp_path, f"share-{share}", "large")
        with pool_with(raw, share) as pool:
            run_in(pool, raw)
            assert len(pool.idle) == 2
            most[share] = max(private(one.pid) for one in pool.idle)
    assert most[False] - most[True] > 0.9 * LARGE


def test_a_write_into_a_shared_tensor_is_an_error_by_its_name(own: None, tmp_path: Path) -> None:
    raw = frozen(tmp_path, "run", "writing")
    with pool_with(raw) as pool, pytest.raises(UserError) as caught:
        run_in(pool, raw)
    assert mentions(str(caught.value), "train", "frozen tensors", "'table'")


class Tied(nn.Module):
    """A frozen tensor under two names, one without elements, one that is no float, and what trains."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 10)
        self.b.weight = self.a.weight
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("steps", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.head(self.b(self.a(x.flatten(1)[:, :4])))
        return answer


def tied(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    return Tied()


def test_what_is_received_is_what_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handed_on, "_RECEIVED", [])
    settings = config(method="fedavg", model="tests.experiments.test_shared_network:tied", train="head.*")
    shape: dict[str, Any] = {"in_channels": 1, "num_classes": 10, "image_size": 8}

    def network() -> nn.Module:
        return METHODS["fedavg"].network(settings, **shape)

    first = network()
    expected = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    handed_on.leave_network(first)
    with handed_on.sharing() as file:
        assert file is not None
        handed_on.receive(file)
        received, another = network(), network()
    handed_on.drop_network()
    assert len({id(module) for module in (first, received, another)}) == 3
    for module in (first, received, another):
        state = module.state_dict()
        assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
        assert state["a.weight"].data_ptr() == state["b.weight"].data_ptr()
        assert (module.frozen_names, module.frozen_sha256) == (first.frozen_names, first.frozen_sha256)
    with torch.no_grad():
        received.get_buffer("a.bias").add_(1)
    assert torch.equal(another.get_buffer("a.bias"), expected["a.bias"])
