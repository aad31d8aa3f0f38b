"""The bridge between a torch module and the flat vectors of fl_app.layout, and safetensors files of them.

Vectors: `params` float32 [d] holds `named_parameters()` in order (a tied parameter once), `buffers` float32 [b] the
floating-point buffers; see Layout. Files are safetensors, one tensor per name of the layout.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fl_app import model_names
from fl_app.errors import UserError, listed
from fl_app.files import publish
from fl_app.layout import Layout, Model, Slot, Vector
from fl_app.model_names import ModelNames, Reordering
from fl_app.weight_files import (
    INITIAL_WEIGHTS,
    PYTORCH,
    StoredTensor,
    is_unused,
    named_as_wrapped,
    open_weights,
    without_prefix,
)

_PARTIAL = "\n  initial-weights-partial = true takes what fits from the file, and the rest from the seed"


def read(module: nn.Module) -> Model:
    """Copy a module's parameters and float buffers into vectors: params float32 [d], buffers float32 [b].

    One device-to-host copy per vector; the result shares no memory with the module.
    """
    return Model(_flat(module.parameters()), _flat(_float_buffers(module)))


def write(module: nn.Module, model: Model) -> None:
    """Copy vectors into a module in place, wherever it lives; the inverse of `read`.

    model: params float32 [d], buffers float32 [b]; read-only arrays are fine. One host-to-device copy per vector.
    """
    with torch.no_grad():
        _unflat(list(module.parameters()), model.params)
        _unflat(_float_buffers(module), model.buffers)


def _float_buffers(module: nn.Module) -> list[Tensor]:
    constant: frozenset[str] = getattr(module, "frozen_names", frozenset())
    return [buffer for name, buffer in module.named_buffers() if buffer.is_floating_point() and name not in constant]


def _flat(tensors: Iterable[Tensor]) -> Vector:
    pieces = [tensor.detach().reshape(-1) for tensor in tensors]
    if not pieces:
        return np.zeros(0, np.float32)
    vector: Vector = torch.cat(pieces).cpu().numpy()
    return vector


def _unflat(tensors: list[Tensor], vector: Vector) -> None:
    sizes = [tensor.numel() for tensor in tensors]
    assert vector.shape == (sum(sizes),), f"vector has shape {vector.shape}, the module {sum(sizes)} elements"
    if not tensors:
        return
    # torch.tensor, not from_numpy: vectors from the wire or a memory map are read-only, and from_numpy warns about that.
    source = torch.tensor(vector, device=tensors[0].device)
    for tensor, piece in zip(tensors, source.split_with_sizes(sizes), strict=True):
        tensor.copy_(piece.view(tensor.shape))


def load_initial(
    module: nn.Module,
    path: str,
    *,
    partial: bool = False,
    trains: Container[str] | None = None,
    told: Callable[[str], None] = lambda line: None,
    names: ModelNames | None = None,
    example: Tensor | None = None,
) -> None:
    """Put the tensors of `initial-weights` into a module, one at a time.

    The source is safetensors, one file or shards, or a PyTorch state dict (fl_app/weight_files.py). Names and shapes must
    equal the module's, except for `module.` and `_orig_mod.` before all names, and for what peft puts into the names of a
    base model's tensors. Any floating dtype is converted to float32.
    Integer tensors (such as `num_batches_tracked`) and second names of tied parameters are ignored. Buffers that a state
    dict never holds keep the module's values.

    partial: tensors that the source lacks, or has with another shape, keep the module's values. A tensor whose name is not
    in the source may come from one of another name (`_by_order`). told: takes a line with the names of both kinds.

    trains: names of the tensors that train, if others do not. The source may lack these, and layers that peft does not use.

    names: of the data's features and outputs. If the card beside the file names them in another order, the weights are
    reordered (fl_app/model_names.py). example: an input of the module, [n, ...], with which it is tried for this.

    Raises UserError if a file is missing or unreadable, does not fit (naming the tensors), or holds NaN or infinity. With
    `partial` it does not fit if no tensor does. Raises UserError if the card's names are not the data's. Values that are
    not finite, and a reordering that fails, are found when the module has them.
    """
    layout, state = Layout.of(module), module.state_dict()
    source = f"{INITIAL_WEIGHTS} {path}"
    stored = without_prefix(open_weights(path, INITIAL_WEIGHTS), {*layout.names, *state})
    stored = named_as_wrapped(stored, dict.fromkeys((*layout.names, *state)))
    found = {name: one for name, one in stored.items() if name in layout.names or name not in state}
    own = _tensors(module, layout)
    how = None
    if names is not None and example is not None:
        card = model_names.read_card(source, Path(path))
        if card is not None:
            how = model_names.reordering(source, card, names, module, example, own, partial=partial)
        if line := model_names.change_line(source, card, how, names):
            told(line)
    given, found = found, {name: _in_our_order(how, name, one) for name, one in found.items()}
    if partial:
        _fill(source, own, _fitting(source, found, layout, Path(path).suffix in PYTORCH, told, how))
        return
    buffers = [slot.name for slot in layout.buffers if slot.name in state.keys() - found.keys()]
    if buffers and all(slot.name in found for slot in layout.params):
        raise UserError(
            key=source,
            rule=f"holds the parameters but not the buffers {listed(buffers)}; save `module.state_dict()`, "
            "which has both, instead of `named_parameters()`",
        )
    slots = layout.params + layout.buffers
    drawn = [s for s in slots if trains is not None and s.name not in found and (s.name in trains or is_unused(s.name))]
    _refuse_unfit(source, found, layout, (layout.names - state.keys()).union(s.name for s in drawn), _PARTIAL)
    if drawn:
        told(_share(source, len(slots) - len(drawn), len(slots), {"from the seed": [_described(s) for s in drawn]}))
    _fill(source, own, {name: one for name, one in found.items() if name in layout.names})
    if how is not None and example is not None:
        before = own | {name: given[name].read() for name in how.changed & given.keys()}
        model_names.refuse_wrong(source, how, module, before, own, example)


def _tensors(module: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """Return a module's tensors of a layout by name, themselves and not copies."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: tensor.detach() for name, tensor in tensors if name in layout.names}


