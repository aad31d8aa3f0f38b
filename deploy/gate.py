"""A site's gate, between a SuperNode's connection and the applications that it would start.

Flower's SuperNode receives its messages through seven functions, its connection to the SuperLink. The gate wraps each
of them with the site's rules. A refused application is neither unpacked nor imported. Its server gets an answer that
names the rule, and the SuperNode continues. The gate runs in the SuperNode's process, where no application's code runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import re
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.cli.config_utils import get_fab_metadata
from flwr.common.config import get_fused_config_from_fab
from flwr.common.constant import MESSAGE_TTL_TOLERANCE, ErrorCode
from flwr.common.serde_utils import error_to_proto, metadata_from_proto, metadata_to_proto
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_body,
    get_object_id,
    get_object_tree,
    get_object_type_from_object_content,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.object_store import ObjectStore
from flwr.supercore.run import Run

from deploy import sample_counting, site
from deploy.audit import Audit
from deploy.site import Request, Site
from deploy.unanswered import Arriving
from fl_app.config import RunConfig
from fl_app.errors import DeploymentError, UserError, describe
from fl_app.keys import Scalar, specs
from fl_app.known_names import CLIENT_NAME
from fl_app.log_format import about
from fl_app.reasons import RULES, Reason, admitted
from fl_app.server.properties import SAMPLES
from fl_app.transport.app_bundle import PROJECT
from fl_app.transport.outgoing import DETAILED, OPEN, Kind, Mode, Way, leaving, modes_of
from fl_app.transport.wire import DETAILS, ERROR, QUERY, failed_reply

log = logging.getLogger("corolla")

# seconds that an application may take from announcing a reply to delivering it
_CONTENT_SECONDS = 600
# most messages that are held for runs that wait for approval
_MAX_HELD = 1000
# most bytes of an application's pyproject.toml
_MAX_PROJECT = 64 * 1024
# most bytes of a run's configuration, as JSON: the audit keeps it
_MAX_CONFIG = 128 * 1024
# most characters of a text of others in one line of the audit, and most lines for messages that nobody asked for between
# two messages of the server
_MAX_TEXT, _MAX_STRAYS = 2000, 10
# Most runs whose judgement is kept, more than can be held, and most applications, of a few MB each, whose code is kept.
_MAX_JUDGED, _MAX_FABS = 2 * _MAX_HELD, 4

# keys of a run that say how many messages to train it has, with their defaults, and the messages of that type at its end:
# to collect the personal model, and to forget the state
_ROUNDS = "num-server-rounds"
_TRIES: Mapping[str, int] = {
    spec.name: spec.default for spec in specs(RunConfig) if spec.name in (_ROUNDS, "round-retries")
}
_LAST = 2

# kinds of replies by the type of the message
KINDS: Mapping[str, Kind] = {"train": "fit", "evaluate": "evaluate", QUERY: "properties"}

_ERRORS = frozenset(code for code in vars(ErrorCode).values() if isinstance(code, int))
# names of the account of a SuperLink without accounts, and what is said of a run that was submitted there
_NOBODY = ("none", "<id:none>")
NO_ACCOUNTS = "unknown (the SuperLink has no accounts)"
# rules whose texts begin with a key of the run
_NAMING = ("bounds", "readable-paths", "confine")

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class Connection:
    """Flower's connection to a SuperLink, its parts in the order in which Flower's loop takes them."""

    node_id: int
    receive: Callable[[], tuple[Message, ObjectTree] | None]
    send: Callable[[Message, ObjectTree, float], tuple[set[str], str]]
    get_run: Callable[[int], Run]
    get_fab: Callable[[str, int], Fab]
    pull_object: Callable[[int, str], bytes]
    push_object: Callable[[int, str, str, bytes], None]
    confirm_message_received: Callable[[int, str], None]


@dataclass(frozen=True)
class NodeConfig:
    """A SuperNode's --node-config: its client's id, the number of clients, the path of its data, its client's name."""

    client_id: int
    num_clients: int
    data_path: str = ""
    name: str = ""


