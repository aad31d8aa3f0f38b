"""The last layers of a network: one pass of a trial batch shows through which parameters its output went last.

The pass is watched below autograd, operation by operation (`TorchDispatchMode`). Module hooks alone would miss layers
whose `forward` is never called: a weight in `F.linear(x, self.w)`, `nn.MultiheadAttention`'s `out_proj`. A walk over
autograd's graph would miss what data go through: the embedding of a token has no edge to its data, and looks like a
weight that is computed from another. Hooks give the call of an operation. The graph gives the parameters that have a gradient.

- A use is an operation on data and parameters. Parameters may be computed from others first (weight norm).
- Operations on each element and normalizations continue the layer before them: a bias, a scale, BatchNorm.
- The last layers are the uses that reach the output, and that no other use follows. Two heads that are averaged are two.
- A module that holds them and only branches beside them belongs to them as a whole: an adapter, a parametrization.

The pass runs once, in evaluation mode. It draws nothing, and changes no statistics. Where a parameter has no gradient, a
copy runs once more, as in training.
"""

from __future__ import annotations

import copy
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fl_app.contents import Contents, Effects
from fl_app.errors import listed
from fl_app.layout import Split

# operations that keep every value of a tensor, if it has as many afterwards
_SAME_VALUES = frozenset(
    "view _unsafe_view reshape squeeze unsqueeze alias detach clone _to_copy slice expand flatten".split()
)
# a shift of a sample's outputs, which no loss over classes sees
_SAME_ANSWER = _SAME_VALUES | {"_log_softmax"}
# operations that give new memory of a tensor's kind, without its values
_VALUELESS = frozenset("new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like".split())


@dataclass(eq=False)
class _Call:
    """A module's call, and its inputs."""

    path: str
    inputs: tuple[Any, ...]


@dataclass(eq=False)
class _Use:
    """An operation on data and parameters.

    last: the uses it follows at once. before: all that it follows. size: elements of its result. continues: it belongs to
    the layer before it.
    """

    own: frozenset[str]
    calls: tuple[_Call, ...]
    last: frozenset[_Use]
    before: frozenset[_Use]
    size: int
    continues: bool


class _Known(NamedTuple):
    """What is known of a tensor.

    own: parameters that it was computed from. data: whether it depends on the batch. last: the uses it came through
    last. output: the call whose answer it is.
    """

    own: frozenset[str] = frozenset()
    data: bool = False
    last: frozenset[_Use] = frozenset()
    output: _Call | None = None

    def merged(self, other: _Known) -> _Known:
        return _Known(self.own | other.own, self.data or other.data, self.last | other.last)


_UNKNOWN = _Known()


def _all_before(uses: Iterable[_Use]) -> frozenset[_Use]:
    found = set(uses)
    for use in uses:
        found |= use.before
    return frozenset(found)


@dataclass
class _Memory:
    """What is known of tensors and of the memory that they view. `alive` holds them, so that no id is given twice."""

    tensors: dict[int, _Known] = field(default_factory=dict)
    storages: dict[int, _Known] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)

    def __getitem__(self, tensor: Tensor) -> _Known:
        known = self.tensors.get(id(tensor))
        shared = self.storages.get(_storage(tensor))
        if known is None:
            return shared or _UNKNOWN
        return known.merged(shared) if shared is not None and shared.data else known

    def put(self, tensor: Tensor, known: _Known) -> None:
        self.tensors[id(tensor)] = known
        self.alive.append(tensor)

    def write(self, tensor: Tensor, known: _Known) -> None:
        """Note values written into a tensor's memory, which other tensors may view."""
        self.put(tensor, known)
        at = _storage(tensor)
        self.storages[at] = self.storages.get(at, _UNKNOWN).merged(known)


