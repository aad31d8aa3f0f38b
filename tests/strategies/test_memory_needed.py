"""The memory that a run needs: the estimate beside measured runs, the refusal, and what Linux says is left."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corolla import presets
from corolla.experiments import dry_run
from fl_app import machine, server_app
from fl_app.config import RunConfig, parse
from fl_app.errors import MethodError, UserError
from fl_app.layout import Layout, Model
from fl_app.server.run_folder import RunFolder
from strategies import METHOD_PARAMS, METHODS
from strategies.engine.estimates import MemoryEstimate, fitting_limit, memory_estimate
from tests.conftest import Run, config, flat_layout
from tests.facts import mentions, rejected

MODEL = """
from torch import nn

def build(in_channels, num_classes, image_size, width):
    inputs = in_channels * image_size**2
    layers = nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, num_classes)
    return nn.Sequential(nn.Flatten(), *layers)

def of(width):
    return lambda in_channels, num_classes, image_size: build(in_channels, num_classes, image_size, width)

tiny, large = of(8), of(5000)
"""

# runs of two models in a pool of one worker; prints the most resident bytes of the server's process and of the worker
MEASURE = """
import json, sys
from pathlib import Path
import psutil
from client_app import worker
from corolla.experiments.pool import Pool, PoolGrid
from fl_app import plugins, server_app
from fl_app.config import parse
from strategies import METHOD_PARAMS

def most(pid):  # that were resident at once
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

directory, method = Path(sys.argv[1]), sys.argv[2]
plugins.reset(directory)
found = []
for size in ("tiny", "large"):
    raw = {"method": method, "model": f"own_sizes:{size}", "num-clients": 4, "partition": "iid", "train-samples": 20,
           "test-samples": 8, "batch-size": 20, "local-epochs": 1, "num-server-rounds": 2, "device": "cpu", "run-name": size,
           "output-dir": str(directory), "state-dir": str(directory / "state"), "data-dir": sys.argv[3]}
    with Pool(1, worker.COMMAND, worker.Setup.of(raw, 4).to_json()) as pool:
        workers = []
        def progress(what, done, total):
            if not what.startswith("clients") and not workers:
                children = psutil.Process().children(recursive=True)
                workers.extend(child.pid for child in children if not child.children())  # not the one that forks them
                for pid in ["self", *workers]:  # forget the start, when PyTorch is loaded
                    Path(f"/proc/{pid}/clear_refs").write_text("5")
        server_app.run(PoolGrid(pool, 4), parse(raw, METHOD_PARAMS), progress)
        found.append([most("self"), max(map(most, workers))])
print(json.dumps(found))
"""


def half(config: RunConfig, layout: Layout) -> Any:
    """Return a new server half of the config's method."""
    method = METHODS[config.method]
    zeros = Model(np.zeros(layout.d, np.float32), np.zeros(layout.b, np.float32))
    shared = method.travelling(config, layout)
    return method.server(config, layout, zeros, shared, RunFolder(Path(), ""))


