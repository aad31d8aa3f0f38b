"""A method's rounds on arrays, for its tests: server half, client halves and states, without data sets or messages.

    fed = federation(METHOD, clients=3, d=8)
    fed.round(W)

W, float32 [3, 8], replaces the results of the clients' training. Without it the clients train, on a few random samples
each.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from client_app.stored_state import StoredState
from client_app.trainer import LocalTrainer
from fl_app import weights
from fl_app.config import parse
from fl_app.data import ClientData, DatasetInfo
from fl_app.errors import UserError
from fl_app.keys import Scalar
from fl_app.layout import Layout, Model
from fl_app.server.run_folder import RunFolder
from fl_app.transport.wire import Upload
from strategies import METHOD_PARAMS, METHODS
from strategies.base import Method, ModelFactory, RoundContext, Uploads
from strategies.base.method import AnyMethod
from strategies.base.server_half import Turn
from strategies.base.state import UploadBuffer
from strategies.engine import steps
from strategies.engine.plain import PlainRounds

__all__ = ["Federation", "Tiny", "federation", "local_round"]

# samples of each client, used both for training and for tests
SAMPLES = 12
SMALLEST = 6
USUAL: Mapping[str, Scalar] = {"device": "cpu", "batch-size": 4, "local-epochs": 1, "num-server-rounds": 10}


class Tiny(nn.Module):
    """d - 5 numbers -> one feature -> two classes: d parameters, in `features` and `classifier`."""

    def __init__(self, d: int) -> None:
        """Build it. d: at least 6."""
        super().__init__()
        self.features = nn.Linear(d - SMALLEST + 1, 1)
        self.classifier = nn.Linear(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits float32 [n, 2] of x float32 [n, d - 5]."""
        logits: torch.Tensor = self.classifier(torch.tanh(self.features(x)))
        return logits


class Federation:
    """Clients with separate data around one server.

    server: the method's server half, including its `state`. states: each client's state. method, config, layout,
    initial, shared: of the run. rounds: number of rounds run.
    """

    def __init__(
        self,
        method: AnyMethod | str,
        data: Sequence[tuple[NDArray[Any], NDArray[Any]]],
        info: DatasetInfo,
        network: Callable[[], nn.Module],
        keys: Mapping[str, Scalar],
        folder: Path | None = None,
    ) -> None:
        """Set it up. data: samples [n, ...] and targets [n] per client.

        keys: flat run config without method and num-clients.
        """
        self.data, self.info, self.draw = data, info, network
        params: Mapping[str, type]
        if isinstance(method, Method):
            name, self.method, params = method.name, method, {**METHOD_PARAMS, method.name: method.params}
        else:
            name, self.method, params = method, METHODS[method], METHOD_PARAMS
        self.config = parse({**keys, "method": name, "num-clients": len(data)}, params)
        self.method.check(self.config)
        module = self.module()
        self.layout, self.initial = Layout.of(module), weights.read(module)
        self.shared = self.method.travelling(self.config, self.layout)
        self._directory = tempfile.TemporaryDirectory() if folder is None else None
        run_folder = RunFolder(Path(self._directory.name) if self._directory else folder or Path(), "test")
        self.server: Any = self.method.server(self.config, self.layout, self.initial, self.shared, run_folder)
        self.states = [StoredState() for _ in data]
        self.rounds = 0
        self.latest = self.turn(0)
        self.server.begin(self.latest)

    def module(self) -> nn.Module:
        """Return the network that is trained."""
        return self.method.around(ModelFactory(self.drawn, self.info.input_shape, self.config.seed), self.config)

    def drawn(self, k: int) -> nn.Module:
        """Return the k-th random initialization of the model, the same on every call."""
        module = self.draw()
        with torch.no_grad():
            for parameter in module.parameters() if k else []:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(k)), alpha=0.3)
        return module

    def context(self, client_id: int, round: int = 0) -> tuple[RoundContext[Any], Model]:
        """Return a client's context in a round (default: the last one), and the model it receives."""
        x, y = self.data[client_id]
        round = round or self.rounds
        trainer = LocalTrainer(self.module(), self.config, ClientData(x, y, x, y, self.info), round, client_id)
        download = self.server.download_for(
            client_id, self.latest if round == self.rounds else self.turn(round), "train"
        )
        ctx = RoundContext(
            self.config,
            self.config.params,
            round,
            client_id,
            self.layout,
            self.shared,
            lambda: self.initial,
            trainer,
            len(y),
            download.extras,
        )
        return ctx, download.model

    def turn(self, round: int) -> Turn:
        """Return a round as the server half sees it."""
        return Turn(self.config, round, declared=dict(self.declared))

    @property
    def declared(self) -> dict[int, dict[str, Scalar]]:
        """Facts about its data that each client sends when it connects, by client id."""
        classes = self.info.num_classes
        counts = (",".join(map(str, np.bincount(y, minlength=classes))) for _, y in self.data)
        return {i: {"num-classes": classes, "class-counts": told} for i, told in enumerate(counts)}

    def upload(self, client_id: int, trained: Model | None = None) -> Upload:
        """Return one client's upload of the current round. trained: replaces the result of its training."""
        ctx, received = self.context(client_id)
        return local_round(self.method, ctx, received, self.states[client_id], trained)

    def round(
        self,
        W: ArrayLike | None = None,  # noqa: N803
        B: ArrayLike | None = None,  # noqa: N803
        *,
        ids: Iterable[int] | None = None,
    ) -> Uploads:
        """Run a round of the clients `ids` (default: all). Return a copy of the uploads, as the server received them.

        W: float32 [N, d], B: float32 [N, b], one row per client of the round: parameters and buffers that replace the
        results of training. Without W the clients train. Raises UserError for other shapes.
        """
        self.rounds += 1
        chosen = sorted(range(len(self.data)) if ids is None else ids)
        turn = self.latest = self.turn(self.rounds)
        turn.connected = chosen
        self.server.begin(turn)
        trained = self._trained(W, B, len(chosen))
        self.server.sample_clients(self.server.state, chosen, turn)
        protocol, buffer = PlainRounds(self.server), UploadBuffer.of(chosen, self.server.form(self.server.state, turn))
        protocol.turn = turn
        for i, model in zip(chosen, trained, strict=True):
            upload = self.upload(i, model)
            buffer.add(i, protocol.check(i, upload), upload.metrics)
        uploads = buffer.result()
        kept = uploads.rows(list(range(len(chosen))))
        turn.uploads = uploads
        before = self.server.state
        after = self.server.update(before, uploads, turn)
        for step in steps.after(self.config):
            after = step(before, after)
        self.server.state = dataclasses.replace(after, round=self.rounds)
        return kept

    def evaluated(self, client_id: int) -> Model:
        """Return the model that a client would be evaluated with at this point."""
        ctx, received = self.context(client_id)
        update, state = self.method.local_update(), StoredState(dict(self.states[client_id].arrays))
        return update.personal(update.merge(received, state, ctx), state, ctx)

    @property
    def models(self) -> NDArray[np.float32]:
        """Parameters of the models that all clients would be evaluated with at this point, float32 [N, d]."""
        return np.stack([self.evaluated(i).params for i in range(len(self.data))])

    def _trained(self, W: ArrayLike | None, B: ArrayLike | None, count: int) -> list[Model | None]:  # noqa: N803
        if W is None:
            return [None] * count
        params = np.array(W, np.float32)
        buffers = np.zeros((count, self.layout.b), np.float32) if B is None else np.array(B, np.float32)
        for name, stack, length in (("W", params, self.layout.d), ("B", buffers, self.layout.b)):
            if stack.shape != (count, length):
                raise UserError(
                    key=name, rule=f"must be [{count}, {length}], a row per client", value=list(stack.shape)
                )
        return [Model(p, b) for p, b in zip(params, buffers, strict=True)]


