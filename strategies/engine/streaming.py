"""Streaming rounds, for methods that only average on the server: uploads are added up as they come.

They are added in the order of client ids. The server holds a few vectors, for any number of clients in a round. The
sums equal those over a stack, bit for bit, in whatever order clients answer: an upload waits until those of clients
with lower ids have come or failed. The models of waiting uploads beyond `_WAITING_BYTES` lie in unnamed
files in the run folder.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import numpy as np

from fl_app.config import RunConfig
from fl_app.errors import MethodError, MethodFault, UserError, describe
from fl_app.keys import Scalar
from fl_app.layout import NOTHING, Model
from fl_app.server import client_arrays
from fl_app.transport.wire import Expected, Upload
from strategies.base.declared import CHANGE_SUMS, PARAMETERS, STATISTICS, declares_means
from strategies.base.server_half import ServerHalf, Turn
from strategies.base.state import UploadBuffer, Uploads
from strategies.kernels import COLUMNS, UNIT, RowSum, SummedRows, distances_of_pairs

log = logging.getLogger("corolla")

# the most bytes of waiting uploads that are kept in memory
_WAITING_BYTES = 64e6

Reference = Callable[[int], Mapping[str, Any]]


def streams(half: type[ServerHalf[Any]]) -> bool:
    """Return whether a method declares `Means.streams`, and no later override may need a stack.

    Raises UserError, naming the class, if the declaration is neither True nor False.
    """
    if not isinstance(half.means.streams, bool):
        raise MethodError(
            f"method class {half.__name__}: streams must be True or False, got {half.means.streams!r:.80}"
        )
    return half.means.streams and declares_means(half, *CHANGE_SUMS)


def why_kept(config: RunConfig, expected: Expected) -> str:
    """Return why a streaming method's uploads are kept as a stack all the same; "" if they are not."""
    if config.max_update_norm:
        return "max-update-norm compares each with all others"
    if config.robust != "none":
        return f"robust = {config.robust} compares them"
    if config.max_size_weight:
        return "max-size-weight compares their sizes before they count"
    if config.keep_uploads:
        return "keep-uploads writes each to the disk"
    return "masks come with them" if expected.num_params else ""


