"""What a hostile application sends to its SuperNode stays small in memory, over Flower's own HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import multiprocessing
import select
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.common.serde import context_to_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.runtime_pb2 import (
    PushAppMessagesRequest,
    PushTaskEventsRequest,
    PushTaskOutputRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import main as flower
from flwr.supernode.nodestate import NodeStateFactory
from flwr.supernode.runtime.run_clientapp import push_message

from deploy.unanswered import Answering, Arriving
from tests.conftest import wait_for

RUN, LIMIT = 7, 1_000_000
MOST = 32 * LIMIT
"""A request has a few forms in memory, one after the other, and a hundred connections have buffers. Attacks send more."""


class Node:
    """A SuperNode's HTTP server with one message, and an application's connection to it."""

    def __init__(self, limit: int | None = LIMIT) -> None:
        factory = NodeStateFactory(objectstore_factory=ObjectStoreFactory())
        self.state: Any = factory.state()
        self.store = factory.objectstore_factory.store()
        self.arriving = Arriving(limit)
        self.arriving.bound(self.state)
        Answering(self.state, lambda: None, lambda reply: None, lambda reply, tree: self.admits(tree))
        config = self.arriving.config(uvicorn.Config)
        app = flower.create_app(state_factory=factory)
        self.server = uvicorn.Server(config(app=app, host="127.0.0.1", port=0, log_level="error"))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        wait_for(lambda: self.server.started, 20)
        self.address = self.server.servers[0].sockets[0].getsockname()
        self.begin()

    def admits(self, tree: ObjectTree) -> bool:
        return self.arriving.takes_parts(len([*nodes(tree)]))

    def begin(self) -> None:
        """Flower's loop has dealt with a message and takes the next one; a process takes its task."""
        self.arriving.begin()
        self.state.delete_messages()
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 0, RUN, 0
        self.asked = Message(RecordDict(), dst_node_id=1, message_type="train")
        self.asked.metadata.__dict__["_message_id"] = self.asked.object_id
        task = self.state.create_task(task_type=TaskType.CLIENT_APP, run_id=RUN)
        token = self.state.claim_task(task)
        assert token and self.state.activate_task(task)
        runtime = importlib.import_module("flwr.supercore.runtime.runtime_http_client")
        interceptors = importlib.import_module("flwr.supernode.runtime.run_clientapp")
        self.client = runtime.RuntimeHttpClient.from_server_address(
            server_address="{}:{}".format(*self.address),
            insecure=True,
            root_certificates=None,
            interceptors=[
                interceptors.RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
                interceptors.RuntimeTokenHttpInterceptor(token),
            ],
        )

    def reply(self, floats: int) -> Message:
        reply = Message(RecordDict({"a": ArrayRecord([np.zeros(floats, np.float32)])}), reply_to=self.asked)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        return reply

    def push(self, reply: Message) -> None:
        """Send a reply as an honest application does."""
        push_message(self.client, reply, type("Context", (), {"run_id": RUN, "node_id": 1})())  # type: ignore[arg-type]

    def holds(self, reply: Message) -> bool:
        return all(self.store.get(name) for name in get_all_nested_objects(reply))


def nodes(tree: ObjectTree) -> Iterator[ObjectTree]:
    yield tree
    for child in tree.children:
        yield from nodes(child)


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.server.should_exit = True
    made.thread.join(20)
    assert not made.thread.is_alive()


def a_request_without_end(node: Node) -> None:
    pieces = (bytes(1 << 16) for _ in range(600))
    with contextlib.suppress(httpx.TransportError):
        answer = httpx.post("http://{}:{}/v1/runtime/pull-messages".format(*node.address), content=pieces)
        assert answer.status_code == 413


def headers_without_end(node: Node) -> None:
    with socket.create_connection(node.address) as connection, contextlib.suppress(OSError):
        connection.sendall(b"POST /v1/runtime/push-object HTTP/1.1\r\nx: ")
        for _ in range(600):
            connection.sendall(b"a" * (1 << 16))


def many_requests_at_once(node: Node) -> None:
    with contextlib.ExitStack() as opened:
        connections = [opened.enter_context(socket.create_connection(node.address)) for _ in range(100)]
        for connection in connections:
            connection.setblocking(False)
            head = b"POST /v1/runtime/push-object HTTP/1.1\r\nhost: a\r\ncontent-length: 100000000\r\n\r\n"
            with contextlib.suppress(OSError):
                connection.send(head + bytes(1 << 20))
        answered, _, _ = select.select(connections, [], [], 20)
        assert b"413" in answered[0].recv(100)


def many_parts(node: Node) -> None:
    with contextlib.suppress(httpx.HTTPError):
        node.push(node.reply(10 * LIMIT))


