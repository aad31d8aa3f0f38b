"""The catalogue's attacks against one SuperLink and one run: honest clients, clients that lie in every round, nodes that should
not be there. All are light SuperNodes (supernode.py) of this process; the SuperLink and the ServerApp are real ones.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from prometheus_client.parser import text_string_to_metric_families

import corolla
from corolla.report.page import write_report
from deploy.prometheus import Exporter, Watched, text_of
from fl_app.config import parse
from fl_app.data import open_client
from fl_app.errors import plain
from fl_app.server.events import CAUSES
from fl_app.server.run_folder import NAME, read_clients
from strategies import METHOD_PARAMS, METHODS
from tests.conftest import Command
from tests.e2e import gated
from tests.e2e.conftest import BackgroundRun, Cluster, own_cluster, replay, rounds, summary, wait_for
from tests.hostile import forge, results
from tests.hostile.catalogue import ATTACKS, Attack
from tests.hostile.supernode import Reply, SuperNode

pytestmark = [pytest.mark.hostile, pytest.mark.timeout(1800)]

HONEST = (0, 1)
LIARS = 6
CLIENTS = len(HONEST) + LIARS
CONFIG: dict[str, Any] = {
    "method": "fedper",
    "model": "gated:normed",
    "dataset": "digits",
    "train-samples": 24,
    "test-samples": 10,
    "local-epochs": 1,
    "min-results": 0.25,
    "evaluate-every": 1,
    "round-timeout": 30.0,
    "available-timeout": 30.0,
    "client-threads": 1,
    "min-available-clients": CLIENTS,
}


def plan(where: str) -> dict[tuple[int, int], Attack]:
    """Say which client plays which attack in which round (from 1); slow ones share the last rounds."""
    attacks = sorted((a for a in ATTACKS if a.where == where), key=lambda attack: attack.slow)
    quick = sum(not attack.slow for attack in attacks)
    first_slow = -(-quick // LIARS) * LIARS
    places = [*range(quick), *range(first_slow, first_slow + len(attacks) - quick)]
    return {(len(HONEST) + k % LIARS, 1 + k // LIARS): attack for k, attack in zip(places, attacks, strict=True)}


UPLOADS, EVALUATIONS = plan("upload"), plan("evaluation")
# in the last one nobody lies
ROUNDS = 1 + max(round for _, round in itertools.chain(UPLOADS, EVALUATIONS))


def lying(client_id: int) -> Any:
    """What a client does to its replies, round by round."""

    def alter(reply: Reply, message: Message) -> Reply | None:
        place = client_id, int(message.metadata.group_id or 0)
        attack = {"train": UPLOADS, "evaluate": EVALUATIONS}.get(message.metadata.message_type, {}).get(place)
        return play(attack, reply, message) if attack else reply

    return alter


def play(attack: Attack, reply: Reply, message: Message) -> Reply | None:
    assert attack.alter is not None
    return None if attack.alter(reply, message) is False else reply


@dataclass
class Outcome:
    """The run after all attacks."""

    run: BackgroundRun
    records: list[dict[str, Any]]
    undisturbed: list[dict[str, Any]]
    digests: tuple[str, str]
    trouble: list[BaseException] = field(default_factory=list)

    @property
    def log(self) -> str:
        return " ".join(self.run.log.split())

    def verdict(self, attack: Attack) -> tuple[bool, str]:
        """Tell whether what must hold of an attack does, and what the run said."""
        if attack.where in ("start", "join"):
            lines = [
                line for line in self.run.log.splitlines() if "cannot take part" in line or "has not answered" in line
            ]
            said = [line for line in lines if attack.says in line]
            alike = sum(other.holds == "refused" and other.says == attack.says for other in ATTACKS)
            return len(said) >= alike, said[0] if said else "nothing"
        planned = UPLOADS if attack.where == "upload" else EVALUATIONS
        ((client, round),) = (place for place, other in planned.items() if other is attack)
        record = self.records[round - 1] if attack.where == "upload" else self.records[round - 1]["evaluation"]
        causes = [failure["cause"] for failure in record["failures"] if failure["client"] == client]
        used = str(client) in record["clients"]
        if attack.holds == "kept":
            return used and not causes, "; ".join(causes) or "used as if nothing had been"
        return not used and len(causes) == 1 and attack.says in causes[0], "; ".join(causes) or "nothing"


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    directory = tmp_path_factory.mktemp("hostile")
    nodes: list[SuperNode] = []
    with pytest.MonkeyPatch.context() as patch, own_cluster(directory, COLUMNS="400") as cluster:
        # where the run finds its model, and where a site does: in the application that it has unpacked
        patch.syspath_prepend(Path(gated.__file__).parent)
        patch.setattr("client_app.client_app.unpacked", lambda: Path(gated.__file__).parent)
        try:
            cluster.start_superlink()
            yield attack_all(cluster, directory, nodes)
        finally:
            for node in nodes:
                node.stop()


def attack_all(cluster: Cluster, directory: Path, nodes: list[SuperNode]) -> Outcome:
    """Run the run."""

    def start(client_id: int, alter: Any, once: bool = False) -> None:
        def named(reply: Reply, message: Message) -> Reply | None:
            # honest clients too: class names count only if most send them
            forge.texts(client_id)(reply, message)
            answer: Reply | None = alter(reply, message)
            return answer

        nodes.append(SuperNode(cluster.fleet, {"partition-id": client_id, "num-partitions": CLIENTS}, named, once))

    def from_the_start(attack: Attack) -> Any:
        return lambda reply, message: play(attack, reply, message)

    config = {
        **CONFIG,
        "num-server-rounds": ROUNDS,
        "state-dir": str(directory / "state"),
        "data-dir": str(directory / "data"),
    }
    # prepares the data, once for all clients
    open_client(parse({**config, "num-clients": CLIENTS}, METHOD_PARAMS), 0)
    for client_id in range(CLIENTS):
        start(client_id, (lambda reply, message: reply) if client_id in HONEST else lying(client_id))
    for attack in ATTACKS:
        if attack.where == "start":
            start(0, from_the_start(attack), once=True)
    run = BackgroundRun(cluster, directory / "attacked", CLIENTS, config)
    wait_for(lambda: run.recorded() >= 1 or run.process.poll() is not None, seconds=600)
    for attack in ATTACKS:
        if attack.where == "join":
            start(1, from_the_start(attack), once=True)
    run.process.wait(timeout=1200)
    trouble = [error for node in nodes for error in node.trouble]
    assert run.process.returncode == 0, (run.log, trouble, cluster.log("superlink")[-5000:])
    honest = replay(run, directory)
    digests = str(summary(run.folder)["digest"]), honest
    undisturbed = rounds(directory / "replay")
    return Outcome(run, rounds(run.folder), undisturbed, digests, trouble)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attack_is_contained(attacked: Outcome, attack: Attack) -> None:
    contained, said = attacked.verdict(attack)
    results.note(attack.name, contained and attacked.digests[0] == attacked.digests[1], said)
    assert contained, f"{attack.name}: {said}"


def test_the_run_ends_with_the_digest_of_one_without_the_attacks(attacked: Outcome) -> None:
    assert len(attacked.records) == ROUNDS and attacked.digests[0] == attacked.digests[1]
    assert attacked.trouble == []
    for record, undisturbed in zip(attacked.records, attacked.undisturbed, strict=True):
        for client in map(str, HONEST):
            assert record["clients"][client] | {"seconds": 0} == undisturbed["clients"][client] | {"seconds": 0}
            assert record["evaluation"]["clients"][client] == undisturbed["evaluation"]["clients"][client]
        assert {f["client"] for f in record["failures"]}.isdisjoint(HONEST)


def test_what_clients_wrote_has_no_control_characters_and_little_room(attacked: Outcome) -> None:
    files = [attacked.run.folder / name for name in ("metrics.jsonl", "clients.json", "run.json", "summary.json")]
    for text in [attacked.run.log, *(path.read_text() for path in files)]:
        assert not [c for c in text if (ord(c) < 32 and c not in "\n\r") or 127 <= ord(c) < 160]
        assert "\\u001b" not in text and "\\u009b" not in text
    assert files[0].stat().st_size < 5000 * CLIENTS * ROUNDS


class Page(HTMLParser):
    """An HTML page: its `tags`, their `attributes`, the text of its `scripts`, its `data` and the `text` that it shows."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts = self.data = self.text = ""
        self.is_data = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        # a browser runs no script of this type
        self.is_data = ("type", "application/json") in attrs

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in ("script", "style") and self.cdata_elem:
            if self.is_data:
                self.data += data
            else:
                self.scripts += data
        else:
            self.text += data


