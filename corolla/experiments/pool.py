"""A simulation in separate processes: the server in this one, clients in workers that are forked from a warm process.

A worker processes one message at a time. If it is killed, its message fails, and the next message gets another worker.
Nothing listens on a network: a worker's only socket is unnamed and connects it to this process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Set
from types import TracebackType

from fl_app.errors import plain
from fl_app.forking import Warm
from fl_app.transport.flower import ClientApp, Error, ErrorCode, Message, remove_content_from_message
from fl_app.transport.inprocess import InProcessGrid
from fl_app.transport.wire import QUERY, SIMULATED_RUN

# seconds to wait for a reply
_WAIT = 0.5
# bytes of workers' output per read
_WRITTEN = 1 << 16


def workers(cpus_per_client: float, num_clients: int) -> int:
    """Return how many of a simulation's clients train at the same time, given this machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(num_clients, int(cores / cpus_per_client)))


class Worker:
    """A process that answers messages, one at a time. warm: the process that it was forked from."""

    def __init__(self, pid: int, link: socket.socket, warm: Warm) -> None:
        self.pid, self.link, self._warm = pid, link, warm
        self._incoming, self._outgoing = link.makefile("rb"), link.makefile("wb")

    def send(self, message: Message) -> None:
        """Send it a message. Raises OSError if the process has ended."""
        pickle.dump(message, self._outgoing, pickle.HIGHEST_PROTOCOL)
        self._outgoing.flush()

    def receive(self) -> Message:
        """Wait for its reply. Raises OSError or EOFError if the process has ended."""
        reply: Message = pickle.load(self._incoming)
        return reply

    def close(self) -> None:
        """Close its socket, so that it ends after its message."""
        # closing flushes again what could not be sent
        with contextlib.suppress(OSError):
            self._outgoing.close()
        self._incoming.close()
        self.link.close()

    def status(self) -> int | None:
        """Return its exit code, as `Warm.status`; None if its warm process has ended, since no other process has the code."""
        try:
            return self._warm.status(self.pid)
        except OSError:
            return None


class Pool:
    """Up to `count` workers. command, given, files: start their warm process (fl_app/forking.py), also after it was killed.

    say: called with each line that workers write to standard output or error outside of clients' messages.
    """

    def __init__(
        self,
        count: int,
        command: Iterable[str],
        given: bytes,
        say: Callable[[str], None] = lambda line: None,
        files: Iterable[int] = (),
    ) -> None:
        self.idle: list[Worker] = []
        self.busy: dict[Worker, Message] = {}
        self.count, self._command, self._given, self._say = count, list(command), given, say
        self._files = list(files)
        self._written, self._output = os.pipe()
        os.set_blocking(self._written, False)
        self._rest = b""
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._written, selectors.EVENT_READ)
        # some libraries read their number of threads only from here
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._warm = self._start()

    def __enter__(self) -> Pool:
        """Return the pool."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all workers at once, even busy ones."""
        for worker in [*self.idle, *self.busy]:
            worker.close()
        self._warm.close()
        self._hear()
        self._ready.close()
        os.close(self._written)
        os.close(self._output)

    @property
    def full(self) -> bool:
        """Whether no worker is free."""
        return not self.idle and len(self.busy) >= self.count

    def send(self, message: Message) -> None:
        """Send a message to a free worker, or to a new one. Raises OSError if none can be started."""
        while self.idle:
            worker = self.idle.pop()
            try:
                worker.send(message)
                break
            except OSError:
                # it was killed while idle
                self._end(worker)
        else:
            worker = self._fork()
            # do not retry a message that kills a new worker: the worker's end becomes the reply
            with contextlib.suppress(OSError):
                worker.send(message)
        # an error reply needs only the metadata
        self.busy[worker] = remove_content_from_message(message)

    def replies(self) -> list[Message]:
        """Wait briefly for replies and return them. The reply of a killed worker is an error."""
        found = []
        for key, _ in self._ready.select(_WAIT if self.busy else 0):
            if key.data is None:
                self._hear()
            elif key.data in self.busy:
                found.append(self._receive(key.data))
            else:
                self.idle.remove(key.data)
                self._end(key.data)
        return found

    def _receive(self, worker: Worker) -> Message:
        message = self.busy.pop(worker)
        try:
            reply = worker.receive()
        except (OSError, EOFError, pickle.UnpicklingError):
            why = _described(self._end(worker))
            return Message(Error(ErrorCode.CLIENT_APP_CRASHED, f"its process {why}"), reply_to=message)
        self.idle.append(worker)
        return reply

    def _start(self) -> Warm:
        return Warm(self._command, self._given, self._output, self._environment, self._files)

    def _fork(self) -> Worker:
        try:
            pid, link = self._warm.fork(self._output)
        except OSError:
            # its workers ended with it
            self._warm.close()
            self._warm = self._start()
            pid, link = self._warm.fork(self._output)
        worker = Worker(pid, link, self._warm)
        self._ready.register(link, selectors.EVENT_READ, worker)
        return worker

    def _end(self, worker: Worker) -> int | None:
        """Remove a worker and return its exit code; None if unknown."""
        self._ready.unregister(worker.link)
        worker.close()
        return worker.status()

    def _hear(self) -> None:
        """Pass on the lines that workers have written."""
        with contextlib.suppress(BlockingIOError):
            self._rest += os.read(self._written, _WRITTEN)
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            self._say(plain(line.decode(errors="replace")))


def _described(code: int | None) -> str:
    """Return how a process ended, as text, from its exit code in `subprocess`'s convention."""
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL), perhaps because the machine ran out of memory"
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return "ended" if code is None else f"ended with exit code {code}"


class PoolGrid(InProcessGrid):
    """Grid of a simulation with a pool for its clients. Messages are handed out when replies are pulled."""

    def __init__(self, pool: Pool, num_clients: int) -> None:
        # the ClientApp and its config are in the workers
        super().__init__(ClientApp(), {}, num_clients)
        self._run, self._pool = SIMULATED_RUN, pool
        self.clients_at_once = pool.count
        self._waiting: deque[str] = deque()
        self._replies: dict[str, Message] = {}

    @property
    def useful_messages(self) -> float:
        """The number of unanswered messages that keeps the workers busy while the server takes in their replies."""
        return 2 * self._pool.count

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue messages."""
        ids = list(super().push_messages(messages))
        self._waiting.extend(ids)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Hand out messages to all workers, and return the replies to the named ones. Waits briefly for a reply."""
        wanted = message_ids if isinstance(message_ids, Set) else set(message_ids)
        self._hand_out()
        for reply in self._pool.replies():
            name = reply.metadata.reply_to_message_id
            # Keep query replies that arrive while a round's replies are pulled: the client may be asked for again. Drop
            # other late replies.
            if name in wanted or reply.metadata.message_type == QUERY:
                self._replies[name] = reply
        # keep workers busy while the server processes the replies
        self._hand_out()
        return [self._replies.pop(name) for name in list(self._replies) if name in wanted]

    def _hand_out(self) -> None:
        """Hand out waiting messages in order, and drop the expired ones."""
        while self._waiting and not self._pool.full:
            message = self._pending.pop(self._waiting.popleft())
            if time.time() < message.metadata.created_at + message.metadata.ttl:
                self._pool.send(message)
