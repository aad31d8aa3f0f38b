"""A site's gate between a connection and Flower's loop: what comes through, what is answered in its place, what is noted."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import io
import struct
import time
import weakref
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from flwr.app import ArrayRecord, Error, Message, RecordDict
from flwr.cli.build import build_fab_from_files
from flwr.common.config import get_project_dir
from flwr.common.constant import NOOP_FLWR_AID, ErrorCode, Status
from flwr.common.serde import context_from_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal as loop
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
from flwr.supernode.servicer.runtime import runtime_handlers

from client_app.counting import train_samples
from deploy import audit, node_cli, site, supernode
from deploy.audit import Audit
from deploy.gate import NO_ACCOUNTS, Connection, Gate, NodeConfig
from deploy.site import Site
from deploy.unanswered import Arriving
from fl_app.errors import DeploymentError
from fl_app.keys import Scalar
from fl_app.known_names import CLIENT_NAME
from fl_app.transport import wire
from fl_app.transport.app_bundle import application_hash
from tests.facts import each_mentions, mentions, rejected

PROJECT = """
[project]
name = "app"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "lab"
[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"
[tool.flwr.app.config]
method = "fedcac"
local-epochs = 5
num-server-rounds = 30
round-retries = 1
dataset = "digits"
train-samples = 30
test-samples = 10
state-dir = ""
target = ""
classes = ""
private = false
dp-epsilon = 0.0
report-accuracy = true
batch-size = 16
drop-last = false
"""
FAB = build_fab_from_files({"pyproject.toml": PROJECT.encode(), "app.py": b"server = client = None\n"})[0]
HASH = hashlib.sha256(FAB).hexdigest()


def parts_of(message: Message) -> dict[str, bytes]:
    return {name: part.deflate() for name, part in get_all_nested_objects(message).items()}


@dataclass
class SuperLink:
    """What a connection leads to: runs, their code, messages that wait, and all that was sent to it."""

    overrides: dict[int, dict[str, Any]]
    fab: Fab = field(default_factory=lambda: Fab(HASH, FAB, {}))
    kind: str = ""
    series: int = 0
    named: tuple[str, str] = ("lab/app", "1.0.0")
    queue: list[Message] = field(default_factory=list)
    sent: list[tuple[Message, dict[str, bytes]]] = field(default_factory=list)

    def ask(self, kind: str, run_id: int = 7) -> Message:
        """Queue a message of a run."""
        TaskIdentity.task_id = TaskIdentity.node_id = 0
        TaskIdentity.run_id = run_id
        message = Message(wire.encode_query(), 1, kind, group_id="3")
        message.metadata.__dict__["_message_id"] = message.object_id
        self.queue.append(message)
        return message

    def connection(self) -> Connection:
        return Connection(
            1, self._receive, self._send, self._run, lambda *_: self.fab, self._pull, self._push, lambda *_: None
        )

    def _receive(self) -> tuple[Message, ObjectTree] | None:
        return (message, get_object_tree(message)) if self.queue and (message := self.queue.pop(0)) else None

    def _run(self, run_id: int) -> Run:
        run = Run.create_empty(run_id)
        run.fab_hash, run.override_config, run.primary_task_type = HASH, self.overrides[run_id], self.kind
        run.series_id = self.series or run_id
        run.fab_id, run.fab_version = self.named
        run.flwr_aid = self.account
        return run

    def _send(self, message: Message, tree: ObjectTree, seconds: float) -> tuple[set[str], str]:
        self.sent.append((message, {}))
        return {tree.object_id, *(part.object_id for part in tree.children)}, "session"

    def _pull(self, run_id: int, object_id: str) -> bytes:
        return b"" if object_id == "0" * 64 else self.content[object_id]

    def _push(self, run_id: int, session: str, object_id: str, content: bytes) -> None:
        self.sent[-1][1][object_id] = content

    content: dict[str, bytes] = field(default_factory=dict)
    account: str = NOOP_FLWR_AID

    @property
    def errors(self) -> list[str]:
        """The errors among what was sent, by name."""
        found = []
        for message, _ in self.sent:
            records = message.content.config_records
            record = next(r for name, r in records.items() if name.endswith(("properties", "metrics")))
            found.append(str(record[wire.ERROR]))
        return found


@pytest.fixture
def link() -> Iterator[SuperLink]:
    yield SuperLink({7: {}, 8: {"local-epochs": 20}, 9: {"no-such-key": 1}})


def made_gate(rules: Site, directory: Path, node: NodeConfig) -> Gate:
    """A gate that counts samples in this process: another one takes a second (tests/deploy/test_counting.py)."""
    return Gate(rules, Audit(directory), directory, node, InMemoryObjectStore(), count=train_samples)


def gate(directory: Path, link: SuperLink, **rules: Any) -> tuple[Gate, Connection]:
    made = made_gate(Site(**rules), directory, NodeConfig(0, 4, name="celle"))
    return made, made.around(link.connection())


def lines(directory: Path) -> list[tuple[str, str]]:
    audit.verify(directory)
    return [(str(entry["kind"]), str(entry.get("run", ""))) for entry in audit.entries(directory)]


def ask(opened: Connection, link: SuperLink) -> Message:
    """Receive the message that waits, as Flower's loop does."""
    received = opened.receive()
    assert received is not None
    message = received[0]
    link.content = parts_of(message)
    for name in link.content:
        opened.pull_object(7, name)
    opened.confirm_message_received(7, message.metadata.message_id)
    return message


def reply_to(message: Message, floats: int, **fields: Any) -> Message:
    """A reply with so many numbers. fields: of its metadata, in place of those that follow from the message."""
    reply = Message(RecordDict({"a": ArrayRecord([np.zeros(floats, np.float32)])}), reply_to=message)
    reply.metadata.__dict__.update({f"_{name}": value for name, value in fields.items()})
    reply.metadata.__dict__["_message_id"] = reply.object_id
    return reply


def deliver(opened: Connection, made: Gate, reply: Message) -> None:
    """Send a reply as Flower's loop does."""
    tree, parts = get_object_tree(reply), parts_of(reply)
    made.store.preregister(7, tree)
    for name, content in parts.items():
        made.store.put(name, content)
    wanted, session = opened.send(reply, tree, 1.0)
    for name in wanted:
        opened.push_object(7, session, name, parts[name])


def exchange(opened: Connection, made: Gate, link: SuperLink, floats: int) -> None:
    """Receive the message that waits, and send a reply with so many numbers."""
    deliver(opened, made, reply_to(ask(opened, link), floats))


def test_a_sites_evaluations_are_counted_over_runs_and_restarts(tmp_path: Path, site_dir: Path) -> None:
    """A server that sends models of one class reads test labels from accuracies, one class a question."""
    confidential: list[dict[str, Any]] = [{"private": True}, {"dp-epsilon": 1.0}]
    quiet = {"private": True, "report-accuracy": False}
    link = SuperLink({1: {}, 2: confidential[0], 3: confidential[1], 4: quiet})

    def passes(kind: str, run_id: int) -> bool:
        # a new gate each time, as after a restart: the run counts again
        _, opened = gate(tmp_path, link, max_evaluations=6)
        link.ask(kind, run_id)
        return opened.receive() is not None

    assert [passes(kind, run) for kind, run in (("evaluate", 2), ("train", 3), ("evaluate", 3))] == [True] * 3
    assert not link.sent
    for kind, run in (("evaluate", 2), ("train", 2), ("evaluate", 3)):
        assert not passes(kind, run)
    assert set(link.errors) == {"refused//max-evaluations"}
    # runs that hide nothing
    assert all(passes(kind, 1) for kind in ("get_properties", "evaluate", "train"))
    # applications may write there
    assert not (site_dir / "evaluations").exists()
    for text in ("damaged", "-9\n", "0_0\n", "", "0", " 0\n", "0\n0\n", "٠\n"):
        (tmp_path / "evaluations").write_text(text)
        assert not passes("evaluate", 2), text


@pytest.mark.parametrize("retries", [1, "x", float("inf")])
@pytest.mark.parametrize("bounds, trained", [({"num-server-rounds": {"max": 2}}, 6), ({}, 9)])
def test_a_bound_on_rounds_bounds_messages(
    tmp_path: Path, link: SuperLink, bounds: dict[str, Any], trained: int, retries: Any
) -> None:
    """A server may send more messages to train than its run's configuration says: 2 rounds, each tried twice, and the end."""
    link.overrides[7] = {"num-server-rounds": 2, "round-retries": retries}
    made, opened = gate(tmp_path, link, bounds=bounds)
    for kind in ("query", *["train"] * trained, "query"):
        link.ask(kind)
        exchange(opened, made, link, 1)
    link.sent.clear()
    link.ask("train")
    if bounds:
        assert opened.receive() is None and link.errors == ["refused/num-server-rounds/bounds"]
    else:
        exchange(opened, made, link, 1)


def test_nodes_of_a_machine_account_have_one_count(tmp_path: Path) -> None:
    """The directory, a file in it, and what a run names are the same rows."""
    data = tmp_path / "xray"
    sites = tmp_path / "sites"
    answered = []
    for name, path in (("lab/a", str(data)), ("field/a", str(data)), ("lab/b", ""), ("lab/c", str(data / "rows.csv"))):
        link = SuperLink({2: {"private": True}})
        made = made_gate(Site(max_evaluations=2), sites / name, NodeConfig(0, 4, path))
        made.evaluations_in = site.evaluations_in(sites)
        link.ask("evaluate", 2)
        answered.append(made.around(link.connection()).receive() is not None)
    # the first run and its evaluation are two
    assert answered == [True, False, False, False]
    assert supernode.sites_in(sites) == ["field/a", "lab/a", "lab/b", "lab/c"]


def test_each_confidential_run_is_a_question_about_a_sites_data(tmp_path: Path, site_dir: Path) -> None:
    """A server that varies `batch-size` with `drop-last` finds a site's number of rows by what min-samples refuses."""
    runs = {k: {"private": True, "report-accuracy": False, "batch-size": k, "drop-last": True} for k in (7, 11, 16, 17)}
    link = SuperLink({**runs, 1: {"batch-size": 16, "drop-last": True}})
    _, opened = gate(tmp_path, link, min_samples=30, max_evaluations=3)

    def answered(kind: str, run_id: int) -> str:
        link.sent.clear()
        link.ask(kind, run_id)
        return "passes" if opened.receive() else link.errors[0]

    refused = "refused//min-samples"
    # its 30 samples make whole batches of neither 7 nor 11
    assert [answered("get_properties", k) for k in (7, 11, 16)] == [refused] * 3
    assert answered("get_properties", 17) == "refused//max-evaluations"
    # a run counts once, and one without a promise not at all
    assert answered("train", 7) == refused and answered("get_properties", 1) == refused
    assert (tmp_path / "evaluations").read_text() == "3\n"


def test_what_is_allowed_goes_through_and_is_noted(tmp_path: Path, link: SuperLink) -> None:
    made, opened = gate(tmp_path, link, applications=(HASH,), methods=("fedcac",), min_samples=30, max_upload=10_000)
    asked = link.ask("train")
    exchange(opened, made, link, 1000)
    assert opened.receive() is None
    run, download, upload = audit.entries(tmp_path)
    assert run["application"] == HASH and run["config"]["local-epochs"] == 5 and run["refusal"] == ""
    assert (download["kind"], download["run"], download["round"]) == ("download", "7", "3")
    assert download["sha256"] == asked.object_id and download["bytes"] == sum(map(len, link.content.values()))
    reply = link.sent[0][0]
    assert (upload["kind"], upload["sha256"]) == ("upload", reply.object_id) and 4000 < upload["bytes"] < 6000


@pytest.mark.parametrize(
    ("account", "said"), [(NOOP_FLWR_AID, NO_ACCOUNTS), ("anna", "anna"), ("", ""), ("x" * 9999, "x")]
)
def test_the_audit_says_who_submitted_a_run(tmp_path: Path, link: SuperLink, account: str, said: str) -> None:
    """Or that the SuperLink has no accounts, so that nobody takes an empty field for an oversight."""
    link.account = account
    _, opened = gate(tmp_path, link)
    link.ask("train")
    assert opened.receive() is not None
    submitter = audit.entries(tmp_path)[0]["submitter"]
    assert submitter == said or (submitter.startswith("xxx") and len(submitter) < 9999)


@pytest.mark.parametrize(
    "rules, run_id, expected",
    [
        ({"applications": ("ab" * 32,)}, 7, "refused//applications"),
        ({"methods": ("fedobp",)}, 7, "refused/method/methods"),
        ({"bounds": {"local-epochs": {"max": 10}}}, 8, "refused/local-epochs/bounds"),
        ({"min_samples": 31}, 7, "refused//min-samples"),
        ({}, 9, "refused//application"),
    ],
)
def test_refusals_answer_every_message_by_name(
    tmp_path: Path, link: SuperLink, rules: dict[str, Any], run_id: int, expected: str
) -> None:
    _, opened = gate(tmp_path, link, **rules)
    for kind in ("get_properties", "train", "evaluate"):
        link.ask(kind, run_id)
        assert opened.receive() is None
    assert link.errors == [expected] * 3
    first, parts = link.sent[0]
    told = first.content.config_records["getpropertiesres.properties"]
    # the configuration of code that is not allowed is not read
    name = None if "application" in expected else "celle"
    assert (told["client-id"], told.get(CLIENT_NAME)) == (0, name)
    assert parts[first.object_id] and first.metadata.message_type == "get_properties"
    with rejected(wire.WireError, "", "refused", "site"):
        wire.decode_evaluation(link.sent[2][0].content)
    assert lines(tmp_path) == [("run", str(run_id)), *[("refusal", str(run_id))] * 3]


CELL = "John Smith 1957-03-02"


def site_table(directory: Path, *, cell: str = "61", word: str = "well", rows: int = 60) -> Path:
    """A site's table of patients, in which one row has this cell and this word."""
    path = directory / "patients.csv"
    lines = [f"{row % 70},{row % 7},{'ill' if row % 2 else 'well'}" for row in range(rows - 1)]
    path.write_text("\n".join(["age,visits,state", *lines, f"{cell},3,{word}"]) + "\n")
    return path


@pytest.mark.parametrize("promise", [{}, {"private": True}, {"dp-epsilon": 1.0}])
@pytest.mark.parametrize("tell", [None, "reasons", "details"])
def test_a_cell_leaves_only_where_the_site_tells_and_the_run_promises_nothing(
    tmp_path: Path, link: SuperLink, promise: dict[str, Any], tell: str | None
) -> None:
    path = site_table(tmp_path, cell=CELL)
    told = CELL
    if promise:
        # a cell refuses nothing there; a file that cannot be read does
        path.write_text(path.read_text() + '"61,3,well')
        told = "EOF inside string"
    link.overrides[7] = {"dataset": f"table:{path}", "target": "state", "classes": "well,ill", **promise}
    made = made_gate(Site(min_samples=30, tell=tell), tmp_path, NodeConfig(0, 1))
    opened = made.around(link.connection())
    for kind in ("get_properties", "train", "evaluate"):
        link.ask(kind)
        assert opened.receive() is None
    assert link.errors == ["refused//min-samples"] * 3
    sent = b"".join(content for message, _ in link.sent for content in parts_of(message).values())
    assert (told.encode() in sent) == (tell == "details" and not promise)
    assert told in audit.entries(tmp_path)[-1]["why"]


@pytest.mark.parametrize("tell", [None, "details"])
def test_the_text_of_an_application_that_failed_stays_here(tmp_path: Path, link: SuperLink, tell: str | None) -> None:
    made, opened = gate(tmp_path, link, tell=tell)
    asked = link.ask("train")
    assert opened.receive() is not None
    text = f"<class 'ValueError'>:<'{CELL}'>"
    reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, text), reply_to=asked)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    made.store.preregister(7, get_object_tree(reply))
    for name, content in parts_of(reply).items():
        made.store.put(name, content)
    opened.send(reply, get_object_tree(reply), 1.0)
    ((sent, parts),) = link.sent
    assert sent.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert sent.error.reason == (text if tell else "failed//")
    assert (CELL.encode() in b"".join(parts.values())) == bool(tell)
    assert CELL in audit.entries(tmp_path)[-1]["why"]


