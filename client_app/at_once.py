"""Several clients of one process train at the same time on one GPU: `corolla run --in-process --clients-at-once K`.

A GPU computes one client's step faster than Python can launch it, and idles in between. Here K clients share the GPU.
Each runs in a lane: a thread with a CUDA stream and a network that stays on the GPU. A lane captures its network's
training step as a CUDA graph, which one call launches. The streams run side by side.

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
    from torch import Tensor

    from client_app.flat import SGD

Value = TypeVar("Value")

log = logging.getLogger("corolla")

# torch has 32 streams per GPU; further lanes share them
STREAMS = 32
# further lanes may take this share of the GPU's free memory
MEMORY_SHARE = 0.8

# A captured step is compared with the step itself at its first FIRST_CHECKS uses, then every CHECK_EVERY trainings.
FIRST_CHECKS = 2
CHECK_EVERY = 25
# largest relative and absolute difference: a GPU may sum in another order
TOLERANCE, TINY = 1e-3, 1e-9
# batches of a shape before its step is captured: libraries set themselves up at the first ones
WARM_UP = 2
# sets of captured steps that a lane keeps; a method may train two parts of the network in turn
KEPT_STEPS = 4

# seconds of one wait for a lane
_LOOK = 0.5

_of_thread = threading.local()


def current() -> Lane | None:
    """Return this thread's lane, or None outside of one."""
    return getattr(_of_thread, "lane", None)


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

    def use(self, device: torch.device) -> None:
        """Put this thread's GPU work into the lane's stream. On a CPU say that lanes are no faster."""
        if device.type != "cuda":
            self.lanes.say("clients-at-once: without a GPU clients take turns, so this is no faster")
            return
        import torch

        torch.cuda.set_stream(_streams(device)[self.number % STREAMS])

    def launched(self, step: Any, key: Hashable | None) -> Any:
        """Return a step with the same result; on a GPU it runs as CUDA graphs.

        step: a Step of client_app/trainer.py. key: identifies the step among all that the lane takes in this run; None if
        only this training takes it.
        """
        if step.trainer.device.type != "cuda":
            return step
        # Adam counts its steps on the CPU, and a graph would not
        if step.trainer.config.optimizer != "sgd":
            self.lanes.say("clients-at-once: Adam's steps are launched one by one; SGD's are captured")
            return step
        if step.trainer.config.precision == "float16":
            self.lanes.say("clients-at-once: steps in float16 are launched one by one, because their loss is scaled")
            return step
        return GraphedStep(self, step, key)

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


class GraphedStep:
    """The steps of one training in a lane. Batches of a shape that recurs are left to a captured step."""

    def __init__(self, lane: Lane, step: Any, key: Hashable | None) -> None:
        self._lane, self._step = lane, step
        self._graphs: dict[Hashable, CapturedStep | None] = {}
        self._seen: dict[Hashable, int] = {}
        if key is None:
            return
        # Keep few: each learning rate makes a new set, and a graph holds memory.
        kept: dict[Hashable, tuple[SGD, dict[Hashable, CapturedStep | None]]] = lane.keep("steps", dict)
        key = key, step.learning_rate
        optimizer, self._graphs = kept.pop(key, (step.sgd, {}))
        kept[key] = optimizer, self._graphs
        while len(kept) > KEPT_STEPS:
            del kept[next(iter(kept))]
        # the graphs refer to this optimizer's momentum
        step.optimizer = optimizer
        optimizer.restart()
        for graph in self._graphs.values():
            if graph is not None:
                graph.begin(step)

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Take a step on a batch."""
        shape = x.shape, x.dtype, y.shape
        self._seen[shape] = self._seen.get(shape, 0) + 1
        if shape not in self._graphs and self._seen[shape] > WARM_UP:
            self._graphs[shape] = None
            try:
                captured = CapturedStep(self._step, x, y)
                if captured.counters_read:
                    self._say("its steps read the step counter")
                else:
                    self._graphs[shape] = captured
            except RuntimeError as error:
                self._say(f"a step cannot be captured ({str(error).splitlines()[0]})")
        graph = self._graphs.get(shape)
        if graph is None:
            self._step(x, y)
            return
        indices = self._step.trainer.indices
        if not graph.is_due():
            graph(x, y, indices)
        elif not graph.agrees(x, y, indices):
            self._graphs[shape] = None
            self._say("a captured step differs from the step itself")
        self._step.trainer.count(len(y))

    def _say(self, why: str) -> None:
        config = self._step.trainer.config
        self._lane.lanes.say(
            f"clients-at-once: {config.method} with {config.model}: {why}; its steps are launched one by one"
        )


class CapturedStep:
    """A training step for batches of one shape, as a CUDA graph.

    The step's tensors keep their places on the GPU: weights, gradient, statistics, momentum, the sum of losses. Each
    batch is copied to a fixed place. At its next uses, and from time to time after that, the graph's result is compared
    with the step's own. They differ if the network or the method does something on the CPU in every step, because a
    graph does not repeat that. For every batch Python runs the step once or not at all, so a method that draws random
    numbers in it draws the same ones.
    """

    def __init__(self, step: Any, x: Tensor, y: Tensor) -> None:
        self._x, self._y, self._indices = x.clone(), y.clone(), step.trainer.indices.clone()
        self._first, self._due, self._trainings = True, FIRST_CHECKS, 0
        import torch

        self._graph = torch.cuda.CUDAGraph()
        self.begin(step)
        step.trainer.indices = self._indices
        with step.trainer.uncounted() as counters_read:
            self._graph.capture_begin()
            try:
                step(self._x, self._y)
            finally:
                self._graph.capture_end()
            # a graph does not advance counters on the CPU
            self.counters_read = counters_read()

    def begin(self, step: Any) -> None:
        """Replace the step by the next training's, which does the same at the same places."""
        self._step = step
        self._trainings += 1
        if self._trainings % CHECK_EVERY == 0:
            self._due = max(1, self._due)

    def is_due(self) -> bool:
        """Return whether this use must be compared.

        The first need not: Python ran the step on that batch to capture it.
        """
        first, self._first = self._first, False
        return self._due > 0 and not first

    def __call__(self, x: Tensor, y: Tensor, indices: Tensor) -> None:
        """Take a step on a batch."""
        self._x.copy_(x)
        self._y.copy_(y)
        self._indices.copy_(indices)
        # a method's objective may read it
        self._step.trainer.indices = self._indices
        self._graph.replay()

    def agrees(self, x: Tensor, y: Tensor, indices: Tensor) -> bool:
        """Take the step itself on a batch. Return whether the graph does the same, to within rounding."""
        import torch

        trainer, self._due = self._step.trainer, self._due - 1
        flat = trainer.flat
        tensors = [flat.weights, flat.statistics, flat.epoch_loss, *self._step.sgd.state]
        before, random = [tensor.clone() for tensor in tensors], torch.cuda.get_rng_state(x.device)
        self(x, y, indices)
        by_graph = [tensor.clone() for tensor in tensors]
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
        torch.cuda.set_rng_state(random, x.device)
        trainer.indices = indices
        with trainer.uncounted():
            self._step(x, y)
        differences = zip(by_graph, tensors, before, strict=True)
        return all(
            float((g - own).norm()) <= TOLERANCE * float((own - old).norm()) + TINY for g, own, old in differences
        )


@functools.cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    import torch

    return [torch.cuda.Stream(device) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]
