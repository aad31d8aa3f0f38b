"""Discovery: querying all clients before the first round, or each when it is first drawn (key `discover`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from flwr.serverapp import Grid

from fl_app.config import RunConfig
from fl_app.sources import NODE
from fl_app.transport.fetched_reply import known_clients

log = logging.getLogger("corolla")

FEW = 1000
"""Most clients for which `discover = auto` queries all of them before the first round."""


def clients_to_meet(grid: Grid, config: RunConfig, needs_all: str = "") -> Mapping[int, int]:
    """Return nodes by client id, if each client is queried when it is first drawn; {} if all are queried first.

    needs_all: why the method needs to know all clients before its first round, "" if it does not. If `discover`, or the
    number of clients, calls for the first way and the second is needed, the log gives the reason.
    """
    known = known_clients(grid)
    wanted = config.discover == "sampled" or (config.discover == "auto" and config.num_clients > FEW)
    if not wanted:
        return {}
    if why := _why_all(config, needs_all, known):
        log.info("discover = all: every client is asked for its properties before the first round, because %s", why)
        return {}
    log.info(
        "discover = sampled: each of %d clients is asked for its properties when first sampled or evaluated", len(known)
    )
    return known


def _why_all(config: RunConfig, needs_all: str, known: Mapping[int, int]) -> str:
    """Return why all clients must be known before the first round, "" if they need not."""
    if needs_all:
        return needs_all
    if config.private:
        return "a private run needs the keys of all clients"
    if config.dataset == NODE:
        return "the sites' own data must be compared"
    return "" if known else "only their answers show which node is which client"
