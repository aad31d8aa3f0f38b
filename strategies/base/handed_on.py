"""A run's network, handed on: to the next part of a process, and to other processes of the machine.

The check before a run, the run's server and its clients each need the run's network. Building a large one takes seconds,
and two of them twice the memory. So one part of a process leaves a network that it has only read, and the next one takes
it if it is the wanted one.

Other processes get a network with frozen tensors (the key `train`) as a memory file. It has these tensors, and a pickle
of the rest. All processes map the same pages. A page that a process writes into becomes its own copy, and a client that
writes into a frozen tensor is refused by the tensor's name (`client_app.session.Session.leave`).
"""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import os
import pickle
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from fl_app import plugins

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# bytes to which tensors are aligned
_ALIGNED = 64

# by network, what it was built for, and the lines that its making told. What is equal may share a network
_MADE: WeakKeyDictionary[nn.Module, tuple[tuple[object, ...], Sequence[str]]] = WeakKeyDictionary()
# at most one
_LEFT: list[nn.Module] = []
_RECEIVED: list[SharedNetwork] = []


def made(module: nn.Module, wanted: tuple[object, ...], lines: Sequence[str]) -> None:
    """Note what a network was built for, and the lines that its making told."""
    _MADE[module] = (*wanted, plugins.generation()), lines


def leave_network(module: nn.Module) -> None:
    """Leave a network that `Method.network` made, and that nobody uses further, for the next call that wants it."""
    _LEFT[:] = [module]


def drop_network() -> None:
    """Let go of a network that was left."""
    _LEFT.clear()


def taken(wanted: tuple[object, ...]) -> tuple[nn.Module, Sequence[str]] | None:
    """Return the network that was left, and the lines that its making told, if it is the wanted one. Any other is let go.

    Else it is made again of what another process shares, if that is the wanted one.
    """

    def fits(module: nn.Module) -> bool:
        return _MADE[module][0] == (*wanted, plugins.generation())

    # another thread may have just taken the one that was left
    with contextlib.suppress(IndexError):
        if fits(module := _LEFT.pop()):
            return module, _MADE[module][1]
    for network in _RECEIVED:
        if fits(module := _unpickled(network)):
            return module, _MADE[module][1]
    return None


class SharedNetwork(NamedTuple):
    """A network in a memory file, for processes that inherit it.

    file: its number. start, stop: the bytes of the pickle in it, behind the frozen tensors.
    """

    file: int
    start: int
    stop: int


class _Place(NamedTuple):
    """A frozen tensor's place in a memory file."""

    start: int
    kind: type[Tensor]
    dtype: torch.dtype
    shape: torch.Size


@contextlib.contextmanager
def sharing() -> Iterator[SharedNetwork | None]:
    """Yield the network that was left as a memory file, for the time of the block. It stays left.

    Its own frozen tensors are in the file, too, from then on. It yields None for a network that has none, or that cannot
    be pickled.
    """
    one = _into_file(_LEFT[0])
    try:
        yield one
    finally:
        if one:
            os.close(one.file)


def _into_file(module: nn.Module) -> SharedNetwork | None:
    import torch

    from fl_app.narrow_tensors import NarrowTensor, plain

    names: frozenset[str] = getattr(module, "frozen_names", frozenset())
    places, regions, end = dict[int, _Place](), dict[tuple[Any, ...], int](), 0
    for name, tensor in module.named_buffers(remove_duplicate=False):
        if name in names and tensor.is_contiguous():
            # tied tensors have one memory
            kind, dtype = NarrowTensor if isinstance(tensor, NarrowTensor) else torch.Tensor, plain(tensor).dtype
            region = tensor.data_ptr(), dtype, tensor.shape
            if region not in regions:
                regions[region] = end
                end += math.ceil(tensor.nbytes / _ALIGNED) * _ALIGNED
            places[id(tensor)] = _Place(regions[region], kind, dtype, tensor.shape)
        del tensor
    pickled = _pickled(module, places) if places else b""
    if not pickled:
        return None
    one = SharedNetwork(_memory_file(), end, end + len(pickled))
    try:
        _write(one.file, end, pickled)
        memory = _mapped(one)
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and (place := places.pop(id(buffer), None)):
                    _write(one.file, place.start, plain(buffer).detach().reshape(-1).view(torch.uint8).numpy().data)
                    # its own memory is free before the next one is written
                    setattr(owner, name, _tensor(memory, place))
    except BaseException:
        os.close(one.file)
        raise
    return one


def _pickled(module: nn.Module, places: Mapping[int, _Place]) -> bytes:
    """Return a network without its frozen tensors, and what it was made for; b"" if it cannot be pickled."""
    file = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> _Place | None:
            return places.get(id(value))

    (*made_for, _), lines = _MADE[module]
    try:
        Pickler(file, pickle.HIGHEST_PROTOCOL).dump((module, made_for, lines))
    # the classes are the user's
    except Exception:
        return b""
    return file.getvalue()


def receive(network: SharedNetwork) -> None:
    """Take a network from a process that shares it, for calls that want it. Raises any error if its classes are not here."""
    _RECEIVED[:] = [network]
    try:
        leave_network(_unpickled(network))
    except Exception:
        _RECEIVED.clear()
        raise


def _unpickled(network: SharedNetwork) -> nn.Module:
    memory = _mapped(network)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, place: _Place) -> Tensor:
            return _tensor(memory, place)

    module: nn.Module
    module, made_for, lines = Unpickler(io.BytesIO(memory[network.start : network.stop])).load()
    made(module, tuple(made_for), lines)
    return module


def _memory_file() -> int:
    """Return the number of a new file without a name, in memory where the system can."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("corolla")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(file: int, start: int, content: bytes | memoryview) -> None:
    with open(file, "wb", buffering=0, closefd=False) as raw, io.BufferedWriter(raw) as written:
        written.seek(start)
        written.write(content)


def _mapped(network: SharedNetwork) -> mmap.mmap:
    """Return the pages of a memory file; what is written into them stays in this process."""
    return mmap.mmap(network.file, network.stop, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)


def _tensor(memory: mmap.mmap, place: _Place) -> Tensor:
    """Return a tensor that views its place in memory."""
    import torch

    if not (count := place.shape.numel()):
        return torch.empty(place.shape, dtype=place.dtype).as_subclass(place.kind)
    flat = torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.start)
    return flat.view(place.shape).as_subclass(place.kind)
