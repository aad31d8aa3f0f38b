"""The same config gives the same bits in simulation with one and two workers, with Ray, in process, and over gRPC."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import PLUGINS
from tests.e2e.conftest import Cluster, corolla, rounds, settings, summary
from tests.privacy.keys import make

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

CLIENTS = 4
CASES = {
    "fedavg": {"method": "fedavg", "model": "mlp"},
    # the rate drops in round 2, and the kept round is not the last one
    "plateau-keep-best": {
        "method": "fedper",
        "schedule": "plateau:1",
        "learning-rate": 2.0,
        "learning-rate-decay": 0.5,
        "keep-best": True,
        "validation-ratio": 0.25,
        "evaluate-every": 1,
        "num-server-rounds": 4,
        "local-epochs": 1,
    },
    "fedcac-batchnorm": {"method": "fedcac", "model": "resnet8", "fedcac.beta": 2, "local-epochs": 1},
    "fedcac-private": {"method": "fedcac", "private": True, "local-epochs": 1, "num-server-rounds": 3},
    # by the last round, clients have chosen layers of both models
    "partialfed": {
        "method": "partialfed",
        "model": "resnet8",
        "partition": "pathological",
        "partialfed.choice-learning-rate": 30.0,
        "local-epochs": 1,
        "num-server-rounds": 3,
    },
    "own-method": {"method": "prototypes:METHOD", "prototypes.weight": 0.2, "local-epochs": 1},
}


def accuracies(folder: Path) -> list[object]:
    names = ("accuracy-before", "accuracy-after", "loss")
    return [[row[name] for name in names] for r in rounds(folder) for row in (r, *r["clients"].values())]


WHEN = {
    "fedcac-private": pytest.mark.long,
    "fedavg": pytest.mark.nightly,
    "plateau-keep-best": pytest.mark.nightly,
    "partialfed": pytest.mark.nightly,
    "own-method": pytest.mark.nightly,
}
MARKED = [pytest.param(name, marks=WHEN.get(name, ())) for name in CASES]


@pytest.mark.parametrize("case", MARKED)
def test_simulation_deployment_and_one_process_agree(cluster: Cluster, tmp_path: Path, case: str) -> None:
    # a warm node starts a message's process in a fraction of the time
    cluster.warm = "" if case == "own-method" else "shared"
    cluster.start_superlink()
    for client_id, key in enumerate(make(tmp_path / "keys", CLIENTS)):
        cluster.start_supernode(client_id, CLIENTS, private_keys=str(key))
    common = {"num-server-rounds": 2, "train-samples": 60, "state-dir": str(tmp_path / "state")}
    modes = {
        "deployment": ["--clients", str(CLIENTS), "--superlink", "test"],
        "two-workers": ["--clients", str(CLIENTS), "--backend", "pool"],
        "one-worker": ["--clients", str(CLIENTS), "--backend", "pool", "--cpus-per-client", "2"],
        "ray": ["--clients", str(CLIENTS), "--backend", "ray"],
        "in-process": ["--clients", str(CLIENTS), "--in-process"],
    }

    def bits(mode: str) -> tuple[object, list[object]]:
        name = f"{case}-{mode}"
        done = corolla(
            "run",
            *modes[mode],
            "--output-dir",
            str(tmp_path),
            *settings({**common, **CASES[case], "run-name": name}),
            environment=cluster.environment,
            directory=PLUGINS,
        )
        assert done.returncode == 0, f"{name}\n{done.stdout}\n{done.stderr}"
        return summary(tmp_path / name)["digest"], accuracies(tmp_path / name)

    # a deployment waits more than it computes
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(modes, pool.map(bits, modes), strict=True))
    assert found["two-workers"][0] is not None
    # all nodes share one warm process
    assert len([*cluster.home.parent.glob("nodes/warm/*.secret")]) == (cluster.warm == "shared")
    for mode in modes:
        assert found[mode] == found["two-workers"], f"{case}: {mode} differs"
