"""Training steps as CUDA graphs, for clients that train at the same time (client_app/at_once.py)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from client_app.at_once import Lane, current
from client_app.flat import SGD, FlatModule
from fl_app.config import RunConfig
from strategies.base import Correction, Optimizer

Differentiate = Callable[[Tensor, Tensor], object]
"""(x, y) of a batch -> anything. Leaves the gradient of a step in the trainer's `gradient`."""

# A captured step is compared with the step itself at its first FIRST_CHECKS uses, then every CHECK_EVERY trainings.
FIRST_CHECKS = 2
CHECK_EVERY = 25
# largest relative and absolute difference: a GPU may sum in another order
TOLERANCE, TINY = 1e-3, 1e-9
# batches of a shape before its step is captured: libraries set themselves up at the first ones
WARM_UP = 2
# sets of captured steps that a lane keeps; a method may train two parts of the network in turn
KEPT_STEPS = 4


class StepTrainer(Protocol):
    """The parts of client_app/trainer.py's LocalTrainer that a step uses."""

    config: RunConfig
    device: torch.device
    flat: FlatModule
    indices: Tensor

    def uncounted(self) -> AbstractContextManager[Callable[[], bool]]:
        """Restore the counters at the end.

        Yields a function that returns whether `steps` or `epoch` was read inside so far.
        """
        ...

    def count(self, samples: int) -> None:
        """Count a batch's samples as `differentiate` does."""
        ...


@dataclass
class Step:
    """One step of `LocalTrainer.train` on a batch: the gradient, the method's correction, the optimizer."""

    trainer: StepTrainer
    differentiate: Differentiate
    correction: Correction | None
    optimizer: Optimizer
    learning_rate: float

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Move the weights."""
        weights, gradient = self.trainer.flat.weights, self.trainer.flat.gradient
        self.differentiate(x, y)
        if self.correction is not None:
            with torch.no_grad():
                self.correction(weights, gradient)
        self.optimizer.step(gradient, self.learning_rate)

    @property
    def momentum(self) -> SGD:
        """The optimizer, which must be SGD: the only one that a graph can hold."""
        assert isinstance(self.optimizer, SGD)
        return self.optimizer


def launched(step: Step, key: Hashable | None) -> Callable[[Tensor, Tensor], object]:
    """Return a step with the same result; in a lane on a GPU it runs as CUDA graphs.

    key: identifies the step among all that the lane takes in this run; None if only this training takes it.
    """
    lane = current()
    if lane is None or step.trainer.device.type != "cuda":
        return step
    # Adam counts its steps on the CPU, and a graph would not
    if not isinstance(step.optimizer, SGD):
        lane.lanes.say("clients-at-once: Adam's steps are launched one by one; SGD's are captured")
        return step
    if step.trainer.config.precision == "float16":
        lane.lanes.say("clients-at-once: steps in float16 are launched one by one, because their loss is scaled")
        return step
    return GraphedStep(lane, step, key)


class GraphedStep:
    """The steps of one training in a lane. Batches of a shape that recurs are left to a captured step."""

    def __init__(self, lane: Lane, step: Step, key: Hashable | None) -> None:
        self._lane, self._step = lane, step
        self._graphs: dict[Hashable, CapturedStep | None] = {}
        self._seen: dict[Hashable, int] = {}
        if key is None:
            return
        # Keep few: each learning rate makes a new set, and a graph holds memory.
        kept: dict[Hashable, tuple[SGD, dict[Hashable, CapturedStep | None]]] = lane.keep("steps", dict)
        key = key, step.learning_rate
        optimizer, self._graphs = kept.pop(key, (step.momentum, {}))
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
            self._graphs[shape] = self._captured(x, y)
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

    def _captured(self, x: Tensor, y: Tensor) -> CapturedStep | None:
        try:
            captured = CapturedStep(self._step, x, y)
        except RuntimeError as error:
            self._say(f"a step cannot be captured ({str(error).splitlines()[0]})")
            return None
        if captured.counters_read:
            self._say("its steps read the step counter")
            return None
        return captured

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

    def __init__(self, step: Step, x: Tensor, y: Tensor) -> None:
        self._x, self._y, self._indices = x.clone(), y.clone(), step.trainer.indices.clone()
        self._first, self._due, self._trainings = True, FIRST_CHECKS, 0
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

    def begin(self, step: Step) -> None:
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
        trainer, self._due = self._step.trainer, self._due - 1
        flat = trainer.flat
        tensors = [flat.weights, flat.statistics, flat.epoch_loss, *self._step.momentum.state]
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
