"""One month's models and the next month's start, at real sites that keep their own data, names, states and models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fl_app import model_card
from tests.e2e.conftest import MODELS, Cluster, corolla, rounds, settings, summary
from tests.experiments.months import cancer

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

NAMES = ("celle", "uelzen", "verden")
SETTING: dict[str, Any] = {
    "method": "fedem",
    "dataset": "node",
    "target": "kind",
    "classes": "malignant,benign",
    "num-server-rounds": 2,
    "local-epochs": 1,
    "keep-state": True,
    "available-timeout": 300.0,
}


def start(cluster: Cluster, tmp_path: Path, client_id: int, name: str) -> None:
    """Start a site with data, notes and states of its own."""
    data = cancer(tmp_path / f"{name}.csv", slice(client_id, None, 4))
    rules = f'site-dir = "{tmp_path}/notes-{client_id}"\n'
    cluster.start_site(client_id, 3, rules, data_path=str(data), name=name)


def run(cluster: Cluster, *words: str, **values: Any) -> str:
    """Run with the cluster's sites, and return what was printed. Raises AssertionError with it if the run fails."""
    done = corolla("run", "--superlink", "test", *words, *settings(values), environment=cluster.environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def named(folder: Path) -> dict[str, str]:
    """Return the clients' ids by name."""
    return {facts["name"]: i for i, facts in json.loads((folder / "clients.json").read_text()).items()}


@pytest.mark.usefixtures("warm_cluster")
@pytest.mark.nightly
def test_the_next_month_starts_from_this_months_models(cluster: Cluster, tmp_path: Path) -> None:
    del cluster.environment["COROLLA_SITE_DIR"]
    cluster.start_superlink()
    for client_id, name in enumerate(NAMES):
        start(cluster, tmp_path, client_id, name)
    cluster.wait_for_nodes()
    june, july = tmp_path / "june", tmp_path / "july"
    setting = SETTING | {"output-dir": str(tmp_path), "state-dir": str(tmp_path / "state")}
    run(cluster, "--clients", "3", **setting, **{"run-name": "june"})
    assert named(june) == {name: str(k) for k, name in enumerate(NAMES)}

    # FedEM's weights stay at the sites until somebody asks for them
    assert corolla("export", str(june), "--client", "celle", "--to", str(tmp_path / "none")).returncode != 0
    run(cluster, "--resume", str(june), **{"collect-personal-models": True})
    done = corolla("export", str(june), "--client", "celle", "--to", str(tmp_path / "server"))
    assert done.returncode == 0, done.stdout + done.stderr
    site = cluster.environment | {"COROLLA_SITE": str(tmp_path / "site-0.toml")}
    done = corolla("node", "export", "june", "--to", str(tmp_path / "plant"), environment=site)
    assert done.returncode == 0, done.stdout + done.stderr
    held, own = (model_card.read(tmp_path / place / "celle.pt") for place in ("server", "plant"))
    row = rounds(june)[-1]["evaluation"]["clients"]["0"]
    for card in (held, own):
        assert (card["client"], card["parameters-sha256"]) == ("celle", row["sha256"])  # type: ignore[typeddict-item]

    # the server's trail and the sites' audits tell the same
    audits = [str(tmp_path / "nodes" / "sites" / f"site-{k}") for k in range(3)]
    done = corolla("audit", "join", str(june), *audits, "--json")
    joined = json.loads(done.stdout)
    assert (done.returncode, joined["differences"]) == (0, []), done.stdout
    first, count = joined["clients"][0], json.loads((june / "clients.json").read_text())["0"]["train-samples"]
    assert (first["name"], first["train-samples"]) == ("celle", count) and len(first["runs"]) == 2
    assert {(row["round"], row["message"]) for row in joined["messages"]} >= {
        (1, "train"),
        (2, "train"),
        (2, "evaluate"),
    }

    # a fourth site is new
    start(cluster, tmp_path, 3, "winsen")
    cluster.wait_for_nodes()
    again = {"run-name": "july", "num-server-rounds": 1, "normalize-over": "initial"}
    run(cluster, "--clients", "4", "--from", str(june), **again)
    ids, about = named(july), json.loads((july / "run.json").read_text())
    assert about["from"] == {
        "run": str(june),
        "digest": summary(june)["digest"],
        "clients": {ids[name]: k for k, name in enumerate(NAMES)},
    }
    ended, began = rounds(june)[-1]["evaluation"]["clients"], rounds(july)[0]["clients"]
    for k, name in enumerate(NAMES):
        assert began[ids[name]]["loss-before"] == pytest.approx(ended[str(k)]["loss"], rel=1e-4)
    refused = corolla(
        "run",
        *("--superlink", "test", "--clients", "4", "--from", str(june)),
        *settings({"run-name": "august", "method": "fedavg", "model": "gated:mlp", "exclude": "mean area"}),
        environment=cluster.environment,
        directory=MODELS,
    )
    told = refused.stdout + refused.stderr
    assert refused.returncode != 0
    for words in (
        "method: 'fedem' there, 'fedavg' here",
        "model: 'mlp' there, 'gated:mlp' here",
        "features: mean area only there",
    ):
        assert words in told, told