def _in_our_order(how: Reordering | None, name: str, one: StoredTensor) -> StoredTensor:
    """Return a tensor as a run's names order it. name: its name in the model."""
    if how is None or name not in how.changed:
        return one
    tensor = how.of(name, one.read())
    return replace(one, shape=tuple(tensor.shape), read=lambda: tensor)


def _fitting(
    source: str,
    found: Mapping[str, StoredTensor],
    layout: Layout,
    ordered: bool,
    told: Callable[[str], None],
    how: Reordering | None = None,
) -> dict[str, StoredTensor]:
    """Return the tensors of a file that fit, by their names in the model. Report them, and the others.

    ordered: the file has its tensors in the model's order. how: was applied to the tensors of the model's names.
    """
    slots = {slot.name: slot for slot in layout.params + layout.buffers}
    floating = {name: one for name, one in found.items() if one.is_floating}
    same = {name for name, one in floating.items() if name in slots and one.shape == slots[name].shape}
    of = {name: name for name in same} | _by_order(
        {name: slot.shape for name, slot in slots.items() if name not in floating},
        {name: one.shape for name, one in floating.items() if name not in slots},
        ordered,
    )
    if not of:
        raise UserError(key=source, rule="no tensor fits the model, in name and shape or in order and shape")
    renamed = [f"{name} is {theirs} there" for name, theirs in of.items() if name != theirs]
    drawn = [_described(slot) for name, slot in slots.items() if name not in of]
    unused = [f"{name} {one.described}" for name, one in floating.items() if name not in of.values()]
    lists = {"by order and shape": renamed, "from the seed": drawn, "in the file, not used": unused}
    told(_share(source, len(of), len(slots), lists))
    taken = {name: floating[theirs] for name, theirs in of.items()}
    return taken | {name: _in_our_order(how, name, taken[name]) for name, theirs in of.items() if name != theirs}


def _share(source: str, given: int, count: int, lists: Mapping[str, list[str]]) -> str:
    """Return the line about a file that gives a part of a model's tensors. lists: others, by what they are."""
    parts = [f"{what} ({len(names)}): {listed(names, ', ')}" for what, names in lists.items() if names]
    return "; ".join([f"{source}: {given} of {count} tensors are from the file", *parts])


def _described(slot: Slot) -> str:
    return f"{slot.name} {list(slot.shape)}"