def parts_of_many_replies(node: Node) -> None:
    for number in range(40):
        with contextlib.suppress(httpx.HTTPError):
            node.push(node.reply(LIMIT // 4 + number))


def a_list_of_parts_that_never_come(node: Node) -> None:
    for number in range(20):
        tree = ObjectTree(object_id=node.reply(1).object_id)
        tree.children.extend(ObjectTree(object_id=get_object_id(f"{number} {k}".encode())) for k in range(2000))
        message = importlib.import_module("flwr.common.serde").message_to_proto(node.reply(1))
        with contextlib.suppress(httpx.HTTPError):
            node.client.PushMessages(PushAppMessagesRequest(messages_list=[message], message_object_trees=[tree]))


def what_other_applications_send(node: Node) -> None:
    events = PushTaskEventsRequest()
    for _ in range(100):
        events.events.add(event="x", data="y" * 20_000)
    for _ in range(20):
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            node.client.PushTaskEvents(events)


def a_long_reason(node: Node) -> None:
    node.client.PushTaskOutput(PushTaskOutputRequest(sub_status="failed", details="x" * LIMIT))


ATTACKS = [
    a_long_reason,
    a_request_without_end,
    headers_without_end,
    many_requests_at_once,
    many_parts,
    parts_of_many_replies,
    a_list_of_parts_that_never_come,
    what_other_applications_send,
]


def untraced(attack: Any, node: Node) -> None:
    tracemalloc.stop()
    attack(node)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_no_application_fills_its_supernodes_memory(node: Node, attack: Any) -> None:
    """What it sent is dropped when the next message comes, whose reply then arrives."""
    left = []
    tracemalloc.start()
    for _ in range(2):
        # its own memory does not count
        application = multiprocessing.get_context("fork").Process(target=untraced, args=(attack, node))
        application.start()
        application.join(60)
        assert application.exitcode == 0
        # the server notices later that connections have ended
        wait_for(lambda: node.arriving._here == 0, 20)
        node.begin()
        gc.collect()
        left.append(tracemalloc.get_traced_memory()[0])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # tracemalloc does not see what is in protocol buffers
    assert sum(task.ByteSize() for task in node.state.get_tasks()) < LIMIT // 4
    assert len(node.store) == 0 and left[-1] - left[0] < LIMIT // 4 and most < MOST
    node.push(honest := node.reply(LIMIT // 4 - 1000))
    node.client.PushTaskOutput(PushTaskOutputRequest(sub_status="completed"))
    assert node.holds(honest) and not node.arriving.too_much


def test_what_is_half_sent_when_the_next_message_comes_takes_nothing_from_it(node: Node) -> None:
    """A process that an earlier application has left keeps its request open."""
    path = b"POST /v1/runtime/push-object HTTP/1.1\r\nhost: a\r\ncontent-length: 3000000\r\n\r\n"
    with socket.create_connection(node.address) as left:
        left.sendall(path + bytes(2_900_000))
        wait_for(lambda: node.arriving._here > 2_900_000, 20)
        node.begin()
        # the next application takes seconds to start
        wait_for(lambda: node.arriving._here == 0, 20)
        node.push(honest := node.reply(LIMIT // 4 - 1000))
        assert node.holds(honest) and not node.arriving.too_much


def test_pieces_of_one_byte_count_as_the_memory_that_they_take() -> None:
    arriving, answers = Arriving(4000), list[int]()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def send(event: Any) -> None:
        answers.append(event.get("status", 0))

    async def app(*_: Any) -> None:
        raise AssertionError("the request has no end")

    tracemalloc.start()
    asyncio.run(arriving.around(app)({"type": "http", "path": "/push-object"}, receive, send))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert answers == [413, 0] and most < 2 * (1 << 20) and arriving._here == 0


def test_what_applications_leave_is_bounded_over_all_runs(node: Node) -> None:
    def left(run: int) -> int:
        return context_to_proto(node.state.get_run_series_context(run)).ByteSize()

    for run in range(10):
        own = ArrayRecord([np.full(LIMIT // 8, run, np.float32)])
        node.state.set_run_series_context(run, Context(run, 1, {}, RecordDict(), {"key": run}))
        node.state.set_run_series_context(run, Context(run, 1, {}, RecordDict({"own": own}), {"key": run}))
        # every run has what Flower gives it
        assert node.state.get_run_series_context(run).run_config == {"key": run}
    assert left(0) > LIMIT // 2 and sum(map(left, range(10))) < 2 * LIMIT + (1 << 20) + 10_000
    # and may replace its own
    node.state.set_run_series_context(0, Context(0, 1, {}, RecordDict(), {"key": "new"}))
    assert node.state.get_run_series_context(0).run_config == {"key": "new"}


def test_without_a_limit_nothing_is_refused() -> None:
    assert Arriving().config(uvicorn.Config) is uvicorn.Config and Arriving().takes_parts(10**9)