@dataclass
class Judged:
    """A run, fetched once, and the sha256 of its code, so that the code that is checked is the code that starts.

    refusal: the broken rule in full, or "". way: limits of replies in this run. waits: the run waits for a
    person's approval. trained: messages to train that have come.
    """

    run: Run
    application: str
    config: Mapping[str, Scalar]
    refusal: str = ""
    waits: bool = False
    trained: int = 0
    # until its config is known, a run may have made every promise
    way: Way = Way(frozenset({Mode.PRIVATE, Mode.DP}))

    @property
    def request(self) -> Request:
        """The request for a person of the site."""
        return Request(str(self.run.run_id), self.application, self.config, self.submitter)

    @property
    def submitter(self) -> str:
        """The account that submitted the run, as the SuperLink names it; "" if it says nothing."""
        names = [name for field in ("account_name", "flwr_aid") if (name := str(getattr(self.run, field, "")))]
        return next((name[:_MAX_TEXT] for name in names if name not in _NOBODY), NO_ACCOUNTS if names else "")


@dataclass
class Gate:
    """The rules of one site in front of one connection.

    directory: of the site's audit and approvals. evaluations_in: that of the count of evaluations; None: the
    same. working: returns whether the application may still
    deliver a reply. known: returns a run that was fetched before, whose application has its configuration of then.
    arriving: counts the bytes that it sends. count: counts the training samples that a run's config gives
    a client of a number of clients, from the node's own data; raises UserError.
    """

    rules: Site
    audit: Audit
    directory: Path
    node: NodeConfig
    store: ObjectStore
    evaluations_in: Path | None = None
    working: Callable[[], bool] = lambda: True
    known: Callable[[int], Run | None] = lambda run_id: None
    arriving: Arriving = field(default_factory=Arriving)
    count: Callable[[Mapping[str, Scalar], int, int, str], int] = sample_counting.count
    _inner: Connection = field(init=False)
    # those that were used last, by run
    _judged: dict[int, Judged] = field(default_factory=dict)
    # the code of runs that may start, by its sha256
    _fabs: dict[str, Fab] = field(default_factory=dict)
    _held: list[tuple[Message, ObjectTree]] = field(default_factory=list)
    # the message not yet answered, by id; Flower's loop takes one at a time
    _open: dict[str, Message] = field(default_factory=dict)
    # the parts of the reply that leaves
    _leaving: set[str] = field(default_factory=set)
    _pulled: int = 0
    # messages that nobody asked for, since the last message
    _strays: int = 0
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def around(self, inner: Connection) -> Connection:
        """Return the wrapped connection, for Flower's loop."""
        self._inner = inner
        return Connection(
            inner.node_id,
            self.receive,
            self.send,
            lambda run: self._judge(run).run,
            lambda _, run: self._code(self._judge(run)),
            self.pull_object,
            self.push_object,
            self.confirm_message_received,
        )

    def waiting(self) -> Message | None:
        """Return the message that waits for a reply."""
        return next(iter(self._open.values()), None)

    def admits(self, message: Message, tree: ObjectTree) -> bool:
        """Return whether an application's message is a reply to an open one. Note others: they are not kept."""
        if message.metadata.reply_to_message_id in self._open and message.metadata.message_id == tree.object_id:
            return self.arriving.takes_parts(sum(1 for _ in iterate_object_tree(tree)))
        self._note_refusal(message.metadata.run_id, "reply: it answers no open message")
        return False

    # In

    def receive(self) -> tuple[Message, ObjectTree] | None:
        """Return the next message of a run that may run here.

        Messages of refused runs are answered, and one that could not be fetched. Those of runs that wait for approval
        are held until a person decides.
        """
        # Flower asks for the next one although the last one has no reply: its parts could not be fetched
        unanswered, self._open = self._open, {}
        for asked in unanswered.values():
            self._send_error(asked, Error(ErrorCode.UNKNOWN, "the message could not be fetched"))
        received = self._released() or self._inner.receive()
        if received is None:
            return None
        message = received[0]
        try:
            judged = self._judge(message.metadata.run_id)
            if judged.waits and self._undecided(judged):
                self._hold(received)
                return None
            why = judged.refusal or self._beyond_rounds(judged, message) or self._used_up(judged, message)
        # a run that cannot be written to the audit does not start
        except (UserError, OSError) as error:
            self._answer(message, _of_audit(error))
            return None
        if why:
            self._refuse(message, why)
            return None
        self._open = {message.metadata.message_id: message}
        self._pulled = self._strays = 0
        self.arriving.begin()
        return received

    def _beyond_rounds(self, judged: Judged, message: Message) -> str:
        """Count a message to train, where the site bounds the number of rounds. Return the reason to refuse it, or ""."""
        if _ROUNDS not in self.rules.bounds or KINDS.get(message.metadata.message_type) != "fit":
            return ""
        judged.trained += 1
        # an application refuses a value of another type
        told = [judged.config.get(name) for name in _TRIES]
        rounds, retries = (one if type(one) is int else _TRIES[name] for name, one in zip(_TRIES, told, strict=True))
        most = rounds * (1 + retries) + _LAST
        if judged.trained <= most:
            return ""
        return f"bounds: {_ROUNDS} of {rounds} and round-retries of {retries} allow {most} messages, this is one more"

    def _used_up(self, judged: Judged, message: Message) -> str:
        """Count the message if its reply is an evaluation that the site limits. Return the reason to refuse it, or ""."""
        most = self.rules.max_evaluations
        if most is None or not site.counts(message.metadata.message_type, judged.config):
            return ""
        return self._claim(most)

    def _claim(self, most: int) -> str:
        return site.claim(self.evaluations_in or self.directory, most)

    def pull_object(self, run_id: int, object_id: str) -> bytes:
        """Fetch a part of a message. Its name must be its sha256, so that a message's id covers all of its bytes."""
        content = self._inner.pull_object(run_id, object_id)
        if get_object_id(content) != object_id:
            raise ValueError(f"{object_id} is not the sha256 of the received bytes")
        if (asked := self._open.get(object_id)) is not None:
            self._open[object_id] = _with_tasks(asked, content)
        with self._counting:
            self._pulled += len(content)
        return content

    def confirm_message_received(self, run_id: int, message_id: str) -> None:
        """Note a complete download."""
        # if noting fails here, noting the reply fails too, and the reply is refused
        with contextlib.suppress(UserError):
            self._note("download", run_id, self._open[message_id], self._pulled, message_id)
        self._inner.confirm_message_received(run_id, message_id)

    # Out

    def send(self, message: Message, tree: ObjectTree, seconds: float) -> tuple[set[str], str]:
        """Note a reply and send it, or send a refusal instead. Only the first reply to a message leaves.

        An application chooses all of its reply: parts, names of parts, and the envelope's fields. All are counted.
        """
        self._leaving = set()
        asked = self._open.pop(message.metadata.reply_to_message_id, None)
        if asked is None:
            self._note_refusal(message.metadata.run_id, "reply: it answers no open message")
            return set(), ""
        try:
            parts = dict(self._contents(tree))
        except TimeoutError:
            parts = {}
        if why := self.arriving.too_much or ("" if parts else "reply: it was announced and not delivered"):
            self._refuse(asked, why)
            return set(), ""
        size = len(_envelope(message)) + tree.ByteSize() + sum(map(len, parts.values()))
        if self.rules.max_upload is not None and size > self.rules.max_upload:
            self._refuse(asked, f"max-upload: a reply may have {self.rules.max_upload} bytes, this one has {size}")
            return set(), ""
        if message.has_error():
            return self._send_error(asked, message.error)
        if not _is_plain(message, asked, tree.object_id, parts[tree.object_id]):
            self._refuse(asked, "reply: its envelope has fields of its own")
            return set(), ""
        told = _data_facts(parts.values()) if asked.metadata.message_type == QUERY else {}
        try:
            self._note("upload", message.metadata.run_id, message, size, message.metadata.message_id, **told)
        except UserError as error:
            self._answer(asked, _of_audit(error))
            return set(), ""
        self._leaving = set(parts)
        return self._inner.send(message, tree, seconds)

    def push_object(self, run_id: int, session: str, object_id: str, content: bytes) -> None:
        """Send a part of the reply that `send` has counted. Raises ValueError for any other bytes."""
        if object_id not in self._leaving or get_object_id(content) != object_id:
            raise ValueError(f"{object_id} is no part of the reply that leaves")
        self._inner.push_object(run_id, session, object_id, content)

    def _contents(self, tree: ObjectTree) -> Iterator[tuple[str, bytes]]:
        """Yield the parts of a reply, by id, as the application delivers them. Raises TimeoutError if it does not."""
        deadline = time.monotonic() + _CONTENT_SECONDS
        for object_id in {part.object_id for part in iterate_object_tree(tree)}:
            while not (content := self.store.get(object_id)):
                late = content is None or self.arriving.too_much or time.monotonic() > deadline or not self.working()
                # looked for once more: an application delivers all parts before it ends
                if late and not self.store.get(object_id):
                    raise TimeoutError("the application announced a reply and did not deliver it")
                time.sleep(0.02)
            yield object_id, content

    def _note_refusal(self, run_id: int, why: str) -> None:
        """Note a refusal of a message that the site did not ask for. An application may send any number of them."""
        self._strays += 1
        if self._strays > _MAX_STRAYS:
            return
        log.warning("run %d: refused by its site: %s", run_id, why, extra=about(run=str(run_id)))
        application = judged.application if (judged := self._judged.get(run_id)) else ""
        with contextlib.suppress(UserError):
            self.audit.append("refusal", run=str(run_id), application=application, bytes=0, sha256="", why=why)

    def _refuse(self, message: Message, why: str) -> None:
        """Note a refusal, and answer a message with the broken rule."""
        # a refusal reveals no data, so it is sent even if it cannot be noted
        with contextlib.suppress(UserError):
            self._note("refusal", message.metadata.run_id, message, 0, "", why=why)
        self._answer(message, why)

    def _answer(self, message: Message, why: str) -> None:
        """Send a refusal in the client's name, instead of the application's reply. why: it begins with its rule."""
        asked = message.metadata
        log.warning(
            "run %d, %s: refused by its site: %s", asked.run_id, asked.message_type, why, extra=self._about(message)
        )
        judged = self._judged.get(asked.run_id)
        way = judged.way if judged else Judged.way
        reason = reason_of(why)
        kind = KINDS.get(asked.message_type)
        if kind is None:
            self._reply(message, Message(Error(ErrorCode.UNKNOWN, str(reason)), reply_to=message))
            return
        # a run that was not read may be one that must not know it
        name = self.node.name if way.modes == OPEN else ""
        who: dict[str, Scalar] = {CLIENT_NAME: name} if name else {}
        if self.node.client_id is not None:
            who["client-id"] = self.node.client_id
        content = failed_reply(kind, {ERROR: str(reason), DETAILS: f"refused by its site: {why}"}, who)
        self._reply(message, Message(leaving(kind, content, way), reply_to=message))

    def _send_error(self, message: Message, error: Error) -> tuple[set[str], str]:
        """Note Flower's report of an application that failed, and send it with a reason instead of the error's text."""
        judged = self._judge(message.metadata.run_id)
        text = (error.reason or "")[:_MAX_TEXT]
        log.warning(
            "run %d: its application failed: %s",
            message.metadata.run_id,
            text,
            extra=self._about(message),
        )
        with contextlib.suppress(UserError):
            self._note("failure", message.metadata.run_id, message, 0, "", why=text)
        told = error.reason if judged.way.details and judged.way.modes == OPEN else str(Reason("failed"))
        # an application may choose any number
        code = error.code if error.code in _ERRORS else ErrorCode.UNKNOWN
        self._reply(message, Message(Error(code, told), reply_to=message))
        return set(), ""

    def _reply(self, message: Message, reply: Message) -> None:
        run_id = message.metadata.run_id
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            tree, parts = get_object_tree(reply), get_all_nested_objects(reply)
        try:
            wanted, session = self._inner.send(reply, tree, 0.0)
            for object_id, part in parts.items():
                if object_id in wanted:
                    self._inner.push_object(run_id, session, object_id, part.deflate())
        except Exception:
            # as in Flower's loop when a reply cannot be sent: the SuperNode continues
            log.exception("run %d: the reply could not be sent", run_id, extra=self._about(message))

    def _about(self, message: Message) -> dict[str, Any]:
        """Return the fields of a JSON log line about a message."""
        asked = message.metadata
        return about(
            run=str(asked.run_id), client=self.node.client_id, round=asked.group_id, message_type=asked.message_type
        )

    def _note(self, kind: str, run_id: int, message: Message, size: int, sha256: str, **more: Any) -> None:
        asked = message.metadata
        about = {"message": asked.message_type[:_MAX_TEXT], "round": asked.group_id[:_MAX_TEXT]}
        application = self._judge(run_id).application
        self.audit.append(kind, run=str(run_id), application=application, **about, bytes=size, sha256=sha256, **more)

    # Judging

    def _judge(self, run_id: int) -> Judged:
        """Fetch a run and its code, once, and check them against the rules.

        A run of which nothing was heard during _MAX_JUDGED others is fetched and checked again. A person's answer to it
        still holds.
        """
        if (known := self._judged.get(run_id)) is not None:
            _keep_last(self._judged, run_id, known, _MAX_JUDGED)
            return known
        run = self.known(run_id) or self._inner.get_run(run_id)
        # Flower keeps one configuration for all runs of a series, and one state: the last one's
        run.series_id = run_id
        fab = self._inner.get_fab(run.fab_hash, run_id)
        judged = Judged(run, hashlib.sha256(fab.content).hexdigest(), {})
        try:
            judged.refusal = self._refusal(judged, fab)
        # a server may have sent anything
        except Exception as error:
            log.warning("run %d", run_id, exc_info=True, extra=about(run=str(run_id), client=self.node.client_id))
            if isinstance(error, UserError):
                judged.refusal = str(error)
            else:
                judged.refusal = f"application: cannot be read ({describe(error)})"
        config = dict(judged.config)
        judged.refusal = judged.refusal[:_MAX_TEXT]
        outcome = judged.refusal or ("waits for approval" if judged.waits else "")
        said = {"application": judged.application, "submitter": judged.submitter}
        self.audit.append("run", run=str(run_id), **said, config=config, refusal=outcome)
        _keep_last(self._judged, run_id, judged, _MAX_JUDGED)
        if judged.refusal:
            judged.config = {}
        else:
            _keep_last(self._fabs, judged.application, fab, _MAX_FABS)
        return judged

    def _code(self, judged: Judged) -> Fab:
        """Return a run's code, as it was judged. Raises ValueError if other code came when it was fetched again."""
        if (fab := self._fabs.get(judged.application)) is None:
            fab = self._inner.get_fab(judged.run.fab_hash, judged.run.run_id)
            if (found := hashlib.sha256(fab.content).hexdigest()) != judged.application:
                raise ValueError(f"run {judged.run.run_id}: its code was {judged.application}, and is {found} now")
        _keep_last(self._fabs, judged.application, fab, _MAX_FABS)
        return fab

    def _refusal(self, judged: Judged, fab: Fab) -> str:
        run = judged.run
        if not judged.application == fab.hash_str == run.fab_hash:
            return f"applications: the code's sha256 is {judged.application}, but {run.fab_hash} was announced"
        if run.primary_task_type == TaskType.AGENT_APP:
            return "applications: agents do not run here"
        if why := site.unknown(self.rules, judged.application):
            return why
        _refuse_large_project(fab.content)
        # by these, the process of an application finds the code that it has unpacked
        run.fab_id, run.fab_version = get_fab_metadata(fab.content)
        found = get_fused_config_from_fab(fab.content, run)
        if strange := [key for key, value in found.items() if type(value) not in (str, int, float, bool)]:
            return f"{strange[0]}: must be a text, a number, true or false, got {type(found[strange[0]]).__name__}"
        if (size := len(json.dumps(found))) > _MAX_CONFIG:
            return f"application: its configuration may have {_MAX_CONFIG} bytes, it has {size}"
        judged.config = found
        judged.way = Way(modes_of(judged.config), details=self.rules.tell == DETAILED)
        if why := site.refusal(self.rules, judged.application, judged.config):
            return why
        judged.waits = self.rules.approval == site.ASK
        # nothing is looked up in a site's data for a run that a person has not seen
        return "" if judged.waits else self._unsuited(judged.config)

    def _unsuited(self, config: Mapping[str, Scalar]) -> str:
        """Return the rule by which the site's data do not suit a run, or ""."""
        # whether its data suit the run is one bit about them
        least, most = self.rules.min_samples, self.rules.max_evaluations
        try:
            if most is not None and site.hides(config) and (why := self._claim(most)):
                return why
        except UserError as error:
            return str(error)
        if least is None:
            return ""
        try:
            has = self.count(config, self.node.client_id, self.node.num_clients, self.node.data_path)
        except UserError as error:
            return f"min-samples: the samples cannot be counted: {error}"
        return "" if has >= least else f"min-samples: a client must have {least} training samples, this one has {has}"

    # Asking a person

    def _undecided(self, judged: Judged) -> bool:
        """Return whether a run still waits for an answer. Apply an answer that has come."""
        if (answer := site.answer(self.directory, judged.request)) is None:
            return True
        verdict = "approved" if answer.approved else "declined"
        self.audit.append(
            "approval", run=judged.request.run, application=judged.application, answer=verdict, by=answer.by
        )
        judged.refusal = self._unsuited(judged.config) if answer.approved else f"approval: {answer.by} has declined it"
        judged.waits = False
        site.forget(self.directory, judged.request.run)
        return False

    def _hold(self, received: tuple[Message, ObjectTree]) -> None:
        judged = self._judge(received[0].metadata.run_id)
        # first: a server may start any number of runs, and each request is a file
        if len(self._held) >= _MAX_HELD:
            self._refuse(received[0], f"approval: {_MAX_HELD} messages wait for a person already")
            return
        site.ask(self.directory, judged.request)
        run = judged.request.run
        log.warning("run %s waits for approval: corolla node approve %s", run, run, extra=self._about(received[0]))
        self._held.append(received)

    def _released(self) -> tuple[Message, ObjectTree] | None:
        """Return a held message of a run that has been decided since."""
        for held in self._held:
            judged = self._judge(held[0].metadata.run_id)
            try:
                decided = not judged.waits or not self._undecided(judged)
            # it keeps waiting: a run that cannot be written to the audit does not start
            except (UserError, OSError) as error:
                log.error("run %s: %s", judged.request.run, error, extra=self._about(held[0]))
                continue
            if decided:
                self._held.remove(held)
                return held
        return None


