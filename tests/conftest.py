"""Fixtures shared by all tests, and the builders the mathematical tests use."""

from __future__ import annotations

import functools
import gc
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.clientapp import ClientApp
from hypothesis import settings

from client_app.client_app import app as client_app
from client_app.session import prepare_training
from corolla import cli
from fl_app import plugins, server_app
from fl_app.config import RunConfig, parse
from fl_app.keys import Scalar
from fl_app.layout import Layout, Slot
from fl_app.server.run_folder import RunFolder
from fl_app.site_directory import VARIABLE as SITE_DIR
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS
from tests.lines import FileLines

# the same examples everywhere
settings.register_profile("corolla", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("corolla")

SMALL: dict[str, Scalar] = {
    "method": "fedavg",
    "num-server-rounds": 2,
    "num-clients": 3,
    "dataset": "digits",
    "partition": "dirichlet-client",
    "train-samples": 24,
    "test-samples": 10,
    "model": "mlp",
    "local-epochs": 1,
    "batch-size": 8,
    "device": "cpu",
    "run-name": "run",
}

IN_TWO_ROUNDS: dict[str, dict[str, Scalar]] = {
    "fedconcat": {"fedconcat.encoder-rounds": 1},
    "apple": {"apple.models": 1},
    "favor": {"favor.all-first": False},
    "heterofl": {"heterofl.rates": "0.5"},
}
"""What methods of several phases need set to reach their last in a run of two rounds, and others to send all clients as much."""

LONGEST = ("test_same_bits", "test_report_browser", "test_interrupt")
"""The files of tests/e2e that should not be the last one at work."""

built_command = functools.cache(cli.build_command)

# means, masks, parts at home, second models, clusters, prototypes, corrections, models of several sizes
KINDS = "fedavg local fedcac fedper ditto ifca fedproto scaffold heterofl fedconcat apple".split()


def of_each_kind(*without: str) -> list[Any]:
    """Return all methods but these, for a parametrization: one of each kind is tried daily, the others by night."""
    names = [name for name in METHOD_PARAMS if name not in without]
    return [name if name in KINDS else pytest.param(name, marks=pytest.mark.nightly) for name in names]


Run = Callable[..., RunFolder]
Made = Callable[..., RunFolder]
Command = Callable[..., tuple[int, str, str]]


def pytest_configure(config: pytest.Config) -> None:
    """Let the main process tell the tests' files, one a line, unless somebody asked for more or for nothing.

    And let Ctrl-C be heard, here and in what is started from here, where a shell ignores it for its background jobs.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.get_verbosity() == -1 and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FileLines(config), "file-lines")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let no collection of garbage look through what the tests' files import, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts Flower's processes comes last, and of that first the files that take minutes."""
    order = {name: place for place, name in enumerate(LONGEST, -len(LONGEST))}
    items.sort(key=lambda item: (item.get_closest_marker("e2e") is not None, order.get(item.path.stem, 0)))


def wait_for(condition: Callable[[], Any], seconds: float = 600, every: float = 0.02) -> Any:
    """Return the condition's first true value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(every)
    raise AssertionError(f"nothing within {seconds} s")


# methods as a user brings them
PLUGINS = Path(__file__).parent / "plugins"
OWN_METHODS = tuple(f"{path.stem}:METHOD" for path in sorted(PLUGINS.glob("*.py")))


@pytest.fixture
def own_methods() -> Iterator[None]:
    """Let the methods of tests/plugins be found, as beside a config file there."""
    plugins.reset(PLUGINS)
    yield
    plugins.reset()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Train with one thread, as clients do unless they are told otherwise: bits depend on the number."""
    prepare_training(threads=1)


@pytest.fixture(autouse=True, scope="session")
def unhurried_disk() -> Iterator[None]:
    """Wait for no disk in this process: no test cuts its power, and a small run would spend half of its time on that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def site_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what a site notes for good out of the user's directory, of what outlasts a test too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SITE_DIR, str(tmp_path_factory.mktemp("site")))
        yield


@pytest.fixture(autouse=True)
def site_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The site's own directory in a test."""
    monkeypatch.setenv(SITE_DIR, str(tmp_path / "site"))
    return tmp_path / "site"


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Leave logging as it was: a run sets it up for its process."""
    log = logging.getLogger("corolla")
    before, level, silenced = (log.disabled, log.propagate, log.handlers[:]), log.level, logging.root.manager.disable
    yield
    log.disabled, log.propagate, log.handlers[:] = before
    log.setLevel(level)
    logging.disable(silenced)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command in this process: its exit code, its output, and its errors on one line."""
    # Typer would build all commands anew at every call
    monkeypatch.setattr(cli, "build_command", built_command)

    def invoke(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["corolla", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, " ".join(err.split())

    return invoke


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory of prepared data sets for the whole session."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def raw_config(tmp_path: Path, data_dir: Path) -> dict[str, Scalar]:
    """A small run's flat configuration, all of whose files are under tmp_path."""
    own = {"output-dir": str(tmp_path / "runs"), "state-dir": str(tmp_path / "state"), "data-dir": str(data_dir)}
    return SMALL | own


@pytest.fixture
def run(raw_config: dict[str, Scalar]) -> Run:
    """Run a small experiment in this process: the real ServerApp and ClientApp, joined directly.

    Keys use underscores, a method's parameters come as a mapping: run(method="fedcac", fedcac={"tau": 0.3}).
    """

    return run_with(raw_config)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Made:
    """Make a small run in the session's first test that wants it, as `run` does, and copy its finished folder to a place."""
    made: dict[str, RunFolder] = {}

    def copy(to: Path, **changes: Any) -> RunFolder:
        name = repr(changes)
        if name not in made:
            place = tmp_path_factory.mktemp("made")
            own = {"output-dir": str(place / "runs"), "state-dir": str(place / "state"), "data-dir": str(data_dir)}
            made[name] = run_with(SMALL | own)(**changes)
        shutil.copytree(made[name].path, to)
        return RunFolder(to, made[name].secret)

    return copy


def run_with(raw_config: Mapping[str, Scalar]) -> Run:
    """Return the fixture `run` of a configuration."""

    def start(
        app: ClientApp = client_app, node_configs: Mapping[int, Mapping[str, Scalar]] | None = None, **changes: Any
    ) -> RunFolder:
        raw = {**raw_config, **flat(changes)}
        config = parse(raw, METHOD_PARAMS)
        grid = InProcessGrid(app, raw, config.num_clients, node_configs)
        return server_app.run(grid, config, lambda what, done, total: None)

    return start


def flat(changes: Mapping[str, Any]) -> dict[str, Scalar]:
    """Turn {"num_clients": 3, "fedcac": {"tau": 0.3}} into {"num-clients": 3, "fedcac.tau": 0.3}."""
    out: dict[str, Scalar] = {}
    for name, value in changes.items():
        name = name.replace("_", "-")
        out |= {f"{name}.{k}": v for k, v in flat(value).items()} if isinstance(value, Mapping) else {name: value}
    return out


def config(**changes: Any) -> RunConfig:
    """Parse a small run's configuration with changes."""
    return parse(SMALL | flat(changes), METHOD_PARAMS)


def flat_layout(params: Sequence[int], buffers: Sequence[int] = ()) -> Layout:
    """Layout of one-dimensional tensors w0, w1, ... and b0, b1, ... of the given sizes."""

    def slots(letter: str, sizes: Sequence[int]) -> tuple[Slot, ...]:
        ends = [0, *np.cumsum(sizes, dtype=int).tolist()]
        return tuple(Slot(f"{letter}{i}", (n,), ends[i], ends[i + 1]) for i, n in enumerate(sizes))

    return Layout(slots("w", params), slots("b", buffers))


def bools(text: str) -> np.ndarray:
    """Read a mask as bits, "1100 0000"."""
    return np.array([c == "1" for c in text.replace(" ", "")])


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)
