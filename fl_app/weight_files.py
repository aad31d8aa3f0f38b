"""Files of weights: safetensors, whole or as shards with an index, and PyTorch state dicts.

A shard is a safetensors file with a part of the tensors. An index is a JSON file beside the shards, such as
`model.safetensors.index.json`, that names each tensor's shard. A folder stands for the one index or file in it.
Tensors of safetensors files are read one at a time, so that a large network is in memory once.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fl_app.checksums import sha256_of, stamp_of
from fl_app.errors import MALFORMED, UserError, counted, describe, listed
from fl_app.files import nearest_path, refuse_unreadable

if TYPE_CHECKING:
    from torch import Tensor

INITIAL_WEIGHTS = "initial-weights"
VARIABLE = "COROLLA_SITE_WEIGHTS"
"""Environment variable of applications, with a site's own `initial-weights` (site.toml)."""
PYTORCH = (".pt", ".pth")
"""Endings of files of torch.save."""
_SAFETENSORS = ".safetensors"
_INDEX = f"{_SAFETENSORS}.index.json"
# dtypes of floating-point tensors in safetensors' headers
_FLOATING = frozenset(("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"))
# Usual keys of the state dict in a checkpoint.
_STATE_DICTS = ("state_dict", "model_state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.")
# parts that peft puts into the names of a network's tensors
_UNUSED = "original_module"
_OF_PEFT = re.compile(rf"(?<![^.])(base_model\.model|base_layer|{_UNUSED}|modules_to_save\.[^.]+)\.")
T = TypeVar("T")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. read: returns it. dtype: as the file names it. shard: name of its file, "" if there is only one."""

    shape: tuple[int, ...]
    dtype: str
    is_floating: bool
    read: Callable[[], Tensor]
    shard: str = ""

    @property
    def described(self) -> str:
        """Its shape, with the dtype if it is not floating-point, and the shard."""
        kind = "" if self.is_floating else f"{self.dtype} "
        return f"{kind}{list(self.shape)}{f' in {self.shard}' if self.shard else ''}"


def at_site(path: str) -> str:
    """Return the path of a run's `initial-weights` on this machine: that of its site, if the site names one."""
    return path and (os.environ.get(VARIABLE) or path)


def files_of(path: Path) -> list[Path]:
    """Return the files behind a path of weights: the file itself, or all indexes and shards of a folder.

    The result for an index is that of its folder. A path where nothing is stands for itself.
    """
    folder = path.parent if path.name.endswith(_INDEX) else path
    try:
        return sorted(file for file in folder.iterdir() if file.name.endswith((_SAFETENSORS, _INDEX)))
    # a file, or a folder that this account must not read
    except OSError:
        return [path]


def stamps_of(path: Path) -> Hashable:
    """Return a value that differs once one of the files of `files_of` was replaced or changed."""
    return tuple((file.name, stamp_of(file)) for file in files_of(path))


def hash_of(path: Path) -> str:
    """Return the sha256 of a file, or one over the files of `files_of`, as hexadecimal digits. Raises OSError."""
    files = files_of(path)
    if files == [path]:
        return sha256_of(path)
    return hashlib.sha256(json.dumps([[file.name, sha256_of(file)] for file in files]).encode()).hexdigest()


def open_weights(path: str | Path, key: str = "") -> dict[str, StoredTensor]:
    """Return the tensors of a file or folder by name. Those of safetensors files are not read yet.

    key: the run's key that names the path, for errors. Raises UserError if a file is missing or unreadable, if an index
    and its shards differ, or if a folder does not hold one model.
    """
    path = Path(path)
    if path.suffix in PYTORCH and path.is_file():
        return {
            name: StoredTensor(tuple(t.shape), str(t.dtype), t.is_floating_point(), functools.partial(_same, t))
            for name, t in load_state_dict(path, _named(key, path)).items()
        }
    file = _within(path, key) if path.is_dir() else path
    return _of_shards(file, key) if file.name.endswith(_INDEX) else _of_file(file, key)


def refuse_missing(path: Path, key: str) -> None:
    """Raise UserError, naming the file, if weights are missing or unreadable. Of safetensors only the headers are read."""
    for file in files_of(path):
        refuse_unreadable(key, file)
    if path.suffix not in PYTORCH:
        open_weights(path, key)


def _named(key: str, path: Path) -> str:
    return f"{key} {path}".lstrip()


def _same(value: T) -> T:
    return value


def _within(folder: Path, key: str) -> Path:
    """Return the one index in a folder, or else its one safetensors file. Raises UserError."""
    files = files_of(folder)
    indexes = [file for file in files if file.name.endswith(_INDEX)]
    found = indexes or files
    if len(found) != 1:
        raise UserError(
            key=_named(key, folder),
            rule=f"a folder must hold one safetensors file, or one index of shards (*{_INDEX}); it holds "
            f"{listed([file.name for file in found]) or 'neither'}",
        )
    return found[0]


