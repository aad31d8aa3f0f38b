"""Names of a model's features and outputs, and a file of weights whose order of them differs.

`corolla export` writes a card beside a model, which names its features and outputs and has its inputs' scaling. A file
for `initial-weights` is compared by these names: two tensors of equal shapes may still mean different things. Where
only the order differs, the weights are reordered in the layers that read the features and that give the outputs. A run
of the model finds these layers, and a comparison of outputs before and after proves the result.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fl_app import model_card
from fl_app.data.encoding import Encoding
from fl_app.errors import ConfigurationError, UserError, listed
from fl_app.known_names import SCALING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fl_app.data.prepared import DatasetInfo

# largest difference of outputs before and after reordering, relative to the largest output
_CLOSE = 1e-4
_PROBES = 4

Tensors = Mapping[str, "Tensor"]
# for each place here, the place in the file; -1: the file has none of this name
Order = tuple[int, ...]


class ModelNames(NamedTuple):
    """A model's names in order. features: (): the data have none; None: not known. outputs: classes or targets, or None.

    target_shift: targets are learned less this; () is 0.
    """

    features: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None
    target_shift: tuple[float, ...] = ()

    @classmethod
    def of(cls, info: DatasetInfo) -> ModelNames:
        """Return the names of a data set."""
        return cls(info.facts.features, info.classes, info.facts.target_shift)


@dataclass(frozen=True)
class ModelCard:
    """A model's card: its inputs and outputs. has_classes: of its task. scaling: the lists that SCALING names."""

    names: ModelNames
    has_classes: bool
    normalize: str
    scaling: Mapping[str, list[float]]

    def for_features(self, source: str, names: ModelNames) -> dict[str, list[float]]:
        """Return the inputs' scaling for features in the order of `names`. Raises UserError as `reordered` does."""
        order = _order(source, "features", self.names.features, names.features, partial=False)
        found = {name: list(values) for name, values in self.scaling.items()}
        for name in ("mean", "std", "shift", "scale") if order else ():
            found[name] = [found[name][k] for k in order or ()] if found[name] else []
        return found | {"target-shift": list(names.target_shift)}


def read_card(source: str, file: Path) -> ModelCard | None:
    """Return the content of a file's card, None without a card. Raises UserError if the card is damaged or of another file."""
    if not model_card.beside(file).is_file():
        return None
    try:
        card = model_card.read(file)
    except UserError as error:
        raise ConfigurationError(key=source, rule=f"{error}; export the model again, or remove the card") from None
    inputs, shift = card["input"], card.get("target-shift", [])
    scaling = {name: list(inputs.get(name, ())) for name in SCALING} | {"target-shift": shift}  # type: ignore[call-overload]
    names = ModelNames(tuple(card["features"]), tuple(card["classes"]), tuple(shift))
    return ModelCard(names, card["has-classes"], inputs["normalize"], scaling)


