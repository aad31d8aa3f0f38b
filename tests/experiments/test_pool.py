"""A simulation whose clients answer in forked workers: the bits of a run in one process, and what becomes of killed processes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from torch import nn

from client_app import worker
from client_app.client_app import app
from corolla.api.one_run import shared_network
from corolla.experiments.pool import Pool, PoolGrid, workers
from fl_app import plugins, server_app
from fl_app.config import parse
from fl_app.errors import UserError
from fl_app.forking import Warm
from fl_app.keys import Scalar
from fl_app.server.run_folder import RunFolder, read_metrics, read_summary
from fl_app.transport.inprocess import InProcessGrid
from fl_app.transport.wire import QUERY
from strategies import METHOD_PARAMS, METHODS
from strategies.base import handed_on
from tests.conftest import PLUGINS, SMALL, Command, config, wait_for
from tests.facts import each_mentions, mentions, rejected
from tests.small_models import BATCHNORM

CLIENTS = 4

OWN = """
import os
import signal
from pathlib import Path
from corolla.method import FedAvg, LocalUpdate, Method, NoParams, all_tensors

class Client(LocalUpdate):
    def train(self, start, state, ctx):
        os.write(2, b"a library says so\\n")
        print("at", ctx.round)
        once = Path(__file__).with_name(f"killed-{ctx.client_id}")
        if ctx.client_id == 1 and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if ctx.client_id == 2 and Path(__file__).with_name("stop").exists():
            breakpoint()
        return ctx.trainer.train(start)

METHOD = Method("own_killed", NoParams, FedAvg, Client, all_tensors)
"""


def raw_config(directory: Path, name: str, **more: Scalar) -> dict[str, Scalar]:
    places: dict[str, Scalar] = {"output-dir": str(directory), "state-dir": str(directory / name), "run-name": name}
    return {**SMALL, "num-clients": CLIENTS, **places, **{k.replace("_", "-"): v for k, v in more.items()}}


@contextlib.contextmanager
def pool_of(raw: dict[str, Scalar], count: int = 2, **more: Any) -> Iterator[Pool]:
    setup = worker.Setup.of(raw, CLIENTS)
    with Pool(count, worker.COMMAND, setup.to_json(), **more) as pool:
        yield pool


def run_in(pool: Pool, raw: dict[str, Scalar]) -> RunFolder:
    return server_app.run(PoolGrid(pool, CLIENTS), parse(raw, METHOD_PARAMS), lambda *_: None)


CASES: dict[str, dict[str, Scalar]] = {
    "state": {"method": "scaffold", **BATCHNORM},
    "private": {"method": "fedavg", "private": True},
    "own": {"method": "prototypes:METHOD"},
}


@pytest.mark.parametrize(
    "case", ["state", *(pytest.param(case, marks=pytest.mark.nightly) for case in ("private", "own"))]
)
def test_a_pool_has_the_bits_of_one_process(case: str, tmp_path: Path) -> None:
    plugins.reset(PLUGINS)
    raw = raw_config(tmp_path, "one", **CASES[case])
    one = server_app.run(InProcessGrid(app, raw, CLIENTS), parse(raw, METHOD_PARAMS), lambda *_: None)
    with pool_of(again := raw_config(tmp_path, "two", **CASES[case])) as pool:
        two = run_in(pool, again)
    plugins.reset()
    assert read_summary(one.path)["digest"] == read_summary(two.path)["digest"] is not None
    losses = [[r["loss"] for r in read_metrics(folder.path)] for folder in (one, two)]
    assert losses[0] == losses[1]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "own_killed.py").write_text(OWN)
    plugins.reset(tmp_path)
    yield "own_killed:METHOD"
    plugins.reset()


def test_a_killed_worker_fails_its_own_message_and_is_replaced(
    own: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What workers write past Python is heard, too: of the killed one as of the others."""
    caplog.set_level(logging.INFO, "corolla")
    said: list[str] = []
    raw = raw_config(tmp_path, "run", method=own, min_results=0.5)
    with pool_of(raw, say=said.append) as pool:
        folder = run_in(pool, raw)
        assert said.count("a library says so") == 2 * CLIENTS
        # a breakpoint in a worker ends the run
        (tmp_path / "stop").touch()
        with rejected(UserError, "", "breakpoint()", "at own_killed.py:16", "--in-process"):
            run_in(pool, {**raw, "run-name": "stopped"})
    first, second = list(read_metrics(folder.path))
    assert set(first["clients"]) == {"0", "2", "3"} and set(second["clients"]) == {"0", "1", "2", "3"}
    log = (folder.path / "log.txt").read_text()
    assert mentions(log, "client 1 dropped", "error 8", "process was killed", "(SIGKILL)")
    # of the clients' own output each line, once
    assert [log.count(f"client {k}: at 1") for k in range(CLIENTS)] == [1, 0, 1, 1]


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def gone(processes: list[psutil.Process]) -> Any:
    # a zombie's parent has not asked for it yet
    return wait_for(lambda: all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in processes), 20)


