"""A message's objects are registered in one step, also in Flower's store in memory.

Objects with equal content are one object in the store: every reply has the same status. The store registers a message's
objects one by one. If the last message with such an object is deleted meanwhile, the object is deleted with it, and the
new message can never be read: "the object could not be found". Here nothing is deleted meanwhile.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from deploy.patches import changing

_MODULE = "flwr.supercore.object_store.in_memory_object_store"


def register_in_one_step() -> None:
    """Let Flower's store hold its lock while it registers a message's objects. Warn if Flower has no place for it."""
    with changing("stores objects", "messages may be lost on a busy machine"):
        store: Any = importlib.import_module(_MODULE).InMemoryObjectStore
        register: Callable[..., list[str]] = store.preregister
        with store().lock_store:
            pass

        @functools.wraps(register)
        def register_at_once(self: Any, *given: Any, **named: Any) -> list[str]:
            with self.lock_store:
                return register(self, *given, **named)

        store.preregister = register_at_once
