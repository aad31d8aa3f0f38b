"""Messages between ServerApp and clients: short polling, replies as they arrive, one deadline per message."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fl_app import debugging
from fl_app.config import RunConfig
from fl_app.errors import UserError, plain
from fl_app.server import disk
from fl_app.server.run_folder import name_of
from fl_app.server.start import features_before
from fl_app.transport import wire
from fl_app.transport.client_registry import POLL_SECONDS, ClientRegistry
from fl_app.transport.inprocess import InProcessGrid
from fl_app.transport.replies import Answer, Inbox, connect, has_fixed_nodes


@dataclass(frozen=True)
class Reply:
    """One client's reply: its content, or the cause if there is none. late: whether it answers an earlier `ask`."""

    client_id: int
    content: RecordDict | None
    cause: str = ""
    late: bool = False

    def usable(self) -> RecordDict:
        """Return the content. Raises WireError with the cause if there is none."""
        if self.content is None:
            raise wire.WireError(self.cause)
        return self.content


class Exchange:
    """A grid wrapper that addresses clients by id.

    progress(what, done, total) is called when messages are sent, when replies arrive, and while none arrives.
    in_flight: bytes of unanswered messages beyond which no further message is sent. If clients take turns on one
    machine, all messages at once would fill its memory. There, no more are sent than the grid has use for. hears:
    whether to log the clients' output and the tracebacks of their errors, for clients on this machine.
    """

    def __init__(
        self,
        grid: Grid,
        config: RunConfig,
        progress: Callable[[str, int, int], None],
        in_flight: float = math.inf,
        hears: bool = False,
    ) -> None:
        self.grid = grid
        self.config = config
        self.progress = progress
        self.in_flight = in_flight
        self.useful_messages = grid.useful_messages if isinstance(grid, InProcessGrid) else math.inf
        self.hears = hears
        self._traces: set[str] = set()
        # takes an entry for each answer of a deployment's client: who was asked, and what came back (server/trail.py)
        self.note: Callable[[Mapping[str, Any]], None] = lambda entry: None
        self._asked: dict[str, Mapping[str, Any]] = {}
        self._fixed = has_fixed_nodes(grid)
        # message id -> client id, of messages that an `ask` ended without; and their replies that another step received
        self._late: dict[str, int] = {}
        self._kept: list[Reply] = []
        link = connect(grid)
        self.inbox = Inbox(grid, link)
        before = () if config.private else features_before(config)
        self.registry = ClientRegistry(grid, config, progress, link, before)

    def message(self, client_id: int, content: RecordDict, kind: str, round: int) -> Message:
        """Address a message to a client."""
        return Message(
            content, self.registry.node(client_id), kind, group_id=str(round), ttl=self.config.round_timeout + 60
        )

    def ask(
        self,
        what: str,
        requests: Iterable[Message],
        timeout: float,
        total: int,
        ends: Callable[[], bool] | None = None,
    ) -> Generator[Reply, None, None]:
        """Send `total` messages, built one at a time, and yield every reply as it arrives, failures included.

        what: the step, for progress. timeout: seconds after which a client without a reply is given up, counted from
        its message. ends: returns whether to end before all have replied. The other replies then are late: they are
        yielded, marked as such, by the next call that has `ends`. Raises UserError if a reply fails while the disk of
        the SuperLink's database is full.
        """
        requests, largest, done = iter(requests), 0, 0
        # the client of each message without a reply, by the message's id
        waiting: dict[str, int] = {}
        self.progress(what, done, total)
        try:
            while done < total:
                while ends and self._kept:
                    yield self._kept.pop(0)
                if ends and done + len(waiting) == total and ends():
                    self._late, waiting = self._late | waiting, {}
                    break
                while done + len(waiting) < total and (
                    len(waiting) < self.useful_messages and len(waiting) * largest < self.in_flight
                ):
                    message = next(requests)
                    client_id = self.registry.client(message.metadata.dst_node_id)
                    if self.in_flight < math.inf:
                        largest = max(largest, wire.payload_bytes(message.content))
                    about = None if self._fixed else self._about(client_id, message)
                    message_id = next(iter(self.grid.push_messages([message])), None)
                    # free its arrays: the SuperLink has them
                    del message
                    if message_id:
                        if about is not None:
                            self._asked[message_id] = about
                        waiting[message_id] = client_id
                        self.inbox.expect(message_id, timeout)
                    else:
                        done += 1
                        self.progress(what, done, total)
                        yield Reply(client_id, None, "the message could not be delivered")
                answers: deque[Answer] = deque(self.inbox.take(POLL_SECONDS) if waiting else [])
                if not answers:
                    self.progress(what, done, total)
                # free each answer before the next one
                while answers:
                    answer = answers.popleft()
                    late = answer.message_id in self._late
                    client_id = (self._late if late else waiting).pop(answer.message_id)
                    if not late:
                        done += 1
                        self.progress(what, done, total)
                    reply = Reply(client_id, answer.content, answer.cause, late)
                    if (who := self._asked.pop(answer.message_id, None)) is not None:
                        found = {"asked": answer.message_id, "answer": answer.reply_id}
                        self.note({**who, **found, **({"cause": answer.cause} if answer.cause else {})})
                    if answer.content is None and (full := disk.full_database()):
                        # the SuperLink lost this reply, and will lose the others
                        raise UserError(full)
                    del answer
                    self._hear(reply)
                    if late and not ends:
                        self._kept.append(reply)
                    else:
                        yield reply
                    del reply
        finally:  # also if the caller stops early
            for message_id in waiting:
                self.inbox.forget(message_id)

    def _about(self, client_id: int, message: Message) -> dict[str, Any]:
        """Return who is asked what: for the run's trail, by names that the site's audit has too."""
        metadata, who = message.metadata, self.registry.identity(client_id)
        return {
            "round": int(metadata.group_id or 0),
            "message": metadata.message_type,
            "client": client_id,
            "name": name_of(self.registry.properties.get(client_id, {})),
            "run": str(self.grid.run.run_id),
            "node": str(metadata.dst_node_id),
            "supernode": plain(who.name),
            "key": who.fingerprint,
        }

    def abandon(self, client_ids: Iterable[int]) -> None:
        """Expect no late replies of these clients any more."""
        gone = set(client_ids)
        for message_id in [name for name, client_id in self._late.items() if client_id in gone]:
            del self._late[message_id]
            self.inbox.forget(message_id)
        self._kept = [reply for reply in self._kept if reply.client_id not in gone]

    def _hear(self, reply: Reply) -> None:
        """Log a client's output, and its traceback unless an earlier client had the same.

        Raises UserError for a breakpoint in a client.
        """
        if not self.hears or reply.content is None:
            return
        error, printed, trace = wire.take_aside(reply.content)
        for line in printed.split("\n") if printed else []:
            debugging.show_printed(f"client {reply.client_id}", line)
        if trace and trace not in self._traces:
            self._traces.add(trace)
            debugging.show_trace(trace)
        if debugging.is_refused_breakpoint(error):
            raise UserError(error)