def test_a_reply_that_is_too_large_is_not_sent(tmp_path: Path, link: SuperLink) -> None:
    made, opened = gate(tmp_path, link, max_upload=4000)
    link.ask("train")
    exchange(opened, made, link, 1000)
    assert link.errors == ["refused//max-upload"] and "this one has 5" in audit.entries(tmp_path)[-1]["why"]
    assert lines(tmp_path)[-1] == ("refusal", "7") and not any(kind == "upload" for kind, _ in lines(tmp_path))


@pytest.mark.parametrize(
    "config, has",
    [
        ("train-samples = 100", 100),
        ("train-samples = 100\nvalidation-ratio = 0.96", 5),
        ("train-samples = 100\ndrop-last = true\nbatch-size = 51", 51),
        ("train-samples = 100\ndrop-single = true\nbatch-size = 33", 99),
        ("train-samples = 100\ndrop-single = true\nbatch-size = 1", 100),
        ('train-samples = 100\nbatch-size = 16\nmethod = "fedconcat"', 48),
        ('train-samples = 100\nbatch-size = 16\nmethod = "fedconcat"\nfedconcat.classifier-batches = 1', 16),
        ('train-samples = 100\nbatch-size = 16\nmethod = "fedconcat"\nfedconcat.classifier-batches = 0', 100),
        ('train-samples = 100\nmethod = "fedfomo"\nfedfomo.validation-ratio = 0.96', 4),
        ('dataset = "node"\nprivate = true\nclasses = "0,2"', 10),
        ('train-samples = 7\npartition = "pathological"\nnum-clients = 1\n[tool.flwr.app.config.fedcac]\ntau = 0.3', 7),
        ('dataset = "node"\nclasses = "0,1"\nvalidation-ratio = 0.5', 10),
    ],
)
def test_samples_are_counted_as_the_client_counts_them(
    tmp_path: Path, link: SuperLink, monkeypatch: pytest.MonkeyPatch, config: str, has: int
) -> None:
    x, y = np.zeros((20, 3), np.float32), np.arange(20) % 2
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    project = PROJECT.partition("dataset")[0]
    if "method" in config:
        project = project.replace('method = "fedcac"\n', "")
    fab = packed(f"{project}test-samples = 10\n{config}\n".encode())
    name = hashlib.sha256(fab).hexdigest()
    link.fab = Fab(name, fab, {})
    monkeypatch.setattr(f"{__name__}.HASH", name)
    node = NodeConfig(0, 4, str(tmp_path / "own.npz"))
    made = made_gate(Site(min_samples=101), tmp_path, node)
    opened = made.around(link.connection())
    link.ask("get_properties")
    assert opened.receive() is None and audit.entries(tmp_path)[-1]["why"].endswith(f"this one has {has}")


