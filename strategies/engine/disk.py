"""Bytes that a round writes to the disks of the server: messages in the SuperLink's database, and the checkpoint."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import numpy as np

from fl_app.server.disk import PARTS, Needed
from fl_app.wire import Expected
from strategies.base.server_half import ServerHalf


def needed(server: ServerHalf[Any], expected: Expected) -> Needed:
    """Estimate the bytes that a round of a run writes.

    expected: the form of its uploads. With v the bytes of the tensors that travel, u those of an upload, and n clients
    in a round: messages = n (v + u), uploads = n u, checkpoint = v, and n v more if the server keeps clients' models,
    and n (v + u) more with `keep-uploads`. Clients that hold parts of the model have smaller messages: their mean counts. The
    checkpoint also has the method's `memory_bytes`. Its further arrays are unknown, so the estimate is too low rather than
    too high.
    """
    config, v = server.config, 4 * (server.layout.d + server.layout.b)
    n = config.drawn(config.num_clients)
    upload = sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in expected.shapes().values())
    missing = v - part_bytes(server)
    uploads = n * (upload - missing)
    messages = n * (v - (missing if server.sends_parts else 0)) + uploads
    kept = n * (v + upload) if config.keep_uploads else 0
    models = v + (n * v if server.keeps_models else 0)
    return Needed(messages, uploads, models + server.memory_bytes() + kept, v)


def part_bytes(server: ServerHalf[Any]) -> float:
    """Return the bytes of the tensors that a client holds, the mean over at most 100 clients."""
    clients = range(min(server.config.num_clients, PARTS))
    parts = [server.held_by(i) for i in clients]
    return fmean(4 * (part.d + part.b) if part else 4 * (server.layout.d + server.layout.b) for part in parts)
