"""Replies as they arrive, each fetched by itself, so that a malformed reply affects no other one.

Flower's own Grid fetches all replies that are ready in one call, assembles their objects there, and reads from each
body which message it answers. One malformed object loses all replies; an incomplete one holds all of them up. Here each
reply is requested by itself, and its objects are fetched in a separate thread, before its own deadline. The SuperLink,
not the reply's body, states which message the reply answers.

This needs the internals of Flower 1.39. `connect` checks them. If they are not as expected, Flower's own way is used, and
the log reports it once.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import queue
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import httpx
from flwr.app import Message, RecordDict
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.serverapp import Grid
from flwr.supercore.inflatable import inflatable_object, inflatable_protobuf_utils, inflatable_utils
from flwr.supercore.run import RunNotRunningException

from fl_app import reasons
from fl_app.errors import UserError, describe
from fl_app.transport.inprocess import InProcessGrid
from fl_app.transport.wire import WireError, one_line

log = logging.getLogger("corolla")


RUN_ENDED = RunNotRunningException
# Errors of the connection to the SuperLink, which are no client's fault. Flower tries again for hours, but not if the
# certificate cannot be trusted.
LOST = httpx.TransportError
# OpenSSL's words: "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired (_ssl.c:1006)"
_CERTIFICATE = re.compile(r"certificate verify failed:? ?([^(]*)")
# Most objects of one reply: 40 GB of a large model's 4 MB pieces.
MAX_OBJECTS = 10_000
# Deepest nesting. A message needs 5: message, records, record, arrays, pieces.
MAX_DEPTH = 8
# Most bytes of a record of numbers and texts. Reading one costs about a hundred times as much as sending it.
MAX_RECORD = 1_000_000
_RECORDS = ("ConfigRecord", "MetricRecord")
# Most objects fetched at the same time, over all replies.
_AT_ONCE = 4
# Seconds between two tries for an object that is not there yet.
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0


# After scanning all expected replies, pause three times as long as the scan took: scans take at most a quarter of the time.
_REST = 3
# Least time to fetch a reply's objects, in seconds.
_FETCH_SECONDS = 10.0

# Most characters of Flower's error about a malformed reply.
_SHORT = 160


@dataclass(frozen=True)
class Found:
    """A reply as the SuperLink announces it: the id of its message object, and the tree of all its objects' ids."""

    object_id: str
    tree: ObjectTree


def lost(error: Exception) -> Exception:
    """Return the error with which a run ends whose connection failed: it names a certificate that cannot be trusted."""
    if (why := _CERTIFICATE.search(str(error))) is None:
        return error
    return UserError(f"the SuperLink's certificate cannot be trusted: {why[1].strip()}; renew it, and resume the run")


def has_fixed_nodes(grid: Grid) -> bool:
    """Return whether a grid's nodes are there from the beginning, as in one process and in a simulation."""
    if type(grid).get_node_ids is InProcessGrid.get_node_ids:
        return True
    # Imported here: it takes a second, which clients and runs in one process save.
    from flwr.superlink.grid import InMemoryGrid

    return type(grid).get_node_ids is InMemoryGrid.get_node_ids


def connect(grid: Grid) -> SuperLinkCalls | None:
    """Return a grid's access to its SuperLink.

    None if there is no SuperLink (one process, Ray), or if Flower's internals have changed.
    """
    if has_fixed_nodes(grid):
        return None
    try:
        return SuperLinkCalls(grid)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        log.warning(
            "this version of Flower fetches replies in another way: all replies are fetched together, by its own call (%s)",
            error,
        )
        return None


