"""Estimates before a run: its memory, if clients train on the server's machine, and the bytes that a round writes to disks.

The numbers of vectors are measured ones: private memory of the processes, beyond that of a run with a tiny model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fl_app.errors import MethodError, counted, size
from fl_app.server.disk import PARTS, DiskEstimate
from fl_app.transport.wire import Expected
from strategies.base.server_half import ServerHalf, Turn
from strategies.base.state import SMALL
from strategies.engine.streaming import streams, why_kept

# Vectors of the model's size that the server's process holds at once: the global model, a download, a reply, and the
# one that is being made.
_SERVER = 4
# Two sums of uploads in float64.
_SUMS = 4
# In a client's process: weights, gradient, the received model, and the trained one. An optimizer has more.
_CLIENT = 4
# More of them with Ray, whose processes and Flower's SuperLink copy messages.
_RAY_SERVER, _RAY_CLIENT = 9, 11


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a run needs beside its programs.

    fixed: in the server's process, whatever its limit. stacks: each of a round's stacks, first the uploads. kept: each
    part that the server keeps for clients until the next round. limit: `server-memory-limit`, inf without one. client: in
    the process of a client. at_once: clients that train at the same time.
    """

    fixed: float
    stacks: tuple[float, ...]
    kept: tuple[float, ...]
    limit: float
    client: float
    at_once: int

    @property
    def server(self) -> float:
        """Bytes in the server's process."""
        return self.fixed + self.under(self.limit)

    @property
    def total(self) -> float:
        """Bytes in all processes."""
        return self.server + self.at_once * self.client

    def under(self, limit: float) -> float:
        """Return the bytes of the stacks and the kept models in memory under a limit. A small stack stays there."""
        return sum(s for s in self.stacks if s <= max(limit, SMALL)) + sum(min(kept, limit) for kept in self.kept)


def memory_estimate(server: ServerHalf[Any], expected: Expected, at_once: int, ray: bool = False) -> MemoryEstimate:
    """Estimate a run's memory from its model, its method and its clients.

    server: a new server half. expected: the form of its uploads. With v the bytes of the tensors that travel, u those of
    an upload, and m those of the whole model:

        server = 8 v                                         uploads are added up as they come, or the run is private
        server = 4 v + n u + a n v + min(N v, limit) + min(b n v, limit)
                                                             else, for n clients in a round and N in all, if n u and a n v
                                                             are at most the limit
        client = 4 m, and 1 m more with momentum, or 2 m with AdamW

    a, b: the method's `Holds.made` and `Holds.kept`. The server has twice its `Holds.memory` more. With `ray` it is 9 v more
    for the server and 11 m more for a client. limit: `server-memory-limit`; a larger stack lies on the disk. Uploads that
    wait in simulated time count as one more part that is kept. N v counts if the server keeps a model per client
    (`Holds.models`). Batches, activations and what a method's client half keeps are unknown, so the estimate is
    too low rather than too high.
    """
    config, whole = server.config, server.full_layout
    v, m = 4 * (server.layout.d + server.layout.b), 4 * (whole.d + whole.b)
    fixed, limit = (_SERVER + _SUMS) * v, config.server_memory_limit * 1e9 or math.inf
    stacks: tuple[float, ...] = ()
    kept: tuple[float, ...] = ()
    drawn = config.cohort_size(config.num_clients)
    if not config.private and not (streams(type(server)) and not why_kept(config, expected)):
        stacks = drawn * expected.nbytes, *[drawn * v] * server.holds.made
        kept = *[config.num_clients * v] * server.holds.models, *[drawn * v] * server.holds.kept
        fixed = _SERVER * v
    if config.is_timed or config.replay:
        # uploads wait until the clock lets them arrive
        kept = *kept, drawn * expected.nbytes
    # a round makes new arrays beside the old ones
    fixed += 2 * server.holds.memory(server)
    client = _CLIENT + (2 if config.optimizer != "sgd" else 1 if config.momentum else 0)
    if ray:
        fixed, client = fixed + _RAY_SERVER * v, client + _RAY_CLIENT
    return MemoryEstimate(fixed, stacks, kept, limit, client * m, at_once)


def fitting_limit(server: ServerHalf[Any], need: MemoryEstimate, available: float, one_process: bool) -> float:
    """Return the `server-memory-limit` with which a run fits, in GB: the config's, or a smaller one if there is one.

    available: bytes. one_process: whether clients train in the server's process. Raises UserError, with the ways out, if
    the run cannot fit.
    """
    config = server.config
    if need.total <= available:
        return config.server_memory_limit
    # for the stacks and the kept models, which take up to the limit each
    room = available - (need.total - need.under(need.limit))
    shares = room / max(1, len(need.stacks) + len(need.kept)), (room - sum(need.stacks)) / max(1, len(need.kept))
    fitting = [limit for limit in shares if limit > 0 and need.under(limit) <= room]
    if config.server_memory_limit and fitting:
        return fitting[0] / 1e9
    ways = ["a smaller model", "more memory"]
    if fitting:
        ways.insert(0, "a server-memory-limit, so that clients' models go to the disk")
    if not one_process:
        ways.insert(0, "--in-process, where one trains at a time")
    fewer = int((available - need.server) / need.client)
    if 1 <= fewer < need.at_once:
        ways.insert(0, f"a larger --cpus-per-client, so that at most {counted(fewer, 'client')} train at once")
    raise MethodError(
        key="model",
        rule=f"it has {server.full_layout.d:,} parameters, and {counted(need.at_once, 'client')} train "
        f"at once: the run needs about {size(need.total)} of memory ({size(need.server)} for the "
        f"server, {size(need.client)} for each of these clients), and {size(available)} are "
        f"available; ways out: {'; '.join(ways)}",
    )


def disk_estimate(server: ServerHalf[Any], expected: Expected) -> DiskEstimate:
    """Estimate the bytes that a round of a run writes.

    expected: the form of its uploads. With v the bytes of the tensors that travel, u those of an upload, and n clients
    in a round: messages = n (v + u), uploads = n u, checkpoint = v, and n v more if the server keeps clients' models,
    and n (v + u) more with `keep-uploads`. Clients that hold parts of the model have smaller messages: the mean over at
    most 100 clients counts. The checkpoint also has the method's `Holds.memory`. Its further arrays are unknown, so the
    estimate is too low rather than too high.
    """
    config, v = server.config, 4 * (server.layout.d + server.layout.b)
    n = config.cohort_size(config.num_clients)
    parts = [server.submodel_of(i, Turn(config)) for i in range(min(config.num_clients, PARTS))]
    missing = v - fmean(4 * (part.d + part.b) if part else v for part in parts)
    uploads = n * (expected.nbytes - missing)
    downloads = n * (v - missing if server.submodel and server.submodel.sent else v)
    checkpoint = v + n * v * server.holds.models + server.holds.memory(server)
    kept = n * (v + expected.nbytes) if config.keep_uploads else 0
    return DiskEstimate(downloads + uploads, uploads, checkpoint + kept, v)