def _with_tasks(asked: Message, content: bytes) -> Message:
    """Return a message without content and with the tasks that its own part names.

    A SuperLink with a database leaves them out of the envelope. The application takes them from the part, and its reply
    answers them.
    """
    metadata, told = (
        metadata_to_proto(asked.metadata),
        MessageProto.FromString(get_object_body(content, Message)).metadata,
    )
    for name in ("src_task_id", "dst_task_id"):
        metadata.ClearField(name)
        if told.HasField(name):
            setattr(metadata, name, getattr(told, name))
    make: Any = Message
    copy: Message = make(RecordDict(), metadata=metadata_from_proto(metadata))
    return copy


def _envelope(message: Message, **less: str) -> bytes:
    """Return the bytes of a message beside its content. less: values of fields of its metadata."""
    metadata = metadata_to_proto(message.metadata)
    for name, value in less.items():
        setattr(metadata, name, value)
    error = error_to_proto(message.error) if message.has_error() else None
    packed: bytes = MessageProto(metadata=metadata, error=error).SerializeToString(deterministic=True)
    return packed


def _data_facts(parts: Iterable[bytes]) -> dict[str, Any]:
    """Return what a client's answer says of its data: the hash, and the numbers of samples. A run with a promise has less."""
    found: dict[str, Any] = {}
    for content in parts:
        # an application may have written anything
        with contextlib.suppress(Exception):
            if len(content) <= _MAX_PROJECT and get_object_type_from_object_content(content) == ConfigRecord.__name__:
                found |= dict(ConfigRecord.inflate(content))
    return {
        name: value
        for name in ("data-sha256", *SAMPLES)
        if (type(value := found.get(name)) is int or re.fullmatch("[0-9a-f]{64}", str(value), re.ASCII))
    }


