"""Changes of Flower's code at run time (objects.py, outage.py, slow_start.py), which another version may have no place for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("corolla")


@contextmanager
def changing(does: str, otherwise: str) -> Iterator[None]:
    """Warn if Flower lacks something that the block looks up in it. Flower is then left as it is.

    does: what Flower does in another way then. otherwise: what may happen without the change.
    """
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        log.warning("this Flower %s in another way (%s): %s", does, error, otherwise)