def names_in(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the features that a run's record of its columns gives (`input` of run.json)."""
    return tuple(name for fields in facts.get("encodings", ()) for name in Encoding.from_json(fields).names)


# Orders of names ------------------------------------------------------------------------------------------------------


def _order(
    source: str, what: str, theirs: Sequence[str] | None, ours: Sequence[str] | None, *, partial: bool
) -> Order | None:
    """Return where the file has each of our names; None if the order is equal, or if one side has no names.

    partial: names that the file lacks are at -1, and others of the file are not used. Raises UserError for these without
    `partial`.
    """
    if not theirs or not ours or not differ(theirs, ours):
        return None
    place = {name: k for k, name in enumerate(theirs)}
    new, gone = [name for name in ours if name not in place], [name for name in theirs if name not in set(ours)]
    if (new or gone) and not partial:
        lines = [f"the data have {listed(new)}, which the model does not know"] * bool(new)
        lines += [f"the model has {listed(gone)}, which the data lack"] * bool(gone)
        hint = "; initial-weights-partial = true takes the others by name" if len(new) < len(ours) else ""
        raise ConfigurationError(key=source, rule=f"its {what} are not the data's: {'; '.join(lines)}{hint}")
    return tuple(place.get(name, -1) for name in ours)


def differ(theirs: Sequence[str] | None, ours: Sequence[str] | None) -> bool:
    """Return whether two lists of names differ. False if they cannot be compared."""
    return _comparable(theirs, ours) and tuple(theirs or ()) != tuple(ours or ())


def _comparable(theirs: Sequence[str] | None, ours: Sequence[str] | None) -> bool:
    """Return whether both sides have names. 0, 1, 2, ... beside words stand for classes without names."""
    if not theirs or not ours:
        return False
    words = [any(not name.removeprefix("-").isdecimal() for name in side) for side in (theirs, ours)]
    return not ((_are_numbers(theirs) and words[1]) or (_are_numbers(ours) and words[0]))


def _are_numbers(names: Sequence[str]) -> bool:
    return list(names) == [str(k) for k in range(len(names))]


def not_compared(card: ModelCard, names: ModelNames) -> list[str]:
    """Return the kinds of names, "features" and "classes", that the card or the data do not have."""
    found = ["features"] if bool(card.names.features) != bool(names.features) else []
    found += [] if _comparable(card.names.outputs, names.outputs) else ["classes"]
    return found


# Weights --------------------------------------------------------------------------------------------------------------


class Ends(NamedTuple):
    """The tensors whose rows or columns are a model's features and outputs, each with the axis. bias: of the outputs."""

    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    bias: str


@dataclass(frozen=True)
class Reordering:
    """A change of a file's tensors into the order of a run's names.

    features, outputs: the orders; None: unchanged. less: added to the outputs' bias, because targets are learned less
    another shift. seeded: the model's own values, where the file has none.
    """

    ends: Ends
    features: Order | None
    outputs: Order | None
    less: tuple[float, ...]
    seeded: Tensors

    @property
    def changed(self) -> frozenset[str]:
        """Names of the tensors that may change."""
        return frozenset((*self.ends.inputs, *self.ends.outputs, self.ends.bias))

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of the file in our order. name: its name in the model."""
        for axes, order in ((self.ends.inputs, self.features), (self.ends.outputs, self.outputs)):
            if order is not None and name in axes:
                tensor = _taken(tensor, axes[name], order, self.seeded.get(name))
        if name == self.ends.bias and self.less and tensor.shape == (len(self.less),):
            tensor = tensor + tensor.new_tensor(self.less)
        return tensor


def _taken(tensor: Tensor, axis: int, order: Order, seeded: Tensor | None) -> Tensor:
    """Return a tensor's slices in an order along an axis, those at -1 from `seeded`. A tensor that has no such slices stays."""
    import torch

    if tensor.ndim <= axis or tensor.shape[axis] <= max(order):
        return tensor
    places = torch.tensor(order)
    found = tensor.index_select(axis, places.clamp(min=0))
    new = torch.nonzero(places < 0).flatten()
    if len(new) and seeded is not None and seeded.shape == found.shape:
        found = found.index_copy(axis, new, seeded.index_select(axis, new).to(found.dtype))
    return found


def reordering(
    source: str,
    card: ModelCard,
    names: ModelNames,
    module: nn.Module,
    example: Tensor,
    seeded: Tensors,
    *,
    partial: bool,
) -> Reordering | None:
    """Return the change that a file needs for a run's names, None if it needs none.

    module: the run's model. example: one of its inputs, [n, ...]. seeded: the model's tensors. partial: as in `_order`.
    Raises UserError if names differ, and if the model has no layers in which they can be reordered.
    """
    features = _order(source, "features", card.names.features, names.features, partial=partial)
    outputs = _order(source, "classes", card.names.outputs, names.outputs, partial=partial)
    less = _shift_between(card.names, names, outputs)
    if features is None and outputs is None and not less:
        return None
    ends = ends_of(module, example)
    if features is not None and (not ends.inputs or example[0].numel() != len(features)):
        raise _fixed(
            source, "features", names.features or (), "columns", "put the data's columns into the model's order"
        )
    if outputs is not None and not ends.outputs:
        raise _fixed(source, "classes", names.outputs or (), "rows", "set classes to the model's order")
    if less and not ends.bias:
        raise ConfigurationError(
            key=source, rule="its targets are learned less another shift, and the model has no bias that could hold it"
        )
    return Reordering(ends, features, outputs, less, seeded)


def _fixed(source: str, what: str, ours: Sequence[str], of: str, instead: str) -> UserError:
    return UserError(
        key=source,
        rule=f"its {what} have another order than the data's ({listed(list(ours))}), and the model has "
        f"no linear layer whose {of} could be reordered; {instead}",
    )


def _shift_between(theirs: ModelNames, ours: ModelNames, order: Order | None) -> tuple[float, ...]:
    """Return what the outputs must be increased by, () for nothing."""
    if not theirs.target_shift and not ours.target_shift:
        return ()
    count = len(ours.outputs or theirs.outputs or ())
    before = theirs.target_shift or (0.0,) * len(theirs.outputs or ())
    before = tuple(before[k] if k >= 0 else 0.0 for k in order) if order else before
    now = ours.target_shift or (0.0,) * count
    if len(before) != len(now):
        return ()
    found = tuple(old - new for old, new in zip(before, now, strict=True))
    return found if any(found) else ()


def refuse_wrong(
    source: str, how: Reordering, module: nn.Module, before: Tensors, after: Tensors, example: Tensor
) -> None:
    """Raise UserError unless reordered tensors give the outputs of the file's own, for reordered inputs.

    before, after: all tensors of the model by name. A change that is not only of the order is not checked.
    """
    import torch

    if any(order is not None and sorted(order) != list(range(len(order))) for order in (how.features, how.outputs)):
        return
    network, outputs = copy.deepcopy(module).eval(), []
    inputs = _probes(example)
    theirs = torch.empty_like(inputs)
    order = torch.tensor(how.features) if how.features else None
    theirs = inputs if order is None else theirs.index_copy(-1, order, inputs)
    for tensors, x in ((before, theirs), (after, inputs)):
        with torch.no_grad():
            state = dict(network.named_parameters()) | dict(network.named_buffers())
            for name, tensor in tensors.items():
                state[name].copy_(tensor)
            outputs.append(network(x))
    want = outputs[0] if how.outputs is None else outputs[0][:, list(how.outputs)]
    want = want + want.new_tensor(how.less) if how.less else want
    allowed = _CLOSE * max(1.0, float(want.abs().max()))
    if not float((outputs[1] - want).abs().max()) <= allowed:
        raise ConfigurationError(
            key=source,
            rule="has another order of features or classes than the data, and reordering the weights of "
            "its first and last layers changes what the model computes; give the data the model's "
            "order",
        )


def _probes(example: Tensor) -> Tensor:
    """Return a few inputs like the example, random if they are not tokens."""
    import torch

    x = torch.zeros((_PROBES, *example.shape[1:]), dtype=example.dtype)
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(0)) if x.is_floating_point() else x