# by day `test_the_end_of_a_worker_is_nothing_to_a_later_warm_process`
@pytest.mark.nightly
def test_another_warm_process_takes_the_place_of_a_killed_one(tmp_path: Path) -> None:
    raw = raw_config(tmp_path, "run", num_server_rounds=3)
    killed: list[psutil.Process] = []

    def kill(what: str, done: int, total: int) -> None:
        if what == "round 2/3" and not killed:
            killed.extend([psutil.Process(pool._warm.pid), *children(pool._warm.pid)])
            assert len(killed) == 3
            killed[0].kill()
            # its workers with it
            assert gone(killed)

    with pool_of(raw) as pool:
        folder = server_app.run(PoolGrid(pool, CLIENTS), parse(raw, METHOD_PARAMS), kill)
    took_part = [len(record["clients"]) for record in read_metrics(folder.path)]
    assert took_part == [4, 4, 4] and read_summary(folder.path)["digest"]


def small_pool(count: int, work: str) -> Pool:
    """Return a pool of workers that do what a Python expression of `asker` says."""
    code = f"import signal, sys; from fl_app import forking; forking.serve(int(sys.argv[1]), lambda asker: {work})"
    return Pool(count, [sys.executable, "-c", code], b"")


def message(pool: Pool, node: int, nbytes: int = 1) -> Message:
    grid = PoolGrid(pool, CLIENTS)
    asked = Message(RecordDict({"text": ConfigRecord({"text": "x" * nbytes})}), node, QUERY)
    grid.push_messages([asked])
    return asked


def replies(pool: Pool, count: int) -> list[str]:
    found: list[Message] = []
    while len(found) < count:
        found += pool.replies()
    return [reply.error.reason for reply in found]


def test_the_end_of_a_worker_is_nothing_to_a_later_warm_process() -> None:
    with small_pool(2, "signal.pause()") as pool:
        pool.send(message(pool, 1))
        first = [psutil.Process(pool._warm.pid), *children(pool._warm.pid)]
        assert len(first) == 2
        first[0].kill()
        assert gone(first)
        # nobody has noticed yet: this one needs another warm process
        pool.send(message(pool, 2))
        later = pool._warm.pid
        assert replies(pool, 1) == ["its process ended"]
        # which would be refused if that one had ended of it
        pool._warm.fork(1)[1].close()
        assert pool._warm.pid == later != first[0].pid


def test_a_message_that_kills_whoever_takes_it_is_answered_with_an_error() -> None:
    with small_pool(1, "asker.recv(9) and sys.exit(5)") as pool:
        pool.send(message(pool, 1, 10_000_000))
        assert each_mentions(replies(pool, 1), ("process ended", "code 5"))


