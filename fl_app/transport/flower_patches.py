"""Replacements for Flower's classes of received arrays: Flower copies arrays several times before one can be checked.

They are subclasses of Flower 1.39's classes. A run's server calls `install` when it starts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore.constant import HEAD_BODY_DIVIDER
from flwr.supercore.inflatable import inflatable_object, inflatable_utils

R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord, RecordDict)


class ReceivedArray(Array):
    """A received array as the pieces it came in: nothing is copied before its header is checked.

    Flower's own class joins the pieces into a bytearray and copies it to bytes, while it still holds the pieces. With
    the copies of its record and its pieces this takes more than four times the memory of the message. If one piece is
    named many times, it takes any multiple.
    """

    pieces: Sequence[memoryview]

    @classmethod
    def inflate(cls, object_content: bytes, children: Mapping[str, Any] | None = None) -> ReceivedArray:
        """Return the array of a head and its ArrayChunks, as Flower's class does; without pieces if they do not fit.

        Nothing is raised, because an exception here would end the run. The server refuses an array without bytes later,
        naming its client.
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
    """A piece of an array as a view of its message. Flower's own class copies it."""

    @classmethod
    def inflate(cls, object_content: bytes, children: Mapping[str, Any] | None = None) -> ArrayChunk:
        """Return the piece without its head. Raises ValueError if the content is no piece."""
        kind = inflatable_object.get_object_type_from_object_content(object_content)
        if kind != ArrayChunk.__qualname__ or children:
            raise ValueError("not a piece of an array")
        start = object_content.index(HEAD_BODY_DIVIDER) + len(HEAD_BODY_DIVIDER)
        return ArrayChunk(memoryview(object_content)[start:])


class ReceivedArrays(ArrayRecord):
    """A record of received arrays. Flower's own class would copy each array once more."""

    @classmethod
    def inflate(cls, object_content: bytes, children: Mapping[str, Any] | None = None) -> ArrayRecord:
        """Return the record of the arrays with the listed ids; an empty record if the ids do not fit."""
        record = ArrayRecord()
        with contextlib.suppress(Exception):
            ids = json.loads(inflatable_object.get_object_body(object_content, ArrayRecord))
            if set(ids.values()) == set(children or {}):
                for name, array_id in ids.items():
                    record[name] = (children or {})[array_id]
        return record


def fill(record: R, values: Mapping[str, Any]) -> R:
    """Put values of the right types into a record of Flower's, and return it.

    Flower checks the type of every value, which takes longer than all else in making a small message.
    """
    held = record.__dict__.get("_data")
    if type(held) is dict:
        held.update(values)
    else:
        record.update(values)
    return record


def install() -> None:
    """Make this process use these classes for received arrays."""
    inflatable_utils.inflatable_class_registry |= {
        "ArrayChunk": ReceivedPiece,
        "Array": ReceivedArray,
        "ArrayRecord": ReceivedArrays,
    }
