"""Six plants and their months: data that drift, plants that join and leave, keys, a new class, a restored backup.

Every month each plant's model predicts the plant's own raw rows with the figure that the run recorded, and the audits agree.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import pytest

from corolla.experiments.exported import loading, predict
from fl_app import model_card
from fl_app.server import trail
from strategies import METHODS
from tests.e2e.conftest import rounds, summary, wait_for
from tests.e2e.plants import Plants, plants_in
from tests.experiments.months import month_of

NAMES = ("celle", "verden", "uelzen", "winsen", "soltau", "munster")
KINDS = ("malignant", "benign", "unclear")
LAB = """
tls: true
superlink: {fleet-address: 127.0.0.1, fleet-port: 9092, control-port: 8000, database: /var/lib/corolla/lab.db}
hosts:
  - {host: joins, supernodes: 5}
"""
MONTH = f"""
method = "fedper"
dataset = "node"
target = "kind"
classes = "{",".join(KINDS)}"
exclude = "day"
test-after = "day:20"
num-server-rounds = 2
local-epochs = 2
learning-rate = 0.05
keep-state = true
collect-personal-models = true
available-timeout = 300.0
"""
# what happens before a month's run
TWO: Mapping[int, Sequence[str]] = {2: ("joins", "rotates", "class")}
TWELVE: Mapping[int, Sequence[str]] = {
    3: ("joins",),
    5: ("leaves",),
    6: ("rotates",),
    7: ("class",),
    8: ("revoked",),
    9: ("restored",),
}


class Federation:
    """The plants through the months: who takes part, and what each has."""

    def __init__(self, plants: Plants) -> None:
        self.plants, self.there, self.gone = plants, list(NAMES[:5]), list[str]()
        self.kinds: Sequence[str] = KINDS[:2]
        plants.write("server", "lab.yaml", LAB)
        plants.write("server", "month.toml", MONTH)
        plants.run("server", "corolla cluster keys lab.yaml && corolla cluster up lab.yaml")

    def admit(self, name: str) -> None:
        """Admit a plant, and start its node."""
        client = NAMES.index(name)
        self.plants.run(name, f"corolla node join {name} && cp {self.site(name)}/node.pub ~/share/{name}.pub")
        self.plants.run("server", f"corolla cluster admit lab.yaml {client} ~/share/{name}.pub")
        self.plants.run("server", f"cp lab-keys/supernode-{client}.toml ~/share/{name}.toml")
        self.node(name)

    def node(self, name: str) -> None:
        command = f"corolla node start {name} --warm --invitation ~/share/{name}.toml --data-path ~/rows.csv"
        self.plants.start(name, command)

    def site(self, name: str) -> Path:
        return self.plants.home(name) / ".local" / "state" / "corolla" / "sites" / name

    # Events

    def joins(self) -> None:
        self.plants.run("server", 'echo "  - {host: joins}" >> lab.yaml')
        self.there.append("munster")
        self.rows("munster", 0)
        self.admit("munster")

    def leaves(self) -> None:
        self.plants.stop("soltau")
        self._without("soltau")

    def rotates(self) -> None:
        name, client = "celle", 0
        old = self.plants.run("server", "cat lab-keys/supernode-0.pub")
        self.plants.run(name, f"corolla node rotate {name} && cp {self.site(name)}/node.pub ~/share/{name}.pub")
        self.plants.run("server", f"corolla cluster rotate lab.yaml {client} ~/share/{name}.pub")
        assert self.plants.run("server", "cat lab-keys/supernode-0.pub") != old
        self.node(name)

    def revoked(self) -> None:
        self.plants.run("server", "corolla cluster revoke lab.yaml 2")
        self._without("uelzen")

    def restored(self) -> None:
        """The server's machine is lost. The plants' nodes find the new one."""
        self.plants.run("server", "corolla cluster backup lab.yaml ../lab.tar --runs runs")
        self.plants.run("server", "corolla cluster down lab.yaml")
        shutil.rmtree(self.plants.home("server"))
        self.plants.run("server", "corolla cluster restore ../lab.tar && corolla cluster up lab.yaml")
        for name in self.there:
            self.node(name)

    def _without(self, name: str) -> None:
        self.there.remove(name)
        self.gone.append(name)

    # A month

    def rows(self, name: str, month: int) -> None:
        month_of(self.plants.home(name) / "rows.csv", NAMES.index(name), len(NAMES), month, self.kinds)

    def month(self, month: int, events: Sequence[str]) -> Path:
        """Let a month's events happen, then run it. Return the run's folder."""
        if "class" in events:
            self.kinds = KINDS
        for event in events:
            if event != "class":
                getattr(self, event)()
        for name in self.there:
            self.rows(name, month)
        wait_for(lambda: self._connected(), 120, every=1)
        start = "month.toml" if month == 1 else f"--from runs/month-{month - 1}"
        clients = 5 + ("munster" in self.there)
        left = "".join(f" --without {name}" for name in self.gone)
        self.plants.run(
            "server", f"corolla run {start} --superlink lab --clients {clients}{left} --set run-name=month-{month}"
        )
        return self.plants.home("server") / "runs" / f"month-{month}"

    def _connected(self) -> bool:
        listed = json.loads(self.plants.run("server", "corolla cluster status lab.yaml --json || true") or "[]")
        online = {row["name"] for row in listed if row["superlink-says"] == "online"}
        return set(self.there) <= online

    def check(self, run: Path) -> None:
        """Check the month: each plant's model, and who did what."""
        names = {facts["name"]: i for i, facts in json.loads((run / "clients.json").read_text()).items()}
        last = rounds(run)[-1]["evaluation"]
        assert set(self.there) <= set(names) and last["absent"] == [] and summary(run)["digest"]
        assert set(last["clients"]) == {names[name] for name in self.there}
        models = self.plants.directory / "share" / run.name
        self.plants.run("server", f"corolla export runs/{run.name} --to {models}")
        for name in self.there:
            recorded = last["clients"][names[name]]["accuracy"]
            assert figure_of(models / f"{name}.pt", self.plants.home(name) / "rows.csv") == pytest.approx(
                recorded, abs=1e-6
            )
            card = model_card.read(models / f"{name}.pt")
            assert (card["client"], card["run"]["name"]) == (name, run.name)  # type: ignore[typeddict-item]
            assert card["metrics"]["accuracy"] == pytest.approx(recorded)
        # the plant's own, of its own state
        name = self.there[-1]
        self.plants.run(name, f"rm -rf own && corolla node export {run.name} --to own")
        recorded = last["clients"][names[name]]["accuracy"]
        assert figure_of(
            self.plants.home(name) / "own" / f"{name}.pt", self.plants.home(name) / "rows.csv"
        ) == pytest.approx(recorded, abs=1e-6)
        audits = " ".join(str(self.site(name)) for name in self.there)
        joined = json.loads(self.plants.run("server", f"corolla audit join runs/{run.name} {audits} --json"))
        assert joined["differences"] == [] and [each["name"] for each in joined["clients"]] == [
            name for name in NAMES if name in self.there
        ]
        for each in joined["clients"]:
            rows = pd.read_csv(self.plants.home(each["name"]) / "rows.csv")
            assert (
                each["train-samples"] == (rows["day"] <= 20).sum() and each["test-samples"] == (rows["day"] > 20).sum()
            )
            assert len(each["keys"]) == 1 and each["supernode"] == f"supernode-{NAMES.index(each['name'])}"


