"""The names that modules had before they moved into folders still import the same modules."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import pytest

from strategies.kernels import aggregate
from strategies.registry import PAPERS


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        ("strategies.fedavg", "strategies.baselines.fedavg"),
        ("strategies.lg_fedavg", "strategies.baselines.lg_fedavg"),
        ("strategies.aggregate", "strategies.kernels.aggregate"),
        ("strategies.averages", "strategies.kernels.averages"),
        ("fl_app.wire", "fl_app.transport.wire"),
        ("fl_app.server.exchange", "fl_app.transport.exchange"),
        ("fl_app.site", "fl_app.site_directory"),
        ("deploy.processes", "deploy.detached"),
        ("client_app.state", "client_app.stored_state"),
        ("strategies.averages.krum", "strategies.kernels.averages.krum"),
    ],
)
def test_an_earlier_name_is_the_same_module(earlier: str, now: str) -> None:
    sys.modules.pop(earlier, None)
    with pytest.warns(DeprecationWarning, match=now):
        module = importlib.import_module(earlier)
    assert module is importlib.import_module(now)
    assert module.__spec__ is not None and module.__spec__.name == now


def test_other_names_do_not_exist() -> None:
    for name in (
        "strategies.nothing",
        "strategies.averages.nothing",
        "strategies.fedavg.nothing",
        "fl_app.wire.nothing",
    ):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


def test_from_the_package_and_in_a_new_process() -> None:
    line = "from strategies import fedprox, masks; import strategies.robust as r; print(*(m.__name__ for m in (fedprox, masks, r)))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        "strategies.baselines.fedprox",
        "strategies.kernels.masks",
        "strategies.kernels.robust",
    ]
    assert pickle.loads(pickle.dumps(aggregate.weighted_mean)) is aggregate.weighted_mean


def test_an_earlier_name_of_a_command_runs_it() -> None:
    done = subprocess.run([sys.executable, "-P", "-m", "deploy.metrics", "-h"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: deploy.prometheus"), done


def test_the_papers_stay() -> None:
    for name in PAPERS:
        assert importlib.import_module(f"strategies.{name}").__name__ == f"strategies.{name}"