def test_no_name_of_a_client_is_code_anywhere(attacked: Outcome, tmp_path: Path, command: Command) -> None:
    folder = attacked.run.folder
    written = [forge.TEXTS[i % len(forge.TEXTS)] for i in range(CLIENTS)]
    names = [read_clients(folder)[str(i)][NAME] for i in range(CLIENTS)]
    assert names == [plain(text).strip() for text in written]
    assert json.loads((folder / "run.json").read_text())["classes"][:CLIENTS] == [plain(text) for text in written]

    # the report, and what a notebook shows
    write_report([folder], tmp_path, tables=tmp_path, title=METHODS.title)
    run = corolla.load(folder)
    shown = [run._repr_html_(), corolla.compare([folder])._repr_html_(), run.clients.reset_index()._repr_html_()]
    pages = [Page((tmp_path / "report.html").read_text()), *map(Page, shown)]
    for page in pages:
        assert not [tag for tag in page.tags if "owned" in tag] and "owned" not in page.scripts
        assert "<" not in page.data
        for name, value in page.attributes:
            assert not name.startswith("on") and not str(value).strip().startswith("javascript:"), (name, value)
    for name in names:
        assert name in pages[0].text
    assert pages[0].tags.count("h1") == 1

    # tables
    for name in ("rounds.csv", "clients.csv"):
        cells = [cell for line in csv.reader((tmp_path / name).open(newline="")) for cell in line]
        assert not [cell for cell in cells if cell.startswith(("=", "+", "@", "\t", "\r"))]
    assert f"'{names[2]}" in cells and names[2].startswith("=cmd|")
    assert "owned" not in (tmp_path / "results.tex").read_text()

    # metrics
    exporter = Exporter(Watched(folder.parent, {"address": "127.0.0.1:1", "insecure": True}))
    text = text_of(exporter.samples()).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    # a name is the value of a label, and nothing else
    assert samples and not [s for s in samples if "owned" in s.name or "owned" in "".join(s.labels)]
    assert {s.labels["client"] for s in samples if s.name == "corolla_failures_total"} <= {*names}
    kinds = {kind for _, _, kind in exporter.samples()["failures_total"]}
    assert kinds and kinds <= set(CAUSES)

    # the terminal and the log, in which no cause begins a line
    for words in (("compare", folder), ("compare", folder, "--json"), ("runs", folder.parent)):
        code, out, err = command(*words)
        assert code == 0 and not [c for c in out + err if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160]
    assert repr(run) == f"Run({str(folder)!r})"
    logs = [attacked.run.log, *(path.read_text() for path in folder.glob("*.log"))]
    for line in "\n".join(logs).splitlines():
        assert not line.startswith(("corolla: error: all is lost", "=", "@", "#")), line
    # nothing was made outside
    assert {path.name for path in folder.parent.parent.iterdir()}.isdisjoint({"1", "x"})


def test_every_attack_has_a_name_of_its_own() -> None:
    assert not [name for name, count in Counter(attack.name for attack in ATTACKS).items() if count > 1]
