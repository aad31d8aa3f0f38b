"""A grid whose nodes do what a test says, and an exchange over it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.compat.common import recorddict_compat as compat
from flwr.compat.common.typing import Code, GetPropertiesRes, Status

from fl_app.keys import Scalar
from fl_app.transport.exchange import Exchange
from fl_app.transport.inprocess import InProcessGrid
from tests.conftest import config

SILENT = object()
UNDELIVERED = object()


class FakeGrid(InProcessGrid):
    """nodes: per node id what it answers: properties, an Error, SILENT or UNDELIVERED; a callable is asked each time.

    All answers that are ready come in one pull, in reverse order of sending.
    """

    useful_messages = math.inf

    def __init__(self, nodes: dict[int, Any]) -> None:
        super().__init__(ClientApp(), {}, 0)
        self.nodes = nodes
        self.asked: list[int] = []

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            node = message.metadata.dst_node_id
            self.asked.append(node)
            delivered = self.nodes.get(node, UNDELIVERED) is not UNDELIVERED
            ids += super().push_messages([message]) if delivered else [""]
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for message_id in message_ids:
            message = self._pending.get(message_id)
            answer = self.nodes.get(message.metadata.dst_node_id, SILENT) if message else SILENT
            if callable(answer):
                answer = answer()
            if message is None or answer is SILENT:
                continue
            del self._pending[message_id]
            replies.append(reply_to(message, answer))
        return replies[::-1]


def reply_to(message: Message, answer: Any) -> Message:
    if isinstance(answer, Error):
        reply = Message(answer, reply_to=message)
        # Flower's own error replies come from the SuperLink, not the node
        reply.metadata.__dict__["_src_node_id"] = 1
        return reply
    if isinstance(answer, RecordDict):
        return Message(answer, reply_to=message)
    result = GetPropertiesRes(Status(Code.OK, ""), dict(answer))
    return Message(compat.getpropertiesres_to_recorddict(result), reply_to=message)


def properties(client_id: Any, num_clients: Any = 3, **more: Scalar) -> dict[str, Any]:
    data = {"in-channels": 1, "image-size": 8, "num-classes": 10, "train-samples": 5, "test-samples": 2}
    return {"client-id": client_id, "num-clients": num_clients, **data, **more}


def exchange(nodes: dict[int, Any], progress: Callable[..., None] = lambda *a: None, **changes: Any) -> Exchange:
    fields = {"num_clients": 3, "available_timeout": 0.05, "round_timeout": 0.05} | changes
    return Exchange(FakeGrid(nodes), config(**fields), progress)


def three() -> dict[int, Any]:
    return {50: properties(2), 77: properties(0), 91: properties(1)}
