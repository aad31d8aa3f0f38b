"""Flower's entry point on a client: `client_app.client_app:app`."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

from client_app.client import CorollaClient, refused
from client_app.session import Session
from fl_app import debugging, plugins, reasons
from fl_app.debugging import Place, refuse_breakpoints
from fl_app.errors import UserError
from fl_app.files import without_near_names
from fl_app.transport import wire
from fl_app.transport.app_bundle import unpacked
from fl_app.transport.flower import (
    ClientApp,
    Context,
    Error,
    ErrorCode,
    Message,
    MessageType,
    RecordDict,
)
from fl_app.transport.numpy_client import Client, MessageClient
from fl_app.transport.outgoing import DETAILED, TELL, Kind, Way, leaving, modes_of
from fl_app.transport.wire import (
    IN_PROCESS,
    NODE_NAME,
    PRIVATE_KEYS,
    QUERY,
    SEED_KEYS,
    SIMULATED,
)

log = logging.getLogger("corolla")

# Flower loads this module before it starts Ray, in `flwr run .` too. By default Ray listens on all of a machine's
# addresses and runs any code sent there. The first variable declares that no other machine joins: Ray then listens on
# the loopback address alone. The second gives Ray's clients the usual priority: niceness 15 leaves them no time on a
# busy machine.
RAY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0"}
for _name, _value in RAY.items():
    os.environ.setdefault(_name, _value)


# The kinds of messages that a client answers, by Flower's types.
KINDS: dict[str, Kind] = {MessageType.TRAIN: "fit", MessageType.EVALUATE: "evaluate", QUERY: "properties"}


def client_fn(context: Context) -> Client:
    """Return the client for one message, for an app of Flower's own."""
    return client_of(context).to_client()


def client_of(context: Context) -> CorollaClient | Refusal:
    """Return the client for one message, or a Refusal with the reason why it cannot take part.

    Raises UserError without a partition-id.
    """
    client_id, num_clients = context.node_config.get("partition-id"), context.node_config.get("num-partitions")
    if type(client_id) is not int or type(num_clients) is not int:
        raise UserError(
            f"the SuperNode needs --node-config 'partition-id=K num-partitions=N', got {context.node_config}",
            code="deployment",
        )
    place = _place(context)
    if place is not Place.IN_PROCESS:
        refuse_breakpoints()
    try:
        session = Session.of(context.run_config, num_clients, context.run_id)
    except UserError as error:
        return Refusal(client_id, error, place)
    data_path = str(context.node_config.get("data-path", ""))
    keys = str(context.node_config.get(PRIVATE_KEYS, ""))
    if not keys and place is Place.SIMULATION:
        keys = SEED_KEYS
    name = str(context.node_config.get(NODE_NAME, ""))
    return CorollaClient(session, client_id, data_path, keys, context.run_id, place, name)


class CorollaApp(ClientApp):
    """Flower's ClientApp, which decodes the server's messages itself.

    Flower's own way makes half a dozen objects of each message, and keeps its bytes beside the arrays while a client
    trains.
    """

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message. At a site, only the entries that fl_app/transport/outgoing.py lets pass leave, errors included."""
        kind = KINDS.get(message.metadata.message_type)
        if _place(context) is Place.DEPLOYMENT:
            return _answer_of_site(kind, message, context)
        if kind is None:
            return super().__call__(message, context)
        return Message(client_of(context).reply(kind, message.content), reply_to=message)


def _answer_of_site(kind: Kind | None, message: Message, context: Context) -> Message:
    """Return a site's answer. An exception becomes a reason, and its text stays in the site's log.

    No error names files, and a run names no code but the application's.
    """
    if kind is None:
        return Message(Error(ErrorCode.UNKNOWN, str(reasons.Reason("protocol"))), reply_to=message)
    way = Way(modes_of(context.run_config), details=os.environ.get(TELL) == DETAILED)
    with without_near_names(), plugins.only_from(unpacked()):
        try:
            client = client_of(context)
            content = client.reply(kind, message.content)
            # what refuses a run may also keep its task and method from being read
            with contextlib.suppress(UserError):
                way = client.widened(way)
        except Exception as error:
            log.exception("%s", message.metadata.message_type)
            told = {wire.ERROR: str(reasons.of(error)), wire.DETAILS: debugging.reason(error)}
            content = wire.failed_reply(kind, told)
    return Message(leaving(kind, content, way), reply_to=message)


def _place(context: Context) -> Place:
    """Return where this process runs: inside the caller's, in a simulation, or in a deployment."""
    if context.node_config.get(IN_PROCESS) is True:
        return Place.IN_PROCESS
    simulated = context.node_config.get(SIMULATED) is True or _is_rays()
    return Place.SIMULATION if simulated else Place.DEPLOYMENT


def _is_rays() -> bool:
    """Return whether this process is a Ray worker, which runs a simulation's clients.

    On a Ray cluster a worker does not have the environment of the process that started the run.
    """
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


class Refusal(MessageClient):
    """A client that cannot take part, and answers every message with the reason."""

    def __init__(self, client_id: int, error: UserError, place: Place) -> None:
        self.client_id = client_id
        with contextlib.suppress(UserError), reasons.stage("configuration"):
            raise error
        self.answer = refused(client_id, error, place)

    def widened(self, way: Way) -> Way:
        """Return what may leave: nothing more."""
        return way

    def reply(self, kind: Kind, content: RecordDict) -> RecordDict:
        """Return the reason, and to a question the client's id."""
        return wire.failed_reply(kind, self.answer, {"client-id": self.client_id})


app = CorollaApp(client_fn)
