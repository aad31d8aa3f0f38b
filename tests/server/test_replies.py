"""Replies fetched one by one, over a SuperLink of three dictionaries whose calls and objects are Flower's own."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto import message_pb2, runtime_pb2
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from fl_app.errors import UserError
from fl_app.transport import replies
from fl_app.transport.inprocess import InProcessGrid
from fl_app.transport.replies import Answer, Inbox
from fl_app.transport.wire import WireError
from tests.facts import mentions, rejected
from tests.hostile.supernode import packed


class Client:
    """The Runtime API's three calls."""

    def __init__(self) -> None:
        # by the id of the message they answer: envelope and tree, or what to raise
        self.replies: dict[str, Any] = {}
        self.objects: dict[str, bytes] = {}
        self.confirmed: list[str] = []

    def PullMessages(self, request: Any) -> Any:
        found = [self.replies.pop(name) for name in request.message_ids if name in self.replies]
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return runtime_pb2.PullAppMessagesResponse(
            messages_list=[envelope for envelope, _ in found], message_object_trees=[tree for _, tree in found]
        )

    def PullObject(self, request: Any) -> Any:
        content = self.objects.get(request.object_id, b"")
        return message_pb2.PullObjectResponse(object_found=True, object_available=bool(content), object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> Any:
        self.confirmed.append(request.message_object_id)


class Grid(HttpGrid):
    def __init__(self) -> None:
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 0  # messages carry them
        super().__init__(token="x")
        self._client = Client()  # type: ignore[assignment]
        self.set_run(Run.create_empty(7))


def add(
    client: Client,
    answers: str,
    content: RecordDict | Error,
    spoil: Callable[[dict[str, bytes]], object] = lambda objects: None,
) -> None:
    """Put a reply to a message on the SuperLink, whose body says that it answers another one."""
    asked = Message(RecordDict(), 5, "train")
    asked.metadata.__dict__["_message_id"] = "another"
    reply = Message(content, reply_to=asked)
    objects = {name: found.deflate() for name, found in get_all_nested_objects(reply).items()}
    envelope = message_to_proto(remove_content_from_message(reply))
    envelope.metadata.message_id, envelope.metadata.reply_to_message_id = reply.object_id, answers
    client.replies[answers] = envelope, get_object_tree(reply)
    spoil(objects)
    client.objects |= objects


def records(text: str = "x") -> RecordDict:
    return RecordDict({"c": ConfigRecord({"text": text})})


def take(inbox: Inbox, count: int) -> dict[str, Answer]:
    answers: list[Answer] = []
    deadline = time.monotonic() + 20
    while len(answers) < count and time.monotonic() < deadline:
        answers += inbox.take(0.01)
    return {answer.message_id: answer for answer in answers}


@pytest.fixture
def grid() -> Grid:
    return Grid()


@pytest.fixture
def client(grid: Grid) -> Client:
    found: Any = grid._client
    return found  # type: ignore[no-any-return]


@pytest.fixture
def inbox(grid: Grid) -> Inbox:
    link = replies.connect(grid)
    assert link is not None
    return Inbox(grid, link)


def test_whom_a_reply_answers_is_what_the_superlink_says(inbox: Inbox, client: Client) -> None:
    for name in ("a", "b"):
        add(client, name, records(name))
        inbox.expect(name, 10)
    answers = take(inbox, 2)
    assert {name: answer.content["c"]["text"] for name, answer in answers.items()} == {"a": "a", "b": "b"}  # type: ignore[index]
    assert len(client.confirmed) == 2


def test_a_malformed_reply_is_its_own_affair(inbox: Inbox, client: Client) -> None:
    def spoil(objects: dict[str, bytes]) -> None:
        for name, content in objects.items():
            if content.startswith(b"RecordDict"):
                objects[name] = content.partition(b"\0")[0] + b"\0{{{{"

    add(client, "bad", records("bad"), spoil)
    add(client, "good", records())
    client.replies["worse"] = ValueError("Invalid protobuf response payload")
    for name in ("bad", "good", "worse"):
        inbox.expect(name, 10)
    answers = take(inbox, 3)
    assert answers["good"].content is not None and answers["bad"].kind == answers["worse"].kind == "malformed"
    assert answers["bad"].cause.startswith("malformed reply: JSONDecodeError")
    assert mentions(answers["worse"].cause, "malformed reply", "ValueError", "Invalid protobuf response")
    # what cannot be read is not kept either
    assert len(client.confirmed) == 2


def test_a_reply_that_is_never_complete_holds_nobody_up(
    inbox: Inbox, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "_FETCH_SECONDS", 0.5)
    add(client, "slow", records("slow"), lambda objects: objects.pop(next(iter(objects))))
    add(client, "quick", records("quick"))
    inbox.expect("slow", 0.5)
    inbox.expect("quick", 10)
    inbox.expect("silent", 0.5)
    answers = take(inbox, 3)
    assert next(iter(answers)) == "quick"
    assert mentions(answers["slow"].cause, "reply was not", "complete within 0.5 s")
    assert answers["silent"].cause == "no reply within 0.5 s" and answers["silent"].kind == "late"


def test_an_error_is_told_on_one_plain_line(inbox: Inbox, client: Client) -> None:
    add(client, "a", Error(8, "boom\n\x1b[31mcorolla: \x9berror"))
    inbox.expect("a", 10)
    answer = take(inbox, 1)["a"]
    assert answer.cause == "error 8: boom [31mcorolla: error" and answer.reason == "boom [31mcorolla: error"


def test_an_ended_run_is_not_a_client_s_failure(inbox: Inbox, client: Client) -> None:
    client.replies["a"] = replies.RUN_ENDED()
    inbox.expect("a", 10)
    with pytest.raises(replies.RUN_ENDED):
        take(inbox, 1)


def test_too_many_objects_and_too_deep_ones_are_not_fetched() -> None:
    def tree(depth: int) -> message_pb2.ObjectTree:
        return message_pb2.ObjectTree(object_id=str(depth), children=[tree(depth - 1)] if depth > 1 else [])

    assert replies.object_ids(tree(replies.MAX_DEPTH)) == [str(k) for k in range(replies.MAX_DEPTH, 0, -1)]
    with rejected(WireError, "", "nested more than 8", "deep"):
        replies.object_ids(tree(replies.MAX_DEPTH + 1))
    wide = [message_pb2.ObjectTree(object_id="same")] * replies.MAX_OBJECTS
    with pytest.raises(WireError, match="more than 10000 objects"):
        replies.object_ids(message_pb2.ObjectTree(object_id="0", children=wide))


def test_objects_that_name_each_other_in_a_row() -> None:
    contents, name = {}, ""
    for _ in range(replies.MAX_DEPTH + 1):
        content = packed("RecordDict", b"{}", [name] if name else [])
        name = hashlib.sha256(content).hexdigest()
        contents[name] = content
    with rejected(WireError, "", "nested more than 8", "deep"):
        replies.check_nesting(name, contents)
    del contents[next(iter(contents))]
    contents.pop(next(iter(contents)))
    with rejected(WireError, "", "names 1", "does not have"):
        replies.check_nesting(name, contents)


def test_records_that_are_too_large_are_not_read(inbox: Inbox, client: Client) -> None:
    add(client, "a", records("x" * 1_000_000))
    add(client, "b", records())
    add(client, "c", records("x" * 500_000))
    for name in "abc":
        inbox.expect(name, 30)
    answers = take(inbox, 3)
    assert answers["b"].content is not None and answers["c"].content is not None
    assert answers["a"].kind == "malformed" and mentions(answers["a"].cause, "bytes", "most 1000000 are read")


def test_flower_s_own_way_is_taken_where_its_insides_have_changed(
    grid: Grid, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies.log, "propagate", True)
    caplog.set_level("WARNING", replies.log.name)
    monkeypatch.setattr(Client, "PullObject", lambda self, request, node: None)
    assert replies.connect(grid) is None
    assert mentions(caplog.text, "fetches replies", "another way") and mentions(
        caplog.text, "takes ['request', 'node']", "expected ['request']"
    )
    assert Inbox(grid).take(0) == []


def test_one_process_has_no_superlink(caplog: pytest.LogCaptureFixture) -> None:
    grid: Any = InProcessGrid(None, {}, 0)  # type: ignore[arg-type]
    assert replies.connect(grid) is None and replies.has_fixed_nodes(grid) and not caplog.text
    assert threading.active_count() < 50


def refused() -> httpx.ConnectError:
    """Return the error of Flower's calls after the SuperLink's certificate has expired."""
    return httpx.ConnectError(
        "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired (_ssl.c:1006)"
    )


def test_a_certificate_that_expires_is_named_and_no_client_is_blamed(inbox: Inbox, client: Client) -> None:
    client.replies["a"] = refused()
    inbox.expect("a", 10)
    with rejected(UserError, "", "certificate cannot be", "trusted", "certificate has expired"):
        take(inbox, 1)


def test_it_is_named_too_if_it_expires_while_a_reply_is_fetched(
    inbox: Inbox, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(request: Any) -> Any:
        raise refused()

    add(client, "a", records())
    monkeypatch.setattr(client, "ConfirmMessageReceived", broken)
    monkeypatch.setattr(client, "PullObject", broken)
    grid = Grid()
    grid._client = client  # type: ignore[assignment]
    link = replies.connect(grid)
    assert link is not None
    fetching = Inbox(grid, link)
    fetching.expect("a", 10)
    with pytest.raises(UserError, match="certificate has expired"):
        take(fetching, 1)


def test_another_fault_of_the_connection_is_raised_as_it_is(inbox: Inbox, client: Client) -> None:
    client.replies["a"] = httpx.ConnectError("no route")
    inbox.expect("a", 10)
    with pytest.raises(httpx.ConnectError, match="no route"):
        take(inbox, 1)