# Layers ---------------------------------------------------------------------------------------------------------------


def ends_of(module: nn.Module, example: Tensor) -> Ends:
    """Return the tensors whose rows or columns are the inputs' features and the outputs, found by running the model.

    Layers without tensors pass an order on, as do normalizations of single features. The module stays as it is.
    """
    import torch
    from torch import nn

    from fl_app.tracing import traced

    network = copy.deepcopy(module).eval()
    inputs: dict[str, int] = {}
    # freed memory would be used for other tensors
    seen: list[object] = []
    x = _probes(example)
    size, carriers = x.numel(), {x.data_ptr()}

    def watch(name: str, layer: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        if not given or not isinstance(given[0], torch.Tensor) or not isinstance(output, torch.Tensor):
            return
        seen.extend((given[0], output))
        if given[0].data_ptr() not in carriers or given[0].numel() != size:
            return
        own = [*layer.named_parameters(), *layer.named_buffers()]
        if isinstance(layer, nn.Linear):
            inputs[f"{name}.weight".lstrip(".")] = 1
        elif isinstance(layer, (nn.BatchNorm1d, nn.LayerNorm)):
            inputs.update({f"{name}.{key}".lstrip("."): 0 for key, tensor in own if tensor.ndim == 1})
            carriers.add(output.data_ptr())
        elif not own and output.numel() == size:
            carriers.add(output.data_ptr())

    for name, layer in network.named_modules():
        if not list(layer.children()):
            layer.register_forward_hook(lambda layer, given, output, name=name: watch(name, layer, given, output))
    _, split, _ = traced(network, x)
    outputs = dict.fromkeys(split.classifier, 0) if split.linear else {}
    return Ends(inputs, outputs, next((name for name in outputs if name.endswith("bias")), ""))


def change_line(source: str, card: ModelCard | None, how: Reordering | None, names: ModelNames) -> str:
    """Return a line about the names that changed place, "" if all are equal."""
    if card is None:
        beside = model_card.beside(Path(source.rpartition(" ")[2])).name
        return (
            f"{source}: has no card ({beside}) beside it, as `corolla export` writes one: its classes, its features and their "
            "scaling cannot be compared with the data's"
        )
    parts = []
    for what, order in (("features", how.features if how else None), ("classes", how.outputs if how else None)):
        if order is not None:
            new = order.count(-1)
            parts.append(
                f"its {len(order) - new} {what} are put into the data's order"
                + f", {new} are from the seed" * bool(new)
            )
    if how and how.less:
        parts.append("its bias is moved to the data's targets")
    if gaps := not_compared(card, names):
        parts.append(f"its {' and '.join(gaps)} cannot be compared by name with the data's")
    return f"{source}: {'; '.join(parts)}" if parts else ""


def scaling_line(source: str, card: ModelCard, normalize: str, over: str) -> str:
    """Return a line about the scaling of the inputs, "" if mean and std are not used. normalize, over: of the run."""
    if "mean-std" not in (card.normalize, normalize):
        return ""
    if card.normalize != normalize:
        return f"{source}: its inputs were scaled by normalize = {card.normalize}, this run's are by {normalize}"
    if over == "initial":
        return f"{source}: inputs are scaled by the model's own mean and std (normalize-over = initial)"
    return (
        f"{source}: inputs are scaled by the mean and std of this run's data, not by the model's own; normalize-over = initial "
        "keeps the model's"
    )
