"""How the objects that a reply travels as are altered, and whether and when they are sent; functions as in forge.py."""

from __future__ import annotations

import hashlib
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto import message_pb2
from flwr.supercore.inflatable.inflatable_object import get_object_children_ids_from_object_content

from tests.hostile.forge import Alter
from tests.hostile.supernode import Reply, packed, tree_of


def body(kind: str, data: bytes) -> Alter:
    """Give the first object of a kind another body."""
    return lambda reply, message: reply.body(kind, data)


def integers(count: int) -> Alter:
    """Give a ConfigRecord that many numbers; written as bytes, since Flower's own class takes seconds to make them."""
    return lambda reply, message: reply.body(
        "ConfigRecord", b"".join(b"\x0a\x0d\x0a\x07m%06d\x12\x02\x10\x0a" % k for k in range(count))
    )


def childless(kind: str) -> Alter:
    """Take an object's children away."""

    def alter(reply: Reply, message: Message) -> None:
        name = reply.first(kind)
        reply.replace(name, packed(kind, reply.objects[name].partition(b"\0")[2]))

    return alter


def with_child(kind: str) -> Alter:
    """Give a child to an object that cannot have any."""

    def alter(reply: Reply, message: Message) -> None:
        name = reply.first(kind)
        child = reply.add(ArrayChunk(memoryview(b"child")).deflate())
        reply.replace(name, packed(kind, reply.objects[name].partition(b"\0")[2], [child]))

    return alter


def root_is(kind: str) -> Alter:
    """Announce an object that is no message."""

    def alter(reply: Reply, message: Message) -> None:
        reply.root = reply.first(kind)

    return alter


def holds(kind: str) -> Alter:
    """Put another object where the message's records should be."""

    def alter(reply: Reply, message: Message) -> None:
        name = reply.first("Message")
        reply.replace(name, packed("Message", reply.objects[name].partition(b"\0")[2], [reply.first(kind)]))

    return alter


def message_in_message(reply: Reply, message: Message) -> None:
    """Wrap the message in another one."""
    inner = reply.first("Message")
    data = reply.objects[inner].partition(b"\0")[2]
    reply.root = reply.add(packed("Message", data + b"", [inner]))


def bad_utf8(reply: Reply, message: Message) -> None:
    """Break a text in the message's own metadata."""
    name = reply.first("Message")
    data = reply.objects[name].partition(b"\0")[2]
    kind = message.metadata.message_type.encode()
    reply.body("Message", data.replace(kind, b"\xff" * len(kind)))


def body_says(**metadata: Any) -> Alter:
    """Say something else in the message's body than in what the SuperLink reads."""

    def alter(reply: Reply, message: Message) -> None:
        name = reply.first("Message")
        proto = message_pb2.Message.FromString(reply.objects[name].partition(b"\0")[2])
        for field, value in metadata.items():
            setattr(proto.metadata, field, value)
        reply.body("Message", proto.SerializeToString(deterministic=True))

    return alter


def envelope(**metadata: Any) -> Alter:
    """Say something else in what the SuperLink reads."""

    def alter(reply: Reply, message: Message) -> None:
        assert reply.objects
        for field, value in metadata.items():
            setattr(reply.envelope.metadata, field, value)

    return alter


def record_is_piece(reply: Reply, message: Message) -> None:
    """Put a piece of an array in a record's place."""
    name = reply.first("RecordDict")
    data, piece = reply.objects[name].partition(b"\0")[2], reply.first("ArrayChunk")
    children = get_object_children_ids_from_object_content(reply.objects[name])
    data = data.replace(children[0].encode(), piece.encode())
    reply.replace(name, packed("RecordDict", data, [piece, *children[1:]]))


def pieces(numbers: str) -> Alter:
    """Say which pieces an array is made of."""

    def alter(reply: Reply, message: Message) -> None:
        reply.body("Array", b'{"dtype": "", "shape": [], "stype": "", "arraychunk_ids": %s}' % numbers.encode())

    return alter


