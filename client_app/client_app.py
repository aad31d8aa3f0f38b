"""Flower's entry point on a client: `client_app.client_app:app`."""

from __future__ import annotations

import os
import sys

from flwr.app import Context, Message, MessageType
from flwr.clientapp import ClientApp
from flwr.compat.client.client import Client
from flwr.compat.client.numpy_client import NumPyClient
from flwr.compat.common.typing import Config, NDArrays

from client_app.client import CorollaClient
from client_app.session import Session
from fl_app import plugins
from fl_app.app_bundle import unpacked
from fl_app.debugging import Place, refuse_breakpoints
from fl_app.errors import UserError
from fl_app.files import without_near_names
from fl_app.wire import (
    ERROR,
    IN_PROCESS,
    PRIVATE_KEYS,
    QUERY,
    SEED_KEYS,
    SIMULATED,
    evaluate_reply,
    fit_reply,
    instructions,
    properties_reply,
)

# Flower loads this module before it starts Ray, in `flwr run .` too. By default Ray listens on all of a machine's
# addresses and runs any code sent there. The first variable declares that no other machine joins: Ray then listens on
# the loopback address alone. The second gives Ray's clients the usual priority: niceness 15 leaves them no time on a
# busy machine.
RAY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0"}
for _name, _value in RAY.items():
    os.environ.setdefault(_name, _value)


def client_fn(context: Context) -> Client:
    """Build the client for one message; its id is the SuperNode's partition-id."""
    return client_of(context).to_client()


def client_of(context: Context) -> NumPyClient:
    """Return the client for one message, or a Refusal with the reason why it cannot take part.

    Raises UserError without a partition-id.
    """
    client_id, num_clients = context.node_config.get("partition-id"), context.node_config.get("num-partitions")
    if type(client_id) is not int or type(num_clients) is not int:
        raise UserError(
            f"the SuperNode needs --node-config 'partition-id=K num-partitions=N', got {context.node_config}"
        )
    place = _place(context)
    if place is not Place.IN_PROCESS:
        refuse_breakpoints()
    try:
        session = Session.of(context.run_config, num_clients, context.run_id)
    except UserError as error:
        return Refusal(client_id, str(error))
    data_path = str(context.node_config.get("data-path", ""))
    keys = str(context.node_config.get(PRIVATE_KEYS, ""))
    if not keys and place is Place.SIMULATION:
        keys = SEED_KEYS
    return CorollaClient(session, client_id, data_path, keys, context.run_id, place)


class CorollaApp(ClientApp):
    """Flower's ClientApp, which decodes the server's messages itself.

    Flower's own way makes half a dozen objects of each message, and keeps its bytes beside the arrays while a client
    trains.
    """

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message. At a site, no error names files, and a run names no code but the application's."""
        if _place(context) is not Place.DEPLOYMENT:
            return self._answer(message, context)
        with without_near_names(), plugins.only_from(unpacked()):
            return self._answer(message, context)

    def _answer(self, message: Message, context: Context) -> Message:
        kind = message.metadata.message_type
        if kind == MessageType.TRAIN:
            return Message(fit_reply(*client_of(context).fit(*instructions(message.content, "fit"))), reply_to=message)
        if kind == MessageType.EVALUATE:
            found = client_of(context).evaluate(*instructions(message.content, "evaluate"))
            return Message(evaluate_reply(*found), reply_to=message)
        if kind == QUERY:
            return Message(properties_reply(client_of(context).get_properties({})), reply_to=message)
        return super().__call__(message, context)


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


class Refusal(NumPyClient):
    """A client that cannot take part, and answers every message with the reason."""

    def __init__(self, client_id: int, reason: str) -> None:
        self.client_id, self.answer = client_id, {ERROR: reason}

    def get_properties(self, config: Config) -> Config:
        """Return the client's id, and the reason."""
        return {"client-id": self.client_id, **self.answer}

    def fit(self, parameters: NDArrays, config: Config) -> tuple[NDArrays, int, Config]:
        """Return the reason."""
        return [], 0, {**self.answer}

    def evaluate(self, parameters: NDArrays, config: Config) -> tuple[float, int, Config]:
        """Return the reason."""
        return 0.0, 0, {**self.answer}


app = CorollaApp(client_fn)
