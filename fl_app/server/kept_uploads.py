"""A round's uploads as clients sent them (key `keep-uploads`): a file per kept round, `uploads/round-<t>.npz`.

| array | content |
|---|---|
| `clients`, `samples` | the clients' ids, int64 [n], and their numbers of training samples, float64 [n] |
| `params`, `buffers` | the uploaded models, float32 [n, d] and [n, b] |
| `sent.params`, `sent.buffers` | the models that the clients were sent, in the same order; one row if all were sent the same |
| `mask` | packed masks, uint8 [n, ceil(d/8)], little bit order (`numpy.unpackbits(..., bitorder="little")`) |
| `layout` | a JSON text: `params` and `buffers` are lists of [name, shape] in order; `classifier` lists names |

`sent.*` is missing if the method sends another form than it takes; the layout then has one tensor. `mask` is missing if
the method has no masks. Rows are written one at a time and not compressed, so that a reader can map them into memory.
"""

from __future__ import annotations

import json
import logging
import math
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.files import make_directory, numbered, publish
from fl_app.layout import Layout, Model, Slot, packed

log = logging.getLogger("corolla")

DIRECTORY = "uploads"
# name of the tensor if the uploads do not have the form of the layout
WHOLE = "parameters"
_ZIP_HEADER = 30  # bytes before a member's name; the last four are the lengths of the name and of the extra field

# dtype, shape, and the rows in order
_Array = tuple[Any, tuple[int, ...], Iterable[NDArray[Any]]]


@dataclass(frozen=True)
class KeptUploads:
    """A round's kept uploads. Large arrays are read-only maps of the file.

    clients: int64 [n]. W: float32 [n, d]. sent: float32 [n or 1, d], None if it is not known. params: the tensors in a
    row. classifier: names of the last layer's tensors. bits: packed masks, uint8 [n, ceil(d/8)], or None.
    """

    round: int
    clients: NDArray[np.int64]
    params: tuple[Slot, ...]
    classifier: frozenset[str]
    W: NDArray[np.float32]
    sent: NDArray[np.float32] | None
    bits: NDArray[np.uint8] | None


def size(n: int, d: int, b: int, mask_bytes: int, sent_rows: int) -> int:
    """Return the bytes of a round's arrays on the disk, without names and headers.

    n: clients. d, b: values of a model's parameters and buffers. mask_bytes: of one mask. sent_rows: 1 if all clients
    are sent the same model, n if each has its own.
    """
    return 4 * (d + b) * (n + sent_rows) + n * (mask_bytes + 16)


def save(
    run: Path,
    round: int,
    layout: Layout,
    ids: Sequence[int],
    sizes: NDArray[np.float64],
    stacks: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.uint8] | None],
    sent: Callable[[int], Model],
) -> None:
    """Write a round's uploads, durable when this returns. Nothing is written if they hold no values.

    layout: the tensors that travel. ids, sizes: the clients in order, and their numbers of samples, [n]. stacks:
    parameters [n, d], buffers [n, b], packed masks. sent: returns the model that a client was sent.
    """
    W, B, bits = stacks
    if not W.shape[1] + B.shape[1]:
        return
    arrays: dict[str, _Array] = {
        "clients": (np.int64, (len(ids),), [np.array(ids, np.int64)]),
        "samples": (np.float64, (len(ids),), [sizes]),
        "params": (np.float32, W.shape, W),
        "buffers": (np.float32, B.shape, B),
    }
    fits = (layout.d, layout.b) == (W.shape[1], B.shape[1])
    if fits and all(sent(i).params.size == layout.d for i in ids):
        whose = ids[:1] if _all_equal(map(sent, ids)) else ids
        arrays["sent.params"] = np.float32, (len(whose), layout.d), (sent(i).params for i in whose)
        arrays["sent.buffers"] = np.float32, (len(whose), layout.b), (sent(i).buffers for i in whose)
    if bits is not None:
        arrays["mask"] = np.uint8, bits.shape, bits
    whole = Layout(packed([(WHOLE, (W.shape[1],))]), packed([("buffers", (B.shape[1],))] if B.shape[1] else []))
    text = np.array(_described(layout if fits else whole))
    arrays["layout"] = text.dtype, (), [text]
    make_directory(run / DIRECTORY)
    publish(_path(run, round), lambda temporary: _write(temporary, arrays))


