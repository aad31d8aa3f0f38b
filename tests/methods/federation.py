"""A whole federation without messages: the server half, the clients' halves and what each remembers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.methods import local_round
from client_app.state import State
from client_app.trainer import LocalTrainer
from fl_app import weights
from fl_app.data import ClientData, DatasetInfo
from fl_app.keys import Scalar
from fl_app.layout import Layout, Model
from fl_app.server.run_folder import RunFolder
from fl_app.wire import Upload
from strategies import METHODS
from strategies.base import Drawings, RoundContext, Uploads
from strategies.base.uploads import Intake
from strategies.engine.attempt import Attempt
from tests.conftest import config
from tests.methods.one_client import samples, small

SMALL = {"batch_size": 4, "local_epochs": 2, "learning_rate": 0.1, "finetune_epochs": 0}


class Federation:
    """Clients with samples of their own, 2 x 2 pixels and 3 classes, around one server."""

    def __init__(
        self,
        folder: Path,
        method: str,
        *,
        sizes: Iterable[int] = (10, 6, 8),
        network: Callable[[], nn.Module] = small,
        **changes: Any,
    ) -> None:
        self.data = [samples(n, seed=i) for i, n in enumerate(sizes)]
        self.config = config(method=method, num_clients=len(self.data), **{**SMALL, **changes})
        self.method, self.draw = METHODS[method], network
        module = self.module()
        self.layout, self.initial = Layout.of(module), weights.read(module)
        self.shared = self.method.shared(self.layout, self.config.params)
        self.server: Any = self.method.strategy(
            self.config, self.config.params, self.layout, self.initial, self.shared, RunFolder(folder, "x")
        )
        self.states = [State() for _ in self.data]
        self.rounds = 0

    def module(self) -> nn.Module:
        """The network that is trained."""
        return self.method.around(Drawings(self.drawn, (1, 2, 2), self.config.seed), self.config)

    def drawn(self, k: int) -> nn.Module:
        """The k-th drawing of the model; the first is `one_client.small`'s."""
        module = self.draw()
        with torch.no_grad():
            for parameter in module.parameters() if k else []:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(k)), alpha=0.3)
        return module

    def context(self, client_id: int, round: int = 0) -> tuple[RoundContext[Any], Model]:
        """What a client is given, and the model it is sent."""
        x, y = self.data[client_id]
        info = DatasetInfo(1, 2, ("a", "b", "c"), len(y), len(y), (0.0,), (1.0,))
        round = round or self.rounds
        trainer = LocalTrainer(self.module(), self.config, ClientData(x, y, x, y, info), round, client_id)
        download = self.server.download_for(client_id, round, "train")
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

    @property
    def declared(self) -> dict[int, dict[str, Scalar]]:
        """What clients say of their data when they connect."""
        counts = (",".join(map(str, np.bincount(y, minlength=3))) for _, y in self.data)
        return {i: {"num-classes": 3, "class-counts": told} for i, told in enumerate(counts)}

    def upload(self, client_id: int) -> Upload:
        """One client's part of a round."""
        ctx, received = self.context(client_id)
        return local_round(self.method, ctx, received, self.states[client_id])

    def round(self, ids: Iterable[int] | None = None) -> Uploads:
        """Run a round; return what the server got, as it was before the server worked on it."""
        self.rounds += 1
        self.server.attempt = Attempt(self.rounds, declared=self.declared)
        chosen = sorted(range(len(self.data)) if ids is None else ids)
        self.server.sample(chosen, self.rounds)
        intake = Intake.of(chosen, self.server.expected())
        for i in chosen:
            upload = self.upload(i)
            self.server.check(upload)
            intake.accept(i, self.server.complete(i, upload), upload.metrics)
        uploads = intake.uploads()
        kept = uploads.rows(list(range(len(chosen))))
        self.server.round = self.rounds
        self.server.personalize(self.rounds, uploads)
        return kept

    def evaluated(self, client_id: int) -> Model:
        """The model a client would be evaluated with now."""
        ctx, received = self.context(client_id)
        update, state = self.method.local_update(), State(dict(self.states[client_id].arrays))
        return update.personal(update.merge(received, state, ctx), state, ctx)


def close(a: np.ndarray, b: np.ndarray, atol: float = 1e-6) -> None:
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)
