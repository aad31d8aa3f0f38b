"""Late uploads: the work of clients that a round did not wait for, and its use by a later round.

A client works from its download until its upload arrives. Its work names the round and the generation of client state
that it makes, and keeps what the client was sent. In a simulation the upload is there at once, and is held until the
clock lets it arrive.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app.config import RunConfig
from fl_app.errors import MethodError
from fl_app.keys import Scalar
from fl_app.layout import NO_TENSORS, NOTHING, Model
from fl_app.server import client_arrays
from fl_app.transport.wire import Expected, Upload
from strategies.base.server_half import ServerHalf, Turn
from strategies.base.state import SMALL, Sent

# FedBuff scales an update of age t by (1 + t) ** -FEDBUFF_POWER
FEDBUFF_POWER = 0.5

Arrays = dict[str, NDArray[Any]]


@dataclass
class PendingUpload:
    """One client's work on one round.

    version: the generation of client state that it makes. sent: what the client was sent. form: the form of its upload.
    arrives: second of simulated time. cause: why no upload comes, "" if one does. upload, metrics, nbytes: the
    checked upload, its numbers, and the bytes of its message.
    """

    client_id: int
    round: int
    version: str
    sent: Sent = field(default_factory=lambda: Sent(NOTHING, {}))
    form: Expected = field(default_factory=lambda: Expected.of(NO_TENSORS))
    arrives: float = math.inf
    cause: str = ""
    upload: Upload | None = None
    metrics: Mapping[str, Scalar] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def size(self) -> int:
        """Bytes of the upload's model; 0 without one."""
        return 0 if self.upload is None else self.upload.model.params.nbytes + self.upload.model.buffers.nbytes

    def saved(self) -> tuple[Arrays, dict[str, Any]]:
        """Return its arrays by name, and everything else as JSON can hold it."""
        upload = self.upload or Upload(NOTHING)
        arrays: Arrays = {"sent.params": self.sent.model.params, "sent.buffers": self.sent.model.buffers}
        arrays |= {"upload.params": upload.model.params, "upload.buffers": upload.model.buffers}
        arrays |= {} if upload.mask is None else {"mask": upload.mask}
        by_kind = {"sent-extra": self.sent.extras, "sent-reference": self.sent.reference, "upload-extra": upload.extras}
        for kind, extras in by_kind.items():
            arrays |= {f"{kind}.{name}": array for name, array in extras.items()}
        meta = {name: getattr(self, name) for name in ("client_id", "round", "version", "cause", "nbytes")}
        # as text: JSON has no infinity
        meta |= {"arrives": repr(self.arrives)}
        # as text: metrics may be NaN
        meta |= {"metrics": json.dumps(dict(self.metrics)), "form": asdict(self.form)}
        return arrays, meta | {"examples": None if self.upload is None else upload.num_examples}

    @classmethod
    def restored(cls, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> PendingUpload:
        """Return the work that `saved` described."""

        def extras(kind: str) -> Arrays:
            return {n.removeprefix(kind): a for n, a in arrays.items() if n.startswith(kind)}

        rest = dict(meta)
        examples, form, metrics = rest.pop("examples"), rest.pop("form"), json.loads(rest.pop("metrics"))
        form["extras"] = {name: (dtype, tuple(shape)) for name, (dtype, shape) in form["extras"].items()}
        form["variances"] = tuple(map(tuple, form["variances"]))
        model = Model(arrays["upload.params"], arrays["upload.buffers"])
        upload = Upload(model, arrays.get("mask"), extras("upload-extra."), metrics, examples or 0)
        sent = Sent(
            Model(arrays["sent.params"], arrays["sent.buffers"]), extras("sent-extra."), extras("sent-reference.")
        )
        rest["arrives"] = float(rest["arrives"])
        work = cls(**rest, sent=sent, form=Expected(**form), metrics=metrics)
        work.upload = None if examples is None else upload
        return work


def held(upload: Upload, before: float, limit: float, directory: Path) -> Upload:
    """Return an upload with its model in an unnamed file in `directory` if memory holds too many.

    before: bytes of the models that are held already. limit: `server-memory-limit` in bytes, 0 for none. Models of at
    most `SMALL` bytes in all stay in memory. Raises UserError if the disk has no room.
    """
    model = upload.model
    if not limit or before + model.params.nbytes + model.buffers.nbytes <= max(limit, SMALL):
        return upload
    return replace(
        upload, model=Model(**client_arrays.to_disk({"params": model.params, "buffers": model.buffers}, directory))
    )


def discounted(
    server: ServerHalf[Any], turn: Turn, work: PendingUpload, upload: Upload, age: int
) -> tuple[Upload, float]:
    """Return a late upload as the current round takes it in, and the factor on its weight.

    turn: the current round. age: rounds since its own, at least 1. With the rule `decay` the factor is
    staleness-decay ** age. With `fedbuff` it is 1, and the upload becomes the model that the client would be sent now plus
    (1 + age) ** -0.5 of its own update (Nguyen et al.: "Federated Learning with Buffered Asynchronous Aggregation",
    AISTATS 2022). A method that reads the differences of uploads gets the whole update in this form
    (`Late.reads_moves`).
    """
    config = server.config
    buffered = config.staleness_rule == "fedbuff"
    if buffered or server.late.reads_moves:
        scale = (1 + age) ** -FEDBUFF_POWER if buffered else 1.0
        now, then = server.download(server.state, work.client_id, turn).model, work.sent.model
        moved = Model(
            _moved(now.params, upload.model.params, then.params, scale),
            _moved(now.buffers, upload.model.buffers, then.buffers, scale),
        )
        upload = replace(upload, model=moved)
        turn.started_from.pop(work.client_id, None)
    else:
        turn.started_from[work.client_id] = work.sent
    return upload, 1.0 if buffered else config.staleness_decay**age


def _moved(
    now: NDArray[np.float32], after: NDArray[np.float32], before: NDArray[np.float32], scale: float
) -> NDArray[np.float32]:
    """Return now + scale * (after - before), computed in float64, float32 [d]."""
    if not after.size:
        return after
    return (now + scale * np.subtract(after, before, dtype=np.float64)).astype(np.float32)


def check(config: RunConfig, half: type[ServerHalf[Any]]) -> None:
    """Raise UserError if a method cannot use late uploads as the run asks (`ServerHalf.late`)."""
    if not config.staleness:
        return

    def refuse(name: str, why: str) -> None:
        value = getattr(config, name.replace("-", "_"))
        raise MethodError(key=name, rule=f"method {config.method} cannot do this: {why}; got {value!r}")

    buffered, late = config.staleness_rule == "fedbuff", half.late
    if late.never:
        refuse("staleness", late.never)
    if buffered and late.moved:
        refuse("staleness-rule", late.moved)
    if config.staleness_decay < 1 and not buffered:
        if late.aged:
            buffer = "" if late.moved else ", or staleness-rule = fedbuff,"
            refuse("staleness-decay", f"{late.aged}; 1{buffer} is possible")
        if config.robust != "none":
            refuse("staleness-decay", f"with robust = {config.robust} every client counts once; leave it 1")


def check_forms(server: ServerHalf[Any]) -> None:
    """Raise UserError if a method's late uploads cannot be moved to its next model: they are more, or less, than the model."""
    config, expected = server.config, server.form(server.state, Turn(server.config))
    if not config.staleness or not (config.staleness_rule == "fedbuff" or server.late.reads_moves):
        return
    more = sorted(name for name, (dtype, _) in expected.extras.items() if np.dtype(dtype).kind == "f")
    if config.staleness_rule == "fedbuff" and more:
        raise MethodError(
            key="staleness-rule",
            rule=f"method {config.method} uploads {', '.join(more)} beside its model, which fedbuff does "
            "not move; set decay",
        )
    if (expected.d, expected.b) != (server.layout.d, server.layout.b):
        what = f"method {config.method} uploads another model than it sends"
        if config.staleness_rule == "fedbuff":
            raise MethodError(key="staleness-rule", rule=f"{what}, so fedbuff finds no update; set decay")
        raise MethodError(
            key="staleness",
            rule=f"{what}, so a late upload has no difference to it; leave it 0",
            value=config.staleness,
        )