def refusals(directory: Path) -> list[str]:
    return [str(entry["why"]) for entry in audit.entries(directory) if entry["kind"] == "refusal"]


def test_a_reply_to_no_open_message_stays_at_the_site(tmp_path: Path, link: SuperLink) -> None:
    made, opened = gate(tmp_path, link, max_upload=4000)
    link.ask("train")
    message = ask(opened, link)
    for reply_to_id in ("", "ab" * 32, "x"):
        deliver(opened, made, reply_to(message, 100_000, reply_to_message_id=reply_to_id))
    other = reply_to(message, 1, reply_to_message_id="x")
    # whose parts lie under another name
    unnamed = reply_to(message, 1)
    unnamed.metadata.__dict__["_message_id"] = "y"
    assert not made.admits(other, get_object_tree(other)) and not made.admits(unnamed, get_object_tree(unnamed))
    assert link.sent == [] and refusals(tmp_path) == ["reply: it answers no open message"] * 5
    reply = reply_to(message, 100)
    assert made.admits(reply, get_object_tree(reply))
    deliver(opened, made, reply)
    assert len(link.sent) == 1 and lines(tmp_path)[-1] == ("upload", "7")


def test_nobody_makes_the_audit_long(tmp_path: Path, link: SuperLink) -> None:
    long, most = "x" * 1_000_000, 20_000
    link.overrides |= {10: {"target": long}, 11: {"classes": "\x01" * 40_000}}
    made, opened = gate(tmp_path, link, tell="details")
    link.ask("train").metadata.__dict__["_group_id"] = long
    message = ask(opened, link)
    stray = reply_to(message, 1, reply_to_message_id="x")
    assert not any(made.admits(stray, get_object_tree(stray)) for _ in range(1000))
    reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, long), reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    deliver(opened, made, reply)
    assert lines(tmp_path)[-1] == ("failure", "7")
    # a next message has its own
    link.ask("train")
    ask(opened, link)
    noted = len(refusals(tmp_path))
    assert 0 < noted < 100 and not made.admits(stray, get_object_tree(stray)) and len(refusals(tmp_path)) == noted + 1
    for run in (10, 11):
        link.ask("train", run)
        assert opened.receive() is None
    link.sent = link.sent[-2:]
    assert link.errors == ["refused//application"] * 2
    assert (tmp_path / audit.FILE).stat().st_size < most


