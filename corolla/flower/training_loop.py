"""What a method asks of a user's own training loop: a training from a model, and `objective` in its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_origin

import numpy as np
from numpy.typing import NDArray

from fl_app.config import RunConfig
from fl_app.errors import UserError, listed
from fl_app.keys import specs
from fl_app.layout import Model, Vector
from strategies.base import AnyMethod, Correction, LocalUpdate, attributes

if TYPE_CHECKING:
    from torch import Tensor, nn

LINES = {
    "objective": "loss = corolla.flower.objective(loss, model)",
    "epochs": "for epoch in range(corolla.flower.epochs(local_epochs))",
}
"""The lines of a training loop that some methods need, by the function that is called: before `loss.backward()`, and around it."""


NEEDS = {
    **dict.fromkeys(("load", "batches", "read", "alternate", "weights", "statistics"), "a training loop of its own"),
    **dict.fromkeys(("network", "module", "features", "classifier"), "the network itself"),
    **dict.fromkeys(("fisher", "loss_gradient"), "gradients of single samples or of all"),
    "sample_losses": "losses of single samples",
    "leave_out": "samples left out of training",
    "class_counts": "the numbers of samples by class",
}
"""What a method needs that calls a function of the trainer which an app does not have."""


LOOP_FACTS = ("learning_rate", "batch_size", "local_epochs")
"""Facts about the training loop that some methods compute with: arguments of their strategies. A `momentum` may be another."""
FACT_KEYS = {spec.field: spec for spec in specs(RunConfig) if spec.field in (*LOOP_FACTS, "momentum")}
"""Their keys of a run, by argument."""
LACKS_FACTS = "as in the training loop"
LACKS_LINE, BEYOND_APP, LACKS_LOSS = "called", "any-loop", "told"
ENDS_RUN = (LACKS_LINE, BEYOND_APP, LACKS_LOSS)
"""Rules of errors that every client of an app would have."""


def computes_with_steps(method: AnyMethod) -> bool:
    """Return whether a method computes with `LOOP_FACTS`: it asks for the learning rate, and for nothing in `NEEDS`."""
    names = _names_in(method)
    return "learning_rate" in names and not names & NEEDS.keys()


def judges_models(method: AnyMethod) -> bool:
    """Return whether a client judges models by their losses before it trains, and asks for nothing else in `NEEDS`.

    Every app gives this. The losses are those of its evaluate function.
    """
    given = {"sample_losses", "leave_out", *(("module",) if method.side_by_side else ())}
    names = _names_in(method)
    return "sample_losses" in names and not names & NEEDS.keys() - given


def _names_in(method: AnyMethod) -> set[str]:
    """Return the attributes that the hooks of a method's client half read."""
    half: type = get_origin(method.local_update) or method.local_update
    classes = [cls for cls in half.__mro__ if cls not in LocalUpdate.__mro__]
    return set[str]().union(*(attributes.names_in(hook.__code__) for hook in attributes.functions_of(classes)))


def beyond_app(method: str, why: str) -> UserError:
    """Return the error of a method that needs more than an app gives."""
    text = f"method {method} {why}, which a Flower app does not give; `corolla run` does"
    return UserError(text, key=method, rule=BEYOND_APP, value=why)