def _storage(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided or is_lazy(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        # it has none
        return -id(tensor)
    return int(tensor.untyped_storage()._cdata)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows a batch through a network's operations."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import its compiler, for seconds, to keep it off code that runs uncompiled here anyway."""
        return False

    def __init__(self, module: nn.Module, example: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory, self.uses, self.stack = _Memory(), list[_Use](), list[_Call]()
        self.calls: list[_Call] = []
        self.written = frozenset[str]()
        self.own: dict[int, frozenset[str]] = {}
        for name, tensor in _floating(module):
            self.own[_storage(tensor)] = self.own.get(_storage(tensor), frozenset()) | {name}
            self.memory.put(tensor, _Known(frozenset([name])))
            at = _storage(tensor)
            self.memory.storages[at] = self.memory.storages.get(at, _UNKNOWN).merged(_Known(frozenset([name])))
        self.memory.write(example, _Known(data=True))

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [(leaf, self.memory[leaf]) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in _written(func, args, kwargs):
            self.written |= self.own.get(_storage(tensor), frozenset())
        known = self._result(func, given, outputs)
        if known is not _UNKNOWN:
            for tensor in outputs:
                self.memory.put(tensor, known)
            for tensor in _written(func, args, kwargs):
                self.memory.write(tensor, known)
        return result

    def _result(self, func: Any, given: list[tuple[Tensor, _Known]], outputs: list[Tensor]) -> _Known:
        """Return what is known of an operation's results."""
        own = frozenset[str]().union(*(known.own for _, known in given))
        data = [(tensor, known) for tensor, known in given if known.data]
        name = func.overloadpacket.__name__
        if not data or name in _VALUELESS:
            return _Known(own) if own else _UNKNOWN
        last = frozenset[_Use]().union(*(known.last for _, known in data))
        if own:
            size = max((tensor.numel() for tensor in outputs), default=0)
            continues = bool(last) and _continues(func, size, max(use.size for use in last))
            use = _Use(own, tuple(self.stack), last, _all_before(last), size, continues)
            self.uses.append(use)
            return _Known(data=True, last=frozenset([use]))
        tensor, known = data[0]
        same = len(data) == 1 and name in _SAME_ANSWER and outputs and outputs[0].numel() == tensor.numel()
        return _Known(data=True, last=last, output=known.output if same else None)

    def enter(self, path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        """Return a hook that notes the begin of a module's call."""

        def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            self.stack.append(_Call(path, inputs))
            self.calls.append(self.stack[-1])

        return hook

    def leave(self, _: nn.Module, inputs: object, output: object) -> None:
        """Note the end of a module's call."""
        call = self.stack.pop()
        if isinstance(output, Tensor) and (known := self.memory[output]).data:
            # the innermost call counts: a container gives what its last part gives
            self.memory.put(output, known if known.output is not None else known._replace(output=call))

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Watch all calls and operations inside the `with` block."""
        with ExitStack() as undo:
            for path, part in module.named_modules():
                if isinstance(part, torch.jit.ScriptModule):
                    continue
                undo.callback(part.register_forward_pre_hook(self.enter(path)).remove)
                undo.callback(part.register_forward_hook(self.leave, always_call=True).remove)
            undo.enter_context(uncompiled())
            undo.enter_context(self)
            yield


def _floating(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return a network's parameters and floating-point buffers by name, a tied one under its first name."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [(name, tensor) for name, tensor in tensors if tensor.is_floating_point()]


def _continues(func: Any, size: int, before: int) -> bool:
    """Return whether an operation with parameters continues the layer before it.

    It does if it treats each number alone or normalizes, and if it adds values beside them. It does not if each number
    meets several parameters, as in a distance to prototypes. size, before: elements of its result, and of that layer's.
    """
    name = func.overloadpacket.__name__
    return name in ("cat", "stack") or (size <= before and (torch.Tag.pointwise in func.tags or "norm" in name))


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled functions as they were written."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the arguments that an operation changes in place."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def traced(
    module: nn.Module, example: Tensor, wanted: Callable[[], frozenset[str]] | None = None
) -> tuple[Any, Split, frozenset[str]]:
    """Return a module's output for a batch, its split into body and classifier, and the names of tensors that it wrote into.

    wanted: returns the names of the classifier's tensors, if the user names them. It is called after the pass, because
    that may create tensors (LazyLinear). Raises what the module's `forward` raises.
    """
    watch = _Watch(module, example)
    with watch.watching(module), torch.enable_grad():
        output = module(example)
    if not isinstance(output, Tensor):
        return output, Split(fault="its output is no tensor"), watch.written
    split = _Trace(watch, module, example, output).split(None if wanted is None else wanted())
    return output.detach(), split, watch.written


class _Trace:
    """A network's uses of parameters, up to its output."""

    def __init__(self, watch: _Watch, module: nn.Module, example: Tensor, output: Tensor) -> None:
        self.module, self.known = module, watch.memory[output]
        passed = _all_before(self.known.last)
        self.uses = [use for use in watch.uses if use in passed]
        self.every_use, self.calls, self.batch = watch.uses, watch.calls, len(output)
        self.names = [name for name, _ in _floating(module)]
        self.unused = self._unused(output, example)

    def split(self, wanted: frozenset[str] | None) -> Split:
        """Return the split. wanted: the classifier's tensors, None if they are to be found."""
        if wanted is not None:
            last = [use for use in self.uses if use.own & wanted]
            return self._described(wanted, last, last)
        ends = self._ends()
        if not ends:
            return Split(unused=self.unused, fault="no parameters are on the way to its output")
        heads = [use for use in ends if not use.continues] or ends
        last = self._with_branches(ends, heads)
        found = self._belonging(last)
        below = frozenset[str]().union(*(use.own for use in self.every_use if use not in last))
        if tied := sorted(found & below):
            return Split(unused=self.unused, fault=f"its last layer and a layer below it both use {listed(tied)}")
        return self._described(found, last, heads)

    def _described(self, found: frozenset[str], last: list[_Use], heads: list[_Use]) -> Split:
        """Return the split with the module that holds the last uses, or of them those that make layers."""
        layer = self._layer(last, last) or self._layer(heads, last)
        path = None if layer is None else layer.path
        return Split(found, path, layer is not None and self._is_linear(layer, found), self.unused)

    def _ends(self) -> list[_Use]:
        """Return the uses that no other follows, and those before them that they continue."""
        found, waiting = set[_Use](), set(self._maximal(self.known.last))
        while waiting:
            use = waiting.pop()
            found.add(use)
            if use.continues:
                waiting |= set(self._maximal(use.last)) - found
        followed = {before for use in found if not use.continues for before in use.before}
        ends = [use for use in self.uses if use in found - followed]
        # a body that is called again for a skip connection is no end
        below = set[str]().union(*(use.own for use in self.uses if use not in ends))
        return [use for use in ends if not use.own <= below] or ends

    @staticmethod
    def _maximal(uses: frozenset[_Use]) -> list[_Use]:
        followed = {before for use in uses for before in use.before}
        return [use for use in uses if use not in followed]

    def _with_branches(self, ends: list[_Use], heads: list[_Use]) -> list[_Use]:
        """Return the last uses with those of branches beside them, in the call of a module that holds no body."""
        call = self._common(ends)
        if call is None:
            return ends
        inside = [use for use in self.every_use if call in use.calls]
        beside = [use for use in inside if use not in ends]
        before_all = set(heads[0].before).intersection(*(use.before for use in heads))
        return ends if before_all.intersection(beside) or not set(self.uses).difference(inside) else inside

    def _belonging(self, last: list[_Use]) -> frozenset[str]:
        """Return the tensors of uses, and those of the modules that only these uses are in."""
        found = set[str]().union(*(use.own for use in last))
        others = set[str]().union(*(use.own for use in self.every_use if use not in last))
        calls = {call for use in last for call in use.calls[1:]}
        for call in calls:
            if all(use in last for use in self.every_use if call in use.calls):
                found |= {name for name in self.names if name.startswith(f"{call.path}.") and name not in others}
        # a frozen copy that is not run, as adapters keep one of a layer that they replace
        kept = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        return frozenset(found - (kept - set[str]().union(*(use.own for use in last))))

    @staticmethod
    def _common(uses: list[_Use]) -> _Call | None:
        """Return the innermost call that all uses are in, None if it is the network's own."""
        shared = [call for call in uses[0].calls[1:] if all(call in use.calls for use in uses)] if uses else []
        return shared[-1] if shared else None

    def _layer(self, uses: list[_Use], last: list[_Use]) -> _Call | None:
        """Return the call of the module that holds these uses and no others but `last`, and is called once."""
        call = self._common(uses)
        if call is None or sum(other.path == call.path for other in self.calls) > 1:
            return None
        if any(call in use.calls for use in self.every_use if use not in last):
            return None
        return call if self._width(call) else None

    def _width(self, call: _Call) -> int:
        """Return the numbers of a call's input per sample, 0 if the input is no batch."""
        given = call.inputs[0] if call.inputs else None
        if not isinstance(given, Tensor) or given.ndim < 2 or len(given) != self.batch:
            return 0
        return given.numel() // self.batch

    def _is_linear(self, call: _Call, found: frozenset[str]) -> bool:
        """Return whether a call is that of a Linear layer with plain tensors, and gives the network's output."""
        layer = self.module.get_submodule(call.path)
        own = {f"{call.path}.{name}" for name, tensor in layer._parameters.items() if tensor is not None}
        is_output = found == own and self.known.output is call
        return is_output and _computes_linear(layer) and self._width(call) == layer.in_features

    def _unused(self, output: Tensor, example: Tensor) -> frozenset[str]:
        """Return the names of the parameters that no gradient of the output reaches, in training neither."""
        found, hidden = _reached(self.module, output)
        # a function of the user's own may take parameters that the graph does not show
        found |= frozenset[str]().union(*(use.own for use in self.uses)) if hidden else frozenset()
        training = {name for name, p in self.module.named_parameters() if p.requires_grad}
        if training - found:
            found |= _reached_in_training(self.module, example)
        return frozenset(name for name, _ in self.module.named_parameters() if name not in found & training)


@torch.no_grad()
def _computes_linear(layer: nn.Module) -> bool:
    """Return whether a module is a Linear layer with weight and bias alone, which `forward` uses as they are."""
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    if not isinstance(layer, nn.Linear) or weight is None or (bias is None and layer.bias is not None):
        return False
    # an adapter of its own is 0 before it trains
    if any(tensor is not None for name, tensor in layer._parameters.items() if name not in ("weight", "bias")):
        return False
    z = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0))
    return torch.allclose(layer(z), nn.functional.linear(z, weight, bias), rtol=1e-3, atol=1e-5)


class WrittenError(Exception):
    """A network writes into its own parameters in training, and has other values now.

    names: of these parameters.
    """

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.names = frozenset(names)


# the networks that write so have copies of their parameters, others share them with their copies
_WRITING = ContextVar("writing", default=False)


@contextmanager
def writing() -> Iterator[None]:
    """While this lasts, a network's copy in training has parameters of its own."""
    token = _WRITING.set(True)
    try:
        yield
    finally:
        _WRITING.reset(token)


class TrainingPass(NamedTuple):
    """A copy of a network, its output for a batch in training mode, and what the pass changed in the copy.

    Parameters that it wrote into are not among the effects: that is a `WrittenError`.
    """

    module: nn.Module
    output: Any
    effects: Effects


def in_training(module: nn.Module, example: Tensor) -> TrainingPass | None:
    """Pass a batch through a copy of a network in training mode. Returns None if the network cannot be copied.

    The copy has the network's own parameters: a large network is not in memory twice. Raises WrittenError if they have other
    values now, outside of `writing`. Raises what the copy's `forward` raises.
    """
    shared = {} if _WRITING.get() else {name: p for name, p in module.named_parameters() if not is_lazy(p)}
    before = [_checksum(parameter) for parameter in shared.values()]
    try:
        copied = copy.deepcopy(module, {id(parameter): parameter for parameter in shared.values()}).train()
    except Exception:
        return None
    contents = Contents(copied)
    try:
        with uncompiled(), torch.enable_grad():
            output = copied(example)
    finally:
        if names := [name for one, (name, p) in zip(before, shared.items(), strict=True) if _checksum(p) != one]:
            raise WrittenError(names)
    return TrainingPass(copied, output, Effects(_written_buffers(module, copied), frozenset(contents.changed())))


def _written_buffers(module: nn.Module, copied: nn.Module) -> frozenset[str]:
    """Return the names of floating-point buffers whose values in a copy are others, without BatchNorm's statistics."""
    norms = {path for path, layer in module.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)}
    first = {name: buffer for name, buffer in module.named_buffers() if name.rpartition(".")[0] not in norms}
    return frozenset(
        name
        for name, buffer in copied.named_buffers()
        if name in first and buffer.is_floating_point() and not torch.equal(buffer, first[name])
    )


def _checksum(tensor: Tensor) -> int:
    """Return a checksum of a tensor's bytes, taken without a copy of a contiguous one."""
    return zlib.adler32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _reached_in_training(module: nn.Module, example: Tensor) -> frozenset[str]:
    """Return the names of the parameters that a gradient reaches in a copy that trains; none if no copy runs."""
    try:
        found = in_training(module, example)
    except WrittenError:
        raise
    except Exception:
        return frozenset()
    return _reached(found.module, found.output)[0] if found else frozenset()


def _reached(module: nn.Module, output: Any) -> tuple[frozenset[str], bool]:
    """Return the names of the parameters that an output's gradient reaches, and whether functions in Python hide some."""
    found, hidden = set[int](), False
    waiting = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        hidden = hidden or isinstance(node, torch.autograd.function.BackwardCFunction)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return frozenset(name for name, p in module.named_parameters() if id(p) in found), hidden