def _by_order(
    wanted: Mapping[str, tuple[int, ...]], offered: Mapping[str, tuple[int, ...]], ordered: bool
) -> dict[str, str]:
    """Return the tensors of other names that stand for the wanted ones, by wanted name.

    Both map names to shapes. A block is a module of layers: `layer1.0` for `layer1.0.conv1.weight`. Within a block, the
    wanted tensors of a shape and a last name match the offered ones in order, if there are equally many. Without
    `ordered` they must be one and one.
    """

    def kinds(shapes: Mapping[str, tuple[int, ...]]) -> dict[object, list[str]]:
        found: dict[object, list[str]] = defaultdict(list)
        for name, shape in shapes.items():
            *block, _, last = ["", *name.split(".")]
            found[(*block, last, shape)].append(name)
        return found

    theirs = kinds(offered)
    matched: dict[str, str] = {}
    for kind, names in kinds(wanted).items():
        if len(names) == len(theirs.get(kind, [])) and (ordered or len(names) == 1):
            matched |= dict(zip(names, theirs[kind], strict=True))
    return matched


def save_safetensors(path: str | Path, layout: Layout, model: Model) -> None:
    """Write a model by tensor name, atomically: `path` holds the old file or the whole new one, never a part.

    Raises OSError if the directory does not exist or cannot be written.
    """
    from safetensors.numpy import save

    publish(Path(path), lambda file: file.write_bytes(save(layout.tensors(model), metadata={"format": "pt"})))


def load_safetensors(path: str | Path, layout: Layout) -> Model:
    """Read a file of `save_safetensors`: params float32 [d], buffers float32 [b]. Integer tensors are ignored.

    Raises UserError if the file is missing or unreadable, does not fit the layout, or holds NaN or infinity.
    """
    found = open_weights(path)
    _refuse_unfit(str(path), found, layout)
    model = Model(np.empty(layout.d, np.float32), np.empty(layout.b, np.float32))
    targets = {name: torch.from_numpy(array) for name, array in layout.tensors(model).items()}
    _fill(str(path), targets, {name: found[name] for name in targets})
    return model


def names_in(path: str | Path) -> frozenset[str]:
    """Return the names of a safetensors file's floating-point tensors. Raises UserError if it is missing or unreadable."""
    return frozenset(name for name, stored in open_weights(path).items() if stored.is_floating)


def _refuse_unfit(
    source: str,
    found: Mapping[str, StoredTensor],
    layout: Layout,
    spared: Container[str] = frozenset(),
    hint: str = "",
) -> None:
    """Raise UserError, naming the tensors, unless a file has a layout's names and shapes. spared: names that it may lack."""
    slots = layout.params + layout.buffers
    missing = [_described(s) for s in slots if s.name not in found and s.name not in spared]
    unexpected = [f"{n} {one.described}" for n, one in found.items() if n not in layout.names and one.is_floating]
    wrong = [
        f"{slot.name} {one.described}, expected {list(slot.shape)}"
        for slot in slots
        if (one := found.get(slot.name)) is not None and (one.shape != slot.shape or not one.is_floating)
    ]
    groups = {"missing": missing, "unexpected": unexpected, "wrong shape or type": wrong}
    if any(groups.values()):
        lines = [f"  {what} ({len(names)}): {listed(names, '; ')}" for what, names in groups.items() if names]
        raise UserError(f"{source}: does not fit the model:\n" + "\n".join(lines) + hint)


@torch.no_grad()
def _fill(source: str, targets: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> None:
    """Copy stored tensors, one after the other, into targets of their names and shapes.

    Raises UserError if a value is not finite in float32.
    """
    infinite = []
    for name, one in stored.items():
        tensor = one.read()
        if tensor.layout != torch.strided:
            # only now: a few bytes of a sparse tensor of another shape may stand for more than any memory holds
            tensor = tensor.to_dense()
        target = targets[name].copy_(tensor)
        if target.numel() and not all(map(math.isfinite, torch.aminmax(target))):
            infinite.append(f"{name}{f' in {one.shard}' if one.shard else ''}")
        # before the next one is read
        del tensor
    if infinite:
        raise UserError(key=source, rule=f"all values must be finite in float32, got others in {listed(infinite)}")
