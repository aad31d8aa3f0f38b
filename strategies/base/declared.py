"""The values that a method declares: four of its server half, which the steps of a round read, and two of its network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import nn

    from fl_app.layout import Layout, Model
    from fl_app.transport.wire import Upload
    from strategies.kernels.parts import Part

PARAMETERS, STATISTICS = "parameters", "BatchNorm statistics"
"""What messages on outliers call the stacks of a model."""


@dataclass(frozen=True)
class Means:
    """How `update` uses means over clients (`ServerHalf.means`).

    - `rules`: values of the key `robust` besides "none". RULES for a method that takes its means from `Turn.average`.
    - `streams`: `update` needs only means of W and B with `weights`, by `turn.average.mean` or `weighted_mean`, and an upload's
      weight does not depend on other uploads. Uploads are then added up as they come, and no stack is kept.
    - `summed(server, upload, turn)`: with `streams`, returns further arrays of an upload to add up over clients, float64 [...] by
      name. The sums are in `Uploads.summed`.
    - `sets_model`: `update` sets the state's model's parameters to a mean of the uploads, and clients are sent that model. The key
      `server-optimizer` may then move it (strategies/engine/steps/server_optimizer.py).
    """

    rules: frozenset[str] = frozenset()
    streams: bool = False
    summed: Callable[[Any, Upload, Any], Mapping[str, NDArray[Any]]] | None = None
    sets_model: bool = False


@dataclass(frozen=True)
class Late:
    """How late uploads (key `staleness`) are used (`ServerHalf.late`). A reason refuses one use of them.

    - `never`: why they cannot be used at all.
    - `aged`: why an upload's age cannot lower its weight (`staleness-decay` below 1).
    - `moved`: why `staleness-rule = fedbuff` cannot be used.
    - `reads_moves`: `update` works on the differences between uploads and the models of `download`. Late uploads then come as
      if they had started from these: their own difference is added.
    """

    never: str = ""
    aged: str = ""
    moved: str = ""
    reads_moves: bool = False


@dataclass(frozen=True)
class Outliers:
    """What outlier screening (key `max-update-norm`) compares of the uploads (`ServerHalf.outliers`).

    Each upload is compared with the other uploads, and with what its client was sent (`Sent.reference`).

    - `tolerance`: factor on the bound, for methods with honest uploads that lie farther apart. inf: nothing is compared.
    - `models`: whether models are compared.
    - `extras`: further float arrays to compare: a plural name for messages -> the array's name.
    - `comparable(extras, reference)`: returns an upload's values of such an array in the form in which they are compared. extras:
      the upload's arrays by name. reference: the values that the client was sent. None: the array as it is.
    - `unmasked`: only the elements without a 1 in the upload's mask are compared.
    """

    tolerance: float = 1.0
    models: bool = True
    extras: Mapping[str, str] = field(default_factory=dict)
    comparable: Callable[[Mapping[str, NDArray[Any]], NDArray[Any]], NDArray[Any]] | None = None
    unmasked: bool = False


@dataclass(frozen=True)
class Holds:
    """What the server holds for a method, for the estimates of a run's memory and disk (`ServerHalf.holds`).

    - `models`: it keeps a model for every client between rounds.
    - `made`: stacks [N, d] that `update` makes beside the uploads. `kept`: those of them that are kept until the next round.
    - `memory(server)`: returns the bytes of the state's `memory` in a later round.
    """

    models: bool = False
    made: int = 0
    kept: int = 0
    memory: Callable[[Any], int] = lambda server: 0


@dataclass(frozen=True)
class Submodel:
    """A method whose clients each hold a part of the travelling tensors (`Method.submodel`).

    - `part(layout, extras)`: returns the part that a client uploads; it counts as unmoved elsewhere. layout: that of the travelling
      tensors. extras: the arrays that the client is sent beside the model.
    - `sent`: whether the client is sent that part alone.
    """

    part: Callable[[Layout, Mapping[str, NDArray[Any]]], Part]
    sent: bool = True

    def sent_part(self, layout: Layout, extras: Mapping[str, NDArray[Any]]) -> Part | None:
        """Return the part that a client is sent; None if it is sent the whole model."""
        return self.part(layout, extras) if self.sent else None


@dataclass(frozen=True)
class Exported:
    """How the models of a method leave the run, if its network is not the user's (`Method.exported`).

    - `network(make, names)`: returns the network of the final models. `names` are the names of its tensors, and `make()` builds the
      run's model. None: the run's model, or the trained network.
    - `layout(server, layout)`: returns the layout of models that leave the run. Default: unchanged.
    - `model(model, state, ctx)`: returns a client's personal model in that layout, in which it is hashed and collected. Default:
      unchanged.
    - `choices(server)`: returns models of which each client uses one unchanged. The run folder has each client's. Default: none.
    """

    network: Callable[[Callable[[], nn.Module], frozenset[str]], nn.Module] | None = None
    layout: Callable[[Any, Layout], Layout] = lambda server, layout: layout
    model: Callable[[Model, Any, Any], Model] = lambda model, state, ctx: model
    choices: Callable[[Any], Sequence[Model]] = lambda server: ()


CHANGE_SUMS = ("update", "personalize", "weights", "averaging_of")
"""Hooks: a class that overrides one must declare `means` again if uploads may still be added up."""
CHANGE_MODEL = ("update", "personalize", "download", "model_for")
"""Hooks: a class that overrides one must declare `means` again if the server optimizer may still move its model."""


def declares_means(half: type, *hooks: str) -> bool:
    """Return whether the class that declares `means` comes after every override of these hooks, or is one of them."""

    def owner(attribute: str) -> type:
        return next(each for each in half.__mro__ if attribute in vars(each))

    # not issubclass: a class that is being made has no answers of its own yet
    return all(owner(hook) in owner("means").__mro__ for hook in hooks)