class SuperLinkCalls:
    """The calls that `HttpGrid` makes to fetch replies.

    Raises AttributeError or TypeError if Flower has changed them.
    """

    def __init__(self, grid: Any) -> None:
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse

        _takes(type(grid).pull_messages, "self", "message_ids")
        _takes(inflatable_utils.inflate_object_from_contents, "object_id", "object_contents")
        _takes(inflatable_protobuf_utils.make_pull_object_fn_protobuf, "pull_object_protobuf", "node", "run_id")
        for name in ("messages_list", "message_object_trees"):
            if name not in PullAppMessagesResponse.DESCRIPTOR.fields_by_name:
                raise AttributeError(f"PullAppMessagesResponse has no {name}")
        client = grid._runtime_client
        for call in ("PullMessages", "PullObject", "ConfirmMessageReceived"):
            _takes(getattr(client, call), "request")
        self._client, self._node, self._run_id = client, grid.node, int(grid.run.run_id)
        self._request = PullAppMessagesRequest
        self._pull_object: Callable[[str], bytes] = inflatable_protobuf_utils.make_pull_object_fn_protobuf(
            pull_object_protobuf=client.PullObject, node=self._node, run_id=self._run_id
        )
        self._free = threading.BoundedSemaphore(_AT_ONCE)

    def find(self, message_id: str) -> Found | None:
        """Return the announced reply to one message, None if there is none yet.

        Asking for one message at a time keeps an unreadable reply from spoiling others.
        """
        response = self._client.PullMessages(self._request(message_ids=[message_id]))
        for message, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            if message.metadata.reply_to_message_id == message_id:
                return Found(str(message.metadata.message_id), tree)
        return None

    def fetch(self, found: Found, deadline: float) -> Message:
        """Fetch a reply's objects until `deadline` (of time.monotonic), and assemble the reply.

        Raises TimeoutError; WireError if objects are too many, too deeply nested, too large or missing; and any error
        of Flower's for malformed ones.
        """
        try:
            contents = {name: self._object(name, deadline) for name in object_ids(found.tree)}
        finally:  # the SuperLink need not keep the objects, even bad ones
            request = ConfirmMessageReceivedRequest(
                node=self._node, run_id=self._run_id, message_object_id=found.object_id
            )
            self._client.ConfirmMessageReceived(request)
        check_nesting(found.object_id, contents)
        check_sizes(contents)
        message = inflatable_utils.inflate_object_from_contents(found.object_id, contents)
        if not isinstance(message, Message):
            raise WireError(f"it is no Message but a {type(message).__name__}")
        return message

    def _object(self, object_id: str, deadline: float) -> bytes:
        wait = _FIRST_WAIT
        while time.monotonic() < deadline:
            try:
                with self._free:
                    return self._pull_object(object_id)
            except inflatable_utils.ObjectUnavailableError:
                time.sleep(min(wait, max(0.0, deadline - time.monotonic())))
                wait = min(2 * wait, _LONGEST_WAIT)
        raise TimeoutError


def object_ids(tree: ObjectTree) -> list[str]:
    """Return the ids of a tree's objects, each once. Raises WireError beyond MAX_OBJECTS or MAX_DEPTH."""
    found: dict[str, None] = {}
    count, level = 0, [tree]
    for _ in range(MAX_DEPTH):
        count += len(level)
        if count > MAX_OBJECTS:
            raise WireError(f"it has more than {MAX_OBJECTS} objects")
        found |= dict.fromkeys(node.object_id for node in level)
        level = [child for node in level for child in node.children]
        if not level:
            return list(found)
    raise WireError(f"its objects are nested more than {MAX_DEPTH} deep")


def check_nesting(root: str, contents: Mapping[str, bytes]) -> None:
    """Raise WireError unless all objects named in the heads are there, and nested at most MAX_DEPTH deep."""
    level = {root}
    for _ in range(MAX_DEPTH):
        if missing := level - set(contents):
            raise WireError(f"it names {len(missing)} objects that it does not have")
        children = inflatable_object.get_object_children_ids_from_object_content
        level = {child for name in level for child in children(contents[name])}
        if not level:
            return
    raise WireError(f"its objects are nested more than {MAX_DEPTH} deep")


def check_sizes(contents: Mapping[str, bytes]) -> None:
    """Raise WireError if a record of numbers and texts has more than MAX_RECORD bytes. The head names its kind."""
    for content in contents.values():
        if len(content) > MAX_RECORD:
            kind = inflatable_object.get_object_type_from_object_content(content)
            if kind in _RECORDS:
                raise WireError(f"its {kind} has {len(content)} bytes, at most {MAX_RECORD} are read")


def _takes(call: Callable[..., Any], *names: str) -> None:
    """Raise TypeError unless a callable's first parameters have these names, and no others are required."""
    parameters = inspect.signature(call).parameters
    found = list(parameters)
    needed = [name for name in found[len(names) :] if parameters[name].default is inspect.Parameter.empty]
    if found[: len(names)] != list(names) or needed:
        raise TypeError(f"{getattr(call, '__qualname__', call)} takes {found}, expected {list(names)}")


@dataclass(frozen=True)
class Answer:
    """The outcome of a message: its reply's content, or the cause if there is none.

    kind: "error": the node or the SuperLink reports one. "malformed": the reply cannot be read. "late": it did not
    arrive in time. reply_id: Flower's id of the reply, "" if none has arrived.
    """

    message_id: str
    content: RecordDict | None
    cause: str = ""
    kind: Literal["content", "error", "malformed", "late"] = "content"
    reply_id: str = ""

    @property
    def reason(self) -> str:
        """The cause, without the code of an error."""
        return self.cause.partition(": ")[2] if self.kind == "error" else self.cause