@dataclass(kw_only=True)
class RunningMean(UploadBuffer):
    """Means of uploads, which are added to sums as they come.

    - `sent`: returns the values that a client was sent, by compared name. None: no moves are measured.
    - `moved`: by compared name and by client, the squared distance of its upload from the values it was sent.
    - `lengths`: likewise, the squared length of these values.
    """

    server: ServerHalf[Any]
    turn: Turn
    sent: Reference | None
    moved: dict[str, dict[int, float]] = field(default_factory=dict)
    lengths: dict[str, dict[int, float]] = field(default_factory=dict)
    _W: SummedRows = field(default_factory=lambda: SummedRows(0, UNIT))
    _B: SummedRows = field(default_factory=lambda: SummedRows(0, UNIT))
    _summed: dict[str, RowSum] = field(default_factory=dict)
    # by row, and with the bytes of its model that are in memory
    _waiting: dict[int, tuple[Upload, int]] = field(default_factory=dict)
    _gone: set[int] = field(default_factory=set)
    _next: int = 0
    _held: float = 0.0
    # by compared name, the vector that was sent last, and its squared length: all clients may be sent the same one
    _sent: dict[str, tuple[Any, float]] = field(default_factory=dict)

    @classmethod
    def started(
        cls, ids: list[int], expected: Expected, server: ServerHalf[Any], turn: Turn, sent: Reference | None = None
    ) -> RunningMean:
        """Start with empty sums. Everything beside the models is stacked. sent: None if no moves are measured."""
        beside = UploadBuffer.of(ids, replace(expected, d=0, b=0))
        stacks = {f.name: getattr(beside, f.name) for f in fields(UploadBuffer) if f.init}
        buffer = cls(**{**stacks, "expected": expected}, server=server, turn=turn, sent=sent)
        buffer._W, buffer._B = SummedRows(expected.d, UNIT), SummedRows(expected.b, UNIT)
        return buffer

    def _note_moves(self, client_id: int, upload: Upload, sent: Mapping[str, Any]) -> None:
        """Note the distance of an upload from the model that its client was sent."""
        for what, vector in ((PARAMETERS, upload.model.params), (STATISTICS, upload.model.buffers)):
            start = sent.get(what)
            if start is None or start.size != vector.size or not vector.size:
                continue
            sent_last, length = self._sent.get(what, (None, 0.0))
            if sent_last is not start:
                (length,) = distances_of_pairs([(start, np.broadcast_to(np.float32(0), start.shape))])
                self._sent[what] = start, length
            (self.moved.setdefault(what, {})[client_id],) = distances_of_pairs([(vector, start)])
            self.lengths.setdefault(what, {})[client_id] = length

    def add(self, client_id: int, upload: Upload, metrics: Mapping[str, Scalar], nbytes: int = 0) -> None:
        """Take in an upload. It is added to the sums when its turn comes."""
        if self.sent is not None:
            self._note_moves(client_id, upload, self.sent(client_id))
        super().add(client_id, replace(upload, model=NOTHING), metrics, nbytes)
        row, model = self.row_of[client_id], upload.model
        size = model.params.nbytes + model.buffers.nbytes
        if row != self._next and self._held + size > _WAITING_BYTES:
            try:
                arrays = client_arrays.to_disk(
                    {"params": model.params, "buffers": model.buffers}, self.server.folder.path
                )
                upload, size = replace(upload, model=Model(**arrays)), 0
            except UserError as error:
                log.warning("uploads that wait for those of earlier clients stay in memory: %s", error)
        self._held += size
        self._waiting[row] = upload, size
        self._add_up()

    def skip(self, client_id: int) -> None:
        """Let later clients' uploads no longer wait for this client's."""
        if client_id in self.row_of and client_id not in self.metrics:
            self._gone.add(self.row_of[client_id])
            self._add_up()

    def result(self) -> Uploads:
        """Add the uploads that still wait. Return the sums, and the stacks of everything beside the models."""
        for row in sorted(self._waiting):
            self._add(row)
        summed = {name: total.total() for name, total in self._summed.items()}
        # a streaming method asks for nothing but means over the rows
        W, B = cast(Any, self._W), cast(Any, self._B)
        W.close()
        B.close()
        uploads = super().result()
        self._W, self._B = SummedRows(0, UNIT), SummedRows(0, UNIT)
        self._summed, self._waiting, self._sent = {}, {}, {}
        return replace(uploads, W=W, B=B, summed=summed)

    def _add_up(self) -> None:
        while self._next in self._waiting or self._next in self._gone:
            if self._next in self._waiting:
                self._add(self._next)
            self._next += 1

    def _add(self, row: int) -> None:
        (upload, size_held), client_id = self._waiting.pop(row), self.ids[row]
        self._held -= size_held
        factor = np.array([self.factors.get(client_id, 1.0)])
        size = self.sizes[row : row + 1] * factor
        one = Uploads([client_id], self.W, self.B, size, None, {}, [self.metrics[client_id]], factors=factor)
        try:
            weight, summed = float(self.server.weights(one)[0]), self.server.means.summed
            more = {} if summed is None else summed(self.server, upload, self.turn)
        except MethodFault:
            raise
        except Exception as error:
            raise MethodFault(
                key=f"method {self.server.config.method}",
                rule=f"weights() or `summed` failed ({describe(error)}): with Means(streams=True) they get one "
                "upload at a time, and no stack",
            ) from error
        self._W.add(upload.model.params, weight)
        self._B.add(upload.model.buffers, weight)
        for name, array in more.items():
            self._summed.setdefault(name, RowSum(array.size, COLUMNS)).add(array)
