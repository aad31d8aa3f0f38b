"""Messages between ServerApp and clients: short polling, replies as they arrive, one deadline per message."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fl_app import debugging, wire
from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.server import disk, superlink
from fl_app.server.client_registry import POLL_SECONDS, ClientRegistry
from fl_app.server.inprocess import InProcessGrid
from fl_app.server.replies import Answer, Inbox


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


class _Pending:
    """The messages of one `ask` that have no reply yet.

    total: number of messages. most_bytes, most: bytes and number of unanswered messages beyond which none is sent.
    waiting: by id of a sent message, its client and its bytes.
    """

    def __init__(self, total: int, most_bytes: float, most: float) -> None:
        self.total, self.unsent, self._most_bytes, self._most = total, total, most_bytes, most
        self.waiting: dict[str, tuple[int, int]] = {}
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self.waiting or self.unsent)

    @property
    def done(self) -> int:
        """Number of messages that need no reply any more."""
        return self.total - self.unsent - len(self.waiting)

    @property
    def has_room(self) -> bool:
        """Whether another message can be sent now."""
        return self.unsent > 0 and self._bytes < self._most_bytes and len(self.waiting) < self._most

    def sent(self, message_id: str | None, client_id: int, size: int) -> None:
        """Note that a message was sent. No id: it could not be delivered."""
        self.unsent -= 1
        if message_id:
            self.waiting[message_id] = client_id, size
            self._bytes += size

    def answered(self, message_id: str) -> int:
        """Note that a message has its reply. Return its client."""
        client_id, size = self.waiting.pop(message_id)
        self._bytes -= size
        return client_id

    def given_up(self) -> dict[str, int]:
        """Wait for none any more. Return the client of each message that has no reply, by the message's id."""
        clients = {message_id: client_id for message_id, (client_id, _) in self.waiting.items()}
        self.waiting = {}
        return clients


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
        # message id -> client id, of messages that an `ask` ended without; and their replies that another step received
        self._late: dict[str, int] = {}
        self._kept: list[Reply] = []
        link = superlink.connect(grid)
        self.inbox = Inbox(grid, link)
        self.registry = ClientRegistry(grid, config, progress, link)

    @property
    def client_ids(self) -> list[int]:
        """Ids of connected clients, sorted."""
        return self.registry.client_ids

    def query(self, client_ids: Sequence[int]) -> bool:
        """Query those of the clients that have not answered yet. Return whether all of them take part."""
        return self.registry.query(client_ids)

    def refresh(self) -> None:
        """Take in nodes that came or went since the last round. Wait only if too few clients are left."""
        self.registry.refresh()

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
        requests = iter(requests)
        pending = _Pending(total, self.in_flight, self.useful_messages)
        self.progress(what, pending.done, total)
        try:
            while pending:
                while ends and self._kept:
                    yield self._kept.pop(0)
                if ends and not pending.unsent and ends():
                    self._late |= pending.given_up()
                    break
                while pending.has_room:
                    message = next(requests)
                    client_id = self.registry.client(message.metadata.dst_node_id)
                    size = wire.payload_bytes(message.content) if self.in_flight < math.inf else 0
                    message_id = next(iter(self.grid.push_messages([message])), None)
                    # free its arrays: the SuperLink has them
                    del message
                    pending.sent(message_id, client_id, size)
                    if message_id:
                        self.inbox.expect(message_id, timeout)
                    else:
                        self.progress(what, pending.done, total)
                        yield Reply(client_id, None, "the message could not be delivered")
                answers: deque[Answer] = deque(self.inbox.take(POLL_SECONDS) if pending.waiting else [])
                if not answers:
                    self.progress(what, pending.done, total)
                # free each answer before the next one
                while answers:
                    answer = answers.popleft()
                    late = self._late.pop(answer.message_id, None)
                    client_id = pending.answered(answer.message_id) if late is None else late
                    if late is None:
                        self.progress(what, pending.done, total)
                    reply = Reply(client_id, answer.content, answer.cause, late is not None)
                    if answer.content is None and (full := disk.full_database()):
                        # the SuperLink lost this reply, and will lose the others
                        raise UserError(full)
                    del answer
                    self._hear(reply)
                    if reply.late and not ends:
                        self._kept.append(reply)
                    else:
                        yield reply
                    del reply
        finally:  # also if the caller stops early
            for message_id in pending.waiting:
                self.inbox.forget(message_id)

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