class Inbox:
    """Expected and received replies. link: the grid's access to single replies, None if it has none."""

    def __init__(self, grid: Grid, link: SuperLinkCalls | None = None) -> None:
        self._grid = grid
        self._link = link
        # Whether to pause between scans. In one process a scan makes the replies, so there is no pause.
        self._rests = not isinstance(grid, InProcessGrid)
        # message id -> timeout, deadline, both in seconds; the first is found at once, even after many removals
        self._expected: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._fetching: set[str] = set()
        self._received: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        # earliest time of the next scan
        self._rested = 0.0
        # why the SuperLink can no longer be reached
        self._lost: Exception | None = None

    def expect(self, message_id: str, timeout: float) -> None:
        """Expect the reply to a message for `timeout` seconds from now."""
        self._expected[message_id] = timeout, time.monotonic() + timeout

    def forget(self, message_id: str) -> None:
        """Stop expecting a reply."""
        self._expected.pop(message_id, None)
        self._fetching.discard(message_id)

    @property
    def arriving(self) -> bool:
        """Whether a reply has been announced and is being fetched."""
        return bool(self._fetching)

    def take(self, wait: float) -> list[Answer]:
        """Return the answers that have arrived, or else the late ones; wait up to `wait` seconds for one.

        Answers that are not expected any more are left out. Raises an error if the SuperLink can no longer be reached.
        """
        if self._expected:
            self._look()
        answers: list[Answer] = []
        if self._received.empty():
            now = time.monotonic()
            for name, (timeout, deadline) in self._expected.items():
                if now >= deadline:
                    what = "its reply was not complete" if name in self._fetching else "no reply"
                    answers.append(Answer(name, None, f"{what} within {timeout:g} s", "late"))
            # without a link, replies come only by a scan
            if self._link is None and now < self._rested:
                wait = min(wait, self._rested - now)
        if not answers:
            with contextlib.suppress(queue.Empty):
                answers.append(self._received.get(timeout=wait) if wait else self._received.get_nowait())
                while True:
                    answers.append(self._received.get_nowait())
        answers = [answer for answer in answers if answer.message_id in self._expected]
        for answer in answers:
            self.forget(answer.message_id)
        return answers

    def _look(self) -> None:
        """Ask for expected replies that are not being fetched, unless the last scan was too recent.

        Raises UserError if the SuperLink's certificate cannot be trusted, or another error of the connection.
        """
        if self._lost is not None:
            raise self._lost
        started = time.monotonic()
        if started < self._rested:
            return
        if self._link is None:
            found = list(self._grid.pull_messages(self._expected.keys()))
            for message in found:
                about = message.metadata
                self._received.put(_answer(str(about.reply_to_message_id), message, str(about.message_id)))
            # after a scan that found nothing, `take` waits
            if not found or not self._rests:
                return
        else:
            for name, (_, deadline) in list(self._expected.items()):
                if name not in self._fetching:
                    self._look_for(self._link, name, deadline)
        now = time.monotonic()
        self._rested = now + _REST * (now - started)

    def _look_for(self, link: SuperLinkCalls, name: str, deadline: float) -> None:
        try:
            found = link.find(name)
        except RUN_ENDED:
            raise
        except LOST as error:
            raise lost(error) from error
        except Exception as error:  # the SuperLink's announcement of this reply cannot be read
            self._received.put(_malformed(name, error))
            return
        if found is not None:
            self._fetching.add(name)
            # a reply that arrived before this scan still has time to be fetched
            timeout, _ = self._expected[name]
            deadline = max(deadline, time.monotonic() + _FETCH_SECONDS)
            self._expected[name] = timeout, deadline

            def fetch() -> None:
                try:
                    answer = _answer(name, link.fetch(found, deadline), found.object_id)
                # after its deadline, `take` reports it as late
                except TimeoutError:
                    return
                except LOST as error:
                    self._lost = lost(error)
                    return
                except Exception as error:
                    answer = _malformed(name, error)
                self._received.put(answer)

            threading.Thread(target=fetch, name=f"reply {name[:8]}", daemon=True).start()


def _answer(name: str, message: Message, reply_id: str) -> Answer:
    """Read one reply. Any error of it makes this reply malformed, and affects no other one."""
    try:
        if message.has_error():
            reason = reasons.read(message.error.reason)
            why = reason.sentence if reason else one_line(message.error.reason)
            return Answer(name, None, f"error {int(message.error.code)}: {why}", "error", reply_id)
        if not isinstance(message.content, RecordDict):
            raise WireError(f"its content is no RecordDict but a {type(message.content).__name__}")
        return Answer(name, message.content, reply_id=reply_id)
    except Exception as error:
        return _malformed(name, error)


def _malformed(name: str, error: Exception) -> Answer:
    text = str(error) if isinstance(error, WireError) else describe(error)[:_SHORT]
    return Answer(name, None, str(WireError(f"malformed reply: {text}")), "malformed")
