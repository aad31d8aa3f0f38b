"""How Flower puts received arrays together, replaced: its own way copies them several times before anybody can look at one.

Written for Flower 1.39, whose classes are subclassed; `install` is called where a run's server starts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import Array, ArrayRecord
from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore.constant import HEAD_BODY_DIVIDER
from flwr.supercore.inflatable import inflatable_object, inflatable_utils


class ReceivedArray(Array):
    """A received array as the pieces it came in: nothing is copied before its header has been checked.

    Flower's own class joins the pieces into a bytearray and that into bytes, while it still holds them: with the copies that its
    record and its pieces make, more than four times what was sent, or any multiple of it where one piece is named many times.
    """

    pieces: Sequence[memoryview]

    @classmethod
    def inflate(cls, object_content: bytes, children: Mapping[str, Any] | None = None) -> ReceivedArray:
        """Build the array from its head and its ArrayChunks, as Flower's class does; without any pieces if these do not fit.

        Nothing is raised: an exception here would end the run, and an array without bytes is refused by its client's name.
        """
        array = cls(dtype="", shape=(), stype="", data=b"")
        with contextlib.suppress(Exception):
            meta = json.loads(inflatable_object.get_object_body(object_content, Array))
            ids = inflatable_object.get_object_children_ids_from_object_content(object_content)
            used = [ids[i] for i in meta["arraychunk_ids"]]
            if set(used) == set(children or {}):
                array.pieces = [(children or {})[name].data for name in used]
        return array

    @property
    def data(self) -> bytes:
        """All bytes, joined at every call."""
        return b"".join(self.pieces)

    @data.setter
    def data(self, value: bytes) -> None:
        self.pieces = [memoryview(value)]


class ReceivedPiece(ArrayChunk):
    """How a piece is taken out of its message: as a view of it. Flower's own class copies it."""

    @classmethod
    def inflate(cls, object_content: bytes, children: Mapping[str, Any] | None = None) -> ArrayChunk:
        """Skip the head. Raises ValueError if this is no piece."""
        kind = inflatable_object.get_object_type_from_object_content(object_content)
        if kind != ArrayChunk.__qualname__ or children:
            raise ValueError("not a piece of an array")
        start = object_content.index(HEAD_BODY_DIVIDER) + len(HEAD_BODY_DIVIDER)
        return ArrayChunk(memoryview(object_content)[start:])


class ReceivedArrays(ArrayRecord):
    """How a record of received arrays is put together; Flower's own class would copy each one once more."""

    @classmethod
    def inflate(cls, object_content: bytes, children: Mapping[str, Any] | None = None) -> ArrayRecord:
        """Build the record from the ids of its arrays; it stays without any if these do not fit."""
        record = ArrayRecord()
        with contextlib.suppress(Exception):
            ids = json.loads(inflatable_object.get_object_body(object_content, ArrayRecord))
            if set(ids.values()) == set(children or {}):
                for name, array_id in ids.items():
                    record[name] = (children or {})[array_id]
        return record


def install() -> None:
    """Have this process put received arrays together so."""
    inflatable_utils.inflatable_class_registry |= {
        "ArrayChunk": ReceivedPiece,
        "Array": ReceivedArray,
        "ArrayRecord": ReceivedArrays,
    }
