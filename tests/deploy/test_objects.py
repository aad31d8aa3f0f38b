"""Messages that share an object keep it, also while one is deleted and the other is registered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from inspect import unwrap
from typing import Any

import pytest
from flwr.app import ConfigRecord, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import in_memory_object_store as module

from deploy import patches
from tests.facts import mentions

STATUS = {"code": 0, "message": "Success"}


def content(number: int) -> RecordDict:
    return RecordDict({"status": ConfigRecord(dict(STATUS)), "own": ConfigRecord({"number": number})})


def put(store: module.InMemoryObjectStore, message: RecordDict, missing: list[str]) -> None:
    nested = get_all_nested_objects(message)
    for object_id in missing:
        store.put(object_id, nested[object_id].deflate())


def registered_while_deleted(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Register a message while another is deleted that shares its status. Return the objects that are then missing."""
    store = module.InMemoryObjectStore()
    first, second = content(1), content(2)
    put(store, first, store.preregister(1, get_object_tree(first)))
    deleting = threading.Thread(target=store.delete, args=[first.object_id])
    walk: Callable[[ObjectTree], Iterator[Any]] = vars(module)["iterate_object_tree"]

    def pausing(tree: ObjectTree) -> Iterator[Any]:
        *parts, root = walk(tree)
        yield from parts
        deleting.start()
        # it ends within this time if nothing holds it up
        deleting.join(1)
        yield root

    with monkeypatch.context() as patched:
        patched.setattr(module, "iterate_object_tree", pausing)
        try:
            missing = store.preregister(1, get_object_tree(second))
        except KeyError:
            return set(get_all_nested_objects(second))
        finally:
            deleting.join()
    put(store, second, missing)
    return {name for name in get_all_nested_objects(second) if not store.get(name)}


def test_a_shared_object_outlives_the_message_that_brought_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # other tests start a SuperNode in this process
    monkeypatch.setattr(module.InMemoryObjectStore, "preregister", unwrap(module.InMemoryObjectStore.preregister))
    assert registered_while_deleted(monkeypatch), "Flower registers in one step itself: deploy.patches can go"
    patches.register_in_one_step()
    assert registered_while_deleted(monkeypatch) == set()


def test_another_flower_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delattr(module, "InMemoryObjectStore")
    with caplog.at_level("WARNING", "corolla"):
        patches.register_in_one_step()
    assert mentions(caplog.text, "stores objects", "another way")
