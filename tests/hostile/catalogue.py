"""The attacks, as data. `test_hostile.py` plays them all in one run; `table.py` makes the page of what came out.

To add one: append an `Attack` to ATTACKS: a name, what it does in a few words, where it strikes, what must hold, and the
function that does it. Nothing else has to be changed: it gets a client and a round of its own.

where: "upload", "evaluation": a client that takes part spoils its reply to that message, once. "start": a node that is there at the
start spoils what it says about itself. "join": a node that comes while the run goes on.
holds: what must be true beside what is always asked: that the run ends well, that all other clients' numbers are those of a run
without the attack, bit for bit, and so is the digest.
  "named": the client is dropped by name, and the cause has the words `says`.
  "kept": its upload counts as if there had been no attack, which did nothing.
  "refused": the node is left out, by name in the log with the words `says`.

`BESIDE` has the attacks that need no round of their own: a test beside this run plays them, and the table names it.
COROLLA_ATTACKS: the names of the only attacks to play, with commas, to try some alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from flwr.app import Message

from tests.hostile import forge, structure
from tests.hostile.supernode import Reply


@dataclass(frozen=True)
class Attack:
    """One attack; see above. slow: it costs the round its timeout. alter: changes the reply to `message` before it is sent."""

    name: str
    does: str
    where: Literal["upload", "evaluation", "start", "join"]
    holds: Literal["named", "kept", "refused"]
    alter: Callable[[Reply, Message], object] | None
    says: str = ""
    slow: bool = False


@dataclass(frozen=True)
class Beside:
    """An attack that a test of its own plays: its words, where it strikes, what becomes of it, the test."""

    does: str
    where: str
    becomes: str
    test: str


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


_ALL: tuple[Attack, ...] = (
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
    objects(
        "array-minus-infinite", "minus infinity among the parameters", forge.spoil_one(-np.inf), "1 non-finite values"
    ),
    objects("array-signalling", "a signalling NaN among the parameters", forge.signalling(), "1 non-finite values"),
    objects(
        "buffers-signalling",
        "a signalling NaN among BatchNorm's statistics",
        forge.signalling(forge.BUFFERS),
        "array buffers has 1 non-finite values",
    ),
    objects(
        "buffers-infinite",
        "one infinity among BatchNorm's statistics",
        forge.spoil_one(np.inf, forge.BUFFERS),
        "array buffers has 1 non-finite values",
    ),
    objects(
        "buffers-variance",
        "a negative BatchNorm variance, of -1e-42",
        forge.spoil_one(-1e-42, forge.BUFFERS, place=-1),
        "array buffers has 1 negative variances",
    ),
    objects(
        "array-header-huge",
        "a header that declares 10^17 values",
        forge.npy(
            b"\x93NUMPY\x01\x00\x76\x00"
            + b"{'descr': '<f4', 'fortran_order': False, 'shape': (100000000000000000,), }".ljust(117)
            + b"\n"
        ),
        "array params has shape",
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
    objects(
        "body-huge",
        "an object that declares 10^15 bytes and has ten",
        structure.declares(10**15),
        "not complete within",
        slow=True,
    ),
    objects(
        "drips",
        "a reply that declares 10^15 bytes, and comes object by object, seconds apart",
        structure.drip(45, declared=10**15),
        "not complete within",
        slow=True,
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
        "error-markup",
        "an error text of HTML, Markdown, a formula and a metric's label",
        "error",
        "".join(forge.TEXTS),
        "<x-owned",
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

_ONLY = os.environ.get("COROLLA_ATTACKS")
ATTACKS = tuple(attack for attack in _ALL if not _ONLY or attack.name in _ONLY.split(","))

_FILES = "tests/hostile/test_files.py::"
_WORDS = "tests/hostile/test_hostile.py::test_no_name_of_a_client_is_code_anywhere"
_GATE = "tests/deploy/test_gate.py::"
_INVENTORY = "tests/deploy/test_deploy.py::test_hostile_files_are_refused_in_a_few_words"
_LIARS = "tests/privacy/test_private_liars.py::"
_EXTRAS = "tests/server/test_poisoning.py::test_a_liar_is_dropped_by_name_and_nobody_else"
_WIRE = "tests/fl_app/test_wire.py::"

BESIDE: tuple[Beside, ...] = (
    # numbers
    Beside(
        "subnormal numbers, -0.0 and 3e38",
        "upload",
        "used as they are: they are numbers",
        f"{_WIRE}test_variances_are_not_negative",
    ),
    Beside(
        "JSON of another form, and numbers of 400 digits, in what a client says about its data",
        "start",
        "that part of its answer does not count; for sums of a normalization the client is left out by name",
        "tests/server/test_properties.py::test_any_facts_about_inputs_are_read_or_refused",
    ),
    # time
    Beside(
        "lies that are always late, with `staleness`",
        "upload of an earlier round",
        "dropped by name when they arrive (`max-update-norm`); the model is that of a run in which the Byzantine client fails",
        "tests/strategies/test_late.py::test_a_liar_that_is_always_late_gains_nothing",
    ),
    # text
    Beside("HTML in the names of a client and its classes", "report, notebook", "shown as text", _WORDS),
    Beside("a formula (`=cmd`) in a client's name", "CSV files", "an apostrophe before it: a text", _WORDS),
    Beside("terminal codes and reversed text in names", "log, terminal, run folder", "removed", _WORDS),
    Beside("a cause with a label's syntax", "metrics", "counted under one of ten kinds", _WORDS),
    Beside(
        "terminal codes and line ends in a waiting run's config",
        "`corolla node approve`",
        "removed: no line is hidden, none looks like another",
        f"{_GATE}test_a_waiting_run_cannot_hide_a_line_of_its_config",
    ),
    Beside(
        "a refused run's text that looks like another line",
        "SuperNode's log",
        "without control characters, further lines indented",
        "tests/fl_app/test_log_format.py::test_a_text_line_cannot_look_like_another_or_move_the_cursor",
    ),
    # paths
    Beside("a run name that is a path", "config", "refused before the start", f"{_FILES}test_names_that_are_paths"),
    Beside(
        "an experiment or a state version that is a path",
        "server's message to a client",
        "refused by the client",
        f"{_FILES}test_names_that_are_paths",
    ),
    Beside(
        "a plug-in whose module is a path", "config", "refused: no such module", f"{_FILES}test_names_that_are_paths"
    ),
    Beside(
        "a run's path (data, state, initial weights) with `..` or behind a link",
        "site with `readable-paths`",
        "refused by name",
        "tests/deploy/test_site.py::test_paths_of_a_run_must_lie_where_the_site_says",
    ),
    Beside(
        "code whose `pyproject.toml` is a zip bomb",
        "site",
        "refused before it is unpacked",
        f"{_GATE}test_little_is_unpacked_before_an_application_is_allowed",
    ),
    Beside(
        "the code of hundreds of refused runs",
        "site",
        "kept for no run",
        f"{_GATE}test_the_code_of_many_runs_is_kept_once_and_of_refused_runs_not_at_all",
    ),
    Beside(
        "a backup whose members lead elsewhere",
        "restore",
        "refused, nothing changes",
        "tests/deploy/test_backup.py::test_a_damaged_or_hostile_archive_changes_nothing",
    ),
    Beside("a host that begins with `-`, or has a shell's characters", "inventory", "refused by name", _INVENTORY),
    Beside("a variable's name that is shell code", "inventory", "refused by name", _INVENTORY),
    Beside("a key directory with quotes or backslashes (TOML)", "inventory", "refused by name", _INVENTORY),
    Beside("YAML that makes Python objects, or grows", "inventory", "refused by name", _INVENTORY),
    Beside(
        "a link at the place of a temporary file",
        "run folder, cache, client state",
        "removed, not followed",
        "tests/fl_app/test_files.py::test_a_link_at_the_temporary_files_place_is_not_followed",
    ),
    Beside(
        "a link at the place of a lock",
        "cache of prepared data",
        "refused by name",
        "tests/fl_app/test_files.py::test_a_lock_that_is_a_link_is_refused",
    ),
    # files
    Beside("pickled objects", "npz, .pt", "never loaded; refused by name", f"{_FILES}test_files_are_refused"),
    Beside(
        "a header or an archive larger than the memory",
        "npz",
        "refused before it is unpacked",
        f"{_FILES}test_files_are_refused",
    ),
    Beside("a sparse tensor of terabytes in 2 kB", ".pt", "refused by its shape", f"{_FILES}test_files_are_refused"),
    Beside(
        "a header of 2^62 bytes, a shape of 10^18", "safetensors", "refused by name", f"{_FILES}test_files_are_refused"
    ),
    Beside(
        "external data in another file",
        "onnx",
        "refused by ONNX Runtime",
        f"{_FILES}test_an_onnx_file_reads_no_other_file",
    ),
    Beside(
        "pickled objects, a cut file", "parquet", "never loaded; refused by name", f"{_FILES}test_files_are_refused"
    ),
    # private runs, sites
    Beside(
        "a peer list with a foreign, unsigned or repeated key",
        "private run",
        "refused by the site",
        "tests/privacy/test_keyring.py::test_a_list_somebody_has_changed_is_refused",
    ),
    Beside(
        "another peer list than most",
        "private run",
        "left out by name",
        f"{_LIARS}test_a_client_with_another_list_is_left_out_by_name",
    ),
    Beside(
        "a group below three, a member twice, a foreign member",
        "server's message to a client",
        "refused by the client",
        "tests/privacy/test_masking.py::test_groups_that_hide_nothing_are_refused",
    ),
    Beside(
        "masks of another attempt", "private run", "refused", f"{_LIARS}test_an_upload_of_another_attempt_is_refused"
    ),
    Beside(
        "masks of another attempt under a false number",
        "private run",
        "spoils its sum, no model; the round is repeated or fails",
        f"{_LIARS}test_a_replayed_upload_that_lies_about_its_attempt_spoils_the_round_and_no_model",
    ),
    Beside(
        "a second question about one attempt",
        "server's message to a client",
        "refused by the client",
        f"{_LIARS}test_a_client_answers_no_attempt_twice",
    ),
    Beside(
        "code that differs from the announced or allowed in one byte",
        "site",
        "refused, not unpacked",
        f"{_GATE}test_code_that_is_not_what_was_announced",
    ),
    Beside(
        "an old approval for other code, another config or another run",
        "site with `approval`",
        "does not count",
        f"{_GATE}test_an_old_approval_holds_for_the_same_code_and_config_alone",
    ),
    Beside(
        "a method of one's own: undeclared, or with an objective, a loop or other uses of records",
        "run with `dp-epsilon`",
        "refused by name; code that reads records beside its trainer is not noticed",
        f"{_FILES}test_a_budget_needs_a_method_that_declares_it",
    ),
    # server memory
    Beside(
        "Gaussians and guidance models far from the others'",
        "upload of pFedFDA, FedDAC, FedDWA",
        "dropped by name, with `max-update-norm = 3`",
        _EXTRAS,
    ),
    Beside(
        "impossible counts, steps and clusters",
        "upload of FedGen, SCAFFOLD, FedOBP, IFCA, FedAS",
        "dropped by name",
        _EXTRAS,
    ),
)
"""The attacks that need no round of their own."""
