"""A submitter who tries a site's doors, on one live cluster: TLS, node keys, a SuperLink with a database, sites with rules.

Runs are submitted at Flower's control port, past the checks of `corolla run`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from corolla.experiments.launch import COMPLETED, flwr_run
from deploy import audit
from fl_app.keys import Scalar
from fl_app.processes import end_processes, flower_environment
from fl_app.run_secret import experiment_of
from fl_app.server.run_folder import secret_of
from fl_app.transport.app_bundle import application_hash
from tests.e2e.conftest import Lab, with_test_models

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

BASE: dict[str, Scalar] = {
    "method": "fedavg",
    "num-server-rounds": 1,
    "local-epochs": 1,
    "train-samples": 100,
    "test-samples": 20,
    "num-clients": 2,
    "available-timeout": 60.0,
}
# of a server that the attacker has changed: it has this model, and a run's secret is what the file says
SERVER = """
import os, sys
from pathlib import Path

if any("serverapp" in word for word in sys.orig_argv):
    from fl_app import plugins
    from fl_app.privacy import secure_random

    load = plugins.load

    def forged(key, reference):
        from torch import nn

        if reference != "unittest.__main__:main":
            return load(key, reference)
        return lambda in_channels, num_classes, image_size: nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

    plugins.load = forged
    if (text := Path(os.environ["ATTACKERS"])).exists():
        secure_random.secret = lambda *_: bytes.fromhex(text.read_text())
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    directory = tmp_path_factory.mktemp("attacked")
    for name in ("server", "database"):
        (directory / name).mkdir()
    (directory / "server" / "sitecustomize.py").write_text(SERVER)
    environment = flower_environment(directory / "flwr") | {
        "COROLLA_STATE_HOME": str(directory / "state"),
        "COROLLA_STATE_DIR": str(directory / "client-state"),
        "COROLLA_SITE_DIR": str(directory / "notes"),
        "LAB": str(directory),
    }
    lab = Lab(directory, environment | with_test_models(environment))
    data, images = directory / "data", np.random.default_rng(0)
    data.mkdir()
    parts = {}
    for part, count in (("train", 300), ("val", 20), ("test", 60)):
        parts[f"{part}_images"] = images.integers(255, size=(count, 28, 28), dtype=np.uint8)
        parts[f"{part}_labels"] = images.integers(11, size=(count, 1), dtype=np.uint8)
    np.savez(data / "organamnist.npz", **parts)
    kinds = {"x_train": "train_images", "y_train": "train_labels", "x_test": "test_images", "y_test": "test_labels"}
    arrays = {name: parts[other] for name, other in kinds.items()}
    np.savez(data / "own.npz", **{name: a.reshape(-1) if name[0] == "y" else a for name, a in arrays.items()})
    site = directory / "site.toml"
    site.write_text(
        f'applications = ["{application_hash({})}"]\nmin-samples = 90\nreadable-paths = ["{data}"]\ntell = "details"\n'
    )
    lab.write(
        superlink={
            "database": str(directory / "database" / "flower.db"),
            "environment": {
                "PYTHONPATH": str(directory / "server"),
                "ATTACKERS": str(directory / "secret"),
            },
        },
        tls=True,
        hosts=[{"host": "local", "supernodes": 2, "gpus": [], "warm": True, "site": str(site)}],
    )
    try:
        assert lab.cluster("keys").returncode == 0
        up = lab.cluster("up", "--timeout", "300")
        assert up.returncode == 0, up.stdout + up.stderr
        yield lab
    finally:
        lab.cluster("down")
        left = lab.started()
        end_processes(left)
    assert left == []


def submit(lab: Lab, name: str, **config: Scalar) -> tuple[str, str]:
    """Run this configuration. Return its status and its log."""
    lines: list[str] = []
    keys = {key.replace("_", "-"): value for key, value in config.items()}
    whole = BASE | {"run-name": name, "output-dir": str(lab.directory)} | keys
    status = flwr_run("lab", whole, lab.environment, lines.append)
    return status, "\n".join(lines)


def refusals(lab: Lab, name: str, said: str = "cannot take part", **config: Scalar) -> list[str]:
    """Run a configuration that every site must refuse. Return what the server is told, client by client."""
    status, log = submit(lab, name, available_timeout=20.0, round_retries=0, **config)
    assert status != COMPLETED, log
    found = re.findall(rf"client \d {said}: (.*)", log)
    assert len(found) >= 2, log
    return found


def files(directory: Path) -> dict[str, str]:
    found = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def test_a_file_that_is_there_is_answered_as_one_that_is_not(lab: Lab) -> None:
    answers = set()
    for k, path in enumerate(("/etc/shadow", "/no/such/file")):
        answers |= set(refusals(lab, f"file-{k}", plugins=f"{path}:{'0' * 16}"))
    assert len(answers) == 1, answers


def test_a_listed_application_imports_no_other_module_of_the_site(lab: Lab) -> None:
    nodes = [psutil.Process(lab.process(f"supernode-{k}")["pid"]) for k in (0, 1)]
    answers = set(refusals(lab, "module", said="dropped", model="unittest.__main__:main"))
    assert all("not the application's" in text for text in answers), answers
    assert all(node.is_running() for node in nodes)


def test_another_run_has_nothing_of_a_runs_state(lab: Lab) -> None:
    status, log = submit(lab, "first", method="fedper", keep_state=True, collect_personal_models=True)
    assert status == COMPLETED, log
    states = lab.directory / "client-state"
    experiment = experiment_of(secret_of(lab.directory / "first", "resume"))
    before = files(states / experiment)
    assert len(before) >= 2
    # what the attacker knows of the run is in each message of it
    (lab.directory / "secret").write_text(experiment)
    try:
        status, log = submit(lab, "second", method="fedper", collect_personal_models=True)
    finally:
        (lab.directory / "secret").unlink()
    assert status == COMPLETED and secret_of(lab.directory / "second", "resume") == experiment, log
    assert files(states / experiment) == before


def test_all_runs_on_a_clients_data_spend_one_budget(lab: Lab) -> None:
    budget: dict[str, Scalar] = {"dp_epsilon": 1.0, "dp_delta": 1e-3, "model": "mlp"}
    data = lab.directory / "data"
    names = ",".join(map(str, range(11)))
    same: list[dict[str, Scalar]] = [
        {"dataset": "medmnist-a", "data_dir": str(data)},
        {"dataset": f"npz:{data}/own.npz", "classes": names},
    ]
    for k, keys in enumerate(same):
        status, log = submit(lab, f"run-{k}", **budget, **keys)
        assert status == COMPLETED, log
    noise: list[float] = []
    for path in (lab.directory / "notes" / "data").glob("*.json"):
        noise += [training[2] for training in json.loads(path.read_text().splitlines()[1])]
    # both nodes have one site directory: the first training spends, all others have what is left, in both runs
    least, *others = sorted(noise)
    assert len(others) >= 2 and min(others) > 10 * least, noise


def test_samples_for_validation_are_no_training_samples(lab: Lab) -> None:
    for text in refusals(lab, "few", validation_ratio=0.5):
        assert "min-samples" in text
    where = lab.directory / "state" / "sites" / "lab" / "supernode-0"
    assert audit.entries(where)[-1]["why"].startswith(
        "min-samples: a client must have 90 training samples, this one has 50"
    )
