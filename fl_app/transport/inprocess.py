"""In-process mode: the same ServerApp and ClientApp, joined by a Grid that calls the ClientApp directly.

There is one process, without Ray or a SuperLink. By default clients run one after the other, so that breakpoints and
tracebacks work. Messages are the same records as over the wire, so digests equal the simulation's.
"""

from __future__ import annotations

import itertools
import math
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fl_app.keys import Scalar
from fl_app.transport.wire import IN_PROCESS, simulated_node

_runs = itertools.count(1)

Answer = Callable[[Iterable[Callable[[], Message]]], list[Message]]


def first(tasks: Iterable[Callable[[], Message]]) -> list[Message]:
    """Run the first task, if there is one, and return its reply in a list."""
    for task in tasks:
        return [task()]
    return []


class InProcessGrid(Grid):
    """A grid of num_clients virtual nodes. A message is handled when its reply is pulled.

    answer: takes tasks, one for each waiting message. It runs as many as it takes, and returns their replies in order.
    """

    def __init__(
        self,
        client_app: ClientApp,
        run_config: Mapping[str, Scalar],
        num_clients: int,
        node_configs: Mapping[int, Mapping[str, Scalar]] | None = None,
        answer: Answer = first,
    ) -> None:
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 0  # messages carry them
        self._client_app, self._answer = client_app, answer
        self._run, self._run_config, self._num_clients = next(_runs), dict(run_config), num_clients
        self._node_configs = node_configs or {}
        # node id -> context, of nodes that had a message
        self._contexts: dict[int, Context] = {}
        self._pending: dict[str, Message] = {}
        self._sent = 0

    # clients that train at the same time, each with its own copies of the model in this machine's memory
    clients_at_once = 1

    @property
    def useful_messages(self) -> float:
        """The number of unanswered messages that keeps the clients busy. More would only take memory."""
        return 1 if self._answer is first else math.inf

    def set_run(self, run: Run) -> None:
        """Do nothing: there is only one run."""

    @property
    def run(self) -> Run:
        """The run, of which only its number is known."""
        return Run.create_empty(self._run)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Build a message."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the node ids, client id + 1."""
        return list(range(1, self._num_clients + 1))

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the nodes."""
        return [NodeInfo(node_id=node) for node in self.get_node_ids()]

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
        """Let the ClientApp handle the first of the named messages, or as many as `answer` takes.

        Return the replies.
        """
        found = (self._pending.pop(name, None) for name in message_ids)
        return self._answer(partial(self._handle, message) for message in found if message is not None)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Handle messages one after the other. There is no timeout in one process."""
        return [reply for i in self.push_messages(messages) for reply in self.pull_messages([i])]

    def _handle(self, message: Message) -> Message:
        try:
            return self._client_app(message, self._context(message.metadata.dst_node_id))
        except Exception:
            return Message(Error(0, traceback.format_exc()), reply_to=message)

    def _context(self, node: int) -> Context:
        if node not in self._contexts:
            client_id = node - 1
            node_config = simulated_node(client_id, self._num_clients, IN_PROCESS)
            node_config |= self._node_configs.get(client_id, {})
            self._contexts[node] = Context(self._run, node, node_config, RecordDict(), self._run_config)
        return self._contexts[node]