def _is_plain(reply: Message, asked: Message, object_id: str, content: bytes) -> bool:
    """Return whether a reply's fields follow from the message that it answers, except its beginning and its error.

    It ends with the message, and began no longer ago than a message lasts: a SuperLink drops others without a word.
    object_id, content: its part that holds these fields a second time.
    """
    expected = metadata_to_proto(Message(RecordDict(), reply_to=asked).metadata)
    found = metadata_to_proto(reply.metadata)
    late = found.created_at + found.ttl - expected.created_at - expected.ttl
    # by the clock of this machine alone; a message that has ended here may last at its server. NaN is neither
    lasts = min(0.0, expected.ttl - MESSAGE_TTL_TOLERANCE) < found.ttl <= expected.ttl + asked.metadata.ttl
    if not (abs(late) <= MESSAGE_TTL_TOLERANCE and lasts):
        return False
    expected.message_id, expected.created_at, expected.ttl = object_id, found.created_at, found.ttl
    try:
        return found == expected and get_object_body(content, Message) == _envelope(reply, message_id="")
    except ValueError:
        return False


def _of_audit(error: Exception) -> str:
    """Return why a run does not start that cannot be noted."""
    return f"audit: {str(error).removeprefix('audit: ')}"


def reason_of(why: str) -> Reason:
    """Return the reason for a refusal, without its values. why: the broken rule, a colon, and the rest.

    The text about a bound, a path or a directory names the run's key first.
    """
    rule, _, rest = why.partition(": ")
    key = "method" if rule == "methods" else rest.partition(" ")[0] if rule in _NAMING else ""
    # a bound may be on a method's key; site.toml names it
    return admitted("refused", key, rule if rule in RULES else "application", [key] if rule == "bounds" else ())


def _keep_last(kept: dict[K, V], key: K, value: V, most: int) -> None:
    """Put a value last, and take out the first ones above `most`."""
    kept.pop(key, None)
    kept[key] = value
    while len(kept) > most:
        del kept[next(iter(kept))]


def _refuse_large_project(content: bytes) -> None:
    """Raise UserError unless an application's pyproject.toml is small. It is read here, before anything is allowed.

    The file's real size is unknown before it is unpacked. At most it is a thousand times the packed size, by deflate.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        info = archive.getinfo(PROJECT)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DeploymentError(
            key="application", rule=f"{PROJECT} must be stored or deflated, it is packed by method {info.compress_type}"
        )
    if (size := max(info.file_size, info.compress_size)) > _MAX_PROJECT:
        raise DeploymentError(key="application", rule=f"{PROJECT} may have {_MAX_PROJECT} bytes, it has {size}")
