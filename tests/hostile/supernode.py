"""A SuperNode in a few lines: Flower's Fleet API over its real transport, the real ClientApp here, and every byte it sends open.

What it answers is a `Reply`: as the ClientApp made it, or altered by an attack, as records (`content`) or as the objects that
travel (`objects`, `tree`, `envelope`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import threading
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
import httpx
from flwr.app import Context, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.config import get_fused_config_from_dir
from flwr.common.serde import message_from_proto, message_to_proto, run_from_proto
from flwr.proto import fleet_pb2, fleet_pb2_grpc, heartbeat_pb2, message_pb2, node_pb2, run_pb2
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_children_ids_from_object_content,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.task_identity import TaskIdentity

from client_app.client_app import app as client_app
from deploy.superlink import serves_grpc

ROOT = Path(__file__).resolve().parents[2]
POLL_SECONDS = 0.3
# as a real SuperNode, which sends again what did not arrive
_ATTEMPTS = 5
_AGAIN = {
    "maxAttempts": _ATTEMPTS,
    "initialBackoff": "0.1s",
    "maxBackoff": "2s",
    "backoffMultiplier": 3,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
_OPTIONS = [("grpc.service_config", json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": _AGAIN}]}))]
_SECONDS = 600.0
# the run is over, or the SuperLink refuses an attack
REFUSED = grpc.RpcError, httpx.HTTPError
# the ClientApps of all nodes are in this process
_ONE_AT_A_TIME = threading.Lock()


class Reply:
    """A reply before it is sent. Alter `content`, or, from the first look at `objects` on, what travels.

    objects: contents by id, children before those that name them; root: the message's. tree: of ids, as announced. envelope:
    the message without content, which the SuperLink reads. withheld: ids of objects that are announced and never sent. unasked:
    messages sent before it. delay: seconds to wait before sending. pause: seconds to wait before each object.
    """

    def __init__(self, message: Message) -> None:
        self.message = message
        self.withheld: set[str] = set()
        self.unasked: list[Any] = []
        self.delay = self.pause = 0.0
        self._objects: dict[str, bytes] | None = None
        self._tree: message_pb2.ObjectTree | None = None

    @property
    def content(self) -> RecordDict:
        """The records."""
        return self.message.content

    @property
    def objects(self) -> dict[str, bytes]:
        """What travels."""
        if self._objects is None:
            self._objects = {name: found.deflate() for name, found in get_all_nested_objects(self.message).items()}
            self.envelope = message_to_proto(remove_content_from_message(self.message))
            self.envelope.metadata.message_id = self.message.object_id
        return self._objects

    @property
    def root(self) -> str:
        """Id of the message's object."""
        assert self.objects is not None
        return str(self.envelope.metadata.message_id)

    @root.setter
    def root(self, name: str) -> None:
        self.envelope.metadata.message_id = name

    @property
    def tree(self) -> message_pb2.ObjectTree:
        """The ids as announced; as the objects' heads say unless it was set."""
        return self._tree or tree_of(self.root, self.objects)

    @tree.setter
    def tree(self, tree: message_pb2.ObjectTree) -> None:
        self._tree = tree

    def first(self, kind: str) -> str:
        """Return the id of the first object of a kind ("RecordDict", "Array", ...)."""
        return next(name for name, content in self.objects.items() if content.startswith(f"{kind} ".encode()))

    def add(self, content: bytes) -> str:
        """Add an object and return its id."""
        name = hashlib.sha256(content).hexdigest()
        self.objects[name] = content
        return name

    def replace(self, name: str, content: bytes) -> None:
        """Put another content in an object's place; those that name it name the new one."""
        del self.objects[name]
        new = self.add(content)
        if name == self.root:
            self.root = new
        for other, found in list(self.objects.items()):
            if name.encode() in found and other in self.objects:
                self.replace(other, found.replace(name.encode(), new.encode()))

    def body(self, kind: str, body: bytes) -> None:
        """Give the first object of a kind another body, with the children it has."""
        name = self.first(kind)
        self.replace(name, packed(kind, body, get_object_children_ids_from_object_content(self.objects[name])))


def packed(kind: str, body: bytes, children: Any = ()) -> bytes:
    """Return an object as it travels."""
    return f"{kind} {','.join(children)} {len(body)}".encode() + b"\0" + body


def tree_of(name: str, objects: Mapping[str, bytes]) -> message_pb2.ObjectTree:
    """Return the tree that the heads of objects say."""
    children = dict.fromkeys(get_object_children_ids_from_object_content(objects[name])) if name in objects else {}
    return message_pb2.ObjectTree(object_id=name, children=[tree_of(child, objects) for child in children])


