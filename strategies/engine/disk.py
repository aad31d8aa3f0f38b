"""Bytes that a round writes to the disks of the server: messages in the SuperLink's database, and the checkpoint."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fl_app.server.disk import Needed
from fl_app.wire import Expected
from strategies.base.server_half import ServerHalf


def needed(server: ServerHalf[Any], expected: Expected) -> Needed:
    """Estimate the bytes that a round of a run writes.

    expected: the form of its uploads. With v the bytes of the tensors that travel, u those of an upload, and n clients
    in a round: messages = n (v + u), uploads = n u, checkpoint = v, and n v more if the server keeps clients' models,
    and n (v + u) more with `keep-uploads`. A method's further arrays and memory are unknown, so the estimate is too low
    rather than too high.
    """
    config, v = server.config, 4 * (server.layout.d + server.layout.b)
    n = config.drawn(config.num_clients)
    upload = sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in expected.shapes().values())
    messages = n * (v + upload)
    keeps_models = type(server).model_for is not ServerHalf.model_for
    checkpoint = v + (n * v if keeps_models else 0) + (messages if config.keep_uploads else 0)
    return Needed(messages, n * upload, checkpoint, v)
