"""The bridge between a torch module and the flat vectors of fl_app.layout, and safetensors files of them.

Vectors: `params` float32 [d] holds `named_parameters()` in order (a tied parameter once), `buffers` float32 [b] the
floating-point buffers; see Layout. Files are safetensors, one tensor per name of the layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_app import model_names
from fl_app.errors import UserError, describe, listed
from fl_app.files import nearest_path, publish
from fl_app.layout import Layout, Model, Vector
from fl_app.model_names import ModelNames, Reordering

_PYTORCH = (".pt", ".pth")  # files of torch.save
# Usual keys of the state dict in a checkpoint.
_STATE_DICTS = ("state_dict", "model_state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.")
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


def initial_model(
    module: nn.Module,
    path: str,
    *,
    partial: bool = False,
    told: Callable[[str], None] = lambda line: None,
    names: ModelNames | None = None,
    example: Tensor | None = None,
) -> Model:
    """Return the model in the file `initial-weights`, as vectors of `module`, which stays as it is.

    The file is safetensors or a PyTorch state dict. Names and shapes must equal the module's, except for `module.` and
    `_orig_mod.` before all names. Any floating dtype is converted to float32. Integer tensors (such as
    `num_batches_tracked`) and second names of tied parameters are ignored. Buffers that a state dict never holds keep
    the module's values.

    partial: tensors that the file lacks, or has with another shape, keep the module's values. A tensor whose name is not
    in the file may come from one of another name (`_by_order`). told: takes a line with the names of both kinds.

    names: of the data's features and outputs. If the card beside the file names them in another order, the weights are
    reordered (fl_app/model_names.py). example: an input of the module, [n, ...], with which it is tried for this.

    Raises UserError if the file is missing or unreadable, does not fit (naming the tensors), or holds NaN or infinity.
    With `partial` it does not fit if no tensor does. Raises UserError if the card's names are not the data's.
    """
    layout, state = Layout.of(module), module.state_dict()
    own = {name: torch.from_numpy(array) for name, array in layout.tensors(read(module)).items() if name not in state}
    source = f"initial-weights {path}"
    loaded = _without_prefix(_load(path, source), {*layout.names, *state})
    found = {name: t for name, t in loaded.items() if name in layout.names or name not in state}
    how, seeded = None, read(module)
    if names is not None and example is not None:
        card = model_names.read_card(source, Path(path))
        if card is not None:
            own_values = {name: torch.from_numpy(array) for name, array in layout.tensors(seeded).items()}
            how = model_names.reordering(source, card, names, module, example, own_values, partial=partial)
        if line := model_names.change_line(source, card, how, names):
            told(line)
    given = found
    if how is not None:
        found = {name: how.of(name, tensor) for name, tensor in found.items()}
    if partial:
        return _fit_partly(source, found, layout, seeded, Path(path).suffix in _PYTORCH, told, how)
    buffers = [slot.name for slot in layout.buffers if slot.name not in own | found]
    if buffers and all(slot.name in found for slot in layout.params):
        raise UserError(
            key=source,
            rule=f"holds the parameters but not the buffers {listed(buffers)}; save `module.state_dict()`, "
            "which has both, instead of `named_parameters()`",
        )
    fitting = _fit(source, own | found, layout, _PARTIAL)
    if how is not None and example is not None:
        both = (layout.tensors(_fit(source, own | given, layout)), layout.tensors(fitting))
        before, after = ({name: torch.from_numpy(array) for name, array in side.items()} for side in both)
        model_names.refuse_wrong(source, how, module, before, after, example)
    return fitting


def _fit_partly(
    source: str,
    found: Mapping[str, Tensor],
    layout: Layout,
    seeded: Model,
    ordered: bool,
    told: Callable[[str], None],
    how: Reordering | None = None,
) -> Model:
    """Return the tensors of the file that fit, and the seeded ones elsewhere. Report both.

    ordered: the file has its tensors in the model's order. how: what was done to tensors of the model's names.
    """
    slots = {slot.name: slot for slot in layout.params + layout.buffers}
    floating = {name: tensor for name, tensor in found.items() if tensor.is_floating_point()}
    same = {name for name, tensor in floating.items() if name in slots and tuple(tensor.shape) == slots[name].shape}
    of = {name: name for name in same} | _by_order(
        {name: slot.shape for name, slot in slots.items() if name not in floating},
        {name: tuple(tensor.shape) for name, tensor in floating.items() if name not in slots},
        ordered,
    )
    if not of:
        raise UserError(key=source, rule="no tensor fits the model, in name and shape or in order and shape")
    renamed = [f"{name} is {theirs} there" for name, theirs in of.items() if name != theirs]
    drawn = [f"{name} {list(slot.shape)}" for name, slot in slots.items() if name not in of]
    unused = [f"{name} {list(tensor.shape)}" for name, tensor in floating.items() if name not in of.values()]
    lists = {"by order and shape": renamed, "from the seed": drawn, "in the file, not used": unused}
    parts = [f"{what} ({len(names)}): {listed(names, ', ')}" for what, names in lists.items() if names]
    told("; ".join([f"{source}: {len(of)} of {len(slots)} tensors are from the file", *parts]))
    rest = {name: torch.from_numpy(array) for name, array in layout.tensors(seeded).items()}
    taken = {name: floating[theirs] for name, theirs in of.items()}
    if how is not None:
        taken |= {name: how.of(name, taken[name]) for name, theirs in of.items() if name != theirs}
    return _fit(source, rest | taken, layout)


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
    return _fit(str(path), _load(path, str(path)), layout)


def names_in(path: str | Path) -> frozenset[str]:
    """Return the names of a safetensors file's floating-point tensors. Raises UserError if it is missing or unreadable."""
    return frozenset(name for name, tensor in _load(path, str(path)).items() if tensor.is_floating_point())