def federation(method: AnyMethod | str, clients: int = 3, d: int = 8, **keys: Any) -> Federation:
    """Return clients around a server with a model of d parameters (`Tiny`) and no buffers.

    method: a Method or a method's name. keys: run-config keys with _ for -, the method's own in a table of its name:
    `local_epochs=2, fedcac={"beta": 5}`. Raises UserError for a config that a run would refuse.
    """
    if clients < 1 or d < SMALLEST:
        raise UserError(f"a federation has at least 1 client and {SMALLEST} parameters, got clients={clients}, d={d}")
    width = d - SMALLEST + 1
    draw = np.random.default_rng(0)
    data = []
    for _ in range(clients):
        x = draw.normal(size=(SAMPLES, width)).astype(np.float32)
        data.append((x, (x[:, 0] > 0).astype(np.int64)))
    info = DatasetInfo(1, 0, ("no", "yes"), SAMPLES, SAMPLES, (0.0,) * width, (1.0,) * width, (width,))

    def network() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Tiny(d)

    return Federation(method, data, info, network, {**USUAL, **_flat(keys)})


def local_round(
    method: AnyMethod, context: RoundContext[Any], received: Model, state: StoredState, trained: Model | None = None
) -> Upload:
    """Return a client's upload of a round: all steps from download to upload, without the evaluations.

    trained: replaces the result of training.
    """
    update = method.local_update()
    start = update.merge(received, state, context)
    update.personal(start, state, context)
    if trained is None:
        trained = update.train(start, state, context)
    update.keep_local(trained, state, context)
    update.personal(trained, state, context)
    return update.upload(start, trained, state, context)


def _flat(keys: Mapping[str, Any]) -> dict[str, Scalar]:
    out: dict[str, Scalar] = {}
    for name, value in keys.items():
        kebab = name.replace("_", "-")
        if isinstance(value, Mapping):
            # a table has the method's name, and a user's own method may have _ in it
            table = kebab if kebab in METHOD_PARAMS else name
            out |= {f"{table}.{key.replace('_', '-')}": one for key, one in value.items()}
        else:
            out[kebab] = value
    return out
