"""One reply from the SuperLink: found by the message it answers, fetched object by object, and assembled.

Written for Flower 1.39, in place of its `HttpGrid.pull_messages`. `connect` checks that the internals it needs are
there.
"""

from __future__ import annotations

import inspect
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from flwr.app import Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.serverapp import Grid
from flwr.supercore.inflatable import inflatable_object, inflatable_protobuf_utils, inflatable_utils
from flwr.supercore.run import RunNotRunningException

from fl_app.errors import UserError
from fl_app.transport.inprocess import InProcessGrid
from fl_app.transport.wire import WireError

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