def test_only_the_first_reply_to_a_message_leaves(tmp_path: Path, link: SuperLink) -> None:
    made, opened = gate(tmp_path, link)
    link.ask("train")
    message = ask(opened, link)
    for floats in range(1, 6):
        deliver(opened, made, reply_to(message, floats))
    assert len(link.sent) == 1 and len(refusals(tmp_path)) == 4


@pytest.mark.parametrize("announced", [True, False])
def test_a_reply_of_which_too_much_has_arrived_is_refused(tmp_path: Path, link: SuperLink, announced: bool) -> None:
    """The process that sent it may end without a reply."""
    made, opened = gate(tmp_path, link, max_upload=4000)
    made.arriving = Arriving(4000)
    link.ask("train")
    message = ask(opened, link)
    assert not made.arriving.takes_parts(2000)
    reply = reply_to(message, 10) if announced else Message(Error(1, "it has ended"), reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    opened.send(reply, get_object_tree(reply), 1.0)
    assert link.errors == ["refused//max-upload"] and "1056576 arrived" in refusals(tmp_path)[0]
    link.ask("train")
    exchange(opened, made, link, 10)
    assert len(link.sent) == 2 and len(refusals(tmp_path)) == 1


def test_a_reply_answers_the_tasks_that_the_messages_own_part_names(tmp_path: Path, link: SuperLink) -> None:
    """A SuperLink with a database leaves them out of the envelope; what the gate hands on stays as it came."""
    made, opened = gate(tmp_path, link)
    asked = link.ask("train")
    asked.metadata.__dict__.update(_src_task_id=11, _dst_task_id=12)
    asked.metadata.__dict__["_message_id"] = asked.object_id
    link.content = parts_of(asked)
    asked.metadata.__dict__.update(_src_task_id=None, _dst_task_id=None)
    assert opened.receive() is not None
    for name in link.content:
        opened.pull_object(7, name)
    assert (asked.metadata.src_task_id, asked.metadata.dst_task_id) == (None, None)
    deliver(opened, made, reply_to(asked, 1, src_task_id=12, dst_task_id=11))
    assert len(link.sent) == 1 and refusals(tmp_path) == []


def test_a_message_that_cannot_be_fetched_is_answered_before_the_next(tmp_path: Path, link: SuperLink) -> None:
    made, opened = gate(tmp_path, link)
    first = link.ask("train")
    with pytest.raises(KeyError):
        # its parts are gone: Flower's loop gives it up, and asks for another
        ask(opened, link) and opened.pull_object(7, "ab" * 32)
    assert opened.receive() is None and made.waiting() is None
    second = link.ask("evaluate")
    ask(opened, link)
    (error, _), waits = link.sent[0], made.waiting()
    assert error.has_error() and error.metadata.reply_to_message_id == first.metadata.message_id
    assert waits is not None and waits.metadata.message_id == second.metadata.message_id
    # what comes late answers nothing
    for message in (first, second):
        deliver(opened, made, reply_to(message, 1))
    assert [sent.metadata.reply_to_message_id for sent, _ in link.sent[1:]] == [second.metadata.message_id]
    assert len(link.sent) == 2 and each_mentions(refusals(tmp_path), ("reply", "answers no open", "message"))


@pytest.mark.parametrize("ahead", [-1e6, -30.0, 0.0, 30.0, 1e6])
def test_the_times_of_an_honest_reply_need_no_common_clock(tmp_path: Path, link: SuperLink, ahead: float) -> None:
    made, opened = gate(tmp_path, link)
    asked = link.ask("train")
    asked.metadata.__dict__.update(_created_at=asked.metadata.created_at + ahead, _ttl=600.0)
    asked.metadata.__dict__["_message_id"] = asked.object_id
    message = ask(opened, link)
    # it took five minutes
    began = time.time() - 300
    reply = reply_to(message, 1, created_at=began, ttl=message.metadata.created_at + message.metadata.ttl - began)
    deliver(opened, made, reply)
    assert len(link.sent) == 1 and refusals(tmp_path) == []


LONG = "A" * 2_000_000
# when messages end, in seconds since 1970
ENDS = time.time() + 3600


@pytest.mark.parametrize(
    "fields",
    [
        {"group_id": LONG},
        {"message_type": f"train.{'a' * 1000}"},
        {"group_id": "4"},
        {"src_task_id": 2**60},
        {"dst_task_id": 2**60},
        {"src_node_id": 5},
        {"dst_node_id": 5},
        {"run_id": 8},
        # a SuperLink drops a reply with such times
        *({"ttl": ttl} for ttl in (-5.0, 0.0, 1e-3, 1e9, float("inf"), float("nan"))),
        *({"created_at": at} for at in (0.0, 1.0, 1e10, -float("inf"), float("nan"))),
        {"created_at": 1e10, "ttl": ENDS - 1e10},
        {"created_at": 1.0, "ttl": ENDS - 1.0},
    ],
    ids=lambda fields: "-".join(f"{name}={str(value)[:6]}" for name, value in fields.items()),
)
def test_an_envelope_holds_what_follows_from_the_message(
    tmp_path: Path, link: SuperLink, fields: dict[str, Any]
) -> None:
    made, opened = gate(tmp_path, link)
    asked = link.ask("train")
    asked.metadata.__dict__["_ttl"] = ENDS - asked.metadata.created_at
    asked.metadata.__dict__["_message_id"] = asked.object_id
    deliver(opened, made, reply_to(ask(opened, link), 1, **fields))
    assert len(link.sent) == 1 and link.errors and each_mentions(refusals(tmp_path), ("reply", "envelope has fields"))


def test_fields_that_a_part_hides_count_and_are_refused(tmp_path: Path, link: SuperLink) -> None:
    """The envelope is plain, the part with the same fields is not."""
    made, opened = gate(tmp_path, link)
    link.ask("train")
    message = ask(opened, link)
    reply = reply_to(message, 1, group_id=LONG)
    reply.metadata.__dict__["_group_id"] = message.metadata.group_id
    tree = get_object_tree(hidden := reply_to(message, 1, group_id=LONG))
    made.store.preregister(7, tree)
    for name, content in parts_of(hidden).items():
        made.store.put(name, content)
    reply.metadata.__dict__["_message_id"] = tree.object_id
    opened.send(reply, tree, 1.0)
    assert len(link.sent) == 1 and each_mentions(refusals(tmp_path), ("reply", "envelope has fields"))


@pytest.mark.parametrize("where", ["envelope", "error", "name"])
def test_all_of_a_reply_counts(tmp_path: Path, link: SuperLink, where: str) -> None:
    made, opened = gate(tmp_path, link, max_upload=4000)
    link.ask("train")
    message = ask(opened, link)
    if where == "envelope":
        reply = reply_to(message, 1, group_id=LONG)
    else:
        content = Error(1, LONG) if where == "error" else RecordDict({LONG: ArrayRecord([np.zeros(1)])})
        reply = Message(content, reply_to=message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
    deliver(opened, made, reply)
    assert len(link.sent) == 1 and refusals(tmp_path)[0].startswith("max-upload: ")


def test_no_part_leaves_that_was_not_counted(tmp_path: Path, link: SuperLink) -> None:
    made, opened = gate(tmp_path, link)
    link.ask("train")
    exchange(opened, made, link, 1)
    more = b"more bytes"
    with rejected(ValueError, "", "no part", "reply that leaves"):
        opened.push_object(7, "session", hashlib.sha256(more).hexdigest(), more)


def test_code_that_is_not_what_was_announced(tmp_path: Path, link: SuperLink) -> None:
    link.fab = Fab(HASH, FAB + b"x", {})
    _, opened = gate(tmp_path, link, applications=(HASH,))
    link.ask("get_properties")
    assert opened.receive() is None and link.errors == ["refused//applications"]
    assert mentions(audit.entries(tmp_path)[-1]["why"], "applications", "code's sha256")


def packed(project: bytes, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """An application with this pyproject.toml."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as archive:
        archive.writestr("pyproject.toml", project)
    return content.getvalue()


@pytest.mark.parametrize(
    "fab, rules, expected",
    [
        # no archive: it was not opened
        (b"no archive", {"applications": (HASH,)}, "is not among those allowed here"),
        (packed(b"#" * 65_537), {}, "application: pyproject.toml may have 65536 bytes, it has 65537"),
        (
            packed(bytes(np.random.default_rng(0).bytes(70_000))).replace(struct.pack("<I", 70_000), b"\1\0\0\0"),
            {},
            "may have",
        ),
        (packed(PROJECT.encode(), zipfile.ZIP_LZMA), {}, "must be stored or deflated, it is packed by method 14"),
    ],
    ids=["not allowed", "large", "packed large", "another packing"],
)
def test_little_is_unpacked_before_an_application_is_allowed(
    tmp_path: Path, link: SuperLink, monkeypatch: pytest.MonkeyPatch, fab: bytes, rules: dict[str, Any], expected: str
) -> None:
    name = hashlib.sha256(fab).hexdigest()
    link.fab = Fab(name, fab, {})
    monkeypatch.setattr(f"{__name__}.HASH", name)
    _, opened = gate(tmp_path, link, **rules)
    link.ask("get_properties")
    assert opened.receive() is None and expected in audit.entries(tmp_path)[-1]["why"]


def test_what_was_judged_is_what_is_started(tmp_path: Path, link: SuperLink) -> None:
    _, opened = gate(tmp_path, link, applications=(HASH,))
    link.ask("get_properties")
    assert opened.receive() is not None
    link.fab, link.overrides = Fab(HASH, b"other", {}), {7: {"local-epochs": 99}}
    assert opened.get_fab(HASH, 7).content == FAB and opened.get_run(7).override_config == {}


def test_the_code_of_many_runs_is_kept_once_and_of_refused_runs_not_at_all(tmp_path: Path, link: SuperLink) -> None:
    sent: list[weakref.ref[Fab]] = []

    def send(*_: object) -> Fab:
        # each run's code arrives as another object
        fab = Fab(HASH, FAB, {})
        sent.append(weakref.ref(fab))
        return fab

    link.overrides = {k: {"method": "fedcac" if k < 20 else "fedobp"} for k in range(40)}
    made = Gate(Site(methods=("fedcac",)), Audit(tmp_path), tmp_path, NodeConfig(0, 4), InMemoryObjectStore())
    opened = made.around(dataclasses.replace(link.connection(), get_fab=send))
    for run_id in range(40):
        link.ask("get_properties", run_id)
        assert (opened.receive() is not None) == (run_id < 20)
        if run_id < 20:
            assert opened.get_fab(HASH, run_id).content == FAB
    gc.collect()
    assert len(sent) == 40 and sum(fab() is not None for fab in sent) == 1


def test_code_that_is_fetched_again_is_the_code_that_was_judged(
    tmp_path: Path, link: SuperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.gate._MAX_FABS", 0)
    _, opened = gate(tmp_path, link)
    link.ask("get_properties")
    assert opened.receive() is not None and opened.get_fab(HASH, 7).content == FAB
    link.fab = Fab(HASH, b"other", {})
    with rejected(ValueError, "", "run 7", f"its code was {HASH}", "and is"):
        opened.get_fab(HASH, 7)


def test_a_run_that_is_judged_again_keeps_its_approval(
    tmp_path: Path, link: SuperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.gate._MAX_JUDGED", 2)
    link.overrides |= {k: {} for k in range(20, 26)}
    made, opened = gate(tmp_path, link, approval="ask")
    link.ask("get_properties")
    assert opened.receive() is None
    site.decide(tmp_path, "7", True)
    exchange(opened, made, link, 1)
    link.sent.clear()
    for run_id in range(20, 26):
        link.ask("get_properties", run_id)
        assert opened.receive() is None
    assert len(made._judged) == 2
    link.ask("train")
    assert opened.receive() is not None and link.sent == []


def test_agents_do_not_run_here(tmp_path: Path, link: SuperLink) -> None:
    link.kind = TaskType.AGENT_APP
    _, opened = gate(tmp_path, link)
    link.ask("get_properties")
    assert opened.receive() is None and mentions(audit.entries(tmp_path)[-1]["why"], "agents do not", "run here")


def test_a_part_that_is_not_what_its_name_says(tmp_path: Path, link: SuperLink) -> None:
    _, opened = gate(tmp_path, link)
    with rejected(ValueError, "", "not the sha256", "received bytes"):
        opened.pull_object(7, "0" * 64)


def test_a_run_waits_until_a_person_has_decided(tmp_path: Path, link: SuperLink) -> None:
    made, opened = gate(tmp_path, link, approval="ask")
    first, second = link.ask("get_properties", 7), link.ask("get_properties", 8)
    assert opened.receive() is None and opened.receive() is None and opened.receive() is None and link.sent == []
    assert [request.run for request in site.waiting(tmp_path)] == ["7", "8"]
    assert site.waiting(tmp_path)[1].config["local-epochs"] == 20
    with rejected(DeploymentError, "run 5", "does not wait", "approval here", "waiting", "7", "8"):
        site.decide(tmp_path, "5", True)
    site.decide(tmp_path, "8", True)
    assert (received := ask(opened, link)) is second
    deliver(opened, made, reply_to(received, 1))
    link.sent.clear()
    site.decide(tmp_path, "7", False)
    assert opened.receive() is None and link.errors == ["refused//approval"]
    assert "has declined it" in audit.entries(tmp_path)[-1]["why"]
    assert site.waiting(tmp_path) == [] and first.metadata.run_id == 7
    assert [kind for kind, _ in lines(tmp_path)] == "run run approval download upload approval refusal".split()
    link.ask("train", 8)
    assert opened.receive() is not None  # the whole run is approved


def test_a_message_that_is_not_held_is_answered(
    tmp_path: Path, link: SuperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.gate._MAX_HELD", 2)
    _, opened = gate(tmp_path, link, approval="ask")
    asked = [link.ask(kind, run) for kind, run in (("get_properties", 7), ("train", 7), ("evaluate", 8))]
    assert [opened.receive() for _ in asked] == [None] * 3
    assert link.errors == ["refused//approval"]
    # a server may start any number of runs
    assert [request.run for request in site.waiting(tmp_path)] == ["7"]
    assert link.sent[0][0].metadata.reply_to_message_id == asked[2].metadata.message_id
    site.decide(tmp_path, "7", True)
    assert ask(opened, link) is asked[0]


@pytest.mark.parametrize("rules", [{"min_samples": 31}, {"min_samples": 30}, {"max_evaluations": 1}])
def test_nothing_is_looked_up_for_a_run_that_nobody_has_approved(
    tmp_path: Path, link: SuperLink, rules: dict[str, Any]
) -> None:
    link.overrides = {k: {"private": True} for k in (7, 8)}
    made, opened = gate(tmp_path, link, approval="ask", **rules)
    counted: list[str] = []
    count = made.count
    made.count = lambda *given: counted.append("") or count(*given)  # type: ignore[func-returns-value]
    for run_id in (7, 8):
        link.ask("get_properties", run_id)
        assert opened.receive() is None
    assert link.sent == [] and not counted and not (tmp_path / "evaluations").exists()
    assert [entry["refusal"] for entry in audit.entries(tmp_path)] == ["waits for approval"] * 2
    site.decide(tmp_path, "7", False)
    assert opened.receive() is None and not counted and not (tmp_path / "evaluations").exists()
    assert link.errors == ["refused//approval"]
    site.decide(tmp_path, "8", True)
    passed = opened.receive() is not None
    assert passed == ("min_samples" not in rules or rules["min_samples"] == 30)
    assert link.errors[1:] == ([] if passed else ["refused//min-samples"])
    assert len(counted) == ("min_samples" in rules)


def test_a_waiting_run_cannot_hide_a_line_of_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COROLLA_STATE_HOME", str(tmp_path))
    directory = supernode.sites_directory() / "clinic"
    Audit(directory).append("start")
    config: dict[str, Scalar] = {
        "dp-epsilon": 0.0,
        "x\n  private": "true\x1b[1A\x1b[2K\r\n  dp-epsilon = 1.0",
        "y": "\u202etxt",
    }
    site.ask(directory, site.Request("7", HASH, config))
    node_cli.approve(None, False, None, whole=True)
    assert each_mentions(
        capsys.readouterr().out.splitlines(),
        ("run 7 at clinic", f"application {HASH}"),
        ("  dp-epsilon = 0.0",),
        ("  x  private = true[1A[2K  dp-epsilon = 1.0",),
        ("  y = txt",),
    )


def test_an_old_approval_holds_for_the_same_code_and_config_alone(tmp_path: Path, link: SuperLink) -> None:
    """A server may start the approved run again, and nothing else: the request of a run with one more byte is new."""
    request = site.Request("7", HASH, {"local-epochs": 5})
    site.ask(tmp_path, request)
    site.decide(tmp_path, "7", True)
    answer = site.answer(tmp_path, request)
    assert answer is not None and answer.approved
    one_bit = f"{int(HASH, 16) ^ 1:064x}"
    replays = [
        ("8", HASH, {"local-epochs": 5}),
        ("7", one_bit, {"local-epochs": 5}),
        ("7", HASH, {"local-epochs": 5.0}),
    ]
    assert [site.answer(tmp_path, site.Request(*replay)) for replay in replays] == [None] * 3


def test_nothing_runs_that_cannot_be_noted(tmp_path: Path, link: SuperLink) -> None:
    made, opened = gate(tmp_path, link)
    link.ask("train")
    exchange(opened, made, link, 10)
    with (tmp_path / audit.FILE).open("ab") as file:
        file.write(b"{}\n")
    link.ask("train")
    exchange(opened, made, link, 10)
    assert len(link.sent) == 2
    assert link.sent[1][0].content.config_records["fitres.metrics"][wire.ERROR] == "refused//audit"
    link.ask("train", 8)
    assert opened.receive() is None and len(link.sent) == 3


def test_flower_has_the_places_where_the_gate_is_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    command = importlib.import_module("flwr.supernode.cli.flower_supernode")
    loop = importlib.import_module("flwr.supernode.start_client_internal")
    monkeypatch.setattr(command, "start_client_internal", command.start_client_internal)
    monkeypatch.setattr(loop, "_init_connection", loop._init_connection)
    monkeypatch.setattr(command, "uvicorn", uvicorn)
    before = command.start_client_internal
    assert callable(supernode.install(Site(max_upload=4000), Audit(tmp_path), tmp_path))
    assert command.start_client_internal is not before
    assert command.uvicorn.Config(app=None, port=1).http == "h11"
    monkeypatch.delattr(loop, "_init_connection")
    with rejected(DeploymentError, "", "no place", "site's gate"):
        supernode.install(Site(), Audit(tmp_path / "other"), tmp_path)


@pytest.mark.parametrize("value", [b"bytes", [1, 2], None])
@pytest.mark.parametrize("key", ["local-epochs", "no-such-key"])
def test_a_value_of_another_kind_is_one_refusal(tmp_path: Path, link: SuperLink, key: str, value: Any) -> None:
    link.overrides[7] = {key: value}
    _, opened = gate(tmp_path, link, approval="ask")
    link.ask("train")
    assert opened.receive() is None and len(link.errors) == 1 and link.errors[0].startswith("refused/")
    assert ("refusal", "7") in lines(tmp_path)


def test_an_application_has_one_hash() -> None:
    found = application_hash({})
    assert found == application_hash({"method": "fedavg", "local-epochs": 3}) and len(found) == 64


class Started:
    """Flower's loop and state behind a gate: what an application gets for a message."""

    def __init__(self, directory: Path, link: SuperLink, **rules: Any) -> None:
        self.link = link
        self.made, self.opened = gate(directory, link, **rules)
        self.state: Any = InMemoryNodeState(self.made.store)
        self.state.set_node_id(1)
        self.made.known = self.state.get_run

    def ask(self, kind: str, run_id: int) -> Any | None:
        """Return the context with which an application answers a message, or None if it is refused."""
        self.link.content |= parts_of(self.link.ask(kind, run_id))
        taken = loop._pull_and_store_message(
            self.state,
            self.made.store,
            {},
            self.opened.receive,
            self.opened.get_run,
            self.opened.get_fab,
            self.opened.pull_object,
            self.opened.confirm_message_received,
            None,
        )
        if taken is None:
            return None
        (task,) = [one for one in self.state.get_tasks() if one.status.status == Status.PENDING]
        assert self.state.claim_task(task.task_id)
        return runtime_handlers.pull_task_input(None, self.state, task).context


def test_an_application_gets_the_configuration_that_was_judged(tmp_path: Path, link: SuperLink) -> None:
    """Runs of one series have one context in Flower, which the last one has made."""
    link.overrides = {1: {}, 2: {"dp-epsilon": 1.0}}
    link.series = 5
    started = Started(tmp_path, link, max_evaluations=3)
    assert started.ask("evaluate", 1) is not None
    # a confidential run: one question by itself, one by its message
    assert started.ask("evaluate", 2) is not None
    context = started.ask("evaluate", 1)
    assert context is not None
    found = context_from_proto(context)
    assert (found.run_id, found.run_config["dp-epsilon"]) == (1, 0.0)


@pytest.mark.parametrize("led", [0, 1])
def test_a_run_names_no_other_directory_for_its_code(
    tmp_path: Path, link: SuperLink, monkeypatch: pytest.MonkeyPatch, led: int
) -> None:
    """Flower looks for the code at a path that it makes of what the SuperLink calls it."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    (unpacked := tmp_path / "flwr" / "apps" / f"lab.app.1.0.0.{HASH[:8]}").mkdir(parents=True)
    (other := tmp_path / f"other.{HASH[:8]}").mkdir()
    out = f"1.0.0.{HASH[:8]}/../../../other"
    assert get_project_dir("lab/app", out, HASH).resolve() == other
    link.named = ("lab/app", out) if led else ("../../other/app", "1.0.0")
    _, opened = gate(tmp_path, link)
    run = opened.get_run(7)
    assert get_project_dir(run.fab_id, run.fab_version, HASH) == unpacked


def test_a_run_that_the_gate_has_forgotten_is_judged_as_it_started(
    tmp_path: Path, link: SuperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SuperLink that tells another configuration later would have it judged, and the first one answered."""
    monkeypatch.setattr("deploy.gate._MAX_JUDGED", 3)
    link.overrides = {1: {"dp-epsilon": 1.0}, 2: {}, 3: {}, 4: {}}
    started = Started(tmp_path, link, max_evaluations=4)
    assert started.ask("evaluate", 1) is not None
    for run_id in (2, 3, 4):
        assert started.ask("evaluate", run_id) is not None
    link.overrides[1] = {}
    answered = [started.ask("evaluate", 1) is not None for _ in range(5)]
    assert answered == [True, False, False, False, False]