def _load(path: str | Path, source: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if Path(path).suffix in _PYTORCH and Path(path).is_file():
        return load_state_dict(path, source)
    try:
        return load_file(path)
    except FileNotFoundError as error:
        expected = f"a safetensors file or a PyTorch state dict ({', '.join(_PYTORCH)})"
        near = nearest_path(Path(path))
        raise UserError(
            key=source,
            rule=f"no such file or directory; expected {expected}{f'; did you mean {near}?' if near else ''}",
        ) from error
    except (OSError, SafetensorError) as error:
        other = (
            ""
            if Path(path).suffix == ".safetensors"
            else f"; the name of a PyTorch state dict must end in {' or '.join(_PYTORCH)}"
        )
        raise UserError(key=source, rule=f"not a readable safetensors file ({describe(error)}){other}") from error


def load_state_dict(path: str | Path, source: str) -> dict[str, Tensor]:
    """Read a file of `torch.save(module.state_dict(), path)` or of `corolla export`. Only tensors are unpickled.

    A checkpoint has its state dict under a usual key (_STATE_DICTS). `list(module.named_parameters())` is read too.

    Raises UserError if the file cannot be read, or holds no state dict. source: the file's name in errors.
    """
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a bad file
        raise UserError(
            key=source, rule=f"not a readable PyTorch file with only tensors ({describe(error).splitlines()[0]})"
        ) from error
    if isinstance(state, Mapping) and (
        key := next((k for k in _STATE_DICTS if isinstance(state.get(k), Mapping)), None)
    ):
        state = state[key]
    try:
        named = dict(state)
    except (TypeError, ValueError):
        named = None
    if named is None or not all(isinstance(name, str) and isinstance(t, Tensor) for name, t in named.items()):
        known = ", ".join(map(repr, _STATE_DICTS))
        got = listed([repr(name) for name in named]) if named else type(state).__name__
        raise UserError(
            key=source, rule=f"must hold a state dict (tensors by name), or have one under {known}; got {got}"
        )
    return {name: t.detach() for name, t in named.items()}


def _without_prefix(found: dict[str, Tensor], names: Container[str]) -> dict[str, Tensor]:
    """Remove the prefix of DataParallel and torch.compile from all names, if no name fits with it."""
    while found and not any(name in names for name in found):
        prefix = next((p for p in _PREFIXES if all(name.startswith(p) for name in found)), None)
        if prefix is None:
            break
        found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return found


def _fit(source: str, tensors: Mapping[str, Tensor], layout: Layout, hint: str = "") -> Model:
    slots = layout.params + layout.buffers
    missing = [f"{s.name} {list(s.shape)}" for s in slots if s.name not in tensors]
    unexpected = [f"{n} {list(t.shape)}" for n, t in tensors.items() if n not in layout.names and t.is_floating_point()]
    wrong = []
    for slot in slots:
        tensor = tensors.get(slot.name)
        if tensor is not None and (tuple(tensor.shape) != slot.shape or not tensor.is_floating_point()):
            kind = "" if tensor.is_floating_point() else f"{tensor.dtype} "
            wrong.append(f"{slot.name} {kind}{list(tensor.shape)}, expected {list(slot.shape)}")
    groups = {"missing": missing, "unexpected": unexpected, "wrong shape or type": wrong}
    if any(groups.values()):
        lines = [f"  {what} ({len(names)}): {listed(names, '; ')}" for what, names in groups.items() if names]
        raise UserError(f"{source}: does not fit the model:\n" + "\n".join(lines) + hint)
    # a few bytes of a sparse tensor may stand for more than any memory holds
    dense = {s.name: t if (t := tensors[s.name]).layout == torch.strided else t.to_dense() for s in slots}
    arrays = {name: tensor.to(torch.float32).numpy() for name, tensor in dense.items()}
    infinite = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    if infinite:
        raise UserError(key=source, rule=f"all values must be finite in float32, got others in {listed(infinite)}")
    return layout.model(arrays)