def _all_equal(models: Iterator[Model]) -> bool:
    first = next(models)
    return all(
        np.array_equal(first.params, other.params) and np.array_equal(first.buffers, other.buffers) for other in models
    )


def _described(layout: Layout) -> str:
    tensors = {what: [[s.name, list(s.shape)] for s in getattr(layout, what)] for what in ("params", "buffers")}
    return json.dumps({**tensors, "classifier": sorted(layout.classifier)})


def _write(file: Path, arrays: dict[str, _Array]) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, (dtype, shape, rows) in arrays.items():
            # the same time in every file, so that equal uploads give equal bytes
            member = zipfile.ZipInfo(f"{name}.npy")
            with archive.open(member, "w", force_zip64=True) as opened:
                about = {
                    "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
                    "fortran_order": False,
                    "shape": shape,
                }
                np.lib.format.write_array_header_1_0(opened, about)
                for row in rows:
                    opened.write(np.asarray(row, dtype).tobytes())


def read(run: Path, round: int) -> KeptUploads | None:
    """Return the uploads of a round; None if there is no file, or if it is damaged, which is logged."""
    path = _path(run, round)
    if not path.is_file():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            # a map holds a file descriptor, so only what is large has one
            known = {
                name: _mapped(path, archive.getinfo(f"{name}.npy"))
                for name in ("params", "sent.params", "mask")
                if f"{name}.npy" in archive.namelist()
            }
        with np.load(path, allow_pickle=False) as file:
            known |= {name: file[name] for name in ("clients", "layout")}
        about = json.loads(str(known["layout"]))
        params = packed((str(name), tuple(shape)) for name, shape in about["params"])
        W, clients, sent = known["params"], np.asarray(known["clients"]), known.get("sent.params")
        width = params[-1].stop if params else 0
        if W.shape != (len(clients), width):
            raise ValueError(f"params must be {[len(clients), width]}, got {list(W.shape)}")
        if sent is not None and sent.shape not in (W.shape, (1, width)):
            raise ValueError(f"sent.params must be {list(W.shape)} or {[1, width]}, got {list(sent.shape)}")
        return KeptUploads(round, clients, params, frozenset(about["classifier"]), W, sent, known.get("mask"))
    except (OSError, ValueError, KeyError, TypeError, EOFError, struct.error, zipfile.BadZipFile) as error:
        log.warning("%s cannot be read: %s", path, error)
        return None


def _mapped(path: Path, info: zipfile.ZipInfo) -> NDArray[Any]:
    """Return an array of the file as a read-only map. Raises ValueError if it is compressed or ends early."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{info.filename} is compressed")
    with path.open("rb") as file:
        file.seek(info.header_offset)
        lengths = struct.unpack("<HH", file.read(_ZIP_HEADER)[-4:])
        file.seek(sum(lengths), 1)
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        if not math.prod(shape):
            return np.empty(shape, dtype)
        return np.memmap(file, dtype, "r", offset=file.tell(), shape=shape)


def rounds(run: Path) -> list[int]:
    """Return the rounds that have a file, ascending."""
    return numbered(run / DIRECTORY, ".npz")


def remove(run: Path, round: int) -> None:
    """Delete the file of a round, if there is one."""
    _path(run, round).unlink(missing_ok=True)


def cut(run: Path, round: int) -> None:
    """Delete the files of rounds after this one."""
    for later in rounds(run):
        if later > round:
            remove(run, later)


def _path(run: Path, round: int) -> Path:
    return run / DIRECTORY / f"round-{round}.npz"