def figure_of(file: Path, rows: Path) -> float:
    """Return the accuracy of a plant's model on its raw rows of the test part."""
    frame = pd.read_csv(rows)
    test = rows.with_name("test.csv")
    frame[frame["day"] > 20].to_csv(test, index=False)
    card = model_card.read(file)
    asked = predict.read_inputs([test], card)
    outputs, _ = predict.ask(loading.open_file(file, card, METHODS), asked.samples, card)
    assert asked.targets is not None
    return predict.measure(outputs, asked.targets, card)[1]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("months", "events"),
    [pytest.param(2, TWO, marks=pytest.mark.long), pytest.param(12, TWELVE, marks=pytest.mark.nightly)],
)
def test_plants_go_on_from_month_to_month(tmp_path: Path, months: int, events: Mapping[int, Sequence[str]]) -> None:
    with plants_in(tmp_path) as plants:
        federation = Federation(plants)
        for name in federation.there:
            federation.rows(name, 1)
            federation.admit(name)
        keys: set[str] = set()
        for month in range(1, months + 1):
            run = federation.month(month, events.get(month, ()))
            federation.check(run)
            keys |= {entry["key"] for entry in trail.read(run) if entry["name"] == "celle"}
        # the rotated key is another one
        assert len(keys) == 2
        tree = plants.run("server", "corolla runs --tree")
        assert all(f"month-{month}" in tree for month in range(1, months + 1))
        plants.run("server", "corolla cluster down lab.yaml")
