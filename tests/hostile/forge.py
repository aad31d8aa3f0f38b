"""How a reply is altered; every function here returns what a SuperNode calls with its reply and the message that it answers."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, Error, Message

from fl_app.known_names import CLIENT_NAME
from fl_app.server.properties import SOFTWARE
from tests.hostile.supernode import Reply

Alter = Callable[[Reply, Message], object]

# Texts that are code somewhere: HTML, an attribute of it, a spreadsheet's formula, a terminal's codes and rich's, Markdown, TeX, a
# metric's label, and a path.
TEXTS = (
    '<x-owned onclick="owned()">',
    "' onmouseover=\"owned()\" x='</script></td>",
    "=cmd|'/C calc'!A0",
    "\t@SUM(1)\r=1+1",
    "\x1b]0;owned\x07\x9b2J\u202e[red]a[/]",
    "[a](javascript:owned()) `b` | c\n# d",
    "$\\frac{$ \\input{/etc/passwd} %",
    'a"} 1\nowned_total{x="../../1',
)

# Records


def metric(name: str, value: Any) -> Alter:
    """Report another value."""

    def alter(reply: Reply, message: Message) -> None:
        for record, config in reply.content.config_records.items():
            if record.endswith(".metrics"):
                config[name] = value

    return alter


def many_metrics(count: int) -> Alter:
    """Report that many numbers more."""

    def alter(reply: Reply, message: Message) -> None:
        for record, config in reply.content.config_records.items():
            if record.endswith(".metrics"):
                for k in range(count):
                    config[f"m{k}"] = k

    return alter


def odd_metrics(reply: Reply, message: Message) -> None:
    """Report metrics with the names of other things, and odd ones."""
    for name in (
        "collaborators",
        "seconds",
        "clients",
        "upload-bytes",
        "round",
        "../x",
        "\x1b[2J",
        "",
        "seconds-",
        "a" * 1000,
    ):
        metric(name, 1.5)(reply, message)
    for name in ("notes", "overlap", "sha256", "seconds-of-text"):
        metric(name, "<script>\x9b" * 100)(reply, message)


def num_examples(value: Any) -> Alter:
    """Say another number of training samples."""
    return lambda reply, message: reply.content.metric_records["fitres.num_examples"].update({"num_examples": value})


def more_examples(more: int) -> Alter:
    """Say more training samples."""

    def alter(reply: Reply, message: Message) -> None:
        record = reply.content.metric_records["fitres.num_examples"]
        record["num_examples"] = int(record["num_examples"]) + more  # type: ignore[arg-type]

    return alter


def evaluation_loss(value: float) -> Alter:
    """Say another loss."""
    return lambda reply, message: reply.content.metric_records["evaluateres.loss"].update({"loss": value})


def evaluation_samples(value: int) -> Alter:
    """Say another number of test samples."""
    return lambda reply, message: reply.content.metric_records["evaluateres.num_examples"].update(
        {"num_examples": value}
    )


def properties(changes: Mapping[str, Any]) -> Alter:
    """Say something else about itself; None: nothing of that."""

    def alter(reply: Reply, message: Message) -> None:
        record = reply.content.config_records["getpropertiesres.properties"]
        for name, value in changes.items():
            if value is None:
                record.pop(name, None)
            else:
                record[name] = value

    return alter


def texts(client_id: int) -> Alter:
    """Send TEXTS for its name, the names of its ten classes and the versions of its software."""
    own, classes = TEXTS[client_id % len(TEXTS)], json.dumps([*TEXTS, "=8", "<b>9"])

    def alter(reply: Reply, message: Message) -> None:
        records = {} if reply.message.has_error() else reply.content.config_records
        if told := records.get("getpropertiesres.properties"):
            versions = json.loads(str(told[SOFTWARE])) | dict.fromkeys(("corolla", "flwr", "torch"), own)
            told.update({CLIENT_NAME: own, "class-names": classes, SOFTWARE: json.dumps(versions)})

    return alter


def pretend(client_id: int, delay: float = 0.0) -> Alter:
    """Say that it is another client, after some seconds."""

    def alter(reply: Reply, message: Message) -> None:
        properties({"client-id": client_id})(reply, message)
        reply.delay = delay

    return alter


def rename_record(name: str) -> Alter:
    """Give a record another name, in the JSON that names them."""

    def alter(reply: Reply, message: Message) -> None:
        found = reply.objects[reply.first("RecordDict")].partition(b"\0")[2]
        names = json.loads(found)
        names[name] = names.pop("fitres.metrics")
        reply.body("RecordDict", json.dumps(names).encode())

    return alter


def empty_records(reply: Reply, message: Message) -> None:
    """Send no records at all."""
    reply.content.clear()


def flower_error(reason: str) -> Alter:
    """Send an error in the reply's place."""

    def alter(reply: Reply, message: Message) -> None:
        reply.message = Message(Error(8, reason), reply_to=message)
        reply.message.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id

    return alter


# Arrays


PARAMS, BUFFERS = "0", "1"


def array(change: Callable[[np.ndarray], np.ndarray], which: str = PARAMS) -> Alter:
    """Send another array than the trained parameters or BatchNorm's statistics."""

    def alter(reply: Reply, message: Message) -> None:
        record = reply.content.array_records["fitres.parameters"]
        values = np.load(io.BytesIO(record[which].data))
        out = io.BytesIO()
        np.save(out, change(values))
        record[which] = Array(record[which].dtype, record[which].shape, record[which].stype, out.getvalue())

    return alter


def spoil_one(value: float, which: str = PARAMS, place: int = 3) -> Alter:
    """Change one number."""

    def change(values: np.ndarray) -> np.ndarray:
        values = values.copy()
        values[place] = value
        return values

    return array(change, which)


def signalling(which: str = PARAMS) -> Alter:
    """Put a signalling NaN among the numbers; as bits, because a conversion would quiet it."""

    def change(values: np.ndarray) -> np.ndarray:
        bits = values.astype("<f4").view("<u4").copy()
        bits[3] = 0x7F800001
        return bits.view("<f4")

    return array(change, which)


def npy(data: bytes) -> Alter:
    """Send these bytes for the trained parameters."""

    def alter(reply: Reply, message: Message) -> None:
        record = reply.content.array_records["fitres.parameters"]
        record["0"] = Array(record["0"].dtype, record["0"].shape, record["0"].stype, data)

    return alter


def cut_array(reply: Reply, message: Message) -> None:
    """Send an array's header and nothing behind it."""
    npy(reply.content.array_records["fitres.parameters"]["0"].data[:128])(reply, message)


def one_array_more(reply: Reply, message: Message) -> None:
    """Send an array that nobody asked for."""
    record = reply.content.array_records["fitres.parameters"]
    record["9"] = record["0"]


def no_arrays(reply: Reply, message: Message) -> None:
    """Send no arrays."""
    reply.content.array_records["fitres.parameters"].clear()