@dataclass
class Wishes:
    """What a method asks of one training.

    correction: changes each step's gradient. frozen: tensors that do not train. epochs: 0: the app's own. names: of the model's
    parameters, in the layout's order. asked: functions of `LINES` that the loop has called. steps: calls of `objective`.
    """

    correction: Correction | None = None
    frozen: frozenset[str] = frozenset()
    epochs: int = 0
    names: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    steps: int = 0

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Let `objective` know them."""
        token = _WISHES.set(self)
        try:
            yield
        finally:
            _WISHES.reset(token)

    def check(self, method: str, counted: bool = False) -> None:
        """Raise UserError if the training loop lacks a line that the method needs. counted: it needs the number of steps."""
        changed = self.correction is not None or bool(self.frozen)
        needed = {"objective": changed or counted, "epochs": self.epochs > 0}
        for name, line in LINES.items():
            if needed[name] and name not in self.asked:
                raise UserError(
                    f"method {method}: the training loop needs the line `{line}`", key=name, rule=LACKS_LINE
                )


_WISHES: ContextVar[Wishes | None] = ContextVar("corolla-wishes", default=None)


def current_wishes() -> Wishes | None:
    """Return what a method asks of the training that runs. None: no method runs it."""
    return _WISHES.get()


def objective(loss: Tensor, model: nn.Module) -> Tensor:
    """Return the loss that a method trains with: the user's, with the gradient of the method's own term.

    Call it in every step, before `loss.backward()`. The value of the loss stays. Tensors that the method holds fixed do not train.
    Without the mod, and with methods that train plainly, it returns the loss unchanged.
    """
    wishes = current_wishes()
    if wishes is None:
        return loss
    wishes.asked.add("objective")
    wishes.steps += 1
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if name in wishes.names:
            parameter.requires_grad_(name not in wishes.frozen)
    if wishes.correction is None:
        return loss
    import torch

    own = [parameters[name] for name in wishes.names]
    weights = torch.cat([parameter.detach().reshape(-1).float().cpu() for parameter in own])
    gradient = torch.zeros_like(weights)
    wishes.correction(weights, gradient)
    pieces = torch.split(gradient, [parameter.numel() for parameter in own])
    # linear in the parameters, so that its gradient is the correction
    added: Any = sum(
        (parameter * piece.reshape(parameter.shape).to(parameter)).sum()
        for parameter, piece in zip(own, pieces, strict=True)
        if parameter.requires_grad
    )
    changed: Tensor = loss + (added - added.detach())
    return changed


def epochs(own: int) -> int:
    """Return the number of epochs that a method wants of this training: `own`, those of the app, if it wants no other number."""
    wishes = current_wishes()
    if wishes is None:
        return own
    wishes.asked.add("epochs")
    return wishes.epochs or own


class Choice:
    """Stands for a network of several models side by side. chosen: the position of the one that trains and is evaluated."""

    chosen = 0

    def modules(self) -> Iterator[Choice]:
        """Yield itself, the part that has `chosen`."""
        yield self


class AppTrainer:
    """The trainer of a client half (strategies/base/local_update.py) whose training is the user's own function.

    run(start, wishes): trains. judge(model): returns the loss that the user's evaluate function finds. module: of methods with
    models side by side. Everything else that a Trainer has would need the user's data and network, and is refused by name.
    """

    module: Any

    def __init__(
        self,
        config: RunConfig,
        round: int,
        run: Callable[[Model, Wishes], Model],
        judge: Callable[[Model], float],
        module: Choice | None = None,
    ) -> None:
        self._config, self._round, self._run, self._judge = config, round, run, judge
        self._wishes = Wishes()
        if module is not None:
            self.module = module

    def train(
        self,
        start: Model,
        *,
        epochs: int | None = None,
        purpose: str = "train",
        correction: Correction | None = None,
        frozen: frozenset[str] | NDArray[np.bool_] = frozenset(),
        **others: Any,
    ) -> Model:
        """Return the model after the user's training. A method may ask for several; each is a call of the user's function."""
        if asked := sorted(name for name, value in others.items() if value):
            raise self.refusal(f"its own {listed(asked)} in local training")
        if not isinstance(frozen, frozenset):
            raise self.refusal("single parameters held fixed")
        self._wishes = Wishes(correction, frozen, epochs or 0)
        return self._run(start, self._wishes)

    @property
    def steps(self) -> int:
        """The number of steps of the last training: calls of `objective`."""
        self._wishes.check(self._config.method, counted=True)
        return self._wishes.steps

    @property
    def learning_rate(self) -> float:
        """The training loop's learning rate, an argument of the strategy."""
        return self._config.learning_rate * self._config.rate_factor(self._round)

    def sample_losses(self, model: Model, samples: object = None, module: object = None) -> NDArray[Any]:
        """Return the mean loss of a model by the user's evaluate function, float64 [1]. Losses of single samples are refused."""
        if samples is not None or module is not None:
            raise self.refusal(NEEDS["sample_losses"])
        return np.array([self._judge(model)])

    def leave_out(self, samples: NDArray[np.int64]) -> None:
        """Refuse to leave samples out of training, unless there are none."""
        if len(samples):
            raise self.refusal(NEEDS["leave_out"])

    def tensor(self, vector: Vector) -> Tensor:
        """Return a vector as the tensor that corrections compute with."""
        import torch

        return torch.tensor(vector)

    def refusal(self, what: str) -> UserError:
        """Return the error of a method that needs more than an app gives."""
        return beyond_app(self._config.method, f"needs {what}")

    def __getattr__(self, name: str) -> Any:
        """Raise UserError: it would need the user's data or network."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.refusal(NEEDS.get(name, f"trainer.{name}"))