ASKER = """
import sys
from client_app import worker
from corolla.experiments.pool import Pool, PoolGrid
from fl_app.transport import wire
from fl_app.transport.wire import QUERY
from flwr.app import Message
setup = worker.Setup.of({"method": "fedavg", "model": "mlp"}, 2)
with Pool(2, worker.COMMAND, setup.to_json()) as pool:
    grid = PoolGrid(pool, 2)
    ids = set(grid.push_messages([Message(wire.encode_query(), node, QUERY) for node in (1, 2)]))
    while ids:
        ids -= {reply.metadata.reply_to_message_id for reply in grid.pull_messages(ids)}
    print("answered", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_nothing_outlives_the_process_that_asked(number: signal.Signals, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ASKER], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "answered\n"
    found = children(process.pid)
    # the warm process and two workers
    assert len(found) == 3
    # one that is at work does not look for the end of its asker
    os.kill(found[-1].pid, signal.SIGSTOP)
    process.send_signal(number)
    process.communicate()
    assert gone(found)


def test_workers_are_as_many_as_cores_and_clients_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert [workers(cpus, 20) for cpus in (0.5, 1, 3, 8)] == [16, 8, 2, 1]
    assert workers(1, 3) == 3


def test_a_child_gets_its_own_output_and_its_exit_code_is_known(tmp_path: Path) -> None:
    code = (
        "import sys; from fl_app import forking\n"
        "def work(asker):\n"
        "    word = asker.recv(10)\n"
        "    print(word.decode())\n"
        "    sys.exit(7 if word == b'end' else 0) if word != b'fail' else 1 / 0\n"
        "forking.serve(int(sys.argv[1]), work)\n"
    )
    warm = Warm([sys.executable, "-c", code])
    codes = {}
    for word in ("end", "fail", "fine"):
        with (tmp_path / word).open("wb") as output:
            pid, link = warm.fork(output.fileno())
        with link:
            link.sendall(word.encode())
            # until it has ended
            assert link.recv(1) == b""
            codes[word] = warm.status(pid)
    pid, link = warm.fork(1)
    assert warm.status(pid) == -signal.SIGKILL
    warm.close()
    assert codes == {"end": 7, "fail": 1, "fine": 0}
    assert (tmp_path / "end").read_text() == "end\n" and "ZeroDivisionError" in (tmp_path / "fail").read_text()
    with pytest.raises(OSError):
        warm.fork(1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backend", "pool", "--ray-address", "10.0.0.1:6379"], "--ray-address is for --backend ray"),
        (["--backend", "pool", "--gpus-per-client", "0.5"], "--gpus-per-client is for --backend ray"),
        (["--backend", "ray", "--in-process"], "--in-process and --backend exclude each other"),
        (["--backend", "pool", "--superlink", "x"], "--superlink and --backend exclude each other"),
        (["--backend", "threads"], "'threads' is not one of 'pool', 'ray'"),
    ],
)
def test_a_backend_that_cannot_be_is_refused(words: list[str], said: str, command: Command) -> None:
    code, _, err = command("run", *words, "--clients", "2")
    assert code == 2 and said in " ".join(err.split())


# Workers of a pool have one copy of a network's frozen tensors: the bits, the memory, and what is not allowed to change

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
def own_network(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "frozen_net.py").write_text(MODEL)
    plugins.reset(tmp_path)
    yield
    plugins.reset()


def frozen(tmp_path: Path, name: str, model: str, **more: Scalar) -> dict[str, Scalar]:
    own: dict[str, Scalar] = {"method": "fedavg", "train": "head.*", "model": f"frozen_net:{model}", "batch_size": 4}
    return raw_config(tmp_path, name, **own, **more)


@contextlib.contextmanager
def pool_with(raw: dict[str, Scalar]) -> Iterator[Pool]:
    with contextlib.ExitStack() as opened:
        network = opened.enter_context(shared_network(parse(raw, METHOD_PARAMS)))
        setup, files = worker.Setup.of(raw, CLIENTS, network), [network.file] if network else []
        yield opened.enter_context(Pool(2, worker.COMMAND, setup.to_json(), files=files))


@pytest.mark.parametrize(
    ("model", "builders"),
    [("build", 1), ("unpicklable", 3), pytest.param("not_restorable", 1, marks=pytest.mark.nightly)],
)
def test_a_pool_has_the_bits_of_one_process_and_builds_a_network_once(
    own_network: None, tmp_path: Path, model: str, builders: int
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
def test_no_worker_has_frozen_tensors_of_its_own(own_network: None, tmp_path: Path) -> None:
    raw = frozen(tmp_path, "run", "large")
    with pool_with(raw) as pool:
        run_in(pool, raw)
        # all else that a worker has for itself takes a third of that at most
        assert len(pool.idle) == 2 and max(private(one.pid) for one in pool.idle) < LARGE / 3


def test_a_write_into_a_shared_tensor_is_an_error_by_its_name(own_network: None, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_received_is_what_was_left(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(handed_on, "_RECEIVED", [])
    settings = config(method="fedavg", model="tests.experiments.test_pool:tied", train="head.*", frozen_dtype=dtype)
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
        assert state["a.weight"].nbytes == state["a.weight"].numel() * (4 if dtype == "float32" else 2)
        assert (module.frozen_names, module.frozen_sha256) == (first.frozen_names, first.frozen_sha256)
    with torch.no_grad():
        received.get_buffer("a.bias").add_(1)
    assert torch.equal(another.get_buffer("a.bias"), expected["a.bias"])