def limited(need: MemoryEstimate) -> float:
    """Return the bytes of the stacks and the kept models in memory."""
    return need.under(need.limit)


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="measures by /proc")
@pytest.mark.parametrize("method", ["fedavg"])
def test_the_estimate_is_near_what_runs_take(method: str, tmp_path: Path, data_dir: Path) -> None:
    (tmp_path / "own_sizes.py").write_text(MODEL)
    command = [sys.executable, "-c", MEASURE, str(tmp_path), method, str(data_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tiny, large = json.loads(done.stdout.splitlines()[-1])
    width = 5000
    strategy = half(
        config(method=method, num_clients=4),
        flat_layout([64 * width + width, width * width + width, 10 * width + 10]),
    )
    need = memory_estimate(strategy, strategy.protocol.expected(), 1)
    assert 0.6 < need.server / (large[0] - tiny[0]) < 1.6
    assert 0.6 < need.client / (large[1] - tiny[1]) < 1.6


def test_the_estimate_by_its_formula() -> None:
    layout = flat_layout([1000], [10])
    v = 4 * 1010
    averaging = half(config(method="fedavg", num_clients=10), layout)
    need = memory_estimate(averaging, averaging.protocol.expected(), 3)
    assert (need.server, limited(need), need.client, need.total) == (8 * v, 0, 4 * v, 20 * v)
    with_ray = memory_estimate(averaging, averaging.protocol.expected(), 3, ray=True)
    assert (with_ray.server, with_ray.client) == (17 * v, 15 * v)
    settings: dict[str, Any] = {"method": "fedcac", "num_clients": 10, "fraction_train": 0.5}
    kept = half(config(**settings, momentum=0.5), layout)
    need = memory_estimate(kept, kept.protocol.expected(), 1)
    # a mask of 125 bytes comes with an upload
    assert (limited(need), need.client) == (5 * (v + 125) + 10 * v, 5 * v) and need.server == 4 * v + limited(need)
    # five uploads wait in simulated time
    timed = half(config(**settings, speeds="lognormal:1"), layout)
    assert memory_estimate(timed, timed.protocol.expected(), 1).kept == (*need.kept, 5 * (v + 125))
    mixing = half(config(**settings | {"method": "fedamp"}), layout)
    # cloud models of the round's clients and of the last round's
    assert limited(memory_estimate(mixing, mixing.protocol.expected(), 1)) == 2 * 5 * v + 10 * v + 5 * v
    # FedDWA's guidance comes with each upload, or the server makes it
    for guidance, each in (("trained", v + 4000), ("extrapolated", 2 * v)):
        guided = half(config(**settings | {"method": "feddwa", "feddwa": {"guidance": guidance}}), layout)
        assert limited(memory_estimate(guided, guided.protocol.expected(), 1)) == 5 * each + 10 * v
    adamw = half(config(method="fedavg", optimizer="adamw"), layout)
    assert memory_estimate(adamw, adamw.protocol.expected(), 1).client == 6 * v


def test_a_run_that_cannot_fit_is_refused_with_the_ways_out() -> None:
    # as a run of 100 million parameters, whose values need not exist for it
    layout = flat_layout([1_000_000])
    strategy = half(config(method="fedavg", num_clients=8), layout)
    need = memory_estimate(strategy, strategy.protocol.expected(), 4)
    assert fitting_limit(strategy, need, need.total, False) == 2
    with pytest.raises(UserError) as refused:
        fitting_limit(strategy, need, 70e6, False)
    assert mentions(
        str(refused.value),
        "it has 1,000,000 parameters",
        "4 clients train",
        "run needs about 96",
        "32",
        "16",
        "these clients",
        "70 MB are available",
        "ways out",
        "a larger --cpus-per-client",
        "most 2 clients train",
        "--in-process",
    )
    unlimited = half(config(method="fedcac", num_clients=40, server_memory_limit=0), layout)
    need = memory_estimate(unlimited, unlimited.protocol.expected(), 1)
    with rejected(MethodError, "model", "a server-memory-limit", "clients' models go", "disk", "a smaller model"):
        fitting_limit(unlimited, need, 50e6, True)


def test_a_limit_is_lowered_before_a_run_is_refused() -> None:
    strategy = half(config(method="fedcac", num_clients=40), flat_layout([1_000_000]))
    need = memory_estimate(strategy, strategy.protocol.expected(), 2)
    # without what the limit bounds: 4 vectors on the server, 4 for each client
    fixed = 12 * 4e6
    assert need.total - limited(need) == fixed
    assert fitting_limit(strategy, need, fixed + 100e6, False) == pytest.approx(0.05)
    # a small stack stays in memory for any limit: 12 uploads of 4.1 MB and 30 MB of kept models
    few = half(config(method="fedcac", num_clients=12), flat_layout([1_000_000]))
    need = memory_estimate(few, few.protocol.expected(), 2)
    assert sum(need.stacks) == 12 * 4.125e6
    assert fitting_limit(few, need, fixed + sum(need.stacks) + 30e6, False) == pytest.approx(0.03)
    with pytest.raises(UserError, match="needs about 146 MB"):
        fitting_limit(few, need, fixed + sum(need.stacks), False)


def test_a_run_is_refused_before_its_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_app, "available_memory", lambda: 1000.0)
    with rejected(MethodError, "model", "it has", "parameters", "and 1 client train"):
        run(method="fedavg", run_name="refused")
    assert not list(tmp_path.rglob("refused"))


@pytest.mark.nightly
def test_no_preset_is_refused_on_a_machine_of_4_gb() -> None:
    largest: dict[tuple[str, ...], RunConfig] = {}
    for name in presets.all_presets():
        settings = parse(presets.read_preset(name), METHOD_PARAMS)
        kind = settings.model, settings.norm, settings.method, str(dry_run.known_shape(settings))
        if kind not in largest or settings.num_clients > largest[kind].num_clients:
            largest[kind] = settings
    assert len(largest) > 10
    layouts: dict[tuple[str, ...], Layout] = {}
    for (model, norm, _, shown), settings in largest.items():
        shape = dry_run.known_shape(settings)
        assert shape is not None
        if (model, norm, shown) not in layouts:
            layouts[model, norm, shown] = Layout.of(METHODS["fedavg"].network(settings, **shape))
        strategy = half(settings, layouts[model, norm, shown])
        # 1 GB for the system and the programs; as many clients as such a machine has cores
        fitting_limit(strategy, memory_estimate(strategy, strategy.protocol.expected(), 4), 3e9, False)


def test_the_memory_that_linux_says_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text(
        "MemTotal: 9000 kB\nMemAvailable:  5000 kB\nSwapFree: 1000 kB\nHugePages_Total: 0\n"
    )
    (tmp_path / "groups").write_text("4:memory:/one\n0::/a/b\n2:cpu:/x\n")
    monkeypatch.setattr(machine, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(machine, "_GROUPS_ROOT", tmp_path / "fs")
    assert machine.available_memory() == 6000 * 1024

    def group(name: str, **files: str) -> None:
        directory = tmp_path / "fs" / name
        directory.mkdir(parents=True)
        for file, text in files.items():
            (directory / f"memory.{file}").write_text(text + "\n")

    # version 2: no limit of its own, one of the group above; dropped pages of files are no use
    group("a/b", max="max", current="700", stat="anon 1\ninactive_file 3")
    assert machine.available_memory() == 6000 * 1024
    for file, text in {"max": "5000", "current": "3000", "stat": "anon 9\nactive_file 300\ninactive_file 200"}.items():
        (tmp_path / "fs" / "a" / f"memory.{file}").write_text(text)
    assert machine.available_memory() == 2500
    # version 1
    group("memory/one", limit_in_bytes="4000", usage_in_bytes="3000", stat="inactive_file 1\ntotal_inactive_file 40")
    assert machine.available_memory() == 1040
    monkeypatch.setattr(machine, "_MEMORY", tmp_path / "none")
    assert machine.available_memory() == math.inf
