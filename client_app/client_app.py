"""Flower's entry point on a client: `client_app.client_app:app`."""

from __future__ import annotations

import os
import sys

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.compat.client.client import Client
from flwr.compat.client.numpy_client import NumPyClient
from flwr.compat.common.typing import Config, NDArrays

from client_app.client import CorollaClient
from client_app.session import Session
from fl_app.errors import UserError
from fl_app.wire import ERROR, PRIVATE_KEYS, SEED_KEYS

# Flower loads this module before it starts Ray, in `flwr run .` too. By default Ray listens on all of a machine's addresses and
# runs what anybody sends there; the first variable says that no other machine will join. The second gives its clients the
# usual priority: niceness 15 leaves them no time on a busy machine.
RAY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0"}
for _name, _value in RAY.items():
    os.environ.setdefault(_name, _value)


def client_fn(context: Context) -> Client:
    """Build the client for one message; its id is the SuperNode's partition-id."""
    client_id, num_clients = context.node_config.get("partition-id"), context.node_config.get("num-partitions")
    if type(client_id) is not int or type(num_clients) is not int:
        raise UserError(
            f"the SuperNode needs --node-config 'partition-id=K num-partitions=N', got {context.node_config}"
        )
    try:
        session = Session.of(context.run_config, num_clients, context.run_id)
    except UserError as error:
        return Refusal(client_id, str(error)).to_client()
    data_path = str(context.node_config.get("data-path", ""))
    keys = str(context.node_config.get(PRIVATE_KEYS, ""))
    if not keys and _simulated():
        keys = SEED_KEYS
    return CorollaClient(session, client_id, data_path, keys, context.run_id).to_client()


def _simulated() -> bool:
    """Whether this is a worker of Ray, which runs a simulation's clients.

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


app = ClientApp(client_fn)
