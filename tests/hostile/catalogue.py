"""The attacks, as data. `test_hostile.py` plays them all in one run; `table.py` makes docs/security.md's table of what came out.

To add one: append an `Attack` to ATTACKS: a name, what it does in a few words, where it strikes, what must hold, and the
function that does it. Nothing else has to be changed: it gets a client and a round of its own.

where: "upload", "evaluation": a client that takes part spoils its reply to that message, once. "start": a node that is there at the
start spoils what it says about itself. "join": a node that comes while the run goes on.
holds: what must be true beside what is always asked: that the run ends well, that all other clients' numbers are those of a run
without the attack, bit for bit, and so is the digest.
  "named": the client is dropped by name, and the cause has the words `says`.
  "kept": its upload counts as if there had been no attack, which did nothing.
  "refused": the node is left out, by name in the log with the words `says`.
Attacks that are played elsewhere (`where="elsewhere"`) note their result with `results.note(name, contained, said)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from flwr.app import Message

from tests.hostile import forge, structure
from tests.hostile.supernode import Reply


@dataclass(frozen=True)
class Attack:
    """One attack; see above. slow: it costs the round its timeout. alter: changes the reply to `message` before it is sent."""

    name: str
    does: str
    where: Literal["upload", "evaluation", "start", "join", "elsewhere"]
    holds: Literal["named", "kept", "refused"]
    alter: Callable[[Reply, Message], object] | None
    says: str = ""
    slow: bool = False


Alter = Callable[[Reply, Message], object]


def objects(name: str, does: str, alter: Alter, says: str = "malformed reply", slow: bool = False) -> Attack:
    """An upload whose objects are not what they should be."""
    return Attack(name, does, "upload", "named", alter, says, slow)


def numbers(name: str, does: str, metric: str, value: object, says: str) -> Attack:
    """An upload with one metric changed."""
    return Attack(name, does, "upload", "named", forge.metric(metric, value), says)


def start(name: str, does: str, says: str, **properties: object) -> Attack:
    """A node that says something else about itself; None: it says nothing of that."""
    return Attack(name, does, "start", "refused", forge.properties(properties), says)


ATTACKS: tuple[Attack, ...] = (
    # Flower's objects
    objects("message-garbage", "a message object that is no protobuf", structure.body("Message", b"\xff" * 40)),
    objects("message-empty", "a message without content and without error", structure.childless("Message")),
    objects(
        "message-is-record",
        "the announced message is a RecordDict",
        structure.root_is("RecordDict"),
        "no Message but a RecordDict",
    ),
    objects("message-is-piece", "the announced message is a piece of an array", structure.root_is("ArrayChunk")),
    objects("message-holds-config", "a ConfigRecord where the RecordDict should be", structure.holds("ConfigRecord")),
    objects("message-holds-array", "an Array where the RecordDict should be", structure.holds("Array")),
    objects("message-in-message", "a message inside of the message", structure.message_in_message, "malformed reply"),
    objects("message-bad-text", "a message whose texts are no UTF-8", structure.bad_utf8),
    objects("records-garbage", "a RecordDict that is no JSON", structure.body("RecordDict", b"{{{{")),
    objects("records-list", "a RecordDict that is a list", structure.body("RecordDict", b"[1, 2, 3]")),
    objects("records-number", "a RecordDict that is a number", structure.body("RecordDict", b"1e999")),
    objects("records-nested", "JSON nested 200,000 deep", structure.body("RecordDict", b"[" * 200_000)),
    objects(
        "records-missing",
        "a RecordDict that names a record it does not have",
        structure.body("RecordDict", b'{"fitres.metrics": "0"}'),
    ),
    objects("records-empty", "a RecordDict with nothing in it", forge.empty_records),
    objects("records-surrogate", "a record's name with half a character", forge.rename_record("\ud800\x1b[2J")),
    objects("records-of-pieces", "a RecordDict made of pieces of arrays", structure.record_is_piece),
    objects(
        "config-garbage", "a ConfigRecord that is no protobuf", structure.body("ConfigRecord", b"\x0a\xff\xff\xff")
    ),
    objects("config-children", "a ConfigRecord with children", structure.with_child("ConfigRecord")),
    objects(
        "metrics-garbage", "a MetricRecord that is no protobuf", structure.body("MetricRecord", b"\x0a\xff\xff\xff")
    ),
    objects("metrics-children", "a MetricRecord with children", structure.with_child("MetricRecord")),
    objects("metrics-no-value", "a metric without a value", structure.body("MetricRecord", b"\x0a\x05\x0a\x03abc")),
    objects(
        "arrays-garbage",
        "an ArrayRecord that is no JSON",
        structure.body("ArrayRecord", b"\x00\x01"),
        "expected the arrays",
    ),
    objects("array-garbage", "an Array that is no JSON", structure.body("Array", b"nothing"), "not a NumPy array"),
    objects(
        "array-pieces-negative",
        "an Array whose pieces have impossible numbers",
        structure.pieces("[-7, 99999999]"),
        "not a NumPy array",
    ),
    objects(
        "array-pieces-many",
        "one piece named 1,000,000 times",
        structure.pieces("[" + "0," * 999_999 + "0]"),
        "bytes, expected",
    ),
    objects(
        "array-pickle",
        "an array of pickled Python objects",
        forge.npy(b"\x93NUMPY\x01\x00\x36\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n"),
        "array params",
    ),
    objects(
        "array-header-bomb",
        "a header of 4,000 brackets",
        forge.npy(b"\x93NUMPY\x01\x00\xa0\x0f" + b"(" * 4000),
        "not a NumPy array",
    ),
    objects("array-truncated", "an array cut after its header", forge.cut_array, "array params"),
    objects("array-shape", "an array of another shape", forge.array(lambda a: a[:7]), "array params has shape (7,)"),
    objects(
        "array-dtype",
        "an array of another type",
        forge.array(lambda a: a.astype("f8")),
        "array params has dtype float64",
    ),
    objects("array-nan", "one NaN among the parameters", forge.spoil_one(float("nan")), "1 non-finite values"),
    objects(
        "array-infinite", "one infinity among the parameters", forge.spoil_one(float("inf")), "1 non-finite values"
    ),
    objects("arrays-more", "one array more than asked for", forge.one_array_more, "expected the arrays"),
    objects("arrays-none", "no arrays at all", forge.no_arrays, "expected the arrays"),
    objects("many-objects", "10,500 objects", structure.many_objects(10_500), "more than 10000 objects"),
    objects("deep-tree", "a tree of objects 80 deep", structure.deep_tree(80), "nested more than"),
    objects(
        "deep-heads",
        "300 objects that name each other in a row, behind a flat tree",
        structure.deep_heads(300),
        "nested more than",
    ),
    objects(
        "unannounced",
        "an object that names one which was not announced",
        structure.unannounced,
        "objects that it does not have",
    ),
    objects("stall-all", "a reply whose objects never come", structure.withhold_all, "not complete within", slow=True),
    objects(
        "stall-one", "a reply of which one object never comes", structure.withhold_one, "not complete within", slow=True
    ),
    objects("silent", "no reply at all", structure.silent, "no reply within", slow=True),
    objects("expired", "a reply that expired before it was sent", structure.expired, "", slow=True),
    objects(
        "error",
        "an error that looks like a line of the server's log",
        forge.flower_error("boom\n\x1b[31mcorolla: error: all is lost"),
        "error 8: boom",
    ),
    objects("error-huge", "an error of 5 MB", forge.flower_error("x" * 5_000_000), "error 8: x"),
    # whom it answers
    Attack(
        "body-answers-another",
        "the body says that it answers another client's message",
        "upload",
        "kept",
        structure.body_says(reply_to_message_id="0" * 64),
    ),
    Attack(
        "body-other-run",
        "the body names another run, another sender and the past",
        "upload",
        "kept",
        structure.body_says(run_id=7, src_node_id=1, created_at=1.0, ttl=1e-9),
    ),
    Attack(
        "envelope-nan",
        "sent at the time NaN, valid for NaN seconds",
        "upload",
        "kept",
        structure.envelope(created_at=float("nan"), ttl=float("nan")),
    ),
    Attack(
        "unasked",
        "before its reply 20 messages to the server that nobody asked for",
        "upload",
        "kept",
        structure.unasked(20),
    ),
    # numbers
    numbers("loss-huge", "a loss of 1.5e308", "loss", 1.5e308, "metric loss must be a number in [0, 1e+30]"),
    numbers("loss-negative", "a loss of -1", "loss-after", -1.0, "metric loss-after"),
    Attack("loss-infinite", "an infinite loss", "upload", "kept", forge.metric("loss-after", float("inf"))),
    numbers("accuracy", "an accuracy of 7", "accuracy-after", 7.0, "metric accuracy-after"),
    numbers("accuracy-text", "an accuracy in words", "accuracy-after", "lots", "metric accuracy-after"),
    numbers("accuracy-list", "a list of accuracies", "accuracy-after", [1.0] * 1000, "must be a scalar"),
    numbers("seconds-huge", "seconds of 1e300", "seconds-train", 1e300, "metric seconds-train"),
    numbers("seconds-text", "seconds of 900 kB of text", "seconds-train", "x" * 900_000, "metric seconds-train"),
    numbers("test-samples", "2^52 test samples", "test-samples", 2**52, "test-samples must be the"),
    Attack(
        "num-examples",
        "2^62 training samples",
        "upload",
        "named",
        forge.num_examples(2**62),
        "num_examples must be the",
    ),
    Attack(
        "num-examples-one-more",
        "one training sample more than it has",
        "upload",
        "named",
        forge.more_examples(1),
        "num_examples must be the",
    ),
    Attack(
        "num-examples-list",
        "a list for the number of samples",
        "upload",
        "named",
        forge.num_examples([5] * 50_000),
        "num_examples must be an integer",
    ),
    Attack("metrics-many", "30,000 metrics", "upload", "kept", forge.many_metrics(30_000)),
    Attack(
        "metrics-too-many", "200,000 metrics", "upload", "named", structure.integers(200_000), "its ConfigRecord has"
    ),
    Attack("metrics-names", "metrics that a report or a table could stumble over", "upload", "kept", forge.odd_metrics),
    numbers("metric-long", "a metric of 2 MB of text", "accuracy-after", "x" * 2_000_000, "its ConfigRecord has"),
    # text and state
    numbers(
        "state-of-another-round",
        "a state version of another round",
        "state-version",
        "000099-000000",
        "state-version must be",
    ),
    numbers(
        "state-path", "a state version that is a path", "state-version", "../../etc/passwd", "state-version must be"
    ),
    numbers(
        "state-used",
        "a damaged state with terminal codes",
        "state-used",
        "\x1b]0;owned\x07\x9b2J",
        "state-used must be",
    ),
    numbers(
        "error-text",
        "an error text with terminal codes and line ends",
        "error",
        "\x1b[2J\x9b31m\r\ncorolla: error: all is lost\x00",
        "corolla: error: all is lost",
    ),
    # evaluation
    Attack(
        "evaluation-loss",
        "an evaluation's loss of 1.5e308",
        "evaluation",
        "named",
        forge.evaluation_loss(1.5e308),
        "metric loss",
    ),
    Attack(
        "evaluation-accuracy",
        "an evaluation's accuracy of 7",
        "evaluation",
        "named",
        forge.metric("accuracy", 7.0),
        "metric accuracy",
    ),
    Attack(
        "evaluation-sha",
        "a hash that is none",
        "evaluation",
        "named",
        forge.metric("sha256", "\x1b[2J"),
        "sha256 must be",
    ),
    Attack(
        "evaluation-samples",
        "an evaluation on 2^52 samples",
        "evaluation",
        "named",
        forge.evaluation_samples(2**52),
        "test-samples must be the",
    ),
    Attack(
        "evaluation-garbage",
        "an evaluation that is no JSON",
        "evaluation",
        "named",
        structure.body("RecordDict", b"}"),
        "malformed reply",
    ),
    Attack("evaluation-metrics", "an evaluation with 20,000 metrics", "evaluation", "kept", forge.many_metrics(20_000)),
    # who it is
    start("id-text", "a partition-id in words", "partition-id must be in", **{"client-id": "\x1b[2J zero"}),
    start("id-huge", "a partition-id of 2^60", "partition-id must be in", **{"client-id": 2**60}),
    start("id-negative", "a partition-id of -1", "partition-id must be in", **{"client-id": -1}),
    start("id-none", "no partition-id", "partition-id must be in", **{"client-id": None}),
    start("id-true", "a partition-id that is a truth value", "partition-id must be in", **{"client-id": True}),
    start("clients-huge", "says that there are 2^40 clients", "num-partitions must be", **{"num-clients": 2**40}),
    start("classes-huge", "2^31 classes", "property num-classes must be", **{"num-classes": 2**31}),
    start("image-text", "an image size in words", "property image-size must be", **{"image-size": "big"}),
    start(
        "samples-huge", "2^62 training samples, declared", "property train-samples must be", **{"train-samples": 2**62}
    ),
    start(
        "counts-long", "class counts of 5,000 digits", "property class-counts must be", **{"class-counts": "9" * 5000}
    ),
    start("another-shape", "data of another shape", "its data have", **{"in-channels": 3}),
    start("refuses", "refuses, in terminal codes", "no data here", error="\x1b[2J\x9b no data\nhere"),
    Attack(
        "properties-garbage",
        "properties that are no JSON",
        "start",
        "refused",
        structure.body("RecordDict", b"[" * 100_000),
        "malformed reply",
    ),
    Attack("properties-empty", "properties that are none", "start", "refused", forge.empty_records, "malformed"),
    Attack(
        "properties-silent", "never says who it is", "start", "refused", structure.silent, "has not answered within"
    ),
    Attack(
        "second-of-an-id",
        "takes the partition-id of a connected client at the start",
        "start",
        "refused",
        forge.pretend(0, 4.0),
        "two SuperNodes carry this partition-id",
    ),
    Attack(
        "takes-over",
        "comes during the run with the partition-id of a connected client",
        "join",
        "refused",
        forge.pretend(1),
        "two SuperNodes carry this partition-id",
    ),
)
