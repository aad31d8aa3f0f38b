"""Several clients of one process train at the same time on one GPU: `corolla run --in-process --clients-at-once K`.

A GPU computes one client's step faster than Python can launch it, and idles in between. Here K clients share the GPU.
Each runs in a lane: a thread with a CUDA stream and a network that stays on the GPU. A lane captures its network's
training step as a CUDA graph, which one call launches (client_app/captured.py). The streams run side by side.

Only one thread runs at a time. So the clients' Python code needs no locks, and draws the same random numbers as one by
one. A client hands on its turn where it would wait for the GPU (`pause`): after it has launched a whole training.
Without a GPU the clients take turns, with the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

Value = TypeVar("Value")

log = logging.getLogger("corolla")

# torch has 32 streams per GPU; further lanes share them
STREAMS = 32
# further lanes may take this share of the GPU's free memory
MEMORY_SHARE = 0.8

# seconds of one wait for a lane
_LOOK = 0.5

_of_thread = threading.local()


def current() -> Lane | None:
    """Return this thread's lane, or None outside of one."""
    return getattr(_of_thread, "lane", None)


def kept(name: Hashable, make: Callable[[], Value]) -> Value:
    """Return the lane's object of this name, made at its first use. Outside of a lane, make a new one."""
    lane = current()
    return make() if lane is None else lane.keep(name, make)


def pause() -> None:
    """Let the other lanes run before this one waits for the GPU. Outside of a lane, do nothing."""
    lane = current()
    if lane is not None:
        lane.pause()


class Closed(BaseException):
    """Ends a task that has paused when its lane is closed."""


class Lane:
    """One of the K places in which clients run. kept: objects by name that a client leaves there for the next one."""

    def __init__(self, lanes: Lanes, number: int) -> None:
        self.lanes, self.number = lanes, number
        self.kept: dict[Hashable, Any] = {}
        self._task: Callable[[], None] = lambda: None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._paused = self._closed = self._running = False
        self._thread = threading.Thread(target=self._run, name=f"lane {number}", daemon=True)
        self._thread.start()

    def begin(self, task: Callable[[], None]) -> None:
        """Take a task, which `resume` starts. It must not raise."""
        self._task = task

    def resume(self) -> bool:
        """Let this lane run until it pauses or its task is done. Return whether it paused.

        Ctrl-C ends the wait; the lane still runs until it pauses.
        """
        # a client may have redirected its standard output, to catch its prints
        out = sys.stdout
        self._running = True
        try:
            self._go.release()
            # a Ctrl-C that comes just before a wait does not end it: only the next wait sees it
            while not self._back.acquire(timeout=_LOOK):
                pass
            self._running = False
        finally:
            sys.stdout = out
        return self._paused

    def pause(self) -> None:
        """Make `resume` return in the thread that called it, and wait for the next call."""
        self._paused, out = True, sys.stdout
        self._back.release()
        self._wait()
        self._paused, sys.stdout = False, out

    def close(self) -> None:
        """End the thread. A paused task does not continue. A task that Ctrl-C left running ends at its next pause."""
        out, self._closed = sys.stdout, True
        self._go.release()
        if not self._running:
            # a task that ends restores the standard output it started with
            self._thread.join()
            sys.stdout = out

    def keep(self, name: Hashable, make: Callable[[], Value]) -> Value:
        """Return the object of this name, made by `make` at its first use."""
        if name not in self.kept:
            self.kept[name] = make()
        value: Value = self.kept[name]
        return value

    def _wait(self) -> None:
        self._go.acquire()
        if self._closed:
            raise Closed

    def _run(self) -> None:
        _of_thread.lane = self
        with contextlib.suppress(Closed):
            while not self._closed:
                self._wait()
                self._task()
                self._task = lambda: None
                self._back.release()


class Lanes:
    """K lanes, or as many as the GPU's memory holds. say: called with each line for the user, once per line."""

    def __init__(self, count: int, say: Callable[[str], None] = log.warning) -> None:
        """Lanes are made when they are needed. count: K; 0 means as many as fit, or one without a GPU."""
        self._count, self._say, self._said = count, say, set[str]()
        self._lanes: list[Lane] = []

    def answer(self, waiting: Iterable[Callable[[], Value]]) -> list[Value]:
        """Take as many tasks as there may be lanes, run each in one, and return their results in order.

        If tasks fail, raise the first one's exception after all others have ended.
        """
        tasks = list(islice(waiting, self._most()))
        while len(self._lanes) < len(tasks):
            self._lanes.append(Lane(self, len(self._lanes)))
        results: dict[int, Value] = {}
        errors: dict[int, BaseException] = {}

        def begin(number: int, task: Callable[[], Value]) -> None:
            def run() -> None:
                try:
                    results[number] = task()
                except BaseException as error:
                    errors[number] = error

            self._lanes[number].begin(run)

        for number, task in enumerate(tasks):
            begin(number, task)
        turns = deque(self._lanes[: len(tasks)])
        while turns:
            lane = turns.popleft()
            if lane.resume():
                turns.append(lane)
        if errors:
            raise errors[min(errors)]
        return [results[number] for number in range(len(tasks))]

    def say(self, line: str) -> None:
        """Show the user a line, once."""
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def close(self) -> None:
        """End the threads."""
        for lane in self._lanes:
            lane.close()
        self._lanes = []

    def _most(self) -> int:
        """Return the number of tasks that may run at once."""
        if self._count:
            return self._count
        if not self._lanes:
            return 1
        import torch

        if not torch.cuda.is_available():
            return 1
        used = torch.cuda.max_memory_reserved() / len(self._lanes)
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return len(self._lanes) + int(MEMORY_SHARE * free / used) if used else 1


@functools.cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    import torch

    return [torch.cuda.Stream(device) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]


def use_stream(device: torch.device) -> None:
    """Put this thread's GPU work into its lane's stream. Outside of a lane, and on a CPU, do nothing."""
    lane = current()
    if lane is None:
        return
    if device.type != "cuda":
        lane.lanes.say("clients-at-once: without a GPU clients take turns, so this is no faster")
        return
    import torch

    torch.cuda.set_stream(_streams(device)[lane.number % STREAMS])