def _of_file(file: Path, key: str, shard: str = "") -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file. Raises UserError."""
    from safetensors import SafetensorError, safe_open

    try:
        # as NumPy's: a header needs no torch
        with safe_open(file, "np") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping
            return {
                name: StoredTensor(
                    tuple(part.get_shape()),
                    part.get_dtype(),
                    part.get_dtype() in _FLOATING,
                    functools.partial(_read, file, name),
                    shard,
                )
                for name, part in parts.items()
            }
    except FileNotFoundError as error:
        raise _missing(file, key) from error
    except (OSError, SafetensorError) as error:
        other = (
            ""
            if file.suffix == _SAFETENSORS
            else f"; the name of a PyTorch state dict must end in {' or '.join(PYTORCH)}"
        )
        rule = f"not a readable safetensors file ({describe(error)}){other}"
        raise UserError(key=_named(key, file), rule=rule) from error


def _read(file: Path, name: str) -> Tensor:
    """Return a tensor that views the file. The mapping ends with the tensor, so no other one's pages stay in memory."""
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
        return tensor


def _missing(file: Path, key: str) -> UserError:
    near = nearest_path(file)
    return UserError(
        key=_named(key, file),
        rule="no such file or directory; expected a safetensors file, a folder of shards with an index (*"
        f"{_INDEX}) or a PyTorch state dict ({', '.join(PYTORCH)}){f'; did you mean {near}?' if near else ''}",
    )


def _of_shards(index: Path, key: str) -> dict[str, StoredTensor]:
    """Return the tensors of all shards that an index names. Raises UserError."""
    places = _index(index, key)
    shards = sorted(set(places.values()))
    named = _named(key, index)
    if outside := [shard for shard in shards if not shard or Path(shard).name != shard or "\0" in shard]:
        raise UserError(key=named, rule="its shards must lie beside it", value=outside[0])
    if gone := [shard for shard in shards if not (index.parent / shard).is_file()]:
        rule = f"lacks {len(gone)} of {counted(len(shards), 'shard')}, which must lie beside it: {listed(gone)}"
        raise UserError(key=named, rule=rule)
    found: dict[str, StoredTensor] = {}
    for shard in shards:
        there = _of_file(index.parent / shard, key, shard)
        told = {name for name, place in places.items() if place == shard}
        for what, names in (
            ("lacks {}, which {} places there", told - there.keys()),
            ("has {}, which {} does not place there; is it a shard of another model?", there.keys() - told),
        ):
            if names:
                rule = what.format(listed(sorted(names)), index.name)
                raise UserError(key=_named(key, index.parent / shard), rule=rule)
        found |= there
    return found


def _index(index: Path, key: str) -> Mapping[str, str]:
    """Return an index's shards by tensor name. Raises UserError."""
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except FileNotFoundError as error:
        raise _missing(index, key) from error
    except (OSError, *MALFORMED) as error:
        rule = f"not a readable index of shards, JSON with a table weight_map ({describe(error)})"
        raise UserError(key=_named(key, index), rule=rule) from error
    if not found or not isinstance(found, dict) or not all(isinstance(shard, str) for shard in found.values()):
        rule = "weight_map must be a table that gives each tensor's shard"
        raise UserError(key=_named(key, index), rule=rule)
    return found


def load_state_dict(path: str | Path, source: str) -> dict[str, Tensor]:
    """Read a file of `torch.save(module.state_dict(), path)` or of `corolla export`. Only tensors are unpickled.

    A checkpoint has its state dict under a usual key (_STATE_DICTS). `list(module.named_parameters())` is read too.

    Raises UserError if the file cannot be read, or holds no state dict. source: the file's name in errors.
    """
    import torch

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
    if named is None or not all(isinstance(name, str) and isinstance(t, torch.Tensor) for name, t in named.items()):
        known = ", ".join(map(repr, _STATE_DICTS))
        got = listed([repr(name) for name in named]) if named else type(state).__name__
        raise UserError(
            key=source, rule=f"must hold a state dict (tensors by name), or have one under {known}; got {got}"
        )
    return {name: t.detach() for name, t in named.items()}


def without_prefix(found: dict[str, T], names: Container[str]) -> dict[str, T]:
    """Remove the prefix of DataParallel and torch.compile from all names, if no name fits with it."""
    while found and not any(name in names for name in found):
        prefix = next((p for p in _PREFIXES if all(name.startswith(p) for name in found)), None)
        if prefix is None:
            break
        found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return found


def named_as_wrapped(found: dict[str, T], names: Iterable[str]) -> dict[str, T]:
    """Rename a base model's tensors to the names that they have in a network of peft, if none has such a name already.

    A name fits if it is the network's without peft's parts and without one prefix, the same for all: that which fits most.
    A layer that peft keeps twice gets both copies from one tensor. What fits nowhere keeps its name.
    """
    places: dict[str, list[str]] = {}
    for name in names:
        places.setdefault(_OF_PEFT.sub("", name), []).append(name)
    own = {name for of_one in places.values() for name in of_one}
    if own == places.keys() or not own.isdisjoint(found):
        return found
    prefixes = Counter(plain[:at] for plain in places for at in _starts(plain) if plain[at:] in found)
    prefix = max(prefixes, key=prefixes.__getitem__, default="")
    return {place: one for name, one in found.items() for place in places.get(prefix + name, [name])}


def _starts(name: str) -> list[int]:
    """Return where the parts of a name with dots begin."""
    return [0, *(dot.end() for dot in re.finditer(r"\.", name))]


def is_unused(name: str) -> bool:
    """Return whether a tensor is of a layer that peft keeps beside its copy that trains, and does not use."""
    return _UNUSED in name.split(".")