class SuperNode:
    """A node with a key of its own, connected until `stop`. alter(reply, message) changes what it sends; None sends nothing.

    once: it asks for no more messages after its first. trouble: what went wrong here; refused: what the SuperLink said no to, each
    a message without an answer.
    """

    def __init__(
        self,
        fleet: str,
        partition: Mapping[str, int | str],
        alter: Callable[[Reply, Message], Reply | None] | None = None,
        once: bool = False,
    ) -> None:
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 0
        self._partition, self._alter, self._once = dict(partition), alter, once
        self._private, public = generate_key_pairs()
        self._public = public_key_to_bytes(public)
        self._stub, self._close = connect(fleet, self._private, public)
        self._configs: dict[int, dict[str, Any]] = {}
        self._ended = threading.Event()
        self.trouble: list[BaseException] = []
        self.refused: list[Exception] = []
        self._stub.RegisterNode(fleet_pb2.RegisterNodeFleetRequest(public_key=self._public))
        activated = self._stub.ActivateNode(
            fleet_pb2.ActivateNodeRequest(public_key=self._public, heartbeat_interval=60)
        )
        self.node = node_pb2.Node(node_id=activated.node_id)
        self._threads = [
            threading.Thread(target=self._serve, daemon=True),
            threading.Thread(target=self._beat, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Disconnect."""
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=60)
        with contextlib.suppress(*REFUSED):
            self._stub.DeactivateNode(fleet_pb2.DeactivateNodeRequest(node_id=self.node.node_id))
            self._stub.UnregisterNode(fleet_pb2.UnregisterNodeFleetRequest(node_id=self.node.node_id))
        self._close()

    def _beat(self) -> None:
        while not self._ended.wait(20):
            with contextlib.suppress(*REFUSED):
                self._stub.SendNodeHeartbeat(
                    heartbeat_pb2.SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=60)
                )

    def _serve(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            try:
                pulled = self._stub.PullMessages(fleet_pb2.PullMessagesRequest(node=self.node))
                for announced, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
                    self._answer(self._receive(message_from_proto(announced), tree))
                    if self._once:
                        return
            except REFUSED as error:
                self.refused.append(error)
            except Exception as error:
                self.trouble.append(error)

    def _receive(self, announced: Message, tree: message_pb2.ObjectTree) -> Message:
        run_id, contents, todo = announced.metadata.run_id, {}, [tree]
        while todo:
            at = todo.pop()
            todo += at.children
            request = message_pb2.PullObjectRequest(node=self.node, run_id=run_id, object_id=at.object_id)
            response = self._stub.PullObject(request)
            while not response.object_available and not self._ended.wait(0.05):
                response = self._stub.PullObject(request)
            contents[at.object_id] = response.object_content
        message_id = announced.metadata.message_id
        message = inflate_object_from_contents(message_id, contents)
        assert isinstance(message, Message)
        message.metadata.__dict__["_message_id"] = message_id
        confirm = message_pb2.ConfirmMessageReceivedRequest(node=self.node, run_id=run_id, message_object_id=message_id)
        self._stub.ConfirmMessageReceived(confirm)
        return message

    def _answer(self, message: Message) -> None:
        run_id = message.metadata.run_id
        if run_id not in self._configs:
            run = run_from_proto(self._stub.GetRun(run_pb2.GetRunRequest(node=self.node, run_id=run_id)).run)
            self._configs[run_id] = get_fused_config_from_dir(ROOT, run.override_config)
        context = Context(run_id, self.node.node_id, dict(self._partition), RecordDict(), self._configs[run_id])
        with _ONE_AT_A_TIME:
            made = client_app(message, context)
        made.metadata.__dict__["_src_node_id"] = self.node.node_id
        reply: Reply | None = Reply(made)
        if self._alter is not None:
            reply = self._alter(Reply(made), message)
        if reply is not None:
            self._ended.wait(reply.delay)
            self._send(reply, run_id)

    def _send(self, reply: Reply, run_id: int) -> None:
        # before the envelope is read
        objects = reply.objects
        for envelope, tree in [*reply.unasked, (reply.envelope, reply.tree)]:
            pushed = self._stub.PushMessages(
                fleet_pb2.PushMessagesRequest(
                    node=self.node, messages_list=[envelope], message_object_trees=[tree], clientapp_runtime_list=[1.0]
                )
            )
            for name in pushed.objects_to_push:
                if name in objects and name not in reply.withheld:
                    self._ended.wait(reply.pause)
                    request = message_pb2.PushObjectRequest(node=self.node, run_id=run_id, session_id=pushed.session_id)
                    request.object_id, request.object_content = name, objects[name]
                    self._stub.PushObject(request)


def connect(fleet: str, private: Any, public: Any) -> tuple[Any, Callable[[], None]]:
    """Return a client of Flower's Fleet API, by the transport of the Flower that is installed, and what closes it."""
    if serves_grpc(metadata.version("flwr")):
        module = importlib.import_module("flwr.client.grpc_rere_client.node_auth_client_interceptor")
        signed = module.NodeAuthClientInterceptor(private, public)
        channel = grpc.intercept_channel(grpc.insecure_channel(fleet, _OPTIONS), signed)
        return fleet_pb2_grpc.FleetStub(channel), channel.close
    signed = importlib.import_module("flwr.supernode.node_auth_http_interceptor").NodeAuthHttpInterceptor(
        private, public
    )
    retry = importlib.import_module("flwr.supercore.retry")
    again = retry.RetryInvoker(retry.exponential, httpx.TransportError, max_tries=_ATTEMPTS, max_time=None)
    module = importlib.import_module("flwr.supernode.fleet_http_client")
    client = module.FleetHttpClient(f"http://{fleet}", interceptors=[signed], timeout=_SECONDS, retry_invoker=again)
    return client, client.close
