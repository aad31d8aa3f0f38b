"""Every message gets a reply, whatever its process does; the process that starts applications is started again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal as loop
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from deploy import unanswered
from deploy.unanswered import Answering, Kept
from tests.conftest import wait_for

RUN = 7


class Node:
    """A SuperNode's state with one message, as Flower's loop leaves it when it begins to wait for the reply."""

    def __init__(self, answers: bool = True) -> None:
        store = InMemoryObjectStore()
        self.state: Any = InMemoryNodeState(store)
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 0, RUN, 0
        self.message = Message(RecordDict(), dst_node_id=1, message_type="train")
        self.message.metadata.__dict__["_message_id"] = self.message.object_id
        insert: Callable[[Message], None] = lambda reply: loop._insert_message(reply, self.state, store)  # noqa: E731

        def admits(reply: Message, tree: ObjectTree) -> bool:
            return reply.metadata.reply_to_message_id == self.message.object_id

        self.answering = Answering(self.state, lambda: self.message, insert, admits) if answers else None
        self.task: int = self.state.create_task(task_type=TaskType.CLIENT_APP, run_id=RUN)
        self.state.store_message(self.message)
        self.insert = insert

    def replies(self) -> list[Message]:
        """What the loop gets when it asks for replies."""
        return self.messages(is_reply=True)

    def messages(self, **named: Any) -> list[Message]:
        getter = next(name for name in unanswered._GETTERS if hasattr(self.state, name))
        return list(getattr(self.state, getter)(**named))

    def begin(self) -> None:
        """The process makes its first call."""
        assert self.state.claim_task(self.task) and self.state.activate_task(self.task)


def fails_before_it_has_the_message(node: Node) -> None:
    node.begin()
    node.state.finish_task(node.task, SubStatus.FAILED, "Failed to start task.")


def fails_with_the_message(node: Node) -> None:
    node.begin()
    node.messages(run_ids=[RUN], is_reply=False, limit=1)
    node.state.finish_task(node.task, SubStatus.FAILED, "Task stopped.")


def ends_as_if_all_were_well(node: Node) -> None:
    node.begin()
    node.state.finish_task(node.task, SubStatus.COMPLETED, "")


def falls_silent_before_it_has_the_message(node: Node) -> None:
    node.begin()
    record = node.state.task_token_store[node.task]
    record.active_until = record.active_until.replace(year=2000)


ENDS = [
    fails_before_it_has_the_message,
    fails_with_the_message,
    ends_as_if_all_were_well,
    falls_silent_before_it_has_the_message,
]


@pytest.mark.parametrize("end", ENDS)
def test_a_process_that_ends_without_a_reply_is_answered_for(end: Callable[[Node], None]) -> None:
    flowers = Node(answers=False)
    end(flowers)
    assert flowers.replies() == [], "Flower answers itself: deploy.unanswered can go"
    node = Node()
    assert node.replies() == []
    end(node)
    (reply,) = node.replies()
    assert reply.error.code == ErrorCode.CLIENT_APP_CRASHED and unanswered.REASON in reply.error.reason
    assert reply.metadata.reply_to_message_id == node.message.metadata.message_id
    assert node.replies() == []


def test_a_reply_is_never_replaced() -> None:
    node = Node()
    node.begin()
    node.insert(Message(RecordDict(), reply_to=node.message))
    node.state.finish_task(node.task, SubStatus.COMPLETED, "")
    (reply,) = node.replies()
    assert not reply.has_error()


@pytest.mark.parametrize("answers", ["another message", "deletes its parts"])
def test_what_is_no_reply_does_not_end_the_node_and_the_message_is_answered(answers: str) -> None:
    node = Node()
    node.begin()
    reply = Message(RecordDict(), reply_to=node.message)
    if answers == "another message":
        reply.metadata.__dict__["_reply_to_message_id"] = "ab" * 32
    reply.metadata.__dict__["_message_id"] = reply.object_id
    stored, _ = node.state.store_message_and_object_tree(reply, get_object_tree(reply), node.state.start_session(RUN))
    assert stored == (answers != "another message")
    node.state.object_store.delete(reply.object_id)
    node.state.finish_task(node.task, SubStatus.COMPLETED, "")
    (found,) = node.replies()
    assert found.has_error() == (answers == "another message")
    # Flower's loop asks for it, and ends if it raises an error
    assert node.state.object_store.get_object_tree(found.metadata.message_id).object_id == found.metadata.message_id


def test_a_process_that_works_is_waited_for() -> None:
    node = Node()
    node.begin()
    assert node.answering is not None and node.answering.working() and node.replies() == []
    node.answering.give_up()
    assert not node.answering.working() and len(node.replies()) == 1


def test_a_task_that_waits_for_its_process_is_left_to_the_next_one() -> None:
    node = Node()
    assert node.answering is not None
    node.answering.give_up()
    assert node.answering.working() and node.replies() == []


def test_what_starts_applications_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unanswered, "_FIRST_WAIT", 0.0)
    started, ended, enough = list[str](), list[str](), threading.Event()

    class Ended:
        def kill(self) -> None:
            """It has ended."""

        terminate = kill

        def wait(self) -> int:
            if len(started) > 3:
                enough.set()
                threading.Event().wait()
            return 1

    def start() -> Ended:
        started.append(threading.current_thread().name)
        if len(started) == 1:
            raise OSError("no memory")
        return Ended()

    unanswered.Kept(start, lambda: ended.append("ended"))
    assert enough.wait(30)
    # by one thread, with whose end the kernel would end the process
    assert len(set(started)) == 1 and len(ended) == 3


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which tests set."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def stopped(monkeypatch: pytest.MonkeyPatch) -> tuple[Node, list[threading.Event]]:
    """Return a node whose processes end when they are killed, and for each process when that is."""
    monkeypatch.setattr(unanswered, "_PATIENCE", 10.0)
    monkeypatch.setattr(unanswered, "_FIRST_WAIT", 0.0)
    ended = list[threading.Event]()

    class Stopped:
        def __init__(self) -> None:
            ended.append(threading.Event())

        def kill(self) -> None:
            ended[-1].set()

        terminate = kill

        def wait(self) -> int:
            ended[-1].wait()
            return -9

    node = Node()
    assert node.answering is not None
    node.answering.end_superexec = Kept(Stopped, node.answering.give_up).end
    return node, ended


def test_a_process_that_takes_no_task_is_ended_and_started_again(
    monkeypatch: pytest.MonkeyPatch, now: list[float]
) -> None:
    """An application may stop it, and a stopped process never ends."""
    node, ended = stopped(monkeypatch)
    assert node.answering is not None
    for _ in range(3):
        assert node.replies() == [] and not ended[0].is_set()
        now[0] += 3.0
    # this node itself was stopped for an hour
    now[0] += 3600.0
    assert node.replies() == [] and ended[0].is_set()
    assert ended[0].wait(10)
    wait_for(lambda: len(ended) == 2, 20)
    assert node.answering.working()
    node.begin()
    now[0] += 3600.0
    assert node.replies() == [] and not ended[1].is_set()


def test_a_process_that_works_on_an_expired_message_is_ended_and_answered_for(
    monkeypatch: pytest.MonkeyPatch, now: list[float]
) -> None:
    """It may hang and send heartbeats all the same. No server waits any longer, and other runs wait for the node."""
    node, ended = stopped(monkeypatch)
    assert node.answering is not None
    node.begin()
    now[0] += node.message.metadata.ttl - 1.0
    assert node.replies() == [] and not ended[0].is_set()
    now[0] += 2.0
    node.replies()
    assert ended[0].is_set()
    wait_for(lambda: not node.answering.working(), 20)
    (reply,) = node.replies()
    assert reply.has_error()