def declares(nbytes: int) -> Alter:
    """Let a piece's head declare so many bytes; behind it are ten."""

    def alter(reply: Reply, message: Message) -> None:
        reply.replace(reply.first("ArrayChunk"), b"ArrayChunk  %d\0" % nbytes + b"0123456789")

    return alter


def many_objects(count: int) -> Alter:
    """Announce so many objects; those that are too many need not be there."""

    def alter(reply: Reply, message: Message) -> None:
        tree = tree_of(reply.root, reply.objects)
        more = [message_pb2.ObjectTree(object_id=hashlib.sha256(b"%d" % k).hexdigest()) for k in range(count)]
        reply.tree = message_pb2.ObjectTree(object_id=reply.root, children=[*tree.children, *more])

    return alter


def deep_tree(depth: int) -> Alter:
    """Announce objects nested so deep."""

    def alter(reply: Reply, message: Message) -> None:
        tree = tree_of(reply.root, reply.objects)
        chain = message_pb2.ObjectTree(object_id=hashlib.sha256(b"deep").hexdigest())
        for k in range(1, depth):
            chain = message_pb2.ObjectTree(object_id=hashlib.sha256(b"deep %d" % k).hexdigest(), children=[chain])
        reply.tree = message_pb2.ObjectTree(object_id=reply.root, children=[*tree.children, chain])

    return alter


def deep_heads(depth: int) -> Alter:
    """Let so many objects name each other in a row, and announce them side by side."""

    def alter(reply: Reply, message: Message) -> None:
        name = reply.add(packed("RecordDict", b"{}"))
        for _ in range(depth):
            name = reply.add(packed("RecordDict", b"{}", [name]))
        root = reply.first("Message")
        reply.replace(root, packed("Message", reply.objects[root].partition(b"\0")[2], [name]))
        others = [message_pb2.ObjectTree(object_id=other) for other in reply.objects if other != reply.root]
        reply.tree = message_pb2.ObjectTree(object_id=reply.root, children=others)

    return alter


def unannounced(reply: Reply, message: Message) -> None:
    """Leave an object out of what is announced."""
    tree = tree_of(reply.root, reply.objects)
    records = tree.children[0]
    short = message_pb2.ObjectTree(object_id=records.object_id, children=records.children[1:])
    reply.tree = message_pb2.ObjectTree(object_id=reply.root, children=[short])


# Whether and when


def withhold_all(reply: Reply, message: Message) -> None:
    """Announce a reply and send nothing of it."""
    reply.withheld = set(reply.objects)


def withhold_one(reply: Reply, message: Message) -> None:
    """Send a reply but for one object."""
    reply.withheld = {reply.first("ArrayChunk")}


def drip(seconds: float, declared: int) -> Alter:
    """Declare so many bytes, and send the objects one by one, over that many seconds in all."""

    def alter(reply: Reply, message: Message) -> None:
        declares(declared)(reply, message)
        reply.pause = seconds / len(reply.objects)

    return alter


def silent(reply: Reply, message: Message) -> bool:
    """Send nothing."""
    return False


def expired(reply: Reply, message: Message) -> None:
    """Send a reply that is valid for a moment only."""
    assert reply.objects
    reply.envelope.metadata.ttl = 1e-3


def unasked(count: int) -> Alter:
    """Send the server messages that answer nothing, with objects that never come."""

    def alter(reply: Reply, message: Message) -> None:
        assert reply.objects
        for k in range(count):
            sent = message_to_proto(Message(RecordDict({"c": ConfigRecord({"k": k})}), reply_to=message))
            name = hashlib.sha256(f"{message.metadata.message_id} {k}".encode()).hexdigest()
            sent.metadata.message_id, sent.metadata.reply_to_message_id = name, ""
            sent.metadata.src_node_id = sent.metadata.dst_node_id = SUPERLINK_NODE_ID
            reply.unasked.append((sent, message_pb2.ObjectTree(object_id=name)))

    return alter
