"""Every method through Flower's simulation, on one SuperLink, and those from outside deployed: the digests are one process's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from client_app.client_app import app as client_app
from corolla.experiments.launch import COMPLETED, simulation
from fl_app import plugins, server_app
from fl_app.config import parse
from fl_app.keys import Scalar, table_of
from fl_app.transport.inprocess import InProcessGrid
from strategies import METHOD_PARAMS, METHODS
from tests.conftest import IN_TWO_ROUNDS, OWN_METHODS, PLUGINS
from tests.e2e.conftest import Cluster, corolla, settings, summary

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

# each has its own in messages: masks, a generator, several models, others' models, a model that grows
OWN_MESSAGES = ("fedcac", "fedgen", "fedem", "fedfomo", "fedconcat")
THE_OTHERS = tuple(name for name in (*METHODS, *OWN_METHODS) if name not in OWN_MESSAGES)

SMALL = {
    "num-server-rounds": 2,
    "num-clients": 4,
    "fraction-train": 0.5,
    "train-samples": 24,
    "test-samples": 12,
    "local-epochs": 1,
    "learning-rate": 0.05,
    "model": "resnet8",
    "device": "cpu",
}


@pytest.mark.usefixtures("own_methods")
@pytest.mark.parametrize(
    "methods",
    [
        pytest.param(OWN_MESSAGES, id="own-messages", marks=pytest.mark.nightly),
        pytest.param(THE_OTHERS, id="the-others", marks=pytest.mark.nightly),
    ],
)
def test_simulation_equals_one_process(tmp_path: Path, methods: tuple[str, ...]) -> None:
    common = {**SMALL, "state-dir": str(tmp_path / "state")}
    with simulation(4, 1, 0) as submit:
        for method in methods:
            name = table_of(method)
            config = {**common, **IN_TWO_ROUNDS.get(method, {}), "method": method, "output-dir": str(tmp_path)}
            config["run-name"] = f"{name}-simulation"
            config["plugins"] = plugins.fingerprint(plugins.files(config))
            lines: list[str] = []
            assert submit(config, lines.append) == COMPLETED, "\n".join(lines)
            digest = summary(tmp_path / f"{name}-simulation")["digest"]
            assert digest == in_one_process(config, tmp_path) is not None, method


@pytest.mark.usefixtures("own_methods")
@pytest.mark.nightly
def test_own_methods_are_sent_to_the_nodes(warm_cluster: Cluster, tmp_path: Path) -> None:
    cluster = warm_cluster
    # as in many containers
    cluster.environment["PYTHONDONTWRITEBYTECODE"] = "1"
    cluster.start(2)
    small = SMALL | {"num-clients": 2, "fraction-train": 1.0, "output-dir": str(tmp_path)}
    for method in OWN_METHODS:
        config = {**small, "method": method, "run-name": f"{table_of(method)}-deployed"}
        done = corolla(
            "run", "--superlink", "test", *settings(config), environment=cluster.environment, directory=PLUGINS
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert summary(tmp_path / config["run-name"])["digest"] == in_one_process(config, tmp_path) is not None, method
    # what a process per message has compiled is kept for the next
    assert list(cluster.home.glob("*/*/apps/**/*.pyc"))


def in_one_process(config: Mapping[str, Scalar], directory: Path) -> str | None:
    """The digest of the same run in this process."""
    raw = {**config, "plugins": plugins.fingerprint(plugins.files(config)), "state-dir": str(directory / "one-process")}
    raw["run-name"] = f"{table_of(str(raw['method']))}-one-process"
    server_app.run(InProcessGrid(client_app, raw, int(raw["num-clients"])), parse(raw, METHOD_PARAMS), lambda *_: None)
    digest: str | None = summary(directory / raw["run-name"])["digest"]
    return digest
