"""Who is connected: which SuperNode is which client, asked once of every node that is new.

Flower's node ids are random and change when a SuperNode restarts; they stay here and in the exchange of messages. Everything else
speaks of client ids (a SuperNode's partition-id).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping

from flwr.app import Message
from flwr.serverapp import Grid

from fl_app import wire
from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.keys import Scalar

log = logging.getLogger("corolla")

POLL_SECONDS = 0.1
QUERY = "get_properties"
_QUERIES = 3  # how often a node that answers with an error is asked who it is


def check_properties(properties: Mapping[str, Scalar]) -> None:
    """Raise WireError unless a client's properties are what CorollaClient.get_properties gives."""
    for name, low in (("in-channels", 1), ("image-size", 1), ("num-classes", 1), ("train-samples", 0), ("test-samples", 0)):
        value = properties.get(name)
        if type(value) is not int or not low <= value < 2**31:
            raise wire.WireError(f"property {name} must be an integer >= {low}, got {str(value)[:80]!r}")
    counts = properties.get("class-counts")
    if counts is not None and not re.fullmatch(r"\d{1,9}(,\d{1,9})*", str(counts)):
        raise wire.WireError(f"property class-counts must be counts with commas, got {str(counts)[:80]!r}")


class Roster:
    """The clients of a run: the node each one is (`node_of`) and what it said about itself (`properties`).

    progress(what, done, total) is called as clients connect.
    """

    def __init__(self, grid: Grid, config: RunConfig, progress: Callable[[str, int, int], None]) -> None:
        self.grid = grid
        self.config = config
        self.progress = progress
        self.num_clients = config.num_clients  # 0 until a node says how many there are
        self.properties: dict[int, dict[str, Scalar]] = {}
        self.node_of: dict[int, int] = {}  # client id -> node id
        self._asked: dict[int, str] = {}  # node id -> id of the pending query, "" once answered
        self._refused: dict[str, str] = {}  # who -> why its properties were refused
        self._queries: dict[int, int] = {}  # node id -> how often it was asked
        self._started = False

    @property
    def client_ids(self) -> list[int]:
        """Connected clients whose properties are known, sorted."""
        return sorted(self.node_of)

    @property
    def minimum(self) -> int:
        """Clients that must be connected before a round starts."""
        return self.config.min_available_clients or self.num_clients or 1

    def wait(self) -> None:
        """Return when `minimum` clients are connected and every connected node has said who it is.

        Raises UserError after `available-timeout` without enough of them, or when a node's properties are refused.
        """
        started = time.monotonic()
        told = -1
        while True:
            answered = self._take_in()
            if self._refused and not self._started:
                reasons = "\n".join(f"  {who}: {why}" for who, why in sorted(self._refused.items()))
                self._refused = {}
                raise UserError(f"clients that cannot take part:\n{reasons}")
            pending = any(self._asked.values())
            waited = time.monotonic() - started
            self._warn_of_refused()
            if len(self.node_of) >= self.minimum and (not pending or waited > self.config.available_timeout):
                self._started = True
                return
            if len(self.node_of) != told:
                told = len(self.node_of)
                self.progress("clients connected", told, self.minimum)
            limit = self.config.round_timeout if pending else self.config.available_timeout
            if waited > limit:
                raise UserError(
                    f"min-available-clients: {self.minimum} clients must be connected, {len(self.node_of)} were after "
                    f"{waited:.0f} s (client ids {self.client_ids})"
                )
            if not answered:
                time.sleep(POLL_SECONDS)

    def refresh(self) -> None:
        """Take in nodes that came or went since the last round; waits only if fewer than `minimum` are left."""
        self._take_in()
        self._warn_of_refused()
        if len(self.node_of) < self.minimum:
            self.wait()

    def _warn_of_refused(self) -> None:
        for who, why in self._refused.items():
            log.warning("%s cannot take part: %s", who, why)
        self._refused = {}

    def _take_in(self) -> bool:
        """Ask new nodes who they are and take in answers; tell whether there were any."""
        online = set(self.grid.get_node_ids())
        for client_id, node_id in list(self.node_of.items()):
            if node_id not in online:
                log.warning("client %d is gone", client_id)
                del self.node_of[client_id]
        self._asked = {node: message for node, message in self._asked.items() if node in online}
        new = [Message(wire.encode_query(), node, QUERY) for node in sorted(online - set(self._asked))]
        if new:
            nodes = [m.metadata.dst_node_id for m in new]
            ids = zip(nodes, self.grid.push_messages(new), strict=True)
            self._asked |= {node: message for node, message in ids if message}  # undelivered: asked again next time
            for node in nodes:
                self._queries[node] = self._queries.get(node, 0) + 1
        by_message = {message: node for node, message in self._asked.items() if message}
        if not by_message:
            return False
        answered: dict[int, int] = {}
        messages = list(self.grid.pull_messages(list(by_message)))
        for message in messages:
            node = by_message[message.metadata.reply_to_message_id]
            self._asked[node] = ""
            self._introduce(node, message, answered)
        return bool(messages)

    def _introduce(self, node: int, message: Message, answered: dict[int, int]) -> None:
        who = "a node"
        try:
            if message.has_error():
                if self._queries[node] < _QUERIES:
                    del self._asked[node]  # asked again at the next refresh
                    return
                raise wire.WireError(f"no properties: {wire.one_line(message.error.reason)}")
            properties = wire.decode_properties(message.content)
            who = f"client {wire.one_line(properties.get('client-id', '?'))}"
            if properties.get(wire.ERROR):
                raise wire.WireError(wire.one_line(properties[wire.ERROR]))
            client_id, partitions = properties.get("client-id"), properties.get("num-clients")
            self.num_clients = self.num_clients or (partitions if isinstance(partitions, int) else 0)
            if partitions != self.num_clients:
                raise wire.WireError(f"num-partitions must be the run's {self.num_clients} clients, got {partitions!r}")
            if not isinstance(client_id, int) or not 0 <= client_id < self.num_clients:
                raise wire.WireError(f"partition-id must be in [0, {self.num_clients}), got {client_id!r}")
            if client_id in answered or (client_id in self.node_of and not self._started):
                raise wire.WireError("two SuperNodes carry this partition-id")
            check_properties(properties)
        except wire.WireError as error:
            self._refused[who] = str(error)
            return
        if client_id in self.node_of:
            log.warning("client %d is now another SuperNode", client_id)
        answered[client_id] = node
        self.node_of[client_id] = node
        self.properties[client_id] = properties
