"""Debug mode: the same ServerApp and ClientApp joined by a Grid that calls the ClientApp directly.

No Ray, no SuperLink, one process, one client after the other: breakpoints and tracebacks work. Messages are the same records
as over the wire, so digests equal the simulation's.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterable, Mapping

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fl_app.keys import Scalar
from fl_app.wire import PRIVATE_KEYS, SEED_KEYS

_runs = itertools.count(1)


class InProcessGrid(Grid):
    """num_clients virtual nodes; a message is handled when its reply is pulled, one per pull."""

    def __init__(
        self,
        client_app: ClientApp,
        run_config: Mapping[str, Scalar],
        num_clients: int,
        node_configs: Mapping[int, Mapping[str, Scalar]] | None = None,
    ) -> None:
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 0  # messages carry them
        self._client_app = client_app
        self._contexts: dict[int, Context] = {}
        run = next(_runs)
        for client_id in range(num_clients):
            node_config: dict[str, Scalar] = {"partition-id": client_id, "num-partitions": num_clients}
            node_config[PRIVATE_KEYS] = SEED_KEYS
            node_config |= (node_configs or {}).get(client_id, {})
            self._contexts[client_id + 1] = Context(run, client_id + 1, node_config, RecordDict(), dict(run_config))
        self._pending: dict[str, Message] = {}
        self._sent = 0

    def set_run(self, run: Run) -> None:
        """Do nothing: there is only one run."""

    @property
    def run(self) -> Run:
        """Not available here."""
        raise NotImplementedError("the in-process grid has no Run")

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Build a message."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Node ids, client id + 1."""
        return list(self._contexts)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Nodes."""
        return [NodeInfo(node_id=node) for node in self._contexts]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue messages."""
        ids = []
        for message in messages:
            self._sent += 1
            message.metadata.__dict__["_message_id"] = str(self._sent)
            self._pending[str(self._sent)] = message
            ids.append(str(self._sent))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Let the ClientApp handle the first of the named messages and return its reply."""
        for message_id in message_ids:
            message = self._pending.pop(message_id, None)
            if message is not None:
                return [self._handle(message)]
        return []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Handle messages one after the other; there is no timeout in one process."""
        return [reply for i in self.push_messages(messages) for reply in self.pull_messages([i])]

    def _handle(self, message: Message) -> Message:
        try:
            return self._client_app(message, self._contexts[message.metadata.dst_node_id])
        except Exception:
            return Message(Error(0, traceback.format_exc()), reply_to=message)
