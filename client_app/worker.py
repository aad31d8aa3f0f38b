"""A process of `corolla run` that answers messages for a simulation's clients: `python -m client_app.worker SOCKET`.

This is the warm process (fl_app/forking.py). SOCKET is the file number of its socket. It reads a Setup as JSON from
standard input, and prepares for the run. Its children answer: they read pickled messages and write pickled replies, one
at a time, until the messages end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from client_app.client_app import app
from client_app.session import Session, import_torch
from fl_app import forking, plugins
from fl_app.keys import Scalar
from fl_app.transport.flower import Context, Error, Message, RecordDict, TaskIdentity
from fl_app.transport.wire import SIMULATED, SIMULATED_RUN, simulated_node
from strategies.base.handed_on import SharedNetwork, receive

COMMAND = (sys.executable, "-P", "-m", "client_app.worker")


@dataclass(frozen=True)
class Setup:
    """A simulation's settings for its processes.

    plugins: directories of the user's own files. path: the module search path. network: the run's, if it is shared.
    """

    config: dict[str, Scalar]
    num_clients: int
    plugins: tuple[str, ...]
    path: tuple[str, ...]
    network: SharedNetwork | None = None

    @classmethod
    def of(cls, config: Mapping[str, Scalar], num_clients: int, network: SharedNetwork | None = None) -> Setup:
        """Return the setup for processes that this process starts."""
        return cls(dict(config), num_clients, tuple(map(str, plugins.directories())), tuple(sys.path), network)

    def to_json(self) -> bytes:
        """Return the setup as JSON, for `main`."""
        return json.dumps(dataclasses.asdict(self)).encode()

    def context(self, node: int) -> Context:
        """Return the context that Flower gives the client of a node. A node's id is the client's + 1."""
        node_config = simulated_node(node - 1, self.num_clients, SIMULATED)
        return Context(SIMULATED_RUN, node, node_config, RecordDict(), dict(self.config))


def main() -> None:
    """Import the clients' modules, and fork processes that answer."""
    setup = Setup(**json.load(sys.stdin))
    prepare(setup)
    forking.serve(int(sys.argv[1]), lambda asker: answer_all(asker, setup))


def prepare(setup: Setup) -> None:
    """Import the modules that the clients of a run need, without computing anything."""
    sys.path[:] = setup.path
    plugins.reset(*map(Path, setup.plugins))
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 0
    import_torch()
    from client_app import trainer  # noqa: F401

    # each client reports an error of the config itself
    with contextlib.suppress(Exception):
        Session.of(setup.config, setup.num_clients, SIMULATED_RUN)
    # without it each client builds the network
    with contextlib.suppress(Exception):
        if setup.network:
            receive(SharedNetwork(*setup.network))


def answer_all(asker: socket.socket, setup: Setup) -> None:
    """Answer messages until the asker sends no more."""
    with asker.makefile("rb") as incoming, asker.makefile("wb") as outgoing:
        while True:
            try:
                message: Message = pickle.load(incoming)
            except EOFError:
                return
            pickle.dump(answer(message, setup), outgoing, pickle.HIGHEST_PROTOCOL)
            outgoing.flush()


def answer(message: Message, setup: Setup) -> Message:
    """Return the ClientApp's reply to a message, or the traceback of its exception."""
    try:
        return app(message, setup.context(message.metadata.dst_node_id))
    except Exception:
        return Message(Error(0, traceback.format_exc()), reply_to=message)


if __name__ == "__main__":
    main()
