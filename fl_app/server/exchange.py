"""Messages between the ServerApp and its clients: short polling, replies as they arrive, one deadline per message."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fl_app import wire
from fl_app.config import RunConfig
from fl_app.server import superlink
from fl_app.server.replies import Answer, Inbox
from fl_app.server.roster import POLL_SECONDS, Roster


@dataclass(frozen=True)
class Reply:
    """One client's answer: its content, or the cause why there is none."""

    client_id: int
    content: RecordDict | None
    cause: str = ""

    def usable(self) -> RecordDict:
        """Return the content. Raises WireError with the cause if there is none."""
        if self.content is None:
            raise wire.WireError(self.cause)
        return self.content


class Exchange:
    """A grid wrapper that knows clients by id.

    progress(what, done, total) is called when the messages are sent, as replies arrive, and while none does. in_flight: bytes of
    unanswered messages beyond which no further one is sent; where clients take turns on one machine, all at once would fill its
    memory.
    """

    def __init__(
        self, grid: Grid, config: RunConfig, progress: Callable[[str, int, int], None], in_flight: float = math.inf
    ) -> None:
        self.grid = grid
        self.config = config
        self.progress = progress
        self.in_flight = in_flight
        link = superlink.connect(grid)
        self.inbox = Inbox(grid, link)
        self.roster = Roster(grid, config, progress, link)

    @property
    def client_ids(self) -> list[int]:
        """Connected clients, sorted."""
        return self.roster.client_ids

    def refresh(self) -> None:
        """Take in nodes that came or went since the last round; waits only if too few clients are left."""
        self.roster.refresh()

    def message(self, client_id: int, content: RecordDict, kind: str, round: int) -> Message:
        """Address a message to a client."""
        return Message(
            content, self.roster.node_of[client_id], kind, group_id=str(round), ttl=self.config.round_timeout + 60
        )

    def ask(self, what: str, requests: Iterable[Message], timeout: float, total: int) -> Iterator[Reply]:
        """Send `total` messages, built one at a time, and yield every reply as it arrives, failures included.

        timeout: seconds after which a client that has not replied is given up, counted from its message.
        """
        client_of_node = {node: client for client, node in self.roster.node_of.items()}
        requests = iter(requests)
        # message id -> client id, bytes
        waiting: dict[str, tuple[int, int]] = {}
        done, unsent = 0, total

        def count() -> None:
            nonlocal done
            done += 1
            self.progress(what, done, total)

        self.progress(what, done, total)
        try:
            while waiting or unsent:
                while unsent and sum(size for _, size in waiting.values()) < self.in_flight:
                    message = next(requests)
                    unsent -= 1
                    client_id = client_of_node[message.metadata.dst_node_id]
                    size = wire.payload_bytes(message.content) if self.in_flight < math.inf else 0
                    message_id = next(iter(self.grid.push_messages([message])), None)
                    if message_id:
                        waiting[message_id] = client_id, size
                        self.inbox.expect(message_id, timeout)
                    else:
                        count()
                        yield Reply(client_id, None, "the message could not be delivered")
                    # its arrays are the SuperLink's now
                    del message
                answers: list[Answer] = self.inbox.take(POLL_SECONDS) if waiting else []
                if not answers:
                    self.progress(what, done, total)
                # each is freed when it has been taken in
                while answers:
                    answer = answers.pop(0)
                    client_id, _ = waiting.pop(answer.message_id)
                    count()
                    reply = Reply(client_id, answer.content, answer.cause)
                    del answer
                    yield reply
                    del reply
        finally:  # also where nobody takes the rest
            for message_id in waiting:
                self.inbox.forget(message_id)
